"""Rules for renaming tensors, and other functions that the families of names share."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from errors import InputError
from weights.arrays import concatenated

Arrays = dict[str, np.ndarray]
# Pairs of a regular expression and its replacement, as ``rename`` takes them.
Rules = Sequence[tuple[str, str | Callable[[re.Match[str]], str] | None]]
# Before the names of the model's tensors within a network for pre-training.
ENCODER_PREFIX = "encoder."


def rename(arrays: Arrays, rules: Rules) -> Arrays:
    """Returns arrays under new names: applies all rules to each name, in order, as ``re.sub`` does.

    A rule whose replacement is None drops the arrays in whose names its expression is found.

    Raises:
        InputError: two arrays get the same name.
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
                    f"{sources[name]} and {source} both correspond to {name}; remove one of them"
                )
            renamed[name] = array
            sources[name] = source
    return renamed


def join_qkv(arrays: Arrays) -> Arrays:
    """Joins the queries, keys and values of each attention, as timm's attention has them.

    ``X.q``, ``X.k`` and ``X.v`` become ``X.qkv``: weights [out, in] and biases [out]. If one of the
    three is missing, or has another shape, all stay as they are.
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
    """Drops the biases of keys that are 0, which timm's traced programs store as constants.

    No model here has such biases. Those that aren't 0 stay, so that the file is refused.
    """
    return {
        name: array
        for name, array in arrays.items()
        if not name.endswith(".attn.k_bias") or array.any()
    }


def dense_of(weight: np.ndarray, layout: str, axes: int) -> np.ndarray:
    """Turns the weight of a Linear into that of a 1 x 1 convolution, or the other way round.

    Any other weight is returned as it is.

    Args:
        layout: of the Linear's weight, as of ``weights.names.timm_names``.
        axes: of the wanted weight: 4 for a convolution's, 2 for a Linear's.
    """
    if (weight.ndim, axes) == (2, 4):
        return (weight.T if layout == "paddle" else weight)[:, :, None, None]
    if (weight.ndim, axes) == (4, 2) and weight.shape[2:] == (1, 1):
        return weight[:, :, 0, 0].T if layout == "paddle" else weight[:, :, 0, 0]
    return weight


def same_shape(one: np.ndarray, other: np.ndarray, names: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays after checking that they have the same shape.

    Arrays of different shapes might be broadcast to any size.

    Args:
        names: of both arrays, for the error.

    Raises:
        InputError: their shapes differ.
    """
    if one.shape != other.shape:
        raise InputError(
            f"{names} are {list(one.shape)} and {list(other.shape)}, expected one shape"
        )
    return one, other


def torch_kernel(kernel: np.ndarray) -> np.ndarray:
    """Returns a kernel of Flax in PyTorch's layout.

    A Dense kernel [in, out] becomes [out, in], a Conv kernel [h, w, in, out] [out, in, h, w].
    """
    return kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T


def jax_kernel(weight: np.ndarray) -> np.ndarray:
    """Does the inverse of ``torch_kernel``."""
    return weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T


def from_flax(arrays: Arrays, layers: Sequence[tuple[str, str]]) -> Arrays:
    """Returns a Flax model's arrays under timm's names of the same layers. Values don't change.

    Args:
        layers: (timm's name, Flax's name) of each layer, and of each array outside of layers.
            ``<i>`` is the number of a block.
    """
    rules = [(_pattern(flax), timm.replace("<i>", r"\1")) for timm, flax in layers]
    leaves = [(r"^([^/]+)/(kernel|scale)$", r"\1.weight"), (r"^([^/]+)/bias$", r"\1.bias")]
    return rename(arrays, [("^opt/target/", ""), *rules, *leaves])


def to_flax(arrays: Arrays, layers: Sequence[tuple[str, str]]) -> Arrays:
    """Does the inverse of ``from_flax``.

    Raises:
        InputError: an array belongs to none of the layers.
    """
    for name in arrays:
        if not any(re.match(_pattern(timm), name) for timm, _ in layers):
            raise InputError(
                f"{name} can't be written to Google's format, which has plain ViTs and"
                " MLP-Mixers only"
            )
    rules = [(_pattern(timm), flax.replace("<i>", r"\1")) for timm, flax in layers]
    leaves = [
        (r"(Norm_\d|_norm)\.weight$", r"\1/scale"),
        (r"\.weight$", "/kernel"),
        (r"\.bias$", "/bias"),
    ]
    return rename(arrays, [*rules, *leaves])


def _pattern(layer: str) -> str:
    """Returns the regular expression of the names of a layer's arrays."""
    return "^" + re.escape(layer).replace("<i>", r"(\d+)") + "(?=[./]|$)"
