"""Predicts images by several processes. Each predicts its share, and the first process receives all
predictions, in the order of the images.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

from errors import RunError
from inference.predictor import Predictor
from launch import progress
from loading.files import Paths
from utils import all_gather, rank, world_size


def check_same_images(images: Paths) -> None:
    """Raises RunError on every process if the processes have different images."""
    sha256 = hashlib.sha256()
    for place in range(len(images)):
        sha256.update(images.path_bytes(place) + b"\0")
    by_rank = all_gather((len(images), sha256.hexdigest()))
    for other, (count, digest) in enumerate(by_rank):
        first_count, first_digest = by_rank[0]
        if (count, digest) != (first_count, first_digest):
            raise RunError(
                f"rank 0 found {first_count} images, but rank {other} {count}, or different ones;"
                " all machines need the same files under the same paths",
                shared=True,
            )


def predict_distributed(predictor: Predictor, images: Paths, **options: Any) -> Iterator[list[Any]]:
    """Yields the predictions of all images in their order, in lists. On other processes than the
    first, it yields nothing.

    Each of R processes predicts every R-th image. So which images share a batch depends on the
    number of processes.

    Args:
        options: arguments of ``Predictor.predict_batches``, or ``predict_maps`` where the model gives
            maps.
    """
    ranks = world_size()
    batch_size = 1 if predictor.keeps_sizes else predictor.config.DATA.BATCH_SIZE_EVAL
    predict = predictor.predict_maps if predictor.gives_maps else predictor.predict_batches
    batches = predict(images, rank=rank(), ranks=ranks, **options)
    # The first process has the most batches. Others may have one less, and gather {} at the end.
    steps = -(-len(images) // (ranks * batch_size))
    for step in range(steps):
        progress.beat(progress.EVALUATING, step)
        by_rank = all_gather(next(batches, {}))
        if rank() == 0:
            # Whoever takes the predictions may wait, for the reader of a pipe for example.
            progress.pause()
            outcomes = {place: outcome for batch in by_rank for place, outcome in batch.items()}
            yield [outcomes[place] for place in sorted(outcomes)]
