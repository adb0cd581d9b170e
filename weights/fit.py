"""Adapts a file's tensors to a model of other sizes.

The model may have another size of images or patches, or another number of channels or classes, than
the file. The results agree with timm's (``weights.resize``). Tensors are in the model's layout
here: a Linear's weight is [in, out].
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

# The names of the statistics of a batch norm before a classifier.
STATISTICS = (".running_mean", ".running_var")
TABLE = "relative_position_bias_table"
BIASES = "attention_biases"
# What is reported of a kernel of patches whose size was changed.
_RESAMPLED = "resampled from {} x {} to {} x {} pixels"
Tensors = dict[str, paddle.Tensor]
Arrays = dict[str, np.ndarray]


def fit_classifiers(model: Target, state: Tensors, arrays: Arrays) -> tuple[list[str], str]:
    """Returns the tensors of classifiers that can't be loaded, and the reason.

    They are all of the model's classifiers, if the file lacks them, or has them for another
    number of classes. Otherwise they are ([], "").
    """
    names = classifiers_of(model, state)
    if not any(name in arrays for name in names):
        if names and classifiers_of(model, arrays):
            return names, "another kind in the file"
        return names, f"none in the file, {model.num_classes} in the model"
    classes = set()
    for name in names:
        found = (
            _classes_of(arrays[name], state[name], model.num_classes) if name in arrays else None
        )
        if found is None:
            return [], ""
        if not name.endswith(STATISTICS):
            classes.add(found)
    if len(classes) > 1 or model.num_classes in classes:
        return [], ""
    return names, f"{classes.pop()} classes in the file, {model.num_classes} in the model"


def _classes_of(array: np.ndarray, tensor: paddle.Tensor, classes: int) -> int | None:
    """Returns for how many classes a file has a classifier's tensor.

    It is None if the array differs from the model's tensor in more than that.

    Args:
        tensor: of the model. It has ``classes`` places along one axis, or one more for no class.
    """
    if array.ndim != tensor.ndim:
        return None
    sizes = list(zip(array.shape, tensor.shape, strict=True))
    differing = [(found, own) for found, own in sizes if found != own]
    if not differing:
        return classes
    found, own = differing[0]
    if len(differing) > 1 or own not in (classes, classes + 1):
        return None
    return found - own + classes


def classifiers_of(model: Target, names: Iterable[str]) -> list[str]:
    """Returns those of ``names`` that belong to the model's classifiers.

    A file may have layers of another kind in the place of a classifier, which count, too.
    """
    # Most are layers. A head for maps may have parameters among them, such as a class's embedding.
    classifiers = model.classifier_names()
    prefixes = tuple(f"{name}." for name in classifiers)
    return [name for name in names if name in classifiers or name.startswith(prefixes)]


def blind_classifiers(model: Target, file: Path) -> str:
    """Returns a warning if the classifiers give all classes, or all images, the same probabilities.

    Args:
        file: the file that the values were read from.

    Returns:
        the warning, or "".
    """
    layers = [sublayer(model, name) for name in model.classifier_names()]
    layers = [layer for layer in layers if isinstance(layer, nn.Layer)]
    sublayers = [sub for layer in layers for sub in layer.sublayers(include_self=True)]
    linears = [layer for layer in sublayers if isinstance(layer, nn.Linear)]
    weights = [linear.weight.numpy() for linear in linears]
    biases = [linear.bias.numpy() for linear in linears if linear.bias is not None]
    if not weights:
        return ""
    are_equal = all((values == values[..., :1]).all() for values in [*weights, *biases])
    if model.num_classes > 1 and are_equal:
        return (
            f"{file}: the weights of its classifier are the same for all classes,"
            " so all classes get the same probability"
        )
    if not any(values.any() for values in weights):
        return (
            f"{file}: the weights of its classifier are 0, so all images get the same probabilities"
        )
    return ""


def fit_sizes(
    model: Target, state: Tensors, arrays: Arrays, images: tuple[int, int] | None = None
) -> list[str]:
    """Resizes the tensors in ``arrays`` whose size differs from the model's and that can be resized.

    Args:
        images: the (height, width) of the images that the file's model reads. Its grids have the
            same proportions. None: unknown.

    Returns:
        a line for each thing that was resized.
    """
    shape = None
    if images is not None and images != getattr(model, "image_size", None):
        shape = images[0] / images[1]
    lines = _fit_stem(model, state, arrays)
    lines += _fit_pos_embed(model, state, arrays, shape)
    lines += _fit_tables(model, state, arrays, shape)
    lines += _fit_biases(model, state, arrays, shape)
    return lines


def grid_of(count: int, shape: float | None, own: tuple[int, int]) -> tuple[int, int] | None:
    """Returns the (rows, columns) of a file's grid of ``count`` places, or None if there is none.

    Args:
        shape: about rows / columns; None: unknown. Then the grid is ``own`` if that has as many
            places, and otherwise a square.
        own: the model's grid.
    """
    if shape is None and count == math.prod(own):
        return own
    shape = shape or 1.0
    sides = [side for side in range(1, math.isqrt(max(count, 0)) + 1) if count % side == 0]
    grids = [grid for side in sides for grid in ((side, count // side), (count // side, side))]
    rows, columns = min(
        grids, key=lambda grid: abs(math.log(grid[0] / grid[1] / shape)), default=(0, 1)
    )
    # A grid of windows may be closer to a square than the image, so the proportions have a range.
    low = high = 1.0
    if shape != 1:
        low = min(shape, 1) / 2
        high = max(shape, 1) * 2
    return (rows, columns) if low <= rows / columns <= high else None


def _fit_stem(model: Target, state: Tensors, arrays: Arrays) -> list[str]:
    lines = []
    for name in (model.first_conv, *model.beside_first_conv):
        if model.window_side:
            last = getattr(model, "channels_last", False)
            lines += _fit_window_reader(name, model.window_side**2, state, arrays, last)
        else:
            lines += _fit_first(model, f"{name}.weight", state, arrays)
    return lines


def _fit_window_reader(
    name: str, pixels: int, state: Tensors, arrays: Arrays, channels_last: bool
) -> list[str]:
    """Adapts a Linear or a norm of windows of three channels to another number of channels.

    Args:
        name: of the layer, which reads vectors of channels * ``pixels`` values.
        pixels: of a window.
        channels_last: whether the values come pixel by pixel, not channel by channel.
    """
    lines = []
    for key in (f"{name}.weight", f"{name}.bias"):
        array = arrays.get(key)
        if array is None or key not in state or array.ndim not in (1, 2):
            continue
        values = state[key].shape[0]
        if array.shape[0] != 3 * pixels or values == 3 * pixels or values % pixels:
            continue
        channels = values // pixels
        # As kernels [out, 3, pixels, 1] of a convolution.
        if channels_last:
            kernels = array.reshape(pixels, 3, -1).transpose(2, 1, 0)[..., None]
            adapted = adapt_input_channels(kernels, channels)[..., 0].transpose(2, 1, 0)
        else:
            kernels = array.reshape(3, pixels, -1).transpose(2, 0, 1)[..., None]
            adapted = adapt_input_channels(kernels, channels)[..., 0].transpose(1, 2, 0)
        if array.ndim == 1:
            # A norm's factors stay as large as they are: their products aren't summed.
            adapted = adapted * np.float32(channels / 3)
        arrays[key] = adapted.reshape(values, *array.shape[1:])
        if key.endswith(".weight"):
            lines.append(f"{key} adapted from 3 channels to {channels}")
    return lines


def _fit_first(model: Target, name: str, state: Tensors, arrays: Arrays) -> list[str]:
    """Adapts the kernel of a first convolution [out, in, h, w]."""
    array = arrays.get(name)
    lines = []
    if array is None or name not in state or array.ndim != 4 or not array.size:
        return []
    out, channels, *kernel = state[name].shape
    if array.shape[1] == 3 != channels:
        array = adapt_input_channels(array, channels)
        lines.append(f"{name} adapted from 3 channels to {channels}")
    # Only a convolution that embeds patches can be resampled, not one of a deeper stem.
    convolution = name.removesuffix(".weight")
    embeds_patches = hasattr(sublayer(model, convolution.rpartition(".")[0]), "grid_size")
    same_channels = array.shape[:2] == (out, channels)
    if embeds_patches and same_channels and array.shape[2:] != tuple(kernel):
        lines.append(f"{name} {_RESAMPLED}".format(*array.shape[2:], *kernel))
        array = resample_patch_kernel(array, tuple(kernel))
    arrays[name] = array
    return lines


def resampled_patches(lines: Iterable[str]) -> tuple[str, str] | None:
    """Returns the size of patches in a file and in the model, such as ("16 x 16", "8 x 8").

    Args:
        lines: what ``fit_sizes`` returned.

    Returns:
        the sizes; None: the kernel of the patches wasn't resampled.
    """
    pattern = _RESAMPLED.replace("{} x {}", r"(\d+ x \d+)")
    found = next(filter(None, (re.search(pattern, line) for line in lines)), None)
    return (found[1], found[2]) if found else None


def _fit_pos_embed(model: Target, state: Tensors, arrays: Arrays, shape: float | None) -> list[str]:
    """Resizes a model's position embeddings, or those of the models within a network."""
    lines = []
    for part, layer in model.named_sublayers():
        if hasattr(layer, "pos_embed_layout"):
            inside = _inside(part, arrays)
            for line in _fit_pos_embed(layer, _inside(part, state), inside, shape):
                lines.append(f"{part}.{line}")
            arrays |= {f"{part}.{name}": array for name, array in inside.items()}
    names = [name for name in arrays if re.fullmatch(r"pos_embed(_\d+)?", name) and name in state]
    if names and model.pos_embed_layout != "NLC":
        channels_first = model.pos_embed_layout == "NCHW"
        return _fit_pos_map(channels_first, tuple(state["pos_embed"].shape), arrays)
    for name in names:
        lines += _fit_positions(model, name, tuple(state[name].shape), arrays, shape)
    return lines


def _inside(part: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a model within a network, by their names in the model."""
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _fit_positions(
    model: Target, name: str, wanted: tuple[int, ...], arrays: Arrays, shape: float | None
) -> list[str]:
    """Resizes position embeddings [1, prefix + patches, D] to the shape ``wanted``."""
    array = arrays[name]
    if array.ndim != 3 or array.shape[::2] != wanted[::2]:
        return []
    # pos_embed belongs to patch_embed, and pos_embed_0 to patch_embed.0 (CrossViT).
    grid = sublayer(model, name.replace("pos", "patch").replace("_embed_", "_embed.")).grid_size
    old = grid_of(array.shape[1] - model.pos_embed_prefix, shape, grid)
    if old in (None, grid):
        return []
    arrays[name] = resize_pos_embed(array, model.pos_embed_prefix, grid, old, model.pos_resize)
    return ["{} resized from {} x {} to {} x {}".format(name, *old, *grid)]


def _fit_pos_map(channels_first: bool, wanted: tuple[int, ...], arrays: Arrays) -> list[str]:
    """Resizes position embeddings that are a map to the shape ``wanted``.

    They are [1, D, rows, columns] (``channels_first``) or [1, rows, columns, D].
    """
    array = arrays["pos_embed"]
    if array.ndim != 4 or array.shape == wanted or not array.size:
        return []
    if channels_first:
        array = array.transpose(0, 2, 3, 1)
        wanted = (wanted[0], wanted[2], wanted[3], wanted[1])
    one, *old, dim = array.shape
    rows, columns = wanted[1:3]
    if (one, dim) != (wanted[0], wanted[3]):
        return []
    resized = resize_pos_embed(array.reshape(1, -1, dim), 0, (rows, columns), (old[0], old[1]))
    resized = resized.reshape(1, rows, columns, dim)
    arrays["pos_embed"] = resized.transpose(0, 3, 1, 2) if channels_first else resized
    return [f"pos_embed resized from {old[0]} x {old[1]} to {rows} x {columns}"]


def _fit_tables(model: Target, state: Tensors, arrays: Arrays, shape: float | None) -> list[str]:
    """Resizes tables of relative positions [offsets (+ 3 in BEiT), heads]."""
    counts: Counter[str] = Counter()
    for name in _matrices(TABLE, state, arrays):
        window = sublayer(model, name.rpartition(".")[0]).window_size
        rows = len(arrays[name])
        wanted_rows, heads = state[name].shape
        model_offsets = (2 * window[0] - 1, 2 * window[1] - 1)
        # BEiT has three more rows, for the class token.
        extra = wanted_rows - math.prod(model_offsets)
        # A square window may come from an image that isn't a square.
        side = math.isqrt(max(rows - extra, 0))
        is_square = model_offsets == (side, side)
        offsets = grid_of(rows - extra, None if is_square else shape, model_offsets)
        if offsets in (None, model_offsets) or arrays[name].shape != (rows, heads):
            continue
        # A window of n places along a side has 2n - 1 offsets.
        if not all(side % 2 for side in offsets):
            continue
        old = ((offsets[0] + 1) // 2, (offsets[1] + 1) // 2)
        arrays[name] = resize_rel_pos_bias_table(arrays[name], old, window)
        counts["{} resized from {} x {} to {} x {}".format(TABLE, *old, *window)] += 1
    return [f"{count} {line}" for line, count in counts.items()]


def _fit_biases(model: Target, state: Tensors, arrays: Arrays, shape: float | None) -> list[str]:
    """Resizes LeViT's and TinyViT's tables of biases by distance [heads, places]."""
    counts: Counter[str] = Counter()
    for name in _matrices(BIASES, state, arrays):
        heads, columns = arrays[name].shape
        window: Any = getattr(sublayer(model, name.rpartition(".")[0]), "window_size", ())
        if not window:
            continue
        old = grid_of(columns, shape, window)
        if not old or old == window or heads != state[name].shape[0]:
            continue
        arrays[name] = resize_attention_biases(arrays[name], old, window)
        counts["{} resized from {} x {} to {} x {}".format(BIASES, *old, *window)] += 1
    return [f"{count} {line}" for line, count in counts.items()]


def _matrices(ending: str, state: Tensors, arrays: Arrays) -> list[str]:
    """Returns the names with an ending that the file and the model have, of matrices in the file."""
    return [
        name
        for name in arrays
        if name.endswith(ending) and name in state and arrays[name].ndim == 2
    ]
