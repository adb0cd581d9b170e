"""A checkpoint on disk: a folder that is whole or absent, with a SHA-256 of every file.

``epoch_0010`` is the state after epoch 10. ``epoch_0011_sample_000012800`` is one within epoch 11,
when all processes together had taken 12,800 of its samples. A checkpoint holds
``model.safetensors`` (timm's names and layout), with MODEL_EMA ``ema.safetensors``, and
``optimizer.safetensors`` (moments by parameter). Within an epoch of several ranks it may hold
``statistics.safetensors``: each rank's own batch norm statistics. It also holds ``state.json`` and
``SHA256SUMS``, which ``sha256sum -c`` reads.

Where the optimizer's state is sharded, each rank writes its share,
``optimizer-00001-of-00004.safetensors`` and so on. ``optimizer.safetensors.index.json`` says which
tensor is in which of them.

With TRAIN.ADAPTER ``adapter.safetensors`` (and ``adapter_ema.safetensors``) hold only what trains.
``unmerged.safetensors`` holds what a model's file has merged or left out.

``last`` and ``best`` are links to such folders, ``best_ema.safetensors`` to the file of the best
average.
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

from errors import InputError, RunError, Unreadable, open_file, printable, reading
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

SUMS = "SHA256SUMS"
STATE = "state.json"
MODEL, EMA, OPTIMIZER, STATISTICS = (
    f"{part}.safetensors" for part in ("model", "ema", "optimizer", "statistics")
)
ADAPTER, ADAPTER_EMA, UNMERGED = (
    f"{part}.safetensors" for part in ("adapter", "adapter_ema", "unmerged")
)
INDEX = OPTIMIZER + hub.INDEX  # of a sharded optimizer's state: which tensor is in which share
# besides shares
FILES = (SUMS, STATE, MODEL, EMA, OPTIMIZER, INDEX, STATISTICS, ADAPTER, ADAPTER_EMA, UNMERGED)
BEST_EMA = "best_ema.safetensors"
LINKS = (LAST, BEST, BEST_EMA)
_NAME = re.compile(r"epoch_([0-9]+)(?:_sample_([0-9]+))?")
_SHARE = re.compile(r"optimizer-[0-9]{5}-of-[0-9]{5}\.safetensors")
# ends the name of a file with a share's line of SHA256SUMS, which rank 0 takes from there
_SUM = ".sum"
_LINE = re.compile(r"([0-9a-f]{64})  (\w[\w.-]*)\n?", re.ASCII)
_MOST_SHARES = 1 << 13
LONGEST_SUMS = 1 << 20  # bytes; a checkpoint has ten files at most, and its shares
_LONGEST_INDEX = 16 << 20  # bytes; ViT-B's has 50,000
_ADVICE = "; take an earlier one, or -resume=auto, which takes the newest whole one"

Arrays = dict[str, np.ndarray]


def checkpoint_name(epoch: int, samples: int) -> str:
    """Returns the name of the checkpoint after ``epoch`` epochs and ``samples`` samples of the
    next.
    """
    return f"epoch_{epoch + 1:04d}_sample_{samples:09d}" if samples else f"epoch_{epoch:04d}"


def is_name(value: Any) -> bool:
    """Returns whether a value is the name of a checkpoint's folder."""
    return type(value) is str and _NAME.fullmatch(value) is not None


def check_visible(directory: Path) -> None:
    """Raises InputError, on every rank, where a rank doesn't see the folder that rank 0 makes as
    ``directory``.

    A file is made for it beside that folder, and removed.
    """
    mark = problem = None
    with contextlib.ExitStack() as stack:
        if rank() == 0:
            there = next(place for place in (directory, *directory.parents) if place.is_dir())
            try:
                mark = str(stack.enter_context(making_mark(there)))
            except OSError as error:
                problem = f"{directory}: can't make the run's folder ({error.strerror}); choose another with -output"
        mark, problem = all_gather((mark, problem))[0]
        unseen = [
            str(place)
            for place, sees in enumerate(all_gather(mark and os.path.exists(mark)))
            if not sees
        ]
    if problem:
        raise InputError(problem)
    if unseen:
        raise InputError(
            f"{directory} isn't seen by rank {', '.join(unseen)}, which has to write its share of the optimizer's state"
            " there (DIST.STRATEGY.sharding); give an -output that all machines see"
        )


def find_checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints under ``directory``, the oldest first."""
    folders = [folder for folder in directory.glob("epoch_*") if is_name(folder.name)]
    return sorted(folders, key=position)


def position(folder: Path) -> tuple[int, float]:
    """Returns what orders checkpoints: (epoch, samples of it; infinity at its end)."""
    found = _NAME.fullmatch(folder.name)
    assert found is not None
    epoch, samples = found.groups()
    return int(epoch), int(samples) if samples else float("inf")


def begin_checkpoint(directory: Path, name: str) -> Path:
    """Makes the hidden folder in which ``write_checkpoint`` writes; ranks may add their shares to
    it meanwhile.

    Raises:
        OSError: ``directory`` is a link (it was a folder at the start), or the disk is full, say.
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
    """Writes the folder ``name`` under ``directory`` and moves ``last`` to it. If the folder is
    whole already, only the link is moved.

    Args:
        metadata: by file.
        begun: what ``begin_checkpoint`` has made. Own files that an earlier try has left there are
            written anew.
        sharing: other ranks write files into ``begun``, too; they are waited for.

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
            # Somebody may be removing the folder, file by file.
            for line in sums:
                os.stat(temporary / line.split()[1])
    replace_link(directory / LAST, name)
    return target


def _check_finite(name: str, files: dict[str, Arrays]) -> None:
    for file, arrays in files.items():
        for key, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise RunError(
                    f"{name} isn't saved: {key} of {file} holds NaN or infinite values; lower TRAIN.BASE_LR, or set"
                    " TRAIN.GRAD_CLIP, and go on from a checkpoint before it went wrong"
                )


class Abandoned(Exception):
    """A checkpoint isn't written, because another rank failed to write its share."""


class Sharing(NamedTuple):
    """What rank 0 knows of a checkpoint whose optimizer's state all ranks write.

    Args:
        keys: by rank, the names of the tensors in its share.
        abandoned: set when another rank has failed.
        taken: by rank, the lines of SHA256SUMS that were taken already.
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
        others = range(1, ranks)
        for owner in others:
            if owner not in self.taken:
                self.taken[owner] = self._take_sum(begun, f"{share_name(owner, ranks)}{_SUM}")
        return [self.taken[owner] for owner in others]

    def _take_sum(self, begun: Path, name: str) -> str:
        file = begun / name
        while True:
            # A line without an end is still being written.
            if file.exists() and _LINE.fullmatch(line := file.read_text()) and line.endswith("\n"):
                file.unlink()
                return line
            if self.abandoned.wait(0.02):
                raise Abandoned
            os.stat(begun)


def share_name(owner: int, ranks: int) -> str:
    """Returns the name of the file with a rank's share of the optimizer's state."""
    return f"optimizer-{owner + 1:05d}-of-{ranks:05d}.safetensors"


def write_share(begun: Path, name: str, arrays: Arrays) -> None:
    """Writes and syncs this rank's share of the optimizer's state, and then tells rank 0 its
    checksum.

    Args:
        begun: the checkpoint's folder until it is whole, which rank 0 has begun. A share that an
            earlier try has left there is written anew.
        name: of the checkpoint.

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
    """Returns the content of the index of shares, given the names of the tensors in each of them."""
    keys = list(keys)
    owners = {
        key: share_name(owner, len(keys)) for owner, share in enumerate(keys) for key in share
    }
    return (
        json.dumps({"metadata": {"shares": len(keys)}, "weight_map": owners}, indent=2).encode()
        + b"\n"
    )


_INDEX_FORM: Form = {
    "metadata": Rule(
        f"a dictionary with a number of shares from 2 to {_MOST_SHARES}",
        lambda value: type(value) is dict and is_whole(value.get("shares"), 2, _MOST_SHARES),
    ),
    "weight_map": Rule(
        "tensors and the share of each",
        lambda value: type(value) is dict
        and all(is_text(key) and type(share) is str for key, share in value.items()),
    ),
}


def shares_of(folder: Path) -> dict[str, set[str]]:
    """Returns the names of a checkpoint's shares of the optimizer's state, each with its tensors;
    {}: it has no index.

    Raises:
        InputError: its index can't be read, or says what no run writes.
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
                    f"it has {printable(key)} in {printable(share)}, which is none of its {ranks} shares"
                )
            shares[share].add(key)
    return shares


def write_file(
    file: Path, content: Arrays | bytes | IO[bytes], metadata: Mapping[str, str] | None = None
) -> str:
    """Writes and syncs a new file; returns its line of SHA256SUMS.

    Args:
        content: bytes, an open file to copy, or the arrays of a .safetensors file; of lazy ones,
            one is in memory.
        metadata: of that file.
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
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        self.file.write(data)


def replace_link(link: Path, to: str) -> None:
    """Makes ``link`` name ``to``; at every moment it names what it did before or that.

    Raises:
        OSError: a file or a folder lies in its place.
    """
    if os.path.lexists(link) and not link.is_symlink():
        raise OSError(errno.EEXIST, "it is no link to a checkpoint", str(link))
    temporary = unfinished_path(link)
    temporary.symlink_to(to)
    os.replace(temporary, link)
    sync_directory(link.parent)


def remove_superseded(
    directory: Path, found: list[Path], keep_last: int, save_freq: int
) -> tuple[list[Path], list[str]]:
    """Removes what is neither among the last ``keep_last``, nor a best one, nor of every
    ``save_freq``-th epoch.

    Args:
        found: checkpoints under ``directory``, the oldest first.

    Returns:
        (those of ``found`` that a later call has to look at, the names of those that couldn't be
        removed).

    Checkpoints that stay for good are not among the first. So a run that hands on that list, with
    its next checkpoint, does the same work at each save, however many checkpoints it keeps.
    """
    kept = {(directory / link).resolve().name for link in (LAST, BEST)}
    kept |= {(directory / BEST_EMA).resolve().parent.name} | {
        folder.name for folder in found[-keep_last:]
    }
    later = []
    left = []
    for folder in found:
        epoch, samples = position(folder)
        freely = save_freq and samples == float("inf") and epoch % save_freq == 0
        if folder.name in kept:
            later.append(folder)
        elif not freely and os.path.lexists(folder) and not remove_checkpoint(folder):
            later.append(folder)
            left.append(folder.name)
    return later, left


def remove_checkpoint(folder: Path) -> bool:
    """Removes a checkpoint, whole or not. One that holds something else, or is somebody else's, is
    left as it is.

    Returns:
        Whether it is gone.
    """
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK) or not holds_checkpoint_alone(folder):
        return False
    # If this is cut short, what is left isn't taken for a damaged checkpoint.
    gone = unfinished_path(folder)
    os.rename(folder, gone)
    _empty(gone)
    return True


def holds_checkpoint_alone(folder: Path) -> bool:
    """Returns whether a path is a folder, no link to one, with no other files than a checkpoint's."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return all(
            _is_file_name(entry.name) and not entry.is_dir(follow_symlinks=False)
            for entry in entries
        )


def _is_file_name(name: str) -> bool:
    """Whether a checkpoint has a file of this name, or has it while it is written."""
    return name in FILES or _SHARE.fullmatch(name.removesuffix(_SUM)) is not None


def _empty(folder: Path) -> None:
    """Removes a folder with a checkpoint's files."""
    for name in filter(_is_file_name, os.listdir(folder)):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def remove_leftovers(directory: Path) -> list[str]:
    """Removes what runs that were killed had begun to write.

    Returns:
        The names of the other hidden entries, which are somebody else's and stay.
    """
    for path, name in leftovers(directory, earlier=True):
        # One that this user may not remove stays, and is named.
        with contextlib.suppress(PermissionError):
            if is_name(name) and holds_checkpoint_alone(path):
                _empty(path)
            elif name in LINKS and path.is_symlink():
                path.unlink()
    return sorted(name for name in os.listdir(directory) if name.startswith("."))


def verify(folder: Path) -> list[str]:
    """Returns the names of a checkpoint's files.

    Raises:
        InputError: one isn't what was written; it is named.
    """
    if not os.path.isdir(folder) or not any(
        os.path.lexists(folder / name) for name in (SUMS, STATE, MODEL)
    ):
        expected = "expected a folder that holds state.json, such as <run>/checkpoints/last"
        with contextlib.suppress(InputError):
            expected += (
                f"; {find_weights(folder)} is a file: -pretrained takes its weights, "
                f"and -last_epoch={_epoch(folder)} goes on with the schedule, "
                "without the optimizer's state"
            )
        raise InputError(f"no checkpoint at {folder}: {expected}")
    with reading_checkpoint(folder, SUMS, "a list of files"):
        lines = whole_file(folder / SUMS, LONGEST_SUMS).decode("ascii").splitlines()
        found = [_LINE.fullmatch(line) for line in lines]
        if None in found:
            raise Unreadable(
                f"its line {found.index(None) + 1} isn't a SHA-256 and the name of a file beside it"
            )
        sums = {line[2]: line[1] for line in found if line}
        if len(sums) != len(lines):
            raise Unreadable("it names a file twice")
        for name in (MODEL, INDEX if INDEX in sums else OPTIMIZER, STATE):
            if name not in sums:
                raise Unreadable(f"it has no line for {name}")
    for name, digest in sums.items():
        with reading_checkpoint(folder, name, "a file"):
            if sha256_of(folder / name) != digest:
                raise Unreadable("it isn't what was written (its SHA-256 differs)")
    with reading_checkpoint(folder, SUMS, "a list of files"):
        expected = {INDEX, *shares_of(folder)} if INDEX in sums else {OPTIMIZER}
        found = {name for name in sums if name in (OPTIMIZER, INDEX) or _SHARE.fullmatch(name)}
        if missing := sorted(expected - found):
            raise Unreadable(f"it has no line for {missing[0]}")
        if added := sorted(found - expected):
            raise Unreadable(
                f"it has a line for {added[0]}, which isn't a share of this checkpoint"
            )
    return [SUMS, *sums]


def _epoch(file: Path) -> str:
    """The epoch in a name of PaddleViT's, Epoch-12-Loss-2.3.pdparams, or N."""
    found = re.search(r"Epoch-(\d+)", file.name)
    return found[1] if found else "N"


def reading_checkpoint(
    folder: Path, file: str, what: str
) -> contextlib.AbstractContextManager[None]:
    """Says of what goes wrong while a checkpoint's file is read that it is damaged, and what to do
    (``reading``).
    """
    return reading(f"{folder}: damaged checkpoint: {file}", what, _ADVICE)


def sha256_of(*files: Path) -> str:
    """Returns the SHA-256 of the bytes of files, one after the other, in hexadecimal digits."""
    sha256 = hashlib.sha256()
    block = memoryview(bytearray(1 << 20))
    for file in files:
        with open_file(file) as stream:
            while count := stream.readinto(block):
                sha256.update(block[:count])
    return sha256.hexdigest()
