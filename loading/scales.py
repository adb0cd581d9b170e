"""Images of another size at each step (DATA.MULTI_SCALE): MobileViT's sampler (Mehta and Rastegari
2021, arXiv:2110.02178, section 3.2), and timm's progressive resizing.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from errors import InputError
from loading.samplers import TrainBatchSampler
from settings.needs import mixes
from settings.options import Configuration, size_text

_TAG = 0x7363616C65  # keeps the draws of the sizes apart from the samples'


def train_sampler(config: Configuration, dataset: Any, rank: int, ranks: int) -> TrainBatchSampler:
    """Returns the sampler of a training: of one size of images, or of several.

    Raises:
        InputError: several, which are squares, where IMAGE_SIZE isn't; or as the sampler.
    """
    kind = TrainBatchSampler
    sizes = config.DATA.MULTI_SCALE
    if sizes:
        if not isinstance(config.DATA.IMAGE_SIZE, int):
            found = f"DATA.MULTI_SCALE is {sizes}, squares, but IMAGE_SIZE is {size_text(config.DATA.IMAGE_SIZE)}"
            raise InputError(f"{found}; set MULTI_SCALE to null")
        kind = (
            ProgressiveSampler if config.DATA.SCALE_SCHEDULE == "progressive" else MultiScaleSampler
        )
    return kind(config, dataset, rank, ranks)


def batch_sizes(config: Configuration) -> dict[int, int]:
    """Returns how many images of each size DATA.MULTI_SCALE a rank takes. They have as many pixels
    as BATCH_SIZE images of IMAGE_SIZE, rounded down, and are at least one. Where images are mixed,
    the number is even, and at least two.
    """
    least = 2 if mixes(config) else 1
    pixels = config.DATA.BATCH_SIZE * config.DATA.IMAGE_SIZE**2
    return {size: max(1, pixels // size**2 // least) * least for size in config.DATA.MULTI_SCALE}


def check_scales(config: Configuration, model: Any) -> None:
    """Raises InputError unless a model takes images of each size DATA.MULTI_SCALE."""
    sizes = config.DATA.MULTI_SCALE
    if sizes and not (model.min_image_size and min(sizes) >= model.min_image_size):
        raise InputError(
            f"DATA.MULTI_SCALE is {sizes}, but {type(model).__name__} takes {model.input_sizes}; set it to null"
        )


class MultiScaleSampler(TrainBatchSampler):
    """``TrainBatchSampler`` whose batches have a size of images each: it yields lists of (epoch,
    index, copy, size).

    All ranks have the same size at a step. An epoch has each size equally often (but for one), in
    an order that follows from (seed, epoch); so every epoch has as many steps. With DROP_LAST False
    the last batch is what is left.

    Attributes:
        batches: a rank's samples by size.

    Raises:
        InputError: DROP_LAST leaves no batch.
    """

    def __init__(self, config: Configuration, dataset: Any, rank: int, ranks: int) -> None:
        super().__init__(config, dataset, rank, ranks)
        self.batches = batch_sizes(config)
        own = len(dataset) // ranks if self.drop_last else -(-len(dataset) // ranks)
        # each step's size, unshuffled; the samples of a shorter one at the end
        self.turn = []
        self.rest = 0
        taken = 0
        for size in itertools.cycle(self.batches):
            if taken + self.batches[size] > own:
                self.rest = 0 if self.drop_last else own - taken
                self.turn += [size] * (self.rest > 0)
                break
            self.turn.append(size)
            taken += self.batches[size]
        self.num_samples = taken + self.rest
        if not self.num_samples:
            size, count = next(iter(self.batches.items()))
            raise InputError(
                f"{len(dataset)} training images don't fill one global batch of {count} x {ranks} processes at"
                f" {size} x {size} pixels; lower -batch_size, or set DATA.DROP_LAST False"
            )
        self._planned: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0), np.empty(0))

    def __len__(self) -> int:
        return len(self.turn)

    def size(self, epoch: int, step: int) -> int:
        return int(self._plan(epoch)[0][step - 1])

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns each step's size, and a rank's samples from each step on, [steps + 1]."""
        if self._planned[0] != epoch:
            shuffled = len(self.turn) - (self.rest > 0)
            order = np.random.default_rng([self.seed, epoch, _TAG]).permutation(shuffled)
            sizes = np.array([*np.array(self.turn)[order], *self.turn[shuffled:]])
            counts = [self.batches[size] for size in sizes[:shuffled]] + [self.rest] * (
                self.rest > 0
            )
            self._planned = epoch, sizes, np.cumsum([0, *counts[::-1]])[::-1]
        return self._planned[1:]

    def first(self, consumed: int | None = None) -> int:
        left = self._samples_left(self.consumed if consumed is None else consumed)
        ahead = self._plan(self.epoch)[1]
        return int(
            np.flatnonzero(ahead <= left)[0]
            if self.drop_last
            else np.flatnonzero(ahead >= left)[-1]
        )

    def samples_taken(self, batches: int) -> int:
        """Counts a rank's steps back from the epoch's end. So after a resume by another number of
        ranks the first batch is shorter, or with DROP_LAST the tail is dropped.
        """
        left = self._samples_left(self.consumed)
        ahead = self._plan(self.epoch)[1]
        left = int(ahead[self.first()]) if self.drop_last else left
        return self.consumed + (left - min(left, int(ahead[batches]))) * self.ranks

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        sizes = self._plan(self.epoch)[0][self.first() :]
        for size, batch in zip(sizes.tolist(), super().__iter__(), strict=True):
            yield [(*key, size) for key in batch]


class ProgressiveSampler(TrainBatchSampler):
    """``TrainBatchSampler`` whose batches have a size of images each: it yields lists of (epoch,
    index, copy, size).

    A step's size is drawn by ``size_shares`` of its epoch, and follows from (seed, epoch, step):
    all ranks have the same. A batch has as many images whatever its size, as timm's has.

    Attributes:
        batches: a rank's samples by size.
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
    """Returns the sizes' probabilities, [sizes]: a bell that goes from the first to the last (timm
    1.0.31's ``ScheduledBatchSampler``).

    Args:
        done: share of the way, 0 in the first epoch, 1 in the last.
        spread: standard deviation; 0: the nearest size alone.
        random: share of the steps that takes any size.
    """
    away = np.square(np.arange(sizes) - done * (sizes - 1))
    away -= away.min()  # the nearest has a share, however small the spread
    bell = np.exp(-0.5 * away / spread**2) if spread else (away == 0).astype(float)
    return (1 - random) * bell / bell.sum() + random / sizes
