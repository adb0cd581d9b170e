"""Makes weights/shipped/digits.safetensors: trains vit_digits, and stores its last weights in float16.

PYTHONPATH=.:tests python tests/support/shipped_digits.py       (three minutes on one core)

The weights are those after the last epoch, so no validation image was used to choose them. float16
halves the file. Its values are read as float32.
"""

import os
import re
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
# The CPU of the recorded run: another one rounds otherwise, and so do more threads.
CPU = "AuthenticAMD 25 17"
COMMAND = ["main_single_gpu.py", "-cfg=vit_digits", "-batch_size=64", "-o", "SEED", "0"]


def train(folder: Path) -> Path:
    """Trains by the recorded command; returns the file of the last weights."""
    words = [sys.executable, str(ROOT / COMMAND[0]), *COMMAND[1:], "OUTPUT", str(folder)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "REPORT", "False"], check=True, cwd=folder.parent, env=one_thread)
    return folder / "checkpoints" / "last" / "model.safetensors"


def cpu() -> str:
    """Returns what this CPU is: "AuthenticAMD 26 2", its vendor, family and model."""
    text = Path("/proc/cpuinfo").read_text()
    found = [
        re.search(rf"^{name}\s*: (.*)", text, re.M) for name in ("vendor_id", "cpu family", "model")
    ]
    return " ".join(match[1] for match in found if match)


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
