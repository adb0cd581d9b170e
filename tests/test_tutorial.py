"""docs/guides/prepare_data.md, "From pictures to a model": its commands from the first to the last, on crops
of photographs.

A small model stands for ``FILE``, and flags behind each command make the run small. What the runs
say is held to what they leave.
"""

import csv
import json
import re

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score
from support.document_commands import REGIONS, Desk

from models import create_model
from weights import save_weights

pytestmark = pytest.mark.long
SIZES = "DATA.IMAGE_SIZE 32 MODEL.EMBED_DIM 32 MODEL.DEPTH 1 MODEL.NUM_HEADS 2 DATA.NUM_WORKERS 0"
SHORT = f"{SIZES} DATA.BATCH_SIZE 4 TRAIN.WARMUP_EPOCHS 0 TRAIN.NUM_EPOCHS 2"


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """The desk after all commands, and what each printed, by its first words."""
    section = (
        (ROOT / "docs" / "own_data.md")
        .read_text()
        .split("## From pictures to a model\n")[1]
        .split("\n## ")[0]
    )
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", section, re.M | re.S)
    [sweep] = [block for kind, block in blocks if kind == "yaml"]
    desk = Desk(tmp_path_factory.mktemp("walk"))
    printed = {}
    model = create_model(
        "vit_small_patch16_224", image_size=32, embed_dim=32, depth=1, num_heads=2, num_classes=7
    )
    save_weights(model, desk.folder / "FILE.safetensors")
    sweep = re.sub(r"(command: .*)", rf"\1 {SHORT}", sweep).replace("FILE", "FILE.safetensors")
    (desk.folder / "lora.yaml").write_text(sweep)
    small = {"show_batch": f"-o {SHORT}", "run_train": f"-ngpus=1 -o {SHORT}"}
    for command in "".join(block for kind, block in blocks if kind == "sh").splitlines():
        flags = next((own for word, own in small.items() if word in command), "")
        line = command.replace("/data/flowers", "data/flowers").replace(
            "=FILE ", "=FILE.safetensors "
        )
        done = desk.type(f"{line} {flags}")
        assert done.errors == ""
        printed[re.sub(r".*(?:tools/|output=)(\w+).*", r"\1", command)] = done.printed
    return desk.folder, printed


def rows(file):
    with open(file, newline="") as text:
        return list(csv.DictReader(text))


def test_the_images_are_checked_split_and_shown(walk):
    folder, printed = walk
    assert "24 images in " in printed["check_dataset"]
    lists = [
        (folder / "lists" / f"{mode}_list.txt").read_text().split("\n")[:-1]
        for mode in ("train", "val")
    ]
    assert list(map(len, lists)) == [20, 4]
    assert len({line.split()[0] for part in lists for line in part}) == 24
    assert (folder / "lists" / "classes.txt").read_text().split() == REGIONS
    assert "china_bottom" in (folder / "lists.html").read_text()
    with Image.open(folder / "seen.png") as picture:
        assert min(picture.size) > 400


def test_both_runs_report_and_are_compared(walk):
    folder, printed = walk
    answers = {}
    for run in ("FULL", "LORA"):
        result = json.loads((folder / run / "result.json").read_text())
        told = rows(folder / run / "predictions.csv")
        labels, predicted = (
            np.array([int(row[name]) for row in told]) for name in ("label", "predicted")
        )
        assert result["acc1"] == pytest.approx(100 * accuracy_score(labels, predicted))
        assert [row["image"] for row in told] == [
            line.rsplit(None, 1)[0]
            for line in (folder / "lists" / "val_list.txt").read_text().splitlines()
        ]
        assert f"{result['acc1']:.2f}" in (folder / run / "report.html").read_text()
        answers[run] = labels == predicted
    assert (folder / "LORA" / "checkpoints" / "best" / "adapter.safetensors").exists()
    alone, there = (
        int((answers[one] & ~answers[other]).sum())
        for one, other in (("FULL", "LORA"), ("LORA", "FULL"))
    )
    probability = binomtest(alone, alone + there).pvalue if alone + there else 1.0
    said = f"of 4 images {alone} are right in the first run only, {there} in the second only, McNemar's exact test: p ="
    assert f"{said} {probability:.3g};" in printed["compare_runs"]
    assert "TRAIN.ADAPTER.NAME" in (folder / "compared.html").read_text()


def test_the_sweep_has_a_row_for_each_rate(walk):
    folder, printed = walk
    found = rows(folder / "RATES" / "sweep.csv")
    assert [(row["TRAIN.BASE_LR"], row["status"]) for row in found] == [
        (rate, "done") for rate in ("3e-4", "1e-3", "3e-3", "1e-2")
    ]
    best = max(found, key=lambda row: float(row["acc1"]))
    assert f"best acc1: {best['run']}; " in printed["sweep"]
    assert (
        json.loads((folder / "RATES" / "0003" / "result.json").read_text())["config"]["TRAIN"][
            "BASE_LR"
        ]
        == 0.01
    )


def test_the_model_answers_and_is_exported(walk):
    folder, printed = walk
    told = rows(folder / "answers.csv")
    assert len({row["name"] for row in told}) == 10
    assert {row["class"] for row in told} <= set(REGIONS)
    assert (folder / "lora_onnx" / "model.onnx").stat().st_size > 10_000
    assert "predict" in printed
