"""Published folders: the same logits here, timm's config.json, and what the card says."""

import csv
import json
import os
import subprocess
import sys
from typing import ClassVar

import numpy as np
import paddle
import pytest
import warm
import yaml
from conftest import ROOT
from golden.timm_models import CASES
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.numpy import load_file
from support.cards import table
from support.finished_runs import LABELS, make_run
from support.servers import write_checkpoint

from config import default_values, get_config
from errors import InputError, RunError
from inference import Predictor, publishing
from inference.recipe import recipe
from inference.run_evaluation import evaluation_of, training_of
from models import build_model
from settings.configuration import leaves
from training.checkpoint import describe
from training.checkpoint.calibration import Calibration, PredictionSets, Rejection
from training.checkpoint.description import METADATA
from training.report.statistics import wilson
from weights import file_arrays
from weights.formats import read_metadata, write_weights
from weights.hub import read_config

# An interpreter with torch, timm and transformers, to compare with them, to compare with them, of which the tests' environment has none.
PEER = os.environ.get("PEER_PYTHON")
HOSTILE = [
    "---",
    "a|b",
    "<script>x</script>",
    "[x](http://evil)",
    "`#",
    "*b*",
    "ü",
    "w w",
    "{}",
    "\\",
]


def checkpoint(file, name="vit_digits", options=(), classes=(), task="classification"):
    """Writes random weights of a model, whose norms and statistics are random, too."""
    paddle.seed(0)
    words = [*options, "MODEL.NUM_CLASSES", str(len(classes) or 5)]
    config = get_config(name, words)
    model = build_model(config)
    rng = np.random.default_rng(0)
    arrays = {}
    for key, array in file_arrays(model).items():
        drawn = array + 0.02 * rng.normal(size=array.shape)
        if key.endswith("running_var"):
            drawn = rng.uniform(0.5, 1.5, array.shape)
        arrays[key] = np.asarray(drawn, array.dtype)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_weights(file, arrays, {METADATA: describe(config, list(classes), task).to_json()})
    return file


def publish(file, target, **given):
    source = publishing.read_source(str(file))
    given.setdefault("training", training_of(source.file))
    return publishing.publish(source, target, given.pop("name", target.name), **given)


@pytest.mark.smoke
def test_the_folder_gives_the_same_bits_here(tmp_path):
    file = checkpoint(tmp_path / "w.safetensors", classes=HOSTILE)
    compared = publish(file, tmp_path / "published", license_name="MIT")
    assert compared == ["paddle-vit-toolkit: logits of 4 random images are identical"]
    images = np.random.default_rng(1).integers(0, 256, (3, 8, 8, 1), np.uint8)
    predictors = [Predictor(file), Predictor(tmp_path / "published")]
    first, second = (predictor.logits(images) for predictor in predictors)
    np.testing.assert_array_equal(first, second)
    assert np.ptp(first) > 0.01
    assert predictors[1].classes == HOSTILE
    assert vars(predictors[0].config.DATA) == vars(predictors[1].config.DATA)
    names = {entry.name for entry in (tmp_path / "published").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    with safe_open(tmp_path / "published" / "model.safetensors", "np") as stored:
        # transformers refuses a file without it.
        assert stored.metadata()["format"] == "pt"
    # config.json alone says as much of the images.
    stored = read_config(tmp_path / "published")
    assert stored["architecture"] == "vit_tiny_patch16_224"
    assert stored["model_args"]["depth"] == 4
    assert (stored["input_size"], stored["mean"], stored["crop_pct"]) == ([1, 8, 8], [0.5], 1.0)
    assert stored["label_names"] == HOSTILE
    assert (stored["classifier"], stored["first_conv"]) == ("head", "patch_embed.proj")


def test_a_card_of_weights_without_an_evaluation(tmp_path):
    file = checkpoint(tmp_path / "w.safetensors", classes=HOSTILE)
    publish(file, tmp_path / "published")
    card = ModelCard.load(tmp_path / "published" / "README.md")
    assert card.data.license == "unknown"
    assert (card.data.library_name, card.data.pipeline_tag) == ("timm", "image-classification")
    assert card.data.eval_results is None
    assert [row[1] for row in table(card.text, "output")] == HOSTILE
    assert "<script>" not in card.text
    assert "[x](" not in card.text
    assert "These weights weren't evaluated." in card.text
    assert (
        "The licence isn't known, because none was given when this model was published."
        in card.text
    )
    assert "It wasn't loaded by timm or transformers when this card was made." in card.text
    assert str(tmp_path) not in card.content


@pytest.fixture
def run(tmp_path):
    """A finished run of 200 images, whose best checkpoint is that of its last epoch."""
    folder, accuracy = make_run(tmp_path / "RUN", 0.8)
    checkpoint(folder / "checkpoints" / "epoch_0002" / "model.safetensors", classes=HOSTILE)
    (folder / "checkpoints" / "best").symlink_to("epoch_0002")
    (folder / "classes.json").write_text(json.dumps(HOSTILE))
    result = json.loads((folder / "result.json").read_text())
    result["weights"] = str(folder / "checkpoints" / "epoch_0002")
    result["best"]["checkpoint"] = "epoch_0002"
    result["versions"] = {"toolkit": "0.1.0", "paddle": "<b>3</b>"}
    result["environment"] = {"devices": ["cpu", "cpu"]}
    (folder / "result.json").write_text(json.dumps(result))
    return folder, accuracy


def test_the_numbers_are_those_of_the_runs_evaluation(tmp_path, run):
    folder, accuracy = run
    file = folder / "checkpoints" / "best" / "model.safetensors"
    evaluation = evaluation_of(file)
    publish(folder, tmp_path / "published", evaluation=evaluation, license_name="cc-by-4.0")
    card = ModelCard.load(tmp_path / "published" / "README.md")
    assert card.data.license == "cc-by-4.0"
    found = {result.metric_type: result for result in card.data.eval_results}
    assert found["accuracy"].metric_value == round(accuracy, 4)
    assert found["accuracy"].dataset_type == "digits"
    right = round(2 * accuracy)
    low, high = (f"{100 * bound:.2f}" for bound in wilson(right, 200))
    rows = {row[0]: row[1:] for row in table(card.text, "metric")}
    assert rows["accuracy, top 1 (%)"] == [f"{accuracy:.2f}", f"{low} to {high}"]
    # Of each class, from the table of predictions.
    with open(folder / "predictions.csv", newline="") as lines:
        predictions = list(csv.DictReader(lines))
    for number, row in enumerate(table(card.text, "class")):
        own = [one for one in predictions if int(one["label"]) == number]
        hits = sum(one["label"] == one["predicted"] for one in own)
        assert row[:3] == [HOSTILE[number], str(number), str((number == LABELS).sum())]
        assert row[3] == f"{100 * hits / len(own):.2f}"
        low, high = (f"{100 * bound:.2f}" for bound in wilson(hits, len(own)))
        assert row[4] == f"{low} to {high}"
    # Each probability is 0.5.
    error = abs(accuracy - 50)
    assert f"The expected calibration error is {error:.2f} %" in card.text
    assert table(card.text, "probability")[0][1:] == ["200", "50.0", f"{accuracy:.1f}"]
    assert evaluation.chose
    assert "The best checkpoint was chosen on the same images" in card.text
    assert "-ngpus=2" in card.text
    assert "<b>" not in card.text
    assert "sample 1" not in card.content
    assert str(tmp_path) not in card.content


def test_the_settings_make_the_same_configuration_again(tmp_path, run):
    folder, _ = run
    evaluation = evaluation_of(folder / "checkpoints" / "best" / "model.safetensors")
    publish(folder, tmp_path / "published", evaluation=evaluation)
    written = dict(leaves(get_config(tmp_path / "published" / "training.yaml")))
    expected = dict(leaves(evaluation.run.config))
    default = default_values(evaluation.run.config)
    other = {key for key in expected if written[key] != expected[key]}
    assert other == {"OUTPUT", "REPORT"}
    assert all(written[key] == default[key] for key in other)
    assert str(tmp_path) not in (tmp_path / "published" / "training.yaml").read_text()


def test_a_recipe_names_no_folder_of_this_machine():
    words = [
        "MODEL.PRETRAINED", "/home/somebody/weights/base.safetensors", "OUTPUT", "/home/somebody/run",
        "DATA.DATASET", "folder", "DATA.DATA_PATH", "/home/somebody/flowers", "TRAIN.BASE_LR", "0.5",
    ]  # fmt: skip
    found = recipe(get_config("vit_digits", words))
    assert found["MODEL.PRETRAINED"] == (None, "base.safetensors")
    assert found["TRAIN.BASE_LR"][1] == 0.5
    assert "somebody" not in str(found)
    words[1] = "hf-hub:timm/vit_tiny_patch16_224.augreg_in21k"
    assert recipe(get_config("vit_digits", words))["MODEL.PRETRAINED"][1] == words[1]


def test_an_evaluation_of_other_weights_is_not_theirs(tmp_path, run):
    folder, accuracy = run
    best = folder / "checkpoints" / "best" / "model.safetensors"
    other = checkpoint(tmp_path / "other.safetensors", classes=HOSTILE)
    assert evaluation_of(other) is None
    with pytest.raises(InputError, match=r"RUN is an evaluation of .*epoch_0002, expected one of"):
        evaluation_of(other, folder)
    assert evaluation_of(best, folder).metrics["acc1"] == accuracy
    # The run went on after its best epoch.
    result = json.loads((folder / "result.json").read_text())
    result["weights"] = str(folder / "checkpoints" / "epoch_0003")
    result["best"]["acc1"] = 82.5
    (folder / "result.json").write_text(json.dumps(result))
    found = evaluation_of(best)
    assert (found.metrics["acc1"], found.predictions, found.chose) == (82.5, None, True)
    publish(folder, tmp_path / "published", evaluation=found)
    card = ModelCard.load(tmp_path / "published" / "README.md")
    low, high = (f"{100 * bound:.2f}" for bound in wilson(165, 200))
    assert table(card.text, "metric")[0] == ["accuracy, top 1 (%)", "82.50", f"{low} to {high}"]
    assert "## Calibration" not in card.text
    assert "the run's last evaluation is of other weights" in card.text
    assert [row[1] for row in table(card.text, "output")] == HOSTILE
    # An evaluation of the same images by -eval: they chose the weights nevertheless.
    (tmp_path / "EVALUATED").mkdir()
    for name in ("config.yaml", "predictions.csv", "metrics.jsonl"):
        (tmp_path / "EVALUATED" / name).write_text((folder / name).read_text())
    again = {key: value for key, value in result.items() if key != "best"}
    again |= {"weights": str(folder / "checkpoints" / "best")}
    (tmp_path / "EVALUATED" / "result.json").write_text(json.dumps(again))
    assert evaluation_of(best, tmp_path / "EVALUATED").chose
    # A run that was moved since is known by the checkpoint's name.
    result["weights"] = "/gone/checkpoints/epoch_0002"
    (folder / "result.json").write_text(json.dumps(result))
    assert evaluation_of(best).predictions is not None


def test_a_calibration_is_told_and_kept(tmp_path):
    file = checkpoint(tmp_path / "w.safetensors")
    stored = json.loads(read_metadata(file)[METADATA])
    sets = [PredictionSets(level, 0.0, 1, [0.5]) for level in (0.8, 0.95)]
    rejections = [Rejection("energy", 0.1, -3.0), Rejection("knn", 0.1, 0.5)]
    chosen = Calibration("temperature", [1.25], [], 1234, sets, rejections, 5, "a" * 64)
    stored["calibration"] = chosen.as_json()
    write_weights(file, dict(load_file(file)), {METADATA: json.dumps(stored)})
    publish(file, tmp_path / "published")
    text = (tmp_path / "published" / "README.md").read_text()
    assert "tools/calibrate.py determined the following on 1,234 held-out images." in text
    assert "The logits were divided by a temperature of 0.8." in text
    assert "-coverage LEVEL`: 0.8, 0.95." in text
    assert "-reject LEVEL`: 0.1." in text
    assert "`-score knn` isn't available" in text
    assert "no temperature was fitted" not in text
    assert Predictor(tmp_path / "published").calibration == chosen


def test_several_labels(tmp_path):
    file = checkpoint(tmp_path / "w.safetensors", classes=["a", "b", "c"], task="multilabel")
    publish(file, tmp_path / "published")
    stored = json.loads((tmp_path / "published" / "config.json").read_text())
    assert stored["problem_type"] == "multi_label_classification"
    text = (tmp_path / "published" / "README.md").read_text()
    assert "predicts any number of classes of 3" in text
    assert ".sigmoid()" in text


def test_a_model_that_timm_lacks(tmp_path):
    options = ["MODEL.NORM_EPS", "1e-5"]
    file = checkpoint(tmp_path / "w.safetensors", options=options)
    publish(file, tmp_path / "published", peer=["/bin/false"])
    stored = json.loads((tmp_path / "published" / "config.json").read_text())
    assert stored["architecture"] == "paddle_vit_toolkit_vit_digits"
    assert "model_args" not in stored
    card = ModelCard.load(tmp_path / "published" / "README.md")
    assert card.data.library_name == "paddle-vit-toolkit"
    assert "timm" not in card.data.tags
    assert "timm and transformers can't read it: MODEL.NORM\\_EPS is 1e-05" in card.text
    assert Predictor(tmp_path / "published").config.MODEL.NORM_EPS == 1e-5


PROGRAM = """
import json, sys
import numpy as np
assert np.load(sys.argv[2])["images"].shape == (4, 1, 8, 8)
assert json.load(open(sys.argv[1] + "/config.json"))["num_classes"] == 5
print("a line of another library's")
print({answer!r})
"""


def peer(tmp_path, logits, more=None):
    """Returns the command of a program that answers as tools/checks/published_peer.py does."""
    answer = {"timm": {"version": "1.0.31", "logits": logits.tolist()}, **(more or {})}
    program = tmp_path / "peer.py"
    program.write_text(PROGRAM.format(answer=json.dumps(answer)))
    return [sys.executable, str(program)]


def test_another_toolkits_logits_are_compared(tmp_path):
    file = checkpoint(tmp_path / "w.safetensors")
    predictor = Predictor(file)
    logits = predictor.logits(publishing._images(predictor.config))
    rounded = logits + 1e-6 * np.ptp(logits)
    compared = publish(file, tmp_path / "published", peer=peer(tmp_path, rounded))
    assert compared[1] == "timm 1.0.31: logits of 4 random images differ by 1.0e-06 of their range"
    assert compared[1].split(":")[0] in (tmp_path / "published" / "README.md").read_text()
    nothing = {"transformers": {"error": "OSError: no"}}
    for given, message in [
        ((logits + 0.1,), r"^timm 1.0.31's logits of the folder differ by \S+ of their range"),
        ((logits, nothing), "^transformers can't read the folder \\(OSError: no\\)"),
        ((logits * np.nan,), "^timm 1.0.31's logits of the folder differ by nan"),
        (["/bin/false"], "^-python /bin/false returned no logits"),
        (["/absent"], "^-python /absent returned no logits"),
    ]:  # fmt: skip
        asked = given if isinstance(given, list) else peer(tmp_path, *given)
        with pytest.raises((RunError, InputError), match=message):
            publish(file, tmp_path / "failed", peer=asked)
    # Nothing is left of a folder that isn't what it should be.
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"w.safetensors", "peer.py", "published"}


def test_what_is_no_classifier_is_refused(tmp_path):
    file = write_checkpoint(tmp_path / "w.safetensors", task="mae")
    with pytest.raises(InputError, match="was trained by TASK mae, which doesn't predict classes"):
        publishing.read_source(str(file))
    file = write_checkpoint(tmp_path / "w.safetensors")
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="there exists; choose another folder, or remove it"):
        publish(file, tmp_path / "there")


# ---------------------------------------------------------------- the Hub


class Api:
    """Stands for huggingface_hub's client: no test was run against the Hub itself."""

    calls: ClassVar[list] = []
    failure: ClassVar[Exception | None] = None

    def create_repo(self, repo_id, **given):
        if self.failure:
            raise self.failure
        self.calls.append((repo_id, given))
        return f"https://hub.example/{repo_id}"

    def upload_folder(self, *, folder_path, **given):
        names = sorted(entry.name for entry in folder_path.iterdir())
        self.calls.append((names, given))


def test_a_folder_is_uploaded_in_one_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    Api.calls.clear()
    assert publishing.repository("hf-hub:org/digits") == "org/digits"
    file = checkpoint(tmp_path / "w.safetensors")
    publish(file, tmp_path / "published")
    where = publishing.upload(tmp_path / "published", "org/digits", private=True)
    assert where == "https://hub.example/org/digits"
    assert Api.calls == [
        ("org/digits", {"private": True, "exist_ok": True}),
        (
            ["README.md", "config.json", "model.safetensors"],
            {"repo_id": "org/digits", "commit_message": "Publish by paddle-vit-toolkit"},
        ),
    ]


def test_an_error_of_the_hub_tells_no_secret(tmp_path, monkeypatch):
    class Response:
        status_code = 403

    failure = ValueError("Authorization: Bearer hf_secret")
    failure.response = Response
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(Api, "failure", failure)
    with pytest.raises(RunError) as caught:
        publishing.upload(tmp_path, "org/digits", private=False)
    assert str(caught.value).startswith(
        "org/digits couldn't be uploaded (ValueError, status 403); log in"
    )
    assert "hf_" not in str(caught.value)
    for name in ("hf-hub:digits", "hf-hub:a/b/c", "hf-hub:", "hf-hub:org/a b", "hf-hub:org/--"):
        with pytest.raises(InputError, match="expected hf-hub:ORGANISATION/NAME"):
            publishing.repository(name)


# ---------------------------------------------------------------- the command


def command(folder, *words):
    done = subprocess.run(
        [warm.python(), str(ROOT / "tools" / "publish.py"), *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command(tmp_path, run):
    status, told, errors = command(tmp_path, "RUN", "published", "-license=mit", "-check")
    assert status == 0, errors
    assert told.splitlines() == [
        "paddle-vit-toolkit: logits of 4 random images are identical",
        "published: README.md, config.json, model.safetensors, training.yaml",
    ]
    text = (tmp_path / "published" / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["model-index"][0]["name"] == "published"
    assert table(text, "")[0] == ["images", "1,433", "364"]
    before = sorted(tmp_path.rglob("*"))
    for words, message in [
        (["RUN", "published"], "error: published exists; choose another folder, or remove it\n"),
        (["RUN", "new", "-private"], "error: -private is for hf-hub:ORG/NAME; leave it out\n"),
        (["RUN", "hf-hub:x"], "error: hf-hub:x: expected hf-hub:ORGANISATION/NAME\n"),
        (["absent", "new"], "error: no weights at absent: no such file or folder"),
        (["digits", "new", "-check"], "error: -check needs the images of a run, but these weights"),
    ]:  # fmt: skip
        status, _, errors = command(tmp_path, *words)
        assert (status, errors.startswith(message), errors.count("\n")) == (2, True, 1), errors
    assert sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------- other toolkits


@pytest.mark.skipif(not PEER, reason="PEER_PYTHON names no interpreter with timm and transformers")
@pytest.mark.parametrize("case", CASES)
def test_timm_and_transformers_read_it(tmp_path, case):
    name, options, *_ = CASES[case]
    file = checkpoint(tmp_path / "w.safetensors", name, options, ["a", "b", "c", "d", "e"])
    predictor = Predictor(file)
    logits = predictor.logits(publishing._images(predictor.config))
    # Logits that don't change from image to image would show nothing.
    assert np.ptp(logits, axis=0).max() > 0.002 * np.ptp(logits)
    program = str(ROOT / "tools" / "checks" / "published_peer.py")
    compared = publish(file, tmp_path / "published", peer=[PEER, program])
    print(case, compared[1:])
    assert [line.split()[0] for line in compared] == ["paddle-vit-toolkit:", "timm", "transformers"]
