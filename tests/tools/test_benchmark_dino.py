"""tools/benchmark.py dino: the same work for both sides, and who is missing."""

import json

import pytest
from support import benchmark_runs
from support.benchmark_runs import fake_timm

from errors import InputError

benchmark = benchmark_runs.benchmark
canned_runs = benchmark_runs.canned_runs


@pytest.fixture
def checkout(tmp_path):
    """Returns a folder that looks like a checkout of the authors' code."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "main_dino.py").touch()
    return folder


def test_both_sides_get_the_same_work(benchmark, canned_runs, checkout, tmp_path):
    fake = fake_timm(tmp_path, [10.0, 12.0, 14.0])
    flags = (f"--dino={checkout}", f"--python={fake}", "--threads=2", "-repeats=1")
    report, printed = benchmark("dino", *flags, "-o", "METHOD.PROTOTYPES", "128")
    assert report["figures"]["ours"]["training"]["values"] == [48.0]
    assert report["figures"]["authors"]["training"]["values"] == [12.0]
    assert report["ratios"][0]["values"] == [4.0]
    assert printed[0] == (
        "dino: vit_small, 2 x 224 + 6 x 96, 128 prototypes, batch 4, 2 threads, float32"
    )
    request = json.loads((tmp_path / "request.json").read_text())
    assert request == {
        "measure": "train", "dino": str(checkout), "model": "vit_small", "patch_size": 16, "droppath": 0.1,
        "outputs": 128, "size": 224, "locals": 6, "local_size": 96, "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5], "weight_decay": 0.04, "clip_grad": 3.0, "batch_size": 4, "steps": 2,
        "reports": 3, "threads": 2,
    }  # fmt: skip
    [(program, threads, options)] = canned_runs
    assert (program, threads) == ("main_single_gpu.py", 2)
    wanted = {
        "TASK": "dino",
        "METHOD.PROTOTYPES": "128",
        "METHOD.LOCAL_VIEWS": "6",
        "METHOD.FREEZE_LAST_LAYER": "0",
        "MODEL.DROPPATH": "0.1",
        "TRAIN.WEIGHT_DECAY": "0.04",
        "TRAIN.GRAD_CLIP": "3.0",
        "DATA.DATASET": "synthetic",
    }
    assert wanted.items() <= options.items()


def test_what_is_missing_is_named(benchmark, checkout, tmp_path):
    with pytest.raises(InputError, match=r"--dino .*: found no main_dino.py; name a checkout"):
        benchmark("dino", f"--dino={tmp_path}")
    with pytest.raises(InputError, match="--python /nowhere gave no torch"):
        benchmark("dino", f"--dino={checkout}", "--python=/nowhere")
    fake = fake_timm(tmp_path)
    with pytest.raises(InputError, match="-cfg swin_tiny.*the authors have ViTs of 192, 384, 768"):
        benchmark(
            "dino", f"--dino={checkout}", f"--python={fake}", "-cfg=swin_tiny_patch4_window7_224"
        )
