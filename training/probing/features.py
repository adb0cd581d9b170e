"""The features of a dataset's images, which the ranks compute and hold in shares."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle

from errors import RunError
from launch.progress import EVALUATING, beat
from loading.workers import Loader
from utils import all_gather, rank, reduce_dict, world_size

# The rows of each rank that are sent at once.
ROWS = 1024


class Features(NamedTuple):
    """This rank's share of a dataset's features: those of every R-th image, from its rank on.

    Attributes:
        values: [n, channels] float32.
        places: the place of each row's image in the dataset, [n]. Images that DATA.SKIP_BROKEN left
            out have none.
        labels: the class of each of the dataset's images (not of this rank's alone), [N].
    """

    values: np.ndarray
    places: np.ndarray
    labels: np.ndarray

    def blocks(self, rows: int = ROWS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (values [m, channels], places [m]) of all ranks, ``rows`` of each rank at a time.

        Every rank has to take all blocks.
        """
        # Rank 0 has the most rows. Others may have one less.
        most = -(-len(self.labels) // world_size())
        for first in range(0, most, rows):
            beat(EVALUATING)
            share = slice(first, first + rows)
            by_rank = all_gather((self.values[share], self.places[share]))
            values, places = zip(*by_rank, strict=True)
            yield np.concatenate(values), np.concatenate(places)

    def gathered(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (values [n, channels], labels [n]) of all ranks in the dataset's order, on rank 0;
        no rows on the others.
        """
        count = 0 if rank() else len(self.labels)
        whole = np.empty((count, self.values.shape[1]), np.float32)
        is_read = np.zeros(count, bool)
        for values, places in self.blocks():
            if count:
                whole[places] = values
                is_read[places] = True
        if is_read.all():
            return whole, self.labels[:count]
        return whole[is_read], self.labels[is_read]


def compute_features(
    forward: Callable[[paddle.Tensor], Any],
    loader: Loader,
    batches: Iterable[dict[str, paddle.Tensor]],
) -> Features:
    """Returns the features of a loader's images. Each image is computed by one rank.

    Args:
        forward: returns the features [B, channels] of a batch's pixels.
        loader: as of an evaluation: it gives this rank's images, in the order of its sampler.
        batches: one pass of the loader.

    Raises:
        RunError: on every rank, if a feature isn't finite.
    """
    places = np.asarray(loader.batch_sampler.indices)
    values = np.empty((len(places), 0), np.float32)
    is_read = np.ones(len(places), bool)
    done = 0
    for batch in batches:
        rows = np.asarray(forward(batch["pixels"]), np.float32)
        if not done:
            values = np.empty((len(places), rows.shape[1]), np.float32)
        batch_rows = slice(done, done + len(rows))
        values[batch_rows] = rows
        if "skipped" in batch:
            is_read[batch_rows] = batch["skipped"].numpy() < 0
        done += len(rows)
    # A rank without an image doesn't know the number of channels.
    channels = max(all_gather(values.shape[1]))
    values = values.reshape(len(places), channels)
    if not is_read.all():
        values = values[is_read]
        places = places[is_read]
    unusable = sum(all_gather(int((~np.isfinite(values)).any(1).sum())))
    if unusable:
        raise RunError(f"the features of {unusable} images aren't finite", shared=True)
    return Features(values, places, np.asarray(loader.dataset.labels))


def normalised(values: np.ndarray) -> np.ndarray:
    """Returns rows of length 1; a row of zeros stays one. Shape: [n, channels]."""
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return values / np.maximum(lengths, np.float32(1e-12))


def sums_over_ranks(**sums: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the sums of float64 arrays over all ranks."""
    tensors = {name: paddle.to_tensor(value) for name, value in sums.items()}
    return {name: total.numpy() for name, total in reduce_dict(tensors, average=False).items()}
