"""The pages of docs/reference that name what the code has: flags, tools, files, Python and YAML."""

import os
import re

import pytest
from conftest import ROOT
from support.document_commands import Desk, snippets

from config import get_config
from training.command_line import FLAGS

REFERENCE = ROOT / "docs" / "reference"


def table(page, heading):
    """Returns the rows of the table below a heading, each a list of its cells."""
    section = (REFERENCE / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    rows = re.findall(r"^\| (.*) \|$", section.split("\n## ")[0], re.M)
    return [re.split(r" *\| *", row) for row in rows[1:]]


def test_each_flag_stands_there_with_its_key():
    listed = {
        flag.strip("`-"): key.strip("`") for flag, key, _ in table("command_line.md", "Flags")
    }
    assert {name: listed.get(name) for name in FLAGS} == {
        name: flag.key for name, flag in FLAGS.items()
    }
    others = {"cfg", "default_cfg", "mae_pretrain", "o", "explain"}
    assert listed.keys() - FLAGS.keys() == {*others, "version`, `-h"}


def test_each_tool_stands_there():
    listed = re.findall(r"`(\w+)`", str([row[0] for row in table("command_line.md", "Tools")]))
    assert sorted(listed) == sorted(file.stem for file in (ROOT / "tools").glob("*.py"))


def test_the_recipe_is_a_configuration(tmp_path):
    (text,) = snippets("docs/reference/configuration.md", "yaml")
    (tmp_path / "own.yaml").write_text(text)
    config = get_config(tmp_path / "own.yaml")
    assert (config.MODEL.EMBED_DIM, config.TRAIN.NUM_EPOCHS) == (384, 30)
    # WITHOUT gives the default back; without it the recipe clips.
    assert (config.TRAIN.GRAD_CLIP, get_config("finetune").TRAIN.GRAD_CLIP) == (None, 1.0)


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    desk = Desk(tmp_path_factory.mktemp("desk"))
    desk.type(
        "python main_single_gpu.py -cfg=small_data_vit_small_patch16_224 -dataset=folder"
        " -data_path=data/flowers -output=RUN -batch_size=4 -image_size=32 -o REPORT False"
        " DATA.NUM_WORKERS 0 TRAIN.WARMUP_EPOCHS 0 TRAIN.NUM_EPOCHS 1"
        " MODEL.EMBED_DIM 32 MODEL.DEPTH 1 MODEL.NUM_HEADS 2"
    )
    return desk


@pytest.mark.long
def test_the_pages_training_and_evaluation_run(desk):
    smaller = (
        "batch_size=4, image_size=32, ngpus=1, DATA__NUM_WORKERS=0, MODEL__EMBED_DIM=32, MODEL__DEPTH=1,"
        " MODEL__NUM_HEADS=2, REPORT=False, TRAIN__WARMUP_EPOCHS=0, TRAIN__NUM_EPOCHS=1"
    )
    code = snippets("docs/reference/python.md", "python")[0]
    code = code.replace("/data/flowers", "data/flowers").replace("TRAIN__NUM_EPOCHS=10", smaller)
    *log, run, evaluated = desk.python(code).splitlines()
    folder, accuracy, weights = run.split()[:3]
    assert f"run: {os.path.relpath(folder, desk.folder)}" in log[-2]
    assert weights == f"{folder}/checkpoints/best"
    assert "{'split': 'val', " in run
    assert float(evaluated) == float(accuracy)


def test_the_python_of_the_pages_runs(desk):
    codes = snippets("docs/reference/python.md", "python")
    _, predict, build, read, hub = (
        code.replace("/data/flowers", "data/flowers")
        .replace("photo.jpg", "data/flowers/val/china_top/1.jpg")
        .replace("/path/to/toolkit", str(ROOT))
        for code in codes
    )
    assert desk.python(predict).startswith("data/flowers/val/china_top/1.jpg ['")
    assert desk.python(build) == snippets("docs/reference/python.md", "text")[0]
    assert desk.python(read) == "[10, 3, 224, 224] [10]\n"
    assert desk.python(hub) == ""
    (records,) = snippets("docs/reference/run_folder.md", "python")
    assert 0 <= float(desk.python(records)) <= 100
