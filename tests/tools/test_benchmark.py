"""tools/benchmark.py: figures, ratios and table by value; each benchmark once, on models that take
no time.
"""

import importlib.util
import json
import os
import sys

import numpy as np
import pytest
from conftest import write_images
from support import benchmark_runs
from support.benchmark_runs import fake_timm

from errors import InputError, RunError
from loading.archives import fashion_mnist
from loading.sources import Split
from models import create_model
from tools.benchmarks import measure, rates, startup, training
from weights import save_weights

benchmark = benchmark_runs.benchmark
canned_runs = benchmark_runs.canned_runs

TIMM = os.environ.get("TIMM_PYTHON", sys.executable)  # an interpreter with torch and timm
has_timm = "TIMM_PYTHON" in os.environ or all(
    importlib.util.find_spec(name) for name in ("torch", "timm")
)


def medians(report, what):
    return {
        kind: found[what]["median"] for kind, found in report["figures"].items() if what in found
    }


# ------------------------------------------------------------ benchmarks


def test_scale_tells_seconds_rate_and_efficiency(benchmark, canned_runs):
    report, printed = benchmark("scale", "-repeats=2", "--epochs=3", "-o", "MODEL.DEPTH", "2")
    # Epochs 2, 3 and 4 take 64/48, 32/96 and 64/24 s.
    assert medians(report, "an epoch") == pytest.approx(
        {"1 process": 4 / 3, "2 processes": 4 / 4.8}
    )
    assert medians(report, "training") == pytest.approx({"1 process": 48, "2 processes": 76.8})
    assert [(r["what"], r["of"], r["over"]) for r in report["ratios"]] == [
        ("training", "2 processes", "1 process"),
        ("efficiency", "2 processes", "1 process"),
    ]
    for ratio, expected in zip(report["ratios"], (1.6, 0.8), strict=True):
        assert ratio["values"] == pytest.approx([expected] * 2)
    assert (
        printed[0]
        == "scale: vit_digits, batch 32 per process, threads per process 1, 3 epochs a run after the first"
    )
    assert [call[:2] for call in canned_runs] == [
        ("main_single_gpu.py", 1),
        ("main_multi_gpu.py", 1),
    ] * 2
    assert canned_runs[0][2] == canned_runs[1][2]
    wanted = {
        "DATA.DATASET": "digits",
        "DATA.BATCH_SIZE": "32",
        "TRAIN.NUM_EPOCHS": "4",
        "MODEL.DEPTH": "2",
    }
    assert wanted.items() <= canned_runs[0][2].items()


@pytest.mark.parametrize(("part", "count"), [("train", 24), ("val", 10)])
def test_scales_random_images_are_in_fashion_mnists_files(tmp_path, part, count):
    training.write_mnist(tmp_path, 24)
    images, labels, _ = fashion_mnist(Split(part), data_path=str(tmp_path)).read()
    assert np.asarray(images).reshape(count, -1).shape == (count, 784)
    assert len(np.unique(images)) == 256
    assert list(labels) == [index % 10 for index in range(count)]


def test_train_is_the_median_of_the_reports_after_the_warm_up(benchmark, canned_runs):
    report, printed = benchmark(
        "train", "-cfg=vit_digits", "-repeats=2", "--threads=3", "-batch_size=4"
    )
    assert medians(report, "training") == {"tuned": 48.0, "default": 32.0}
    assert report["ratios"][0]["values"] == [1.5, 1.5]
    assert [(call[1], call[2]["TUNE_CPU"]) for call in canned_runs] == [
        (3, "True"),
        (None, "False"),
    ] * 2
    assert canned_runs[0][2]["DATA.SYNTHETIC_SIZE"] == str(4 * 2 * 6)
    assert "tuned / default  training" in printed[-1]


def test_train_against_timm_gives_both_sides_the_same_work(benchmark, canned_runs, tmp_path):
    fake = fake_timm(tmp_path, [10.0, 12.0, 14.0])
    flags = (
        "--against=timm",
        f"--timm_python={fake}",
        "--processes=2",
        "--threads=2",
        "-repeats=1",
        "-batch_size=4",
    )
    report, printed = benchmark("train", "-cfg=vit_digits", *flags)
    assert report["figures"]["timm"]["training"]["values"] == [12.0]
    assert medians(report, "peak memory") == {"ours": 750.0, "timm": 500.0}
    assert report["peer_versions"] == {"torch": "2", "timm": "1"}
    assert report["ratios"][0]["values"] == pytest.approx([76.8 / 12])
    assert (
        "batch 4 per process, 2 processes of 1 thread, float32; timm: eager, batch 4, 1 process of 2 "
        in printed[0]
    )
    assert canned_runs[0][:2] == ("main_multi_gpu.py", 1)
    request = json.loads((tmp_path / "request.json").read_text())
    assert request == {
        "measure": "train", "model": "vit_tiny_patch16_224", "image": [1, 8, 8], "mean": [0.5], "std": [0.5],
        "steps": 2, "reports": 3, "batch_size": 4, "threads": 2, "weight_decay": 0.3, "amp": False,
        "options": {
            "img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2.0,
            "num_classes": 10, "in_chans": 1,
        },
    }  # fmt: skip


@pytest.mark.smoke
def test_a_real_run_is_measured(benchmark, tmp_path):
    fake = fake_timm(tmp_path)
    flags = (
        "--against=timm",
        f"--timm_python={fake}",
        "-repeats=1",
        "--reports=1",
        "-batch_size=4",
    )
    report, _ = benchmark("train", "-cfg=vit_digits", *flags)
    rate = report["figures"]["ours"]["training"]["values"]
    assert report["ratios"][0]["values"] == [rate[0] / 12]
    assert 100 < medians(report, "peak memory")["ours"] < 4000  # Paddle's import among them
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "found.json",
        "python",
        "request.json",
    ]


def test_a_rate_counts_images_and_leaves_the_warm_up_out(monkeypatch):
    # When the clock starts, and when each call ends.
    clock = iter([0.0, 1.0, 2.0, 2.5, 8.0])
    calls = []
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert rates.calls_rate(lambda: calls.append(1), 5, 2, 3.0) == 4 * 5 / 8.0
    assert len(calls) == 2 + 4
    clock = iter([0.0, 4.0, 5.0, 6.0])
    assert rates.call_times(lambda: None, 0, 3.0) == [4.0, 1.0, 1.0]


@pytest.mark.smoke
def test_the_loader_is_measured_alone_and_by_its_workers(benchmark, tmp_path):
    write_images(tmp_path / "images" / "train", {"a": 3, "b": 2})
    size = ("-o", "DATA.IMAGE_SIZE", "8")
    flags = (
        "--against=paddlevit",
        f"-data_path={tmp_path}/images",
        "-repeats=1",
        "--images=64",
        "-batch_size=16",
    )
    report, printed = benchmark("loader", *flags, *size)
    units = {
        "dataset alone": "images/s", "dataset alone, CPU": "images/CPU s", "loader, per worker": "images/s",
        "loader, workers' CPU": "images/CPU s",
    }  # fmt: skip
    for kind in ("ours", "paddlevit"):
        assert {what: s["unit"] for what, s in report["figures"][kind].items()} == units
    for ratio in report["ratios"]:
        ours, theirs = (
            report["figures"][ratio[side]][ratio["what"]]["values"][0] for side in ("of", "over")
        )
        assert ratio["values"] == [ours / theirs]
    assert [ratio["what"] for ratio in report["ratios"]] == list(units)
    assert printed[0].startswith("loader: 8 pixels, workers 1, batch 16, 64 images a run of ")


def test_the_parts_of_a_start_make_the_whole(benchmark):
    report, _ = benchmark("startup", "-cfg=vit_digits", "-repeats=1", "--processes=1")
    found = {what: s["values"][0] for what, s in report["figures"]["1 process"].items()}
    parts = [*startup._PARTS, "waiting for the first batch", "first step"]
    assert list(found) == ["all", *parts]
    assert sum(found[part] for part in parts) == pytest.approx(found["all"])
    assert all(found[part] > 0 for part in parts)
    packages = {
        what: s["values"][0] for what, s in report["figures"]["1 process, -X importtime"].items()
    }
    assert len(packages) == 11
    assert {"imports", "paddle", "numpy"} < packages.keys()
    assert packages["imports"] > sum(
        seconds for name, seconds in packages.items() if name != "imports"
    )


@pytest.mark.smoke
def test_the_parts_of_a_step_make_its_host_time(benchmark, tmp_path):
    report, printed = benchmark("host", "-repeats=1", "--steps=3", "-o", "MODEL.DEPTH", "2")
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]
    figures = report["figures"]["a step"]
    found = {what: s["values"][0] for what, s in figures.items()}
    parts = list(found)[2:]
    assert list(found)[:2] == ["whole step", "whole step, by the clock"]
    assert {
        "forward",
        "backward",
        "clipping",
        "optimizer",
        "average of the weights",
        "seeding",
    } < set(parts)
    assert len(parts) == 11
    assert all(found[part] > 0 for part in parts)
    # Medians of three steps: their sum is near the median of the sums.
    assert sum(found[part] for part in parts) == pytest.approx(found["whole step"], rel=0.5)
    assert {s["unit"] for s in figures.values()} == {"CPU ms", "ms"}
    assert "batch 2, 3 steps a run: host time on this CPU" in printed[0]
    assert printed[0].endswith("not run on a GPU")


@pytest.mark.smoke
def test_saving_is_measured_in_rounds_and_nothing_stays_behind(benchmark, tmp_path):
    report, _ = benchmark(
        "checkpoint", "-cfg=vit_digits", "-repeats=1", "-saves=2", "-o", "TRAIN.MODEL_EMA", "True"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]
    figures = {
        kind: {what: s["values"] for what, s in of.items()}
        for kind, of in report["figures"].items()
    }
    # What depends on the time: whether the writing outlives a step.
    counts = {
        kind: {what: len(of) for what, of in found.items()} for kind, found in figures.items()
    }
    counts["Saver"].pop("a step during the writing", None)
    assert counts == {
        "Saver": {
            "a step": 4, "memory": 1, "training waits, first save": 1, "training waits, later saves": 1, "written": 2,
            "training loses": 2, "memory with saves": 1, "written, no step at the same time": 1, "verified": 2, "restored": 2,
        },
        "paddle.save": {
            "a step": 4, "memory": 1, "training waits, first save": 1, "training waits, later saves": 1,
            "synced (paddle.save doesn't)": 2, "training loses": 2, "memory with saves": 1, "restored": 2,
        },
    }  # fmt: skip
    # paddle.save has no thread: what training loses is what it waits.
    foreground = figures["paddle.save"]
    waits = foreground["training waits, first save"] + foreground["training waits, later saves"]
    assert foreground["training loses"] == waits
    for kind, found in figures.items():
        assert found["memory with saves"] >= found["memory"]
        assert {
            s["unit"] for what, s in report["figures"][kind].items() if what.startswith("memory")
        } == {"MB"}


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "-repeats=0"], "-repeats 0: expected at least 1"),
        (
            ["train", "-amp"],
            "-amp: Paddle's own settings have no bfloat16 on a CPU; give --against timm",
        ),
        (["checkpoint", "-saves=0"], "-saves 0: expected at least 1"),
        (["scale", "--processes", "1", "0"], "-processes 1 0: expected at least 1"),
        (["scale", "--processes", "2", "2"], "--processes 2: expected two numbers or more"),
        (
            ["train", "-o", "TUNE_CPU", "False", "OUTPUT", "x"],
            "-o OUTPUT TUNE_CPU: this benchmark sets it itself",
        ),
        (["checkpoint", "-o", "KEEP_LAST", "3"], "-o KEEP_LAST: this benchmark sets it itself"),
        (
            ["checkpoint", "-o", "KEEP_LAST=3", "-o", "SEED=1"],
            "-o KEEP_LAST: this benchmark sets it itself",
        ),
        (["host", "-o", "REPORT_FREQ", "1"], "-o REPORT_FREQ: this benchmark sets it itself"),
        (["host", "--steps=0"], "-steps 0: expected at least 1"),
        (["serve", "--clients", "1", "0"], "-clients 1 0: expected at least 1"),
        (["serve", "-o", "MODEL.DEPHT", "2"], "unknown key MODEL.DEPHT"),
        (["startup", "-o", "TRAIN.EMA", "True"], "unknown key TRAIN.EMA"),
        (["eval", "-cfg=vit_digit"], "no configuration file vit_digit; did you mean vit_digits"),
        (["loader", "-data_path=absent"], "absent: no images train/<class>/"),
        (
            ["loader", "--against", "paddlevit", "--auto_augment=rand-m9"],
            "its training images alone were rebuilt",
        ),
        (
            ["loader", "--evaluation", "--color_jitter=0.4"],
            "--evaluation: its images aren't augmented",
        ),
        (
            ["loader", "-data_path=x", "-o", "DATA.DATASET", "digits"],
            "-o DATA.DATASET measures that data set alone",
        ),
        (
            ["loader", "--against=timm", "-data_path=IMAGES", "-o", "TRAIN.VFLIP", "1"],
            "peers' images have no TRAIN.VFLIP",
        ),
        (
            ["train", "--against=timm", "--timm_python=absent"],
            "--against timm: absent gave no torch and timm",
        ),
        (
            ["eval", "--against=timm", "--timm_python=/bin/false"],
            "with --timm_python PATH (tools/check_parity.py -h",
        ),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_runs(
    benchmark, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images" / "train", {"a": 1})
    monkeypatch.setattr(measure, "alternate", None)
    if words[0] == "eval":  # which makes its weights first
        monkeypatch.setattr("tools.benchmarks.evaluation.ask", lambda *_: [])
    with pytest.raises(InputError) as error:
        benchmark(*(word.replace("IMAGES", "images") for word in words))
    assert message in str(error.value)


def test_mae_is_measured_beside_transformers_with_the_same_sizes():
    options = ["DATA.IMAGE_SIZE", "[32,16]", "METHOD.NORM_TARGET", "False"]
    asked = training.timm_request("mae_vit_digits", options)
    assert asked["model"] == "mae"
    assert asked["image"] == [1, 32, 16]
    assert asked["options"] == {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": [32, 16],
        "patch_size": 2,
        "num_channels": 1,
        "decoder_hidden_size": 64,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 256,
        "mask_ratio": 0.75,
        "norm_pix_loss": False,
    }


# ------------------------------------------------------------ timm itself


@pytest.mark.skipif(
    not has_timm,
    reason="torch and timm aren't installed; TIMM_PYTHON names an interpreter with them",
)
def test_timm_trains_evaluates_and_loads(tmp_path):
    assert measure.timm_versions(TIMM).keys() == {"torch", "timm", "python"}
    common = training.timm_request("vit_digits", []) | {"batch_size": 2, "threads": 1, "warm_up": 1}
    save_weights(create_model("vit_digits"), weights := tmp_path / "weights.safetensors")
    for amp in (False, True):
        asked = {"measure": "train", "steps": 2, "reports": 2, "weight_decay": 0.1, "amp": amp}
        found = measure.ask("timm_peer.py", common | asked, 1, TIMM)
        assert len(found["images_per_s"]) == 2
        assert 100 < found["peak_memory"] < 4000  # torch's import among them
        asked = {
            "measure": "eval",
            "batches": 2,
            "compile": False,
            "amp": amp,
            "weights": str(weights),
        }
        assert measure.ask("timm_peer.py", common | asked, 1, TIMM)["images_per_s"][0] > 0
    if importlib.util.find_spec("transformers") or "TIMM_PYTHON" in os.environ:
        asked = training.timm_request("mae_vit_digits", []) | {"measure": "train", "amp": False}
        asked |= {"steps": 2, "reports": 2, "weight_decay": 0.1, "batch_size": 2, "threads": 1}
        assert measure.ask("timm_peer.py", asked, 1, TIMM)["images_per_s"][0] > 0
    write_images(tmp_path, {"a": 4})
    files = sorted(tmp_path.glob("a/*"))
    (tmp_path / "list").write_text("".join(f"{file} 0\n" for file in files * 8))
    asked = {
        "measure": "loader",
        "list": str(tmp_path / "list"),
        "images": 8,
        "warm_up": 4,
        "size": [8, 8],
    }
    asked |= {
        "workers": 1,
        "evaluation": False,
        "scale": [0.1, 1],
        "ratio": [0.75, 1.33],
        "hflip": 0.5,
    }
    asked |= {
        "auto_augment": "rand-m9-mstd0.5",
        "color_jitter": 0.0,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
    }
    asked |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    found = measure.ask("timm_peer.py", common | asked, 1, TIMM)
    assert found.keys() == {"dataset", "loader"}
    assert all(rate > 0 for pair in found.values() for rate in pair)


def test_an_answer_is_found_among_the_words_of_libraries(monkeypatch):
    monkeypatch.setattr(measure, "run", lambda words, threads: 'a word\n{"rate": 2.5}\none more\n')
    assert measure.ask("our_inference.py", {}, 1) == {"rate": 2.5}
    monkeypatch.setattr(measure, "run", lambda words, threads: "words alone\n")
    with pytest.raises(
        RunError, match=r"our_inference.py gave no answer; its output ends in 'words alone\\n'"
    ):
        measure.ask("our_inference.py", {}, 1)
