"""Samplers: the order in which samples are read, and each rank's share of every batch."""

import collections
import copy
import itertools
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import paddle

from errors import InputError
from settings.configuration import Configuration


class TrainBatchSampler(paddle.io.DistributedBatchSampler):
    """Yields this rank's share of every global batch, as lists of (epoch, index, copy).

    Call ``set_epoch`` before each epoch. After a resume within an epoch, it also takes how many of
    the epoch's samples the ranks have read already.

    The order of an epoch is a function of (seed, epoch), and doesn't depend on the number of ranks.
    Each global batch is cut into R equal shares, of which rank r takes the r-th. With
    DATA.DROP_LAST, samples at the end that don't fill a global batch are dropped. Otherwise samples
    from the epoch's beginning pad them to a multiple of R, so that every rank takes the same number
    of steps.

    DATA.SAMPLER "balanced" draws every class equally often, the images of a class in turn.
    "per_class" does so, too, and puts DATA.PER_CLASS images of each of its classes into a global
    batch (``_order_by_class``).

    TRAIN.REPEATED_AUGMENT m puts m copies of each image into a global batch (Hoffer et al. 2020,
    arXiv:1901.09335; DeiT). The copies don't follow each other, so that mixup's pairs are of
    different images. An epoch keeps its length, and sees one image in m.

    DATA.SHARD_SHUFFLE n reads the shards of a ``ShardDataset`` in random order, n at a time, and
    shuffles the samples of these n.

    DATA.SHUFFLE_MODE "shard" gives rank r every R-th sample, from the r-th on. The rank reads the
    same samples in every epoch, and shuffles them by (seed, epoch, r). The last ones are dropped or
    padded as above.

    Raises:
        InputError: DROP_LAST leaves no batch, or DATA.PER_CLASS doesn't fit the global batch.
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
        # Whether each rank keeps the same samples in all epochs.
        self.keeps_samples = config.DATA.SHUFFLE_MODE == "shard"
        # How many shards are shuffled at a time, and the shard of each sample. Without shards,
        # SHARD_SHUFFLE has no effect.
        self.shards_at_once = config.DATA.SHARD_SHUFFLE
        shards = getattr(dataset, "shards", None)
        self.shard_of_sample = shards.shard if shards is not None else None
        self.balanced_labels: Any = None
        if config.DATA.SAMPLER == "balanced":
            self.balanced_labels = dataset.labels
        # Images of each class in a global batch; None: any number.
        self.per_class = config.DATA.PER_CLASS if config.DATA.SAMPLER == "per_class" else None
        if self.per_class is not None:
            _check_classes(dataset.labels, self.per_class, batch_size * ranks)
            self.balanced_labels = dataset.labels
        self.repeats = config.TRAIN.REPEATED_AUGMENT
        # Samples of this rank in an epoch.
        if drop_last:
            self.num_samples = len(dataset) // (batch_size * ranks) * batch_size
        else:
            self.num_samples = -(-len(dataset) // ranks)
        if not self.num_samples:
            raise InputError(
                f"{len(dataset)} training images don't fill one global batch of {batch_size} x {ranks} processes;"
                " lower -batch_size, or set DATA.DROP_LAST False"
            )

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def set_epoch(self, epoch: int, consumed: int = 0) -> None:
        """Sets where the next iteration begins.

        Args:
            epoch: of the iteration, from 1.
            consumed: samples of this epoch that all ranks have taken already.
        """
        self.epoch = epoch
        self.consumed = consumed

    def size(self, epoch: int, step: int) -> int | None:
        """Returns the size of the images at a step, or None for IMAGE_SIZE.

        Args:
            epoch, step: from 1.
        """

    @property
    def place(self) -> tuple[int, int]:
        """Returns where the next iteration begins."""
        return self.epoch, self.consumed

    def passes(self) -> Iterator["TrainBatchSampler"]:
        """Yields a copy of this sampler for the current epoch, and one for each that follows."""
        ahead = copy.copy(self)
        yield ahead
        for epoch in range(ahead.epoch + 1, self.epochs + 1):
            ahead = copy.copy(ahead)
            ahead.set_epoch(epoch)
            yield ahead

    def first(self, consumed: int | None = None) -> int:
        """Returns the number of the first batch that is still to be taken.

        It is counted back from the epoch's end. After a resume with other batches, the number of
        samples that were taken needn't be a multiple of the batch.

        Args:
            consumed: samples that all ranks have taken; None: as ``set_epoch`` says.
        """
        left = self._samples_left(self.consumed if consumed is None else consumed)
        batches = left // self.batch_size if self.drop_last else -(-left // self.batch_size)
        return len(self) - batches

    def _samples_left(self, consumed: int) -> int:
        """Returns how many samples this rank has still to take, with its share of the padding."""
        if self.drop_last:
            return max(0, self.num_samples - -(-consumed // self.ranks))
        return max(0, -((consumed - len(self.dataset)) // self.ranks))

    def samples_taken(self, batches: int) -> int:
        """Returns how many samples all ranks have taken after the first ``batches`` of the epoch."""
        taken = self.consumed + (batches - self.first()) * self.batch_size * self.ranks
        return min(taken, self.consumed + self._samples_left(self.consumed) * self.ranks)

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        if self.keeps_samples:
            samples = np.arange(self.rank, len(self.dataset), self.ranks)
            order = np.random.default_rng([self.seed, self.epoch, self.rank]).permutation(samples)
        elif self.per_class is not None:
            batch = self.batch_size * self.ranks
            total = self.num_samples * self.ranks
            order = _order_by_class(self.balanced_labels, self.per_class, batch, total, rng)
        elif self.balanced_labels is not None:
            order = _balanced_order(self.balanced_labels, rng)
        elif self.shard_of_sample is not None and self.shards_at_once:
            order = _order_by_shards(self.shard_of_sample, self.shards_at_once, rng)
        else:
            order = rng.permutation(len(self.dataset))
        order = self._repeat(order)
        has_copies = self.balanced_labels is not None or self.repeats > 1
        copies = _occurrences(order) if has_copies else np.zeros(len(order), np.int64)
        for batch in range(self.first(), len(self)):
            # The batch begins at ``start`` of all ranks' samples, of which each takes ``share``.
            start = self.samples_taken(batch)
            share = (self.samples_taken(batch + 1) - start) // self.ranks
            first = start // self.ranks if self.keeps_samples else start + self.rank * share
            # Beyond the end, samples from the beginning follow: the padding.
            places = (place % len(order) for place in range(first, first + share))
            yield [(self.epoch, int(order[place]), int(copies[place])) for place in places]

    def _repeat(self, images: np.ndarray) -> np.ndarray:
        """Returns the samples of an epoch: each global batch holds its images ``repeats`` times.

        If there are too few images, they begin again.
        """
        total = self.num_samples * self.ranks
        batch = self.batch_size * self.ranks
        if self.repeats == 1:
            return np.resize(images, total)
        sizes = [min(batch, total - start) for start in range(0, total, batch)]
        distinct = [-(-size // self.repeats) for size in sizes]
        by_batch = np.split(np.resize(images, sum(distinct)), np.cumsum(distinct)[:-1])
        # np.resize repeats what it is given until the size is reached.
        return np.concatenate(
            [np.resize(some, size) for some, size in zip(by_batch, sizes, strict=True)]
        )


def _balanced_order(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns len(labels) indices, shuffled, in which each class comes equally often.

    If the classes don't divide that number, some come once more than the others.
    """
    classes, places = _sort(labels)
    members = np.split(places, np.flatnonzero(np.diff(classes)) + 1)
    counts = np.full(len(members), len(labels) // len(members))
    counts[: len(labels) % len(members)] += 1
    drawn = []
    for label, count in zip(rng.permutation(len(members)), counts, strict=True):
        images = members[label]
        rng.shuffle(images)
        drawn.append(images[:count] if count <= len(images) else np.resize(images, count))
    order = np.concatenate(drawn)
    rng.shuffle(order)
    return order


def _check_classes(labels: np.ndarray, per_class: int, batch: int) -> None:
    """Raises InputError if a global batch can't have ``per_class`` images of each of its classes."""
    classes = len(np.unique(labels))
    if batch % per_class:
        raise InputError(
            f"DATA.PER_CLASS is {per_class}, which doesn't divide the global batch of {batch} images;"
            " change one of the two"
        )
    if batch // per_class > classes:
        raise InputError(
            f"a global batch of {batch} images with DATA.PER_CLASS {per_class} needs"
            f" {batch // per_class} classes, but the data has {classes}; raise DATA.PER_CLASS, or"
            " lower -batch_size"
        )


def _order_by_class(
    labels: np.ndarray, per_class: int, batch: int, total: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns ``total`` indices, of which each batch has ``per_class`` images of some classes (the
    P x K of Hermans et al. 2017, arXiv:1703.07737).

    The classes take turns: none comes again before all others did, and none comes twice in a batch.
    The images of a class take turns, too. Those that are left over when a turn ends, fewer than
    ``per_class``, wait for the next one. A class with fewer images repeats them.
    """
    classes, places = _sort(labels)
    members = np.split(places, np.flatnonzero(np.diff(classes)) + 1)
    # The groups of ``per_class`` images that each class has left in its turn.
    groups: list[list[np.ndarray]] = [[] for _ in members]
    waiting: collections.deque[int] = collections.deque()
    drawn: list[np.ndarray] = []
    for _ in range(-(-total // batch)):
        if len(waiting) < batch // per_class:
            # A new turn begins within this batch, with classes that the batch doesn't have yet.
            turn = rng.permutation(len(members)).tolist()
            has = set(waiting)
            waiting.extend(label for label in turn if label not in has)
            waiting.extend(label for label in turn if label in has)
        for _ in range(batch // per_class):
            label = waiting.popleft()
            if not groups[label]:
                images = rng.permutation(members[label])
                count = max(1, len(images) // per_class)
                groups[label] = [*np.resize(images, count * per_class).reshape(count, per_class)]
            drawn.append(groups[label].pop())
    return np.concatenate(drawn)[:total]


def _sort(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (``values`` sorted, the place of each in ``values``). Equal ones keep their order.

    Args:
        values: whole numbers from 0 on, [n].
    """
    # A value and its place are sorted as one number. NumPy's stable argsort takes several times as
    # long.
    bits = len(values).bit_length()
    keys = values << bits
    keys |= np.arange(len(values))
    keys.sort()
    places = keys & ((1 << bits) - 1)
    keys >>= bits
    return keys, places


def _order_by_shards(shard: np.ndarray, at_once: int, rng: np.random.Generator) -> np.ndarray:
    """Returns a permutation of the samples, which takes the shards ``at_once`` at a time.

    Args:
        shard: of each sample, [n].
    """
    turn = rng.permutation(shard.max() + 1) // at_once
    return np.lexsort((rng.permutation(len(shard)), turn[shard]))


def _occurrences(order: np.ndarray) -> np.ndarray:
    """Returns for each entry of ``order`` how often its value came before."""
    counts = np.zeros(len(order), np.int64)
    # Most values come once, so only the others are sorted.
    several = np.flatnonzero(np.bincount(order)[order] > 1)
    values, places = _sort(order[several])
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    lengths = np.diff(starts, append=len(values))
    counts[several[places]] = np.arange(len(values)) - np.repeat(starts, lengths)
    return counts


class EvalBatchSampler(paddle.io.DistributedBatchSampler):
    """Yields batches of every R-th sample, from the rank's number on.

    Each sample of the dataset is read by exactly one rank. A rank may have none.
    """

    # Every iteration begins at the same place.
    place = ()

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
        """Returns an endless iterator of this sampler, one for each pass."""
        return itertools.repeat(self)
