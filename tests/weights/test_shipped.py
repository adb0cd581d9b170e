"""The weights that come with the toolkit: found by name, the recorded bytes, and what they predict."""

import csv
import os
import subprocess
import sys

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT
from support.shipped_digits import CPU, FILE, cpu, halve, train

import ops
from errors import InputError
from inference import Predictor
from loading.sources import Split, digits
from models import create_model
from weights import find_weights, load_weights, save_weights
from weights.hub import SHIPPED, best_of_run
from weights.sums import read_sums, sha256_of

# Of the 364 validation images, after the training that was recorded: acc1 99.45.
RIGHT = 362


def logits(weights):
    """Returns the logits of the validation images, [364, 10], and their labels."""
    images, labels, _ = digits(Split("val")).read()
    return Predictor(weights).logits(images[..., None]), labels


def test_the_files_are_those_that_were_recorded():
    for file in SHIPPED.values():
        assert read_sums(file.parent)[file.name] == sha256_of(file)
        assert file.stat().st_size < 300_000


def test_a_damaged_file_is_refused(tmp_path, monkeypatch):
    content = bytearray(FILE.read_bytes())
    content[-1] ^= 1
    (tmp_path / FILE.name).write_bytes(content)
    (tmp_path / "SHA256SUMS").write_bytes(FILE.with_name("SHA256SUMS").read_bytes())
    monkeypatch.setitem(SHIPPED, "digits", tmp_path / FILE.name)
    with pytest.raises(InputError, match="its SHA-256 isn't the one in SHA256SUMS next to it"):
        load_weights(create_model("vit_digits"), "digits")


@pytest.mark.smoke
def test_the_name_gives_the_recorded_accuracy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_weights("digits") == best_of_run("digits") == FILE
    found, labels = logits("digits")
    assert (found.argmax(1) == labels).sum() == RIGHT
    # float16 keeps the answers of float32 on every image, and far from the next class's.
    top = np.sort(found, axis=1)
    assert (top[:, -1] - top[:, -2]).min() > 0.02


@pytest.mark.parametrize("name", ["digits", "digits.safetensors", "digits.npz"])
def test_a_file_or_folder_of_the_name_is_never_passed_over(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A link that leads nowhere counts, too.
    os.symlink("nowhere", name)
    message = f"^digits is the name of weights that are included in the toolkit, but {tmp_path}/{name} exists as well"
    with pytest.raises(InputError, match=message):
        find_weights("digits")
    os.unlink(name)
    (tmp_path / "digits").mkdir()
    model = create_model("vit_digits")
    save_weights(model, tmp_path / "digits" / "model.safetensors")
    with pytest.raises(InputError, match=f"pass {tmp_path}/digits, or {FILE}$"):
        Predictor("digits")
    assert find_weights(tmp_path / "digits") == tmp_path / "digits" / "model.safetensors"
    assert find_weights(FILE) == FILE


def test_pictures_of_digits_get_the_answers_of_the_evaluation(tmp_path):
    """What a newcomer types first: tools/make_digits.py, then tools/predict.py digits."""
    for words in (
        ["make_digits.py", "-output", "pictures"],
        ["predict.py", "digits", "pictures/val", "-top=1", "-output=answers.csv"],
    ):
        command = [warm.python(), str(ROOT / "tools" / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("pictures/train/*/*.png"))) == 1433
    found, labels = logits("digits")
    with open(tmp_path / "answers.csv", newline="") as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == 364
    # A folder's images are sorted by their class.
    order = np.argsort(labels, kind="stable")
    assert [int(row["class"]) for row in answers] == found.argmax(1)[order].tolist()
    exponentials = np.exp(found - found.max(1, keepdims=True))
    expected = (exponentials.max(1) / exponentials.sum(1))[order]
    np.testing.assert_allclose(
        [float(row["probability"]) for row in answers], expected, rtol=0, atol=1e-6
    )


def test_pictures_are_made_whole_and_never_over_others(tmp_path):
    (tmp_path / "there").mkdir()
    command = [sys.executable, str(ROOT / "tools" / "make_digits.py"), "-output", "there"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: there exists; choose another -output, or remove it\n"
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


@pytest.mark.slow
def test_the_recorded_training_makes_such_weights_again(tmp_path):
    """Another CPU rounds otherwise, so that the training ends with other bits there: then it is
    another run of the same recipe.
    """
    halve(train(tmp_path / "run"), tmp_path / "again.safetensors")
    shipped, labels = logits("digits")
    again, _ = logits(tmp_path / "again.safetensors")
    agreement = (again.argmax(1) == shipped.argmax(1)).mean()
    accuracy = (again.argmax(1) == labels).mean()
    print(f"agreement {100 * agreement:.2f} %, acc1 {100 * accuracy:.2f} %")
    # Other seeds agreed on 98.35 and 98.08 %.
    assert agreement >= 0.97
    assert accuracy >= 0.98
    if cpu() == CPU and ops.load() and paddle.__version__ == "3.3.1":
        assert sha256_of(tmp_path / "again.safetensors") == sha256_of(FILE)
