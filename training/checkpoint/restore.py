"""Restores from a checkpoint: the model, its average, the optimizer's state, each rank's statistics."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import paddle

from errors import InputError, reading
from models.base import ImageModel
from training.checkpoint import storage
from training.checkpoint.saver import own_statistics
from training.equal_ranks import check_loaded
from utils import rank, world_size
from weights import checksum, load_weights
from weights.adapters import is_added, unmerged_tensors
from weights.formats import open_arrays, read_arrays
from weights.layout import numpy_dtype

_OTHER = "take another checkpoint"


def load_checkpoint(
    chosen: Path, model: ImageModel, optimizer: Any, ema: ImageModel | None = None
) -> None:
    """Restores the model, the optimizer and the averaged model from a verified checkpoint.

    Args:
        chosen: the checkpoint's folder.
        model: not wrapped.
        optimizer: what ``parallel.wrap_optimizer`` returned.
        ema: the averaged model, or None.

    Raises:
        InputError: it is another model's, or another checkpoint on another rank.
    """
    # All ranks have to load the same.
    compared = world_size() > 1
    checksums: dict[str, int | str] = {}
    if compared:
        for name in (
            storage.SUMS,
            storage.STATE,
            storage.INDEX,
            storage.STATISTICS,
            storage.UNMERGED,
        ):
            if (chosen / name).exists():
                checksums[name] = storage.sha256_of(chosen / name)
    models = {"val": model} if ema is None else {"val": model, "ema": ema}
    for split, layer in models.items():
        file = storage.MODEL if split == "val" else storage.EMA
        report = load_weights(layer, chosen / file, checksums=compared)
        for tensor, value in report.checksums.items():
            checksums[f"{file}: {tensor}"] = value
        if report.changes:
            raise InputError(f"{chosen}: it is a checkpoint of another model ({report.changes[0]})")
    _restore_unmerged(chosen, models)

    parameters = dict(model.named_parameters())
    # Of a sharded optimizer these are this rank's share of the parameters.
    updated_here = {parameter.name for parameter in optimizer._parameter_list}
    accumulators = {}
    restored = set()
    for file, key, value in read_optimizer(chosen):
        if compared:
            checksums[f"{storage.OPTIMIZER}: {key}"] = checksum(value)
        if not np.isfinite(value).all():
            raise InputError(
                f"{chosen}: {file}: {key} holds NaN or infinite values; use an earlier one"
            )
        name, _, kind = key.partition("/")
        if name not in parameters:
            raise InputError(f"{chosen}: its optimizer state belongs to another model ({name})")
        parameter = parameters[name]
        shape = list(parameter.shape)
        # An accumulator has its parameter's shape, or is one number, as a power of beta.
        fits = list(value.shape) == shape or value.size == 1
        if not fits or value.dtype != np.float32:
            raise InputError(
                f"{chosen}: {file}: {key} is {value.dtype} {list(value.shape)},"
                f" expected float32 {shape}; use another checkpoint"
            )
        restored.add(name)
        if parameter.name in updated_here:
            accumulators[f"{parameter.name}_{kind}"] = paddle.to_tensor(value)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.name in updated_here and name not in restored
    ]
    # Paddle takes the state of all parameters, or of none.
    if restored and missing:
        raise InputError(
            f"{chosen}: {missing[0]} wasn't trained in its run and has no optimizer state"
            f" ({len(missing)} such parameters); leave TRAIN.FREEZE and METHOD.NORM_LAST_LAYER as they"
            " were, or start from its weights with -pretrained"
        )
    check_loaded("MODEL.RESUME", chosen, checksums)
    with reading(chosen / storage.OPTIMIZER, "this optimizer's state"):
        optimizer.set_state_dict(accumulators)


def read_optimizer(chosen: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (file, name, array) of a verified checkpoint's optimizer state, one after the other.

    It is in one file or, if it was sharded, in the shares that an index names.

    Raises:
        InputError: a file can't be read, or a share doesn't hold what the index says.
    """
    for file, keys in storage.shares_of(chosen).items() or [(storage.OPTIMIZER, None)]:
        with open_share(chosen, file, keys) as arrays:
            for key, array in arrays.items():
                yield file, key, np.asarray(array)


@contextlib.contextmanager
def open_share(chosen: Path, file: str, keys: set[str] | None) -> Iterator[dict[str, Any]]:
    """Opens a file of a verified checkpoint's optimizer state.

    An array is read when its values are needed.

    Args:
        keys: the tensors that the index has in this share; None: there is no index.

    Raises:
        InputError: it can't be read, or doesn't hold what the index says.
    """
    with open_arrays(chosen / file) as arrays:
        expected = arrays.keys() if keys is None else keys
        if added := arrays.keys() - expected:
            raise InputError(
                f"{chosen}: {file} contains {min(added)}, which {storage.INDEX} doesn't list for"
                " it;"
                f" {_OTHER}"
            )
        if missing := expected - arrays.keys():
            raise InputError(
                f"{chosen}: {file} lacks {min(missing)}, which {storage.INDEX} lists for it;"
                f" {_OTHER}"
            )
        yield arrays


def _restore_unmerged(chosen: Path, models: Mapping[str, paddle.nn.Layer]) -> None:
    """Restores the tensors that files of models have merged or left out.

    That is adapters, the weights beside them, and a projection (``weights.adapters``).
    """
    wanted: dict[str, list[paddle.Tensor]] = {}
    for split, model in models.items():
        for name, tensor in unmerged_tensors(model.state_dict()).items():
            # The base is the same in both models, and stored once.
            wanted.setdefault(f"{split if is_added(name) else 'val'}/{name}", []).append(tensor)
    _set_all(wanted, chosen / storage.UNMERGED)


def restore_statistics(chosen: Path, models: dict[str, paddle.nn.Layer]) -> None:
    """Restores this rank's own statistics of batch norm, if the checkpoint has them."""
    file = chosen / storage.STATISTICS
    if os.path.lexists(file):
        wanted = {
            f"{rank()}/{split}/{name}": [tensor]
            for split, model in models.items()
            for name, tensor in own_statistics(model).items()
        }
        _set_all(wanted, file)


def _set_all(wanted: dict[str, list[paddle.Tensor]], file: Path) -> None:
    """Sets tensors to the values that ``file`` has under their names, one after the other.

    Raises:
        InputError: a name is missing, or its values don't fit.
    """
    missing = dict(wanted)
    if wanted and os.path.lexists(file):
        for key, values in read_arrays(file):
            for tensor in missing.pop(key, ()):
                if list(values.shape) != list(tensor.shape) or not np.isfinite(values).all():
                    _refuse(file, key, f"{list(values.shape)}", tensor)
                tensor.set_value(values.astype(numpy_dtype(tensor), copy=False))
    for key, (tensor, *_) in missing.items():
        _refuse(file, key, "missing", tensor)


def _refuse(file: Path, key: str, stored: str, tensor: paddle.Tensor) -> NoReturn:
    raise InputError(f"{file}: {key} is {stored}, expected {list(tensor.shape)} and finite numbers")
