"""Several processes answer: each its share of the images; the first has all answers, in their
order.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

from errors import RunError
from inference.prediction_writers import Answer
from inference.predictor import Predictor
from launch import progress
from loading.files import Paths
from utils import all_gather, rank, world_size


def check_same_images(images: Paths) -> None:
    """Raises RunError on every process if they were given, or found, different images."""
    digest = hashlib.sha256()
    for place in range(len(images)):
        digest.update(images.path_bytes(place) + b"\0")
    told = all_gather((len(images), digest.hexdigest()))
    for other, theirs in enumerate(told):
        if theirs != told[0]:
            found = f"rank 0 found {told[0][0]} images, rank {other} {theirs[0]}, or others"
            raise RunError(
                f"{found}; give every machine the same files under the same paths", shared=True
            )


def predict_distributed(predictor: Predictor, images: Paths, **how: Any) -> Iterator[list[Answer]]:
    """Yields the answers to all images in their order, part by part; on other processes than the
    first nothing.

    A process takes every R-th image: what its batches are composed of depends on the number of
    processes, R.

    Args:
        how: arguments of ``Predictor.answers``.
    """
    ranks = world_size()
    size = predictor.config.DATA.BATCH_SIZE_EVAL
    own = predictor.answers(images, rank=rank(), ranks=ranks, **how)
    # a process may have a batch less than the first
    for step in range(-(-len(images) // (ranks * size))):
        progress.beat(progress.EVALUATING, step)
        found = all_gather(next(own, {}))
        if rank() == 0:
            progress.pause()  # who takes them may wait for a reader
            answers = {place: answer for part in found for place, answer in part.items()}
            yield [answers[place] for place in sorted(answers)]
