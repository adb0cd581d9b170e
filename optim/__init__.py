"""Optimizers, parameter groups, gradient clipping, loss scaling, schedules, and averages of the weights."""

from optim.ema import ModelEma
from optim.gradients import LossScaler, clip_gradients
from optim.groups import decayed_parameters, freeze, layer_scales
from optim.optimizer import build_optimizer
from optim.schedule import build_schedule

__all__ = [
    "LossScaler",
    "ModelEma",
    "build_optimizer",
    "build_schedule",
    "clip_gradients",
    "decayed_parameters",
    "freeze",
    "layer_scales",
]
