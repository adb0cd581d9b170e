"""Estimates the memory of each training process from a model's sizes, without building the model.

The optimizer is assumed to keep two moments of each parameter, as AdamW does. Weights, gradients
and moments are float32, and AMP computes with copies of the weights. The memory of a GPU's
libraries and temporary buffers of a step aren't counted.
"""

import math
import re
from typing import NamedTuple

from models.costs import Cost
from models.costs import cost as cost_of
from settings.configuration import Configuration

# The stages of DIST.STRATEGY.sharding_configs; 0: no sharding.
STAGES = (0, 1, 2, 3)
# Bytes of a number in float32, and in bfloat16 or float16.
FLOAT = 4
HALF = 2
# Elements that training keeps for the backward pass per element of the activations that ``costs``
# counts: inputs of norms and outputs of activation functions are kept, too. 1.5 follows from the
# formulas of a ViT's block. On a CPU the compiled operators keep less: 1.2 was measured for ViT-S
# (tools/model_info.py, two batch sizes).
KEPT = 1.5
_BLOCK = re.compile(r"(.*\bblocks\.\d+|layer\d+\.\d+)\.")


class Memory(NamedTuple):
    """The memory of the process that needs most, in bytes.

    Attributes:
        weights: the weights in float32.
        copies: their copies in half precision.
        gradients: the gradients.
        moments: both moments of the optimizer.
        activations: the activations that are kept for the backward pass.
    """

    weights: int
    copies: int
    gradients: int
    moments: int
    activations: int


class TrainingMemory:
    """Estimates the memory that training a model takes.

    Args:
        config: the configuration of the model. MODEL.RECOMPUTE and AMP count, too.
    """

    def __init__(self, config: Configuration) -> None:
        self.cost = cost_of(config)
        self.sizes = self.cost.sizes
        self.parameters = sum(self.sizes)
        self.half = config.AMP
        blocks = _by_block(self.cost, "parameters")
        # Stage 3 shards the blocks only. Each process has all other parameters.
        self.unsharded = self.parameters - sum(blocks.values())
        self.largest_block = max(blocks.values(), default=0)
        self.activations = self._activations(bool(config.MODEL.get("RECOMPUTE")))

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of sharding with which the model can be trained. Stage 3 needs a single
        sequence of blocks.
        """
        if any(layer.name.startswith("blocks.") for layer in self.cost.layers):
            return STAGES
        return STAGES[:-1]

    def per_process(self, stage: int, ranks: int, batch_size: int) -> Memory:
        """Returns the memory of each of ``ranks`` processes with ``batch_size`` images each."""
        share = largest_share(self.sizes, ranks)
        weights = self.parameters
        if stage == 3:
            # The backward pass gathers two blocks at a time.
            weights = min(weights, self.unsharded + share + 2 * self.largest_block)
        return Memory(
            weights=FLOAT * weights,
            copies=HALF * weights if self.half else 0,
            gradients=FLOAT * (share if stage >= 2 else self.parameters),
            moments=2 * FLOAT * (share if stage >= 1 else self.parameters),
            activations=batch_size * self.activations,
        )

    def _activations(self, recompute: bool) -> int:
        """Returns the bytes of activations that are kept for one image."""
        element = KEPT * (HALF if self.half else FLOAT)
        if not recompute:
            return round(element * self.cost.activations)
        # Each block's input is kept, and the activations of one block at a time.
        blocks = _by_block(self.cost, "activations")
        inputs = {_block_of(layer.name): math.prod(layer.output) for layer in self.cost.layers}
        kept = FLOAT * sum(inputs[name] for name in blocks)
        others = self.cost.activations - sum(blocks.values())
        return round(kept + element * (others + max(blocks.values(), default=0)))


def largest_share(sizes: list[int], ranks: int) -> int:
    """Returns the number of elements of the rank that has most of them.

    Fleet assigns the parameters, the largest first, each to the rank that has least so far.

    Args:
        sizes: elements of each parameter.
        ranks: number of processes.
    """
    shares = [0] * ranks
    for size in sorted(sizes, reverse=True):
        shares[shares.index(min(shares))] += size
    return max(shares)


def _by_block(cost: Cost, field: str) -> dict[str, int]:
    """Returns the sum of a field of ``costs.Layer`` over the layers of each block."""
    blocks: dict[str, int] = {}
    for layer in cost.layers:
        if name := _block_of(layer.name):
            blocks[name] = blocks.get(name, 0) + getattr(layer, field)
    return blocks


def _block_of(name: str) -> str:
    """Returns the name of the block of a layer within one; else ""."""
    matched = _BLOCK.match(name)
    return matched[1] if matched else ""
