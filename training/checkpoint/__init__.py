"""Checkpoints: saving a run's state, verifying it, finding it, and resuming from it."""

from training.checkpoint.description import (
    Description,
    calibration_of,
    check_task,
    classes_of,
    describe,
    description_of,
    task_of,
    thresholds_of,
)
from training.checkpoint.progress import Progress
from training.checkpoint.saver import Saver, own_statistics
from training.checkpoint.state import newest_whole

__all__ = [
    "Description", "Progress", "Saver", "calibration_of", "check_task", "classes_of", "describe",
    "description_of", "newest_whole", "own_statistics", "task_of", "thresholds_of",
]  # fmt: skip
