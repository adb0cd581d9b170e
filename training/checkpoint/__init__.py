"""A run's state: saved, verified, found again, and gone on from."""

from training.checkpoint.folder import classes_of, newest_whole
from training.checkpoint.saver import Progress, Saver, own_statistics

__all__ = ["Progress", "Saver", "classes_of", "newest_whole", "own_statistics"]
