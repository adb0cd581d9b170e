"""Averages the weights of several checkpoints of one run into one file.

    python tools/average_checkpoints.py -output averaged.safetensors RUN/checkpoints/epoch_00[123]0

Each checkpoint is a folder, or a file in timm's layout. Names and shapes have to agree. Every
tensor of real numbers becomes its mean (Izmailov et al. 2018, arXiv:1803.05407), computed in
float64 and written as float32. Other tensors are those of the last file. The description of model,
classes and images is copied if all checkpoints have the same.
"""

import contextlib
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
    reading,
    reporting,
)

# isort: split
import numpy as np  # noqa: E402

from settings.parser import Parser  # noqa: E402


@contextlib.contextmanager
def average(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yields the mean of the files' tensors, float32; integer and boolean tensors are the last
    file's.

    The tensors are lazy: each is read from all files, and averaged, when it is written. The files
    stay open until then.

    Raises:
        InputError: a file can't be read, or the names, shapes or kinds of tensors differ. The first
            such tensor is named.
    """
    with contextlib.ExitStack() as opened:
        checkpoints = [opened.enter_context(_open(file)) for file in files]
        first = checkpoints[0]
        for file, arrays in zip(files[1:], checkpoints[1:], strict=True):
            _check_same(files[0], first, file, arrays)
        yield {name: _mean([arrays[name] for arrays in checkpoints]) for name in first}


@contextlib.contextmanager
def _open(file: Path) -> Iterator[dict[str, Any]]:
    from weights.formats import open_weights

    with open_weights(file) as stored:
        if stored.layout != "torch":
            advice = "tools/convert_weights.py makes it a .safetensors file first"
            raise InputError(f"{file}: not in timm's layout; {advice}")
        yield stored.arrays


def _mean(arrays: Sequence[Any]) -> Any:
    """Returns the mean of real arrays, which is computed when it is read. Of other arrays, it
    returns the last one.
    """
    if not _is_float(arrays[0]):
        return arrays[-1]
    from weights.arrays import LazyArray

    def read() -> np.ndarray:
        total = np.zeros(arrays[0].shape, np.float64)
        for array in arrays:
            total += np.asarray(array)
        return np.asarray(total / len(arrays), np.float32)

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
                " only checkpoints of one model can be averaged"
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


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "checkpoints", nargs="+", help="folders of checkpoints, or files in timm's layout"
    )
    parser.add_argument(
        "-output", "--output", required=True, metavar="FILE", help="the .safetensors file to write"
    )
    arguments = parser.parse_args()
    # After the command line is parsed: these import Paddle.
    from weights import SUFFIX, find_weights
    from weights.formats import write_weights

    output = Path(arguments.output)
    if output.suffix != SUFFIX:
        raise InputError(f"-output is {output}, expected a name that ends in {SUFFIX}")
    files = [find_weights(path) for path in arguments.checkpoints]
    metadata, *others = map(metadata_of, files)
    agree = all(other == metadata for other in others)
    with average(files) as arrays:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_weights(output, arrays, metadata if agree else None)
    sources = ", ".join(map(str, files))
    print(f"{output}: the mean of {len(files)} checkpoints, {len(arrays)} tensors; from {sources}")


if __name__ == "__main__":
    with reporting():
        main()
