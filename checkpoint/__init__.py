"""A run's state: saved, verified, found again, and gone on from."""

from checkpoint.folder import classes_of
from checkpoint.saver import Progress, Saver, own_statistics

__all__ = ["Progress", "Saver", "classes_of", "own_statistics"]
