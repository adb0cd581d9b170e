"""Optimizers, parameter groups, gradient clipping, loss scaling, and learning-rate schedules."""

from optim.gradients import LossScaler, clip_gradients
from optim.groups import decayed_parameters, freeze, layer_scales
from optim.optimizer import build_optimizer
from optim.schedule import build_schedule, warmup_cosine

__all__ = [
    "LossScaler",
    "build_optimizer",
    "build_schedule",
    "clip_gradients",
    "decayed_parameters",
    "freeze",
    "layer_scales",
    "warmup_cosine",
]
