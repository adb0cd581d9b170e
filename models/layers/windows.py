"""Cuts feature maps into windows, and pads them."""

from collections.abc import Callable, Sequence

import paddle

import ops
from models.layers.graph_sizes import as_tensor, is_known, places, rounded_up, taken
from models.layers.layout import channels_first, concat


def in_windows(
    x: paddle.Tensor,
    window_size: Sequence[int],
    layer: Callable[[paddle.Tensor], paddle.Tensor],
    shift: Sequence[int] = (0, 0),
    pad_first: bool = False,
) -> paddle.Tensor:
    """Applies a layer within each window of maps.

    Args:
        x: maps [B, H, W, D].
        window_size: (height, width). Maps that aren't a multiple of it are padded by zeros for the
            layer.
        layer: takes [B * windows, height * width, D], returns [B * windows, height * width, E].
        shift: rows and columns by which maps are rolled up and to the left for the layer.
        pad_first: whether maps are padded before they are rolled, rather than after.

    Returns:
        [B, H, W, E].
    """
    if not is_known(*x.shape[1:3]):
        return _in_windows_in_graph(x, window_size, layer, shift, pad_first)
    height, width, dim = x.shape[1:]
    window_height, window_width = window_size
    below = -height % window_height
    right = -width % window_width
    padded = below or right
    if pad_first:
        x = pad_maps(x, below, right)
    if ops.usable(x) and (pad_first or not padded):
        windows = layer(ops.into_windows(x, window_size, shift))
        x = ops.from_windows(windows, [*x.shape[:3], windows.shape[2]], window_size, shift)
        return x[:, :height, :width] if padded else x
    if any(shift):
        x = paddle.roll(x, [-step for step in shift], axis=[1, 2])
    if not pad_first:
        x = pad_maps(x, below, right)
    rows = (height + below) // window_height
    columns = (width + right) // window_width
    x = x.reshape([-1, rows, window_height, columns, window_width, dim]).transpose(
        [0, 1, 3, 2, 4, 5]
    )
    # Not reshape: Paddle Inference loses one after a transposition (Paddle 3.3.1).
    x = layer(x.flatten(0, 2).flatten(1, 2))
    dim = x.shape[2]
    x = x.reshape([-1, rows, columns, window_height, window_width, dim]).transpose(
        [0, 1, 3, 2, 4, 5]
    )
    x = x.flatten(1, 2).flatten(2, 3)
    if padded and not pad_first:
        x = x[:, :height, :width]
    if any(shift):
        x = paddle.roll(x, list(shift), axis=[1, 2])
    if padded and pad_first:
        x = x[:, :height, :width]
    return x


def _in_windows_in_graph(
    x: paddle.Tensor,
    window_size: Sequence[int],
    layer: Callable[[paddle.Tensor], paddle.Tensor],
    shift: Sequence[int],
    pad_first: bool,
) -> paddle.Tensor:
    """Returns the output of ``in_windows`` for sides that are known only when a graph is run.

    Rows and columns are padded, rolled and put back by their places.
    """
    dim = x.shape[3]
    window_height, window_width = window_size
    back = []
    counts = []
    for axis in (1, 2):
        window = window_size[axis - 1]
        step = shift[axis - 1]
        length = as_tensor(x.shape[axis])
        whole = rounded_up(length, window)
        # How many places are rolled.
        rolled = whole if pad_first else length
        at = places(whole)
        source = (at + step) % rolled
        if not pad_first:
            source = paddle.where(at < length, source, at)
        x = taken(x, axis, source, length)
        # ``rolled`` - 1 steps forward are one back.
        back.append((places(length) + step * (rolled - 1)) % rolled)
        counts.append(whole // window)
    rows, columns = counts
    x = x.reshape([-1, rows, window_height, columns, window_width, dim]).transpose(
        [0, 1, 3, 2, 4, 5]
    )
    x = layer(x.reshape([-1, window_height * window_width, dim]))
    dim = x.shape[2]
    x = x.reshape([-1, rows, columns, window_height, window_width, dim]).transpose(
        [0, 1, 3, 2, 4, 5]
    )
    x = x.reshape([-1, rows * window_height, columns * window_width, dim])
    return paddle.index_select(paddle.index_select(x, back[0], 1), back[1], 2)


def pad_maps(x: paddle.Tensor, below: int, right: int) -> paddle.Tensor:
    """Returns maps [B, H, W, D] with rows of zeros below and columns of zeros to the right.

    ``F.pad`` isn't used, because its exports are wrong: ONNX gets an arbitrary value, Paddle
    Inference another layout (Paddle 3.3.1).
    """
    if below:
        zeros = paddle.zeros_like(x[:, :1]).expand([-1, below, -1, -1])
        x = concat([x, zeros], axis=1)
    if right:
        zeros = paddle.zeros_like(x[:, :, :1]).expand([-1, -1, right, -1])
        x = concat([x, zeros], axis=2)
    return x


def windows_of(x: paddle.Tensor, window_size: Sequence[int]) -> paddle.Tensor:
    """Returns the windows of maps, row by row: [B, H, W, D] -> [B * windows, height * width, D].

    Args:
        window_size: (height, width), of which H and W are multiples.
    """
    if ops.usable(x):
        return ops.into_windows(x, window_size, (0, 0))
    rows = x.shape[1] // window_size[0]
    columns = x.shape[2] // window_size[1]
    x = x.reshape([-1, rows, window_size[0], columns, window_size[1], x.shape[3]])
    return x.transpose([0, 1, 3, 2, 4, 5]).flatten(0, 2).flatten(1, 2)


def surrounded_windows(x: paddle.Tensor, size: int, halo: int) -> paddle.Tensor:
    """Returns square windows with the places around them: [B, H, W, D] -> [B * windows, (size + 2
    halo) ** 2, D]. Beyond its border, a map continues at its other side.

    Args:
        size: side of a window, of which H and W are multiples.
        halo: how many places around it, at most ``size``.
    """
    height, width, dim = x.shape[1:]
    side = size + 2 * halo
    rows = height // size
    columns = width // size
    x = _with_neighbours(x.reshape([-1, rows, size, width * dim]), halo)
    x = _with_neighbours(x.reshape([-1, columns, size, dim]), halo)
    return windows_of(x.reshape([-1, rows * side, columns * side, dim]), (side, side))


def _with_neighbours(x: paddle.Tensor, halo: int) -> paddle.Tensor:
    """Returns blocks with the nearest places of the blocks beside them; the first and the last are
    neighbours: [B, blocks, size, D] -> [B, blocks, size + 2 halo, D].
    """
    blocks, size = x.shape[1:3]
    before = x[:, :, size - halo :]
    after = x[:, :, :halo]
    if blocks > 1:
        before = concat([before[:, blocks - 1 :], before[:, : blocks - 1]], axis=1)
        after = concat([after[:, 1:], after[:, :1]], axis=1)
    return concat([before, x, after], axis=2)


def neighbourhoods(x: paddle.Tensor, reach: int) -> paddle.Tensor:
    """Returns each place of maps with those up to ``reach`` rows and columns away: [B, H, W, D] ->
    [B * H * W, (2 reach + 1) ** 2, D]. Beyond the maps there are zeros.
    """
    if not reach:
        return x.flatten(0, 2).unsqueeze(1)
    if ops.usable(x):
        return ops.halo_windows(channels_first(x), 1, reach).flatten(0, 1)
    height, width = x.shape[1:3]
    count = 2 * reach + 1
    zeros = paddle.zeros_like(x[:, :1]).expand([-1, reach, -1, -1])
    x = paddle.concat([zeros, x, zeros], axis=1)
    x = paddle.stack([x[:, i : i + height] for i in range(count)], axis=2)
    zeros = paddle.zeros_like(x[:, :, :, :1]).expand([-1, -1, -1, reach, -1])
    x = paddle.concat([zeros, x, zeros], axis=3)
    x = paddle.stack([x[:, :, :, i : i + width] for i in range(count)], axis=4)
    return x.transpose([0, 1, 3, 2, 4, 5]).flatten(0, 2).flatten(1, 2)
