"""tools/benchmark.py segmentation: the same work for both sides, and what there is no peer for."""

import json

import pytest
from support import benchmark_runs
from support.benchmark_runs import fake_timm

from config import get_config
from errors import InputError
from tools.benchmarks import measure
from tools.benchmarks import segmentation as measured
from tools.benchmarks.measure import words
from tools.benchmarks.training import without_recipe

benchmark = benchmark_runs.benchmark


def test_both_sides_get_the_same_work(benchmark, tmp_path, monkeypatch):
    fake = fake_timm(tmp_path, [10.0, 12.0, 14.0])
    requests = []

    def ask(script, request, threads, *python):
        if python:
            return measure.ask(script, request, threads, *python)
        requests.append((script, request))
        return {"images_per_s": [30.0, 24.0, 18.0], "peak_memory": 400.0}

    monkeypatch.setattr(measured, "ask", ask)
    flags = ("--against", "transformers", f"--timm_python={fake}", "--threads=2", "-repeats=1")
    report, printed = benchmark("segmentation", *flags, "-o", "DATA.IMAGE_SIZE", "64")
    for what in ("training", "evaluation"):
        assert report["figures"]["ours"][what]["values"] == [24.0]
        assert report["figures"]["transformers"][what]["values"] == [12.0]
        assert report["figures"]["transformers"][f"{what}, peak memory"]["values"] == [500.0]
    assert [ratio["values"] for ratio in report["ratios"]] == [[2.0], [2.0]]
    assert printed[0] == "segmentation: segformer_b0_ade20k, 64 x 64, batch 2, 2 threads, float32"
    assert [(script, request["measure"]) for script, request in requests] == [
        ("our_segmentation.py", "train"),
        ("our_segmentation.py", "eval"),
    ]
    assert json.loads((tmp_path / "request.json").read_text()) == requests[1][1]
    assert requests[0][1]["image"] == [3, 64, 64]


def test_our_side_trains_and_evaluates(benchmark):
    flags = ("-repeats=1", "--reports=1", "--threads=1")
    report, _ = benchmark("segmentation", *flags, "-o", "DATA.IMAGE_SIZE", "64")
    assert report["figures"]["ours"]["training"]["median"] > 0
    assert report["figures"]["ours"]["evaluation"]["median"] > 0


@pytest.mark.parametrize("name", measured.MODELS)
def test_our_models_are_segmentation_models(name, tmp_path):
    cfg, keys = measured.MODELS[name]
    options = words(
        {"TASK": "segmentation", "DATA.CROP_MODE": "own", "DATA.IMAGE_SIZE": 512} | keys
    )
    config = get_config(without_recipe(cfg, tmp_path), options)
    assert keys["HEAD.NAME"] == config.HEAD.NAME


def test_a_model_without_a_peer_is_refused(benchmark):
    message = "-cfg vit: transformers is compared on segformer_b0_ade20k, upernet_swin_tiny_ade20k"
    with pytest.raises(InputError, match=f"^{message}$"):
        benchmark("segmentation", "-cfg=vit")
