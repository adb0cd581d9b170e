"""Weight files: safetensors in timm's names and layout (a Linear's weight is [out, in], transposed on the way in)."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from errors import InputError
from models.layers import file_name, linear_weights
from weights.resize import resize_pos_embed

SUFFIX = ".safetensors"


@dataclass
class LoadReport:
    """What ``load_weights`` did: names of the parameters that were loaded, from which file, and what was adapted."""

    file: Path
    loaded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "; ".join([f"{len(self.loaded)} tensors loaded from {self.file}", *self.notes])


def find_weights(path: str | Path) -> Path:
    """Returns the file that ``path`` means: itself, itself with its ending, or the model of a checkpoint's folder.

    Raises:
        InputError: there is none, or it is of a kind that isn't read.
    """
    path = Path(path)
    candidates = [path / f"model{SUFFIX}", path, path.with_name(path.name + SUFFIX)]
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        raise InputError(f"no weights at {path}; looked for {', '.join(map(str, candidates))}")
    if found.suffix != SUFFIX:
        raise InputError(f"{found}: not a {SUFFIX} file; convert it first")
    return found


def load_weights(model: nn.Layer, path: str | Path, strict: bool = True) -> LoadReport:
    """Loads every parameter and buffer of ``model``; the model is changed only if all of them fit.

    A position embedding of another grid is resized (``weights.resize``).

    Args:
        model: it tells by ``pos_embed_prefix`` how many positions of ``pos_embed`` are no patches.
        path: what ``find_weights`` takes.
        strict: False, for fine-tuning: the layers ``model.classifier_names()`` stay fresh where the file has none, or
            has them for another number of classes. Nothing else may be missing, unexpected or misshaped.

    Returns:
        the report, to be shown: it tells what was resized and what stayed fresh.

    Raises:
        InputError: no such file, a damaged one, or names or shapes that differ from the model's.
    """
    file = find_weights(path)
    try:
        arrays = load_file(file)
    except (SafetensorError, OSError, ValueError, TypeError) as error:  # TypeError: NumPy has no bfloat16
        raise InputError(f"{file}: not a readable safetensors file ({error})") from None
    state = {file_name(name): tensor for name, tensor in model.state_dict().items()}
    transposed = linear_weights(model)
    arrays = {name: array.T if name in transposed else array for name, array in arrays.items()}
    notes = []
    fresh = [] if strict else _classifier_of_other_classes(model, state, arrays)
    if fresh:
        found = f"{arrays[fresh[0]].shape[-1]} classes" if fresh[0] in arrays else "none"
        notes.append(f"classifier left fresh: {found} in the file, {model.num_classes} in the model")
    for name in fresh:
        arrays.pop(name, None)
        del state[name]
    grids = _grids(model, state, arrays)
    if grids is not None:
        arrays["pos_embed"] = resize_pos_embed(arrays["pos_embed"], model.pos_embed_prefix, grids[1])
        notes.append("pos_embed resized from {0} x {0} to {1} x {1}".format(*grids))
    _check_fit(file, arrays, state)
    with paddle.no_grad():
        for name, tensor in state.items():
            tensor.set_value(np.ascontiguousarray(arrays[name]).astype(tensor.numpy().dtype, copy=False))
    return LoadReport(file, list(state), notes)


def save_weights(model: nn.Layer, file: Path) -> None:
    """Writes every parameter and buffer of ``model``; timm loads the file as it is."""
    transposed = linear_weights(model)
    state = {file_name(name): tensor.numpy() for name, tensor in model.state_dict().items()}
    save_file({name: np.ascontiguousarray(a.T if name in transposed else a) for name, a in state.items()}, file)


def _classifier_of_other_classes(
    model: nn.Layer, state: dict[str, paddle.Tensor], arrays: dict[str, np.ndarray]
) -> list[str]:
    """Returns the classifiers' parameters if the file has none of them, or all with another number of classes."""
    names = [name for name in state if name.rpartition(".")[0] in model.classifier_names()]
    if not any(name in arrays for name in names):
        return names
    if not all(name in arrays and arrays[name].shape[:-1] == tuple(state[name].shape[:-1]) for name in names):
        return []
    classes = {arrays[name].shape[-1:] for name in names}
    return names if len(classes) == 1 and classes.isdisjoint({(), (model.num_classes,)}) else []


def _grids(model: nn.Layer, state: dict[str, paddle.Tensor], arrays: dict[str, np.ndarray]) -> tuple[int, int] | None:
    """Returns the patches per side of the file's and of the model's ``pos_embed`` if they differ in nothing else."""
    array, tensor = arrays.get("pos_embed"), state.get("pos_embed")
    if array is None or tensor is None or array.ndim != 3 or array.shape[::2] != tuple(tensor.shape[::2]):
        return None
    patches = [max(shape[1] - model.pos_embed_prefix, 0) for shape in (array.shape, tensor.shape)]
    old, new = map(math.isqrt, patches)
    return (old, new) if old != new and old**2 == patches[0] > 0 else None


def _check_fit(file: Path, arrays: dict[str, np.ndarray], state: dict[str, paddle.Tensor]) -> None:
    problems = [f"missing {name}" for name in state if name not in arrays]
    problems += [f"unexpected {name}" for name in arrays if name not in state]
    problems += [
        f"{name} is {list(array.shape)}, the model's {list(state[name].shape)}"
        for name, array in arrays.items()
        if name in state and list(array.shape) != list(state[name].shape)
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise InputError(f"{file} doesn't fit the model: {'; '.join(problems[:3])}{more}")
