"""Evaluations of weights, each of which is a process of main_multi_gpu.py with -eval."""

import functools
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import InputError
from launch import signals
from settings.parser import Parser
from settings.registry import ROOT
from training.command_line import run_file
from training.results import METRIC_TITLES, read_result

# Flags of main_multi_gpu.py that say what the weights are evaluated on.
FLAGS = ("cfg", "dataset", "data_path", "batch_size_eval", "ngpus")


def add_flags(parser: Parser) -> None:
    """Adds the flags of an evaluation to a command's own."""
    for name in FLAGS:
        parser.add_argument(
            f"-{name}", f"--{name}", metavar="VALUE", help="with --greedy: as for -eval"
        )
    parser.add_argument(
        "-o",
        "--o",
        nargs="+",
        action="extend",
        metavar="KEY VALUE",
        help="with --greedy: set any keys of the evaluation; KEY=VALUE works as well",
    )


def words_of(arguments: Any, weights: Path) -> list[str]:
    """Returns the flags of an evaluation, without the weights and the folder of its result.

    Args:
        arguments: the values of ``add_flags``.
        weights: some whose run has a config.yaml, which is taken unless -cfg is given.

    Raises:
        InputError: the weights belong to no run, and -cfg isn't given.
    """
    given = {name: getattr(arguments, name) for name in FLAGS}
    given["cfg"] = given["cfg"] or run_file(weights)
    if given["cfg"] is None:
        raise InputError(
            f"{weights} isn't in the folder of a run, whose config.yaml describes the evaluation;"
            " pass -cfg=FILE, and the data by -dataset and -data_path"
        )
    # The evaluation counts the devices itself, whatever number trained.
    given["ngpus"] = given["ngpus"] or "-1"
    words = [f"-{name}={value}" for name, value in given.items() if value is not None]
    options = arguments.o or []
    return [*words, "-eval", "-o", *options, "REPORT", "False"]


def evaluate(weights: Path, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Evaluates weights; returns the result (``training.results``).

    Args:
        folder: of the evaluation, a new one.
        words: as ``words_of`` returns them.

    Raises:
        SystemExit: the evaluation failed, and printed why.
    """
    command = [
        sys.executable,
        str(ROOT / "main_multi_gpu.py"),
        f"-pretrained={weights}",
        f"-output={folder}",
        *words,
    ]
    end_with_this = functools.partial(signals.die_with_parent, signal.SIGTERM)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=end_with_this) as process:
        status = process.wait()
    if status:
        raise SystemExit(status if status > 0 else 128 - status)
    return read_result(folder, "")


def metric_of(result: dict[str, Any], name: str | None) -> str:
    """Returns the metric that candidates are compared by.

    Args:
        result: of an evaluation.
        name: what the user asked for; None: the first one that the task has.

    Raises:
        InputError: the evaluation has no such metric.
    """
    known = [key for key in METRIC_TITLES if key in result]
    if name is None:
        return known[0]
    if name not in known:
        raise InputError(f"-metric is {name}, expected one of {', '.join(known)}")
    return name
