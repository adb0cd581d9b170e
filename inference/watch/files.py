"""Opens the files of runs below a folder, whatever else lies there. No link is followed."""

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

# How deep runs may lie below the folder: sweeps and cross-validations have folders of runs.
_DEEPEST = 3
# The most folders that are looked at, and the most runs that are shown.
_MOST_FOLDERS = 20_000
MOST_RUNS = 500
# A run's folder has config.yaml and one of the others.
_CONFIG = "config.yaml"
_OTHERS = {"log.txt", "metrics.jsonl", "result.json"}
# Linux's ``struct flock``: type, whence, start, length, process.
_FLOCK = "hhqqi4x"
# The names in a folder, from the shown folder to a run's; () is the shown folder itself.
Parts = tuple[str, ...]


class Files:
    """The files of runs below a folder.

    Args:
        root: the folder. The path to it may have links, because it is the user's own.

    Attributes:
        all_found: whether ``runs`` has looked at all folders.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.all_found = True

    def runs(self) -> Iterator[Parts]:
        """Yields the runs' folders, up to MOST_RUNS of them, the last names first."""
        waiting: list[Parts] = [()]
        looked_at = 0
        found = 0
        while waiting and looked_at < _MOST_FOLDERS and found < MOST_RUNS:
            parts = waiting.pop()
            looked_at += 1
            files: set[str] = set()
            folders: list[str] = []
            with (
                contextlib.suppress(OSError),
                self._folder(parts) as folder,
                os.scandir(folder) as entries,
            ):
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        files.add(entry.name)
            if _CONFIG in files and files & _OTHERS:
                found += 1
                yield parts
            elif len(parts) < _DEEPEST:
                visible = [name for name in folders if not name.startswith(".")]
                # The last one is looked at first. Names of runs end with their time.
                waiting += [(*parts, name) for name in sorted(visible)[-_MOST_FOLDERS:]]
        self.all_found = not waiting

    def status(self, parts: Parts, names: tuple[str, ...]) -> dict[str, os.stat_result]:
        """Returns the status of the regular files of these names in a run's folder."""
        found = {}
        with contextlib.suppress(OSError), self._folder(parts) as folder:
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found[name] = status
        return found

    @contextlib.contextmanager
    def opened(self, parts: Parts, name: str) -> Iterator[BufferedReader]:
        """Opens a regular file of a run's folder.

        Raises:
            OSError: there is none of this name, or it or a folder on the way is a link.
        """
        with self._folder(parts) as folder:
            # Without O_NONBLOCK, this would wait at a pipe.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=folder)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{name} isn't a regular file")
            yield file

    def is_locked(self, parts: Parts, name: str) -> bool:
        """Returns whether a process holds a lock on a file. The lock itself isn't touched."""
        with contextlib.suppress(OSError), self.opened(parts, name) as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
            return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK
        return False

    @contextlib.contextmanager
    def _folder(self, parts: Parts) -> Iterator[int]:
        """Opens a folder below the root; yields its descriptor."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        folder = os.open(self.root, flags)
        try:
            for part in parts:
                inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)
