"""Checkpoints on the disk: folders that are whole or absent, with a SHA-256 of every file.

``epoch_0010`` is the state after epoch 10. ``epoch_0011_sample_000012800`` is the state within
epoch 11, when all processes together had taken 12,800 of its samples. A checkpoint holds:

- ``model.safetensors``: the weights, in timm's names and layout. With MODEL_EMA there is
  ``ema.safetensors``, too.
- ``optimizer.safetensors``: the moments by parameter.
- ``statistics.safetensors``: each rank's own batch norm statistics, within an epoch of several
  ranks.
- ``state.json``: how far the run is, and its configuration.
- ``SHA256SUMS``: which ``sha256sum -c`` reads.

If the optimizer's state is sharded, each rank writes its share,
``optimizer-00001-of-00004.safetensors`` and so on, and ``optimizer.safetensors.index.json`` says
which tensor is in which of them.

With TRAIN.ADAPTER ``adapter.safetensors`` (and ``adapter_ema.safetensors``) hold only what trains.
``unmerged.safetensors`` holds what a model's file has merged or left out.

``last`` and ``best`` are links to such folders, and ``best_ema.safetensors`` is one to the file of
the best average.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from errors import InputError, RunError, Unreadable, printable, reading
from launch.files import (
    begin_folder,
    leftovers,
    making_folder,
    making_mark,
    sync_directory,
    unfinished_path,
)
from settings.plain import Form, Rule, check_form, is_whole, parsed_json, whole_file
from settings.plain import is_name as is_text
from utils import all_gather, rank, world_size
from weights import find_weights, hub
from weights.formats import write_safetensors
from weights.hub import BEST, LAST
from weights.sums import LINE, SUMS, read_sums, sha256_of

STATE = "state.json"
MODEL = "model.safetensors"
EMA = "ema.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATISTICS = "statistics.safetensors"
ADAPTER = "adapter.safetensors"
ADAPTER_EMA = "adapter_ema.safetensors"
UNMERGED = "unmerged.safetensors"
# The index of a sharded optimizer's state: which tensor is in which share.
INDEX = OPTIMIZER + hub.INDEX
# All names of a checkpoint's files but those of shares.
FILES = (SUMS, STATE, MODEL, EMA, OPTIMIZER, INDEX, STATISTICS, ADAPTER, ADAPTER_EMA, UNMERGED)
BEST_EMA = "best_ema.safetensors"
LINKS = (LAST, BEST, BEST_EMA)
_NAME = re.compile(r"epoch_([0-9]+)(?:_sample_([0-9]+))?")
_SHARE = re.compile(r"optimizer-[0-9]{5}-of-[0-9]{5}\.safetensors")
# The ending of a file with a share's line of SHA256SUMS, by which its rank hands it to rank 0.
_SUM = ".sum"
_MOST_SHARES = 1 << 13
# The index of ViT-B's state has 50,000 bytes.
_LONGEST_INDEX = 16 << 20
_ADVICE = "; use an earlier one, or -resume=auto, which uses the newest complete one"

Arrays = dict[str, np.ndarray]


def checkpoint_name(epoch: int, samples: int) -> str:
    """Returns a checkpoint's name.

    Args:
        epoch: the number of epochs that are done.
        samples: the samples of the next epoch that were taken; 0 at an epoch's end.
    """
    return f"epoch_{epoch + 1:04d}_sample_{samples:09d}" if samples else f"epoch_{epoch:04d}"


def is_name(value: Any) -> bool:
    """Returns whether a value is the name of a checkpoint's folder."""
    return type(value) is str and _NAME.fullmatch(value) is not None


def check_visible(directory: Path) -> None:
    """Raises InputError, on every rank, if a rank doesn't see the folder that rank 0 will make.

    Rank 0 makes a file for this beside the folder, and removes it.
    """
    mark = None
    problem = None
    with contextlib.ExitStack() as stack:
        if rank() == 0:
            existing = next(path for path in (directory, *directory.parents) if path.is_dir())
            try:
                mark = str(stack.enter_context(making_mark(existing)))
            except OSError as error:
                problem = (
                    f"{directory}: can't create the run's folder ({error.strerror});"
                    " choose another with -output"
                )
        mark, problem = all_gather((mark, problem))[0]
        sees_it = all_gather(bool(mark) and os.path.exists(mark))
    if problem:
        raise InputError(problem)
    if not all(sees_it):
        ranks = ", ".join(str(place) for place, sees in enumerate(sees_it) if not sees)
        raise InputError(
            f"rank {ranks} can't access {directory}, where it has to write its share of the"
            " optimizer's state (DIST.STRATEGY.sharding);"
            " choose an -output that all machines share"
        )


def find_checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints under ``directory``, the oldest first."""
    folders = [folder for folder in directory.glob("epoch_*") if is_name(folder.name)]
    return sorted(folders, key=position)


def position(folder: Path) -> tuple[int, float]:
    """Returns the sort key of checkpoints: (epoch, samples of it; infinity at its end)."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    epoch, samples = match.groups()
    return int(epoch), int(samples) if samples else float("inf")


def begin_checkpoint(directory: Path, name: str) -> Path:
    """Makes the hidden folder in which a checkpoint is written until it is whole.

    Other ranks may write their shares into it before ``write_checkpoint`` is called.

    Raises:
        OSError: the disk is full, say, or ``directory``, which was a folder at the start, is a link.
    """
    if directory.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, expected a folder", str(directory))
    return begin_folder(directory / name)


def write_checkpoint(
    directory: Path,
    name: str,
    files: dict[str, Arrays],
    state: dict[str, Any],
    metadata: Mapping[str, Mapping[str, str]],
    begun: Path | None = None,
    sharing: "Sharing | None" = None,
) -> Path:
    """Writes the checkpoint ``name`` under ``directory``, and moves the link ``last`` to it.

    If the checkpoint is whole already, only the link is moved.

    Args:
        files: the arrays of each .safetensors file.
        state: the content of state.json.
        metadata: by file.
        begun: what ``begin_checkpoint`` has made. Rank 0's files that an earlier try has left there
            are written again.
        sharing: with it other ranks write files into ``begun``, too, and this waits for them.

    Raises:
        RunError: a value is NaN or infinite; nothing is written.
        OSError: the disk is full, say; nothing is left of the folder.
        Abandoned: another rank can't write its files; nothing is left of the folder.
    """
    target = directory / name
    if not (target / SUMS).exists():
        with making_folder(target, begun or begin_checkpoint(directory, name)) as temporary:
            _check_finite(name, files)
            for own in (*files, STATE, INDEX, SUMS):
                (temporary / own).unlink(missing_ok=True)
            sums = [
                write_file(temporary / file, arrays, metadata.get(file))
                for file, arrays in files.items()
            ]
            sums.append(write_file(temporary / STATE, json.dumps(state, indent=2).encode() + b"\n"))
            if sharing:
                sums.append(write_file(temporary / INDEX, index_of(sharing.keys)))
                sums += sharing.take_sums(temporary)
            write_file(temporary / SUMS, "".join(sums).encode())
            # If somebody is removing the folder, file by file, this raises an error.
            for line in sums:
                os.stat(temporary / line.split()[1])
    replace_link(directory / LAST, name)
    return target


def _check_finite(name: str, files: dict[str, Arrays]) -> None:
    for file, arrays in files.items():
        for key, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise RunError(
                    f"{name} isn't saved: {key} of {file} holds NaN or infinite values;"
                    " lower TRAIN.BASE_LR, or set TRAIN.GRAD_CLIP,"
                    " and resume from a checkpoint before it went wrong"
                )


class Abandoned(Exception):
    """A checkpoint can't be written, because another rank failed to write its share."""


class Sharing(NamedTuple):
    """A checkpoint whose optimizer's state all ranks write, as rank 0 sees it.

    Args:
        keys: by rank, the names of the tensors in its share.
        abandoned: set when another rank has failed.
        taken: by rank, its line of SHA256SUMS, once it was received.
    """

    keys: list[list[str]]
    abandoned: threading.Event
    taken: dict[int, str]

    def take_sums(self, begun: Path) -> list[str]:
        """Returns the other ranks' lines of SHA256SUMS, once their shares are written and synced.

        Args:
            begun: the folder into which they write.

        Raises:
            Abandoned: another rank has failed.
            OSError: the folder was moved or removed meanwhile.
        """
        ranks = len(self.keys)
        for owner in range(1, ranks):
            if owner not in self.taken:
                self.taken[owner] = self._take_sum(begun, f"{share_name(owner, ranks)}{_SUM}")
        return [self.taken[owner] for owner in range(1, ranks)]

    def _take_sum(self, begun: Path, name: str) -> str:
        """Waits for the file that holds a share's line; returns the line and removes the file."""
        file = begun / name
        while True:
            if file.exists():
                line = file.read_text()
                # A line without an end is still being written.
                if LINE.fullmatch(line) and line.endswith("\n"):
                    file.unlink()
                    return line
            if self.abandoned.wait(0.02):
                raise Abandoned
            # It raises an error if the folder is gone.
            os.stat(begun)


def share_name(owner: int, ranks: int) -> str:
    """Returns the name of the file with a rank's share of the optimizer's state."""
    return f"optimizer-{owner + 1:05d}-of-{ranks:05d}.safetensors"


def write_share(begun: Path, name: str, arrays: Arrays) -> None:
    """Writes and syncs this rank's share of the optimizer's state, and then its checksum.

    Rank 0 takes the checksum (``Sharing``).

    Args:
        begun: the checkpoint's unfinished folder, which rank 0 has made. A share that an earlier
            try has left there is written again.
        name: the checkpoint's name.

    Raises:
        RunError: a value is NaN or infinite.
        OSError: the disk is full, say, or the folder was moved or removed.
    """
    share = share_name(rank(), world_size())
    _check_finite(name, {share: arrays})
    (begun / share).unlink(missing_ok=True)
    line = write_file(begun / share, arrays)
    with open(begun / f"{share}{_SUM}", "x") as file:
        file.write(line)


def index_of(keys: Iterable[Iterable[str]]) -> bytes:
    """Returns the content of the index of shares.

    Args:
        keys: by rank, the names of the tensors in its share.
    """
    keys = list(keys)
    owners = {}
    for owner, share in enumerate(keys):
        for key in share:
            owners[key] = share_name(owner, len(keys))
    index = {"metadata": {"shares": len(keys)}, "weight_map": owners}
    return json.dumps(index, indent=2).encode() + b"\n"


def _is_weight_map(value: Any) -> bool:
    if type(value) is not dict:
        return False
    return all(is_text(key) and type(share) is str for key, share in value.items())


_INDEX_FORM: Form = {
    "metadata": Rule(
        f"a dictionary with a number of shares from 2 to {_MOST_SHARES}",
        lambda value: type(value) is dict and is_whole(value.get("shares"), 2, _MOST_SHARES),
    ),
    "weight_map": Rule(
        "tensors and the share of each",
        _is_weight_map,
    ),
}


def shares_of(folder: Path) -> dict[str, set[str]]:
    """Returns the tensors in each of a checkpoint's shares, by the share's name.

    It is {} if the optimizer's state isn't sharded.

    Raises:
        InputError: the index can't be read, or says what no run writes.
    """
    if not os.path.lexists(folder / INDEX):
        return {}
    with reading_checkpoint(folder, INDEX, "an index of shares"):
        index = parsed_json(whole_file(folder / INDEX, _LONGEST_INDEX))
        check_form(index, _INDEX_FORM, tuple(_INDEX_FORM))
        ranks = index["metadata"]["shares"]
        shares: dict[str, set[str]] = {share_name(owner, ranks): set() for owner in range(ranks)}
        for key, share in index["weight_map"].items():
            if share not in shares:
                raise Unreadable(
                    f"it lists {printable(key)} in {printable(share)},"
                    f" which isn't one of its {ranks} shares"
                )
            shares[share].add(key)
    return shares


def write_file(
    file: Path, content: Arrays | bytes | IO[bytes], metadata: Mapping[str, str] | None = None
) -> str:
    """Writes and syncs a new file; returns its line of SHA256SUMS.

    Args:
        content: bytes, an open file to copy, or the arrays of a .safetensors file. Lazy arrays are
            read one after the other.
        metadata: of a .safetensors file.
    """
    with open(file, "xb") as raw:
        hashed = _Hashed(raw)
        if isinstance(content, bytes):
            hashed.write(content)
        elif isinstance(content, dict):
            write_safetensors(hashed, content, metadata)
        else:
            shutil.copyfileobj(content, hashed)
        raw.flush()
        os.fsync(raw.fileno())
    return f"{hashed.sha256.hexdigest()}  {file.name}\n"


class _Hashed:
    """A file that is hashed as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        self.file.write(data)


def replace_link(link: Path, to: str) -> None:
    """Makes ``link`` point to ``to``. At every moment it points to its old or its new target.

    Raises:
        OSError: a file or a folder lies in its place.
    """
    if os.path.lexists(link) and not link.is_symlink():
        raise OSError(errno.EEXIST, "it isn't a link to a checkpoint", str(link))
    temporary = unfinished_path(link)
    temporary.symlink_to(to)
    os.replace(temporary, link)
    sync_directory(link.parent)


def remove_superseded(
    directory: Path, checkpoints: list[Path], keep_last: int, save_freq: int
) -> tuple[list[Path], list[str]]:
    """Removes the checkpoints that needn't be kept.

    The last ``keep_last`` are kept, the best ones, and those of every ``save_freq``-th epoch. The
    last kind isn't in the first list that is returned. So a run that hands on that list, with its
    next checkpoint, does the same work at each save, however many checkpoints it keeps.

    Args:
        checkpoints: those under ``directory`` to look at, the oldest first.

    Returns:
        (the checkpoints that a later call has to look at, the names of those that couldn't be
        removed).
    """
    kept = {(directory / link).resolve().name for link in (LAST, BEST)}
    kept.add((directory / BEST_EMA).resolve().parent.name)
    kept.update(checkpoint.name for checkpoint in checkpoints[-keep_last:])
    later = []
    not_removed = []
    for checkpoint in checkpoints:
        epoch, samples = position(checkpoint)
        if checkpoint.name in kept:
            later.append(checkpoint)
            continue
        at_epochs_end = samples == float("inf")
        if save_freq and at_epochs_end and epoch % save_freq == 0:
            continue
        if os.path.lexists(checkpoint) and not remove_checkpoint(checkpoint):
            later.append(checkpoint)
            not_removed.append(checkpoint.name)
    return later, not_removed


def remove_checkpoint(folder: Path) -> bool:
    """Removes a checkpoint, whole or not.

    A folder that holds something else, or that another user owns, is left as it is.

    Returns:
        Whether it is gone.
    """
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK) or not holds_checkpoint_alone(folder):
        return False
    # It gets a hidden name first, so that what is left by a kill isn't taken for a checkpoint.
    hidden = unfinished_path(folder)
    os.rename(folder, hidden)
    _empty(hidden)
    return True


def holds_checkpoint_alone(folder: Path) -> bool:
    """Returns whether a path is a folder (no link) that holds a checkpoint's files and nothing else."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return all(
            is_file_name(entry.name) and not entry.is_dir(follow_symlinks=False)
            for entry in entries
        )


def is_file_name(name: str) -> bool:
    """Returns whether a checkpoint has a file of this name, perhaps only while it is written."""
    return name in FILES or _SHARE.fullmatch(name.removesuffix(_SUM)) is not None


def _empty(folder: Path) -> None:
    """Removes a checkpoint's files, and the folder if nothing else is there."""
    for name in filter(is_file_name, os.listdir(folder)):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def remove_leftovers(directory: Path) -> list[str]:
    """Removes unfinished files of runs that were killed.

    Returns:
        The names of the other hidden entries, which no run made. They stay.
    """
    for path, name in leftovers(directory, earlier=True):
        # An entry that this user may not remove stays, and is returned.
        with contextlib.suppress(PermissionError):
            if is_name(name) and holds_checkpoint_alone(path):
                _empty(path)
            elif name in LINKS and path.is_symlink():
                path.unlink()
    return sorted(name for name in os.listdir(directory) if name.startswith("."))


def verify(folder: Path) -> list[str]:
    """Checks the files of a checkpoint; returns their names.

    Raises:
        InputError: a file isn't what was written; the line names it.
    """
    known = any(os.path.lexists(folder / name) for name in (SUMS, STATE, MODEL))
    if not os.path.isdir(folder) or not known:
        expected = "expected a folder that holds state.json, such as <run>/checkpoints/last"
        # PaddleViT's -resume takes a file of weights.
        with contextlib.suppress(InputError):
            expected += (
                f"; {find_weights(folder)} is a file: -pretrained takes its weights, "
                f"and -last_epoch={_epoch(folder)} continues the schedule, "
                "without the optimizer's state"
            )
        raise InputError(f"no checkpoint at {folder}: {expected}")
    with reading_checkpoint(folder, SUMS, "a list of files"):
        sums = _read_sums(folder)
    for name, digest in sums.items():
        with reading_checkpoint(folder, name, "a file"):
            if sha256_of(folder / name) != digest:
                raise Unreadable("its content has changed (its SHA-256 differs)")
    # The index is verified by now: it says which shares there have to be.
    with reading_checkpoint(folder, SUMS, "a list of files"):
        expected = {INDEX, *shares_of(folder)} if INDEX in sums else {OPTIMIZER}
        listed = {name for name in sums if name in (OPTIMIZER, INDEX) or _SHARE.fullmatch(name)}
        if missing := sorted(expected - listed):
            raise Unreadable(f"it doesn't list {missing[0]}")
        if added := sorted(listed - expected):
            raise Unreadable(f"it lists {added[0]}, which isn't a share of this checkpoint")
    return [SUMS, *sums]


def _read_sums(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of a checkpoint, by its name."""
    sums = read_sums(folder)
    for name in (MODEL, INDEX if INDEX in sums else OPTIMIZER, STATE):
        if name not in sums:
            raise Unreadable(f"it doesn't list {name}")
    return sums


def _epoch(file: Path) -> str:
    """Returns the epoch in a name of PaddleViT's, Epoch-12-Loss-2.3.pdparams, or "N"."""
    match = re.search(r"Epoch-(\d+)", file.name)
    return match[1] if match else "N"


def reading_checkpoint(
    folder: Path, file: str, what: str
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a checkpoint's file is read (``errors.reading``).

    An error within says that the checkpoint is damaged, and what to do.
    """
    return reading(f"{folder}: damaged checkpoint: {file}", what, _ADVICE)
