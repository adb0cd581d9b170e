"""The order in which samples are read: every rank's share of every batch."""

import copy
import itertools
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import paddle

from errors import InputError
from settings.options import Configuration


class TrainBatchSampler(paddle.io.DistributedBatchSampler):
    """Yields this rank's share of every global batch, as lists of (epoch, index, copy). Call
    ``set_epoch`` before each epoch. It also says how many of the epoch's samples all ranks had
    taken before a resume.

    The epoch's order follows from (seed, epoch), whatever the number of ranks. Rank r of R takes
    the r-th of R equal parts of each global batch. The tail that fills no global batch is dropped
    (DATA.DROP_LAST). Otherwise samples from the epoch's beginning pad it to a multiple of R, so
    that every rank takes the same number of steps.

    DATA.SAMPLER "balanced" draws every class equally often, the images of a class in turn. With
    REPEATED_AUGMENT m a global batch holds m copies of each of its images (Hoffer et al. 2020,
    arXiv:1901.09335; DeiT). The copies are apart from each other, so that mixup's pairs are of
    different images. An epoch keeps its length and sees one image in m.

    DATA.SHARD_SHUFFLE n takes the shards of a ``ShardDataset`` in random order, n at a time, whose
    samples are mixed.

    DATA.SHUFFLE_MODE "shard" gives rank r every R-th sample from the r-th on. The rank reads the
    same samples in every epoch and shuffles them by (seed, epoch, r). Its tail is dropped or padded
    like the global one.

    Raises:
        InputError: DROP_LAST leaves no batch.
    """

    def __init__(self, config: Configuration, dataset: Any, rank: int, ranks: int) -> None:
        batch_size = config.DATA.BATCH_SIZE
        drop_last = config.DATA.DROP_LAST
        super().__init__(
            dataset, batch_size, num_replicas=ranks, rank=rank, shuffle=True, drop_last=drop_last
        )
        self.seed = config.SEED
        self.rank = rank
        self.ranks = ranks
        self.consumed = 0
        self.epochs = config.TRAIN.NUM_EPOCHS
        self.own = config.DATA.SHUFFLE_MODE == "shard"
        shards = getattr(dataset, "shards", None)  # without any, SHARD_SHUFFLE does nothing
        together = config.DATA.SHARD_SHUFFLE
        self.shards = (shards.shard, together) if shards is not None and together else None
        self.balanced = dataset.labels if config.DATA.SAMPLER == "balanced" else None
        self.repeats = config.TRAIN.REPEATED_AUGMENT
        batches = len(dataset) // (batch_size * ranks)
        # of this rank
        self.num_samples = batches * batch_size if drop_last else -(-len(dataset) // ranks)
        if not self.num_samples:
            raise InputError(
                f"{len(dataset)} training images don't fill one global batch of {batch_size} x {ranks} processes;"
                " lower -batch_size, or set DATA.DROP_LAST False"
            )

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def set_epoch(self, epoch: int, consumed: int = 0) -> None:
        """Makes the next iteration one of ``epoch``, after its first ``consumed`` samples of all
        ranks.
        """
        self.epoch = epoch
        self.consumed = consumed

    def size(self, epoch: int, step: int) -> int | None:
        """Returns the size of the images at a step, both from 1; None: IMAGE_SIZE."""

    @property
    def place(self) -> tuple[int, int]:
        """Returns where the next iteration begins."""
        return self.epoch, self.consumed

    def passes(self) -> Iterator["TrainBatchSampler"]:
        """Yields a copy of this sampler for the epoch in which it stands, and for each that
        follows.
        """
        ahead = copy.copy(self)
        yield ahead
        for epoch in range(ahead.epoch + 1, self.epochs + 1):
            ahead = copy.copy(ahead)
            ahead.set_epoch(epoch)
            yield ahead

    def first(self, consumed: int | None = None) -> int:
        """Returns the number of batches that were taken, counted back from the epoch's end."""
        left = self._samples_left(self.consumed if consumed is None else consumed)
        return len(self) - (
            left // self.batch_size if self.drop_last else -(-left // self.batch_size)
        )

    def _samples_left(self, consumed: int) -> int:
        """What this rank has still to take, with its share of the padding."""
        if self.drop_last:
            return max(0, self.num_samples - -(-consumed // self.ranks))
        return max(0, -((consumed - len(self.dataset)) // self.ranks))

    def samples_taken(self, batches: int) -> int:
        """Returns how many samples all ranks have taken after the epoch's first ``batches``."""
        taken = self.consumed + (batches - self.first()) * self.batch_size * self.ranks
        return min(taken, self.consumed + self._samples_left(self.consumed) * self.ranks)

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        if self.own:
            part = np.arange(self.rank, len(self.dataset), self.ranks)
            order = np.random.default_rng([self.seed, self.epoch, self.rank]).permutation(part)
        elif self.balanced is not None:
            order = _balanced_order(self.balanced, rng)
        elif self.shards:
            order = _by_shards(*self.shards, rng)
        else:
            order = rng.permutation(len(self.dataset))
        order = self._repeat(order)
        several = self.balanced is not None or self.repeats > 1
        copies = _occurrences(order) if several else np.zeros(len(order), np.int64)
        for batch in range(self.first(), len(self)):
            start = self.samples_taken(batch)
            share = (self.samples_taken(batch + 1) - start) // self.ranks
            first = start // self.ranks if self.own else start + self.rank * share
            places = (place % len(order) for place in range(first, first + share))
            yield [(self.epoch, int(order[place]), int(copies[place])) for place in places]

    def _repeat(self, images: np.ndarray) -> np.ndarray:
        """The epoch's samples: per global batch, its images ``repeats`` times; after the last, the
        first again.
        """
        total = self.num_samples * self.ranks
        batch = self.batch_size * self.ranks
        if self.repeats == 1:
            return np.resize(images, total)
        sizes = [min(batch, total - start) for start in range(0, total, batch)]
        distinct = [-(-size // self.repeats) for size in sizes]
        parts = np.split(np.resize(images, sum(distinct)), np.cumsum(distinct)[:-1])
        return np.concatenate(
            [np.resize(part, size) for part, size in zip(parts, sizes, strict=True)]
        )


def _balanced_order(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """An order of len(labels) indices in which each class present comes equally often (but for
    one), shuffled.
    """
    classes, places = _sort(labels)
    members = np.split(places, np.flatnonzero(np.diff(classes)) + 1)
    counts = np.full(len(members), len(labels) // len(members))
    counts[: len(labels) % len(members)] += 1
    drawn = []
    for label, count in zip(rng.permutation(len(members)), counts, strict=True):
        own = members[label]
        rng.shuffle(own)
        drawn.append(own[:count] if count <= len(own) else np.resize(own, count))
    order = np.concatenate(drawn)
    rng.shuffle(order)
    return order


def _sort(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns whole numbers from 0 on, [n], sorted, and the place of each. Equal ones keep their
    order.

    A value and its place are sorted as one number: NumPy's stable argsort takes several times as
    long.
    """
    bits = len(values).bit_length()
    keys = values << bits
    keys |= np.arange(len(values))
    keys.sort()
    places = keys & ((1 << bits) - 1)
    keys >>= bits
    return keys, places


def _by_shards(shard: np.ndarray, together: int, rng: np.random.Generator) -> np.ndarray:
    """A permutation of the samples, ``shard`` [n] being where each lies: ``together`` shards at a
    time, mixed.
    """
    turn = rng.permutation(shard.max() + 1) // together
    return np.lexsort((rng.permutation(len(shard)), turn[shard]))


def _occurrences(order: np.ndarray) -> np.ndarray:
    """For each entry, how often its value came before."""
    counts = np.zeros(len(order), np.int64)
    # Most values come once.
    several = np.flatnonzero(np.bincount(order)[order] > 1)
    values, places = _sort(order[several])
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    lengths = np.diff(starts, append=len(values))
    counts[several[places]] = np.arange(len(values)) - np.repeat(starts, lengths)
    return counts


class EvalBatchSampler(paddle.io.DistributedBatchSampler):
    """Every R-th sample from this rank's on, each sample of the dataset on one rank exactly; a rank
    may have none.
    """

    place = ()  # where an iteration begins: it is always the same

    def __init__(self, dataset: Sized, batch_size: int, rank: int, ranks: int) -> None:
        super().__init__(dataset, batch_size, num_replicas=ranks, rank=rank)
        self.indices = range(rank, len(dataset), ranks)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield list(self.indices[start : start + self.batch_size])

    def first(self) -> int:
        """Returns the number of the first batch."""
        return 0

    def passes(self) -> Iterator["EvalBatchSampler"]:
        """Yields the sampler for each pass, without end."""
        return itertools.repeat(self)
