"""Samplers for images of several sizes (DATA.MULTI_SCALE, DATA.TOKEN_LENGTHS).

One is MobileViT's (Mehta and Rastegari 2021, arXiv:2110.02178, section 3.2), the other timm's
progressive resizing. The third takes numbers of patches, as timm's NaFlex loader does.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from errors import InputError
from loading.samplers import TrainBatchSampler
from settings.configuration import Configuration, size_text
from settings.tasks import mixes

# Part of the seeds, so that the draws of the sizes differ from the samples'.
_TAG = 0x7363616C65


def train_sampler(config: Configuration, dataset: Any, rank: int, ranks: int) -> TrainBatchSampler:
    """Returns the sampler of a training, for images of one size or of several.

    Raises:
        InputError: as of the sampler; or there are several sizes, which are squares, and IMAGE_SIZE
            isn't one.
    """
    if config.DATA.TOKEN_LENGTHS:
        return TokenLengthSampler(config, dataset, rank, ranks)
    sizes = config.DATA.MULTI_SCALE
    if not sizes:
        return TrainBatchSampler(config, dataset, rank, ranks)
    if not isinstance(config.DATA.IMAGE_SIZE, int):
        raise InputError(
            f"DATA.MULTI_SCALE {sizes} makes square images, but IMAGE_SIZE is"
            f" {size_text(config.DATA.IMAGE_SIZE)}; set MULTI_SCALE to null"
        )
    if config.DATA.SCALE_SCHEDULE == "progressive":
        return ProgressiveSampler(config, dataset, rank, ranks)
    return MultiScaleSampler(config, dataset, rank, ranks)


def batch_sizes(config: Configuration) -> dict[int, int]:
    """Returns how many images a rank's batch has, for each size in DATA.MULTI_SCALE.

    They have as many pixels as BATCH_SIZE images of IMAGE_SIZE, rounded down, and are at least one.
    If images are mixed, the number is even, and at least two.
    """
    least = 2 if mixes(config) else 1
    pixels = config.DATA.BATCH_SIZE * config.DATA.IMAGE_SIZE**2
    return {size: max(1, pixels // size**2 // least) * least for size in config.DATA.MULTI_SCALE}


def check_scales(config: Configuration, model: Any) -> None:
    """Raises InputError unless the model takes images of each size in DATA.MULTI_SCALE."""
    sizes = config.DATA.MULTI_SCALE
    if sizes and not (model.min_image_size and min(sizes) >= model.min_image_size):
        raise InputError(
            f"DATA.MULTI_SCALE is {sizes}, but {type(model).__name__} takes {model.input_sizes}; set it to null"
        )


class MultiScaleSampler(TrainBatchSampler):
    """A ``TrainBatchSampler`` that draws a size of images for each batch.

    It yields lists of (epoch, index, copy, size). All ranks have the same size at a step. The sizes
    take turns, so an epoch has each of them equally often, or once more than another. Their order
    is a function of (seed, epoch). So every epoch has the same number of steps. With DROP_LAST
    False the last batch has the samples that are left.

    Attributes:
        batches: the number of samples in a rank's batch, by size.

    Raises:
        InputError: DROP_LAST leaves no batch.
    """

    def __init__(self, config: Configuration, dataset: Any, rank: int, ranks: int) -> None:
        super().__init__(config, dataset, rank, ranks)
        self.batches = self._batches(config)
        available = len(dataset) // ranks if self.drop_last else -(-len(dataset) // ranks)
        # The size of each step before they are shuffled, and the samples of a shorter last batch.
        self.sizes = []
        self.rest = 0
        taken = 0
        for size in itertools.cycle(self.batches):
            if taken + self.batches[size] > available:
                if not self.drop_last and available > taken:
                    self.rest = available - taken
                    self.sizes.append(size)
                break
            self.sizes.append(size)
            taken += self.batches[size]
        self.num_samples = taken + self.rest
        if not self.num_samples:
            size, count = next(iter(self.batches.items()))
            raise InputError(
                f"{len(dataset)} training images don't fill one global batch of {count} x {ranks} processes at"
                f" {self._in_words(size)}; lower -batch_size, or set DATA.DROP_LAST False"
            )
        # The epoch that ``_plan`` was called for last, and what it returned.
        self._planned: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0), np.empty(0))

    def _batches(self, config: Configuration) -> dict[int, int]:
        return batch_sizes(config)

    def _in_words(self, size: int) -> str:
        return f"{size} x {size} pixels"

    def __len__(self) -> int:
        return len(self.sizes)

    def size(self, epoch: int, step: int) -> int:
        return int(self._plan(epoch)[0][step - 1])

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sizes of an epoch's steps, and what is left to take before each of them.

        Returns:
            (the size of each step [steps], the samples that a rank takes from each step to the
            epoch's end [steps + 1]).
        """
        if self._planned[0] != epoch:
            # A shorter batch stays at the end.
            whole = len(self.sizes) - 1 if self.rest else len(self.sizes)
            order = np.random.default_rng([self.seed, epoch, _TAG]).permutation(whole)
            sizes = np.array([*np.array(self.sizes)[order], *self.sizes[whole:]])
            counts = [self.batches[size] for size in sizes[:whole]]
            if self.rest:
                counts.append(self.rest)
            self._planned = epoch, sizes, np.cumsum([0, *counts[::-1]])[::-1]
        return self._planned[1:]

    def first(self, consumed: int | None = None) -> int:
        left = self._samples_left(self.consumed if consumed is None else consumed)
        ahead = self._plan(self.epoch)[1]
        if self.drop_last:
            return int(np.flatnonzero(ahead <= left)[0])
        return int(np.flatnonzero(ahead >= left)[-1])

    def samples_taken(self, batches: int) -> int:
        """Returns how many samples all ranks have taken after the epoch's first ``batches`` batches.

        The steps are counted back from the epoch's end. So after a resume with another number of
        ranks, the first batch is shorter; with DROP_LAST, samples at the end are dropped.
        """
        left = self._samples_left(self.consumed)
        ahead = self._plan(self.epoch)[1]
        left = int(ahead[self.first()]) if self.drop_last else left
        return self.consumed + (left - min(left, int(ahead[batches]))) * self.ranks

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        sizes = self._plan(self.epoch)[0][self.first() :]
        for size, batch in zip(sizes.tolist(), super().__iter__(), strict=True):
            yield [(*key, size) for key in batch]


class TokenLengthSampler(MultiScaleSampler):
    """A ``MultiScaleSampler`` whose sizes are the numbers of patches in DATA.TOKEN_LENGTHS.

    A rank's batch has as many patches as BATCH_SIZE images of NUM_TOKENS, rounded down to whole
    images, and at least one image.
    """

    def _batches(self, config: Configuration) -> dict[int, int]:
        data = config.DATA
        patches = data.BATCH_SIZE * data.NUM_TOKENS
        return {length: max(1, patches // length) for length in data.TOKEN_LENGTHS}

    def _in_words(self, size: int) -> str:
        return f"{size} patches"


class ProgressiveSampler(TrainBatchSampler):
    """A ``TrainBatchSampler`` whose images grow from epoch to epoch.

    It yields lists of (epoch, index, copy, size). A step's size is drawn by the epoch's
    ``size_shares``. It is a function of (seed, epoch, step), so all ranks have the same. All
    batches have the same number of images, as timm's have.

    Attributes:
        batches: the number of samples in a rank's batch, by size.
    """

    def __init__(self, config: Configuration, dataset: Any, rank: int, ranks: int) -> None:
        super().__init__(config, dataset, rank, ranks)
        self.data = config.DATA
        self.batches = dict.fromkeys(config.DATA.MULTI_SCALE, self.batch_size)

    def size(self, epoch: int, step: int) -> int:
        rng = np.random.default_rng([self.seed, epoch, step, _TAG])
        data = self.data
        done = (epoch - 1) / (self.epochs - 1) if self.epochs > 1 else 1.0
        shares = size_shares(len(data.MULTI_SCALE), done, data.SCALE_SPREAD, data.SCALE_RANDOM)
        return int(rng.choice(data.MULTI_SCALE, p=shares))

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        for step, batch in enumerate(super().__iter__(), self.first() + 1):
            size = self.size(self.epoch, step)
            yield [(*key, size) for key in batch]


def size_shares(sizes: int, done: float, spread: float, random: float) -> np.ndarray:
    """Returns the probability of each size, [sizes], at one point of a training.

    It is a bell curve around a centre that moves from the first size to the last (timm 1.0.31's
    ``ScheduledBatchSampler``).

    Args:
        sizes: their number.
        done: the centre's place, from 0 in the first epoch to 1 in the last.
        spread: standard deviation, in sizes; 0: only the nearest size is taken.
        random: the share of steps whose size is drawn uniformly.
    """
    distance = np.square(np.arange(sizes) - done * (sizes - 1))
    # The nearest size has a share, however small the spread is.
    distance -= distance.min()
    bell = np.exp(-0.5 * distance / spread**2) if spread else (distance == 0).astype(float)
    return (1 - random) * bell / bell.sum() + random / sizes
