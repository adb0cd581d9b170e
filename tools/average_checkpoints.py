"""Averages the weights of several checkpoints of one run into one file.

    python tools/average_checkpoints.py -output averaged.safetensors RUN/checkpoints/epoch_00[123]0

Each checkpoint is a folder, or a file in timm's layout; names and shapes have to agree. Every real tensor becomes
its mean (Izmailov et al. 2018, arXiv:1803.05407), taken in float64 and written as float32; others are the last file's.
What the checkpoints say of their model, its classes and its images goes along, where they say the same.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reading, reporting  # noqa: E402  (first: it says what isn't installed)

# isort: split
import numpy as np  # noqa: E402

from options import Parser  # noqa: E402


def average(files: Sequence[Path]) -> dict[str, np.ndarray]:
    """Returns the mean of the files' tensors, float32; integer and boolean tensors are the last file's.

    Raises:
        InputError: an unreadable file, or tensors whose names, shapes or kinds differ; the first one is named.
    """
    total = _read(files[0])
    for file in files[1:]:
        arrays = _read(file)
        _check_same(files[0], total, file, arrays)
        total = {name: total[name] + array if _is_float(array) else array for name, array in arrays.items()}
    return {name: np.asarray(a / len(files), np.float32) if _is_float(a) else a for name, a in total.items()}


def _read(file: Path) -> dict[str, np.ndarray]:
    from weights.formats import read_weights

    stored = read_weights(file)
    if stored.layout != "torch":
        raise InputError(f"{file}: not in timm's layout; tools/convert_weights.py makes it a .safetensors file first")
    arrays = stored.arrays
    return {name: array.astype(np.float64) if _is_float(array) else array for name, array in arrays.items()}


def _is_float(array: np.ndarray) -> bool:
    return np.issubdtype(array.dtype, np.floating)


def _check_same(first: Path, expected: dict[str, np.ndarray], file: Path, found: dict[str, np.ndarray]) -> None:
    def told(arrays: dict[str, np.ndarray], name: str) -> str:
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
            found[METADATA] = replace(read_description(found[METADATA].encode()), thresholds=[]).to_json()
        return found


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", help="folders of checkpoints, or files in timm's layout")
    parser.add_argument("-output", "--output", required=True, metavar="FILE", help="the .safetensors file to write")
    arguments = parser.parse_args()
    from weights import SUFFIX, find_weights  # after the command line: these import Paddle
    from weights.formats import write_weights

    output = Path(arguments.output)
    if output.suffix != SUFFIX:
        raise InputError(f"-output is {output}, expected a name that ends in {SUFFIX}")
    files = [find_weights(path) for path in arguments.checkpoints]
    arrays = average(files)
    output.parent.mkdir(parents=True, exist_ok=True)
    told, *others = map(metadata_of, files)
    write_weights(output, arrays, told if all(other == told for other in others) else None)
    print(f"{output}: the mean of {len(files)} checkpoints, {len(arrays)} tensors; from {', '.join(map(str, files))}")


if __name__ == "__main__":
    with reporting():
        main()
