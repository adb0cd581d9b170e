"""What the families' tables of names share."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from errors import InputError
from weights.arrays import concatenated

Arrays = dict[str, np.ndarray]
Rules = Sequence[tuple[str, str | Callable[[re.Match[str]], str] | None]]


def rename(arrays: Arrays, rules: Rules) -> Arrays:
    """Applies (regular expression, replacement) rules to every name, in order, as ``re.sub`` does.

    A rule whose replacement is None drops the arrays whose name holds its expression.

    Raises:
        InputError: two arrays come to the same name.
    """
    renamed = {}
    sources = {}
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]
    for source, array in arrays.items():
        name = source
        for pattern, replacement in compiled:
            if replacement is not None:
                name = pattern.sub(replacement, name)
            elif pattern.search(name):
                break
        else:
            if name in renamed:
                raise InputError(
                    f"{sources[name]} and {source} both mean {name}; remove one of them"
                )
            renamed[name], sources[name] = array, source
    return renamed


def join_qkv(arrays: Arrays) -> Arrays:
    """Joins each ``X.q``, ``X.k`` and ``X.v`` ([out, in], biases [out]) to the ``X.qkv`` of timm's
    attention; incomplete ones are left.
    """
    joined = {}
    for name, array in arrays.items():
        match = re.fullmatch(r"(.*\.)([qkv])(\.weight|\.bias)", name)
        names = [match[1] + part + match[3] for part in "qkv"] if match else []
        parts = [arrays[part] for part in names if part in arrays]
        if not match or len(parts) < 3 or any(part.shape != array.shape for part in parts):
            joined[name] = array
        elif match[2] == "q":
            joined[f"{match[1]}qkv{match[3]}"] = concatenated(parts)
    return joined


def drop_key_biases(arrays: Arrays) -> Arrays:
    """Leaves out biases of keys that are 0: timm's traced programs store them, though they are
    constants.

    Other biases of keys stay, and then don't fit: no model here has them.
    """
    return {
        name: array
        for name, array in arrays.items()
        if not name.endswith(".attn.k_bias") or array.any()
    }


def dense_of(weight: np.ndarray, layout: str, axes: int) -> np.ndarray:
    """Returns a Linear's weight as a 1 x 1 convolution's if ``axes`` is 4, a convolution's as a
    Linear's if it is 2.

    Anything else is returned as it is. ``layout``: of the Linear's, see
    ``weights.names.timm_names``.
    """
    if (weight.ndim, axes) == (2, 4):
        return (weight.T if layout == "paddle" else weight)[:, :, None, None]
    if (weight.ndim, axes) == (4, 2) and weight.shape[2:] == (1, 1):
        return weight[:, :, 0, 0].T if layout == "paddle" else weight[:, :, 0, 0]
    return weight


def same_shape(one: np.ndarray, other: np.ndarray, names: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays that are to be added up; of other shapes they might spread to any size.

    Raises:
        InputError: their shapes differ.
    """
    if one.shape != other.shape:
        raise InputError(
            f"{names} are {list(one.shape)} and {list(other.shape)}, expected one shape"
        )
    return one, other


def torch_kernel(kernel: np.ndarray) -> np.ndarray:
    """Returns Flax's Dense kernel [in, out] as [out, in], its Conv kernel [h, w, in, out] as [out,
    in, h, w].
    """
    return kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T


def jax_kernel(weight: np.ndarray) -> np.ndarray:
    """Does the inverse of ``torch_kernel``."""
    return weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T


def from_flax(arrays: Arrays, layers: Sequence[tuple[str, str]]) -> Arrays:
    """Returns a Flax model's arrays under timm's names of the same layers; values stay as they are.

    Args:
        layers: (timm's name, Flax's name) of each layer and lone array; ``<i>`` is a block's
            number.
    """
    rules = [(_pattern(theirs), ours.replace("<i>", r"\1")) for ours, theirs in layers]
    leaves = [(r"^([^/]+)/(kernel|scale)$", r"\1.weight"), (r"^([^/]+)/bias$", r"\1.bias")]
    return rename(arrays, [("^opt/target/", ""), *rules, *leaves])


def to_flax(arrays: Arrays, layers: Sequence[tuple[str, str]]) -> Arrays:
    """Does the inverse of ``from_flax``.

    Raises:
        InputError: an array that is of none of the layers.
    """
    for name in arrays:
        if not any(re.match(_pattern(ours), name) for ours, _ in layers):
            raise InputError(
                f"{name} has no place in Google's files, which are of plain ViTs and MLP-Mixers"
            )
    rules = [(_pattern(ours), theirs.replace("<i>", r"\1")) for ours, theirs in layers]
    leaves = [
        (r"(Norm_\d|_norm)\.weight$", r"\1/scale"),
        (r"\.weight$", "/kernel"),
        (r"\.bias$", "/bias"),
    ]
    return rename(arrays, [*rules, *leaves])


def _pattern(layer: str) -> str:
    """Returns the regular expression of the names of a layer's arrays."""
    return "^" + re.escape(layer).replace("<i>", r"(\d+)") + "(?=[./]|$)"
