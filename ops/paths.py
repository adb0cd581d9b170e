"""The paths of the compiled libraries, in the user's cache:
``~/.cache/paddle-vit-toolkit/ops/NAME/``, or below XDG_CACHE_HOME.

All installations of this user share them. A library is code, so one that another user could have
written isn't loaded.
"""

import contextlib
import hashlib
import os
import platform
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

import paddle
from paddle import version

_HERE = Path(__file__).resolve().parent
# The folders that the toolkit makes: the library's own, and those around it.
_DEPTH = 3


def sources_and_headers() -> list[Path]:
    """Returns the operators' C++ files, in order of their names; those of ``ops.images`` are a
    library of their own.
    """
    return sorted(
        path for path in (*_HERE.glob("*.cc"), *_HERE.glob("*.h")) if path.stem != "images"
    )


def library_folder(name: str, made_of: Iterable[bytes]) -> Path:
    """Returns the folder in which a library is, or would be: ``name`` with a hash of all that has to
    be the same where it is loaded.

    The CPU isn't part of it: each function is compiled for several instruction sets, and the one
    that fits is chosen when it is loaded. The compiler isn't, either: to load a library needs none.

    Args:
        made_of: the sources and flags. The hash adds the system's architecture and C library,
            because machines can share a home.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says to ignore a relative path: it would be found in whatever folder a program
    # starts.
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    system = " ".join((platform.machine(), *platform.libc_ver()))
    digest = hashlib.sha256(b"".join((system.encode(), *made_of))).hexdigest()
    return Path(cache, "paddle-vit-toolkit", "ops", f"{name}-{digest[:12]}")


def library() -> Path:
    """Returns where the compiled operators of these sources and this Paddle are, or would be."""
    # Two builds of Paddle can have the same version. Its headers include Python's.
    builds = (version.full_version, version.commit, version.cuda(), sys.version_info[:2])
    sources = (path.read_bytes() for path in (_HERE / "build.py", *sources_and_headers()))
    folder = library_folder(paddle.__version__, (repr(builds).encode(), *sources))
    return folder / "vit_ops.so"


def is_built(library: Path) -> bool:
    """Returns whether a library is there and may be loaded."""
    return library.is_file() and not why_unsafe(library)


def why_unsafe(library: Path) -> str:
    """Returns why a library's path isn't safe: another user, except root, owns it or one of the
    folders that the toolkit made for it, or may write there; or the path is relative. Returns "" if
    it is safe.
    """
    if not library.is_absolute():
        return "this user has no home"
    for path in (library, *list(library.parents)[:_DEPTH]):
        try:
            status = os.stat(path)
        except OSError:
            # What doesn't exist isn't unsafe.
            continue
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"other users may write to {path}"
    return ""


def mark_as_used(library: Path) -> None:
    """Notes that a library was used now: those that weren't for the longest time are removed."""
    # It may be another user's, or on a read-only disk.
    with contextlib.suppress(OSError):
        os.utime(library)
