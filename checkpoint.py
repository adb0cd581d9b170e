"""A run's state on disk.

``checkpoints/epoch_0010/`` holds ``model.safetensors`` (timm's names and layout), with MODEL_EMA ``ema.safetensors``,
``optimizer.safetensors`` (moments by parameter) and ``state.json`` (epoch, best, configuration). ``last`` and ``best``
are links to such folders, ``best_ema.safetensors`` to the file of the best average. Each folder is written under a
temporary name, synced and renamed: whole or absent.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from errors import InputError
from utils import sync_directory
from weights import find_weights, load_weights, save_weights


def save_checkpoint(
    directory: Path,
    model: nn.Layer,
    optimizer: paddle.optimizer.Optimizer,
    ema: nn.Layer | None,
    state: dict[str, Any],
    improved: list[str],
) -> Path:
    """Writes ``epoch_<state["epoch"]>`` under ``directory`` and points ``last`` to it.

    Args:
        ema: the averaged model, where there is one.
        improved: which of "val" (the model) and "ema" is the best so far: its link moves, too.
    """
    target = directory / f"epoch_{state['epoch']:04d}"
    temporary = directory / f".{target.name}.{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        save_weights(model, temporary / "model.safetensors")
        if ema is not None:
            save_weights(ema, temporary / "ema.safetensors")
        save_file(_optimizer_arrays(model, optimizer), temporary / "optimizer.safetensors")
        (temporary / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        for file in temporary.iterdir():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        sync_directory(temporary)
        shutil.rmtree(target, ignore_errors=True)  # an epoch that is trained again after a resume from before it
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    links = {"last": target.name}
    links |= {"best": target.name} if "val" in improved else {}
    links |= {"best_ema.safetensors": f"{target.name}/ema.safetensors"} if "ema" in improved else {}
    for link, to in links.items():
        _point(directory / link, to)
    sync_directory(directory)
    return target


def remove_superseded(directory: Path, save_freq: int) -> None:
    """Removes the folders that were only ever "last" or "best" and are so no more."""
    kept = {(directory / link).resolve() for link in ("last", "best")}
    kept.add((directory / "best_ema.safetensors").resolve().parent)
    for folder in directory.glob("epoch_*"):
        if folder.resolve() not in kept and int(folder.name.removeprefix("epoch_")) % save_freq:
            shutil.rmtree(folder)


def load_checkpoint(
    path: str | Path, model: nn.Layer, optimizer: paddle.optimizer.Optimizer, ema: nn.Layer | None = None
) -> dict[str, Any]:
    """Restores the model, the optimizer and the averaged model from a checkpoint's folder and returns its state.

    Raises:
        InputError: no checkpoint there, a damaged one, or another model's.
    """
    folder = Path(path)
    if not (folder / "state.json").is_file():
        raise InputError(
            f"no checkpoint at {folder}: expected a folder that holds state.json, such as <run>/checkpoints/last"
        )
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        arrays = load_file(folder / "optimizer.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{folder}: damaged checkpoint ({error})") from None
    files = [(model, folder)] if ema is None else [(model, folder), (ema, folder / "ema.safetensors")]
    for layer, file in files:
        report = load_weights(layer, file)
        if report.changes:
            raise InputError(f"{folder}: can't go on with another model ({report.changes[0]})")
    names = {name: parameter.name for name, parameter in model.named_parameters()}
    try:
        moments = {f"{names[key.split('/')[0]]}_{key.split('/')[1]}": value for key, value in arrays.items()}
    except (KeyError, IndexError) as error:
        raise InputError(f"{folder}: its optimizer state belongs to another model ({error})") from None
    optimizer.set_state_dict({key: paddle.to_tensor(value) for key, value in moments.items()})
    return state


def classes_of(weights: str | Path) -> list[str] | None:
    """Returns the class names of the run that saved ``weights``; None where no checkpoint tells."""
    file = find_weights(weights).resolve().with_name("state.json")
    return json.loads(file.read_text(encoding="utf-8"))["classes"] if file.is_file() else None


def _optimizer_arrays(model: nn.Layer, optimizer: paddle.optimizer.Optimizer) -> dict[str, np.ndarray]:
    """The optimizer's accumulators by structured name (``blocks.0.norm1.weight/moment1_0``): Paddle's own names count
    the layers made in a process, and another process may count differently.
    """
    structured = {parameter.name: name for name, parameter in model.named_parameters()}
    arrays = {}
    for key, value in optimizer.state_dict().items():
        owner = next((name for name in structured if key.startswith(f"{name}_")), None)
        if owner is not None:
            arrays[f"{structured[owner]}/{key[len(owner) + 1 :]}"] = value.numpy()
    return arrays


def _point(link: Path, name: str) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, link)
