"""Resumes a run: finds the checkpoint, checks that it belongs to this configuration, restores it."""

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import paddle

from config import default_values
from errors import InputError, Unreadable, open_file, printable, reading
from launch.files import making_folder
from loading.label_spaces import some_of
from models.layers.batch_norm import BATCH_NORMS
from settings.architectures import kept_values
from settings.configuration import (
    COMMAND_LINE,
    Configuration,
    leaves,
    option_keys,
    plain,
    value_sources,
)
from settings.plain import value_text, whole_file
from training.checkpoint import storage
from training.checkpoint.kept import remove_kept
from training.checkpoint.progress import Progress
from training.checkpoint.restore import load_checkpoint, restore_statistics
from training.checkpoint.state import read_state
from training.optim.groups import decayed_parameters
from training.setup import Training
from training.versions import versions
from utils import all_gather, rank, world_size
from weights.fit import TABLE
from weights.sums import LONGEST_SUMS

AUTO = "auto"
# Keys that may change without being named: where things lie, how the work is shared, and what a
# resume replaces.
_FREE = (
    "DATA.BATCH_SIZE",
    "DATA.GLOBAL_BATCH",
    "DATA.BATCH_SIZE_EVAL",
    "DATA.NUM_WORKERS",
    "DATA.PREFETCH",
    "DATA.DATA_PATH",
    "DATA.CACHE",
    "MODEL.RESUME",
    "MODEL.PRETRAINED",
    "MODEL.PRETRAINED_ALLOW",
    "MODEL.PRETRAINED_CLASSES",
    "MODEL.PRETRAINED_ADAPTER",
    "MODEL.RECOMPUTE",
    "TRAIN.ACCUM_ITER",
    "TRAIN.LAST_EPOCH",
    "TRAIN.RECIPE_BATCH",
    "AMP_EVAL",
)
# Optimizers that keep the same moments, so that one can continue with another's state.
_SAME_STATE = ("AdamW", "Adam", "LAMB")
# The beginnings of keys that are compared with those of the checkpoint's run.
_COMPARED = ("TASK", "METHOD.", "DATA.", "MODEL.", "TRAIN.", "SEED", "AMP")


def resume(training: Training) -> tuple[Progress, Path | None]:
    """Restores the checkpoint that MODEL.RESUME names. Nothing on the disk changes.

    Returns:
        (how far the run is; the checkpoint, or None without one: the run starts afresh).

    Raises:
        InputError: on every rank, when there is no checkpoint, it is damaged, or it is of other
            settings, another model or another training set.
    """
    config = training.config
    run = training.run
    notes = []
    problem = None
    chosen = None
    # Rank 0 alone reads the hashes, and sees the folder as it is.
    if rank() == 0:
        try:
            chosen = _choose(config, run.checkpoints, notes)
        except InputError as error:
            problem = str(error)
    notes, problem, path = all_gather((notes, problem, chosen and str(chosen)))[0]
    if problem:
        raise InputError(problem)
    for note in notes:
        run.info(note)
    chosen = Path(path) if path else None
    progress = _restore(training, chosen) if chosen else Progress(epoch=config.TRAIN.LAST_EPOCH)
    epochs = config.TRAIN.NUM_EPOCHS
    # A job that is started again and again with "auto" finds its run done, perhaps without a
    # result, which it then writes.
    may_be_done = config.MODEL.RESUME == AUTO and progress.epoch == epochs
    if progress.epoch >= epochs and not may_be_done:
        raise InputError(
            f"epoch {progress.epoch} is completed and TRAIN.NUM_EPOCHS is {epochs};"
            " raise it with -o TRAIN.NUM_EPOCHS N"
        )
    return progress, chosen


def rewind_folder(training: Training, progress: Progress, chosen: Path | None) -> None:
    """Restores the run's folder to its state at ``chosen``.

    Later checkpoints, which are damaged, get another name. Later lines are removed from
    metrics.jsonl, and later steps from bad_steps.json with the checkpoints that were kept for them.
    A new folder gets a copy of the best checkpoint.

    Args:
        chosen: the checkpoint that was restored; None: the run starts afresh.
    """
    run = training.run
    lost = {}
    if rank() == 0:
        lost = _rewind_checkpoints(run.checkpoints, chosen, progress)
        if others := storage.remove_leftovers(run.checkpoints):
            run.info(
                f"{run.checkpoints} also contains {some_of(others)}, which no run wrote;"
                " they are kept"
            )
        for name in dict.fromkeys(lost.values()):
            run.info(
                f"the best checkpoint so far, {name}, is incomplete; the next best one replaces it"
            )
        run.rewind(progress.epoch, progress.step if progress.samples else 0)
        remove_kept(run.directory, [record["step"] for record in run.bad_steps])
    progress.forget_best(all_gather(lost)[0])


def _choose(config: Configuration, directory: Path, notes: list[str]) -> Path | None:
    """Returns the verified checkpoint to resume from; None: the run starts afresh.

    Args:
        directory: the folder of the run's own checkpoints.
        notes: gets lines for the log.
    """
    asked = config.MODEL.RESUME
    if asked is None:
        return None
    with reading(asked, "the path of a checkpoint"):
        # Unlike Path.resolve, realpath does not fail at a loop of links.
        directory = Path(os.path.realpath(directory))
        chosen = Path(os.path.realpath(asked))
    for name in storage.LINKS:
        link = directory / name
        # A copy of the folder may have followed the links.
        if os.path.lexists(link) and not link.is_symlink():
            kind = "folder" if link.is_dir() else "file"
            raise InputError(
                f"{link} is a {kind}, expected a link to one of its checkpoints; remove it"
            )
    if asked == AUTO:
        newest = _newest(directory, notes)
        if newest is None:
            notes.append(f"-resume=auto: no checkpoint in {directory}; starting a new run")
        return newest

    # A run's folder stands for its newest checkpoint.
    if os.path.isdir(chosen / "checkpoints"):
        newest = _newest(chosen / "checkpoints", notes)
        if newest is None:
            raise InputError(
                f"-resume={asked}: {chosen / 'checkpoints'} contains no checkpoint to resume from"
            )
        # In this run's own folder, later ones that are damaged don't count, as for auto.
        if newest.parent == directory:
            return newest
        chosen = newest
    storage.verify(chosen)
    read_state(chosen)
    existing = storage.find_checkpoints(directory)
    if (existing or chosen.parent == directory) and not storage.is_name(chosen.name):
        raise InputError(
            f"{chosen}: the checkpoints of a run are named epoch_<number>; rename it back"
        )
    # An earlier resume may have copied the chosen run's best checkpoint into this folder.
    if not all(_is_copy(own, chosen.parent / own.name) for own in existing):
        raise InputError(
            f"{directory} contains another run than {chosen};"
            " resume from its own checkpoint, or choose another -output"
        )
    position = storage.position(chosen)
    if later := [own.name for own in existing if storage.position(own) > position]:
        raise InputError(
            f"{chosen}: later checkpoints are in the same folder ({', '.join(later)});"
            " remove them, or choose another -output"
        )
    return chosen


def _newest(directory: Path, notes: list[str]) -> Path | None:
    """Returns the newest whole checkpoint in a folder, or None if there is no checkpoint.

    Args:
        notes: gets a line for each damaged one.

    Raises:
        InputError: all are damaged.
    """
    checkpoints = storage.find_checkpoints(directory)
    for checkpoint in reversed(checkpoints):
        try:
            storage.verify(checkpoint)
            read_state(checkpoint)
            return checkpoint
        except InputError as error:
            notes.append(str(error).partition("; use an earlier one")[0])
    if checkpoints:
        raise InputError(
            f"{directory}: none of its {len(checkpoints)} checkpoints is complete ({notes[0]});"
            " remove them to start over"
        )
    return None


def _is_copy(one: Path, other: Path) -> bool:
    """Returns whether two checkpoints are the same, by their SHA256SUMS."""
    if one == other:
        return True
    try:
        sums = [whole_file(path / storage.SUMS, LONGEST_SUMS) for path in (one, other)]
    except (OSError, Unreadable):
        return False
    return sums[0] == sums[1]


def _restore(training: Training, chosen: Path) -> Progress:
    """Restores ``training`` from a checkpoint, once it is checked that it belongs to it.

    Returns:
        How far the checkpoint's run was.
    """
    if not chosen.is_dir():
        raise InputError(
            f"rank {rank()} can't access {chosen}; all machines need the same folder", shared=False
        )
    config = training.config
    run = training.run
    state = read_state(chosen)
    before = _settings(config, state, chosen)
    _check_state(training, state, before, chosen)

    load_checkpoint(chosen, training.model, training.optimizer, training.averaged_model)
    training.scaler.load_state_dict(state["scaler"])
    training.optimizer.set_lr(state["lr"])
    if state["ranks"] == world_size():
        restore_statistics(chosen, training.evaluated_models)

    # Earlier releases stored no version of the toolkit.
    here = {name: version for name, version in versions().items() if name in state["versions"]}
    if state["versions"] != here:
        run.info(f"saved with {state['versions']}, resumed with {here}: the last digits may differ")
    for line in changes_of_behaviour(config, training.model, state.get("behaviour", 1)):
        run.info(line)
    within = f", {state['samples']} samples into the next" if state["samples"] else ""
    run.info(f"resumed after epoch {state['epoch']}{within}, from {chosen}")
    names = [field.name for field in fields(Progress)]
    return Progress(**{name: state[name] for name in names if name in state})


def _check_state(
    training: Training, state: dict[str, Any], before: dict[str, Any], chosen: Path
) -> None:
    """Raises InputError if a checkpoint doesn't belong to this training; logs changed settings.

    Args:
        state: the checkpoint's state.json.
        before: the settings of its run, by dotted key.
    """
    config = training.config
    if before["TASK"] != config.TASK:
        raise InputError(
            f"{chosen} is from a run of TASK {printable(str(before['TASK']))}, found TASK"
            f" {config.TASK};"
            " keep that TASK, or start from the weights with -pretrained"
        )
    with storage.reading_checkpoint(chosen, storage.STATE, "the state of a run of this task"):
        for metrics in state["best"].values():
            if config.BEST_METRIC not in ("auto", *metrics):
                raise InputError(
                    f"BEST_METRIC is {config.BEST_METRIC}, which the best evaluation of {chosen}"
                    " hasn't measured; keep the previous metric"
                )
            training.task.score(metrics)
            training.task.line("best", metrics)
    for change in _compare(config, before, chosen):
        training.run.info(f"changed by the command line: {change}")
    if state.get("length"):
        # The length was measured for these two settings.
        now = dict(leaves(config))
        for key in ("TRAIN.MAX_MINUTES", "TRAIN.NUM_EPOCHS"):
            if before[key] != now[key]:
                raise InputError(
                    f"{chosen}: TRAIN.MAX_MINUTES determined the length of its run,"
                    f" {state['length'][1]:.4g} epochs; {key} is {now[key]} and was"
                    f" {printable(str(before[key]))}; keep it, or start from the weights with"
                    " -pretrained"
                )
    advice = "use its own data, or start from its weights with -pretrained"
    images = len(training.loader.dataset)
    if state["images"] != images:
        raise InputError(
            f"{chosen}: its run had {state['images']} training images, but the data has {images};"
            f" {advice}"
        )
    classes = training.run.classes
    stored_classes = state.get("classes")
    if classes and stored_classes and classes != stored_classes:
        raise InputError(
            f"{chosen}: its run had the classes {some_of(stored_classes)}, but the data has"
            f" {some_of(classes)}; {advice}"
        )
    within_epoch = bool(state["samples"])
    if config.DATA.SHUFFLE_MODE == "shard" and within_epoch and state["ranks"] != world_size():
        raise InputError(
            f"{chosen} is within an epoch that {state['ranks']} processes share"
            f" (DATA.SHUFFLE_MODE shard), found {world_size()}; use {state['ranks']},"
            " or a checkpoint at the end of an epoch"
        )
    # In the run's own file TRAIN.LAST_EPOCH says where the run began, which isn't compared.
    source = value_sources(config).get("TRAIN.LAST_EPOCH")
    named = source is not None and source.source == COMMAND_LINE
    last_epoch = config.TRAIN.LAST_EPOCH
    if named and last_epoch not in (0, state["epoch"]):
        raise InputError(
            f"TRAIN.LAST_EPOCH is {last_epoch}, but the checkpoint's last epoch is {state['epoch']};"
            " leave it out"
        )


def _settings(config: Configuration, state: dict[str, Any], chosen: Path) -> dict[str, Any]:
    """Returns the settings of the checkpoint's run by dotted key, with today's keys."""
    with storage.reading_checkpoint(chosen, storage.STATE, "a run's state"):
        try:
            settings = default_values(config) | kept_values(state["config"])
        except InputError as error:
            raise Unreadable(f"its configuration is invalid: {error}") from None
        if type(name := settings["TRAIN.OPTIMIZER.NAME"]) is not str:
            raise Unreadable(f"its TRAIN.OPTIMIZER.NAME is {value_text(name)}, expected a text")
        return settings


def _compare(config: Configuration, before: dict[str, Any], chosen: Path) -> list[str]:
    """Returns the settings that differ from those of the checkpoint's run: "KEY before -> now".

    Raises:
        InputError: settings differ that the command line doesn't name; the line lists them.
    """
    now = dict(leaves(plain(config)))
    optimizer_before = before["TRAIN.OPTIMIZER.NAME"]
    optimizer = now["TRAIN.OPTIMIZER.NAME"]
    if optimizer_before != optimizer and not {optimizer_before, optimizer} <= set(_SAME_STATE):
        raise InputError(
            f"{chosen} has the optimizer state of {optimizer_before}, which {optimizer} can't use;"
            " keep TRAIN.OPTIMIZER.NAME, or start from its weights with -pretrained"
        )
    changes = {}
    for key, value in now.items():
        compared = key.startswith(_COMPARED) and key not in _FREE
        if compared and before.get(key) != value:
            changes[key] = f"{key} {printable(str(before.get(key)))} -> {value}"
    named = option_keys(config)
    if unnamed := [change for key, change in changes.items() if key not in named]:
        raise InputError(
            f"{chosen} was trained with other settings: {', '.join(unnamed)};"
            " keep them, or set what you want to change with a flag or -o KEY VALUE"
        )
    return list(changes.values())


def changes_of_behaviour(
    config: Configuration, model: paddle.nn.Layer, behaviour: int
) -> Iterator[str]:
    """Yields a line for each thing that earlier releases did otherwise with the same settings.

    Args:
        behaviour: the ``saver.BEHAVIOUR`` of the checkpoint's release.
    """
    if behaviour >= 2:
        return
    if any(isinstance(layer, BATCH_NORMS) for layer in model.sublayers()):
        yield (
            "its batch norms averaged variances over n values;"
            " from now on over n - 1, as in PyTorch"
        )
    tables = [name for name in decayed_parameters(config, model) if name.endswith(TABLE)]
    if tables and config.TRAIN.WEIGHT_DECAY and not config.TRAIN.DECAY_ALL:
        yield (
            "its tables of relative positions had no weight decay;"
            " from now on they have, as in the code of BEiT's authors"
        )


def _rewind_checkpoints(directory: Path, chosen: Path | None, progress: Progress) -> dict[str, str]:
    """Restores the folder of checkpoints to its state when ``chosen`` was written.

    Returns:
        By split, the best checkpoints that are incomplete.
    """
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if chosen is None:
        return {}
    if chosen.parent == directory:
        # Those after the newest whole one are damaged.
        checkpoints = storage.find_checkpoints(directory)
        for damaged in checkpoints[checkpoints.index(chosen) + 1 :]:
            os.rename(damaged, _unused_name(damaged))
        storage.replace_link(directory / storage.LAST, chosen.name)
    lost = {}
    links = {"val": directory / storage.BEST, "ema": directory / storage.BEST_EMA}
    for split, link in links.items():
        if split not in progress.best:
            link.unlink(missing_ok=True)
            continue
        name = progress.best[split]["checkpoint"]
        if _bring_checkpoint(chosen.parent / name, directory):
            storage.replace_link(link, name if split == "val" else f"{name}/{storage.EMA}")
        else:
            # The best evaluation from now on takes the place.
            link.unlink(missing_ok=True)
            lost[split] = name
    return lost


def _unused_name(damaged: Path) -> Path:
    """Returns a path beside a damaged checkpoint at which nothing lies yet."""
    path = damaged.with_name(f"damaged_{damaged.name}")
    numbers = itertools.count(2)
    while os.path.lexists(path):
        path = damaged.with_name(f"damaged_{damaged.name}-{next(numbers)}")
    return path


def _bring_checkpoint(best: Path, directory: Path) -> bool:
    """Copies a checkpoint into the run's folder, unless it lies there already.

    Returns:
        Whether it is there now: an incomplete one isn't copied.
    """
    try:
        names = storage.verify(best)
    except InputError:
        return False
    target = directory / best.name
    if target.exists():
        return True
    with making_folder(target) as temporary:
        for name in names:
            with open_file(best / name) as source, open(temporary / name, "xb") as file:
                shutil.copyfileobj(source, file)
                file.flush()
                os.fsync(file.fileno())
    return True
