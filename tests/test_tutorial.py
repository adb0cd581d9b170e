"""docs/guides/sweep.md, "Example: full fine-tuning or LoRA?": its commands from the first to the last,
on crops of photographs.

A small model stands for ``FILE``, and flags behind each command make the run small. What the runs
say is held to what they leave.
"""

import csv
import json
import re

import numpy as np
import pytest
from conftest import ROOT
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score
from support.document_commands import Desk

from models import create_model
from weights import save_weights

pytestmark = pytest.mark.long
SIZES = "DATA.IMAGE_SIZE 32 MODEL.EMBED_DIM 32 MODEL.DEPTH 1 MODEL.NUM_HEADS 2 DATA.NUM_WORKERS 0"
SHORT = f"{SIZES} DATA.BATCH_SIZE 4 TRAIN.WARMUP_EPOCHS 0 TRAIN.NUM_EPOCHS 2"


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """The desk after all commands, and what each printed, by its first words."""
    section = (
        (ROOT / "docs" / "guides" / "sweep.md")
        .read_text()
        .split("## Example: full fine-tuning or LoRA?\n")[1]
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
    sweep = sweep.replace("/data/flowers", "data/flowers")
    (desk.folder / "lora.yaml").write_text(sweep)
    for command in "".join(block for kind, block in blocks if kind == "sh").splitlines():
        flags = f"-ngpus=1 -o {SHORT}" if "run_train" in command else ""
        line = command.replace("/data/flowers", "data/flowers").replace("FILE", "FILE.safetensors")
        done = desk.type(f"{line} {flags}")
        assert done.errors == ""
        printed[re.sub(r".*(?:tools/|output=)(\w+).*", r"\1", command)] = done.printed
    return desk.folder, printed


def rows(file):
    with open(file, newline="") as text:
        return list(csv.DictReader(text))


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
        images = (folder / "data" / "flowers" / "val").glob("*/*")
        assert {row["image"] for row in told} == {
            str(image.relative_to(folder / "data" / "flowers")) for image in images
        }
        assert len(told) == 10
        assert f"{result['acc1']:.2f}" in (folder / run / "report.html").read_text()
        answers[run] = labels == predicted
    assert (folder / "LORA" / "checkpoints" / "best" / "adapter.safetensors").exists()
    alone, there = (
        int((answers[one] & ~answers[other]).sum())
        for one, other in (("FULL", "LORA"), ("LORA", "FULL"))
    )
    probability = binomtest(alone, alone + there).pvalue if alone + there else 1.0
    said = f"of 10 images {alone} are right in the first run only, {there} in the second only, McNemar's exact test: p ="
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
