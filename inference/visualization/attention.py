"""Computes maps of a model's attention weights, and attention rollout (Abnar & Zuidema 2020,
arXiv:2005.00928).
"""

from typing import Any

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel
from models.cswin import StripeAttention
from models.cvt import Attention as HalvedAttention
from models.focal import FocalAttention
from models.halonet import HaloAttention
from models.layers.attention import attention_layers, attention_weights
from models.layers.class_attention import ClassAttention
from models.layers.units import MaskUnitAttention
from models.mobilevit import PATCH, MobileViT
from models.pvtv2 import Attention as ReducedAttention
from models.shuffle import WindowAttention as ShuffledAttention
from models.swin import WindowAttention
from weights.layout import sublayer


def has_attention(model: ImageModel) -> bool:
    """Returns whether an architecture has attention weights."""
    return bool(attention_layers(model))


def has_rollout(model: ImageModel) -> bool:
    """Returns whether attention rollout is defined for an architecture.

    Each block has to attend from all tokens to all, and all blocks need the same tokens.
    """
    layers = attention_layers(model).values()
    same_tokens = len({stage["reduction"] for stage in model.feature_info}) == 1
    has_class_attention = any(isinstance(layer, ClassAttention) for layer in layers)
    return bool(layers) and model.layout == "NLC" and same_tokens and not has_class_attention


def describe_queries(model: ImageModel) -> str:
    """Returns a text that says which tokens' attention ``attention`` returns."""
    if getattr(model, "global_pool", None) != "token":
        return "of the mean token"
    if getattr(model, "distilled", False):
        return "of the class and distillation tokens"
    return "of the class token"


def refuse_merged(model: ImageModel) -> None:
    """Raises InputError if a model merges tokens, because merged tokens have no position."""
    if merged := getattr(model, "merge_tokens", 0):
        raise InputError(
            f"MODEL.MERGE_TOKENS is {merged}, whose tokens aren't positions in the image; pass -o"
            " MODEL.MERGE_TOKENS 0"
        )


def attention(model: ImageModel, image: paddle.Tensor, block: int = -1) -> np.ndarray:
    """Returns the attention of each head to each place of an image: [H, rows, columns] float32.

    The queries are the tokens that the classifier reads: the class token (and the distillation
    token), or otherwise all patches, whose attention is averaged. In windows (Swin), stripes
    (CSWin) and mask units (Hiera), tokens attend only to those of the same window. So each window
    has its own part of the map, with the same sum. The places of a patch (MobileViT) are put
    together in the same way. Overlapping windows (HaloNet) are added. A key that stands for several
    places (PVTv2, CvT) gives its weight to each of them.

    Args:
        image: [1, C, H, W], normalised.
        block: the index among the layers that attend; negative ones count from the end.

    Raises:
        InputError: the architecture has no attention, or no such block; or the model merges tokens.
    """
    refuse_merged(model)
    names = list(attention_layers(model))
    if not names:
        raise InputError(
            f"{type(model).__name__} has no attention that can be drawn; use cam instead"
        )
    if not -len(names) <= block < len(names):
        raise InputError(
            f"-block is {block}, but the model has {len(names)} of them: give 0 to {len(names) - 1},"
            " or -1 for the last"
        )
    name = names[block]
    weights, grid = _weights(model, image, [name])
    return _received_weights(model, name, weights[name], grid[name])


def rollout(model: ImageModel, image: paddle.Tensor) -> np.ndarray:
    """Returns the attention rollout from the tokens that the classifier reads: [rows, columns]
    float32.

    With W_i the mean of the heads' weights in block i, it is the product of (W_i + 1) / 2 over all
    blocks.

    Args:
        image: [1, C, H, W], normalised.

    Raises:
        InputError: rollout isn't defined for the architecture, or the model merges tokens.
    """
    refuse_merged(model)
    if not has_rollout(model):
        reason = "it has no attention"
        alternative = "cam"
        if has_attention(model):
            reason = "its blocks don't attend from all tokens to all, the same in each"
            alternative = "attention or cam"
        raise InputError(
            f"rollout isn't defined for {type(model).__name__}: {reason}; use {alternative}"
        )
    by_layer, _ = _weights(model, image, list(attention_layers(model)))
    product = rollout_matrix([weights[0].mean(0) for weights in by_layer.values()])
    return _read_by_head(model, product[None])[0].astype(np.float32)


def rollout_matrix(weights: list[np.ndarray]) -> np.ndarray:
    """Returns the product of (W + 1) / 2 over the weights W [N, N] of all blocks: [N, N] float64."""
    identity = np.eye(len(weights[0]))
    product = identity
    for block_weights in weights:
        product = (block_weights.astype(np.float64) + identity) / 2 @ product
    return product


def _weights(
    model: ImageModel, image: paddle.Tensor, names: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, ...]]]:
    """Returns the attention weights of layers [B, H, queries, keys], and the layers' input shapes."""
    shapes: dict[str, tuple[int, ...]] = {}

    def store_shape(name: str, x: paddle.Tensor) -> None:
        shapes[name] = tuple(x.shape)

    hooks = [
        # Stripes don't show the shape of the map: that of the whole block does.
        sublayer(model, name.partition(".attns.")[0]).register_forward_pre_hook(
            lambda _, x, name=name: store_shape(name, x[0])
        )
        for name in names
    ]
    try:
        with paddle.no_grad(), attention_weights(model, names) as kept:
            model(image)
        return {name: tensor.numpy() for name, tensor in kept.items()}, shapes
    finally:
        for hook in hooks:
            hook.remove()


def _received_weights(
    model: ImageModel, name: str, weights: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns the weight that each place of an image receives: [H, rows, columns].

    Args:
        name: the layer's name.
        weights: its attention weights [B, H, queries, keys]; B counts windows or parts of the image.
        shape: the shape of the layer's input.
    """
    layer = sublayer(model, name)
    if isinstance(layer, FocalAttention):
        block = sublayer(model, name.rpartition(".")[0])
        return _join_surroundings(layer, block.resolution, weights.mean(2))
    if isinstance(layer, ShuffledAttention):
        return _join_shuffled(layer, weights.mean(2), shape[2:])
    if isinstance(layer, WindowAttention):
        return _join_windows(sublayer(model, name.rpartition(".")[0]), weights.mean(2))
    if isinstance(layer, StripeAttention):
        block, _, index = name.partition(".attns.")
        return _join_stripes(sublayer(model, block), int(index), weights.mean(2), shape[1:3])
    if isinstance(layer, HaloAttention):
        return _add_windows(layer, weights.mean(2), shape[2:4])
    if isinstance(model, MobileViT):
        return _interleave(weights.mean(2), *model.grid(weights.shape[3]))
    if isinstance(layer, HalvedAttention):
        return _double_keys(weights[0], shape[1:3])
    if isinstance(layer, ReducedAttention):
        return _spread_keys(layer, weights[0].mean(1), shape[1:3])
    if isinstance(layer, MaskUnitAttention):
        # [units, H, keys] -> [1, units * keys, H], as the layer's tokens.
        keys = weights.mean(2).transpose(0, 2, 1).reshape(1, shape[1], -1)
        return model.by_rows(paddle.to_tensor(keys)).numpy()[0].transpose(2, 0, 1)
    return _read_by_head(model, weights[0])


def _read_by_head(model: ImageModel, weights: np.ndarray) -> np.ndarray:
    """Returns the weights from the tokens that the classifier reads to the patches.

    Shape: [H, N, N], or [H, 1, N] if the class token alone has queries (CaiT) -> [H, rows,
    columns].
    """
    rows, columns = model.grid(weights.shape[2] - model.num_prefix_tokens)
    # CaiT's first blocks have no class token. There the classifier's tokens are all patches.
    prefix = weights.shape[2] - rows * columns
    reads_class_token = prefix and (model.global_pool == "token" or weights.shape[1] == 1)
    tokens = slice(prefix, None)
    if reads_class_token:
        tokens = slice(0, 1 + getattr(model, "distilled", False))
    return weights[:, tokens, prefix:].mean(1).reshape(-1, rows, columns)


def _join_windows(block: nn.Layer, windows: np.ndarray) -> np.ndarray:
    """Puts the windows of a block of Swin together.

    Shape: [windows, H, height * width] -> [H, rows, columns].
    """
    rows, columns = block.resolution
    height, width = block.window_size
    down = -(-rows // height)
    across = -(-columns // width)
    maps = windows.reshape(down, across, -1, height, width).transpose(2, 0, 3, 1, 4)
    # The last windows may reach into the padding.
    maps = maps.reshape(-1, down * height, across * width)[:, :rows, :columns]
    return np.roll(maps, block.shift_size, axis=(1, 2))


def _join_shuffled(
    layer: ShuffledAttention, windows: np.ndarray, grid: tuple[int, ...]
) -> np.ndarray:
    """Puts the windows of Shuffle Transformer together, whose places may lie far from each other.

    Shape: [windows, H, keys] -> [H, rows, columns].
    """
    side = layer.side
    down = grid[0] // side
    across = grid[1] // side
    maps = windows.reshape(down, across, -1, side, side)
    order = (2, 3, 0, 4, 1) if layer.shuffle else (2, 0, 3, 1, 4)
    return maps.transpose(order).reshape(-1, *grid)


def _join_surroundings(
    layer: FocalAttention, resolution: tuple[int, int], windows: np.ndarray
) -> np.ndarray:
    """Adds the windows of Focal Transformer with the places around them. Pooled windows aren't drawn.

    Shape: [windows, H, keys] -> [H, rows, columns].
    """
    size = layer.side
    expand = layer.expand_size
    side = size + 2 * expand
    down, across = (-(-length // size) for length in resolution)
    maps = np.zeros((windows.shape[1], down * size, across * size), np.float32)
    for number, window in enumerate(windows[:, :, : side**2]):
        y, x = divmod(number, across)
        # Beyond its border, a map continues at its other side.
        rows = (np.arange(side) + y * size - expand) % (down * size)
        columns = (np.arange(side) + x * size - expand) % (across * size)
        places: Any = (slice(None), rows[:, None], columns)
        np.add.at(maps, places, window.reshape(-1, side, side))
    return maps[:, : resolution[0], : resolution[1]]


def _join_stripes(
    block: nn.Layer, index: int, stripes: np.ndarray, grid: tuple[int, ...]
) -> np.ndarray:
    """Puts the stripes of a block of CSWin together. Their places outside of the map are dropped.

    Shape: [stripes, H, keys] -> [H, rows, columns].

    Args:
        index: of the attention among the block's.
        grid: rows and columns of the map.
    """
    rows, columns = grid
    unit = block.pad_tokens or 1
    padded = [side + -side % unit for side in grid]
    stripe = list(padded)
    if block.split_size:
        # The first attention has vertical stripes.
        stripe[1 - index] = block.split_size
    top, left = (-side % length // 2 for side, length in zip(padded, stripe, strict=True))
    down = -(-padded[0] // stripe[0])
    maps = stripes.reshape(down, -1, stripes.shape[1], *stripe).transpose(2, 0, 3, 1, 4)
    maps = maps.reshape(stripes.shape[1], down * stripe[0], -1)
    return maps[:, top : top + rows, left : left + columns]


def _add_windows(layer: HaloAttention, windows: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Adds the overlapping windows of HaloNet. Their places outside of the map are dropped.

    Shape: [H, blocks, keys] -> [H, rows, columns].
    """
    rows, columns = grid
    side = layer.block_size
    halo = layer.halo_size
    size = layer.window_size
    maps = np.zeros((len(windows), rows + 2 * halo, columns + 2 * halo), np.float32)
    for block, window in enumerate(windows.transpose(1, 0, 2)):
        row, column = divmod(block, columns // side)
        y = side * row
        x = side * column
        maps[:, y : y + size, x : x + size] += window.reshape(-1, size, size)
    return maps[:, halo : halo + rows, halo : halo + columns]


def _interleave(weights: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Puts the places of MobileViT's patches together.

    In MobileViT, tokens attend to those at the same place of other patches.

    Shape: [places, H, patches] -> [H, rows, columns].
    """
    maps = weights.reshape(PATCH, PATCH, -1, rows, columns).transpose(2, 3, 0, 4, 1)
    return maps.reshape(-1, rows * PATCH, columns * PATCH)


def _double_keys(weights: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Returns for each place of ``grid`` the weight of CvT's key, which stands for 2 x 2 places. A
    class token's weights are drawn if there is one, else those of all places' mean.

    Shape: [H, queries, keys] -> [H, rows, columns].
    """
    rows, columns = grid
    halves = ((rows + 1) // 2, (columns + 1) // 2)
    prefix = weights.shape[2] - halves[0] * halves[1]
    keys = weights[:, 0] if prefix else weights.mean(1)
    maps = keys[:, prefix:].reshape(-1, *halves)
    return maps.repeat(2, 1).repeat(2, 2)[:, :rows, :columns]


def _spread_keys(layer: ReducedAttention, keys: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Returns for each place of ``grid`` the weight of its key; 0 if it has none.

    Shape: [H, keys] -> [H, rows, columns].
    """
    rows, columns = grid
    if not layer.reduces:
        return keys.reshape(-1, rows, columns)
    side = layer.sr.weight.shape[-1]
    # Linear attention averages all places to 7 x 7 keys.
    if side == 1:
        row = np.arange(rows) * 7 // rows
        column = np.arange(columns) * 7 // columns
        return keys.reshape(-1, 7, 7)[:, row][:, :, column]
    keys = keys.reshape(-1, rows // side, columns // side).repeat(side, 1).repeat(side, 2)
    return np.pad(keys, ((0, 0), (0, rows - keys.shape[1]), (0, columns - keys.shape[2])))
