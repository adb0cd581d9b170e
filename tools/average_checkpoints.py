"""Averages the weights of several checkpoints of one run, or of one model, into one file.

    python tools/average_checkpoints.py -output averaged.safetensors RUN/checkpoints/epoch_00[123]0
    python tools/average_checkpoints.py --greedy -output soup.safetensors RUN/checkpoints/best OTHER/checkpoints/best

    python tools/average_checkpoints.py -weights 0.5 0.5 -output wise.safetensors CLASSIFIER PROBE/checkpoints/last

Each checkpoint is a folder, or a file in timm's layout. Their tensors must have the same names and
shapes. Each floating-point tensor is replaced by its mean (Izmailov et al. 2018, arXiv:1803.05407),
computed in float64 and written as float32; other tensors are those of the last file. With -weights,
it is a weighted mean, as in WiSE-FT (arXiv:2109.01903), which averages a zero-shot classifier
(tools/zero_shot.py) and the model fine-tuned from it. The description of the model, classes and
images is copied if it is the same in all checkpoints.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import (  # noqa: E402  (first: it says what isn't installed)
    InputError,
    counted,
    printable,
    reading,
    reporting,
)

# isort: split
import numpy as np  # noqa: E402

from launch.files import obstacle, temporary_folder  # noqa: E402
from settings.parser import Parser  # noqa: E402
from tools.soups.evaluation import FLAGS, add_flags  # noqa: E402


@contextlib.contextmanager
def average(
    files: Sequence[Path], shares: Sequence[float] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the mean of the files' tensors, float32; integer and boolean tensors are the last
    file's.

    The tensors are lazy: each is read from all files, and averaged, when it is written. The files
    stay open until then.

    Args:
        shares: of each file, which add up to 1; None: equal ones.

    Raises:
        InputError: a file can't be read, or the names, shapes or kinds of tensors differ. The first
            such tensor is named.
    """
    with contextlib.ExitStack() as opened:
        checkpoints = [opened.enter_context(_open(file)) for file in files]
        first = checkpoints[0]
        for file, arrays in zip(files[1:], checkpoints[1:], strict=True):
            _check_same(files[0], first, file, arrays)
        yield {name: _mean([arrays[name] for arrays in checkpoints], shares) for name in first}


@contextlib.contextmanager
def _open(file: Path) -> Iterator[dict[str, Any]]:
    from weights.formats import open_weights

    with open_weights(file) as stored:
        if stored.layout != "torch":
            advice = "convert it to .safetensors by tools/convert_weights.py first"
            raise InputError(f"{file}: not in timm's layout; {advice}")
        yield stored.arrays


def _mean(arrays: Sequence[Any], shares: Sequence[float] | None) -> Any:
    """Returns the mean of real arrays, which is computed when it is read. Of other arrays, it
    returns the last one.
    """
    if not _is_float(arrays[0]):
        return arrays[-1]
    from weights.arrays import LazyArray

    def read() -> np.ndarray:
        total = np.zeros(arrays[0].shape, np.float64)
        for place, array in enumerate(arrays):
            values = np.asarray(array, np.float64)
            total += values if shares is None else shares[place] * values
        if shares is None:
            total /= len(arrays)
        return np.asarray(total, np.float32)

    return LazyArray(arrays[0].shape, np.dtype(np.float32), read)


def _is_float(array: Any) -> bool:
    return np.issubdtype(array.dtype, np.floating)


def _check_same(first: Path, expected: dict[str, Any], file: Path, arrays: dict[str, Any]) -> None:
    """Raises InputError if the tensors of ``file`` aren't those of the first file."""

    def describe(arrays: dict[str, Any], name: str) -> str:
        if name not in arrays:
            return "is missing"
        kind = "real" if _is_float(arrays[name]) else arrays[name].dtype
        return f"is {kind} {list(arrays[name].shape)}"

    for name in dict.fromkeys([*expected, *arrays]):
        here = describe(arrays, name)
        there = describe(expected, name)
        if here != there:
            raise InputError(
                f"{name} {here} in {file}, {there} in {first};"
                " only checkpoints of the same model can be averaged"
            )


def metadata_of(file: Path) -> dict[str, str]:
    """Returns the metadata of a file without thresholds and calibration, which fit its own weights
    alone.
    """
    from training.checkpoint.description import METADATA, read_description
    from weights.formats import read_metadata

    metadata = read_metadata(file)
    with reading(file, "weights that describe themselves"):
        if METADATA in metadata:
            description = read_description(metadata[METADATA].encode())
            own = replace(description, thresholds=[], calibration=None)
            metadata[METADATA] = own.to_json()
        return metadata


def _model_of(metadata: dict[str, str]) -> Any:
    """Returns what the metadata of a file says of its model, without what training alone reads."""
    from training.checkpoint.description import METADATA, read_description, without_training_keys

    if METADATA not in metadata:
        return metadata
    description = read_description(metadata[METADATA].encode())
    return replace(description, values=without_training_keys(description.values))


def _check_classes(files: Sequence[Path], described: Sequence[dict[str, str]]) -> None:
    """Raises InputError if files name other classes, or the same ones in another order.

    Their tensors have the same shapes then, but not the same meaning.

    Args:
        described: the metadata of each file.
    """
    from training.checkpoint.description import METADATA, read_description

    known: list[tuple[Path, list[str]]] = []
    for file, metadata in zip(files, described, strict=True):
        if METADATA not in metadata:
            continue
        classes = read_description(metadata[METADATA].encode()).classes
        if classes:
            known.append((file, classes))
    for file, classes in known[1:]:
        first, expected = known[0]
        if classes == expected:
            continue
        place = next(
            (
                number
                for number, pair in enumerate(zip(classes, expected, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(classes), len(expected)),
        )
        here, there = (
            f"'{printable(names[place], 40)}'" if place < len(names) else "nothing"
            for names in (classes, expected)
        )
        raise InputError(
            f"output {place} is {here} in {file}, {there} in {first}; only checkpoints with the"
            " same"
            " classes in the same order can be averaged"
        )


def choose_greedily(
    files: Sequence[Path], arguments: argparse.Namespace, folder: Path
) -> list[Path]:
    """Returns the files whose mean is the greedy soup, and prints a table of the trials.

    Args:
        folder: for the evaluations and the means that are tried. The caller removes it.

    Raises:
        InputError: the files can't be averaged, or there is no such metric.
        SystemExit: an evaluation failed, and printed why.
    """
    from settings.registry import datasets
    from tools.soups.evaluation import evaluate, metric_of, words_of
    from tools.soups.greedy import greedy_soup
    from training.command_line import config_from_arguments
    from weights.formats import write_weights

    # One checkpoint may have several names, such as best and epoch_0100.
    files = list({os.path.realpath(file): file for file in files}.values())
    words = words_of(arguments, files[0])
    # What is wrong is found before the first evaluation.
    config = config_from_arguments(
        "tools/average_checkpoints.py", [*words, f"-pretrained={files[0]}"]
    )
    with average(files) as arrays:
        statistics = sum(name.endswith("running_mean") for name in arrays)
    number = 0

    def result_of(weights: Path) -> dict[str, Any]:
        nonlocal number
        number += 1
        return evaluate(weights, folder / str(number), words)

    results = [result_of(files[0])]
    metric = metric_of(results[0], arguments.metric)
    results += map(result_of, files[1:])

    def metric_of_mean(places: list[int]) -> float:
        mean = folder / "mean.safetensors"
        with average([files[place] for place in places]) as arrays:
            write_weights(mean, arrays)
        return result_of(mean)[metric]

    width = max(len(str(file)) for file in files)
    print(f"{'checkpoint':<{width}}  {metric:>8}  with it  kept", flush=True)
    kept = []
    best = 0.0
    own = [result[metric] for result in results]
    for trial in greedy_soup(own, metric_of_mean, lower=metric == "loss"):
        cells = [
            f"{printable(str(files[trial.candidate])):<{width}}",
            f"{_shown(metric, trial.own):>8}",
            f"{_shown(metric, trial.soup):>7}",
            "yes" if trial.kept else "no",
        ]
        print("  ".join(cells), flush=True)
        if trial.kept:
            kept.append(files[trial.candidate])
            best = trial.soup
    where = config.DATA.DATASET
    if "data_path" in datasets.components[where].keys:
        where += f", {printable(str(config.DATA.DATA_PATH))}"
    print(
        f"{metric} {_shown(metric, best)} on {results[0]['num_samples']:,} images ({where}),"
        " which were used to choose"
        " the checkpoints: expect less on other images"
    )
    if statistics:
        print(
            f"note: the running statistics of {statistics} batch norms are averaged, too, which"
            " isn't exact for the averaged model"
        )
    return kept


def _shown(metric: str, value: float) -> str:
    """Returns a percentage or a loss as text."""
    return f"{value:.4f}" if metric == "loss" else f"{value:.2f}"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "checkpoints", nargs="+", help="folders of checkpoints, or files in timm's layout"
    )
    parser.add_argument(
        "-output", "--output", required=True, metavar="FILE", help="the .safetensors file to write"
    )
    parser.add_argument(
        "-greedy",
        "--greedy",
        action="store_true",
        help="average only the checkpoints that improve the result on validation images",
    )
    text = "with --greedy: the metric to compare; default: the first one of the task, such as acc1"
    parser.add_argument("-metric", "--metric", metavar="NAME", help=text)
    text = "the weight of each checkpoint, 1 in total; default: equal weights"
    parser.add_argument("-weights", "--weights", nargs="+", type=float, metavar="W", help=text)
    add_flags(parser)
    arguments = parser.parse_args()
    if arguments.weights is not None:
        _check_shares(arguments.weights, len(arguments.checkpoints), arguments.greedy)
    if not arguments.greedy:
        given = [name for name in (*FLAGS, "metric", "o") if getattr(arguments, name) is not None]
        if given:
            raise InputError(f"-{given[0]} needs --greedy; add that, or leave it out")
    # After the command line is parsed: these import Paddle.
    from inference.inputs import check_output
    from weights import SUFFIX, find_weights
    from weights.formats import write_weights

    output = Path(arguments.output)
    if output.suffix != SUFFIX:
        raise InputError(f"-output is {output}, expected a name that ends in {SUFFIX}")
    files = [find_weights(path) for path in arguments.checkpoints]
    check_output(output, map(str, files))
    _check_classes(files, list(map(metadata_of, files)))
    if arguments.greedy:
        if problem := obstacle(output):
            raise InputError(f"-output {output}: {problem.strerror}; choose another")
        # Where the soup will be, there is space for another one.
        parent = output.parent if output.parent.is_dir() else None
        with temporary_folder(parent) as folder:
            files = choose_greedily(files, arguments, folder)
    metadata, *others = map(metadata_of, files)
    agree = all(_model_of(other) == _model_of(metadata) for other in others)
    with average(files, arguments.weights) as arrays:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_weights(output, arrays, metadata if agree else None)
    sources = ", ".join(map(str, files))
    count = counted(len(files), "checkpoint", "checkpoints")
    kind = "weighted mean" if arguments.weights else "mean"
    print(f"{output}: the {kind} of {count}, {len(arrays)} tensors; from {sources}")
    if not agree:
        print(
            "note: their descriptions differ, so the file doesn't name its model; pass -cfg with it"
        )


def _check_shares(shares: Sequence[float], checkpoints: int, greedy: bool) -> None:
    """Raises InputError for -weights that don't fit the checkpoints."""
    if greedy:
        raise InputError("-weights and --greedy can't be combined; leave one out")
    if len(shares) != checkpoints:
        raise InputError(
            f"-weights has {counted(len(shares), 'number')}, expected one for each of the"
            f" {checkpoints} checkpoints"
        )
    if not (all(0 <= share <= 1 for share in shares) and abs(sum(shares) - 1) < 1e-6):
        listed = ", ".join(f"{share:g}" for share in shares)
        raise InputError(f"-weights are {listed}, expected non-negative numbers that add up to 1")


if __name__ == "__main__":
    with reporting():
        main()
