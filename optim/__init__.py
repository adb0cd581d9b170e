"""Optimizers and learning-rate schedules."""

from optim.optimizer import build_optimizer, decayed_parameters
from optim.schedule import build_schedule, warmup_cosine

__all__ = ["build_optimizer", "build_schedule", "decayed_parameters", "warmup_cosine"]
