"""Every architecture from the command line, on photographs, on two processes: it trains, resumes,
and is evaluated.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import yaml
from conftest import ROOT
from safetensors.numpy import load_file
from support.small_models import SMALL_MODELS

from models import ARCHITECTURES
from tools.make_photographs import main as make_photographs

SIDE = 64  # pixels at least: what pyramids halve five times


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs") / "made"
    argv = sys.argv
    sys.argv = ["make_photographs.py", "-output", str(folder), "--count", "32"]
    try:
        make_photographs()
    finally:
        sys.argv = argv
    return folder


def settings(kind, monkeypatch):
    """The YAML of the small model of an architecture: what ``SMALL_MODELS`` gives the
    constructor.
    """
    given = {}
    made = ARCHITECTURES[kind]
    build = ARCHITECTURES[kind].__init__
    monkeypatch.setattr(
        made,
        "__init__",
        lambda self, *args, **options: (given.update(options), build(self, *args, **options))[1],
    )
    model = SMALL_MODELS[kind](num_classes=0)
    monkeypatch.undo()
    options = {
        key: value
        for key, value in given.items()
        if key not in ("image_size", "in_channels", "num_classes")
    }
    return {
        "BASE": "",
        "DATA": {
            "DATASET": "folder",
            "IMAGE_SIZE": max(model.image_size),
            "BATCH_SIZE": 2,
            "NUM_WORKERS": 0,
        },
        "MODEL": {"TYPE": kind, "NAME": kind, "NUM_CLASSES": "auto"}
        | {
            key.upper(): list(value) if isinstance(value, tuple) else value
            for key, value in options.items()
        },
        "TRAIN": {"NUM_EPOCHS": 2, "WARMUP_EPOCHS": 0, "BASE_LR": 1e-3},
        "SAVE_FREQ": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(SMALL_MODELS.keys() - {"lenet"}))
def test_it_trains_resumes_to_the_same_bits_and_repeats_its_numbers(
    kind, photographs, tmp_path, monkeypatch
):
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(settings(kind, monkeypatch)))

    def run(output, *words):
        command = [
            sys.executable,
            str(ROOT / "main_multi_gpu.py"),
            "-cfg=model.yaml",
            f"-data_path={photographs}",
        ]
        command += ["-ngpus=2", f"-output={output}", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads((tmp_path / output / "result.json").read_text())

    straight = run("straight", "-o", "KEEP_LAST", "3")
    [first] = sorted((tmp_path / "straight" / "checkpoints").glob("epoch_0001"))
    run("resumed", f"-resume={first}")
    ends = [
        load_file(tmp_path / run / "checkpoints" / "last" / "model.safetensors")
        for run in ("straight", "resumed")
    ]
    assert ends[0].keys() == ends[1].keys()
    for name, array in ends[0].items():
        np.testing.assert_array_equal(array, ends[1][name], err_msg=name)
    evaluated = run("evaluated", "-eval", "-pretrained=straight/checkpoints/last")
    assert evaluated["num_samples"] == straight["num_samples"]
    assert (evaluated["loss"], evaluated["acc1"]) == pytest.approx(
        (straight["loss"], straight["acc1"]), rel=1e-5
    )
