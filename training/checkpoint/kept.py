"""Checkpoints that are kept to replay a step, which KEEP_LAST would remove, and what lies beside them.

``bad_steps/step_7/epoch_0003`` in a run's folder has the files of the newest checkpoint before step 7
by a second name (a hard link). So they take no space while the checkpoint itself is there, and no
time. No file of a checkpoint is ever changed. ``bad_steps/step_7_rank0.npz`` is a rank's batch.
"""

import contextlib
import errno
import os
import re
from collections.abc import Collection
from pathlib import Path

from errors import InputError
from launch.files import leftovers, making_folder, remove, sync_directory
from training.bad_steps import FOLDER
from training.checkpoint import storage
from training.checkpoint.state import read_state

_STEP = re.compile(r"step_([0-9]+)")
_BATCH = re.compile(r"step_([0-9]+)_rank[0-9]+\.npz")


def keep_checkpoint(run: Path, checkpoints: Path, step: int) -> None:
    """Keeps the newest checkpoint before a step.

    Nothing is kept before the first checkpoint, or where a file can't have a second name. Then a
    replay starts from an earlier checkpoint, or from the beginning.

    Args:
        run: the run's folder.
        checkpoints: the folder of its checkpoints.
        step: the number of the step, from 1.
    """
    folder = run / FOLDER / f"step_{step}"
    with contextlib.suppress(OSError):
        _remove(folder)
        # The thread that saves may just be replacing the only checkpoint. Then there is another one.
        if not _keep_newest(checkpoints, step, folder):
            _keep_newest(checkpoints, step, folder)


def _keep_newest(checkpoints: Path, step: int, folder: Path) -> bool:
    """Keeps the newest checkpoint before a step in ``folder``; returns whether there was one."""
    for checkpoint in reversed(storage.find_checkpoints(checkpoints)):
        # It may be damaged, or the thread that saves may be removing it.
        with contextlib.suppress(InputError, FileNotFoundError):
            if read_state(checkpoint)["step"] < step:
                _link(checkpoint, folder)
                return True
    return False


def _link(checkpoint: Path, folder: Path) -> None:
    """Makes ``folder`` with a folder of the checkpoint's name, in which its files are, too."""
    if folder.parent.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, expected a folder", str(folder.parent))
    with making_folder(folder) as temporary:
        kept = temporary / checkpoint.name
        kept.mkdir()
        for name in filter(storage.is_file_name, os.listdir(checkpoint)):
            os.link(checkpoint / name, kept / name, follow_symlinks=False)
        sync_directory(kept)


def kept_checkpoints(run: Path, steps: Collection[int]) -> list[Path]:
    """Returns the checkpoints that were kept for these steps."""
    found = []
    for step in steps:
        found += storage.find_checkpoints(run / FOLDER / f"step_{step}")
    return found


def remove_kept(run: Path, steps: Collection[int]) -> None:
    """Removes what was kept for other steps than these, and what a killed run has left.

    What no run has made stays.
    """
    folder = run / FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return
    with contextlib.suppress(OSError):
        for path, name in leftovers(folder):
            if _STEP.fullmatch(name):
                _remove(path)
            elif _BATCH.fullmatch(name):
                remove(path)
        for path in list(folder.iterdir()):
            if (match := _STEP.fullmatch(path.name)) and int(match[1]) not in steps:
                _remove(path)
            elif (match := _BATCH.fullmatch(path.name)) and int(match[1]) not in steps:
                remove(path)
        if not os.listdir(folder):
            folder.rmdir()


def _remove(folder: Path) -> None:
    """Removes the folder of a step, unless it holds anything else than checkpoints."""
    if folder.is_symlink() or not folder.is_dir():
        return
    storage.remove_leftovers(folder)
    for checkpoint in storage.find_checkpoints(folder):
        storage.remove_checkpoint(checkpoint)
    if not os.listdir(folder):
        folder.rmdir()
