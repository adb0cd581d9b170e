"""Optimizers, parameter groups, gradient clipping, loss scaling, schedules, and averaged weights."""

from training.optim.ema import ModelEma
from training.optim.gradients import LossScaler, clip_gradients
from training.optim.groups import decayed_parameters, freeze, layer_scales
from training.optim.optimizer import (
    build_optimizer,
    create_state,
    set_weight_decay,
    weight_decay_at,
)
from training.optim.schedule import build_schedule

__all__ = [
    "LossScaler",
    "ModelEma",
    "build_optimizer",
    "build_schedule",
    "clip_gradients",
    "create_state",
    "decayed_parameters",
    "freeze",
    "layer_scales",
    "set_weight_decay",
    "weight_decay_at",
]
