"""What becomes of the checkpoints of tasks that aren't the toolkit's own.

A copy of the toolkit gets two more tasks: one whose network has an encoder and gives no classes, and
one with classes of its own. Each command takes their checkpoints, or says in a line why it can't.
"""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import warm
from conftest import ROOT, TINY, without
from PIL import Image
from safetensors.numpy import load_file
from support.mask_files import write_masks
from support.mask_models import OPTIONS

from settings.registry import Component, tasks
from settings.tasks import answers_of

TASKS = ("masked", "rotation")
TRAINED = [*without(TINY, "MODEL.NUM_CLASSES", "REPORT"), "TRAIN.MODEL_EMA", "True"]
NO_CLASSES = "was trained by TASK masked, which doesn't predict classes; compute its"
# The words of a command, its exit status, and a pattern of what it prints.
MASKED = [
    ("tools/predict.py {run} {images}", 2, NO_CLASSES),
    ("tools/predict.py {run} {images} -ngpus 2", 2, NO_CLASSES),
    ("tools/predict.py {run} {images} -o TASK classification", 2, "are for TASK masked, found"),
    ("tools/serve.py {run} -port 0", 2, NO_CLASSES),
    ("tools/visualize.py predictions {run} {images} -output {out}/v", 2, NO_CLASSES),
    ("tools/visualize.py cam {run} {images} -output {out}/v", 2, "use attent"),
    ("tools/visualize.py attention {run} {images} -output {out}/v", 0, "8 pictures of attention"),
    ("tools/export_model.py -pretrained {run} -output {out}/x -format paddlex", 2, NO_CLASSES),
    ("tools/convert_weights.py {run} {out}/x.npz", 0, "tensors of .*left out: 2 tensors of deco"),
    ("tools/robustness.py -output={out} -pretrained={best}", 2, "TASK is masked, expected classi"),
    ("tools/show_batch.py -cfg={run}/config.yaml -output={out}/x.png", 0, "x.png is written"),
    ("tools/compare_runs.py {run} {run}-2", 0, "not tested: TASK masked doesn't predict classes"),
    ("examples/gather_predictions.py -output {out}/x.csv -pretrained {best}", 2, "TASK is masked"),
    ("main_single_gpu.py -eval -pretrained={best} -output={out}/x", 0, r"summary: loss: 0\.\d+;"),
    (
        "main_single_gpu.py -eval -pretrained={best} -output={out}/x -o TASK classification",
        2,
        "best: the weights are for TASK masked, found TASK classification; pass -o TASK masked\n$",
    ),
    (
        "main_single_gpu.py -eval -pretrained={best} -output={out}/x -o EVAL_ENGINE inference",
        2,
        "EVAL_ENGINE has no effect without TASK classification or fixmatch or multilabel",
    ),
]
ROTATION = [
    ("tools/predict.py {run} {images} -format csv", 0, r'/0\.png",1,\d,"(0|90|180|270)",0\.\d+,\n'),
    ("tools/export_model.py -pretrained {run} -output {out}/x", 0, "the best class is the same on"),
    ("tools/visualize.py cam {run} {images} -output {out}/v", 0, "8 pictures of cam"),
    ("main_single_gpu.py -eval -pretrained={best} -output={out}/x", 0, r"summary: loss: 1\.\d+;"),
    ("tools/show_batch.py -cfg={run}/config.yaml -output={out}/x.png", 0, "x.png is written"),
]
NO_IMAGE = "TASK segmentation, which classifies pixels, not images; use tools/predict.py"
SEGMENTATION = [
    ("tools/predict.py {run} {images} -format csv", 0, r'/0\.png",1,\d,"[a-z]+",\d+\.\d+,\n'),
    (
        "tools/predict.py {run} {images} -format pictures -output {out}/p",
        2,
        "use -format overlays",
    ),
    ("tools/visualize.py predictions {run} {images} -output {out}/v", 2, NO_IMAGE),
    ("tools/visualize.py cam {run} {images} -output {out}/v", 2, NO_IMAGE),
    ("tools/visualize.py attention {run} {images} -output {out}/v", 2, NO_IMAGE),
    (
        "tools/features.py {run} {images} -output {out}/f.npy",
        2,
        "pass the YAML file of its encoder",
    ),
    (
        "tools/export_model.py -pretrained {run} -output {out}/x",
        0,
        r"the class is the same in 100\.0000 % of the pixels",
    ),
    ("tools/export_model.py -pretrained {run} -output {out}/x -format paddlex", 2, NO_IMAGE),
    (
        "tools/robustness.py -output={out} -pretrained={best}",
        2,
        "TASK is segmentation, expected cl",
    ),
    ("examples/gather_predictions.py -output {out}/x.csv -pretrained {best}", 2, "TASK is segment"),
    ("main_single_gpu.py -eval -pretrained={best} -output={out}/x", 0, r"summary: mIoU: \d+\."),
    (
        "main_single_gpu.py -eval -pretrained={best} -output={out}/x -o EVAL_ENGINE inference",
        2,
        "EVAL_ENGINE has no effect without TASK classification or fixmatch or multilabel",
    ),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The copy, with a run of each task and some images."""
    folder = tmp_path_factory.mktemp("answers")
    ignored = shutil.ignore_patterns(".*", "output", "log*", "docs", "tests", "__pycache__")
    shutil.copytree(ROOT, folder / "toolkit", ignore=ignored)
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    for index in range(8):
        pixels = rng.integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
    for name in TASKS:
        source = ROOT / "tests" / "support" / f"{name}_task.py"
        shutil.copy(source, folder / "toolkit" / "training" / f"{name}.py")
        done = run(
            folder, "main_single_gpu.py", f"-output={folder / name}", "-o", "TASK", name, *TRAINED
        )
        assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "masked", folder / "masked-2")
    write_masks(folder / "shapes", train=4, val=3)
    done = run(
        folder, "main_single_gpu.py", f"-output={folder / 'segmentation'}",
        f"-data_path={folder / 'shapes'}", "-o", *OPTIONS, "DATA.BATCH_SIZE", "4",
        "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.NUM_EPOCHS", "1", "TRAIN.ACCUM_ITER", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def run(copy, *words):
    return subprocess.run(
        [warm.python(), *map(str, words)],
        cwd=copy / "toolkit",
        capture_output=True,
        text=True,
        timeout=300,
    )


def features(copy, weights, out, *words):
    done = run(copy, "tools/features.py", weights, copy / "images", "-output", out, *words)
    assert done.returncode == 0, done.stderr
    return np.load(out)


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "command", "status", "told"),
    [
        *(("masked", *row) for row in MASKED),
        *(("rotation", *row) for row in ROTATION),
        *(("segmentation", *row) for row in SEGMENTATION),
    ],
)
def test_each_command_takes_a_checkpoint_or_says_why_not(
    copy, tmp_path, task, command, status, told
):
    folder = copy / task
    words = command.format(
        run=folder, best=folder / "checkpoints" / "best", out=tmp_path, images=copy / "images"
    )
    done = run(copy, *words.split())
    printed = done.stdout + done.stderr
    assert done.returncode == status, printed
    assert re.search(told, printed, re.DOTALL), printed
    assert "Traceback" not in printed
    if status == 2:
        assert printed.count("error: ") == 1
        assert not list(tmp_path.iterdir())


@pytest.mark.smoke
def test_weights_and_their_description_are_the_encoders(copy, tmp_path):
    best = copy / "masked" / "checkpoints" / "best"
    stored = load_file(best / "model.safetensors")
    # The training's own file has all that it needs to go on.
    assert {name.partition(".")[0] for name in stored} == {"encoder", "decoder", "mask_token"}
    values = features(copy, copy / "masked", tmp_path / "a.npy")
    assert values.shape == (8, 16)
    assert np.ptp(values, 0).min() > 0
    # The same from other forms of these weights, without -cfg, and with that of a classifier.
    done = run(copy, "tools/convert_weights.py", best, tmp_path / "b.safetensors")
    assert done.returncode == 0, done.stderr
    converted = load_file(tmp_path / "b.safetensors")
    assert converted.keys() == {
        name.removeprefix("encoder.") for name in stored if name.startswith("encoder.")
    }
    assert (features(copy, tmp_path / "b.safetensors", tmp_path / "b.npy") == values).all()
    average = copy / "masked" / "checkpoints" / "best_ema.safetensors"
    assert features(copy, average, tmp_path / "c.npy").shape == (8, 16)
    classifier = tmp_path / "classifier.yaml"
    text = (copy / "masked" / "config.yaml").read_text()
    text = text.replace("TASK: masked", "TASK: classification")
    classifier.write_text(text.replace("NUM_CLASSES: 0", "NUM_CLASSES: 10"))
    alone = tmp_path / "alone.safetensors"
    shutil.copy(best / "model.safetensors", alone)
    assert (features(copy, alone, tmp_path / "d.npy", "-cfg", classifier) == values).all()


@pytest.mark.long
def test_an_export_of_a_model_without_classes_gives_its_features(copy, tmp_path):
    from inference.backends import open_export

    done = run(
        copy, "tools/export_model.py", "-pretrained", copy / "masked", "-output", tmp_path / "x"
    )
    assert done.returncode == 0, done.stderr
    assert "left out: 2 tensors of decoder, 1 of mask_token\n" in done.stdout
    assert "the outputs are features, because the model has no classes\n" in done.stdout
    assert "features differ from the eager ones by" in done.stdout
    manifest = json.loads((tmp_path / "x" / "preprocess.json").read_text())
    assert (manifest["task"], manifest["classes"], manifest["features"]) == ("masked", [], True)
    # This toolkit doesn't know the task, and says so; the copy runs the graph.
    code = (
        "import sys, numpy; from inference.backends import open_export\n"
        "print(open_export(sys.argv[1])(numpy.zeros([3, 1, 8, 8], 'float32')).shape)"
    )
    done = run(copy, "-c", code, tmp_path / "x")
    assert done.stdout == "(3, 16)\n", done.stderr
    with pytest.raises(Exception, match="task is 'masked', expected one of .*classification, "):
        open_export(tmp_path / "x")
    done = run(copy, "tools/predict.py", tmp_path / "x", copy / "images")
    assert (done.returncode, "export a classifier" in done.stderr) == (2, True)


@pytest.mark.long
def test_a_training_goes_on_from_a_checkpoint_and_a_classifier_begins_with_it(copy, tmp_path):
    best = copy / "masked" / "checkpoints" / "best"
    words = [f"-pretrained={best}", "-o", "TRAIN.NUM_EPOCHS", "1"]
    done = run(copy, "main_single_gpu.py", f"-output={tmp_path / 'on'}", *words)
    assert done.returncode == 0, done.stderr
    stored = load_file(best / "model.safetensors")
    assert f" {len(stored)} tensors loaded from" in done.stdout
    assert "left out" not in done.stdout
    words += ["TASK", "classification", "MODEL.NUM_CLASSES", "auto"]
    done = run(copy, "main_single_gpu.py", f"-output={tmp_path / 'tuned'}", *words)
    assert done.returncode == 0, done.stderr
    told = (
        "left out: 2 tensors of decoder, 1 of mask_token; "
        "classifier initialised randomly: none in the file, 10 in the model\n"
    )
    assert told in done.stdout
    assert "acc1" in json.loads((tmp_path / "tuned" / "result.json").read_text())
    done = run(copy, "tools/predict.py", tmp_path / "tuned", copy / "images", "-format", "csv")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_two_ranks_leave_a_report_without_classes_and_with_pictures(copy, tmp_path):
    words = ["-ngpus=2", f"-output={tmp_path / 'run'}", "-o", "TASK", "masked", *TRAINED]
    done = run(copy, "main_multi_gpu.py", *words)
    assert done.returncode == 0, done.stderr
    assert "isn't written" not in done.stdout
    assert "curves.png, reconstructions.png, report.html, " in done.stdout
    assert not list((tmp_path / "run").glob("*.csv"))
    from training.report import BATCH_TITLE

    page = (tmp_path / "run" / "report.html").read_text()
    titles = [
        "Curves",
        "Reconstructions",
        BATCH_TITLE,
        "Configuration: changed keys",
        "Environment",
    ]
    assert re.findall("<h2>([^<]*)", page) == [*titles, "Speed"]
    pictures = ["loss", "learning rate"]
    assert re.findall('<img alt="([^"]*)"', page)[:2] == pictures


def test_a_picture_that_is_none_does_not_get_into_a_report(tmp_path):
    from errors import InputError
    from training.report import _drawn

    assert _drawn("Reconstructions", tmp_path / "reconstructions.png") == ""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "reconstructions.png").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="reconstructions.png: it isn't a PNG"):
        _drawn("Reconstructions", tmp_path / "reconstructions.png")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("given", "answers"),
    [
        ({}, "softmax"),
        ({"answers": "sigmoid"}, "sigmoid"),
        ({"answers": ""}, ""),
        ({"columns": ""}, ""),
        ({"columns": "mask"}, ""),
        ({"columns": "", "classes": "0 90 180 270"}, "softmax"),
    ],
)
def test_what_outputs_give_is_declared_or_follows(monkeypatch, given, answers):
    monkeypatch.setitem(tasks.components, "new", Component("training.new", given, "", {}))
    assert answers_of("new") == answers
