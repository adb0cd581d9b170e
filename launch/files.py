"""What the toolkit writes is opened here, as ``errors.open_file`` opens what it reads. Nothing goes
through a link.

A folder may come from a stranger, or be shared with one, and a link within it could lead to any
file of the user. So could a second name of such a file (a hard link): a file with two names isn't
changed, but replaced by a copy. The way to the folder may have links: they are the user's own.
"""

import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LINK = "it is a link, through which nothing is written"
_LONGEST = 200  # bytes of a name's beginning: with what is added to it, it has at most 255
# What this process writes at this moment, by the path until it is whole. After a signal it is
# removed.
_unfinished: set[Path | None] = set()
_LEFT = re.compile(r"\.(.+)\.([0-9]{1,7})\.[0-9a-f]{8}", re.DOTALL)
_LEFT_EARLIER = re.compile(r"\.(.+)\.([0-9]{1,7})", re.DOTALL)  # by releases before 1.0
_MOST_PROCESSES = 1 << 22  # Linux's limit on a process's number


def unfinished_path(path: Path) -> Path:
    """Returns a path for a file or folder until it is complete: hidden, beside ``path``, and not to
    be guessed.
    """
    name = os.fsdecode(os.fsencode(path.name)[:_LONGEST])
    return path.with_name(f".{name}.{os.getpid()}.{os.urandom(4).hex()}")


def unused_path(path: Path) -> Path:
    """Returns ``path``, or where that is there already, the first of ``path-1``, ``path-2`` and so
    on that isn't.
    """
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    )
    return next(found for found in names if not os.path.lexists(found))


def leftovers(folder: Path, earlier: bool = False) -> Iterator[tuple[Path, str]]:
    """Yields what processes of this machine began in a folder and left, each with the name that it
    would have had.

    Args:
        earlier: of earlier releases, too, whose names had no random part: whoever removes one looks
            at its content.
    """
    with os.scandir(folder) as entries:
        found = sorted(entry.name for entry in entries)
    for name in found:
        matched = _LEFT.fullmatch(name) or (earlier and _LEFT_EARLIER.fullmatch(name))
        if matched and _is_gone(int(matched[2])):
            yield folder / name, matched[1]


def _is_gone(process: int) -> bool:
    if process > _MOST_PROCESSES:
        return False
    return process == os.getpid() or not os.path.exists(f"/proc/{process}")


def obstacle(path: Path) -> OSError | None:
    """Returns the error that says why ``path`` isn't written; None: nothing stands against it."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return _obstacle(found, path)


def _obstacle(found: os.stat_result, path: Path) -> OSError | None:
    if stat.S_ISLNK(found.st_mode):
        return OSError(errno.ELOOP, _LINK, str(path))
    if stat.S_ISDIR(found.st_mode):
        return OSError(errno.EISDIR, "it is a folder, expected a file", str(path))
    if not stat.S_ISREG(found.st_mode):
        return OSError(errno.ENXIO, "it is no regular file", str(path))
    return None


def refuse_links(folder: Path, names: str) -> None:
    """Raises OSError where an entry of a folder is a link: what is written into that would go
    elsewhere.

    Args:
        names: a pattern of the entries that count.
    """
    with os.scandir(folder) as entries:
        links = sorted(
            entry.path
            for entry in entries
            if entry.is_symlink() and re.fullmatch(names, entry.name)
        )
    if links:
        raise OSError(errno.ELOOP, _LINK, links[0])


def open_lock(path: Path, signed: bytes) -> int:
    """Opens the file that processes lock, or makes it; returns its descriptor, for reading and
    writing.

    Args:
        signed: a pattern of what such a file holds once a process has signed it. Nothing else is
            overwritten.

    Raises:
        OSError: it is a link, a folder or no regular file, or holds something else.
    """
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    content = os.pread(descriptor, 1000, 0)
    if not re.fullmatch(signed, content) and (content or os.fstat(descriptor).st_nlink > 1):
        os.close(descriptor)
        raise OSError(errno.EEXIST, "it is another program's file, no lock", str(path))
    return descriptor


def open_to_append(path: Path) -> IO[str]:
    """Opens a file of text whose lines are added at its end. One that has a second name is replaced
    by a copy.

    Raises:
        OSError: it is a link, a folder or no regular file.
    """
    descriptor = _open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    if os.fstat(descriptor).st_nlink > 1:
        with open(descriptor, "rb") as shared, writing_whole(path, "wb") as copy:
            shutil.copyfileobj(shared, copy)
        descriptor = _open(path, os.O_RDWR | os.O_APPEND)
    return open(descriptor, "a", encoding="utf-8")


def _open(path: Path, flags: int) -> int:
    if problem := obstacle(path):
        raise problem
    # What was looked at may have been replaced meanwhile.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if problem := _obstacle(os.fstat(descriptor), path):
        os.close(descriptor)
        raise problem
    return descriptor


@contextlib.contextmanager
def writing_whole(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a file that replaces ``path`` only if the body ends without an error. So ``path`` is
    never half written.

    Raises:
        OSError: ``path`` is a link, a folder or no regular file, or the disk is full, say.
    """
    temporary = unfinished_path(path)
    try:
        if problem := obstacle(path):
            raise problem
        folder = os.open(path.parent, _FOLDER)
    except OSError as error:
        error.filename = str(path)
        raise
    _unfinished.add(temporary)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary.name, flags, 0o666, dir_fd=folder)
        with open(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except OSError as error:
        # An error of write names no file, and one of open names the temporary one.
        error.filename = str(path)
        raise
    finally:
        # The disk may have become read-only: the first error counts.
        with contextlib.suppress(OSError):
            os.unlink(temporary.name, dir_fd=folder)
        _unfinished.discard(temporary)
        os.close(folder)


def begin_folder(path: Path) -> Path:
    """Makes the folder that ``making_folder`` then takes for ``path``. It is removed if this
    process ends before.
    """
    temporary = unfinished_path(path)
    _unfinished.add(temporary)
    try:
        temporary.mkdir(parents=True)
    except OSError:
        _unfinished.discard(temporary)
        raise
    return temporary


@contextlib.contextmanager
def making_folder(path: Path, begun: Path | None = None) -> Iterator[Path]:
    """Yields a new folder that becomes ``path`` if the body ends without an error, and is removed
    otherwise.

    Files within it are synced by their writers. An empty folder in the place of ``path`` is
    replaced.

    Args:
        begun: the folder, if ``begin_folder`` has made it; it may have been moved since.
    """
    temporary = begun or begin_folder(path)
    _unfinished.add(temporary)
    try:
        yield temporary
        sync_directory(temporary)
        os.rename(temporary, path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _unfinished.discard(temporary)


@contextlib.contextmanager
def temporary_folder(parent: Path | str | None = None) -> Iterator[Path]:
    """Yields a new folder, which is removed when the body ends, or when a signal ends this process.

    Args:
        parent: where it is made; None: where this system keeps temporary files.
    """
    import tempfile

    path = unfinished_path(Path(parent or tempfile.gettempdir()) / "toolkit")
    with removing_if_stopped(path):
        path.mkdir(0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def removing_if_stopped(path: Path | None) -> Iterator[None]:
    """Has a signal that ends this process remove ``path`` before: another process writes it, and it
    wasn't there.
    """
    _unfinished.add(path)
    try:
        yield
    finally:
        _unfinished.discard(path)


@contextlib.contextmanager
def making_mark(folder: Path) -> Iterator[Path]:
    """Yields a new empty file in a folder, by which another process sees that it is the same
    folder; removes it.
    """
    mark = unfinished_path(folder / "mark")
    _unfinished.add(mark)
    try:
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        yield mark
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()
        _unfinished.discard(mark)


def sync_directory(path: Path) -> None:
    """Makes changes of names in a directory, such as a rename, survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished() -> None:
    """Removes what this process has begun to write."""
    for path in list(_unfinished):
        remove(path)


def remove(path: Path | None) -> None:
    """Removes a file or a folder that this program made, if it is there; of a link, itself."""
    if path:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
