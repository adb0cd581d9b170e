"""The report of a segmentation run: its worst classes and pictures, its confusions, and what a
comparison of such runs says.
"""

import io
import json
import re
import shutil

import numpy as np
import paddle
import pytest
from PIL import Image
from scipy.stats import wilcoxon
from support.mask_models import CLASSES, evaluation, random_model, save_model, write_data
from support.ranks import run_ranks
from support.training_runs import work

from datasets import get_dataloader
from errors import InputError
from loading.mask_tables import class_colors
from settings.registry import tasks
from training import engine, worst_pictures
from training.report import pixels, write_report
from training.report.compare import compare, screen
from training.report.run_files import read_run
from training.report.statistics import wilcoxon as own_wilcoxon
from training.worst_pictures import WorstPictures, draw_answers
from utils import rank, world_size


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("pixel_report"))


@pytest.fixture(scope="module")
def finished(data):
    """The folder of an evaluation that has ended, with its report, and its dataset."""
    weights = save_model(data, data / "model.safetensors")
    folder = data / "run"
    config, val = evaluation(data, "MODEL.PRETRAINED", weights, "OUTPUT", folder, "REPORT", "True")
    work(config, None, val)
    write_report(folder, val)
    return folder, val


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the folder, which a test may change."""
    return shutil.copytree(finished[0], tmp_path / "run")


def stored(root, kind, index):
    """Returns the pixels of an image or a mask of the data."""
    with Image.open(root / kind / "val" / f"{index}.png") as image:
        return np.asarray(image)


def cells(text, title):
    """Returns the rows of the table below a heading."""
    section = text.split(f"<h2>{title}</h2>")[1].split("<h2>")[0]
    rows = re.findall("<tr>(.*?)</tr>", section)[1:]
    return [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_a_report_names_the_worst_classes_and_pictures(finished):
    folder, val = finished
    text = (folder / "report.html").read_text()
    result = json.loads((folder / "result.json").read_text())
    run = read_run(folder)
    assert run.confusion.sum() > 0
    iou = result["class_iou"]
    found = cells(text, "Classes")
    assert [row[0] for row in found] == sorted(iou, key=lambda name: iou[name])
    for name, share, accuracy, count, taken in found:
        label = CLASSES.index(name)
        row = run.confusion[label]
        assert share == f"{iou[name]:.2f}"
        known = result["class_acc"][name]
        assert accuracy == ("" if known is None else f"{known:.2f}")
        assert count == f"{row.sum():,}"
        wrong = np.where(np.arange(4) == label, 0, row)
        expected = ""
        if wrong.any():
            expected = f"{CLASSES[wrong.argmax()]}: {100 * wrong.max() / row.sum():.2f} %"
        assert taken == expected
    table = run.pixel_tables["val"]
    found = cells(text, "The worst pictures")
    order = np.argsort(table.mean_iou, kind="stable")
    assert [row[0] for row in found] == [table.images[place] for place in order.tolist()]
    assert [row[1] for row in found] == [f"{table.mean_iou[place]:.2f}" for place in order]
    titles = re.findall('<img alt="([^"]*)"', text)
    assert titles[:2] == ["Confusion matrix", "Some of the worst pictures"]
    assert "The most confident mistakes" not in text
    assert len(val) == 7
    with Image.open(folder / worst_pictures.FILE) as picture:
        assert picture.width > 600
    with Image.open(folder / "confusion.png") as picture:
        assert min(picture.size) > 300


def kept(root, options):
    """Returns the worst answers of an evaluation, and the maps of all images."""
    config, val = evaluation(root, *options)
    task = tasks.choose(config)(config, val.classes)
    task.prepare_data(val, "val")
    loader = get_dataloader(config, val, "val", rank=rank(), ranks=world_size())
    engine.evaluate(task, random_model(config), loader)
    gathered = task.predictions.gather()
    return task.predictions.worst.gather(), gathered["mIoU"], gathered["pixels"]


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_worst_answers_are_kept_whatever_the_number_of_ranks(data, ranks, monkeypatch):
    options = ["REPORT", "True"]
    if ranks == 1:
        monkeypatch.setattr(worst_pictures, "MOST", 3)
        results = [kept(data, options)]
    else:
        results = run_ranks(kept, data, options, ranks=ranks)
    for answers, scores, wrong in results:
        order = [place for place in np.argsort(scores, kind="stable").tolist() if wrong[place]]
        assert [answer.index for answer in answers] == order[: worst_pictures.MOST]
        assert [answer.score for answer in answers] == pytest.approx(scores[order][: len(answers)])
        for answer in answers:
            assert answer.size == stored(data, "masks", answer.index).shape
            height, width = answer.size
            assert (answer.tile[:height, :width] >= 0).all()
            assert (answer.tile[height:] == -1).all()
            assert (answer.tile[:, width:] == -1).all()


def test_a_kept_answer_is_reduced_by_nearest_pixels(data):
    worst = WorstPictures("mask")
    rows, columns = np.mgrid[:448, :100]
    answers = paddle.to_tensor((rows // 2 * 50 + columns // 2).astype(np.int64))
    one = paddle.ones([1], "int64")
    for score, wrong in ((80.0, 5), (0.0, 0), (30.0, 1)):
        worst.add(answers, paddle.to_tensor([score], "float64"), wrong * one)
    first, second = worst.gather()
    assert [(each.score, each.index) for each in (first, second)] == [(30, 2), (80, 0)]
    assert first.size == (224, 50)
    expected = np.arange(224)[:, None] * 50 + np.arange(50)
    assert (first.tile[:, :50] == expected).all()


def test_the_picture_has_image_label_and_answer_side_by_side(finished, tmp_path, monkeypatch):
    folder, _ = finished
    _, val = evaluation(folder.parent, "REPORT", "True")
    shown = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.imshow", lambda self, pixels, **_: shown.append(pixels)
    )
    tile = np.full((224, 224), -1, np.int32)
    indices = stored(folder.parent, "masks", 2)
    height, width = indices.shape
    tile[:height, :width] = 1
    answer = worst_pictures.Answer(12.5, 2, tile, (height, width))
    draw_answers(tmp_path / "a.png", [answer], ["name"], val, "mask")
    image, label, found = shown
    assert (image == stored(folder.parent, "images", 2)).all()
    colors = class_colors(256)
    colors[255] = 255
    assert (label == colors[indices]).all()
    assert (found == colors[1]).all()
    # A picture that is lost later is white, and nothing else is.
    monkeypatch.setattr(val, "image", _lost)
    draw_answers(tmp_path / "b.png", [answer], ["name"], val, "mask")
    assert (shown[3] == 255).all()
    assert (shown[5] == found).all()


def _lost(index):
    raise InputError(f"{index} is lost")


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        (
            "predictions.csv",
            lambda text: "a,b\n" + text,
            "its first line has to be image,pixel_acc",
        ),
        ("predictions.csv", lambda text: text.split("\n")[0] + "\n", "it contains no samples"),
        ("predictions.csv", lambda text: text + '"x",101,1,0,1,5,"a","b"\n', "isn't a percentage"),
        ("predictions.csv", lambda text: text + '"x",1,nan,0,1,5,"a","b"\n', "isn't a percentage"),
        (
            "predictions.csv",
            lambda text: text + '"x",1,1,-1,1,5,"a","b"\n',
            "isn't the number of a class",
        ),
        ("predictions.csv", lambda text: text + '"x",1,1,0,1,1e9,"a","b"\n', "number of pixels"),
        ("predictions.csv", lambda text: text + '"x",1,1\n', "a row has 3 columns"),
        ("predictions.csv", lambda text: text + '"x",1,1,0,1,5,"a","b"\n', "it has 8 samples"),
        ("confusion.csv", lambda text: "", "its first line has to be label"),
        ("confusion.csv", lambda text: text.rpartition("\n")[0][:-3], "expected 4 rows of 5"),
        ("confusion.csv", lambda text: text + '"x",1,1,1,1\n', "expected 4 rows of 5"),
        ("confusion.csv", lambda text: "\n".join(text.split("\n")[:3]) + "\n", "2 rows, expected"),
        ("confusion.csv", lambda text: re.sub(r",\d+", ",7", text), "another evaluation"),
        ("confusion.csv", lambda text: text.replace(",0", ",-1"), "isn't a number of pixels"),
        ("worst_pictures.png", lambda text: "no picture", "it isn't a PNG"),
    ],
)
def test_what_no_run_writes_is_refused_in_a_line(run, file, change, told):
    encoding = "latin-1" if file.endswith("png") else "utf-8"
    text = (run / file).read_text(encoding)
    changed = change(text)
    assert changed != text
    (run / file).write_text(changed)
    before = (run / "report.html").read_bytes()
    with pytest.raises(InputError) as caught:
        write_report(run, None)
    assert told in str(caught.value)
    assert file in str(caught.value)
    assert (run / "report.html").read_bytes() == before


def test_without_tables_a_report_has_the_summary_alone(run):
    for file in ("predictions.csv", "confusion.csv", "worst_pictures.png"):
        (run / file).unlink()
    text = write_report(run, None).read_text()
    assert "intersection over union, mean of the classes" in text
    assert "<h2>Classes</h2>" not in text
    assert "The worst pictures" not in text


def test_a_picture_without_a_wrong_pixel_is_none_of_the_worst(run):
    file = run / "predictions.csv"
    rows = file.read_text().split("\n")
    head = rows[0]
    right = [f'"{place}",100.0,100.0,"","",0,"",""' for place in range(6)]
    none = '"nothing",0.0,0.0,"","",0,"",""'
    file.write_text("\n".join([head, *right, none]) + "\n")
    assert pixels.read_pixel_table(file).worst(24).size == 0
    text = write_report(run, None).read_text()
    assert "All pixels are right." in text
    # The file is an earlier evaluation's.
    assert (run / "worst_pictures.png").exists()
    assert "Some of the worst pictures" not in text


def test_many_classes_make_no_large_page(run):
    """The picture has the classes that are confused most, and the table's rows are bounded."""
    count = 150
    rng = np.random.default_rng(0)
    matrix = rng.integers(0, 10**7, (count, count))
    names = [f"class number {label}" for label in range(count)]
    lines = [",".join(["label", *(f'"{name}"' for name in names)])]
    for name, row in zip(names, matrix.tolist(), strict=True):
        lines.append(",".join([f'"{name}"', *map(str, row)]))
    (run / "confusion.csv").write_text("\n".join(lines) + "\n")
    (run / "classes.json").write_text(json.dumps(names))
    result = json.loads((run / "result.json").read_text())
    result["pixel_acc"] = 100 * np.trace(matrix) / matrix.sum()
    (run / "result.json").write_text(json.dumps(result))
    text = write_report(run, None).read_text()
    assert len(cells(text, "Classes")) == count
    assert len(text) < 1_500_000
    picture = Image.open(io.BytesIO((run / "confusion.png").read_bytes()))
    assert max(picture.size) < 1500


# ------------------------------------------------------------- comparisons


def test_a_comparison_tests_the_images_mean_iou(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    rows = (run / "predictions.csv").read_text().strip().split("\n")
    changed = [rows[0]]
    for place, row in enumerate(rows[1:]):
        name, *others = row.split(",")
        others[1] = str(round(min(100, float(others[1]) + 1 + place), 4))
        changed.append(",".join([name, *others]))
    (other / "predictions.csv").write_text("\n".join(changed) + "\n")
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("AMP_EVAL: false", "AMP_EVAL: true"))
    compared = compare([run, other])
    [verdict] = compared.verdicts
    first, second = (read_run(each).pixel_tables["val"].mean_iou for each in (run, other))
    expected = wilcoxon(first, second).pvalue
    assert "of 7 images 0 have a higher mIoU in the first run, 7 in the second" in verdict
    assert f"Wilcoxon's signed-rank test: p = {expected:.3g}" in verdict
    assert "mIoU" in compared.table()[0]
    assert compared.scores(compared.kinds[0])[0] == "mIoU"
    assert verdict in screen(compared)
    (other / "predictions.csv").write_text("\n".join(changed).replace("6.png", "x.png"))
    assert "evaluated on different images" in compare([run, other]).verdicts[0]
    (other / "predictions.csv").unlink()
    assert "has no predictions.csv" in compare([run, other]).verdicts[0]


def test_equal_scores_differ_by_chance():
    scores = np.array([1.0, 2.0, 3.0])
    assert own_wilcoxon(scores, scores) == (0, 0, 1.0)
    better, worse, probability = own_wilcoxon(scores, np.array([1.0, 1.0, 9.0]))
    assert (better, worse) == (1, 1)
    assert probability == pytest.approx(wilcoxon([1, -6]).pvalue)
