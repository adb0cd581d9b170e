"""What a checkpoint gives back: a model, its average, an optimizer's moments, each rank's
statistics.
"""

import contextlib
import os
from collections.abc import Iterator
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

    Raises:
        InputError: it is another model's, or another checkpoint on another rank.
    """
    # All ranks have to load the same.
    compared = world_size() > 1
    checksums: dict[str, int | str] = {}
    if compared:
        names = (storage.SUMS, storage.STATE, storage.INDEX, storage.STATISTICS, storage.UNMERGED)
        checksums |= {
            name: storage.sha256_of(chosen / name) for name in names if (chosen / name).exists()
        }
    files = (
        [(model, storage.MODEL)] if ema is None else [(model, storage.MODEL), (ema, storage.EMA)]
    )
    for layer, name in files:
        report = load_weights(layer, chosen / name, checksums=compared)
        checksums |= {f"{name}: {tensor}": value for tensor, value in report.checksums.items()}
        if report.changes:
            raise InputError(f"{chosen}: can't go on with another model ({report.changes[0]})")
    _restore_unmerged(chosen, {"val": model} if ema is None else {"val": model, "ema": ema})
    parameters = dict(model.named_parameters())
    moments = {}
    known = set()
    own = {parameter.name for parameter in optimizer._parameter_list}  # sharded: this rank's share
    for file, key, value in read_optimizer(chosen):
        if compared:
            checksums[f"{storage.OPTIMIZER}: {key}"] = checksum(value)
        if not np.isfinite(value).all():
            raise InputError(
                f"{chosen}: {file}: {key} holds NaN or infinite values; take an earlier one"
            )
        name, _, kind = key.partition("/")
        if name not in parameters:
            raise InputError(f"{chosen}: its optimizer state belongs to another model ({name})")
        shape = list(parameters[name].shape)
        # a power is one number
        if (list(value.shape) != shape and value.size != 1) or value.dtype != np.float32:
            raise InputError(
                f"{chosen}: {file}: {key} is {value.dtype} {list(value.shape)}, expected float32 {shape};"
                " take another checkpoint"
            )
        known.add(name)
        if parameters[name].name in own:
            moments[f"{parameters[name].name}_{kind}"] = paddle.to_tensor(value)
    new = [
        name
        for name, parameter in parameters.items()
        if parameter.name in own and name not in known
    ]
    if known and new:  # Paddle takes the state of all parameters, or of none
        raise InputError(
            f"{chosen}: {new[0]} didn't train in its run, and has no optimizer state ({len(new)} such parameters);"
            " leave TRAIN.FREEZE as it was, or start from its weights with -pretrained"
        )
    check_loaded("MODEL.RESUME", chosen, checksums)
    with reading(chosen / storage.OPTIMIZER, "this optimizer's state"):
        optimizer.set_state_dict(moments)


def read_optimizer(chosen: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (file, name, array) of a verified checkpoint's optimizer state, one read after the
    other.

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
    """Opens a file of a verified checkpoint's optimizer state; its arrays are read where their
    values are needed.

    Args:
        keys: the tensors that the index has in this share; None: there is no index.

    Raises:
        InputError: it can't be read, or doesn't hold what the index says.
    """
    with open_arrays(chosen / file) as arrays:
        expected = arrays.keys() if keys is None else keys
        if added := arrays.keys() - expected:
            raise InputError(
                f"{chosen}: {file} holds {min(added)}, which {storage.INDEX} doesn't have there; {_OTHER}"
            )
        if left := expected - arrays.keys():
            raise InputError(
                f"{chosen}: {file} has no {min(left)}, which {storage.INDEX} has there; {_OTHER}"
            )
        yield arrays


def _restore_unmerged(chosen: Path, models: dict[str, paddle.nn.Layer]) -> None:
    """Restores what the models' files have merged or left out: adapters, the weights beside them, a
    projection.
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
        own = {split: own_statistics(model) for split, model in models.items()}
        _set_all(
            {f"{rank()}/{split}/{name}": [t] for split in own for name, t in own[split].items()},
            file,
        )


def _set_all(wanted: dict[str, list[paddle.Tensor]], file: Path) -> None:
    """Gives tensors the values that ``file`` has under their names, read one after the other.

    Raises:
        InputError: a name is missing, or its values don't fit.
    """
    missing = dict(wanted)
    for key, found in read_arrays(file) if wanted and os.path.lexists(file) else ():
        for tensor in missing.pop(key, ()):
            if list(found.shape) != list(tensor.shape) or not np.isfinite(found).all():
                _refuse(file, key, f"{list(found.shape)}", tensor)
            tensor.set_value(found.astype(numpy_dtype(tensor), copy=False))
    for key, (tensor, *_) in missing.items():
        _refuse(file, key, "missing", tensor)


def _refuse(file: Path, key: str, found: str, tensor: paddle.Tensor) -> NoReturn:
    raise InputError(f"{file}: {key} is {found}, expected {list(tensor.shape)} and finite numbers")
