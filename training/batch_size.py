"""DATA.BATCH_SIZE auto: finds the largest batch that fits into memory.

``find_batch_sizes`` replaces "auto" by a number, before a run's ranks start; so everything after it
reads numbers, and config.yaml holds them. ``agree_on_batch_sizes`` takes the smallest of several
machines.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import paddle

from config import with_values
from datasets import ImageDataset
from errors import InputError, OutOfMemory, Unreadable
from settings.configuration import WITH_VALUES, Configuration, add_note, pair, value_sources
from settings.plain import value_text
from training.checkpoint import newest_whole, storage
from training.checkpoint.state import read_state
from training.command_line import AUTO
from training.step_memory import GPU_RESERVE, StepMemory
from utils import all_gather, free_memory, memory_below_limits, num_gpus, world_size

# An epoch keeps this many updates, as long as an update has this many images.
_UPDATES = 8
_FEWEST = 8
# The largest batch of a device. On a CPU, ViT-S takes half a minute for a step of 128 images.
_MOST_ON_GPU = 1024
_MOST_ON_CPU = 128
# The share of the free memory that ranks on a CPU may take together. The rest is for what isn't
# measured: evaluations, the gaps of a longer run, the cache of files, and other programs.
_CPU_SHARE = 0.8
# On a CPU, larger batches are extrapolated once memory has grown by so many bytes, or after so many
# seconds.
_GROWTH = 256 << 20
_SECONDS = 10.0
# How the origin of a number begins that was found here.
_FOUND = "auto: "


class Found(NamedTuple):
    """A batch size, and why it isn't larger."""

    size: int
    reason: str


def find_batch_sizes(
    config: Configuration,
    train: ImageDataset | None,
    val: ImageDataset,
    ranks: int,
) -> Configuration:
    """Returns the configuration with numbers for DATA.BATCH_SIZE and DATA.BATCH_SIZE_EVAL auto.

    A run that is resumed keeps the numbers of its checkpoint. Otherwise memory is measured for the
    training step, or under EVAL for the evaluation. An evaluation within a training gets the
    training's batch: it needs less memory, because it keeps no activations.

    Args:
        ranks: the number of the run's processes.

    Raises:
        OutOfMemory: not even the smallest batch fits.
        InputError, RunError: as at a run's start.
    """
    data = config.DATA
    if AUTO not in (data.BATCH_SIZE, data.BATCH_SIZE_EVAL):
        return config
    if data.BATCH_SIZE != AUTO and not config.EVAL:
        return with_values(
            config, f"{_FOUND}the training's batch", DATA__BATCH_SIZE_EVAL=data.BATCH_SIZE
        )
    if config.EVAL and data.BATCH_SIZE_EVAL != AUTO:
        # An evaluation doesn't read it.
        return with_values(
            config, f"{_FOUND}the evaluation's batch", DATA__BATCH_SIZE=data.BATCH_SIZE_EVAL
        )
    advice = "-batch_size sets another"
    found = _of_checkpoint(config)
    if found is None:
        dataset = val if config.EVAL else train
        assert dataset is not None
        found = _find(config, dataset, val.classes, ranks)
        if not config.EVAL:
            scales = "scales" if config.TRAIN.LINEAR_SCALED_LR else "would scale"
            advice += f", TRAIN.LINEAR_SCALED_LR {scales} the learning rates with it"
    values = {"DATA__BATCH_SIZE": found.size}
    if data.BATCH_SIZE_EVAL == AUTO:
        values["DATA__BATCH_SIZE_EVAL"] = found.size
    config = with_values(config, f"{_FOUND}{found.reason}", **values)
    add_note(config, f"batch size: {found.size} per device, {found.reason}; {advice}")
    return config


def agree_on_batch_sizes(config: Configuration) -> Configuration:
    """Returns the configuration with the smallest batch sizes that were found on any machine.

    Every rank calls it. Sizes that a user wrote are kept: ``equal_ranks.check_same`` compares them.
    """
    if world_size() == 1:
        return config
    own = (config.DATA.BATCH_SIZE, config.DATA.BATCH_SIZE_EVAL)
    smallest = [min(sizes) for sizes in zip(*all_gather(own), strict=True)]
    for name, size, least in zip(("BATCH_SIZE", "BATCH_SIZE_EVAL"), own, smallest, strict=True):
        where = value_sources(config).get(f"DATA.{name}")
        found = where and where.source == WITH_VALUES and where.first.startswith(_FOUND)
        if found and least < size:
            reason = "the number of the machine with the least memory"
            config = with_values(config, f"{_FOUND}{reason}", **{f"DATA__{name}": least})
            add_note(config, f"DATA.{name}: {least} per device, {reason}")
    return config


def _of_checkpoint(config: Configuration) -> Found | None:
    """Returns the batch size of the run that is resumed; None: no run is.

    Raises:
        InputError: its checkpoint can't be read.
    """
    asked = config.MODEL.RESUME
    if asked is None:
        return None
    chosen = Path(config.OUTPUT) if asked == AUTO else Path(asked)
    if asked == AUTO or (chosen / "checkpoints").is_dir():
        newest = newest_whole(chosen / "checkpoints")
        if newest is None:
            return None
        chosen = newest
    else:
        storage.verify(chosen)
    with storage.reading_checkpoint(chosen, storage.STATE, "a run's state"):
        size = read_state(chosen)["config"]["DATA"]["BATCH_SIZE"]
        if type(size) is not int:
            raise Unreadable(f"its DATA.BATCH_SIZE is {value_text(size)}, expected a number")
    return Found(size, f"as in {chosen}: a resumed run keeps it")


def _find(config: Configuration, dataset: ImageDataset, classes: list[str], ranks: int) -> Found:
    """Measures, and returns the largest power of two that fits, within what the data allow."""
    device = paddle.get_device()
    if device != "cpu" and not num_gpus():
        raise InputError(
            f"-batch_size=auto measures the memory of GPUs and CPUs, found {device}; give a number"
        )
    ranks_here = int(os.environ.get("PADDLE_LOCAL_SIZE", ranks))
    limit, limited_by = _limit_on_cpu(ranks_here)
    what = "evaluation" if config.EVAL else "training step"
    with StepMemory(config, dataset, classes) as memory:
        ready = memory.ready
        on_gpu = ready.gpu_memory is not None
        most = _MOST_ON_GPU if on_gpu else _MOST_ON_CPU
        reason = f"the most that auto takes on a {'GPU' if on_gpu else 'CPU'}"
        of_data, reason_of_data = _most_of_data(config, ready.samples, classes, ranks)
        if of_data < most:
            most = of_data
            reason = reason_of_data
        size = largest_that_fits(memory, most, None if on_gpu else limit, _first(config))
    if size is None and most > 1 and _allows_one(config):
        # A batch that didn't fit has ended the process, or left its peak there.
        with StepMemory(config, dataset, classes) as memory:
            size = largest_that_fits(memory, 1, None if on_gpu else limit)
    if ready.gpu_memory is not None:
        space = f"{ready.gpu_memory / 1e9:.1f} GB, {1 - GPU_RESERVE:.0%} of the GPU's memory"
    else:
        space = f"{limit / 1e9:.1f} GB, {_CPU_SHARE:.0%} of {limited_by}"
    if size is None:
        raise OutOfMemory(
            f"the smallest batch of the {what} takes more than {space}: lower -image_size, use a"
            " smaller model or fewer processes, or end other programs"
        )
    if size < most:
        reason = f"the largest power of two whose {what} fits in {space}"
    return Found(size, reason)


def _limit_on_cpu(ranks: int) -> tuple[int, str]:
    """Returns the bytes that a batch may take on a CPU, and in words what they are a share of.

    Args:
        ranks: the number of processes on this machine.
    """
    free = free_memory() / ranks
    below_limits = memory_below_limits()
    if below_limits < free:
        return int(_CPU_SHARE * below_limits), "what the limit of a process leaves (ulimit -v, -d)"
    words = "the free memory"
    if ranks > 1:
        words += f" for {ranks} processes"
    return int(_CPU_SHARE * free), words


def _first(config: Configuration) -> int:
    """Returns the smallest power of two with which a batch has two images of the largest size. Some
    models can't train on one.
    """
    data = config.DATA
    batch = 2
    if data.MULTI_SCALE and data.SCALE_SCHEDULE == "mixed":
        height, width = pair(data.IMAGE_SIZE)
        batch = -(-2 * max(data.MULTI_SCALE) ** 2 // (height * width))
    return 1 << max(1, (batch - 1).bit_length())


def _allows_one(config: Configuration) -> bool:
    """Returns whether a batch may be one image: mixup, CutMix and some heads need two."""
    try:
        with_values(config, DATA__BATCH_SIZE=1)
    except InputError:
        return False
    return True


def _most_of_data(
    config: Configuration, samples: int, classes: list[str], ranks: int
) -> tuple[int, str]:
    """Returns the largest batch that the data allow, and why it isn't larger.

    Args:
        samples: of an epoch.
    """
    if config.EVAL:
        return 1 << max(0, -(-samples // ranks) - 1).bit_length(), "enough for all images"
    most = most_for_epoch(samples, ranks * config.TRAIN.ACCUM_ITER)
    reason = f"so that an epoch of {samples:,} images has at least {_UPDATES} updates"
    if samples // (most * ranks * config.TRAIN.ACCUM_ITER) < _UPDATES:
        reason = f"so that an update has at least {_FEWEST} images"
    if config.DATA.SAMPLER == "per_class":
        of_classes = _power_of_two(len(classes) * config.DATA.PER_CLASS // ranks)
        if of_classes < most:
            return of_classes, f"the most with DATA.PER_CLASS of {len(classes)} classes"
    return most, reason


def most_for_epoch(samples: int, batches: int) -> int:
    """Returns the largest power of two with which an epoch has eight updates. If an update would
    have fewer than eight images, it is the smallest one with which it has eight, or all samples.

    Args:
        samples: of an epoch.
        batches: the number of batches in an update: processes x accumulation steps.
    """
    most = _power_of_two(samples // (_UPDATES * batches))
    fewest = 1 << (-(-_FEWEST // batches) - 1).bit_length()
    return max(most, min(fewest, _power_of_two(samples // batches)))


def _power_of_two(number: int) -> int:
    """Returns the largest power of two up to ``number``, at least 1."""
    return 1 << max(1, number).bit_length() - 1


def largest_that_fits(
    measure: Callable[[int], int | None],
    most: int,
    limit: int | None,
    first: int = 2,
    seconds: float = _SECONDS,
) -> int | None:
    """Returns the largest power of two up to ``most`` that fits; None: the smallest one doesn't.

    On a GPU, sizes are tried until memory runs out. On a CPU they are tried until the memory has
    grown enough to see how much each image adds: it adds the same for every image.

    Args:
        measure: a batch size -> the bytes that it takes, or None if memory runs out.
        most: a power of two.
        limit: the bytes that may be taken; None: whatever doesn't run out fits.
        first: the smallest size, a power of two, or ``most`` if that is smaller.
        seconds: with a ``limit``, no further sizes are tried after that time.
    """
    until = time.monotonic() + seconds
    first = min(first, most)
    measured: dict[int, int] = {}
    size = first
    while size <= most:
        taken = measure(size)
        if taken is None or (limit is not None and taken > limit):
            most = size // 2
            break
        measured[size] = taken
        has_grown = taken - measured[first] > _GROWTH or time.monotonic() > until
        if limit is not None and size > first and has_grown:
            break
        size *= 2
    if not measured:
        return None
    largest = max(measured)
    if limit is None or largest == first:
        return largest
    each = (measured[largest] - measured[first]) / (largest - first)
    fixed = measured[largest] - each * largest
    while 2 * largest <= most and fixed + each * 2 * largest <= limit:
        largest *= 2
    return largest
