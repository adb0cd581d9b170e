"""Weight files: safetensors in timm's names and layout (a Linear's weight is [out, in], transposed on the way in)."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from errors import InputError

SUFFIX = ".safetensors"


@dataclass
class LoadReport:
    """What ``load_weights`` did: names of the parameters that were loaded, from which file."""

    file: Path
    loaded: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{len(self.loaded)} tensors loaded from {self.file}"


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


def load_weights(model: nn.Layer, path: str | Path) -> LoadReport:
    """Loads every parameter and buffer of ``model``; the model is changed only if all of them fit.

    Raises:
        InputError: no such file, a damaged one, or names or shapes that differ from the model's.
    """
    file = find_weights(path)
    try:
        arrays = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{file}: not a readable safetensors file ({error})") from None
    state, transposed = model.state_dict(), _transposed(model)
    arrays = {name: array.T if name in transposed else array for name, array in arrays.items()}
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
    with paddle.no_grad():
        for name, tensor in state.items():
            tensor.set_value(np.ascontiguousarray(arrays[name]).astype(tensor.numpy().dtype, copy=False))
    return LoadReport(file, list(state))


def save_weights(model: nn.Layer, file: Path) -> None:
    """Writes every parameter and buffer of ``model``; timm loads the file as it is."""
    transposed = _transposed(model)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    save_file({name: np.ascontiguousarray(a.T if name in transposed else a) for name, a in state.items()}, file)


def _transposed(model: nn.Layer) -> set[str]:
    return {f"{name}.weight" for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}
