"""The paths of the compiled libraries."""

import hashlib
import os
from pathlib import Path

import paddle

_HERE = Path(__file__).resolve().parent


def sources_and_headers() -> list[Path]:
    """Returns the operators' C++ files, in order of their names; those of ``ops.images`` are a
    library of their own.
    """
    return sorted(
        path for path in (*_HERE.glob("*.cc"), *_HERE.glob("*.h")) if path.stem != "images"
    )


def library_folder(name: str) -> Path:
    """Returns the folder in which a library of that name is, or would be.

    It is beside the sources. Where this user can't write there (site-packages, say), it is in the
    user's cache.
    """
    beside = _HERE / "built" / name
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # a user without a home
    if beside.is_dir() or os.access(_HERE, os.W_OK) or not os.path.isabs(cache):
        return beside
    return Path(cache, "paddle_vit_toolkit", name)


def library() -> Path:
    """Returns where the compiled operators of these sources and this Paddle are, or would be."""
    sources = b"".join(path.read_bytes() for path in (_HERE / "build.py", *sources_and_headers()))
    return (
        library_folder(f"{paddle.__version__}-{hashlib.sha256(sources).hexdigest()[:12]}")
        / "vit_ops.so"
    )
