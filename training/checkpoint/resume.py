"""How a run goes on from a checkpoint: which one, whether it belongs to this configuration, and
what it restores.
"""

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
from settings.options import COMMAND_LINE, Configuration, leaves, option_keys, plain, value_sources
from settings.plain import value_text, whole_file
from training.checkpoint import storage
from training.checkpoint.progress import Progress
from training.checkpoint.restore import load_checkpoint, restore_statistics
from training.checkpoint.state import read_state
from training.optim.groups import decayed_parameters
from training.setup import Training
from training.versions import versions
from utils import all_gather, rank, world_size
from weights.fit import TABLE

AUTO = "auto"
# What may change without being named: where things lie, how the work is shared out, what a resume
# replaces.
_FREE = (
    "DATA.BATCH_SIZE", "DATA.GLOBAL_BATCH", "DATA.BATCH_SIZE_EVAL", "DATA.NUM_WORKERS", "DATA.PREFETCH",
    "DATA.DATA_PATH", "DATA.CACHE", "MODEL.RESUME", "MODEL.PRETRAINED", "MODEL.PRETRAINED_ALLOW",
    "MODEL.PRETRAINED_CLASSES", "MODEL.PRETRAINED_ADAPTER", "MODEL.RECOMPUTE", "TRAIN.ACCUM_ITER", "TRAIN.LAST_EPOCH",
    "TRAIN.RECIPE_BATCH", "AMP_EVAL",
)  # fmt: skip
_SAME_STATE = ("AdamW", "Adam", "LAMB")  # optimizers that keep the same moments
_COMPARED = ("TASK", "DATA.", "MODEL.", "TRAIN.", "SEED", "AMP")


def resume(training: Training) -> tuple[Progress, Path | None]:
    """Restores what MODEL.RESUME names into ``training``; nothing on the disk changes.

    Returns:
        (how far the run is: nowhere, without a checkpoint; the checkpoint).

    Raises:
        InputError: on every rank: no checkpoint, a damaged one, of other settings, of another model
            or training set.
    """
    config = training.config
    run = training.run
    notes = []
    problem = None
    chosen = None
    if rank() == 0:  # one reads the hashes and sees the folder as it is
        try:
            chosen = _choose(config, run.checkpoints, notes)
        except InputError as error:
            problem = str(error)
    notes, problem, chosen = all_gather((notes, problem, chosen and str(chosen)))[0]
    if problem:
        raise InputError(problem)
    for note in notes:
        run.info(note)
    chosen = Path(chosen) if chosen else None
    progress = _restore(training, chosen) if chosen else Progress(epoch=config.TRAIN.LAST_EPOCH)
    # A job that is started again and again finds a run done, perhaps without its result.
    if progress.epoch >= config.TRAIN.NUM_EPOCHS + (config.MODEL.RESUME == AUTO):
        raise InputError(
            f"epoch {progress.epoch} is done already and TRAIN.NUM_EPOCHS is {config.TRAIN.NUM_EPOCHS};"
            " raise it with -o TRAIN.NUM_EPOCHS N"
        )
    return progress, chosen


def rewind_folder(training: Training, progress: Progress, chosen: Path | None) -> None:
    """Makes the run's folder what it was at ``chosen``. Later lines are removed from metrics.jsonl;
    a folder of its own gets the checkpoint's best.
    """
    run = training.run
    lost = {}
    if rank() == 0:
        lost = _settle(run.checkpoints, chosen, progress)
        if left := storage.remove_leftovers(run.checkpoints):
            run.info(
                f"{run.checkpoints} also holds {some_of(left)}, which no run made: left as they are"
            )
        for name in dict.fromkeys(lost.values()):
            run.info(f"the best so far, {name}, isn't whole; the best from now on takes its place")
        run.rewind(progress.epoch, progress.step if progress.samples else 0)
    progress.forget_best(all_gather(lost)[0])


def _choose(config: Configuration, own: Path, notes: list[str]) -> Path | None:
    """The checkpoint to go on from, verified."""
    asked = config.MODEL.RESUME
    if asked is None:
        return None
    with reading(asked, "the path of a checkpoint"):
        # which goes round no loop of links
        own, chosen = (Path(os.path.realpath(path)) for path in (own, asked))
    for link in storage.LINKS:  # a copy may have followed them
        if os.path.lexists(own / link) and not (own / link).is_symlink():
            kind = "folder" if (own / link).is_dir() else "file"
            raise InputError(
                f"{own / link} is a {kind}, expected a link to one of its checkpoints; remove it"
            )
    found = storage.find_checkpoints(own)
    # A run's folder stands for its newest checkpoint.
    if asked != AUTO and os.path.isdir(chosen / "checkpoints"):
        newest = _newest(chosen / "checkpoints", notes)
        if newest is None:
            raise InputError(
                f"-resume={asked}: {chosen / 'checkpoints'} holds no checkpoint to go on from"
            )
        # In this run's own folder, damaged later checkpoints are set aside, as for auto.
        if newest.parent == own:
            return newest
        chosen = newest
    if asked != AUTO:
        storage.verify(chosen)
        read_state(chosen)
        if (found or chosen.parent == own) and not storage.is_name(chosen.name):
            raise InputError(
                f"{chosen}: a checkpoint of a run is called epoch_<number>; give it its name back"
            )
        # the best may be
        if not all(_is_copy(own_one, chosen.parent / own_one.name) for own_one in found):
            raise InputError(
                f"{own} holds another run than {chosen}; go on from its own, or choose another -output"
            )
        if later := [
            own_one for own_one in found if storage.position(own_one) > storage.position(chosen)
        ]:
            raise InputError(
                f"{chosen}: later checkpoints are in the same folder ({', '.join(f.name for f in later)});"
                " remove them, or choose another -output"
            )
        return chosen
    newest = _newest(own, notes)
    if newest is None:
        notes.append(f"-resume=auto: no checkpoint in {own}; the run starts afresh")
    return newest


def _newest(checkpoints: Path, notes: list[str]) -> Path | None:
    """Returns the newest whole checkpoint in a folder, or None if there is no checkpoint. Damaged
    ones are noted.

    Raises:
        InputError: all are damaged.
    """
    found = storage.find_checkpoints(checkpoints)
    for candidate in reversed(found):
        try:
            storage.verify(candidate)
            read_state(candidate)
            return candidate
        except InputError as error:
            notes.append(str(error).partition("; take an earlier one")[0])
    if found:
        raise InputError(
            f"{checkpoints}: none of its {len(found)} checkpoints is whole ({notes[0]}); remove them to start afresh"
        )
    return None


def _is_copy(one: Path, other: Path) -> bool:
    if one == other:
        return True
    try:
        sums = [whole_file(place / storage.SUMS, storage.LONGEST_SUMS) for place in (one, other)]
    except (OSError, Unreadable):
        return False
    return sums[0] == sums[1]


def _restore(training: Training, chosen: Path) -> Progress:
    if not chosen.is_dir():
        raise InputError(
            f"{chosen} isn't seen by rank {rank()}; all machines need the same folder", shared=False
        )
    config = training.config
    state = read_state(chosen)
    then = _settings(config, state, chosen)
    with storage.reading_checkpoint(chosen, storage.STATE, "the state of a run of this task"):
        for found in state["best"].values():
            training.task.score(found)
            training.task.line("best", found)
    for change in _compare(config, then, chosen):
        training.run.info(f"changed, as the command line names it: {change}")
    if state.get("length"):  # it was measured for these
        for key in ("TRAIN.MAX_MINUTES", "TRAIN.NUM_EPOCHS"):
            if then[key] != (now := dict(leaves(config))[key]):
                before = printable(str(then[key]))
                raise InputError(
                    f"{chosen}: TRAIN.MAX_MINUTES fixed its run's length, {state['length'][1]:.4g} epochs; {key} is"
                    f" {now} and was {before}: leave it so, or start from the weights with -pretrained"
                )
    images = len(training.loader.dataset)
    if state["images"] != images:
        raise InputError(
            f"{chosen}: its run had {state['images']} training images, the data has {images};"
            " give its own data, or start from its weights with -pretrained"
        )
    classes = training.run.classes
    theirs = state.get("classes")
    if classes and theirs and classes != theirs:
        raise InputError(
            f"{chosen}: its run had the classes {some_of(theirs)}, the data has {some_of(classes)};"
            " give its own data, or start from its weights with -pretrained"
        )
    epoch = state["epoch"]
    if config.DATA.SHUFFLE_MODE == "shard" and state["samples"] and state["ranks"] != world_size():
        raise InputError(
            f"{chosen} is within an epoch of {state['ranks']} processes' own parts (DATA.SHUFFLE_MODE shard), found"
            f" {world_size()}; go on with {state['ranks']}, or from a checkpoint at an epoch's end"
        )
    # in the run's own file it says where the run began
    asked = value_sources(config).get("TRAIN.LAST_EPOCH")
    if config.TRAIN.LAST_EPOCH not in (0, epoch) and asked and asked.source == COMMAND_LINE:
        raise InputError(
            f"TRAIN.LAST_EPOCH is {config.TRAIN.LAST_EPOCH}, the checkpoint's last epoch is {epoch}; leave it out"
        )
    load_checkpoint(chosen, training.model, training.optimizer, training.averaged_model)
    training.scaler.load_state_dict(state["scaler"])
    training.optimizer.set_lr(state["lr"])
    if state["ranks"] == world_size():
        restore_statistics(chosen, training.evaluated_models)
    # once no toolkit's
    here = {name: version for name, version in versions().items() if name in state["versions"]}
    if state["versions"] != here:
        training.run.info(
            f"saved under {state['versions']}, this is {here}: last digits may differ"
        )
    for line in train_otherwise(config, training.model, state.get("behaviour", 1)):
        training.run.info(line)
    within = f", {state['samples']} samples into the next" if state["samples"] else ""
    training.run.info(f"resumed after epoch {epoch}{within}, from {chosen}")
    return Progress(
        **{part.name: state[part.name] for part in fields(Progress) if part.name in state}
    )


def _settings(config: Configuration, state: dict[str, Any], chosen: Path) -> dict[str, Any]:
    """Returns the settings that the checkpoint's run had, by dotted key, with today's keys."""
    with storage.reading_checkpoint(chosen, storage.STATE, "a run's state"):
        try:
            then = default_values(config) | kept_values(state["config"])
        except InputError as error:
            raise Unreadable(f"its configuration can't be one: {error}") from None
        if type(name := then["TRAIN.OPTIMIZER.NAME"]) is not str:
            raise Unreadable(f"its TRAIN.OPTIMIZER.NAME is {value_text(name)}, expected a text")
        return then


def _compare(config: Configuration, then: dict[str, Any], chosen: Path) -> list[str]:
    """Returns the settings that differ from those that the run was trained with: "KEY before ->
    now".

    Raises:
        InputError: settings differ that the command line doesn't name; the line lists them.
    """
    now = dict(leaves(plain(config)))
    names = [settings["TRAIN.OPTIMIZER.NAME"] for settings in (then, now)]
    if names[0] != names[1] and not set(names) <= set(_SAME_STATE):
        raise InputError(
            f"{chosen} holds the state of {names[0]}, with which {names[1]} can't go on; leave TRAIN.OPTIMIZER.NAME as"
            " it was, or start from its weights with -pretrained"
        )
    changed = {
        key: f"{key} {printable(str(then.get(key)))} -> {value}"
        for key, value in now.items()
        if key.startswith(_COMPARED) and key not in _FREE and then.get(key) != value
    }
    named = option_keys(config)
    if unnamed := [change for key, change in changed.items() if key not in named]:
        raise InputError(
            f"{chosen} was trained with other settings: {', '.join(unnamed)}; leave them as they were, or name what is"
            " meant to change with a flag or -o KEY VALUE"
        )
    return list(changed.values())


def train_otherwise(config: Configuration, model: paddle.nn.Layer, behaviour: int) -> Iterator[str]:
    """Yields a line for each thing that a run of an older ``saver.BEHAVIOUR`` did otherwise with
    the same settings.
    """
    if behaviour < 2:
        if any(isinstance(layer, BATCH_NORMS) for layer in model.sublayers()):
            yield "its batch norms took in variances over n values; from here on, over n - 1, as PyTorch's"
        tables = [name for name in decayed_parameters(config, model) if name.endswith(TABLE)]
        if tables and config.TRAIN.WEIGHT_DECAY and not config.TRAIN.DECAY_ALL:
            yield "its tables of relative positions had no weight decay; from here on they have, as BEiT's authors'"


def _settle(own: Path, chosen: Path | None, progress: Progress) -> dict[str, str]:
    """Makes the run's folder what it was when ``chosen`` was written: no later ones, which are
    damaged; links in place.

    Returns:
        by split, the best checkpoints that aren't whole.
    """
    own = own.resolve()
    own.mkdir(parents=True, exist_ok=True)
    if chosen is None:
        return {}
    lost = {}
    if chosen.parent == own:
        found = storage.find_checkpoints(own)
        for damaged in found[found.index(chosen) + 1 :]:
            os.rename(damaged, _aside(damaged))
        storage.replace_link(own / storage.LAST, chosen.name)
    for split, link, file in (
        ("val", storage.BEST, ""),
        ("ema", storage.BEST_EMA, f"/{storage.EMA}"),
    ):
        if split not in progress.best:
            (own / link).unlink(missing_ok=True)
            continue
        name = progress.best[split]["checkpoint"]
        if _bring_checkpoint(chosen.parent / name, own):
            storage.replace_link(own / link, name + file)
        else:  # the best there is from now on
            (own / link).unlink(missing_ok=True)
            lost[split] = name
    return lost


def _aside(damaged: Path) -> Path:
    """Returns a path beside a damaged checkpoint at which nothing lies yet."""
    names = itertools.chain(
        [f"damaged_{damaged.name}"], (f"damaged_{damaged.name}-{n}" for n in itertools.count(2))
    )
    return next(path for path in map(damaged.with_name, names) if not os.path.lexists(path))


def _bring_checkpoint(best: Path, own: Path) -> bool:
    """Copies a whole checkpoint into the run's folder, unless it lies there; returns whether it is
    there now.
    """
    try:
        names = storage.verify(best)
    except InputError:
        return False
    target = own / best.name
    if not target.exists():
        with making_folder(target) as temporary:
            for name in names:
                with open_file(best / name) as source, open(temporary / name, "xb") as file:
                    shutil.copyfileobj(source, file)
                    file.flush()
                    os.fsync(file.fileno())
    return True
