"""A run's report: its figures are scikit-learn's and SciPy's; whatever names hold, it is a page
that loads nothing.
"""

import itertools
import json
import re
from math import comb

import numpy as np
import pytest
from conftest import without, write_images
from PIL import Image
from scipy.stats import binomtest, ttest_ind
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_fscore_support
from support.browser import CHROMIUM, browsing
from support.ranks import run_ranks
from support.training_runs import train, work

import main_multi_gpu
from config import get_config, resolved_yaml
from datasets import ArrayDataset, get_dataset
from errors import InputError
from loading.tables import csv_rows
from training import predictions, report
from training.curves import records
from training.pages import page
from training.report import statistics, write_report
from training.report.run_files import read_predictions, read_run
from training.run import Run

NAMES = ["cat", "<script>alert(1)</script>", '"dog, big"', "=1+1", "\u202enaïve", "never"]


def drawn(count=500, classes=6, seed=0):
    """Labels, predicted classes and probabilities; nobody has the last class, nobody is told the
    one before it.
    """
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes - 1, count)
    predicted = np.where(rng.random(count) < 0.7, label, rng.integers(0, classes, count))
    predicted[predicted == classes - 2] = 0
    return label, predicted, np.round(rng.random(count), 6)


@pytest.mark.smoke
@pytest.mark.parametrize(("right", "count"), [(0, 7), (7, 7), (1, 1), (358, 364), (40_000, 50_000)])
def test_an_interval_is_wilsons(right, count):
    expected = binomtest(right, count).proportion_ci(0.95, "wilson")
    assert statistics.wilson(right, count) == pytest.approx(
        (expected.low, expected.high), abs=1e-12
    )


def test_confusions_and_scores_are_scikit_learns():
    label, predicted, _ = drawn()
    found = statistics.confusions(label, predicted)
    expected = confusion_matrix(label, predicted, labels=range(6))
    np.testing.assert_array_equal(found.matrix(range(6)), expected)
    np.testing.assert_array_equal(found.matrix([3, 1]), expected[np.ix_([3, 1], [3, 1])])
    worst = found.worst(3)
    off = expected - np.diag(np.diag(expected))
    assert worst.count.tolist() == np.sort(off.flatten())[::-1][:3].tolist()
    assert [
        off[pair] for pair in zip(worst.label, worst.predicted, strict=True)
    ] == worst.count.tolist()
    scores, told = statistics.scores(label, predicted, 7)  # an output more, which is nowhere
    by_class = precision_recall_fscore_support(label, predicted, labels=range(7), zero_division=0)
    for own, theirs in zip(scores, by_class, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-12)
    macro = precision_recall_fscore_support(label, predicted, average="macro", zero_division=0)
    assert scores.means(told) == pytest.approx(macro[:3])


def test_a_calibration_error_is_its_definition():
    _, _, probability = drawn()
    probability[:4] = 0, 1 / 15, 2 / 15, 1
    right = np.random.default_rng(1).random(500) < probability**2
    found = statistics.calibration(probability, right)
    error = 0.0
    for place in range(15):
        low, high = place / 15, (place + 1) / 15
        own = (probability > low) & (probability <= high) | (probability == 0) & (place == 0)
        assert found.images[place] == own.sum()
        error += own.mean() * abs(right[own].mean() - probability[own].mean()) if own.any() else 0
    assert found.error == pytest.approx(error, abs=1e-12)
    assert statistics.calibration(
        np.array([0.95, 0.85]), np.array([True, False])
    ).error == pytest.approx(0.45)


def test_a_difference_is_tested_as_the_formulas_say():
    one = np.zeros(400, bool)
    other = np.zeros(400, bool)
    one[:9], other[5:40] = True, True
    alone, there, probability = statistics.mcnemar(one, other)
    assert (alone, there) == (5, 31)
    assert probability == pytest.approx(2 * sum(comb(36, k) for k in range(6)) / 2**36)
    assert statistics.mcnemar(one, one) == (0, 0, 1.0)
    seeds = [97.1, 98.2, 97.7], [98.9, 99.2]
    assert statistics.welch(*seeds) == pytest.approx(ttest_ind(*seeds, equal_var=False).pvalue)
    assert (statistics.welch([1, 1], [1, 1]), statistics.welch([1, 1], [2, 2])) == (1.0, 0.0)


# ------------------------------------------------------------------ a page


@pytest.fixture
def made(tmp_path, tiny):
    """A made run's folder: an evaluation of pictures in folders, whose classes have strange names."""
    data = tmp_path / "data"
    options = ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(data), "MODEL.NUM_CLASSES", "6"]
    for mode in ("train", "val"):
        write_images(data / mode, {f"c{place}": 3 for place in range(6)})
    config = get_config(None, [*without(tiny, "DATA.DATASET", "MODEL.NUM_CLASSES"), *options])
    dataset = get_dataset(config, "val")
    dataset.classes = NAMES
    label, predicted, probability = drawn(18)
    folder = tmp_path / "<i>run"
    folder.mkdir()
    found = {"label": label, "predicted": predicted, "probability": probability}
    predictions.write(folder / predictions.FILE, found, dataset, str(data))
    (folder / "config.yaml").write_text(resolved_yaml(config))
    (folder / "classes.json").write_text(json.dumps(NAMES))
    result = {"acc1": 100 * float((label == predicted).mean()), "loss": 0.5, "num_samples": 18}
    (folder / "result.json").write_text(json.dumps({**result, "weights": "<b>w</b>"}))
    return folder, dataset, found


def test_a_page_tells_the_figures_and_escapes_names(made):
    folder, dataset, found = made
    text = write_report(folder, dataset).read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<i>run" not in text
    assert "\u202e" not in text
    assert not re.search(r"(src|href)=\"(?!data:image/(png|jpeg);base64,)", text)
    assert "default-src 'none'" in text
    right = int((found["label"] == found["predicted"]).sum())
    assert f'<td class="n">{report.interval(right, 18)}</td>' in text
    macro = f1_score(found["label"], found["predicted"], average="macro")
    assert f'<td class="n">{100 * macro:.2f}</td><td class="n">18</td></tr>' in text
    assert text.count("<figure") == 18 - right == text.count("data:image/png;base64,") - 2
    with open(folder / "confusion.csv", newline="") as file:
        head, *rows = csv_rows(file)
    assert head == ["label", *NAMES]
    assert [row[0] for row in rows] == NAMES
    # no formula for a spreadsheet
    assert (folder / "confusion.csv").read_text().count('"\'=1+1"') == 2
    expected = confusion_matrix(found["label"], found["predicted"], labels=range(6))
    np.testing.assert_array_equal([[int(count) for count in row[1:]] for row in rows], expected)
    with Image.open(folder / "confusion.png") as picture:
        assert min(picture.size) > 300
    for image in (folder.parent / "data" / "val").glob("*/*"):
        image.unlink()
    text = write_report(folder, dataset).read_text()  # the pictures have gone, the figures haven't
    assert text.count("no picture") == 18 - right


def test_a_class_without_images_and_answers_has_no_scores(made):
    folder, dataset, found = made
    label, predicted = (
        np.where(found[name] == 5, 0, found[name]) for name in ("label", "predicted")
    )
    predictions.write(
        folder / predictions.FILE,
        {**found, "label": label, "predicted": predicted},
        dataset,
        "data",
    )
    empty = '<td class="n"></td>'
    assert (
        f'never</th>{empty * 3}<td class="n">0</td></tr>'
        in write_report(folder, dataset).read_text()
    )


def test_a_mistake_is_never_shown_with_the_picture_of_another_image(made):
    folder, _, found = made
    wrong = int((found["label"] != found["predicted"]).sum())
    first, *_, last = sorted((folder.parent / "data" / "val").glob("*/*"))
    last.rename(first.with_name("-first.png"))  # all others come one place later
    config = get_config(folder / "config.yaml")
    changed = get_dataset(config, "val")
    assert len(changed) == 18
    assert write_report(folder, changed).read_text().count("no picture") == wrong
    first.with_name("-first.png").unlink()
    assert write_report(folder, get_dataset(config, "val")).read_text().count("no picture") == wrong


def test_the_surest_mistakes_come_first(made):
    folder, dataset, found = made
    text = write_report(folder, dataset).read_text()
    shown = [float(share) for share in re.findall(r"<b>([\d.]+) % ", text)]
    wrong = found["probability"][found["label"] != found["predicted"]]
    np.testing.assert_allclose(shown, 100 * np.sort(wrong)[::-1], atol=0.051)


def test_of_many_classes_the_picture_has_those_that_are_confused_most_often(made, monkeypatch):
    folder, dataset, found = made
    monkeypatch.setattr(report, "_MOST_IN_PICTURE", 5)
    monkeypatch.setattr(report, "_LISTED_PAIRS", 4)
    monkeypatch.setattr(report, "_MOST_IN_SQUARE", 5)
    seen = {}

    def confusion(matrix, names, whole, in_percent):
        seen.update(matrix=matrix, names=names, whole=whole)
        return b""

    monkeypatch.setattr(report.plots, "confusion", confusion)
    write_report(folder, dataset)
    worst = statistics.confusions(found["label"], found["predicted"]).worst(2)
    pairs = list(zip(worst.label.tolist(), worst.predicted.tolist(), strict=True))
    assert seen["names"] == [NAMES[place] for place in dict.fromkeys(sum(pairs, ()))]
    assert not seen["whole"]
    first, second = (seen["names"].index(NAMES[place]) for place in pairs[0])
    assert seen["matrix"][first, second] == worst.count[0]
    lines = (folder / "confusion.csv").read_text().splitlines()
    assert lines[0] == "label,predicted,images"
    assert sum(int(line.rpartition(",")[2]) for line in lines[1:]) == 18


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
def test_a_browser_shows_it_at_two_widths_and_loads_nothing(made):
    folder, dataset, _ = made
    (folder / "classes.json").write_text(json.dumps(["9" * 4000, *NAMES[1:]]))
    result = json.loads((folder / "result.json").read_text())
    result["best"] = {
        "epoch": 1,
        "acc1": 50.0,
        "acc5": 90.0,
        "loss": 0.5,
        "checkpoint": "epoch_0001",
    }
    (folder / "result.json").write_text(json.dumps(result))
    file = write_report(folder, dataset)
    with browsing() as browser:
        for width in (390, 1280):
            browser.open(file.as_uri(), width)
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.value("[...document.images].every(one => one.naturalWidth > 0)")
        assert browser.value("document.scripts.length") == 0
        assert browser.said == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "predictions.csv",
            "",
            "its first line has to be image,label,predicted,probability, nor image,labels",
        ),
        ("predictions.csv", "image,label,predicted,probability\n", "it contains no samples"),
        (
            "predictions.csv",
            "image,label,predicted,probability\na,1,2\n",
            "a row has 3 columns, the first line has 4",
        ),
        (
            "predictions.csv",
            "image,label,predicted,probability\na,-1,2,0.5\n",
            "'-1' isn't the number of a class",
        ),
        (
            "predictions.csv",
            "image,label,predicted,probability\na,1,1048576,0.5\n",
            "isn't the number of a class",
        ),
        (
            "predictions.csv",
            "image,label,predicted,probability\na,1,2,nan\n",
            "isn't a probability",
        ),
        (
            "predictions.csv",
            'image,label,predicted,probability\n"a,1,2,0.5\n',
            "can't be read as a run's predictions",
        ),
        (
            "predictions.csv",
            "image,label,predicted,probability\n" + "a" * (1 << 20),
            "has a line of 1048576 bytes",
        ),
        (
            "predictions.csv",
            "image,label,predicted,probability\na,1,2,0.5\n",
            "samples and accuracy are 1 and 0.0, but in",
        ),
        ("result.json", "{}", "its loss is missing, expected a number"),
        (
            "result.json",
            '{"loss": 1, "num_samples": 0}',
            "its num_samples is 0, expected a number from 1 on",
        ),
        (
            "result.json",
            '{"loss": 1, "num_samples": 1, "best": 3}',
            "its best is 3, expected a dictionary",
        ),
        (
            "result.json",
            '{"loss": 1, "num_samples": 1, "best": {"epoch": 1, "acc1": "x"}}',
            "its best.acc1 is 'x', expected a number",
        ),
        (
            "result.json",
            '{"loss": 1, "num_samples": 1, "best": {"epoch": 1, "checkpoint": 7}}',
            "its best.checkpoint is 7, expected a text",
        ),
        ("result.json", '{"loss": 1, "num_samples": 1, "ema": {}}', "its ema.loss is missing"),
        (
            "result.json",
            '{"loss": 1, "num_samples": 1, "acc5": "x"}',
            "its acc5 is 'x', expected a number",
        ),
        ("result.json", "[" * 100_000, "can't be read as a run's result"),
        ("classes.json", '{"a": 1}', "expected a list of names"),
        ("classes.json", r'["a", "\ud800"]', "expected a list of names"),
        ("metrics.jsonl", "nonsense\n", "isn't a record of a run; move it away"),
        ("config.yaml", "TRAIN: {X: 1}", "TRAIN.X"),
    ],
)
def test_what_no_run_writes_is_refused_in_a_line(made, file, text, message):
    folder, *_ = made
    (folder / file).write_text(text)
    with pytest.raises(InputError) as caught:
        read_run(folder)
    assert message in str(caught.value)
    assert file in str(caught.value)


# ------------------------------------------------------------------- a run


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.smoke)])
def test_predictions_are_of_each_sample_once_on_any_number_of_processes(tmp_path, tiny, ranks):
    options = [
        *without(tiny, "TRAIN.NUM_EPOCHS", "REPORT"),
        "TRAIN.NUM_EPOCHS",
        "2",
        "TRAIN.MODEL_EMA",
        "True",
    ]
    options += [
        "TRAIN.BASE_LR",
        "0.01",
        "DATA.BATCH_SIZE",
        str(48 // ranks),
        "DATA.BATCH_SIZE_EVAL",
        "5",
    ]
    run_ranks(train, options, tmp_path / "run", 96, ranks=ranks)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    config = get_config(None, options)
    whole = get_dataset(config, "val")
    val = ArrayDataset(config, "val", whole.images[:91], whole.labels[:91], whole.classes)
    for split, found in (("val", result), ("ema", result["ema"])):
        told = read_predictions(tmp_path / "run" / predictions.file_name(split))
        np.testing.assert_array_equal(told.label, val.labels)
        assert [told.images[place] for place in (0, 90)] == ["sample 0", "sample 90"]
        assert 100 * told.right.mean() == pytest.approx(found["acc1"])
        shares = confusion_matrix(told.label, told.predicted, normalize="true").diagonal()
        np.testing.assert_allclose(100 * shares, list(found["class_acc"].values()))
        assert 0.1 <= told.probability.min() <= told.probability.max() <= 1  # the highest of ten
    assert result["environment"].keys() == {"devices", "cores", "system", "commit"}
    assert result["environment"]["devices"] == ["cpu"] * ranks
    own = [*without(options, "TRAIN."), "EVAL", "True", "OUTPUT", str(tmp_path / "again")]
    weights = tmp_path / "run" / "checkpoints" / "last" / "model.safetensors"
    work(get_config(None, [*own, "MODEL.PRETRAINED", str(weights)]), None, val)
    first, second = (
        read_predictions(tmp_path / name / predictions.FILE) for name in ("run", "again")
    )
    assert first.digest == second.digest
    np.testing.assert_array_equal(first.predicted, second.predicted)
    np.testing.assert_allclose(first.probability, second.probability, atol=2e-6)
    text = write_report(tmp_path / "run", None).read_text()
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "Curves",
        "Confusions",
        "Classes",
        "The most confident mistakes",
        "Calibration",
        "Configuration: changed keys",
        "Environment",
        "Speed",
    ]
    pictures = re.findall('<img alt="([^"]*)"', text)
    assert [*pictures[:4], *pictures[-3:]] == [
        "loss",
        "top-1 accuracy (%)",
        "learning rate",
        "Confusion matrix",
        "Reliability diagram",
        "images per second",
        "waiting for data (share of the time)",
    ]
    assert "average (EMA)" in text
    assert "<th>TRAIN.BASE_LR</th><td>0.003</td><td>0.01</td>" in text
    assert (
        re.findall('<img alt="([^"]*)"', write_report(tmp_path / "again", None).read_text())[0]
        == "Confusion matrix"
    )


def test_a_run_without_report_leaves_none_and_a_failure_is_a_line(tmp_path, tiny, monkeypatch):
    data = ["DATA.BATCH_SIZE", "32"]
    train([*tiny, *data], tmp_path / "none", 64)  # REPORT False, as in most tests
    assert not (tmp_path / "none" / "predictions.csv").exists()

    def fails(*_):
        raise ValueError("a bad day\nfor all")

    monkeypatch.setattr(predictions, "write", fails)
    tiny = without(tiny, "REPORT")
    train([*tiny, *data], tmp_path / "run", 64)
    monkeypatch.setattr(report, "write_report", fails)

    run = Run(get_config(None, [*tiny, *data, "OUTPUT", str(tmp_path / "new")]), [])
    run.begin()
    main_multi_gpu.leave_report(run, None)
    *_, first, second = (tmp_path / "new" / "log.txt").read_text().splitlines()
    command = f"python tools/compare_runs.py {tmp_path}/new"
    assert (
        first[14:]
        == f"report.html can't be written (ValueError: a bad day for all); {command} writes it again"
    )
    assert second[14:] == "files: config.yaml"
    log = (tmp_path / "run" / "log.txt").read_text()
    again = f"-resume=auto -output={tmp_path}/run writes it again"
    assert f"predictions.csv can't be written (ValueError: a bad day for all); {again}\n" in log


def test_text_of_a_page_is_cut_and_escaped():
    assert page.text("a\n<b>") == "a\\n&lt;b&gt;"
    assert len(page.text("x" * 5000)) < 500


def test_reading_records_takes_a_limited_time(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    file.write_text("{}\n" * 1000)
    assert list(records(file)) == []
    seconds = itertools.count(0, 0.1)
    monkeypatch.setattr("errors.time.thread_time", lambda: next(seconds))
    with pytest.raises(
        InputError, match="metrics.jsonl: reading its 3000 bytes takes too long; move it away"
    ):
        list(records(file))
