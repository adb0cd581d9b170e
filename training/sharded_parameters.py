"""Stage 3 of ZeRO: the ranks share out the weights, too (Rajbhandari et al. 2020,
arXiv:1910.02054).

Each weight of a block is held by its owner alone, with its gradient and the optimizer's state.
Before a block computes, the owners send its weights to all ranks, which free them afterwards.
MODEL.RECOMPUTE keeps nothing of a block: its backward pass computes it again, with weights that are
sent once more. What isn't in a block (the embedding, the last norm, the classifier) is on every
rank. ``GroupShardedStage3`` of Paddle does this, too, but not on CPUs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from paddle import nn

from utils import world_size


class ShardedBlock:
    """The weights of a block. Each rank holds only its own ones between two uses.

    Args:
        layer: the block.
        buckets: its trained weights, by owner (``parallel._Bucket``).
        siblings: all blocks of the model, which order their backward passes.
    """

    def __init__(self, layer: nn.Layer, buckets: list[Any], siblings: "ShardedBlocks") -> None:
        self.buckets = buckets
        self.siblings = siblings
        # Whether all weights are in this process.
        self.whole = True
        # Whether they stay here: in an evaluation, and until training begins.
        self.kept = True
        # Whether a backward pass is to come, which calls the block a second time.
        self.forwarded = False
        begin: Any = self._begin
        end: Any = self._end
        layer.register_forward_pre_hook(begin)
        layer.register_forward_post_hook(end)

    def _begin(self, layer: nn.Layer, inputs: tuple) -> None:
        if self.kept:
            return
        if self.forwarded:
            self.siblings.begin_backward(self)
        self.gather()

    def _end(self, layer: nn.Layer, inputs: tuple, output: Any) -> None:
        if self.kept:
            return
        if self.forwarded:
            # This is the second call: its backward pass needs the weights.
            self.forwarded = False
        elif not paddle.is_grad_enabled():
            self.free()
        elif all(tensor.stop_gradient for tensor in inputs):
            # Everything before it is frozen, so it isn't recomputed (models/layers/recompute.py).
            self.siblings.last.append(self)
        else:
            self.forwarded = True
            self.free()

    @paddle.no_grad()
    def gather(self) -> None:
        """Receives the weights that this rank doesn't hold."""
        if self.whole:
            return
        for bucket in self.buckets:
            bucket.begin_send()
            bucket.end_send()
        self.whole = True

    def free(self) -> None:
        """Frees the weights that this rank doesn't own."""
        if not self.whole or self.kept:
            return
        for bucket in self.buckets:
            if not bucket.own:
                for parameter in bucket.parameters:
                    parameter._clear_data()
        self.whole = False

    @paddle.no_grad()
    def reduce(self, scale: float) -> None:
        """Sends the gradients' sum, times ``scale``, to the owners, and frees the weights."""
        for bucket in self.buckets:
            bucket.begin_reduce()
            bucket.end_reduce(scale)
        self.free()


class ShardedBlocks:
    """The blocks of a model.

    Their gradients are reduced in the order of the backward pass, which is the same on every rank.

    Args:
        blocks: layers and their buckets, in the order in which they are called.
    """

    def __init__(self, blocks: list[tuple[nn.Layer, list[Any]]]) -> None:
        self.blocks = [ShardedBlock(layer, buckets, self) for layer, buckets in blocks]
        # Blocks whose backward pass has begun.
        self.live: list[ShardedBlock] = []
        # Blocks whose weights stay from the forward pass to the end of the backward pass.
        self.last: list[ShardedBlock] = []
        self.scale = 1 / world_size()

    def begin_backward(self, block: ShardedBlock) -> None:
        """Reduces the gradients of blocks that are done, before one more is computed again."""
        # The last block may still be at work on its gradients. Those before it are done.
        while len(self.live) > 1:
            self.live.pop(0).reduce(self.scale)
        self.live.append(block)

    def reduce(self, scale: float) -> None:
        """Ends a backward pass."""
        for block in (*self.live, *self.last):
            block.reduce(scale)
        self.live = []
        self.last = []
        # The loss may not have depended on a block.
        for block in self.blocks:
            block.forwarded = False

    def free_unowned_weights(self) -> None:
        """Frees the weights that other ranks own, now and after each use."""
        for block in self.blocks:
            block.kept = False
            block.free()

    @contextlib.contextmanager
    def gathered_weights(self) -> Iterator[None]:
        """Returns a context in which every rank holds all weights."""
        for block in self.blocks:
            block.gather()
            block.kept = True
        yield
        self.free_unowned_weights()

    def arrays(self, keep: bool) -> dict[str, np.ndarray]:
        """Returns the blocks' weights by Paddle's names, one block after the other.

        Every rank calls it.

        Args:
            keep: whether this rank wants them; otherwise it gets {}.
        """
        arrays = {}
        for block in self.blocks:
            was_whole = block.whole
            block.gather()
            if keep:
                for bucket in block.buckets:
                    for parameter in bucket.parameters:
                        arrays[parameter.name] = parameter.numpy()
            if not was_whole:
                block.free()
        return arrays
