"""Parts of tensors, and windows of maps, by compiled operators, where ``ops.usable`` says yes."""

from collections.abc import Sequence

import paddle

from ops.calls import absent, run


def split(x: paddle.Tensor, sizes: Sequence[int], axis: int) -> list[paddle.Tensor]:
    """The two or three parts of x along an axis, of these sizes."""
    return run("vit_parts", x, axis % x.ndim, sizes)[: len(sizes)]


def concat(parts: Sequence[paddle.Tensor], axis: int) -> paddle.Tensor:
    """Two or three tensors side by side along an axis."""
    return run("vit_joined", *parts, *[absent()] * (3 - len(parts)), axis % parts[0].ndim)[0]


def largest(x: paddle.Tensor) -> paddle.Tensor:
    """The maximum over the second axis: [B, N, ...] -> [B, ...]. Equal values share its gradient."""
    return run("vit_largest", x)[0]


def into_windows(x: paddle.Tensor, window: Sequence[int], shift: Sequence[int]) -> paddle.Tensor:
    """Windows (height, width) of maps [B, H, W, C]: [B * windows, height * width, C].

    Before, the maps are moved up and to the left by ``shift``, in a circle. H and W are multiples
    of the window's.
    """
    return run("vit_blocks", x, x.shape, window, shift, False)[0]


def from_windows(
    x: paddle.Tensor, shape: Sequence[int], window: Sequence[int], shift: Sequence[int]
) -> paddle.Tensor:
    """The inverse of ``into_windows``; ``shape`` is the maps'."""
    return run("vit_blocks", x, shape, window, shift, True)[0]
