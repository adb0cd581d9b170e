"""Which images are asked about: words of a command line become paths, in order."""

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

from errors import Allowance, InputError, Unreadable, open_file, printable, reading
from loading.class_names import read_class_names
from loading.files import Paths, text_lines
from loading.label_spaces import imagenet_names
from loading.layout import IMAGE_SUFFIXES, is_leftover, skipped_text
from loading.sources import images_below

STDIN = "-"
LIST = ".txt"
_LARGEST = 1 << 28  # bytes of a list on standard input
_LISTED = 20  # bytes that a path takes besides its own


def paths_of(words: Sequence[str], stdin: IO[bytes] | None = None) -> Paths:
    """Returns the paths that words stand for, in the words' order.

    A word is one of these. An image's file. A folder: the images at any depth below it, sorted,
    without links to folders. A pattern with ``*``, ``?`` or ``[``, as a shell reads it (``**``:
    folders at any depth). A list of paths, which ends in .txt. Or ``-``: a list on standard input.
    A list has a path on each line, taken as it stands, from the current folder on. If it holds a
    NUL, NULs are between the paths (``find -print0``).

    Of folders and patterns, hidden entries and leftovers of systems are skipped
    (``layout.is_leftover``). A line on standard error says how many.

    Args:
        stdin: where ``-`` is read from; None: it may not be.

    Raises:
        InputError: a word stands for nothing, or can't be read. What is wrong with a path's file
            shows later.
    """
    skipped: list[str] = []
    found = Paths(
        itertools.chain.from_iterable(_files_of_word(word, stdin, skipped) for word in words)
    )
    if skipped:
        print(skipped_text(skipped), file=sys.stderr)
    if not len(found):
        raise InputError(
            "there are no images: the lists, or what the patterns match, hold no path of one"
        )
    return found


def _files_of_word(word: str, stdin: IO[bytes] | None, skipped: list[str]) -> Iterable[str | bytes]:
    if word == STDIN:
        return _from_stdin(stdin)
    if not os.path.lexists(word):
        if not glob.has_magic(word):
            raise InputError(f"'{printable(word)}': there is no such file or folder")
        matches = _matches(word, skipped)
        if not matches:
            note = f"; {skipped_text(skipped)}" if skipped else ""
            raise InputError(f"'{printable(word)}': no file has such a name{note}")
        return itertools.chain.from_iterable(_files_of_match(match, skipped) for match in matches)
    if os.path.isdir(word):
        return _images_in(word, skipped)
    return _in_list(word) if word.lower().endswith(LIST) else [word]


def _files_of_match(path: str, skipped: list[str]) -> Iterable[str | bytes]:
    """What a pattern's match stands for: of a folder without images nothing."""
    return _in_folder(path, skipped) if os.path.isdir(path) else _files_of_word(path, None, skipped)


def _images_in(word: str, skipped: list[str]) -> Iterator[str]:
    """A folder's images, of which there has to be one."""
    empty = True
    for path in _in_folder(word, skipped):
        empty = False
        yield path
    if empty:
        raise InputError(
            f"{printable(word)}: holds no image; images end in {' '.join(IMAGE_SUFFIXES)}"
        )


def _in_folder(word: str, skipped: list[str]) -> Iterator[str]:
    def skip(paths: Iterable[str]) -> None:
        skipped.extend(os.path.join(word, path) for path in paths)

    with reading(printable(word), "a folder of images"):
        for path in images_below(Path(word), ".", skip):
            yield os.path.join(word, path.removeprefix("./"))


def _matches(pattern: str, skipped: list[str]) -> list[str]:
    """Returns what a pattern matches, sorted. One with ``**`` matches files alone, and follows no
    links to folders.
    """
    with reading(f"'{printable(pattern)}'", "a pattern of paths"):
        parts = pattern.split("/")
        if "**" not in parts:
            found = sorted(glob.glob(pattern))
            # A part without a wildcard, or one that begins with a dot, names what it matches.
            is_wild = [
                glob.has_magic(part) and not part.startswith(".") for part in filter(None, parts)
            ]

            def is_skipped(path: str) -> bool:
                return any(
                    map(is_leftover, itertools.compress(filter(None, path.split("/")), is_wild))
                )

            skipped += filter(is_skipped, found)
            return [path for path in found if not is_skipped(path)]
        # glob.glob follows links to folders: two that lead to their own folder are 2 to the power
        # of 40 folders.
        plain = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts))
        rest = "/".join(parts[len(plain) :] + ["*"] * (parts[-1] == "**"))
        root = "/".join(plain) or ("/" if plain else "")
        found = [path for path in Path(root).glob(rest) if not path.is_dir()]
        left_out = {path for path in found if any(map(is_leftover, path.relative_to(root).parts))}
        skipped += sorted(map(str, left_out))
        return sorted(str(path) for path in found if path not in left_out)


def _in_list(word: str) -> Iterator[bytes]:
    with reading(printable(word), "a list of paths"):
        with open_file(word) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _LARGEST:
                raise Unreadable(f"it has {size} bytes, up to {_LARGEST} are read; split it")
            data = file.read(_LARGEST)
        yield from _split(data)


def _from_stdin(stdin: IO[bytes] | None) -> Iterator[bytes]:
    if stdin is None:
        raise InputError(
            "-: several processes have no standard input to share; write its paths into a list.txt"
        )
    with reading("standard input", "a list of paths"):
        data = stdin.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise Unreadable(f"it has more than {_LARGEST} bytes; split it")
        yield from _split(data)


def _split(data: bytes) -> Iterator[bytes]:
    """Yields the paths of a list; its empty lines are none."""
    end = b"\0" if b"\0" in data else b"\n"
    allowance = Allowance(len(data))
    allowance.take(2 * len(data) + _LISTED * data.count(end))
    for line in text_lines(io.BytesIO(data), end=end):
        if path := line.removesuffix(b"\r"):
            yield path


def check_output(output: Path | None, *read: Iterable[str]) -> None:
    """Raises InputError where ``output`` is a file that is read: it would be replaced."""
    if output is None or not output.exists():
        return
    for path in itertools.chain.from_iterable(read):
        with contextlib.suppress(OSError, ValueError):
            if output.samefile(path):
                raise InputError(
                    f"{printable(str(output))} would be read and written; choose another output"
                )


def class_names(path: str) -> list[str]:
    """Returns the names in a file, one a line, in the order of a model's outputs; of "imagenet1k"
    ImageNet's.

    Raises:
        InputError: as ``read_class_names``.
    """
    if path == "imagenet1k":
        return imagenet_names()
    return read_class_names(path)


def standard_input() -> IO[bytes] | None:
    """Returns this process's standard input; None where it is closed."""
    return sys.stdin.buffer if sys.stdin and not stat.S_ISDIR(os.fstat(0).st_mode) else None
