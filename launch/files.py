"""Opens whatever the toolkit writes, and never writes through a link. ``errors.open_file`` opens
what it reads.

A folder may come from somebody else, or be shared with them, and a link within it could lead to any
file of the user. So could a second name of such a file (a hard link): a file with two names isn't
changed, but replaced by a copy. The path to the folder may have links: they are the user's own.
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

from errors import InputError

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LINK = "it is a link, and links aren't written to"
# Bytes of a name that are kept in its temporary name, which has at most 255 in all.
_LONGEST = 200
# The temporary paths of what this process is writing. A signal that ends the process removes them.
_unfinished: set[Path | None] = set()
_TEMPORARY = re.compile(r"\.(.+)\.([0-9]{1,7})\.[0-9a-f]{8}", re.DOTALL)
# the temporary names of releases before 1.0
_EARLIER_TEMPORARY = re.compile(r"\.(.+)\.([0-9]{1,7})", re.DOTALL)
# Linux's limit on a process's number
_MOST_PROCESSES = 1 << 22


def unfinished_path(path: Path) -> Path:
    """Returns a temporary path for a file or folder until it is complete: beside ``path``, hidden,
    and with a random part that nobody can guess.
    """
    name = os.fsdecode(os.fsencode(path.name)[:_LONGEST])
    return path.with_name(f".{name}.{os.getpid()}.{os.urandom(4).hex()}")


def unused_path(path: Path) -> Path:
    """Returns ``path``, or if it exists already, the first of ``path-1``, ``path-2`` and so on that
    doesn't.
    """
    unused = path
    for number in itertools.count(1):
        if not os.path.lexists(unused):
            break
        unused = path.with_name(f"{path.name}-{number}")
    return unused


def leftovers(folder: Path, earlier: bool = False) -> Iterator[tuple[Path, str]]:
    """Yields the temporary paths that ended processes of this machine left in a folder, each with
    the name that the complete file would have had.

    Args:
        earlier: whether those of releases before 1.0 count, too. Their names had no random part, so
            whoever removes one has to check its content first.
    """
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        match = _TEMPORARY.fullmatch(name)
        if not match and earlier:
            match = _EARLIER_TEMPORARY.fullmatch(name)
        if match and _has_ended(int(match[2])):
            yield folder / name, match[1]


def _has_ended(process: int) -> bool:
    """Returns whether a process has ended, so that its files are left over.

    A number that no process can have belongs to no temporary name of ours. This process's own
    number counts as ended: an earlier process had it, perhaps before a restart of the container.
    """
    if process > _MOST_PROCESSES:
        return False
    return process == os.getpid() or not os.path.exists(f"/proc/{process}")


def obstacle(path: Path) -> OSError | None:
    """Returns the error that says why ``path`` can't be written; None if it can."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return _obstacle(mode, path)


def _obstacle(mode: int, path: Path) -> OSError | None:
    if stat.S_ISLNK(mode):
        return OSError(errno.ELOOP, _LINK, str(path))
    if stat.S_ISDIR(mode):
        return OSError(errno.EISDIR, "it is a folder, expected a file", str(path))
    if not stat.S_ISREG(mode):
        return OSError(errno.ENXIO, "it isn't a regular file", str(path))
    return None


def check_new_folder(output: Path) -> None:
    """Raises InputError if -output can't become a new folder: something is there that isn't an empty
    folder, or the folder around it can't be written to.
    """
    if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(f"-output {output} exists and isn't an empty folder; choose another")
    parent = output.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"-output {output}: {parent} isn't a writable folder; choose another")


def refuse_links(folder: Path, names: str) -> None:
    """Raises OSError if an entry of a folder is a link: what is written into it would go elsewhere.

    Args:
        names: a pattern for the names of the entries that count.
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
        signed: a pattern for the content of a lock that a process has signed. A file with another
            content is never overwritten.

    Raises:
        OSError: it is a link, a folder or no regular file, or holds something else.
    """
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    content = os.pread(descriptor, 1000, 0)
    if not re.fullmatch(signed, content) and (content or os.fstat(descriptor).st_nlink > 1):
        os.close(descriptor)
        raise OSError(errno.EEXIST, "it belongs to another program, and isn't a lock", str(path))
    return descriptor


def open_to_append(path: Path) -> IO[str]:
    """Opens a text file to append lines. One that has a second name (a hard link) is replaced by a
    copy first.

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
    # The file may have been replaced since the check, so what was opened is checked again.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if problem := _obstacle(os.fstat(descriptor).st_mode, path):
        os.close(descriptor)
        raise problem
    return descriptor


@contextlib.contextmanager
def writing_whole(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a temporary file that replaces ``path`` if the body ends without an error. So ``path``
    is never half written.

    Raises:
        OSError: ``path`` is a link, a folder or no regular file, or the disk is full, say.
    """
    temporary = unfinished_path(path)
    try:
        if problem := obstacle(path):
            raise problem
        # A descriptor: the folder may be renamed or replaced while the file is written.
        folder = os.open(path.parent, _OPEN_FOLDER)
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
        # An error of ``write`` names no file, and one of ``open`` names the temporary one.
        error.filename = str(path)
        raise
    finally:
        # If this fails, because the disk has become read-only for example, the first error is
        # raised.
        with contextlib.suppress(OSError):
            os.unlink(temporary.name, dir_fd=folder)
        _unfinished.discard(temporary)
        os.close(folder)


def begin_folder(path: Path) -> Path:
    """Makes a temporary folder, which ``making_folder`` later renames to ``path``. If a signal ends
    this process before, the folder is removed.
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

    Whoever writes files into it has to sync them. If ``path`` is an empty folder, it is replaced.

    Args:
        begun: the folder that ``begin_folder`` has made, which may have been moved since; None: a
            new one is made.
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
    # The start of a program, which imports this module, doesn't need it.
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
    """Has a signal that ends this process remove ``path``, a new file or folder that another
    process writes for it.
    """
    _unfinished.add(path)
    try:
        yield
    finally:
        _unfinished.discard(path)


@contextlib.contextmanager
def making_mark(folder: Path) -> Iterator[Path]:
    """Yields a new empty file in a folder, by which another process can check that it sees the same
    folder. It is removed afterwards.
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
    """Syncs a directory, so that new names and renames in it survive a crash of the machine."""
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
    """Removes a file or a folder that this program made, if it exists; of a link, only the link."""
    if path:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
