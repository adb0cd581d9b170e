"""What training takes of each process's memory, by arithmetic: no weights are made, and nothing is
computed.

Optimizers are taken to keep two moments of each parameter, as AdamW does. Weights, gradients and
moments are float32; AMP computes from copies of the weights. What a GPU's libraries take, and a
step's passing buffers, isn't counted.
"""

import math
import re
from typing import NamedTuple

from models.costs import Cost, cost
from settings.options import Configuration

STAGES = (0, 1, 2, 3)  # of DIST.STRATEGY.sharding_configs; 0: no sharding
# bytes
FLOAT = 4
HALF = 2
# What training keeps of a layer for its backward pass, over what ``costs`` counts as its
# activations: inputs of norms and outputs of activation functions are kept, too. It is 1.5 for a
# ViT's block, whose formulas say what is kept. On a CPU, the compiled operators keep less: 1.2 was
# measured for ViT-S (tools/model_info.py, two batch sizes).
KEPT = 1.5
_BLOCK = re.compile(r"(.*\bblocks\.\d+|layer\d+\.\d+)\.")


class Memory(NamedTuple):
    """Bytes of one process, the one that has most of them."""

    weights: int
    copies: int  # of the weights, in bfloat16
    gradients: int
    moments: int
    activations: int


class TrainingMemory:
    """A model of which memory is computed.

    Args:
        config: its configuration; MODEL.RECOMPUTE and AMP count.
    """

    def __init__(self, config: Configuration) -> None:
        self.cost = cost(config)
        self.sizes = self.cost.sizes
        self.parameters = sum(self.sizes)
        self.half = config.AMP
        blocks = _by_block(self.cost, "parameters")
        # of stage 3, which shares out blocks alone
        self.everywhere = self.parameters - sum(blocks.values())
        self.block = max(blocks.values(), default=0)
        self.activations = self._activations(bool(config.MODEL.get("RECOMPUTE")))

    @property
    def stages(self) -> tuple[int, ...]:
        """Returns the stages of sharding that the model can be trained with: the third needs one
        sequence of blocks.
        """
        return (
            STAGES
            if any(layer.name.startswith("blocks.") for layer in self.cost.layers)
            else STAGES[:-1]
        )

    def per_process(self, stage: int, ranks: int, batch_size: int) -> Memory:
        """Returns what each of ``ranks`` processes takes for a batch of ``batch_size`` images of
        its own.
        """
        share = largest_share(self.sizes, ranks)
        weights = self.parameters
        if stage == 3:
            # In a backward pass, two blocks are there as a whole.
            weights = min(weights, self.everywhere + share + 2 * self.block)
        return Memory(
            weights=FLOAT * weights,
            copies=HALF * weights if self.half else 0,
            gradients=FLOAT * (share if stage >= 2 else self.parameters),
            moments=2 * FLOAT * (share if stage >= 1 else self.parameters),
            activations=batch_size * self.activations,
        )

    def _activations(self, recompute: bool) -> int:
        """Returns the bytes that are kept of one image."""
        each = KEPT * (HALF if self.half else FLOAT)
        if not recompute:
            return round(each * self.cost.activations)
        blocks = _by_block(self.cost, "activations")
        inputs = {_block_of(layer.name): math.prod(layer.output) for layer in self.cost.layers}
        kept = FLOAT * sum(inputs[name] for name in blocks)
        return round(
            kept
            + each
            * (self.cost.activations - sum(blocks.values()) + max(blocks.values(), default=0))
        )


def largest_share(sizes: list[int], ranks: int) -> int:
    """Returns how many elements the rank has that gets most of them: fleet gives each parameter,
    the largest first, to the rank that has least.
    """
    shares = [0] * ranks
    for size in sorted(sizes, reverse=True):
        shares[shares.index(min(shares))] += size
    return max(shares)


def _by_block(found: Cost, field: str) -> dict[str, int]:
    """Returns the sum of a field of ``costs.Layer`` over the layers of each block."""
    blocks: dict[str, int] = {}
    for layer in found.layers:
        if name := _block_of(layer.name):
            blocks[name] = blocks.get(name, 0) + getattr(layer, field)
    return blocks


def _block_of(name: str) -> str:
    matched = _BLOCK.match(name)
    return matched[1] if matched else ""
