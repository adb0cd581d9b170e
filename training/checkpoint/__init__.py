"""A run's state: saved, verified, found again, and gone on from."""

from training.checkpoint.progress import Progress
from training.checkpoint.saver import Saver, own_statistics
from training.checkpoint.state import classes_of, newest_whole

__all__ = ["Progress", "Saver", "classes_of", "newest_whole", "own_statistics"]
