"""Evaluations of masks: the figures are scikit-learn's and SciPy's, on any number of processes."""

import csv
import math

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F
from PIL import Image
from scipy.ndimage import binary_erosion
from sklearn.metrics import confusion_matrix
from support.mask_models import CLASSES, evaluation, random_model, write_data
from support.ranks import run_ranks

import utils
from config import get_config
from datasets import get_dataloader
from errors import RunError
from loading.transforms import Normalize
from models.heads import windows
from settings.registry import tasks
from training import engine
from training.pixel_metrics import count_boundaries, count_pairs, image_outcome, metrics_of
from training.predictions import write, write_confusion
from training.segmentation import Segmentation
from utils import rank, world_size


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("masks"))


def evaluated(root, *options):
    """Returns the metrics of an evaluation by random weights, and what it kept of each image."""
    config, val = evaluation(root, *options)
    task = tasks.choose(config)(config, val.classes)
    task.prepare_data(val, "val")
    loader = get_dataloader(config, val, "val", rank=rank(), ranks=world_size())
    metrics = engine.evaluate(task, random_model(config), loader)
    return metrics, task.predictions.gather(), task.predictions.confusion


def answers(root, view=lambda model, images: model(images), options=()):
    """Yields each image's mask [H, W] and logits [K, H, W], computed plainly."""
    config, val = evaluation(root, *options)
    model = random_model(config)
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    for index in range(len(val)):
        mask = np.asarray(Image.open(root / "masks" / "val" / f"{index}.png"))
        images = normalize(paddle.to_tensor(val.transform(val.picture(index))[None]))
        with paddle.no_grad():
            logits = view(model, images)
            yield mask, F.interpolate(logits, mask.shape, mode="bilinear")[0].numpy()


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["short", "squash", "own"])
def test_metrics_are_those_of_scikit_learns_confusion_matrix(data, mode):
    options = ["DATA.CROP_MODE", mode]
    if mode == "squash":
        options += ["DATA.CROP_PCT", "1.0"]
    metrics, of_images, confusion = evaluated(data, *options)
    expected = np.zeros((4, 4), np.int64)
    losses = []
    for index, (mask, logits) in enumerate(answers(data, options=options)):
        known = mask != 255
        label = mask[known]
        predicted = logits.argmax(0)[known]
        own = confusion_matrix(label, predicted, labels=range(4))
        expected += own
        shifted = logits[:, known].astype(np.float64)
        of_label = shifted[label, np.arange(len(label))]
        losses.append(np.mean(np.log(np.exp(shifted).sum(0)) - of_label))
        assert of_images["pixel_acc"][index] == pytest.approx(100 * np.mean(label == predicted))
        union = own.sum(0) + own.sum(1) - np.diag(own)
        share = 100 * np.mean((np.diag(own) / np.maximum(union, 1))[union > 0])
        assert of_images["mIoU"][index] == pytest.approx(share)
        wrong = own - np.diag(np.diag(own))
        worst = of_images["label"][index], of_images["predicted"][index]
        assert wrong[worst] == wrong.max() == of_images["pixels"][index]
    assert (confusion == expected).all()
    # The random weights give several answers, so that the test isn't blind.
    assert (expected.sum(0) > 20).sum() >= 3
    right = np.diag(expected)
    union = expected.sum(0) + expected.sum(1) - right
    iou = 100 * right / np.maximum(union, 1)
    acc = 100 * right[:3] / expected.sum(1)[:3]
    assert metrics["class_iou"] == pytest.approx(
        {
            name: value if all_ else None
            for name, value, all_ in zip(CLASSES, iou, union, strict=True)
        }
    )
    assert metrics["mIoU"] == pytest.approx(np.mean(iou[union > 0]), abs=1e-9)
    assert metrics["class_acc"]["nobody"] is None
    assert metrics["mean_acc"] == pytest.approx(np.mean(acc), abs=1e-9)
    assert metrics["pixel_acc"] == pytest.approx(100 * right.sum() / expected.sum(), abs=1e-9)
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert metrics["num_samples"] == 7


def in_a_rank(root, options):
    found = evaluated(root, *options)
    return (*found, paddle.get_flags("FLAGS_use_stride_kernel"))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (3, 0)])
def test_ranks_and_workers_give_the_same_bits(data, ranks, workers):
    options = ["METHOD.BOUNDARY", "True"]
    metrics, of_images, confusion = evaluated(data, *options)
    options += ["DATA.NUM_WORKERS", str(workers), "DATA.BATCH_SIZE_EVAL", "3"]
    for own, columns, matrix, _ in run_ranks(in_a_rank, data, options, ranks=ranks):
        assert own == metrics
        assert (matrix == confusion).all()
        assert columns.keys() == of_images.keys()
        for name, values in columns.items():
            assert (values == of_images[name]).all(), name


def softmax(logits):
    exponentials = np.exp(logits - logits.max(0))
    return exponentials / exponentials.sum(0)


@pytest.mark.parametrize("stride", [None, [24, 16]])
def test_several_scales_and_mirror_images_are_means_of_probabilities(data, stride):
    scales = [0.5, 1.0, 1.3]
    options = ["HEAD.STRIDE", stride] if stride else []
    way = windows.Way((32, 32), stride and tuple(stride))
    total = [0] * 7

    def one(scale, mirrored):
        def view(model, images):
            size = [max(1, int(side * scale + 0.5)) for side in images.shape[2:]]
            images = F.interpolate(images, size, mode="bilinear")
            if mirrored:
                images = images.flip([3])
            logits = windows.maps(model, images, way)
            return logits.flip([3]) if mirrored else logits

        return view

    for scale in scales:
        for mirrored in (False, True):
            for index, (mask, logits) in enumerate(answers(data, one(scale, mirrored), options)):
                total[index] = total[index] + softmax(logits.astype(np.float64))
                if scale == scales[-1] and mirrored:
                    total[index] = mask, total[index] / 6
    expected = np.zeros((4, 4), np.int64)
    losses = []
    for mask, probability in total:
        known = mask != 255
        expected += confusion_matrix(mask[known], probability.argmax(0)[known], labels=range(4))
        losses.append(-np.log(probability[mask[known], np.where(known)[0], np.where(known)[1]]))
    options += ["METHOD.SCALES", str(scales), "METHOD.FLIP", "True"]
    metrics, _, confusion = evaluated(data, *options)
    assert (confusion == expected).all()
    assert metrics["loss"] == pytest.approx(np.mean([np.mean(one) for one in losses]), abs=1e-5)
    plain, *_ = evaluated(data, *options[:-4])
    assert abs(plain["loss"] - metrics["loss"]) > 1e-3


def test_windows_are_averaged_where_they_overlap():
    rng = np.random.default_rng(0)
    images = paddle.to_tensor(rng.normal(size=(2, 3, 13, 21)).astype(np.float32))
    called = []

    def forward(part):
        called.append(part.shape[2:])
        return part[:, :2] * len(called)

    found = windows.maps(forward, images, windows.Way((8, 10), (5, 6))).numpy()
    total = np.zeros((2, 2, 13, 21))
    count = np.zeros((13, 21))
    tops = [(0, 8), (5, 13)]
    lefts = [(0, 10), (6, 16), (11, 21)]
    number = 0
    for top, bottom in tops:
        for left, right in lefts:
            number += 1
            total[:, :, top:bottom, left:right] += (
                images.numpy()[:, :2, top:bottom, left:right] * number
            )
            count[top:bottom, left:right] += 1
    np.testing.assert_allclose(found, total / count, atol=1e-6)
    assert called == [[8, 10]] * 6
    # An image that is smaller than a window is one window.
    assert windows.maps(forward, images, windows.Way((16, 30), (5, 6))).shape == [2, 2, 13, 21]
    assert called[6:] == [[16, 30]]


def test_scores_are_averaged_and_resized_not_their_logarithms():
    """As in EoMT: where windows overlap, and at the mask's own size."""
    rng = np.random.default_rng(0)
    scores = rng.uniform(0.1, 3, size=(3, 1, 4, 6, 6)).astype(np.float32)
    windows_left = iter(np.log(scores))
    way = windows.Way((6, 6), (6, 3), gives_log_scores=True)

    def forward(_):
        return paddle.to_tensor(next(windows_left))

    strips = windows.pixel_logits(forward, paddle.zeros([1, 3, 6, 12]), (9, 24), way)
    found = paddle.concat(list(strips), axis=1).numpy()
    first, second, third = scores
    mean = np.concatenate(
        [first[..., :3], (first[..., 3:] + second[..., :3]) / 2, (second[..., 3:] + third[..., :3]) / 2, third[..., 3:]],
        axis=-1,
    )  # fmt: skip
    expected = F.interpolate(paddle.to_tensor(mean), [9, 24], mode="bilinear")
    np.testing.assert_allclose(np.exp(found), expected.numpy().transpose(0, 2, 3, 1), rtol=1e-5)


def test_eomt_gives_logarithms_of_scores():
    options = ["TASK", "segmentation", "HEAD.NAME", "eomt", "DATA.CROP_MODE", "own"]
    config = get_config(None, [*options, "HEAD.STRIDE", "24"])
    way = windows.way_of(config, [1.0], flip=True)
    assert way.gives_log_scores
    assert (way.window, way.stride, way.flip) == ((224, 224), (24, 24), True)
    options[3] = "linear"
    assert not windows.way_of(get_config(None, options), [1.0], flip=False).gives_log_scores


@pytest.mark.parametrize("size", [(13, 17), (40, 31), (7, 9), (13, 30), (30, 17), (1, 17)])
def test_strips_are_the_rows_of_the_whole(monkeypatch, size):
    rng = np.random.default_rng(1)
    logits = paddle.to_tensor(rng.normal(size=(2, 5, 13, 17)).astype(np.float32))
    [whole] = windows.strips(logits, size)
    monkeypatch.setattr(windows, "_STRIP", 600)
    strips = list(windows.strips(logits, size))
    assert len(strips) == math.ceil(size[0] / max(1, 600 // (10 * size[1])))
    assert (paddle.concat(strips, 1) == whole).all()
    if size[0] > 1:
        expected = F.interpolate(logits, size, mode="bilinear").transpose([0, 2, 3, 1])
        np.testing.assert_allclose(whole.numpy(), expected.numpy(), atol=5e-6)
    # Equal logits stay equal, so that the first class is the answer.
    equal = paddle.full([1, 3, 13, 17], 0.1)
    for strip in windows.strips(equal, size):
        assert (strip == strip[:, :, :, :1]).all()


def test_strips_change_no_figure(data, monkeypatch):
    options = ["METHOD.SCALES", "[0.5, 1]", "METHOD.FLIP", "True"]
    whole = evaluated(data, *options)
    monkeypatch.setattr(windows, "_STRIP", 300)
    striped = evaluated(data, *options)
    assert striped[0] == whole[0]
    assert (striped[2] == whole[2]).all()


@pytest.mark.parametrize("size", [(40, 57), (9, 61), (2, 3), (200, 130)])
def test_boundaries_are_those_of_eroded_masks(size):
    rng = np.random.default_rng(2)
    maps = []
    for _ in range(2):
        classes = np.zeros(size, np.int64)
        for number in range(1, 4):
            top, left = rng.integers(0, size)
            classes[top : top + size[0] // 2 + 1, left : left + size[1] // 3 + 1] = number
        maps.append(classes)
    mask, predicted = maps
    mask[rng.random(size) < 0.001] = 255
    found = count_boundaries(paddle.to_tensor(predicted), paddle.to_tensor(mask), 5, 255).numpy()
    predicted = np.where(mask == 255, 255, predicted)
    distance = max(1, round(0.02 * math.hypot(*size)))
    for number in range(5):
        edges = []
        for classes in (mask, predicted):
            own = classes == number
            eroded = binary_erosion(own, np.ones((3, 3)), iterations=distance, border_value=0)
            edges.append(own & ~eroded)
        both = edges[0] & edges[1]
        assert found[:, number].tolist() == [edges[0].sum(), edges[1].sum(), both.sum()]


def test_boundary_iou_is_the_share_of_both_boundaries(data):
    metrics, *_ = evaluated(data, "METHOD.BOUNDARY", "True")
    counts = np.zeros((3, 4), np.int64)
    for mask, logits in answers(data):
        counts += count_boundaries(
            paddle.to_tensor(logits.argmax(0)), paddle.to_tensor(mask.astype(np.int64)), 4, 255
        ).numpy()
    iou = 100 * counts[2] / (counts[0] + counts[1] - counts[2])
    assert list(metrics["class_boundary_iou"].values()) == pytest.approx(iou.tolist())
    assert metrics["boundary_iou"] == pytest.approx(iou.mean())
    assert metrics["boundary_iou"] != pytest.approx(metrics["mIoU"], abs=0.1)
    assert "boundary_iou" not in evaluated(data)[0]


def test_what_has_no_pixel_counts_nowhere():
    mask = paddle.full([4, 4], 255, "int64")
    pairs = count_pairs(paddle.zeros([4, 4], "int64"), mask, 3, 255)
    outcome = {name: value.item() for name, value in image_outcome(pairs, 3).items()}
    assert outcome == {"pixel_acc": 0, "mIoU": 0, "label": 0, "predicted": 0, "pixels": 0}
    metrics = metrics_of(pairs.numpy().reshape(3, 3), list("abc"))
    assert (metrics["mIoU"], metrics["mean_acc"], metrics["pixel_acc"]) == (0, 0, 0)
    assert metrics["class_iou"] == dict.fromkeys("abc")
    # A class that was answered and that no mask has counts as 0.
    metrics = metrics_of(np.array([[3, 1, 0], [0, 0, 0], [0, 0, 0]]), list("abc"))
    assert metrics["class_iou"] == {"a": 75, "b": 0, "c": None}
    assert metrics["mIoU"] == 37.5
    assert metrics["class_acc"] == {"a": 75, "b": None, "c": None}


def table(file):
    return list(csv.reader(file.read_text().splitlines()))


def test_tables_have_a_row_for_each_image_and_class(data, tmp_path):
    _, of_images, confusion = evaluated(data)
    _, val = evaluation(data)
    write(tmp_path / "predictions.csv", of_images, val, str(data))
    rows = table(tmp_path / "predictions.csv")
    assert rows[0] == [
        "image",
        "pixel_acc",
        "mIoU",
        "label",
        "predicted",
        "pixels",
        "class",
        "predicted_class",
    ]
    assert [row[0] for row in rows[1:]] == [f"images/val/{index}.png" for index in range(7)]
    assert rows[1][6:] == [CLASSES[int(rows[1][3])], CLASSES[int(rows[1][4])]]
    of_images["pixels"][0] = 0
    write(tmp_path / "predictions.csv", of_images, val, str(data))
    [_, first, *_] = table(tmp_path / "predictions.csv")
    assert first[3:] == ["", "", "0", "", ""]
    write_confusion(tmp_path / "confusion.csv", confusion, val.classes)
    rows = table(tmp_path / "confusion.csv")
    assert rows[0] == ["label", *CLASSES]
    assert [row[0] for row in rows[1:]] == CLASSES
    assert (np.array([row[1:] for row in rows[1:]], int) == confusion).all()


def test_an_image_that_is_too_large_is_an_error_of_one_line(data, monkeypatch):
    monkeypatch.setattr(utils, "free_memory", lambda: 0)
    monkeypatch.setattr(Segmentation, "_answers", lambda *_: paddle.zeros([1 << 31]))
    with pytest.raises(RunError) as caught:
        evaluated(data)
    assert "HEAD.STRIDE computes it in windows, or lower DATA.IMAGE_SIZE" in str(caught.value)
    assert "\n" not in str(caught.value)
