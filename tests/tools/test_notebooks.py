"""The notebooks of examples/: each is run as a program, small; what is stored in them is of a real
run.
"""

import base64
import json
import os
import re
import subprocess
import sys

import pytest
import warm
from conftest import ROOT
from support.document_commands import Desk

SMALLER = {
    "TRAIN__NUM_EPOCHS=EPOCHS, quiet": "TRAIN__NUM_EPOCHS=1, TRAIN__WARMUP_EPOCHS=0, quiet",
    "EPOCHS = 10": "EPOCHS = 2",
    "COUNT = 400": "COUNT = 64",
    '"MODEL.DEPTH": 4': '"MODEL.DEPTH": 1',
}
# the last reads what the second leaves
NAMES = ["first_run", "finetune_own_pictures", "look_at_attention"]


def cells(name, kind):
    book = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in book["cells"] if cell["cell_type"] == kind]


def program(name):
    """A notebook's code as a program, which ends where a line of the shell fails."""
    code = "\n".join("".join(cell["source"]) for cell in cells(name, "code"))
    for usual, small in SMALLER.items():
        code = re.sub(rf"{usual}\b", small, code)
    shell = "subprocess.run(['bash', '-o', 'pipefail', '-c', f'''\\1'''], env=ENV, check=True)"
    code = re.sub(r"^!(.*)$", shell, re.sub(r"\\\n\s*", "", code), flags=re.M)
    # What it starts shall not see what Paddle's import, in the warm server, has set.
    return f"import matplotlib, subprocess\nmatplotlib.use('agg')\nENV = {warm.environment()}\n{code}\n"


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    desk = Desk(tmp_path_factory.mktemp("notebooks"))
    (desk.folder / "books").mkdir()  # as examples/, which is a link here
    return desk


def run(desk, name):
    (desk.folder / "books" / f"{name}.py").write_text(program(name))
    return desk.type(f"cd books && python {name}.py").printed


def result(desk, name):
    return json.loads((desk.folder / "output" / name / "result.json").read_text())


@pytest.mark.long
def test_a_first_run(desk):
    printed = run(desk, "first_run")
    found = result(desk, "first_run")
    assert f"{found['acc1']:.2f} % of 364 digits are right" in printed
    assert "'split': 'val', 'step': 44, 'epoch': 1," in printed


@pytest.mark.long
def test_fine_tuning_and_looking(desk):
    printed = run(desk, "finetune_own_pictures")
    trained = result(desk, "finetuned")
    evaluated = result(desk, "finetuned_evaluated")
    assert evaluated["acc1"] == trained["best"]["acc1"]
    assert list(trained["class_acc"]) == [
        "flower_bottom",
        "flower_top",
        "temple_bottom",
        "temple_top",
    ]
    assert f"{evaluated['acc1']:.1f} % of 16 pictures are right" in printed
    assert "tensors loaded from ../output/pretrained/checkpoints/best/model.safetensors" in printed
    assert "classifier initialised randomly" in printed
    run(desk, "look_at_attention")
    pictures = {file.stem for file in (desk.folder / "output").glob("*.png")}
    assert pictures == {"attention", "rollout", "cam"}


def test_a_program_draws_where_a_notebook_starts_it():
    """Jupyter names its own backend to all that it starts, which other interpreters may lack."""
    code = "import errors, matplotlib; print(matplotlib.get_backend())"
    environment = os.environ | {"MPLBACKEND": "module://of_another_interpreter"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("agg\n", "")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_of_a_run_from_top_to_bottom(name):
    of_code = cells(name, "code")
    assert [cell["execution_count"] for cell in of_code] == list(range(1, len(of_code) + 1))
    outputs = [output for cell in of_code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    shown = [
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ]
    assert shown
    assert max(len(base64.b64decode(picture)) for picture in shown) <= 150_000
    printed = json.dumps(outputs)
    assert not [word for word in ("error: ", "stderr", "site-packages") if word in printed]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebooks_links_lead_somewhere(name):
    text = "".join("".join(cell["source"]) for cell in cells(name, "markdown"))
    found = re.findall(r"\]\(([^)]+)\)", text)
    assert found
    assert [link for link in found if not (ROOT / "examples" / link).exists()] == []
