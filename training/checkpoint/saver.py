"""When a run saves, and how it goes on meanwhile: the copy is begun at the step, a thread writes
it.
"""

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
from settings.options import Configuration, plain
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

# raised when the same settings train otherwise than before; ``resume.train_otherwise`` says how
BEHAVIOUR = 2
_NAMES = {"val": storage.MODEL, "ema": storage.EMA}
BUSY = "busy"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # another folder is as full


class _Problem(NamedTuple):
    """Why a checkpoint wasn't written.

    Args:
        fatal: the run has to end.
        elsewhere: another folder may take it.
        missing: a file or a folder isn't there.
        instead: what there is in its place.
    """

    text: str
    fatal: bool
    elsewhere: bool = False
    missing: bool = False
    instead: str = ""


def own_statistics(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """Returns what a rank holds by itself: batch norm's running statistics, which no gradient
    brings together.
    """
    parameters = {name for name, _ in model.named_parameters()}
    return {
        name: t
        for name, t in model.state_dict().items()
        if name not in parameters and t.is_floating_point()
    }


class Saver:
    """Saves checkpoints of a run; every rank calls its methods. Rank 0 writes, and where the
    optimizer's state is sharded, each other rank writes its share.

    Args:
        parts: the model as "val", with MODEL_EMA the averaged one as "ema".
        train: the training set; a run can't go on with another number of images.

    Attributes:
        path: the newest checkpoint's folder.
        saved_step: the step of the last save, or that the run began with.
    """

    def __init__(
        self,
        config: Configuration,
        run: Run,
        parts: dict[str, nn.Layer],
        optimizer: paddle.optimizer.Optimizer,
        scaler: Any,
        train: ImageDataset,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.run = run
        self.parts = parts
        self.optimizer = optimizer
        self.scaler = scaler
        self.constant = {
            "format": FORMATS[-1],
            "behaviour": BEHAVIOUR,
            "versions": versions(),
            "ranks": world_size(),
        }
        self.constant["images"] = len(train)
        self.constant |= {
            "classes": train.classes,
            "model": config.MODEL.NAME,
            "config": plain(config),
        }
        self.trained = {name for name, p in parts["val"].named_parameters() if not p.stop_gradient}
        self.base: dict[str, Any] = {}  # what tells an adapter's base, from the first save on
        self.sharded = isinstance(optimizer, ShardedOptimizer)
        self.abandoned = threading.Event()  # another rank failed: rank 0 doesn't wait for its share
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None
        self.instead = ""  # what there is where a checkpoint couldn't be written
        # the folder of the checkpoint that is being written, where it was begun
        self.begun: Path | None = None
        # what this rank writes of it: rank 0's files and more, another rank's share
        self.content: Any = None
        # superseded checkpoints that stay, because they hold something else, too
        self.kept: set[str] = set()
        # checkpoints that a save may have to remove; None: not listed yet
        self.removable: list[Path] | None = None
        self._set_saved(progress or Progress())

    def _set_saved(self, progress: Progress) -> None:
        self.path = self.run.checkpoints / progress.name
        self.saved_step = progress.step

    @property
    def failed(self) -> bool:
        """Returns whether the background writing failed, which ``wait`` is to tell."""
        return self.failure is not None

    def due(self, progress: Progress) -> bool:
        """Returns whether SAVE_STEPS asks for a checkpoint."""
        every = self.config.SAVE_STEPS
        return bool(every) and progress.step // every > self.saved_step // every

    def wait(self, last: bool = False) -> None:
        """Waits until nothing is being written.

        Args:
            last: nothing will be saved after this.

        Raises:
            RunError: on every rank, when the writing failed, unless there is more to come and
                SAVE_ON_ERROR goes on.
        """
        problem = self._end_writing()
        if problem is None:
            self.content = None
            return
        if rank() == 0 and self.begun:
            remove(self._begun_now())  # another rank may have written there when it was removed
        instead = (problem.elsewhere and self._save_elsewhere()) or problem.instead
        self.content = None
        text = f"{problem.text}; {instead}" if instead else problem.text
        if problem.fatal or last:
            raise RunError(text, shared=True)
        self.run.info(f"{text}; the run goes on (SAVE_ON_ERROR)")
        self.failure = None

    def _end_writing(self) -> "_Problem | None":
        """Waits until no rank writes; returns what went wrong, the same on every rank."""
        # The ranks meet again and again: in one long wait gloo would lose patience after 30 s.
        while True:
            told = all_gather(self._status())
            failed = [status for status in told if status not in (None, BUSY)]
            if failed:
                self.abandoned.set()
            if BUSY not in told:
                break
        self.abandoned.clear()
        # Where one rank fails, rank 0 removes the folder, which others may then miss.
        return min(failed, key=lambda problem: problem.missing, default=None)

    def _status(self) -> "str | _Problem | None":
        """On each rank: BUSY, None, or what went wrong."""
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
        return _Problem(
            f"{self.path.name} wasn't saved ({error}): {remedy(error)}",
            fatal=stop,
            elsewhere=stop
            and error.errno not in _FULL
            and not (self.run.checkpoints / self.path.name).exists(),
            missing=error.errno == errno.ENOENT,
            instead=self.instead,
        )

    def _save_elsewhere(self) -> str:
        """Writes a checkpoint beside the run's folder, or into the current folder, since the run's
        own takes none.

        Returns:
            Words that say where it is, or "".
        """
        run = self.run.directory
        # Rank 0 says where: other ranks may be in another folder.
        for parent in all_gather(
            [str(parent) for parent in dict.fromkeys((run.parent, Path.cwd()))]
        )[0]:
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
                return f"it is saved in {saved}, from where -resume goes on with a new -output"
            if rank() == 0:
                remove(Path(begun))
        return ""

    def _earlier(self) -> str:
        with contextlib.suppress(OSError):
            if last := newest_whole(self.run.checkpoints):
                if last.resolve().name == self.path.name:
                    return f"but {last.resolve()} is whole"
                return f"the last whole checkpoint is {last.resolve()}"
        return "there is none before it"

    def save(
        self,
        progress: Progress,
        statistics: dict[str, paddle.Tensor] | None = None,
        windows: Sequence[dict[str, Any]] = (),
        improved: tuple[str, ...] = (),
        described: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Takes a copy of the state and begins to write it; before that, the writing of the last
        one has to end.

        Args:
            progress: at an update: what came of the steps since isn't in the state.
            statistics: this rank's, within an epoch; None: they are the same on every rank.
            windows: within an epoch: what each rank has summed up since the last report
                (``Window.gather``).
            improved: which of "val" (the model) and "ema" is the best so far: its link moves, too.
            described: by split, what its evaluation adds to the description of its weights.
        """
        asked = time.perf_counter()
        self.wait()
        self._set_saved(progress)
        own = optimizer_state(self.parts["val"], self.optimizer)
        arrays = {key: t.numpy() for key, t in statistics.items()} if statistics else {}
        begun, problem = self._begin_folder()
        told = all_gather((arrays, sorted(own) if self.sharded else [], begun))
        ranks, keys, (begun, *_) = zip(*told, strict=True)
        self.begun = Path(begun) if begun else None
        blocks = block_weights(self.optimizer, keep=rank() == 0)
        if rank() and begun:
            self._start(asked, self._write_share, host_copies(own))
        # The same step may be asked for once more.
        if rank() or self.path.exists():
            return
        parts = {split: model.state_dict() for split, model in self.parts.items()} | {
            storage.OPTIMIZER: own
        }
        tensors = {(part, key): t for part, tensors in parts.items() for key, t in tensors.items()}
        received = {place: blocks[t.name] for place, t in tensors.items() if t.name in blocks}
        copies = host_copies({place: t for place, t in tensors.items() if place not in received})

        def copied() -> dict[tuple[str, str], np.ndarray]:
            return copies() | received

        state = asdict(progress) | {"window": list(windows), "lr": self.optimizer.get_lr()}
        state |= {"scaler": self.scaler.state_dict()} | self.constant
        metadata = self._metadata(described or {})
        self._start(
            asked, self._write, copied, ranks, state, improved, metadata, list(keys), problem
        )

    def _begin_folder(self) -> tuple[str | None, OSError | None]:
        """On rank 0, begins the folder into which all ranks write.

        Returns:
            (the folder; None: one rank writes, or there is nothing to do; why it couldn't be made).
        """
        if rank() or not self.sharded or self.path.exists():
            return None, None
        try:
            return str(self._begin_checkpoint()), None
        except OSError as error:
            return str(unfinished_path(self.path)), error

    def _begin_checkpoint(self) -> Path:
        """Makes the folder of a checkpoint until it is whole, where the run is."""
        while True:
            directory = self.run.checkpoints
            begun = storage.begin_checkpoint(directory, self.path.name)
            if self.run.checkpoints == directory:
                return begun
            # The run's folder was moved meanwhile, and what was made is in its old place.
            with contextlib.suppress(OSError):
                for made in (begun, directory, directory.parent):
                    made.rmdir()

    def _start(self, asked: float, write: Callable[..., dict[str, Arrays]], *args: Any) -> None:
        """Lets a thread write.

        Args:
            asked: when the save was asked for.
            write: returns what it has written, by file.
        """
        stall = time.perf_counter() - asked
        name = self.path.name
        self.instead = ""

        def work() -> None:
            started = time.perf_counter()
            try:
                files = write(*args)
            except storage.Abandoned:  # the rank that failed tells why
                return
            except Exception as error:
                self.instead = self.instead or self._earlier()
                self.failure = error
                return
            size = sum(array.nbytes for arrays in files.values() for array in arrays.values())
            took = time.perf_counter() - started
            self.run.local.info(
                f"saved {name}: {size / 1e6:.1f} MB, written in {took:.2f} s; the training waited {stall:.3f} s"
            )

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def _metadata(self, described: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
        """What each file of weights says of itself."""
        config = self.config
        classes = self.constant["classes"]
        said = {
            split: describe(config, classes, config.TASK, **described.get(split, {}))
            for split in self.parts
        }
        return {_NAMES[split]: {METADATA: own.to_json()} for split, own in said.items()}

    def _files(self, copied: Callable[[], dict], statistics: Sequence[Arrays]) -> dict[str, Arrays]:
        """The arrays of each file that rank 0 writes."""
        parts = {split: {} for split in (*self.parts, storage.OPTIMIZER)}
        for (part, key), array in copied().items():
            parts[part][key] = array
        # A checkpoint serves for evaluation as well: it gets the ranks' mean, as at an epoch's end.
        for key, own in statistics[0].items():
            split, name = key.split("/", 1)
            mean = np.mean([arrays[key] for arrays in statistics], axis=0, dtype=np.float64)
            parts[split][name] = mean.astype(own.dtype)
        files = {
            _NAMES[split]: file_arrays(model, parts[split]) for split, model in self.parts.items()
        }
        files |= self._adapter(parts)
        optimizer = storage.share_name(0, world_size()) if self.sharded else storage.OPTIMIZER
        files[optimizer] = parts[storage.OPTIMIZER]
        if statistics[0] and len(statistics) > 1:
            by_rank = {
                f"{place}/{key}": a
                for place, arrays in enumerate(statistics)
                for key, a in arrays.items()
            }
            files[storage.STATISTICS] = by_rank
        return files

    def _adapter(self, parts: dict[str, Arrays]) -> dict[str, Arrays]:
        """The files of what a training added to a model (``weights.adapters``), none where it added
        nothing.
        """
        files = {}
        left = {}
        model: Any
        for split, model in self.parts.items():
            left |= {
                f"{split}/{n}": a
                for n, a in unmerged_tensors(parts[split]).items()
                if split == "val" or is_added(n)
            }
            if self.config.TRAIN.ADAPTER.NAME:
                file = storage.ADAPTER if split == "val" else storage.ADAPTER_EMA
                files[file] = adapter_arrays(model, parts[split], self.trained)
        if files and not self.base:
            self.base = of_base(model, parts["val"], self.trained)
        return files | ({storage.UNMERGED: left} if left else {})

    def _with_adapters(
        self, metadata: dict[str, dict[str, str]], files: dict[str, Arrays]
    ) -> dict[str, dict[str, str]]:
        """The metadata of the files of weights, and of those of adapters, which say more."""
        adapter = self.config.TRAIN.ADAPTER
        rank = adapter.RANK if adapter.NAME == "lora" else None
        scale = adapter.ALPHA / adapter.RANK
        models = {storage.ADAPTER: storage.MODEL, storage.ADAPTER_EMA: storage.EMA}
        return metadata | {
            file: metadata[of] | adapter_metadata(adapter.NAME, scale, self.base, rank, files[file])
            for file, of in models.items()
            if file in files
        }

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
            keys: by rank, the tensors in its share, if the optimizer's state is sharded.
            problem: why no folder could be begun.
        """
        files = self._files(copied, statistics)
        self.content = (files, state, self._with_adapters(metadata, files), keys)
        if problem:
            raise problem
        self.begun = self.begun or self._begin_checkpoint()
        taken: dict[int, str] = {}
        self._where_the_run_is(lambda begun: self._write_and_link(begun, taken, improved))
        if self.path.parent != self.begun.parent:  # the move may have cut something short
            with contextlib.suppress(OSError):
                storage.remove_leftovers(self.path.parent)
        self.content = None
        return files

    def _write_share(self, copied: Callable[[], dict]) -> dict[str, Arrays]:
        """Writes what another rank than 0 has of a checkpoint."""
        # Kept until the next save: only then this rank knows that rank 0 has made the checkpoint
        # whole.
        self.content = copied()
        return self._where_the_run_is(self._write_content)

    def _where_the_run_is(self, write: Callable[[Path], Any]) -> Any:
        """Calls ``write`` with the folder that was begun; anew, if the run's folder is moved
        meanwhile.
        """
        while True:
            begun = self._begun_now()
            try:
                return write(begun)
            except FileNotFoundError:
                if self._begun_now() == begun:
                    raise

    def _begun_now(self) -> Path:
        """Returns where the folder that was begun is now, as the run's folder may have been moved."""
        begun = self.begun
        assert begun is not None
        moved = self.run.checkpoints / begun.name
        return begun if begun.exists() and not moved.exists() else moved

    def _write_content(self, begun: Path, taken: dict[int, str] | None = None) -> dict[str, Arrays]:
        """Writes this rank's part of a checkpoint; returns its arrays, by file.

        Args:
            begun: the checkpoint's folder until it is whole.
            taken: what ``storage.Sharing`` takes.
        """
        name = self.path.name
        if rank():
            storage.write_share(begun, name, self.content)
            return {storage.OPTIMIZER: self.content}
        files, state, metadata, keys = self.content
        sharing = (
            storage.Sharing(keys, self.abandoned, {} if taken is None else taken)
            if self.sharded
            else None
        )
        storage.write_checkpoint(begun.parent, name, files, state, metadata, begun, sharing)
        return files

    def _write_and_link(
        self, begun: Path, taken: dict[int, str], improved: tuple[str, ...]
    ) -> None:
        """Writes rank 0's part of a checkpoint, moves the links to it, and removes what it
        supersedes.
        """
        directory = begun.parent
        name = self.path.name
        self._write_content(begun, taken)
        self.path = directory / name
        if self.removable is None:
            found = storage.find_checkpoints(directory)
        else:
            # The run's folder may have been moved meanwhile.
            found = [directory / other.name for other in self.removable] + [self.path]
        if "val" in improved:
            storage.replace_link(directory / storage.BEST, name)
        if "ema" in improved:
            storage.replace_link(directory / storage.BEST_EMA, f"{name}/{storage.EMA}")
        keep_last = self.config.KEEP_LAST
        save_freq = self.config.SAVE_FREQ
        self.removable, kept = storage.remove_superseded(directory, found, keep_last, save_freq)
        for other in set(kept) - self.kept:
            why = "it holds what no run made, or is another user's"
            self.run.info(f"{directory / other} isn't removed (KEEP_LAST): {why}")
        self.kept.update(kept)


def host_copies(tensors: Mapping[Any, paddle.Tensor]) -> Callable[[], dict[Any, np.ndarray]]:
    """Begins a copy of what ``tensors`` hold now; returns what waits for it and gives the arrays,
    in any thread.

    On a GPU it goes to pinned memory, in its turn on the stream that computes. So what changes the
    tensors comes after it, and this process goes on. (A stream of its own would save the GPU the
    time of the copy. But Paddle chooses the stream only for the whole process.)
    """
    if not num_gpus():
        arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        return lambda: arrays
    pinned = {key: tensor.pin_memory(blocking=False) for key, tensor in tensors.items()}
    done = paddle.device.Event()
    done.record()

    def arrived() -> dict[Any, np.ndarray]:
        # which, unlike synchronize, leaves the interpreter's lock to the training
        while not done.query():
            time.sleep(0.005)
        return {key: pinned.pop(key).numpy() for key in tensors}

    return arrived


def optimizer_state(
    model: nn.Layer, optimizer: paddle.optimizer.Optimizer
) -> dict[str, paddle.Tensor]:
    """Returns this rank's accumulators by structured name (``blocks.0.norm1.weight/moment1_0``):
    Paddle's own names count the layers made in a process, and another process may count
    differently.
    """
    structured = {parameter.name: name for name, parameter in model.named_parameters()}
    own = {}
    # Until a step, Paddle 2.6 holds what was restored apart.
    state = {**optimizer._accumulators_holder, **optimizer.state_dict()}
    for key, value in state.items():
        # A name may have "_", too: of the beginnings that end before one, the first that is a name.
        beginnings = (key[: found.start()] for found in re.finditer("_", key))
        owner = next((name for name in beginnings if name in structured), None)
        if owner is not None:
            own[f"{structured[owner]}/{key[len(owner) + 1 :]}"] = value
    return own
