"""Fits a file's tensors to a model of another image size, patch size, number of channels or of
classes.

The results are timm's (``weights.resize``). Tensors are in the model's layout here: a Linear's
weight is [in, out].
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from weights.layout import Target, sublayer
from weights.resize import (
    adapt_input_channels,
    resample_patch_kernel,
    resize_attention_biases,
    resize_pos_embed,
    resize_rel_pos_bias_table,
)

STATISTICS = (".running_mean", ".running_var")  # of a batch norm before a classifier
TABLE = "relative_position_bias_table"
BIASES = "attention_biases"
Tensors = dict[str, paddle.Tensor]
Arrays = dict[str, np.ndarray]


def fit_classifiers(model: Target, state: Tensors, arrays: Arrays) -> tuple[list[str], str]:
    """Returns the classifiers' tensors, and why, if the file has none of them, or all for another
    number of classes.
    """
    names = classifiers_of(model, state)
    if not any(name in arrays for name in names):
        other = names and classifiers_of(model, arrays)
        return (
            names,
            "another kind in the file"
            if other
            else f"none in the file, {model.num_classes} in the model",
        )
    if not all(
        name in arrays and arrays[name].shape[:-1] == tuple(state[name].shape[:-1])
        for name in names
    ):
        return [], ""
    classes = {arrays[name].shape[-1:] for name in names if not name.endswith(STATISTICS)}
    if len(classes) > 1 or classes & {(), (model.num_classes,)}:
        return [], ""
    return names, f"{classes.pop()[0]} classes in the file, {model.num_classes} in the model"


def classifiers_of(model: Target, names: Iterable[str]) -> list[str]:
    """Returns those of ``names`` that are a tensor of the model's classifiers, or of another kind
    in their place.
    """
    prefixes = tuple(f"{name}." for name in model.classifier_names())
    return [name for name in names if name.startswith(prefixes)]


def blind_classifiers(model: Target, file: Path) -> str:
    """Returns a warning about classifiers that give all classes, or all images, the same
    probabilities.

    It is "" if they don't. The values were read from ``file``.
    """
    layers = [sublayer(model, name) for name in model.classifier_names()]
    sublayers = [sub for layer in layers for sub in layer.sublayers(include_self=True)]
    linears = [layer for layer in sublayers if isinstance(layer, nn.Linear)]
    weights = [linear.weight.numpy() for linear in linears]
    biases = [linear.bias.numpy() for linear in linears if linear.bias is not None]
    if not weights:
        return ""
    if model.num_classes > 1 and all(
        (values == values[..., :1]).all() for values in [*weights, *biases]
    ):
        return f"{file}: its classifier's values are the same for all classes: each gets the same probability"
    if not any(values.any() for values in weights):
        return f"{file}: its classifier's weights are 0: all images get the same probabilities"
    return ""


def fit_sizes(
    model: Target, state: Tensors, arrays: Arrays, images: tuple[int, int] | None = None
) -> list[str]:
    """Adapts in ``arrays`` what differs from the model's size and can be adapted; returns what it
    did, in words.

    Args:
        images: (height, width) that the file's tensors are for, whose shape their grids have; None:
            it isn't known.
    """
    shape = None if images in (None, getattr(model, "image_size", None)) else images[0] / images[1]
    told = _fit_stem(model, state, arrays)
    told += _fit_pos_embed(model, state, arrays, shape)
    return (
        told + _fit_tables(model, state, arrays, shape) + _fit_biases(model, state, arrays, shape)
    )


def grid_of(count: int, shape: float | None, own: tuple[int, int]) -> tuple[int, int] | None:
    """Returns the (rows, columns) that ``count`` places have in a file, or None.

    Args:
        shape: rows over columns, about; None: ``own`` where that has as many, otherwise a square.
        own: the model's.
    """
    if shape is None and count == math.prod(own):
        return own
    shape = shape or 1.0
    sides = [side for side in range(1, math.isqrt(max(count, 0)) + 1) if count % side == 0]
    grids = [grid for side in sides for grid in ((side, count // side), (count // side, side))]
    rows, columns = min(
        grids, key=lambda grid: abs(math.log(grid[0] / grid[1] / shape)), default=(0, 1)
    )
    # windows are squarer than images
    low, high = (1, 1) if shape == 1 else (min(shape, 1) / 2, max(shape, 1) * 2)
    return (rows, columns) if low <= rows / columns <= high else None


def _fit_stem(model: Target, state: Tensors, arrays: Arrays) -> list[str]:
    convolutions = (model.first_conv, *model.beside_first_conv)
    return [
        line for name in convolutions for line in _fit_first(model, f"{name}.weight", state, arrays)
    ]


def _fit_first(model: Target, name: str, state: Tensors, arrays: Arrays) -> list[str]:
    array = arrays.get(name)
    told = []
    if array is None or name not in state or array.ndim != 4 or not array.size:
        return []
    out, channels, *kernel = state[name].shape
    if array.shape[1] == 3 != channels:
        array = adapt_input_channels(array, channels)
        told.append(f"{name} adapted from 3 channels to {channels}")
    patches = hasattr(sublayer(model, model.first_conv.rpartition(".")[0]), "grid_size")
    if patches and array.shape[:2] == (out, channels) and array.shape[2:] != tuple(kernel):
        told.append(
            "{} resampled from {} x {} to {} x {} pixels".format(name, *array.shape[2:], *kernel)
        )
        array = resample_patch_kernel(array, tuple(kernel))
    arrays[name] = array
    return told


def _fit_pos_embed(model: Target, state: Tensors, arrays: Arrays, shape: float | None) -> list[str]:
    names = [name for name in arrays if re.fullmatch(r"pos_embed(_\d+)?", name) and name in state]
    if names and model.pos_embed_layout != "NLC":
        return _fit_pos_map(
            model.pos_embed_layout == "NCHW", tuple(state["pos_embed"].shape), arrays
        )
    return [
        line
        for name in names
        for line in _fit_positions(model, name, tuple(state[name].shape), arrays, shape)
    ]


def _fit_positions(
    model: Target, name: str, wanted: tuple[int, ...], arrays: Arrays, shape: float | None
) -> list[str]:
    """Of positions [1, prefix + patches, D]: ``pos_embed`` is of ``patch_embed``, ``pos_embed_0``
    of its first.
    """
    array = arrays[name]
    if array.ndim != 3 or array.shape[::2] != wanted[::2]:
        return []
    grid = sublayer(model, name.replace("pos", "patch").replace("_embed_", "_embed.")).grid_size
    old = grid_of(array.shape[1] - model.pos_embed_prefix, shape, grid)
    if old in (None, grid):
        return []
    arrays[name] = resize_pos_embed(array, model.pos_embed_prefix, grid, old)
    return ["{} resized from {} x {} to {} x {}".format(name, *old, *grid)]


def _fit_pos_map(channels_first: bool, wanted: tuple[int, ...], arrays: Arrays) -> list[str]:
    """The same of position embeddings that are a map: [1, D, rows, columns] or [1, rows, columns,
    D].
    """
    order, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if channels_first else ((0, 1, 2, 3), (0, 1, 2, 3))
    array = arrays["pos_embed"]
    if array.ndim != 4 or array.shape == wanted or not array.size:
        return []
    one, *old, dim = (array := array.transpose(order)).shape
    rows, columns = grid = (wanted[order[1]], wanted[order[2]])
    if (one, dim) != (wanted[0], wanted[order[3]]):
        return []
    resized = resize_pos_embed(array.reshape(1, -1, dim), 0, grid, (old[0], old[1]))
    arrays["pos_embed"] = resized.reshape(1, rows, columns, dim).transpose(back)
    return ["pos_embed resized from {} x {} to {} x {}".format(*old, *grid)]


def _fit_tables(model: Target, state: Tensors, arrays: Arrays, shape: float | None) -> list[str]:
    told: Counter[str] = Counter()
    for name in [
        name for name in arrays if name.endswith(TABLE) and name in state and arrays[name].ndim == 2
    ]:
        window = sublayer(model, name.rpartition(".")[0]).window_size
        rows, (wanted, heads) = len(arrays[name]), state[name].shape
        own = (2 * window[0] - 1, 2 * window[1] - 1)
        extra = wanted - math.prod(own)  # BEiT's three, of the class token
        # a window may be one in any image
        square = own[0] == own[1] == math.isqrt(max(rows - extra, 0))
        offsets = grid_of(rows - extra, None if square else shape, own)
        if (
            offsets in (None, own)
            or not all(side % 2 for side in offsets)
            or arrays[name].shape != (rows, heads)
        ):
            continue
        old = ((offsets[0] + 1) // 2, (offsets[1] + 1) // 2)
        arrays[name] = resize_rel_pos_bias_table(arrays[name], old, window)
        told["{} resized from {} x {} to {} x {}".format(TABLE, *old, *window)] += 1
    return [f"{count} {line}" for line, count in told.items()]


def _fit_biases(model: Target, state: Tensors, arrays: Arrays, shape: float | None) -> list[str]:
    told: Counter[str] = Counter()
    for name in [
        name
        for name in arrays
        if name.endswith(BIASES) and name in state and arrays[name].ndim == 2
    ]:
        heads, columns = arrays[name].shape
        window: Any = getattr(sublayer(model, name.rpartition(".")[0]), "window_size", ())
        old = window and grid_of(columns, shape, window)
        if not old or old == window or heads != state[name].shape[0]:
            continue
        arrays[name] = resize_attention_biases(arrays[name], old, window)
        told["{} resized from {} x {} to {} x {}".format(BIASES, *old, *window)] += 1
    return [f"{count} {line}" for line, count in told.items()]
