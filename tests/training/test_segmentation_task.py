"""Segmentation: runs on any number of processes, what they start from, and what doesn't fit."""

import json
import math

import numpy as np
import paddle
import pytest
from support.mask_files import CLASSES, write_masks
from support.ranks import run_ranks
from support.training_runs import assert_close, assert_same_run, records, refused, train, weights

from config import get_config
from datasets import get_datasets
from errors import InputError
from models import build_model
from models.heads.windows import Way, maps
from settings.registry import tasks
from training.checkpoint import description_of
from training.optim.groups import freeze, layer_scales
from weights import load_weights, save_weights

MODEL = [
    "MODEL.TYPE", "ViT", "MODEL.PATCH_SIZE", "4", "MODEL.EMBED_DIM", "8", "MODEL.DEPTH", "2", "MODEL.NUM_HEADS", "2",
    "DATA.IMAGE_SIZE", "16",
]  # fmt: skip
# The statistics of a batch norm are each process's own.
HEAD = [
    "TASK", "segmentation", "HEAD.NAME", "linear", "HEAD.BATCH_NORM", "False", "HEAD.DROPOUT", "0.0",
    "DATA.CROP_MODE", "short", "MODEL.NUM_CLASSES", "auto",
]  # fmt: skip


@pytest.fixture
def options(tmp_path):
    """Options of a small training on small images with masks."""
    write_masks(tmp_path / "data")
    return [
        *MODEL, *HEAD,
        "DATA.DATASET", "masks", "DATA.DATA_PATH", str(tmp_path / "data"),
        "DATA.NUM_WORKERS", "0", "DATA.GLOBAL_BATCH", "4", "TRAIN.NUM_EPOCHS", "2", "TRAIN.WARMUP_EPOCHS", "0",
        "TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.BASE_LR", "0.1", "REPORT", "False", "SAVE_STEPS", "1", "KEEP_LAST", "99",
    ]  # fmt: skip


def train_all(runs):
    for run in runs:
        train(*run)


@pytest.mark.smoke
def test_a_run_is_resumed_in_the_same_bits_and_is_the_same_on_two_processes(tmp_path, options):
    def runs(name):
        middle = str(tmp_path / name / "checkpoints" / "epoch_0001_sample_000000008")
        resumed = [*options, "MODEL.RESUME", middle]
        return [(options, tmp_path / name), (resumed, tmp_path / f"{name}_resumed")]

    train_all(runs("one"))
    run_ranks(train_all, runs("two"))
    for name in ("one", "two"):
        assert_same_run(tmp_path / name, tmp_path / f"{name}_resumed")
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert_close(one, two, atol=1e-6)
    assert {"encoder.pos_embed", "decode_head.classifier.weight"} < one.keys()
    last = [records(tmp_path / name)[-1] for name in ("one", "two")]
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], abs=1e-6)
    assert last[0].keys() >= {"mIoU", "mean_acc", "pixel_acc"}


def test_an_evaluation_counts_the_pixels_of_all_masks_at_their_own_sizes(tmp_path, options):
    train(options, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "last"
    evaluation = ["EVAL", "True", "MODEL.PRETRAINED", str(path)]
    train(
        [*[*MODEL, *HEAD], *options[len(MODEL + HEAD) : len(MODEL + HEAD) + 6], *evaluation],
        tmp_path / "evaluated",
    )
    result = json.loads((tmp_path / "evaluated" / "result.json").read_text())

    config, _, val = get_datasets(get_config(None, options))
    model = build_model(config)
    load_weights(model, path)
    model.eval()
    task = tasks.choose(config)(config, val.classes)
    task.prepare_data(val, "val")
    confusion = np.zeros((3, 3), int)
    losses = []
    for index in range(len(val)):
        sample = val.sample(index)
        mask = sample["mask"]
        assert mask.size == val.mask("mask", index).size[0] * val.mask("mask", index).size[1]
        logits = model(task.normalize(paddle.to_tensor(sample["pixels"][None])))
        logits = paddle.nn.functional.interpolate(logits, mask.shape, mode="bilinear")[0].numpy()
        known = mask != 255
        np.add.at(confusion, (mask[known], logits.argmax(0)[known]), 1)
        shares = np.exp(logits) / np.exp(logits).sum(0)
        truth = np.take_along_axis(shares, np.where(known, mask, 0)[None].astype(int), 0)[0]
        losses.append(-np.log(truth[known]).mean())
    right = np.diag(confusion)
    iou = 100 * right / (confusion.sum(0) + confusion.sum(1) - right)
    assert result["mIoU"] == pytest.approx(iou.mean(), abs=1e-9)
    assert result["class_iou"] == pytest.approx(dict(zip(CLASSES, iou, strict=True)), abs=1e-9)
    assert result["mean_acc"] == pytest.approx(100 * (right / confusion.sum(1)).mean(), abs=1e-9)
    assert result["pixel_acc"] == pytest.approx(100 * right.sum() / confusion.sum(), abs=1e-9)
    assert result["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert result["num_samples"] == 5


def test_a_training_starts_from_a_classifier_an_encoder_or_other_classes(tmp_path, options):
    paddle.seed(0)
    classifier = build_model(get_config(None, [*MODEL, "MODEL.NUM_CLASSES", "7"]))
    save_weights(classifier, tmp_path / "classifier.safetensors")
    config = get_config(None, [*MODEL, *HEAD[:-1], "5"])
    other = build_model(config)
    save_weights(other, tmp_path / "other.safetensors")
    for file, source, note in (
        ("classifier", classifier, "; decode_head are initialised randomly"),
        (
            "other",
            other.encoder,
            "classifier initialised randomly: 5 classes in the file, 3 in the model",
        ),
    ):
        model = build_model(get_config(None, [*MODEL, *HEAD[:-1], "3"]))
        before = model.decode_head.classifier.weight.numpy()
        report = load_weights(model, tmp_path / f"{file}.safetensors", strict=False)
        assert note in str(report)
        np.testing.assert_array_equal(model.decode_head.classifier.weight.numpy(), before)
        for name, tensor in model.encoder.state_dict().items():
            np.testing.assert_array_equal(tensor.numpy(), source.state_dict()[name].numpy())
    with pytest.raises(InputError, match="encoder"):
        load_weights(model, tmp_path / "classifier.safetensors")


def test_the_head_has_its_own_rate_and_is_what_a_frozen_backbone_leaves(options):
    config = get_config(None, [*options, "TRAIN.HEAD_LR", "10", "TRAIN.LAYER_DECAY", "0.5"])
    model = build_model(get_config(None, [*MODEL, *HEAD[:-1], "3"]))
    scales = layer_scales(config, model)
    # The embedding, two blocks, and the rest: the last norm with the head.
    assert scales["encoder.pos_embed"] == 0.125
    assert scales["encoder.blocks.1.attn.qkv.weight"] == 0.5
    assert (scales["encoder.norm.weight"], scales["decode_head.classifier.weight"]) == (1, 10)
    config = get_config(None, [*options, "TRAIN.FREEZE", "['backbone']"])
    frozen = freeze(config, model)
    assert {name for name, _ in model.named_parameters()} - set(frozen) == {
        "decode_head.classifier.weight",
        "decode_head.classifier.bias",
    }


def test_weights_tell_their_head(tmp_path, options):
    train(options, tmp_path / "run")
    description = description_of(tmp_path / "run" / "checkpoints" / "last")
    assert (description.task, description.classes) == ("segmentation", list(CLASSES))
    assert description.values["HEAD.NAME"] == "linear"
    assert "HEAD.BATCH_NORM" in description.values
    model = build_model(description.to_config())
    load_weights(model, tmp_path / "run" / "checkpoints" / "last")
    model.eval()
    assert model(paddle.zeros([1, 3, 9, 22])).shape == [1, 3, 9, 22]


def test_windows_cover_an_image_and_average_where_they_overlap():
    rng = np.random.default_rng(0)
    images = paddle.to_tensor(rng.random((2, 1, 11, 7), np.float32))
    seen = []

    def forward(window):
        seen.append(window.shape)
        return paddle.concat([window, paddle.full_like(window, len(seen))], axis=1)

    logits = maps(forward, images, Way((4, 4), (3, 2))).numpy()
    # Down 0, 3, 6, 7 and right 0, 2, 3.
    assert seen == [[2, 1, 4, 4]] * 12
    np.testing.assert_allclose(logits[:, 0], images[:, 0].numpy(), rtol=1e-6)
    # The corners are of one window each; in the middle several overlap.
    assert (logits[0, 1, 0, 0], logits[0, 1, -1, -1]) == (1, 12)
    assert logits[0, 1, 0, 2] == 1.5
    seen.clear()
    assert maps(forward, images[:, :, :3, :2], Way((4, 4), (3, 2))).shape == [2, 2, 3, 2]
    assert seen == [[2, 1, 4, 4]]


def test_what_does_not_fit_is_one_line(tmp_path, options):
    for changes, message in (
        (["HEAD.NAME", "none"], "HEAD.NAME is None, expected one of"),
        (
            ["HEAD.INDICES", "[2]"],
            "HEAD.INDICES has 2, VisionTransformer has intermediates -2 to 1",
        ),
        (
            ["HEAD.STRIDE", "17"],
            "HEAD.STRIDE is 17, expected at most IMAGE_SIZE, so that the windows",
        ),
        (["HEAD.STRIDE", "[8,17]"], "expected at most IMAGE_SIZE, so that the windows cover"),
        (["HEAD.STRIDE", "[8,8,8]"], "expected a number of pixels, or two: [down, right]"),
        (["HEAD.NAME", "liner"], "did you mean linear?"),
        (["TRAIN.CLASS_WEIGHTS", "[1.0,2.0]"], "TRAIN.CLASS_WEIGHTS has 2 values, expected 3"),
        (["TRAIN.CLASS_WEIGHTS", "auto"], "there are no training labels; set a factor per class"),
        (["TRAIN.SMOOTHING", "0.1"], "TRAIN.SMOOTHING has no effect without TASK"),
        (
            ["TASK", "classification", "DATA.CROP_MODE", "center"],
            "HEAD.NAME has no effect without TASK segmentation",
        ),
    ):
        refused(message, [*options, *changes], tmp_path / "run", length=None)
    assert not (tmp_path / "run").exists()


def test_an_image_without_a_labelled_pixel_has_loss_0(options):
    config, _, val = get_datasets(get_config(None, options))
    task = tasks.choose(config)(config, val.classes)
    task.prepare_data(val, "val")
    model = build_model(config)
    model.train()
    mask = paddle.full([2, 16, 16], 255, "uint8")
    mask[1, 3, 4] = 2
    batch = {"pixels": paddle.zeros([2, 16, 16, 3], "uint8"), "mask": mask}
    losses = task.step(model, batch, epoch=1)["loss"]
    losses.sum().backward()
    assert losses[0].item() == 0
    assert losses[1].item() > 0
    gradient = model.decode_head.classifier.weight.grad.numpy()
    assert np.isfinite(gradient).all()
    assert not math.isclose(np.abs(gradient).max(), 0)
