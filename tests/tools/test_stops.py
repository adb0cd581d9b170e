"""Every tool is stopped by a signal as it starts, as it imports Paddle, and in the middle of its
work.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, TINY
from support.finished_runs import make_run
from support.programs import assert_none_left, descendants, started, wait_for
from support.servers import write_checkpoint

from config import get_config, resolved_yaml

# A tool that syncs a file stays there: it is in the middle of writing.
WAITING = """
import os, sys, time

def wait(descriptor):
    open(os.environ["AT_FSYNC"], "w").close()
    time.sleep(600)

if os.path.basename(sys.argv[0]) in os.environ["STOPPED"]:
    os.fsync = wait
"""
IMAGES = ["-dataset=folder", "-data_path=images"]
CLIP = str(ROOT / "tests" / "golden" / "text" / "clip")
WRITES = "it syncs a file"
STARTS = "it has started a process"
# What each tool is told, and when it is in the middle of its work.
TOOLS = {
    "average_checkpoints": (["w.safetensors", "-output=out.safetensors"], WRITES),
    "benchmark": (["checkpoint", "-cfg=vit_digits", "-repeats=1"], STARTS),
    "calibrate": (["digits", "-dataset=digits", "-output=out"], WRITES),
    "check_dataset": ([*IMAGES, "--report=out.html"], WRITES),
    "check_paddlevit": (["paddlevit", "-python=./waits"], STARTS),
    "check_parity": (["vit_digits", "-python=./waits"], STARTS),
    "choose_images": (["w.safetensors", "images/val", *IMAGES, "-output=out"], WRITES),
    "compare_runs": (["run", "other", "-output=out.html"], WRITES),
    "convert_weights": (["w.safetensors", "out.npz"], WRITES),
    "doctor": (["-ngpus=2"], STARTS),
    "export_model": (["-pretrained=w.safetensors", "-output=out"], WRITES),
    "features": (["w.safetensors", "images", "-output=out.npy"], WRITES),
    "find_label_errors": (["w.safetensors", "-features", *IMAGES, "-output=out"], WRITES),
    "find_lr": (["-cfg=small.yaml", "-updates=20", "-output=out"], WRITES),
    "list_models": (["vit_digits"], None),
    "merge_checkpoint": (["epoch_0001", "out"], WRITES),
    "make_digits": (["-output=out"], WRITES),
    "make_masks": (["-format=labelme", "-data_path=annotated", "-output=out"], WRITES),
    "make_photographs": (["-output=out", "-count=16"], WRITES),
    "make_shapes": (["-output=out", "-count=16"], WRITES),
    "make_shards": ([*IMAGES, "-output=out", "--workers=2"], WRITES),
    "model_info": (["vit_base_patch16_224"], STARTS),  # it measures for some seconds
    "predict": (["w.safetensors", "images", "-output=out.csv"], WRITES),
    "probe": (["w.safetensors", *IMAGES, "-probes=knn", "-k=3", "-output=out.json"], WRITES),
    "publish": (["w.safetensors", "out"], WRITES),
    "replay": (["trained", "-step=2", "-ngpus=2", "-output=out"], WRITES),
    "robustness": (
        [
            "-cfg=small.yaml",
            "-pretrained=w.safetensors",
            "-published=published",
            "-corruptions=fog",
            "-output=out",
        ],
        STARTS,
    ),
    "search": (
        ["images/train/a/0.jpg", "images", "-checkpoint=w.safetensors", "-grid=out.png"],
        WRITES,
    ),
    "serve": (["w.safetensors", "-port=0"], STARTS),
    "show_batch": (["-cfg=small.yaml", "-output=out.png"], WRITES),
    "sweep": (["sweep.yaml"], None),
    "visualize": (["features", "w.safetensors", "images/train/a/0.jpg", "-output=out.png"], WRITES),
    "watch": (["."], None),
    "zero_shot": ([CLIP, "-classes=classes.txt", "-output=out"], WRITES),
}
# They import no Paddle, or after they have started others.
WITHOUT_PADDLE = {
    "benchmark",
    "check_paddlevit",
    "check_parity",
    "list_models",
    "make_digits",
    "make_photographs",
    "make_shapes",
    "robustness",
    "serve",
    "sweep",
    "watch",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the tools are told of."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("stops")
    write_checkpoint(folder / "w.safetensors", classes=("a", "b"))
    for number in range(24):
        file = (
            folder
            / "images"
            / ("val" if number % 4 == 0 else "train")
            / "ab"[number % 2]
            / f"{number}.jpg"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((64, 48), number + 1).save(file)
    Image.effect_noise((64, 48), 99).save(folder / "images" / "train" / "a" / "0.jpg")
    for severity in range(1, 6):
        shutil.copytree(folder / "images" / "val", folder / "published" / "fog" / str(severity))
    (folder / "annotated").mkdir()
    for number in range(4):
        Image.effect_noise((64, 48), number).save(folder / "annotated" / f"{number}.jpg")
        shape = {"label": "a", "shape_type": "rectangle", "points": [[1, 1], [9, 9]]}
        annotation = {"imageWidth": 64, "imageHeight": 48, "shapes": [shape]}
        (folder / "annotated" / f"{number}.json").write_text(json.dumps(annotation))
    make_run(folder / "run", 0.8)
    make_run(folder / "other", 0.6)
    (folder / "small.yaml").write_text(
        resolved_yaml(get_config(None, [*TINY, "DATA.BATCH_SIZE", "8"]))
    )
    (folder / "trained").mkdir()
    (folder / "trained" / "config.yaml").write_text(
        resolved_yaml(get_config(None, [*TINY, "TRAIN.NUM_EPOCHS", "99"]))
    )
    (folder / "classes.txt").write_text("cat\ndog\n")
    write_sharded(folder / "epoch_0001")
    sweep = {
        "command": "python main_single_gpu.py -cfg=small.yaml",
        "keys": {"SEED": [1, 2]},
        "output": "out",
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    (folder / "waits").write_text("#!/bin/sh\nexec sleep 600\n")
    (folder / "waits").chmod(0o755)
    configs = folder / "paddlevit" / "image_classification" / "ViP" / "configs"
    configs.mkdir(parents=True)
    (configs / "vip_s7.yaml").write_text("MODEL: {TYPE: ViP}\n")
    (folder / "tmp").mkdir()
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(textwrap.dedent(WAITING))
    return folder


def write_sharded(folder):
    """A checkpoint whose optimizer's state is in two shares, with as little as such a folder has."""
    from training.checkpoint.storage import (
        INDEX,
        MODEL,
        STATE,
        SUMS,
        index_of,
        share_name,
        write_file,
    )

    folder.mkdir()
    keys = ["a/moment1_0", "b/moment1_0"]
    content = {
        MODEL: {"a": np.zeros(1, np.float32)},
        STATE: b"{}",
        INDEX: index_of([[key] for key in keys]),
    }
    content |= {
        share_name(owner, 2): {key: np.zeros(1, np.float32)} for owner, key in enumerate(keys)
    }
    sums = [write_file(folder / name, found) for name, found in content.items()]
    (folder / SUMS).write_text("".join(sums))


def begin(place, tool):
    words = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *TOOLS[tool][0]]
    writing = f"{tool}.py" if TOOLS[tool][1] == WRITES else "none"
    waits = {
        "PYTHONPATH": str(place / "site"),
        "AT_FSYNC": str(place / "tmp" / "at_fsync"),
        "STOPPED": writing,
    }
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, **waits, "TMPDIR": str(place / "tmp")}
    process = subprocess.Popen(words, cwd=place, env=environment, start_new_session=True, **streams)
    started.append(process)
    return process


def handles(process, number):
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return int(caught, 16) >> (number - 1) & 1


def imports_paddle(process):
    return "libpaddle" in Path(f"/proc/{process.pid}/maps").read_text()


def files_of(place):
    return sorted(
        file for file in place.rglob("*") if "site" not in file.parts and file.name != "at_fsync"
    )


def stop(place, tool, reached, number):
    """Stops a tool as soon as it has ``reached`` a moment; nothing of it is left but one line."""
    (place / "tmp" / "at_fsync").unlink(missing_ok=True)
    before = files_of(place)
    process = begin(place, tool)
    assert wait_for(lambda: reached(process), process), process.communicate()
    left = list(descendants(process.pid))
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    # A training adds the step at which it was.
    stopped = errors.splitlines()[-1].partition(":")[0].partition(" at step ")[0]
    assert stopped == f"stopped by {number.name}"
    assert_none_left(left)
    assert files_of(place) == before
    return errors


def test_all_tools_are_stopped_here():
    tools = {file.stem for file in (ROOT / "tools").glob("*.py")}
    assert tools == TOOLS.keys()


@pytest.mark.parametrize("tool", TOOLS)
def test_at_the_start(place, tool):
    errors = stop(place, tool, lambda process: handles(process, signal.SIGTERM), signal.SIGTERM)
    assert errors.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool not in WITHOUT_PADDLE])
def test_while_paddle_is_imported(place, tool):
    errors = stop(place, tool, imports_paddle, signal.SIGINT)
    assert errors.count("\n") == 1


def in_the_middle(place, tool):
    def reached(process):
        if TOOLS[tool][1] == WRITES:
            return (place / "tmp" / "at_fsync").exists()
        return any(
            "resource_tracker" not in words for _, words in descendants(process.pid).values()
        )

    return reached


FAST = ("make_shards", "benchmark")


@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(tool, marks=() if tool in FAST else pytest.mark.long)
        for tool, (_, moment) in TOOLS.items()
        if moment
    ],
)
def test_in_the_middle(place, tool):
    stop(place, tool, in_the_middle(place, tool), signal.SIGTERM)


@pytest.mark.parametrize("tool", ["make_shards", pytest.param("doctor", marks=pytest.mark.long)])
def test_a_tool_that_is_killed_leaves_no_process(place, tool):
    process = begin(place, tool)
    assert wait_for(lambda: len(descendants(process.pid)) >= 2, process), process.communicate()
    left = list(descendants(process.pid))
    process.kill()
    process.communicate()
    assert_none_left(left)
    for folder in place.glob(".out.*"):  # nobody was left to remove it
        shutil.rmtree(folder)
