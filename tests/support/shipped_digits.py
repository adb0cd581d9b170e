"""Makes weights/shipped/digits.safetensors: trains vit_digits, and stores its last weights in float16.

PYTHONPATH=.:tests python tests/support/shipped_digits.py       (three minutes on one core)

The weights are those after the last epoch, so no validation image was used to choose them. float16
halves the file. Its values are read as float32.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from conftest import ROOT

from launch.files import writing_whole
from weights.formats import open_weights, read_metadata, write_weights
from weights.hub import SHIPPED
from weights.sums import SUMS, sha256_of

FILE = SHIPPED["digits"]
COMMAND = ["main_single_gpu.py", "-cfg=vit_digits", "-batch_size=64", "-o", "SEED", "0"]


def train(folder: Path) -> Path:
    """Trains by the recorded command; returns the file of the last weights."""
    words = [sys.executable, str(ROOT / COMMAND[0]), *COMMAND[1:], "OUTPUT", str(folder)]
    subprocess.run([*words, "REPORT", "False"], check=True, cwd=folder.parent)
    return folder / "checkpoints" / "last" / "model.safetensors"


def halve(source: Path, target: Path) -> None:
    """Writes the weights of a file in float16, with its description."""
    with open_weights(source) as stored:
        arrays = {name: np.asarray(array, np.float16) for name, array in stored.arrays.items()}
        write_weights(target, arrays, read_metadata(source))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        halve(train(Path(folder) / "run"), FILE)
    with writing_whole(FILE.with_name(SUMS)) as file:
        file.write(f"{sha256_of(FILE)}  {FILE.name}\n")


if __name__ == "__main__":
    main()
