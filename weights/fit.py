"""Fits a file's tensors to a model of another image size, patch size, number of channels or of classes.

The results are timm's (``weights.resize``). Tensors are in the model's layout here: a Linear's weight is [in, out].
"""

import math
import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import paddle

from weights.layout import Target, sublayer
from weights.resize import (
    adapt_input_channels,
    resample_patch_kernel,
    resize_attention_biases,
    resize_pos_embed,
    resize_rel_pos_bias_table,
)

STATISTICS = (".running_mean", ".running_var")  # of a batch norm before a classifier
TABLE, BIASES = "relative_position_bias_table", "attention_biases"
Tensors = dict[str, paddle.Tensor]
Arrays = dict[str, np.ndarray]


def fit_classifiers(model: Target, state: Tensors, arrays: Arrays) -> tuple[list[str], str]:
    """Returns the classifiers' tensors, and why, if the file has none of them, or all for another number of classes."""
    names = classifiers_of(model, state)
    if not any(name in arrays for name in names):
        other = names and classifiers_of(model, arrays)
        return names, "another kind in the file" if other else f"none in the file, {model.num_classes} in the model"
    if not all(name in arrays and arrays[name].shape[:-1] == tuple(state[name].shape[:-1]) for name in names):
        return [], ""
    classes = {arrays[name].shape[-1:] for name in names if not name.endswith(STATISTICS)}
    if len(classes) > 1 or classes & {(), (model.num_classes,)}:
        return [], ""
    return names, f"{classes.pop()[0]} classes in the file, {model.num_classes} in the model"


def classifiers_of(model: Target, names: Iterable[str]) -> list[str]:
    """Returns those of ``names`` that are a tensor of the model's classifiers, or of another kind in their place."""
    prefixes = tuple(f"{name}." for name in model.classifier_names())
    return [name for name in names if name.startswith(prefixes)]


def fit_sizes(model: Target, state: Tensors, arrays: Arrays) -> list[str]:
    """Adapts in ``arrays`` what differs from the model's size and can be adapted; returns what it did, in words."""
    told = _fit_stem(model, state, arrays)
    told += _fit_pos_embed(model, state, arrays)
    return told + _fit_tables(model, state, arrays) + _fit_biases(model, state, arrays)


def _fit_stem(model: Target, state: Tensors, arrays: Arrays) -> list[str]:
    convolutions = (model.first_conv, *model.beside_first_conv)
    return [line for name in convolutions for line in _fit_first(model, f"{name}.weight", state, arrays)]


def _fit_first(model: Target, name: str, state: Tensors, arrays: Arrays) -> list[str]:
    array, told = arrays.get(name), []
    if array is None or name not in state or array.ndim != 4 or not array.size:
        return []
    out, channels, *kernel = state[name].shape
    if array.shape[1] == 3 != channels:
        array = adapt_input_channels(array, channels)
        told.append(f"{name} adapted from 3 channels to {channels}")
    patches = hasattr(sublayer(model, model.first_conv.rpartition(".")[0]), "grid_size")
    if patches and array.shape[:2] == (out, channels) and array.shape[2:] != tuple(kernel):
        told.append("{} resampled from {} x {} to {} x {} pixels".format(name, *array.shape[2:], *kernel))
        array = resample_patch_kernel(array, tuple(kernel))
    arrays[name] = array
    return told


def _fit_pos_embed(model: Target, state: Tensors, arrays: Arrays) -> list[str]:
    names = [name for name in arrays if re.fullmatch(r"pos_embed(_\d+)?", name) and name in state]
    if names and model.pos_embed_layout != "NLC":
        return _fit_pos_map(model.pos_embed_layout == "NCHW", tuple(state["pos_embed"].shape), arrays)
    return [line for name in names for line in _fit_positions(model, name, tuple(state[name].shape), arrays)]


def _fit_positions(model: Target, name: str, wanted: tuple[int, ...], arrays: Arrays) -> list[str]:
    """Of positions [1, prefix + patches, D]: ``pos_embed`` is of ``patch_embed``, ``pos_embed_0`` of its first."""
    array = arrays[name]
    if array.ndim != 3 or array.shape[::2] != wanted[::2]:
        return []
    grid = sublayer(model, name.replace("pos", "patch").replace("_embed_", "_embed.")).grid_size
    patches = array.shape[1] - model.pos_embed_prefix
    side = math.isqrt(max(patches, 0))
    if array.shape == wanted or side**2 != patches or side == 0:
        return []
    arrays[name] = resize_pos_embed(array, model.pos_embed_prefix, grid)
    return ["{0} resized from {1} x {1} to {2} x {3}".format(name, side, *grid)]


def _fit_pos_map(channels_first: bool, wanted: tuple[int, ...], arrays: Arrays) -> list[str]:
    """The same of position embeddings that are a map: [1, D, rows, columns] or [1, rows, columns, D]."""
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


def _fit_tables(model: Target, state: Tensors, arrays: Arrays) -> list[str]:
    told: Counter[str] = Counter()
    for name in [name for name in arrays if name.endswith(TABLE) and name in state and arrays[name].ndim == 2]:
        window = sublayer(model, name.rpartition(".")[0]).window_size
        rows, (wanted, heads) = len(arrays[name]), state[name].shape
        extra = wanted - (2 * window[0] - 1) * (2 * window[1] - 1)  # BEiT's three, of the class token
        side = math.isqrt(max(rows - extra, 0))
        if rows == wanted or side**2 != rows - extra or side % 2 == 0 or arrays[name].shape != (rows, heads):
            continue
        old = (side + 1) // 2
        arrays[name] = resize_rel_pos_bias_table(arrays[name], (old, old), window)
        told["{} resized from {} x {} to {} x {}".format(TABLE, old, old, *window)] += 1
    return [f"{count} {line}" for line, count in told.items()]


def _fit_biases(model: Target, state: Tensors, arrays: Arrays) -> list[str]:
    told: Counter[str] = Counter()
    for name in [name for name in arrays if name.endswith(BIASES) and name in state and arrays[name].ndim == 2]:
        (heads, columns), window = (
            arrays[name].shape,
            getattr(sublayer(model, name.rpartition(".")[0]), "window_size", ()),
        )
        side = math.isqrt(columns)
        if not window or columns == state[name].shape[1] or side**2 != columns or heads != state[name].shape[0]:
            continue
        arrays[name] = resize_attention_biases(arrays[name], (side, side), window)
        told["{} resized from {} x {} to {} x {}".format(BIASES, side, side, *window)] += 1
    return [f"{count} {line}" for line, count in told.items()]
