"""tools/benchmark.py zoo: its table by value, and that every model of it can be measured; train
-amp.
"""

import argparse
import json
import re

import pytest
from support import benchmark_runs
from support.benchmark_runs import fake_timm

from config import find_config, get_config, model_files
from settings.configuration import leaves
from settings.names import names
from tools.benchmarks import measure, training
from tools.benchmarks.zoo import ZOO
from tools.list_models import describe

benchmark = benchmark_runs.benchmark
canned_runs = benchmark_runs.canned_runs


def test_the_zoo_has_a_row_for_each_model(benchmark, canned_runs, tmp_path, monkeypatch):
    fake = fake_timm(tmp_path)
    found = {"images_per_s": [30.0], "peak_memory": 600.0}
    monkeypatch.setattr(
        "tools.benchmarks.evaluation.ask",
        lambda script, *rest: found
        if script == "our_evaluation.py"
        else measure.ask(script, *rest),
    )
    monkeypatch.setattr("tools.benchmarks.zoo.ask", lambda *_: [100.0])
    flags = (f"--timm_python={fake}", "-repeats=2", "-batch_size=4", "--reports=3")
    report, printed = benchmark("zoo", "-cfg", "vit_digits", "lenet", *flags)
    assert [call[:2] for call in canned_runs] == [("main_single_gpu.py", 2)] * 4
    macs = {name: describe(find_config(name))["macs"] for name in ("vit_digits", "lenet")}
    shares = {name: f"{48 * 6 * cost / 100e9:.0%}" for name, cost in macs.items()}
    rows = [line for line in printed if line.startswith("| ") and "model" not in line]
    assert rows[:2] == [
        f"| {name} | 48.00 | 12.00 | 4.00 (4.00, 4.00) | {shares[name]} | 30.00 | 12.00 | 2.50 (2.50, 2.50) |"
        for name in ("vit_digits", "lenet")
    ]
    memory = "750.0 | 500.0 | 1.50 (1.50, 1.50) | 600.0 | 500.0 | 1.20 (1.20, 1.20) |"
    assert rows[2:] == [f"| {name} | {memory}" for name in ("vit_digits", "lenet")]
    assert report["figures"]["lenet, training: timm"]["peak memory"]["unit"] == "MB"
    assert report["ratios"][4]["values"] == pytest.approx([48 * 6 * macs["vit_digits"] / 100e9] * 2)


def test_the_zoo_has_every_architecture_of_timms_and_no_recipe_stops_it(tmp_path):
    kinds = {get_config(name).MODEL.TYPE.lower() for name in ZOO}
    in_timm = set()
    for file in model_files():
        if "timm" in names(file):
            in_timm |= set(re.findall(r"^  TYPE: (\w+)", file.read_text().lower(), re.M | re.I))
    assert sorted(in_timm - kinds) == sorted(kinds - in_timm) == []
    flags = {
        "batch_size": 8,
        "reports": 2,
        "threads": 2,
        "processes": 1,
        "o": [],
        "timm_python": "",
        "amp": False,
    }
    for name in ZOO:
        training.training_sides(argparse.Namespace(cfg=name, **flags), tmp_path)
        config = get_config(tmp_path / f"{name}.yaml")
        assert name == config.MODEL.NAME
        assert dict(leaves(config.TRAIN)) == dict(leaves(get_config().TRAIN))
        assert dict(leaves(config.MODEL)).get("DROPPATH", 0) == 0


def test_train_with_amp_measures_both_sides_in_both_types(benchmark, canned_runs, tmp_path):
    flags = (
        "--against=timm",
        f"--timm_python={fake_timm(tmp_path)}",
        "--threads=1",
        "-repeats=1",
        "-amp",
    )
    report, _ = benchmark("train", "-cfg=vit_digits", *flags)
    assert list(report["figures"]) == ["ours", "timm", "ours, bfloat16", "timm, bfloat16"]
    assert [call[2]["AMP"] for call in canned_runs] == ["False", "True"]
    assert json.loads((tmp_path / "request.json").read_text())["amp"]
    pairs = [("ours", "timm"), ("ours, bfloat16", "ours"), ("ours, bfloat16", "timm, bfloat16")]
    assert [(ratio["of"], ratio["over"]) for ratio in report["ratios"]] == pairs
