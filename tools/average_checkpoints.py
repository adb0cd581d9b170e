"""Averages the weights of several checkpoints of one run into one file.

    python tools/average_checkpoints.py -output averaged.safetensors RUN/checkpoints/epoch_00[123]0

Each checkpoint is a folder, or a file in timm's layout; names and shapes have to agree. Every real
tensor becomes its mean (Izmailov et al. 2018, arXiv:1803.05407), taken in float64 and written as
float32; others are the last file's. What the checkpoints say of their model, its classes and its
images goes along, where they say the same.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import (  # noqa: E402  (first: it says what isn't installed)
    InputError,
    reading,
    reporting,
)

# isort: split
import numpy as np  # noqa: E402

from settings.options import Parser  # noqa: E402


@contextlib.contextmanager
def average(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yields the mean of the files' tensors, float32; integer and boolean tensors are the last
    file's.

    They are lazy: each is read from all files, and summed up, when it is written. So the files stay
    open meanwhile.

    Raises:
        InputError: an unreadable file, or tensors whose names, shapes or kinds differ; the first
            one is named.
    """
    with contextlib.ExitStack() as opened:
        first, *others = found = [opened.enter_context(_open(file)) for file in files]
        for file, arrays in zip(files[1:], others, strict=True):
            _check_same(files[0], first, file, arrays)
        yield {name: _mean([arrays[name] for arrays in found]) for name in first}


@contextlib.contextmanager
def _open(file: Path) -> Iterator[dict[str, Any]]:
    from weights.formats import open_weights

    with open_weights(file) as stored:
        if stored.layout != "torch":
            advice = "tools/convert_weights.py makes it a .safetensors file first"
            raise InputError(f"{file}: not in timm's layout; {advice}")
        yield stored.arrays


def _mean(arrays: Sequence[Any]) -> Any:
    from weights.arrays import LazyArray

    def read() -> np.ndarray:
        total = np.zeros(arrays[0].shape, np.float64)
        for array in arrays:
            total += np.asarray(array)
        return np.asarray(total / len(arrays), np.float32)

    return (
        LazyArray(arrays[0].shape, np.dtype(np.float32), read)
        if _is_float(arrays[0])
        else arrays[-1]
    )


def _is_float(array: Any) -> bool:
    return np.issubdtype(array.dtype, np.floating)


def _check_same(first: Path, expected: dict[str, Any], file: Path, found: dict[str, Any]) -> None:
    def told(arrays: dict[str, Any], name: str) -> str:
        if name not in arrays:
            return "is missing"
        return f"is {'real' if _is_float(arrays[name]) else arrays[name].dtype} {list(arrays[name].shape)}"

    for name in [*expected, *(name for name in found if name not in expected)]:
        if told(found, name) != told(expected, name):
            raise InputError(
                f"{name} {told(found, name)} in {file}, {told(expected, name)} in {first};"
                " only checkpoints of one model can be averaged"
            )


def metadata_of(file: Path) -> dict[str, str]:
    """Returns what a file says of itself, but for thresholds, which are of its very weights."""
    from training.checkpoint.description import METADATA, read_description
    from weights.formats import read_metadata

    found = read_metadata(file)
    with reading(file, "weights that describe themselves"):
        if METADATA in found:
            found[METADATA] = replace(
                read_description(found[METADATA].encode()), thresholds=[]
            ).to_json()
        return found


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "checkpoints", nargs="+", help="folders of checkpoints, or files in timm's layout"
    )
    parser.add_argument(
        "-output", "--output", required=True, metavar="FILE", help="the .safetensors file to write"
    )
    arguments = parser.parse_args()
    from weights import SUFFIX, find_weights  # after the command line: these import Paddle
    from weights.formats import write_weights

    output = Path(arguments.output)
    if output.suffix != SUFFIX:
        raise InputError(f"-output is {output}, expected a name that ends in {SUFFIX}")
    files = [find_weights(path) for path in arguments.checkpoints]
    told, *others = map(metadata_of, files)
    with average(files) as arrays:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_weights(output, arrays, told if all(other == told for other in others) else None)
    print(
        f"{output}: the mean of {len(files)} checkpoints, {len(arrays)} tensors; from {', '.join(map(str, files))}"
    )


if __name__ == "__main__":
    with reporting():
        main()
