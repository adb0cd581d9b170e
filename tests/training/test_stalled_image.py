"""An image that one process reads without end, in C, is named within DIST.TIMEOUT, and the run
ends.
"""

import re
import subprocess
import sys
import time

import pytest
from support.programs import ROOT, assert_none_left, descendants, started

# Sample 37 of the training set never comes: the interpreter's lock is held, as some decoders do.
PROGRAM = """
import ctypes, sys
sys.path.insert(0, {root!r})
sys.argv[0] = {root!r} + "/{program}.py"
import launch.startup, errors
import datasets
read = datasets.ArrayDataset.__getitem__

def stalls(dataset, key):
    if (key[1] if isinstance(key, tuple) else key) == 37 and len(dataset) > 1000:
        (ctypes.PyDLL if {held} else ctypes.CDLL)(None).sleep(600)
    return read(dataset, key)

datasets.ArrayDataset.__getitem__ = stalls
import {program}
from errors import reporting
with reporting():
    {program}.main()
"""
FLAGS = [
    "-cfg=vit_digits",
    "-output=run",
    "-o",
    "DIST.TIMEOUT",
    "6",
    "TRAIN.WARMUP_EPOCHS",
    "0",
    "REPORT",
    "False",
]


@pytest.mark.parametrize(
    ("program", "flags", "workers"),
    [
        ("main_single_gpu", [], 0),
        ("main_single_gpu", [], 2),
        pytest.param("main_multi_gpu", ["-ngpus=1"], 0, marks=pytest.mark.long),
        pytest.param("main_multi_gpu", ["-ngpus=1"], 2, marks=pytest.mark.long),
        pytest.param("main_multi_gpu", ["-ngpus=2"], 0, marks=pytest.mark.long),
        pytest.param("main_multi_gpu", ["-ngpus=2"], 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("held", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_image_is_named(tmp_path, program, flags, workers, held):
    text = PROGRAM.format(root=str(ROOT), program=program, held=held)
    command = [sys.executable, "-c", text, *flags, *FLAGS, "DATA.NUM_WORKERS", str(workers)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    pids = set()
    begun = time.monotonic()
    while process.poll() is None and time.monotonic() - begun < 40:
        pids |= set(descendants(process.pid))
        time.sleep(0.5)
    _, errors = process.communicate(timeout=15)
    who = r"loader worker \d+" if workers else r"process \d+"
    rank = r"(rank \d: )?" if workers else ""
    line = rf"{rank}error: no progress in 4.8 s \(DIST.TIMEOUT\): {who} is reading sample 37; repair or remove it\n"
    assert re.fullmatch(line, errors), errors
    # nobody but the kernel can end it (docs/evidence/faults.md)
    alone = program == "main_single_gpu" and not workers
    assert process.returncode == (-9 if alone else 1)
    assert_none_left(pids)
