"""Saves checkpoints beside the training: the state is copied at the step, and a thread writes it."""

import contextlib
import errno
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from datasets import ImageDataset
from errors import RunError, remedy
from launch.files import remove, unfinished_path, unused_path
from settings.configuration import Configuration, plain
from training.checkpoint import storage
from training.checkpoint.description import METADATA, describe
from training.checkpoint.progress import Progress
from training.checkpoint.state import FORMATS, newest_whole
from training.checkpoint.storage import Arrays
from training.parallel import ShardedOptimizer, block_weights
from training.run import Run
from training.versions import versions
from utils import all_gather, num_gpus, rank, world_size
from weights import file_arrays
from weights.adapters import adapter_arrays, adapter_metadata, is_added, of_base, unmerged_tensors

# Raised when the same settings train otherwise than before (``resume.changes_of_behaviour``).
BEHAVIOUR = 2
_NAMES = {"val": storage.MODEL, "ema": storage.EMA}
# The status of a rank that is still writing.
BUSY = "busy"
# Errors of a full disk or quota: another folder there is as full.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Problem(NamedTuple):
    """The reason why a checkpoint wasn't written.

    Args:
        text: the line for the user.
        fatal: whether the run has to end.
        elsewhere: whether another folder may take the checkpoint.
        missing: whether a file or a folder isn't there.
        instead: which checkpoint there is instead, in words.
    """

    text: str
    fatal: bool
    elsewhere: bool = False
    missing: bool = False
    instead: str = ""


def own_statistics(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """Returns the tensors of which each rank has its own: batch norm's running statistics.

    Gradients don't make them equal, as they do for parameters.
    """
    parameters = {name for name, _ in model.named_parameters()}
    return {
        name: t
        for name, t in model.state_dict().items()
        if name not in parameters and t.is_floating_point()
    }


class Saver:
    """Saves checkpoints of a run. Every rank calls its methods.

    Rank 0 writes. If the optimizer's state is sharded, each other rank writes its share.

    Args:
        models: the model as "val" and, with MODEL_EMA, the averaged one as "ema".
        train: what is trained on; a run can't continue with another number of samples.
        progress: where the run begins: its checkpoint is there, or there is nothing to save yet.

    Attributes:
        path: the newest checkpoint's folder.
        saved_step: the step of the last save, or the one that the run began with.
    """

    def __init__(
        self,
        config: Configuration,
        run: Run,
        models: dict[str, nn.Layer],
        optimizer: paddle.optimizer.Optimizer,
        scaler: Any,
        train: ImageDataset,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.run = run
        self.models = models
        self.optimizer = optimizer
        self.scaler = scaler
        # The entries of state.json that are the same in each checkpoint.
        self.constant = {
            "format": FORMATS[-1],
            "behaviour": BEHAVIOUR,
            "versions": versions(),
            "ranks": world_size(),
            "images": len(train),
            "classes": train.classes,
            "model": config.MODEL.NAME,
            "config": plain(config),
        }
        named_parameters = models["val"].named_parameters()
        self.trained = {name for name, p in named_parameters if not p.stop_gradient}
        # What identifies the base of an adapter, from the first save on.
        self.base: dict[str, Any] = {}
        self.sharded = isinstance(optimizer, ShardedOptimizer)
        # Set when another rank failed, so that rank 0 doesn't wait for its share.
        self.abandoned = threading.Event()
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None
        # Which checkpoint there is if this one couldn't be written, in words.
        self.instead = ""
        # The unfinished folder of the checkpoint that is being written.
        self.begun: Path | None = None
        # What this rank writes into it: rank 0's files and more, or another rank's share.
        self.content: Any = None
        # Names of superseded checkpoints that stay, because they hold something else, too.
        self.kept: set[str] = set()
        # Checkpoints that a later save may have to remove; None: they aren't listed yet.
        self.removable: list[Path] | None = None
        self._set_saved(progress or Progress())

    def _set_saved(self, progress: Progress) -> None:
        self.path = self.run.checkpoints / progress.name
        self.saved_step = progress.step

    @property
    def failed(self) -> bool:
        """Returns whether the thread failed on this rank, which ``wait`` will report."""
        return self.failure is not None

    def due(self, progress: Progress) -> bool:
        """Returns whether SAVE_STEPS asks for a checkpoint."""
        every = self.config.SAVE_STEPS
        return bool(every) and progress.step // every > self.saved_step // every

    def wait(self, last: bool = False) -> None:
        """Waits until nothing is being written.

        Args:
            last: whether nothing will be saved after this.

        Raises:
            RunError: on every rank, when the writing failed, unless SAVE_ON_ERROR continues and there
                will be another save.
        """
        problem = self._end_writing()
        if problem is None:
            self.content = None
            return
        if rank() == 0 and self.begun:
            # Another rank may have written there after the folder was removed.
            remove(self._begun_now())
        instead = ""
        if problem.elsewhere:
            instead = self._save_elsewhere()
        instead = instead or problem.instead
        self.content = None
        text = f"{problem.text}; {instead}" if instead else problem.text
        if problem.fatal or last:
            raise RunError(text, shared=True)
        self.run.info(f"{text}; the run continues (SAVE_ON_ERROR)")
        self.failure = None

    def _end_writing(self) -> "_Problem | None":
        """Waits until no rank writes; returns the problem, the same on every rank."""
        # The ranks meet again and again: in one long wait gloo would give up after 30 s.
        while True:
            statuses = all_gather(self._status())
            problems = [status for status in statuses if status not in (None, BUSY)]
            if problems:
                self.abandoned.set()
            if BUSY not in statuses:
                break
        self.abandoned.clear()
        # Where one rank fails, rank 0 removes the folder, and others may then miss it. So a missing
        # file is reported only if no rank has another problem.
        return min(problems, key=lambda problem: problem.missing, default=None)

    def _status(self) -> "str | _Problem | None":
        """Returns this rank's status: BUSY, a problem, or None if nothing is being written."""
        if self.thread is not None:
            self.thread.join(0.2 if world_size() > 1 else None)
            if self.thread.is_alive():
                return BUSY
        self.thread = None
        error = self.failure
        if error is None:
            return None
        if not isinstance(error, OSError):
            return _Problem(str(error), fatal=True)
        stop = self.config.SAVE_ON_ERROR == "stop"
        is_there = (self.run.checkpoints / self.path.name).exists()
        return _Problem(
            f"{self.path.name} wasn't saved ({error}): {remedy(error)}",
            fatal=stop,
            elsewhere=stop and error.errno not in _FULL and not is_there,
            missing=error.errno == errno.ENOENT,
            instead=self.instead,
        )

    def _save_elsewhere(self) -> str:
        """Writes a checkpoint beside the run's folder, which takes none, or into the current folder.

        Returns:
            Words that say where it is, or "".
        """
        run = self.run.directory
        # Rank 0 says where: other ranks may be in another folder.
        parents = [str(parent) for parent in dict.fromkeys((run.parent, Path.cwd()))]
        for parent in all_gather(parents)[0]:
            begun = None
            if rank() == 0 and self.content:
                target = unused_path(Path(parent) / f"{run.name}-saved") / self.run.checkpoints.name
                with contextlib.suppress(OSError):
                    begun = str(storage.begin_checkpoint(target, self.path.name))
            begun = all_gather(begun)[0]
            if begun is None:
                continue
            self.failure = None
            if self.content:
                self._start(time.perf_counter(), self._write_content, Path(begun))
            if self._end_writing() is None:
                saved = Path(begun).parent / self.path.name
                return f"it is saved in {saved}; resume from there with a new -output"
            if rank() == 0:
                remove(Path(begun))
        return ""

    def _last_whole(self) -> str:
        """Returns which checkpoint there is though this one wasn't written, in words."""
        with contextlib.suppress(OSError):
            if last := newest_whole(self.run.checkpoints):
                path = last.resolve()
                if path.name == self.path.name:
                    return f"but {path} is complete"
                return f"the last complete checkpoint is {path}"
        return "there is no earlier checkpoint"

    def save(
        self,
        progress: Progress,
        statistics: dict[str, paddle.Tensor] | None = None,
        windows: Sequence[dict[str, Any]] = (),
        improved: tuple[str, ...] = (),
        described: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Copies the state and begins to write it, once the writing of the last one has ended.

        Args:
            progress: how far the run was at its last update. What came of the steps since isn't in
                the state.
            statistics: this rank's, within an epoch; None: they are the same on every rank.
            windows: within an epoch, what each rank has summed up since the last report
                (``Window.gather``).
            improved: which of "val" (the model) and "ema" is the best so far: its link moves, too.
            described: by split, what its evaluation adds to the description of its weights.
        """
        asked_at = time.perf_counter()
        self.wait()
        self._set_saved(progress)
        optimizer = optimizer_state(self.models["val"], self.optimizer)
        arrays = {key: t.numpy() for key, t in statistics.items()} if statistics else {}
        begun, problem = self._begin_folder()
        gathered = all_gather((arrays, sorted(optimizer) if self.sharded else [], begun))
        statistics_by_rank, keys, (begun, *_) = zip(*gathered, strict=True)
        self.begun = Path(begun) if begun else None
        # Every rank sends its blocks' weights (stage 3 of sharding), and rank 0 keeps them.
        blocks = block_weights(self.optimizer, keep=rank() == 0)
        if rank() and begun:
            self._start(asked_at, self._write_share, host_copies(optimizer))
        # The same step may be saved twice.
        if rank() or self.path.exists():
            return
        dicts = {split: model.state_dict() for split, model in self.models.items()}
        dicts[storage.OPTIMIZER] = optimizer
        tensors = {(part, key): t for part, state in dicts.items() for key, t in state.items()}
        received = {place: blocks[t.name] for place, t in tensors.items() if t.name in blocks}
        copies = host_copies({place: t for place, t in tensors.items() if place not in received})

        def copied() -> dict[tuple[str, str], np.ndarray]:
            return copies() | received

        state = {
            **asdict(progress),
            "window": list(windows),
            "lr": self.optimizer.get_lr(),
            "scaler": self.scaler.state_dict(),
            **self.constant,
        }
        self._start(
            asked_at,
            self._write,
            copied,
            statistics_by_rank,
            state,
            improved,
            self._metadata(described or {}),
            list(keys),
            problem,
        )

    def _begin_folder(self) -> tuple[str | None, OSError | None]:
        """Begins the folder into which all ranks write, on rank 0 of a sharded run.

        Returns:
            (the folder, or None if rank 0 writes alone or the checkpoint is there already; why the
            folder couldn't be made).
        """
        if rank() or not self.sharded or self.path.exists():
            return None, None
        try:
            return str(self._begin_checkpoint()), None
        except OSError as error:
            return str(unfinished_path(self.path)), error

    def _begin_checkpoint(self) -> Path:
        """Makes the unfinished folder of a checkpoint, where the run's folder is now."""
        while True:
            directory = self.run.checkpoints
            begun = storage.begin_checkpoint(directory, self.path.name)
            if self.run.checkpoints == directory:
                return begun
            # The run's folder was moved meanwhile: the new folders are in its old place.
            with contextlib.suppress(OSError):
                for made in (begun, directory, directory.parent):
                    made.rmdir()

    def _start(self, asked_at: float, write: Callable[..., dict[str, Arrays]], *args: Any) -> None:
        """Lets a thread write.

        Args:
            asked_at: when the save was asked for.
            write: returns what it has written, by file.
        """
        waited = time.perf_counter() - asked_at
        name = self.path.name
        self.instead = ""

        def work() -> None:
            started = time.perf_counter()
            try:
                files = write(*args)
            except storage.Abandoned:
                # The rank that failed reports why.
                return
            except Exception as error:
                self.instead = self.instead or self._last_whole()
                self.failure = error
                return
            size = sum(array.nbytes for arrays in files.values() for array in arrays.values())
            took = time.perf_counter() - started
            self.run.local.info(
                f"saved {name}: {size / 1e6:.1f} MB, written in {took:.2f} s;"
                f" training waited {waited:.3f} s"
            )

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def _metadata(self, described: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
        """Returns the metadata of each file of weights: the description of its weights."""
        config = self.config
        classes = self.constant["classes"]
        metadata = {}
        for split in self.models:
            description = describe(config, classes, config.TASK, **described.get(split, {}))
            metadata[_NAMES[split]] = {METADATA: description.to_json()}
        return metadata

    def _files(self, copied: Callable[[], dict], statistics: Sequence[Arrays]) -> dict[str, Arrays]:
        """Returns the arrays of each file that rank 0 writes.

        Args:
            copied: returns the copies of the tensors by (split or OPTIMIZER, name).
            statistics: by rank, its own statistics by "split/name".
        """
        arrays = {part: {} for part in (*self.models, storage.OPTIMIZER)}
        for (part, key), array in copied().items():
            arrays[part][key] = array
        # A checkpoint is evaluated, too: it gets the ranks' mean, as at an epoch's end.
        for key, own in statistics[0].items():
            split, name = key.split("/", 1)
            mean = np.mean([each[key] for each in statistics], axis=0, dtype=np.float64)
            arrays[split][name] = mean.astype(own.dtype)
        files = {
            _NAMES[split]: file_arrays(model, arrays[split]) for split, model in self.models.items()
        }
        files |= self._adapter_files(arrays)
        file = storage.share_name(0, world_size()) if self.sharded else storage.OPTIMIZER
        files[file] = arrays[storage.OPTIMIZER]
        if statistics[0] and len(statistics) > 1:
            files[storage.STATISTICS] = {
                f"{place}/{key}": array
                for place, each in enumerate(statistics)
                for key, array in each.items()
            }
        return files

    def _adapter_files(self, arrays: dict[str, Arrays]) -> dict[str, Arrays]:
        """Returns the files of the tensors that a training added to a model (``weights.adapters``).

        There are none if it added nothing.
        """
        files = {}
        unmerged = {}
        model: Any
        for split, model in self.models.items():
            for name, array in unmerged_tensors(arrays[split]).items():
                # The base is the same in both models, and stored once.
                if split == "val" or is_added(name):
                    unmerged[f"{split}/{name}"] = array
            if self.config.TRAIN.ADAPTER.NAME:
                file = storage.ADAPTER if split == "val" else storage.ADAPTER_EMA
                files[file] = adapter_arrays(model, arrays[split], self.trained)
        if files and not self.base:
            self.base = of_base(model, arrays["val"], self.trained)
        if unmerged:
            files[storage.UNMERGED] = unmerged
        return files

    def _with_adapters(
        self, metadata: dict[str, dict[str, str]], files: dict[str, Arrays]
    ) -> dict[str, dict[str, str]]:
        """Returns the metadata of all files of weights, with those of adapters, which say more."""
        adapter = self.config.TRAIN.ADAPTER
        lora_rank = adapter.RANK if adapter.NAME == "lora" else None
        scale = adapter.ALPHA / adapter.RANK
        metadata = dict(metadata)
        models = {storage.ADAPTER: storage.MODEL, storage.ADAPTER_EMA: storage.EMA}
        for file, model in models.items():
            if file in files:
                more = adapter_metadata(adapter.NAME, scale, self.base, lora_rank, files[file])
                metadata[file] = metadata[model] | more
        return metadata

    def _write(
        self,
        copied: Callable[[], dict],
        statistics: Sequence[Arrays],
        state: dict[str, Any],
        improved: tuple[str, ...],
        metadata: dict[str, dict[str, str]],
        keys: list[list[str]],
        problem: OSError | None,
    ) -> dict[str, Arrays]:
        """Writes rank 0's part of a checkpoint, and makes it the last one.

        Args:
            copied, statistics: as in ``_files``.
            state: the content of state.json.
            improved: as in ``save``.
            metadata: by file.
            keys: by rank, the tensors in its share, if the optimizer's state is sharded.
            problem: why no folder could be begun.
        """
        files = self._files(copied, statistics)
        self.content = (files, state, self._with_adapters(metadata, files), keys)
        if problem:
            raise problem
        self.begun = self.begun or self._begin_checkpoint()
        taken: dict[int, str] = {}
        self._following_the_run(lambda begun: self._write_and_link(begun, taken, improved))
        if self.path.parent != self.begun.parent:
            # The run's folder was moved, which may have interrupted the removal of something.
            with contextlib.suppress(OSError):
                storage.remove_leftovers(self.path.parent)
        self.content = None
        return files

    def _write_share(self, copied: Callable[[], dict]) -> dict[str, Arrays]:
        """Writes the share of another rank than 0."""
        # It is kept until the next save: only then this rank knows that rank 0 has made the
        # checkpoint whole.
        self.content = copied()
        return self._following_the_run(self._write_content)

    def _following_the_run(self, write: Callable[[Path], Any]) -> Any:
        """Calls ``write`` with the unfinished folder.

        If the run's folder is moved meanwhile, ``write`` is called again with the new place.
        """
        while True:
            begun = self._begun_now()
            try:
                return write(begun)
            except FileNotFoundError:
                if self._begun_now() == begun:
                    raise

    def _begun_now(self) -> Path:
        """Returns where the unfinished folder is now, as the run's folder may have been moved."""
        begun = self.begun
        assert begun is not None
        moved = self.run.checkpoints / begun.name
        return begun if begun.exists() and not moved.exists() else moved

    def _write_content(self, begun: Path, taken: dict[int, str] | None = None) -> dict[str, Arrays]:
        """Writes this rank's part of a checkpoint; returns its arrays, by file.

        Args:
            begun: the checkpoint's unfinished folder.
            taken: what ``storage.Sharing`` takes.
        """
        name = self.path.name
        if rank():
            storage.write_share(begun, name, self.content)
            return {storage.OPTIMIZER: self.content}
        files, state, metadata, keys = self.content
        sharing = None
        if self.sharded:
            sharing = storage.Sharing(keys, self.abandoned, {} if taken is None else taken)
        storage.write_checkpoint(begun.parent, name, files, state, metadata, begun, sharing)
        return files

    def _write_and_link(
        self, begun: Path, taken: dict[int, str], improved: tuple[str, ...]
    ) -> None:
        """Writes rank 0's part of a checkpoint, moves the links, and removes superseded ones."""
        directory = begun.parent
        name = self.path.name
        self._write_content(begun, taken)
        self.path = directory / name
        if self.removable is None:
            checkpoints = storage.find_checkpoints(directory)
        else:
            # The run's folder may have been moved meanwhile.
            checkpoints = [directory / other.name for other in self.removable]
            checkpoints.append(self.path)
        if "val" in improved:
            storage.replace_link(directory / storage.BEST, name)
        if "ema" in improved:
            storage.replace_link(directory / storage.BEST_EMA, f"{name}/{storage.EMA}")
        keep_last = self.config.KEEP_LAST
        save_freq = self.config.SAVE_FREQ
        self.removable, kept = storage.remove_superseded(
            directory, checkpoints, keep_last, save_freq
        )
        for other in set(kept) - self.kept:
            why = "it contains files of another program, or belongs to another user"
            self.run.info(f"{directory / other} isn't removed (KEEP_LAST): {why}")
        self.kept.update(kept)


def host_copies(tensors: Mapping[Any, paddle.Tensor]) -> Callable[[], dict[Any, np.ndarray]]:
    """Begins a copy of the current values of ``tensors``.

    On a GPU it goes to pinned memory, in its turn on the stream that computes. So what changes the
    tensors comes after it, and this process continues. (A stream of its own would save the GPU the
    time of the copy. But Paddle chooses the stream only for the whole process.)

    Returns:
        A function that waits for the copy, in any thread, and returns the arrays.
    """
    if not num_gpus():
        arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        return lambda: arrays
    pinned = {key: tensor.pin_memory(blocking=False) for key, tensor in tensors.items()}
    done = paddle.device.Event()
    done.record()

    def arrived() -> dict[Any, np.ndarray]:
        # Unlike synchronize, this leaves the interpreter's lock to the training.
        while not done.query():
            time.sleep(0.005)
        return {key: pinned.pop(key).numpy() for key in tensors}

    return arrived


def optimizer_state(
    model: nn.Layer, optimizer: paddle.optimizer.Optimizer
) -> dict[str, paddle.Tensor]:
    """Returns this rank's accumulators by structured name: ``blocks.0.norm1.weight/moment1_0``.

    Paddle's own names count the layers that were made in a process, and another process may count
    otherwise.
    """
    structured = {parameter.name: name for name, parameter in model.named_parameters()}
    # Until its first step, Paddle 2.6 holds restored accumulators apart.
    accumulators = {**optimizer._accumulators_holder, **optimizer.state_dict()}
    state = {}
    for key, value in accumulators.items():
        # The key is <parameter>_<accumulator>, and either may have "_" in it: the first beginning
        # that is a parameter's name counts.
        beginnings = (key[: underscore.start()] for underscore in re.finditer("_", key))
        owner = next((name for name in beginnings if name in structured), None)
        if owner is not None:
            state[f"{structured[owner]}/{key[len(owner) + 1 :]}"] = value
    return state
