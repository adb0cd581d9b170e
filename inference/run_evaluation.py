"""Finds the evaluation and the training of weights in the folders of runs."""

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from config import get_config
from errors import InputError, printable
from settings.configuration import Configuration
from training.command_line import run_file
from training.report.run_files import ADVICE, FinishedRun, PredictionTable, read_run
from training.results import FILE as RESULT
from training.results import read_result
from weights import find_weights
from weights.hub import HUB_PREFIXES


class Evaluation(NamedTuple):
    """An evaluation of weights.

    Attributes:
        run: the run that made it.
        metrics: as result.json has them, in percent.
        predictions: of each image; None: they weren't kept.
        chose: whether its images chose the weights among a run's checkpoints.
    """

    run: FinishedRun
    metrics: dict[str, Any]
    predictions: PredictionTable | None
    chose: bool


class Training(NamedTuple):
    """The run that made weights.

    Attributes:
        config: its configuration.
        result: its result.json; {}: it isn't over.
    """

    config: Configuration
    result: dict[str, Any]


def training_of(file: Path) -> Training | None:
    """Returns the run whose checkpoint weights are in; None if they are in none.

    Raises:
        InputError: a file of the run holds something that no run writes.
    """
    own = run_file(file)
    if own is None:
        return None
    result = {}
    if (own.parent / RESULT).exists():
        result = read_result(own.parent, ADVICE)
    return Training(get_config(own), result)


def evaluation_of(file: Path, folder: Path | None = None) -> Evaluation | None:
    """Returns the evaluation of weights; None if there is none.

    Args:
        file: the weights.
        folder: of the evaluation, or of the run that made it; None: the run that the weights are in,
            whose last evaluation may be of other weights. Then only the metrics are returned that
            the run noted of its best checkpoint, if that is ``file``.

    Raises:
        InputError: ``folder`` isn't a finished run's, or its evaluation is of other weights.
    """
    own = run_file(file)
    training = training_of(file)
    if folder is None:
        if own is None or training is None or not training.result:
            return None
        run = read_run(own.parent)
    else:
        run = read_run(folder)
    best = training.result.get("best", {}) if training else {}
    is_best = best.get("checkpoint") == _checkpoint(file)
    weights = str(run.result.get("weights", ""))
    if _is_of(weights, file):
        chose = is_best and training is not None and _same_data(run.config, training.config)
        return Evaluation(run, run.result, run.predictions.get("val"), chose)
    if folder is not None:
        raise InputError(
            f"{folder} is an evaluation of {printable(weights)}, expected one of {file}"
        )
    return Evaluation(run, best, None, True) if is_best else None


def _same_data(one: Configuration, other: Configuration) -> bool:
    """Returns whether two runs name the same dataset."""
    keys = ("DATASET", "DATA_PATH", "VAL_SPLIT", "SPLIT_SEED")
    return all(one.DATA[key] == other.DATA[key] for key in keys)


def _checkpoint(file: Path) -> str:
    """Returns the name of a checkpoint: epoch_0100, also of what a link such as best leads to."""
    return Path(os.path.realpath(file)).parent.name


def _is_of(weights: str, file: Path) -> bool:
    """Returns whether an evaluation that names its weights so is of ``file``.

    A run may have been moved since, so a checkpoint of the same run counts by its name.
    """
    if not weights or weights.startswith(HUB_PREFIXES):
        return False
    with contextlib.suppress(InputError):
        return os.path.samefile(find_weights(weights), file)
    return Path(weights).name == _checkpoint(file)
