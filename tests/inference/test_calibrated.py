"""Calibrated weights as people make and use them: the command, predictions, exports, the server."""

import io
import json
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import warm
from PIL import Image
from sklearn.datasets import load_digits
from support.letters import letter
from support.linear_digits import CLASSES, write_linear_digits
from support.programs import ROOT
from support.servers import Served

from errors import InputError
from inference import Predictor
from inference.calibration import conformal, scaling
from inference.calibration.calibrate import Calibrator, Settings, calibrate, write
from inference.calibration.neighbours import FILE as NEIGHBOURS
from inference.exporting import write_export
from training.checkpoint import description_of
from training.checkpoint.description import METADATA
from weights.formats import open_weights, write_weights

TOOL = str(ROOT / "tools" / "calibrate.py")
DIGITS = [("DATA.DATASET", "digits")]


def command(tool, place, *words):
    """(exit status, standard output, standard error)."""
    done = subprocess.run(
        [warm.python(), str(ROOT / "tools" / tool), *map(str, words)],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with w.safetensors, and known/ and letters/ of eight pictures each."""
    root = tmp_path_factory.mktemp("place")
    write_linear_digits(root / "w.safetensors")
    (root / "known").mkdir()
    (root / "letters").mkdir()
    for number, image in enumerate(load_digits().images[-8:]):
        pixels = np.round(image * 255 / 16).astype(np.uint8)
        Image.fromarray(pixels).save(root / "known" / f"{number}.png")
    for number, text in enumerate("ABCDWXYZ"):
        letter(text, "DejaVuSans").save(root / "letters" / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def calibrated(place):
    """The folder that the command wrote, and what it printed."""
    words = ["w.safetensors", "-dataset=digits", "-output=calibrated", "-workers=0"]
    words += ["-outside", "letters", "-coverage=0.7,0.9,0.99", "-false_alarms=0.001,0.1"]
    status, out, err = command("calibrate.py", place, *words)
    assert (status, err) == (0, ""), err
    return place / "calibrated", out


@pytest.fixture(scope="module")
def figures(calibrated):
    return json.loads((calibrated[0] / "calibration.json").read_text())


def test_the_command_leaves_weights_figures_and_a_page(calibrated, figures):
    folder, out = calibrated
    assert {file.name for file in folder.iterdir()} == {
        "model.safetensors",
        NEIGHBOURS,
        "calibration.json",
        "report.html",
    }
    # The weights were twice as sure as they should be.
    assert figures["scaling"] == "temperature"
    assert 1.5 < 1 / figures["scale"][0] < 4
    assert figures["images"] == {"fitting": 91, "choosing": 91, "reported": 182}
    before = figures["reported"]["before"]
    after = figures["reported"]["after"]
    assert after["ece"] < before["ece"] / 1.5
    assert after["nll"] < before["nll"]
    assert after["accuracy"] == before["accuracy"]
    assert figures["fitting"]["after"]["nll"] <= figures["fitting"]["before"]["nll"]
    assert f"scaling: one temperature, {1 / figures['scale'][0]:.4g}\n" in out
    for words in ("coverage 0.7: the right class is in ", "knn, letters: AUROC ", "(8 images)"):
        assert words in out
    assert out.endswith("calibrated is written\n")
    page = (folder / "report.html").read_text()
    for words in ("Brier score", "70.0%", "AUROC", "By class"):
        assert words in page


def test_the_figures_are_those_of_the_other_half(place, calibrated, figures):
    """All of them are computed again here, from the logits of the two files of weights."""
    calibrator = Calibrator(place / "w.safetensors", data=DIGITS, workers=0)
    answers = calibrator.validation(needs_features=False)
    order = np.random.default_rng(0).permutation(364)
    half = order[182:]
    logits = answers.logits[half]
    labels = answers.labels[half]
    assert figures["reported"]["before"]["nll"] == pytest.approx(
        scaling.losses_of(logits, labels).mean(), rel=1e-9
    )
    right = logits.argmax(1) == labels
    assert figures["reported"]["before"]["accuracy"] == pytest.approx(100 * right.mean())
    found = Predictor(calibrated[0])
    temperature = 1 / figures["scale"][0]
    stored = found.calibration
    assert (stored.scaling, stored.images) == ("temperature", 182)
    chosen = order[91:182]
    scaled = answers.logits / temperature
    probabilities = np.exp(scaled - np.logaddexp.reduce(scaled, 1)[:, None])
    for sets, told in zip(stored.sets, figures["sets"], strict=True):
        scores = conformal.scores(probabilities[chosen], sets.penalty, sets.rank)
        of_label = scores[np.arange(91), answers.labels[chosen]]
        threshold = conformal.quantile(of_label, sets.coverage)
        if sets.coverage == 0.99:
            # 91 images are too few for it
            assert sets.thresholds == [None]
            assert told["size"] == 10
            continue
        assert sets.thresholds == pytest.approx([threshold], rel=1e-6)
        members = conformal.sets(probabilities[half], threshold, sets.penalty, sets.rank)
        covered = members[np.arange(182), labels]
        assert told["found"] == pytest.approx(100 * covered.mean())
        assert told["size"] == pytest.approx(members.sum(1).mean())
        one = told["by_class"]["3"]
        assert one["images"] == (labels == 3).sum()
        assert one["coverage"] == pytest.approx(100 * covered[labels == 3].mean())


def test_the_logits_are_divided_by_the_temperature(place, calibrated, figures):
    before = Predictor(place / "w.safetensors")
    after = Predictor(calibrated[0])
    pixels = np.stack([before.pixels(place / "known" / f"{i}.png") for i in range(8)])
    expected = before.logits(pixels) * figures["scale"][0]
    np.testing.assert_allclose(after.logits(pixels), expected, atol=1e-3)
    # only the classifier was changed
    with (
        open_weights(place / "w.safetensors") as one,
        open_weights(calibrated[0] / "model.safetensors") as other,
    ):
        differing = {
            name
            for name, array in one.arrays.items()
            if not np.array_equal(np.asarray(array), np.asarray(other.arrays[name]))
        }
    assert differing == {"head.weight", "head.bias"}


@pytest.mark.parametrize("kind", ["paddle", "onnx", "openvino"])
def test_an_export_gives_the_same_sets_and_rejections(place, calibrated, kind, tmp_path):
    if kind != "paddle":
        pytest.importorskip("onnx", reason="the extra export isn't installed")
    trained = Predictor(calibrated[0])
    write_export(
        trained.config,
        trained.model,
        tmp_path / kind,
        trained.classes,
        kind,
        calibrated=trained.calibration,
    )
    exported = Predictor(tmp_path / kind)
    assert exported.calibration == trained.calibration
    images = sorted((place / "known").iterdir()) + sorted((place / "letters").iterdir())
    for score in ("energy", "max_logit"):
        how = {"coverage": 0.9, "reject": 0.1, "score": score}
        expected = trained(images, **how)
        found = exported(images, **how)
        assert len({len(one.outputs) for one in expected}) > 1
        assert {one.unknown for one in expected} == {True, False}
        for one, other in zip(expected, found, strict=True):
            assert one.outputs == other.outputs
            assert one.unknown is other.unknown
            assert one.score == pytest.approx(other.score, abs=1e-3)
            np.testing.assert_allclose(one.probabilities, other.probabilities, atol=1e-4)
    with pytest.raises(InputError, match="score knn needs features, but .* is an export"):
        exported(images, reject=0.1, score="knn")


def test_the_server_gives_the_same_sets_and_rejections(place, calibrated, tmp_path):
    pytest.importorskip("uvicorn", reason="the extra serve isn't installed")
    trained = Predictor(calibrated[0])
    files = [place / "known" / "0.png", place / "letters" / "4.png"]
    server = Served(calibrated[0], "-workers=1", folder=tmp_path).ready()
    try:
        for score in ("energy", "knn"):
            expected = trained(files, coverage=0.7, reject=0.1, score=score)
            for file, one in zip(files, expected, strict=True):
                query = f"/predict?coverage=0.7&reject=0.1&score={score}"
                status, answer, _ = server.ask(
                    "POST", query, file.read_bytes(), {"Content-Type": "image/png"}
                )
                assert status == 200, answer
                [told] = answer["predictions"]
                assert told["outputs"] == one.outputs
                assert told["unknown"] is one.unknown
                assert told["score"] == pytest.approx(one.score, abs=1e-3)
        for query, problem in (
            ("coverage=0.8", "coverage is 0.8, but .* was calibrated for 0.7, 0.9, 0.99"),
            ("coverage=0.7&top=2", "top and coverage both determine"),
            ("coverage=1", "coverage: "),
            ("score=knn", "score has no effect without reject"),
        ):
            status, answer, _ = server.ask(
                "POST", f"/predict?{query}", files[0].read_bytes(), {"Content-Type": "image/png"}
            )
            assert status == 422
            assert re.search(problem, answer["error"])
        # without these parameters nothing is asked
        _, answer, _ = server.ask(
            "POST", "/predict", files[0].read_bytes(), {"Content-Type": "image/png"}
        )
        assert answer["predictions"][0].keys() == {"name", "outputs", "classes", "probabilities"}
    finally:
        server.end()


def test_predict_writes_sets_and_what_is_unknown(place, calibrated):
    words = [calibrated[0], "known/0.png", "letters/4.png", "-coverage=0.9", "-reject=0.1"]
    expected = Predictor(calibrated[0])(
        [place / "known" / "0.png", place / "letters" / "4.png"], coverage=0.9, reject=0.1
    )
    status, out, err = command("predict.py", place, *words, "-format=jsonl", "-workers=0")
    assert (status, err) == (0, "")
    for line, one in zip(out.splitlines(), expected, strict=True):
        told = json.loads(line)
        assert [each["output"] for each in told["predictions"]] == one.outputs
        assert (told["unknown"], told["score"]) == (one.unknown, one.score)
    status, out, _ = command("predict.py", place, *words, "-format=csv", "-workers=0")
    lines = out.splitlines()
    assert lines[0] == "name,rank,output,class,probability,error,unknown,score"
    assert len(lines) == 1 + sum(len(one.outputs) for one in expected)
    assert lines[1].endswith(f',"{str(expected[0].unknown).lower()}",{expected[0].score}')
    status, out, _ = command("predict.py", place, *words, "-workers=0")
    is_told = [line for line in out.splitlines() if "unknown  none of the classes" in line]
    assert len(is_told) == sum(one.unknown for one in expected)
    status, _, err = command("predict.py", place, *words, "-workers=0", "-output=sheet.png")
    assert status == 0, err
    with Image.open(io.BytesIO((place / "sheet.png").read_bytes())) as sheet:
        assert sheet.width > 100


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-coverage=0.8"], "coverage is 0.8, but .*calibrated.* was calibrated for 0.7, 0.9, 0.99; use"),
        (["-reject=0.2"], "reject is 0.2, but .* was calibrated for 0.001, 0.1; .*-false_alarms"),
        (["-coverage=0.7", "-top=2"], "top and coverage both determine the number of classes"),
        (["-score=knn"], "score has no effect without reject"),
        (["-coverage=0.7", "-tta"], "-tta flip averages views, but coverage and rejection"),
        (["-coverage=1.5"], "'1.5' isn't a probability"),
        (["-coverage=0.99"], "coverage is 0.99, but .* was calibrated on too few images"),
        (["-reject=0.001"], "reject is 0.001, but .* was calibrated on too few images"),
    ],
)  # fmt: skip
def test_predict_refuses_what_was_not_calibrated(place, calibrated, words, problem):
    status, out, err = command("predict.py", place, calibrated[0], "known", *words)
    assert (status, out) == (2, "")
    assert re.search(problem, err), err
    assert len(err.splitlines()) == 1


def test_weights_without_a_calibration_say_which_command_makes_one(place):
    status, _, err = command("predict.py", place, "w.safetensors", "known", "-coverage=0.9")
    assert status == 2
    assert err == (
        "error: coverage needs calibrated weights, but w.safetensors isn't calibrated;"
        " tools/calibrate.py writes calibrated weights\n"
    )


def test_the_file_of_the_neighbours_has_to_be_the_one(place, calibrated, tmp_path):
    image = place / "known" / "0.png"
    alone = tmp_path / "model.safetensors"
    alone.write_bytes((calibrated[0] / "model.safetensors").read_bytes())
    predictor = Predictor(alone)
    # the other scores need no file
    assert predictor([image], reject=0.1)[0].unknown is not None
    with pytest.raises(InputError, match=f"score knn needs {NEIGHBOURS} next to .*; copy it"):
        predictor([image], reject=0.1, score="knn")
    damaged = bytearray((calibrated[0] / NEIGHBOURS).read_bytes())
    damaged[-1] ^= 1
    (tmp_path / NEIGHBOURS).write_bytes(damaged)
    with pytest.raises(InputError, match="its SHA-256 differs from that of the calibration"):
        predictor([image], reject=0.1, score="knn")


def test_several_labels_keep_their_answers_and_have_no_sets(place, tmp_path):
    """The classifier says yes or no to each digit; the thresholds move with the scaling."""
    digits = load_digits()
    names = []
    (tmp_path / "data").mkdir()
    for split, numbers in (("train", range(40)), ("val", range(40, 240))):
        lines = []
        for number in numbers:
            name = f"{number}.png"
            pixels = np.round(digits.images[number] * 255 / 16).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name)
            lines.append(f"{name}\t{digits.target[number]}")
            names.append(tmp_path / "data" / name)
        (tmp_path / "data" / f"{split}_list.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "data" / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    told = replace(
        description_of(place / "w.safetensors"), task="multilabel", thresholds=[0.4] * 10
    )
    with open_weights(place / "w.safetensors") as stored:
        arrays = {name: np.asarray(array) for name, array in stored.arrays.items()}
    write_weights(tmp_path / "several.safetensors", arrays, {METADATA: told.to_json()})
    data = [("DATA.DATASET", "multilabel_list"), ("DATA.DATA_PATH", str(tmp_path / "data"))]
    calibrator = Calibrator(tmp_path / "several.safetensors", data=data, workers=0)
    outcome, scale, bank = calibrate(calibrator, Settings(scaling="vector", k=5))
    assert outcome.calibration.sets == []
    assert {one.score for one in outcome.calibration.rejections} == {"energy", "max_logit", "knn"}
    write(calibrator, outcome, scale, bank, tmp_path / "out", {}, "")
    before = Predictor(tmp_path / "several.safetensors")
    after = Predictor(tmp_path / "out")
    assert after.thresholds != before.thresholds
    answers = [
        (one.outputs, other.outputs) for one, other in zip(before(names), after(names), strict=True)
    ]
    assert all(set(one) == set(other) for one, other in answers)
    assert any(one for one, _ in answers)
    with pytest.raises(InputError, match="coverage is for models with one class per image"):
        after(names[:1], coverage=0.9)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["calibrated"], "calibrated is already calibrated; use the weights that it was made from"),
        (["w.safetensors", "-coverage=0.9,1"], "'1' isn't between 0 and 1"),
        (["w.safetensors", "-k=2000"], "-k is 2000, but there are only 1433 training images; lower it"),
        (["w.safetensors", "-o", "DATA.CACHE", "ram"], "DATA.CACHE has no effect on a calibration"),
        (["w.safetensors", "-folds", "w.safetensors"], "w.safetensors isn't the folder of a run; pass the runs of the folds"),
        (["w.safetensors", "-outside", "none"], "none"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(place, calibrated, words, problem):
    flags = ["-dataset=digits", "-output=new", "-workers=0"]
    status, out, err = command("calibrate.py", place, *words, *flags)
    assert (status, out) == (2, "")
    assert problem in err
    assert len(err.splitlines()) == 1, err
    assert not (place / "new").exists()


def test_an_output_that_exists_is_left_as_it_is(place):
    status, _, err = command("calibrate.py", place, "w.safetensors", "-output=known")
    assert (status, err) == (
        2,
        "error: -output known exists and isn't an empty folder; choose another\n",
    )


@pytest.mark.long
def test_out_of_fold_answers_fit_the_scaling(place, tmp_path):
    """Each run of a cross-validation answers for the images that it wasn't trained on."""
    for fold in (0, 1):
        words = [
            f"-output=fold{fold}",
            "-cfg=vit_digits",
            "-o",
            "DATA.FOLDS=2",
            f"DATA.FOLD={fold}",
        ]
        words += ["TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=0", "MODEL.DEPTH=1"]
        program = [warm.python(), str(ROOT / "main_single_gpu.py"), *words]
        subprocess.run(program, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    runs = [tmp_path / "fold0", tmp_path / "fold1"]
    calibrator = Calibrator(place / "w.safetensors", data=DIGITS, workers=0)
    answers = calibrator.out_of_fold(runs)
    # every training image once
    assert len(answers) == 1433
    expected = np.bincount(calibrator.out_of_fold(runs[::-1]).labels)
    assert np.bincount(answers.labels).tolist() == expected.tolist()
    outcome, _, _ = calibrate(calibrator, Settings(k=0), runs)
    assert len(outcome.parts.fitting) == 1433
    assert [len(outcome.parts.choosing), len(outcome.parts.reported)] == [182, 182]
    assert outcome.calibration.scaling in ("temperature", "class", "vector")
    with pytest.raises(InputError, match="fold1 is fold 1 of 2 .*; expected another fold"):
        calibrator.out_of_fold([runs[1], runs[1]])
    sole = runs[0] / "checkpoints" / "best"
    with pytest.raises(InputError, match=r"w.safetensors isn't the folder of a run"):
        calibrator.out_of_fold([sole, place / "w.safetensors"])
