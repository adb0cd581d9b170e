"""Where a model attends to: maps of its attention weights, and attention rollout (Abnar & Zuidema
2020, arXiv:2005.00928).
"""

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel
from models.halonet import HaloAttention
from models.layers.attention import attention_layers, attention_weights
from models.layers.class_attention import ClassAttention
from models.layers.units import MaskUnitAttention
from models.mobilevit import PATCH, MobileViT
from models.pvtv2 import Attention as ReducedAttention
from models.swin import WindowAttention
from weights.layout import sublayer


def attends(model: ImageModel) -> bool:
    """Returns whether an architecture has attention weights."""
    return bool(attention_layers(model))


def rolls_out(model: ImageModel) -> bool:
    """Returns whether rollout is defined: each block attends from all tokens to all, and all have
    the same ones.
    """
    one_grid = len({one["reduction"] for one in model.feature_info}) == 1
    of_one = any(isinstance(layer, ClassAttention) for layer in attention_layers(model).values())
    return attends(model) and model.layout == "NLC" and one_grid and not of_one


def queries(model: ImageModel) -> str:
    """Returns whose attention ``attention`` gives, in words."""
    if getattr(model, "global_pool", None) == "token":
        return (
            "of the class and distillation tokens"
            if getattr(model, "distilled", False)
            else "of the class token"
        )
    return "of the mean token"


def attention(model: ImageModel, image: paddle.Tensor, block: int = -1) -> np.ndarray:
    """Returns how much each head attends to each place of an image: [H, rows, columns] float32.

    The queries are the tokens that the classifier reads: the class token (and the distillation
    token), or else all patches, on average. Windows (Swin) and mask units (Hiera) share the map.
    Each holds what its own tokens give, so each has the same sum. The places of one kind within
    patches (MobileViT) share it, too. Where windows overlap (HaloNet) they are added. Keys of
    several places (PVTv2) give their weight to each.

    Args:
        image: [1, C, H, W], normalised.
        block: of all blocks that attend, from 0; negative: from the last.

    Raises:
        InputError: the architecture has no attention, or not so many blocks.
    """
    names = list(attention_layers(model))
    if not names:
        raise InputError(
            f"{type(model).__name__} has no attention that can be drawn; cam shows what it looks at, too"
        )
    if not -len(names) <= block < len(names):
        raise InputError(
            f"-block is {block}, the model has {len(names)}: give 0 to {len(names) - 1}, or -1: the last"
        )
    name = names[block]
    weights, grid = _weights(model, image, [name])
    return _received_weights(model, name, weights[name], grid[name])


def rollout(model: ImageModel, image: paddle.Tensor) -> np.ndarray:
    """Returns the attention of all blocks together, from the tokens that the classifier reads:
    [rows, columns] float32.

    With W_i the mean of the heads' weights in block i, it is the product of (W_i + 1) / 2 over the
    blocks.

    Args:
        image: [1, C, H, W], normalised.

    Raises:
        InputError: it isn't defined for the architecture.
    """
    if not rolls_out(model):
        why = (
            "its blocks don't attend from all tokens to all, the same in each"
            if attends(model)
            else "it has no attention"
        )
        other = "attention or cam" if attends(model) else "cam"
        raise InputError(f"rollout isn't defined for {type(model).__name__}: {why}; use {other}")
    kept, _ = _weights(model, image, list(attention_layers(model)))
    product = rollout_matrix([weights[0].mean(0) for weights in kept.values()])
    return _read_by_head(model, product[None])[0].astype(np.float32)


def rollout_matrix(weights: list[np.ndarray]) -> np.ndarray:
    """Returns the product of (W + 1) / 2 over W of the first block to the last, each [N, N]:
    float64.
    """
    product = np.eye(len(weights[0]))
    for one in weights:
        product = (one.astype(np.float64) + np.eye(len(one))) / 2 @ product
    return product


def _weights(
    model: ImageModel, image: paddle.Tensor, names: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, ...]]]:
    """The weights of layers [B, H, queries, keys], and the shape of what each reads."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, x: paddle.Tensor) -> None:
        shapes[name] = tuple(x.shape)

    hooks = [
        sublayer(model, name).register_forward_pre_hook(lambda _, x, name=name: note(name, x[0]))
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
    """What each place gets of one image's weights [B, H, queries, keys], by a layer that reads
    ``shape``.
    """
    layer = sublayer(model, name)
    if isinstance(layer, WindowAttention):
        return _join_windows(sublayer(model, name.rpartition(".")[0]), weights.mean(2))
    if isinstance(layer, HaloAttention):
        return _overlaid(layer, weights.mean(2), shape[2:4])
    if isinstance(model, MobileViT):
        return _interleave(weights.mean(2), *model.grid(weights.shape[3]))
    if isinstance(layer, ReducedAttention):
        return _spread_keys(layer, weights[0].mean(1), shape[1:3])
    if isinstance(layer, MaskUnitAttention):
        keys = weights.mean(2).transpose(0, 2, 1).reshape(1, shape[1], -1)  # by unit, key and head
        return model.by_rows(paddle.to_tensor(keys)).numpy()[0].transpose(2, 0, 1)
    return _read_by_head(model, weights[0])


def _read_by_head(model: ImageModel, weights: np.ndarray) -> np.ndarray:
    """The rows of the tokens that the classifier reads, on average, at the patches.

    Shape: [H, N, N], or [H, 1, N] of a class token's queries alone (CaiT) -> [H, rows, columns].
    """
    rows, columns = model.grid(weights.shape[2] - model.num_prefix_tokens)
    # 0 in CaiT's blocks without a class token: all patches are read
    prefix = weights.shape[2] - rows * columns
    class_token = prefix and (model.global_pool == "token" or weights.shape[1] == 1)
    tokens = (
        slice(0, 1 + getattr(model, "distilled", False)) if class_token else slice(prefix, None)
    )
    return weights[:, tokens, prefix:].mean(1).reshape(-1, rows, columns)


def _join_windows(block: nn.Layer, windows: np.ndarray) -> np.ndarray:
    """Puts windows of a block of Swin [windows, H, height * width] to their places: [H, rows,
    columns].
    """
    (rows, columns), (height, width) = block.resolution, block.window_size
    down = -(-rows // height)
    across = -(-columns // width)
    maps = windows.reshape(down, across, -1, height, width).transpose(2, 0, 3, 1, 4)
    # without the padding
    maps = maps.reshape(-1, down * height, across * width)[:, :rows, :columns]
    return np.roll(maps, block.shift_size, axis=(1, 2))


def _overlaid(layer: HaloAttention, windows: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Adds up the overlapping windows [H, blocks, keys] of a map: [H, rows, columns]; what is
    beyond it is left out.
    """
    (rows, columns), side, halo = grid, layer.block_size, layer.halo_size
    maps = np.zeros((len(windows), rows + 2 * halo, columns + 2 * halo), np.float32)
    for block, window in enumerate(windows.transpose(1, 0, 2)):
        y, x = (side * place for place in divmod(block, columns // side))
        size = layer.window_size
        maps[:, y : y + size, x : x + size] += window.reshape(-1, size, size)
    return maps[:, halo : halo + rows, halo : halo + columns]


def _interleave(weights: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Puts what the places of a patch [places, H, patches] give, each of its own kind, together:
    [H, rows, columns].
    """
    maps = weights.reshape(PATCH, PATCH, -1, rows, columns).transpose(2, 3, 0, 4, 1)
    return maps.reshape(-1, rows * PATCH, columns * PATCH)


def _spread_keys(layer: ReducedAttention, keys: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Gives each place of ``grid`` the weight of its key: [H, keys] -> [H, rows, columns]; 0 where
    there is none.
    """
    rows, columns = grid
    if not layer.reduces:
        return keys.reshape(-1, rows, columns)
    side = layer.sr.weight.shape[-1]
    if side == 1:  # keys of an average to 7 x 7
        row, column = (np.arange(n) * 7 // n for n in grid)
        return keys.reshape(-1, 7, 7)[:, row][:, :, column]
    keys = keys.reshape(-1, rows // side, columns // side).repeat(side, 1).repeat(side, 2)
    return np.pad(keys, ((0, 0), (0, rows - keys.shape[1]), (0, columns - keys.shape[2])))
