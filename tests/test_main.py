"""The commands end to end: train, evaluate, logs, exit statuses, launchers, and ranks that fail."""

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import warm
from conftest import ROOT, TINY, write_images
from PIL import Image
from support.programs import assert_none_left, ranks_of, start, wait_for_first_step

from settings.parser import __version__
from utils import num_cores

SHORT = ["-cfg=vit_digits", "-ngpus=2", "-o", "TRAIN.NUM_EPOCHS", "30", "VALIDATE_FREQ", "30"]
SHORT += ["TRAIN.AFFINE", "[5.0,0.03,0.05]"]


def read(run, name):
    return json.loads((Path(run) / name).read_text())


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A shortened digits run by run_train_multi.sh: (its folder, what it printed)."""
    folder = tmp_path_factory.mktemp("digits")
    command = ["sh", str(ROOT / "run_train_multi.sh"), "-output=run", *SHORT]
    done = subprocess.run(
        command, cwd=folder, env=warm.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


@pytest.mark.long
@pytest.mark.smoke
def test_the_digits_run_reaches_95_percent_and_leaves_its_record(digits):
    run, printed = digits
    result = read(run, "result.json")
    assert result["acc1"] >= 95
    assert result["num_samples"] == 364
    assert result["model"] == "vit_digits"
    assert result["weights"].endswith("epoch_0030")
    assert result["config"]["TRAIN"]["NUM_EPOCHS"] == 30
    assert (
        f'version = "{result["versions"]["toolkit"]}"'
        in (ROOT / "pyproject.toml").read_text().splitlines()
    )
    threads = max(1, num_cores() // 2)
    assert (
        f"2 processes over GLOO on cpu, cpu: {threads} thread{'s' * (threads > 1)} per process, stride"
        in printed
    )
    assert (
        "global batch 32 x 2 = 64, accumulation 1, effective batch 64; learning rate 1e-06, after"
        in printed
    )
    assert re.search(
        rf"summary: acc1: {result['acc1']:.2f}, .*samples: 364, time: .* s, run: run\n", printed
    )
    assert "TRAIN.NUM_EPOCHS: 300 -> 30" in printed
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [r for r in records if r["split"] == "train"]
    assert [r["epoch"] for r in train] == list(range(1, 31))
    keys = {
        "split",
        "step",
        "epoch",
        "samples",
        "lr",
        "loss",
        "acc1",
        "acc5",
        "grad_norm",
        "images_per_s",
    } | {
        "data_wait",
        "peak_memory",
    }
    assert all(
        set(r) == keys and r["samples"] == 22 * 64 and 0 <= r["data_wait"] < 1 for r in train
    )
    # MB of one process, Paddle's import among them
    assert all(100 < r["peak_memory"] < 4000 for r in train)
    assert train[-1]["step"] == 30 * 22
    assert (run / "log.txt").read_text().count("epoch 1/30 step 22") == 1
    assert (run / "log_0.txt").exists()
    assert (run / "log_1.txt").exists()
    assert read(run, "classes.json") == [str(d) for d in range(10)]
    with Image.open(run / "curves.png") as picture:
        assert picture.size == (960, 1080)
    assert (
        f'top 1 (%)</th><td class="n">{result["acc1"]:.2f}</td>'
        in (run / "report.html").read_text()
    )


@pytest.mark.long
@pytest.mark.smoke
def test_evaluation_repeats_the_runs_numbers_on_one_process_and_on_two(digits, program, tmp_path):
    run, _ = digits
    trained = read(run, "result.json")
    last = run / "checkpoints" / "last"
    forms = [
        ("run_eval_multi.sh", "-eval", f"-pretrained={last}"),
        (
            "main_single_gpu.py",
            "-cfg=vit_digits",
            "-eval",
            "-batch_size=7",
            f"--pretrained={last}/model",
        ),
        (
            "main_multi_gpu.py",
            f"-cfg={run}/config.yaml",
            "-eval",
            "-ngpus=1",
            f"-pretrained={last}/model.safetensors",
        ),
    ]
    for number, form in enumerate(forms):
        status, _, errors = program(*form, f"-output={number}")
        assert status == 0, errors
        result = read(tmp_path / str(number), "result.json")
        assert {key: result[key] for key in ("loss", "acc1", "acc5")} == {
            key: pytest.approx(trained[key], abs=1e-4) for key in ("loss", "acc1", "acc5")
        }
        assert result["num_samples"] == 364


def two_at_a_time(program, commands):
    """The exit status and stderr of main_multi_gpu.py with each list of flags: most of a start is
    waiting.
    """
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(
            lambda flags: program("main_multi_gpu.py", "-cfg=vit_digits", *flags), commands
        )
        return [(status, errors) for status, _, errors in done]


@pytest.mark.long
def test_an_evaluation_without_weights_or_with_others_is_an_error(program, digits, tmp_path):
    run, _ = digits
    write_images(tmp_path / "other" / "val", {"cat": 1, "dog": 1})
    (tmp_path / "hostile.pth").write_bytes(pickle.dumps({"model": [Hostile()]}))
    cases = [
        ([], "error: -eval needs -pretrained FILE"),
        (
            ["-pretrained=absent"],
            "error: no weights at absent: no such file or folder, nor a file of that name ending in .safe",
        ),
        (
            ["-pretrained=hostile.pth"],
            "error: hostile.pth: it asks to load posix.system; only arrays and plain containers",
        ),
        (
            [f"-pretrained={run}/checkpoints/best", "-o", "MODEL.DEPTH", "3"],
            "doesn't fit the model: unexpected blocks.3.",
        ),
        (
            [f"-pretrained={run}/checkpoints/best", "-dataset=folder", "-data_path=other"],
            "error: the weights were trained on the classes 0, 1, 2, 3, 4, ... (10), the data has others: cat, dog",
        ),
    ]
    commands = [
        ("-eval", f"-output=out{number}", *flags) for number, (flags, _) in enumerate(cases)
    ]
    for (_, message), (status, errors) in zip(cases, two_at_a_time(program, commands), strict=True):
        assert status == 2
        assert message in errors
        assert errors.count("error: ") == 1  # one rank speaks
        assert "Traceback" not in errors
    assert not (tmp_path / "ran").exists()


class Hostile:
    """What runs a command where it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.long
def test_weights_of_the_hub_are_evaluated_as_they_were_made(digits, program, tmp_path):
    run, _ = digits
    (tmp_path / "hub").mkdir()
    shutil.copy(run / "checkpoints" / "last" / "model.safetensors", tmp_path / "hub")
    made_for = {
        "crop_pct": 0.75,
        "crop_mode": "squash",
        "interpolation": "bilinear",
        "mean": [0.5],
        "std": [0.25],
    }
    stored = {"architecture": "vit_digits", "num_classes": 10, "pretrained_cfg": made_for}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(stored))
    status, _, errors = program(
        "main_single_gpu.py", "-cfg=vit_digits", "-eval", "-pretrained=hub", "-output=out"
    )
    assert status == 0, errors
    data = read(tmp_path / "out", "result.json")["config"]["DATA"]
    found = [data[key] for key in ("CROP_PCT", "CROP_MODE", "INTERPOLATION", "IMAGENET_STD")]
    assert found == [1.0, "squash", "bilinear", [0.5]]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "warning: DATA.CROP_PCT is 1.0, the weights were made for 0.75" in log
    assert "warning: DATA.IMAGENET_STD is [0.5], the weights were made for [0.25]" in log
    assert log.count("warning: ") == 2


def test_wrong_input_exits_with_2_before_anything_is_built(program, tmp_path):
    cases = [
        (
            ["-dataset=folder", "-data_path=nowhere"],
            "error: -data_path is nowhere, but there is no such folder",
        ),
        (["-ngpus=99"], "error: NGPUS asks for 99 processes, found "),
        (
            ["-o", "TRAIN.ACCUM_ITER", "99"],
            "error: TRAIN.ACCUM_ITER is 99, but an epoch has only 22 steps",
        ),
        (
            ["-o", "TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.LOSS", "cross_entropy"],
            "error: TRAIN.LOSS is 'cross_entropy'",
        ),
        (
            ["-o", "TRAIN.AUTO_AUGMENT", "rnd-m9"],
            "error: TRAIN.AUTO_AUGMENT is 'rnd-m9'; expected rand-m9",
        ),
    ]
    commands = [flags for flags, _ in cases]
    for (_, message), (status, errors) in zip(cases, two_at_a_time(program, commands), strict=True):
        assert (status, errors.count("error: "), message in errors) == (2, 1, True), errors
    status, _, errors = program("main_single_gpu.py", "-cfg=vit_digits", "-ngpus=2")
    assert (status, "found NGPUS 2; run main_multi_gpu.py" in errors) == (2, True)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------- ranks that fail


@pytest.fixture
def long_run(tmp_path):
    """A run with loader workers that takes long enough to be disturbed; killed at the test's end,
    whatever happens.
    """
    workers = ["-o", "TRAIN.NUM_EPOCHS", "1000", "DATA.NUM_WORKERS", "1", "REPORT_FREQ", "1"]
    process = start(tmp_path, "-cfg=vit_digits", "-output=run", *workers)
    pids = wait_for_first_step(process, tmp_path / "run")
    with process:
        yield process, pids
        for pid in [process.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_rank_that_is_killed_ends_the_run(long_run):
    process, pids = long_run
    assert len(pids) >= 4  # two ranks, a loader worker each
    victim = min(ranks_of(process))
    start_time = time.time()
    os.kill(victim, signal.SIGKILL)
    assert process.wait(15) == 1
    assert time.time() - start_time < 15
    errors = process.stderr.read()
    assert re.search(r"error: rank \d was killed by SIGKILL", errors)
    assert "Traceback" not in errors
    assert_none_left(pids)


def test_a_parent_that_is_killed_takes_its_processes_along(long_run):
    process, pids = long_run
    process.kill()
    assert process.wait(15) == -signal.SIGKILL
    assert_none_left(pids)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_rank_that_raises_ends_the_run_with_its_error_and_no_other(tmp_path, workers):
    write_images(tmp_path / "data" / "train", {"a": 20, "b": 20})
    write_images(tmp_path / "data" / "val", {"a": 2, "b": 2})
    (tmp_path / "data" / "train" / "b" / "7.png").write_bytes(b"\x89PNG cut")
    options = [word for word in TINY if word != "digits"]
    options[options.index("DATA.DATASET") :] = options[options.index("DATA.DATASET") + 1 :]
    flags = [
        "-cfg=vit_digits",
        "-dataset=folder",
        "-data_path=data",
        "-output=run",
        "-batch_size=4",
        "-o",
        *options,
    ]
    started = time.time()
    process = start(
        tmp_path,
        *flags,
        "DATA.NUM_WORKERS",
        workers,
        "TRAIN.NUM_EPOCHS",
        "500",
        "MODEL.NUM_CLASSES",
        "auto",
    )
    _, errors = process.communicate(timeout=60)
    assert time.time() - started < 30  # start-up and an epoch included
    assert process.returncode == 1
    assert re.search(
        r"^rank \d: error: data/train/b/7.png: its format is unknown; BMP", errors, re.MULTILINE
    )
    assert "Traceback" not in errors
    assert errors.count("error: ") == 1


def test_broken_images_are_skipped_counted_and_listed_when_asked(tmp_path, program):
    write_images(tmp_path / "data" / "train", {"a": 8, "b": 8})
    write_images(tmp_path / "data" / "val", {"a": 1, "b": 1})
    (tmp_path / "data" / "train" / "b" / "3.png").write_bytes(b"")
    options = [word for word in TINY if word not in ("DATA.DATASET", "digits")]
    flags = ["-dataset=folder", "-data_path=data", "-output=run", "-batch_size=4", "-o", *options]
    status, printed, errors = program(
        "main_multi_gpu.py", *flags, "DATA.SKIP_BROKEN", "True", "MODEL.NUM_CLASSES", "auto"
    )
    assert status == 0, errors
    assert "1 unreadable image was skipped; log_<rank>.txt" in printed
    listed = [(tmp_path / "run" / f"log_{rank}.txt").read_text() for rank in (0, 1)]
    assert sum(text.count("b/3.png") for text in listed) == 1
    assert "acc5 counts the first 2: there are fewer than five classes" in printed
    assert read(tmp_path / "run", "result.json")["acc5"] == 100


@pytest.mark.parametrize("script", ["run_train_multi.sh", "run_eval_multi.sh"])
def test_a_script_is_found_through_a_link(tmp_path, script):
    (tmp_path / "link.sh").symlink_to(ROOT / script)
    command = ["sh", "link.sh", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("run_*.sh")))
def test_every_script_prints_the_version(tmp_path, script):
    """Those for several machines, too: without a launcher, SLURM or another machine."""
    for flag in ("--version", "-version"):
        command = ["sh", str(ROOT / script), flag]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        found = (done.returncode, done.stdout, done.stderr)
        assert found == (0, f"paddle-vit-toolkit {__version__}\n", "")
