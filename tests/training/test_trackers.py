"""Trackers show what metrics.jsonl has, also after a resume, and whatever becomes of one, the run
goes on.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time

import pytest
import yaml
from support.programs import ROOT, assert_none_left
from support.ranks import run_ranks
from support.tracker_files import READERS, FailingTracker, read_tensorboard
from support.training_runs import refused, train

from config import get_config
from errors import InputError, install
from settings.registry import trackers
from settings.suggestions import equivalent_key
from training import tracking
from training.trackers import final_numbers
from training.tracking import Follower, TrackerProcess

CONFIG = {
    "MODEL": {"NAME": "vit", "DEPTH": 2},
    "TRAIN": {"BASE_LR": 0.1, "BETAS": [0.9, 0.99], "EMA": True},
}
RESULT = {
    "acc1": 75.0,
    "weights": "file",
    "loss": 0.5,
    "num_samples": 8,
    "thresholds": [0.25],
    "best": {"epoch": 2, "acc1": 75.5},
    "config": {"SEED": 1},
}
RESULT |= {
    "ema": {
        "acc1": 71.0,
        "loss": 0.75,
        "num_samples": 8,
        "best": {"epoch": 1, "acc1": 71.25},
        "config": {"SEED": 1},
    },
    "versions": {"numpy": "2"},
    "environment": {"cores": 2},
}
FINAL = {
    "acc1": 75.0,
    "loss": 0.5,
    "num_samples": 8,
    "best/epoch": 2,
    "best/acc1": 75.5,
    "ema/acc1": 71.0,
    "ema/loss": 0.75,
    "ema/num_samples": 8,
    "ema/best/epoch": 1,
    "ema/best/acc1": 71.25,
}


def records(steps, odd=0.0, epoch=1):
    lines = [
        {"split": "train", "step": step, "epoch": epoch, "lr": 0.1 / step, "loss": 2.0 / step + odd}
        for step in steps
    ]
    for split in ("val", "ema"):
        lines.append(
            {
                "split": split,
                "step": steps[-1],
                "epoch": epoch,
                "acc1": 70.125 + len(split),
                "loss": 1.5 + odd,
            }
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def shown_by(text):
    """{(tag, step): value} of lines of metrics.jsonl."""
    found = {}
    for record in map(json.loads, text.splitlines()):
        split = record.pop("split")
        step = record.pop("step")
        found |= {(f"{split}/{key}", step): value for key, value in record.items()}
    return found


PARAMETERS = {
    "MODEL.NAME": "vit",
    "MODEL.DEPTH": 2,
    "TRAIN.BASE_LR": 0.1,
    "TRAIN.BETAS": "[0.9, 0.99]",
}


def installed(name):
    if not importlib.util.find_spec(package := trackers.components[name].given["package"]):
        pytest.skip(f"{package} isn't installed (the extra trackers)")


@pytest.mark.parametrize("name", READERS)
def test_a_tracker_shows_the_records_that_a_resume_leaves_and_the_result(name, tmp_path):
    installed(name)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"GIVEN": {"MODEL.NAME": [0, "-o"]}}))
    (run / "metrics.jsonl").write_text(records([1, 2, 3, 4], odd=9.0))
    first = TrackerProcess([name])
    assert first.begin(run) == ""
    # rewound: another file, as the run's own is
    (run / "metrics.jsonl").write_text(records([1, 2]))
    first.process.stdin.close()  # it was killed
    time.sleep(0.05)
    second = TrackerProcess([name])
    assert second.begin(run) == ""
    with open(run / "metrics.jsonl", "a") as file:
        file.write(records([4, 6]) + '{"split": "tr')
    (run / "result.json").write_text(json.dumps(RESULT))
    assert second.end() == ""
    assert first.process.wait(30) == 0
    late = subprocess.run(
        first.process.args, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )
    # of a run that was killed early, and begins after the second
    assert (late.returncode, late.stderr) == (0, b"")
    values, parameters, results = READERS[name](run / name)
    expected = shown_by(records([1, 2]) + records([4, 6]))
    assert values == pytest.approx(expected, rel=1e-6)
    assert results == pytest.approx(FINAL, rel=1e-6)
    if name in ("wandb", "swanlab", "trackio"):
        assert CONFIG.items() <= parameters.items()
    else:
        shown = {
            key: str(value) if name == "mlflow" else value for key, value in PARAMETERS.items()
        }
        assert {key: parameters[key] for key in shown} == pytest.approx(shown)
        assert parameters["TRAIN.EMA"] == "True"
        assert parameters.keys() == PARAMETERS.keys() | {"TRAIN.EMA"}
    assert (run / tracking.LOG).read_text() == "" or name not in (
        "visualdl",
        "tensorboard",
    )


# What a user may have set to send runs somewhere, or to name where.
REMOTE = {
    "HF_TOKEN": "hf_" + "a" * 34,
    "HF_ENDPOINT": "URL",
    "WANDB_MODE": "online",
    "WANDB_API_KEY": "a" * 40,
    "WANDB_BASE_URL": "URL",
    "MLFLOW_TRACKING_URI": "URL",
    "SWANLAB_MODE": "online",
    "SWANLAB_API_KEY": "a" * 21,
    "SWANLAB_API_HOST": "URL",
    "SWANLAB_WEBHOOK": "URL",
    "SWANLAB_RUN_DIR": "elsewhere",
    "TRACKIO_SERVER_URL": "URL?write_token=a",
    "TRACKIO_SPACE_ID": "somebody/space",
    "TRACKIO_WEBHOOK_URL": "URL",
    "TRACKIO_DIR": "elsewhere",
}


@pytest.mark.parametrize("name", READERS)
def test_a_tracker_sends_nothing_whatever_the_environment_asks_for(name, tmp_path, monkeypatch):
    installed(name)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (run / "metrics.jsonl").write_text(records([1, 2]))
    (run / "result.json").write_text(json.dumps(RESULT))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        for variable, value in REMOTE.items():
            monkeypatch.setenv(variable, value.replace("URL", url))
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        process = TrackerProcess([name])
        assert process.begin(run) == ""
        assert process.end() == ""
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert READERS[name](run / name)[0] == pytest.approx(shown_by(records([1, 2])), rel=1e-6)
    assert "is turned off" not in (run / tracking.LOG).read_text()
    assert {entry.name for entry in tmp_path.iterdir()} <= {"run", "home"}


def test_a_run_that_was_stopped_has_no_result_not_even_an_earlier_one(tmp_path):
    installed("tensorboard")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    (tmp_path / "metrics.jsonl").write_text(records([1]))
    held = TrackerProcess(["tensorboard"])
    assert held.begin(tmp_path) == ""
    held.process.stdin.close()
    assert held.process.wait(30) == 0
    values, parameters, results = read_tensorboard(tmp_path / "tensorboard")
    assert (len(values), parameters["MODEL.DEPTH"], results) == (9, 2, {})


def test_the_numbers_of_a_result_are_named_by_where_they_are():
    assert final_numbers(RESULT) == FINAL


@pytest.mark.smoke
def test_a_run_of_two_ranks_that_goes_on_has_each_step_once(tmp_path, tiny):
    installed("tensorboard")
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "4",
        "REPORT_FREQ",
        "1",
        "TRAIN.MODEL_EMA",
        "True",
        "TRACKERS",
        "[tensorboard]",
    ]
    options += ["TRAIN.LR_SCHEDULER.NAME", "constant"]
    run_ranks(train, options, str(tmp_path), 32)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(records([5, 6], epoch=2))  # what came after the checkpoint
    named = ("TRAIN.NUM_EPOCHS", "2")
    run_ranks(train, [*options, "MODEL.RESUME", "auto"], str(tmp_path), 32, named)
    values, parameters, results = read_tensorboard(tmp_path / "tensorboard")
    expected = shown_by((tmp_path / "metrics.jsonl").read_text())
    assert {step for tag, step in expected if tag == "train/loss"} == set(range(1, 9))
    assert {tag.partition("/")[0] for tag, _ in values} == {"train", "val", "ema"}
    assert values == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert parameters["TRAIN.NUM_EPOCHS"] == 2
    result = json.loads((tmp_path / "result.json").read_text())
    assert results["acc1"] == pytest.approx(result["acc1"])
    assert "TRACKERS" not in (tmp_path / "log.txt").read_text().split("run: ")[1]


# ------------------------------------------------------------------ none stops a run


def test_a_tracker_that_raises_is_off_and_the_others_go_on(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(
        trackers, "registered", dict.fromkeys(("odd", "even"), (FailingTracker, {}))
    )
    (tmp_path / "config.yaml").write_text("{SEED: 1}")
    said = []
    follower = Follower(tmp_path, ["odd", "even"], said.append)
    follower.follow()  # no record yet
    (tmp_path / "metrics.jsonl").write_text(records([1, 2]) + "[1]\n{}\nno json\n" + records([3]))
    follower.follow()
    follower.end(False)
    assert said == ["TRACKERS: odd is turned off (ConnectionError: no route); the run continues"]
    assert "ConnectionError" in capfd.readouterr().err
    assert not (tmp_path / "odd" / "end").exists()
    steps = [
        ["train", 1],
        ["train", 2],
        ["val", 2],
        ["ema", 2],
        ["train", 3],
        ["val", 3],
        ["ema", 3],
    ]
    assert json.loads((tmp_path / "even" / "end").read_text()) == [steps, {}]


def test_trackers_that_hang_crash_or_cannot_be_started_are_told_and_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "PATIENCE", 0.3)
    real = subprocess.Popen
    for code, told in (
        ("import time; time.sleep(99)", "TRACKERS: ended because they didn't finish within 0.3 s"),
        ("import os; os.kill(os.getpid(), 11)", "TRACKERS: their process was killed by SIGSEGV"),
        ("raise SystemExit(3)", "TRACKERS: their process ended with status 3"),
    ):
        started = lambda words, code=code, **how: real([sys.executable, "-S", "-c", code], **how)  # noqa: E731
        monkeypatch.setattr(subprocess, "Popen", started)
        held = TrackerProcess(["tensorboard"])
        assert held.begin(tmp_path) == ""
        if "sleep" not in code:
            held.process.wait(10)
        assert held.end().startswith(told)
        assert_none_left([held.process.pid])

    def failed(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", failed)
    held = TrackerProcess(["tensorboard"])
    assert (
        held.begin(tmp_path)
        == "TRACKERS: couldn't be started (Resource temporarily unavailable); the run continues without them"
    )
    assert held.end() == TrackerProcess([]).begin(tmp_path) == TrackerProcess([]).end() == ""


def test_what_is_not_installed_ends_the_start_in_a_line(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(tracking, "_is_installed", lambda package: package == "wandb")
    options = [*tiny, "TRACKERS", "[wandb,mlflow,tensorboard]"]
    line = "TRACKERS: mlflow needs mlflow, tensorboard needs tensorboardX, which isn't installed;"
    both = f"{install('mlflow')} and {install('tensorboard')}"
    refused(f"{line} {both}, or leave it out of TRACKERS", options, tmp_path / "run")
    # A tracker that somebody added isn't an extra of the toolkit.
    monkeypatch.delitem(trackers.components["mlflow"].given, "extra")
    both = f"pip install mlflow and {install('tensorboard')}"
    refused(f"{line} {both}, or leave it out of TRACKERS", options, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_a_trackers_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "aim").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("aim") is not None
    assert not tracking._is_installed("aim")
    assert tracking._is_installed("yaml")


def test_trackers_are_chosen_by_names_that_are_there():
    assert get_config(None, ["TRACKERS", "[tensorboard,mlflow]"]).TRACKERS == [
        "tensorboard",
        "mlflow",
    ]
    assert get_config(None, ["TRACKERS", "wandb"]).TRACKERS == ["wandb"]
    for options, message in (
        (
            ["TRACKERS", "[tensorbord]"],
            "TRACKERS is 'tensorbord', expected one of .*; did you mean tensorboard?",
        ),
        (["TRACKERS", "[wandb,wandb]"], "TRACKERS is .*, expected each once"),
        (["TRACKERS", "[wandb]", "EVAL", "True"], "TRACKERS"),
    ):
        with pytest.raises(InputError, match=message):
            get_config(None, options)
    assert equivalent_key("log-wandb", []) == "TRACKERS wandb"
    assert equivalent_key("Global.use_visualdl", []) == "TRACKERS visualdl"


def test_neither_a_run_nor_the_process_beside_it_imports_what_it_does_not_use():
    code = "import sys, training.tracking, training.trackers; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ)
    )
    heavy = {
        "paddle",
        "torch",
        "tensorflow",
        "wandb",
        "mlflow",
        "visualdl",
        "tensorboardX",
        "swanlab",
        "trackio",
        "matplotlib",
    }
    assert not heavy & set(done.stdout.split())
    assert "training.tracking" in done.stdout
