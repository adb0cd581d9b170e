"""A run's state: saved, verified, found again, and gone on from."""

from training.checkpoint.folder import classes_of, newest_whole
from training.checkpoint.progress import Progress
from training.checkpoint.saver import Saver, own_statistics

__all__ = ["Progress", "Saver", "classes_of", "newest_whole", "own_statistics"]
