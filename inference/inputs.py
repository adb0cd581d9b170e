"""Turns the arguments of a command line into the paths of images, in their order."""

import contextlib
import glob
import io
import itertools
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from errors import Allowance, InputError, RunError, Unreadable, open_file, printable, reading
from loading.class_names import read_class_names
from loading.files import Paths, text_lines
from loading.label_spaces import imagenet_names
from loading.layout import IMAGE_SUFFIXES, is_leftover, skipped_text
from loading.remote import is_url
from loading.sources import images_below
from loading.transforms import video

STDIN = "-"
LIST = ".txt"
# The bytes of a list of paths.
_LARGEST = 1 << 28
# The bytes of memory that a path takes besides its own bytes.
_PATH_OVERHEAD = 20


def paths_of(
    arguments: Sequence[str],
    stdin: IO[bytes] | None = None,
    urls: bool = False,
    every: float | None = None,
) -> Paths:
    """Returns the paths that arguments stand for, in the order of the arguments.

    An argument is one of these:

    - the file of an image
    - a folder: the images at any depth below it, sorted; links to folders aren't followed
    - a pattern with ``*``, ``?`` or ``[``, as in a shell; ``**`` stands for folders at any depth
    - a list of paths, which ends in .txt
    - ``-``: a list on standard input
    - with ``urls``, the URL of an image
    - with ``every``, a video, which stands for its frames: "clip.mp4#12.0"

    A list has a path on each line, which is taken unchanged. Relative paths start at the current
    folder. If the list contains a NUL, paths end with NULs instead (``find -print0``).

    Of folders and patterns, hidden entries and leftovers of systems are skipped
    (``layout.is_leftover``). A line on standard error says how many.

    Args:
        stdin: where ``-`` is read from; None: ``-`` isn't accepted.
        urls: whether URLs are accepted. They aren't where paths are stored.
        every: the seconds of a video that one frame stands for; None: videos aren't accepted.

    Raises:
        InputError: an argument stands for nothing, or can't be read. The images themselves aren't
            opened here.
    """
    skipped: list[str] = []
    named = itertools.chain.from_iterable(
        [argument] if is_url(argument) else _paths_of_one(argument, stdin, skipped)
        for argument in arguments
    )
    if not urls:
        named = _without_urls(named)
    if every is not None:
        named = _with_frames(named, every)
    paths = Paths(named)
    if skipped:
        print(skipped_text(skipped), file=sys.stderr)
    if not len(paths):
        raise InputError(
            "no image files found in the lists, or in the folders that the patterns match"
        )
    return paths


def _without_urls(paths: Iterable[str | bytes]) -> Iterator[str | bytes]:
    """Yields paths; raises InputError at a URL."""
    for path in paths:
        if is_url(path):
            raise InputError(
                f"'{printable(os.fsdecode(path))}': only files are accepted here; download it first"
            )
        yield path


def _with_frames(paths: Iterable[str | bytes], every: float) -> Iterator[str | bytes]:
    """Yields paths, and of each video its frames instead."""
    for path in paths:
        if video.is_video(os.fsdecode(path)):
            yield from _frames(os.fsdecode(path), every)
        else:
            yield path


def _frames(path: str, every: float) -> Iterator[str]:
    """Yields the names of a video's frames. One that can't be read has one, which gets the error."""
    if is_url(path) or not os.path.isfile(path):
        yield path
        return
    video.check_installed()
    try:
        times = video.frame_times(path, every)
    except (Unreadable, OSError, RunError):
        times = [0.0]
    for seconds in times:
        yield video.frame_name(path, seconds)


def _paths_of_one(
    argument: str, stdin: IO[bytes] | None, skipped: list[str]
) -> Iterable[str | bytes]:
    """Returns the paths that an argument stands for. ``skipped`` gets those that are left out."""
    if argument == STDIN:
        return _in_stdin(stdin)
    # A file may have a name that is also a pattern.
    if not os.path.lexists(argument):
        return _in_pattern(argument, skipped)
    if os.path.isdir(argument):
        return _in_named_folder(argument, skipped)
    return _in_file(argument)


def _in_file(path: str) -> Iterable[str | bytes]:
    return _in_list(path) if path.lower().endswith(LIST) else [path]


def _in_pattern(pattern: str, skipped: list[str]) -> Iterable[str | bytes]:
    if "://" in pattern:
        raise InputError(
            f"'{printable(pattern)}': expected an http or https address, or a file or folder"
        )
    if not glob.has_magic(pattern):
        raise InputError(f"'{printable(pattern)}': there is no such file or folder")
    matches = _matches(pattern, skipped)
    if not matches:
        note = f"; {skipped_text(skipped)}" if skipped else ""
        raise InputError(f"'{printable(pattern)}': no matching files{note}")
    # A folder that matches may be empty, unlike one that is named.
    return itertools.chain.from_iterable(
        _in_folder(match, skipped) if os.path.isdir(match) else _in_file(match) for match in matches
    )


def _in_named_folder(folder: str, skipped: list[str]) -> Iterator[str]:
    """Yields the images of a folder, which has to have one."""
    is_empty = True
    for path in _in_folder(folder, skipped):
        is_empty = False
        yield path
    if is_empty:
        raise InputError(
            f"{printable(folder)}: no image files found; images end in {' '.join(IMAGE_SUFFIXES)}"
        )


def _in_folder(folder: str, skipped: list[str]) -> Iterator[str]:
    def skip(paths: Iterable[str]) -> None:
        skipped.extend(os.path.join(folder, path) for path in paths)

    with reading(printable(folder), "a folder of images"):
        for path in images_below(Path(folder), ".", skip):
            yield os.path.join(folder, path)


def _matches(pattern: str, skipped: list[str]) -> list[str]:
    """Returns the files and folders that match a pattern, sorted."""
    with reading(f"'{printable(pattern)}'", "a pattern of paths"):
        if "**" in pattern.split("/"):
            return _matches_at_any_depth(pattern, skipped)
        # A part without a wildcard, or one that begins with a dot, names leftovers on purpose.
        is_wild = [
            glob.has_magic(part) and not part.startswith(".")
            for part in filter(None, pattern.split("/"))
        ]
        matches = []
        for path in sorted(glob.glob(pattern)):
            wild_parts = itertools.compress(filter(None, path.split("/")), is_wild)
            if any(map(is_leftover, wild_parts)):
                skipped.append(path)
            else:
                matches.append(path)
        return matches


def _matches_at_any_depth(pattern: str, skipped: list[str]) -> list[str]:
    """Returns the files that match a pattern with ``**``, sorted.

    glob.glob would follow links to folders: two links that lead to their own folder make 2 to the
    power of 40 folders. pathlib's doesn't follow them.
    """
    parts = pattern.split("/")
    plain = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    wild = parts[len(plain) :]
    # Before Python 3.13, pathlib's ** at the end matches folders alone.
    if wild[-1] == "**":
        wild.append("*")
    root = "/".join(plain)
    # The pattern begins with "/", and its first folder has a wildcard.
    if plain and not root:
        root = "/"
    matches = []
    for path in sorted(Path(root).glob("/".join(wild)), key=str):
        if path.is_dir():
            continue
        if any(map(is_leftover, path.relative_to(root).parts)):
            skipped.append(str(path))
        else:
            matches.append(str(path))
    return matches


def _in_list(file: str) -> Iterator[bytes]:
    with reading(printable(file), "a list of paths"):
        with open_file(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > _LARGEST:
                raise Unreadable(f"it has {size} bytes, at most {_LARGEST} are allowed; split it")
            content = stream.read(_LARGEST)
        yield from _split(content)


def _in_stdin(stdin: IO[bytes] | None) -> Iterator[bytes]:
    if stdin is None:
        raise InputError(
            "-: several processes can't share the standard input; write the paths to a list.txt"
        )
    with reading("standard input", "a list of paths"):
        content = stdin.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise Unreadable(f"it has more than {_LARGEST} bytes; split it")
        yield from _split(content)


def _split(content: bytes) -> Iterator[bytes]:
    """Yields the paths of a list. Empty lines are skipped."""
    end = b"\0" if b"\0" in content else b"\n"
    allowance = Allowance(len(content))
    allowance.take(2 * len(content) + _PATH_OVERHEAD * content.count(end))
    for line in text_lines(io.BytesIO(content), end=end):
        if path := line.removesuffix(b"\r"):
            yield path


def check_output(output: Path | None, *read: Iterable[str]) -> None:
    """Raises InputError if ``output`` is one of the files that are read, and would be replaced."""
    if output is None or not output.exists():
        return
    for path in itertools.chain.from_iterable(read):
        with contextlib.suppress(OSError, ValueError):
            if output.samefile(path):
                raise InputError(
                    f"{printable(str(output))} is an input as well; choose another output"
                )


def class_names(path: str) -> list[str]:
    """Returns the names in a file, one a line, in the order of a model's outputs. For "imagenet1k"
    they are ImageNet's.

    Raises:
        InputError: see ``read_class_names``.
    """
    if path == "imagenet1k":
        return imagenet_names()
    return read_class_names(path)


def standard_input() -> IO[bytes] | None:
    """Returns this process's standard input; None if it is closed."""
    if not sys.stdin or stat.S_ISDIR(os.fstat(0).st_mode):
        return None
    return sys.stdin.buffer
