"""The settings of a model that change from step to step, as a pure function of the step.

So it is the same on all ranks, and after a resume, and no checkpoint holds it.
"""

from typing import Any

import numpy as np
from paddle import nn

from models.layers import PatchDropout, PatchEmbed
from training.optim.schedule import cosine_between


def changing_layers(model: nn.Layer) -> list[Any]:
    """Returns the layers whose settings ``begin_step`` changes."""
    return [
        layer
        for layer in model.sublayers(include_self=True)
        if (isinstance(layer, PatchDropout) and layer.drop_end is not None)
        or (isinstance(layer, PatchEmbed) and layer.sizes)
    ]


def begin_step(layers: list[Any], share: float, seeds: tuple[int, int]) -> None:
    """Sets the layers for a training step.

    Args:
        layers: those of ``changing_layers``.
        share: of the way from the run's first update to its last one, from 0 to 1.
        seeds: the run's seed, and the number of the step.
    """
    for layer in layers:
        if isinstance(layer, PatchEmbed):
            place = np.random.default_rng(seeds).integers(len(layer.sizes))
            layer.step_size = layer.sizes[place]
        else:
            layer.drop_prob = cosine_between(layer.drop_start, layer.drop_end, share)
