"""A run's state: saved, verified, found again, and gone on from."""

from checkpoint.folder import classes_of, newest_whole
from checkpoint.saver import Progress, Saver, own_statistics

__all__ = ["Progress", "Saver", "classes_of", "newest_whole", "own_statistics"]
