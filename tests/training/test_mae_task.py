"""Pre-training by MAE: masks, pictures, and runs on any number of processes."""

import json

import numpy as np
import paddle
import pytest
from conftest import without
from PIL import Image
from support.ranks import run_ranks
from support.training_runs import assert_close, assert_same_run, records, refused, train, weights

from config import get_config
from datasets import get_datasets
from models import build_model
from settings.registry import tasks
from training.mae import MaskedAutoencoding
from weights import load_weights

OPTIONS = [
    *("TASK", "mae", "MODEL.PATCH_SIZE", "2"),
    *("METHOD.DECODER_WIDTH", "8", "METHOD.DECODER_DEPTH", "1", "METHOD.DECODER_HEADS", "2"),
]


@pytest.fixture
def options(tiny):
    """Options of a small training; the encoder has no classifier."""
    return [*without(tiny, "MODEL.NUM_CLASSES", "MODEL.PATCH_SIZE"), *OPTIONS]


def datasets_of(options):
    config, data, val = get_datasets(get_config(None, options))
    task = tasks.choose(config)(config)
    network = task.build_network()
    task.prepare_data(data, "train")
    task.prepare_data(val, "val")
    return task, network, data, val


def test_a_samples_mask_depends_on_the_epoch_in_training_alone(options):
    task, _, data, val = datasets_of(options)
    assert task.note == "4 of 16 patches are visible"
    first, again, later, other = (
        data.sample(key)["order"] for key in ((0, 3, 0), (0, 3, 0), (1, 3, 0), (0, 4, 0))
    )
    np.testing.assert_array_equal(np.sort(first), np.arange(16))
    np.testing.assert_array_equal(first, again)
    assert (first != later).any()
    assert (first != other).any()
    first, later = (val.sample((epoch, 3, 0))["order"] for epoch in (0, 1))
    np.testing.assert_array_equal(first, later)


def test_each_patch_is_visible_equally_often(options):
    _, network, data, _ = datasets_of(options)
    rng = np.random.default_rng(0)
    visible = np.stack([data.draws["order"](rng)[: network.num_visible] for _ in range(4000)])
    shares = np.bincount(visible.ravel(), minlength=16) / 4000
    # The deviation of a mean is sqrt(0.25 x 0.75 / 4000).
    np.testing.assert_allclose(shares, 0.25, atol=4 * 0.0069)


def train_all(runs):
    for run in runs:
        train(*run)


@pytest.mark.smoke
def test_a_run_is_resumed_in_the_same_bits_and_is_the_same_on_two_processes(tmp_path, options):
    options += ["DATA.GLOBAL_BATCH", "16", "SAVE_STEPS", "1", "KEEP_LAST", "9"]
    options += ["TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.BASE_LR", "0.1"]

    def runs(name):
        middle = str(tmp_path / name / "checkpoints" / "epoch_0001_sample_000000016")
        resumed = [*options, "MODEL.RESUME", middle]
        return [(options, tmp_path / name, 48), (resumed, tmp_path / f"{name}_resumed", 48)]

    train_all(runs("one"))
    run_ranks(train_all, runs("two"))
    for name in ("one", "two"):
        assert_same_run(tmp_path / name, tmp_path / f"{name}_resumed")
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert_close(one, two, atol=1e-6)
    assert {"mask_token", "decoder_embed.weight", "encoder.pos_embed"} < one.keys()
    losses = [records(tmp_path / name)[-1]["loss"] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize("options_of_method", [[], ["METHOD.NORM_TARGET", "False"]])
def test_an_evaluations_loss_is_the_mean_over_the_images(tmp_path, options, options_of_method):
    options += options_of_method
    train([*options, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 48)
    path = tmp_path / "run" / "checkpoints" / "best"
    evaluation = ["EVAL", "True", "MODEL.PRETRAINED", str(path)]
    train([*without(options, "TRAIN."), *evaluation], tmp_path / "evaluated", 48)
    result = json.loads((tmp_path / "evaluated" / "result.json").read_text())
    assert result["num_samples"] == 91
    assert result["loss"] == pytest.approx(records(tmp_path / "run")[-1]["loss"], abs=1e-6)
    assert (tmp_path / "evaluated" / "reconstructions.png").exists()

    task, network, _, val = datasets_of(options)
    load_weights(network, path)
    network.eval()
    samples = [val.sample(index) for index in range(91)]
    pixels, order = (
        paddle.to_tensor(np.stack([sample[name] for sample in samples]))
        for name in ("pixels", "order")
    )
    images = task.normalize(pixels)
    _, reconstructed = network.reconstruct(images, order)
    errors = ((reconstructed - images) ** 2).numpy()
    if task.norm_target:
        # Errors of a normalised patch are those of its pixels over their variance.
        patches = images.numpy().reshape(91, 4, 2, 4, 2)
        variance = patches.var(axis=(2, 4), ddof=1, keepdims=True) + 1e-6
        errors = (errors.reshape(91, 4, 2, 4, 2) / variance).reshape(91, 1, 8, 8)
    # Visible patches have no error; 12 of 16 are masked.
    assert result["loss"] == pytest.approx(errors.mean() * 16 / 12, rel=1e-4)


def test_what_does_not_fit_is_one_line(tmp_path, options):
    for changes, message in (
        (["METHOD.MASK_RATIO", "0.95"], "leaves 0 of 16 patches visible, expected 1 to 15"),
        (["METHOD.MASK_RATIO", "1.0"], "METHOD.MASK_RATIO is 1.0, expected 0.01 to 0.99"),
        (
            ["MODEL.PATCH_SIZE", "8"],
            "an image has 1 of MAE's patches, but masking needs several",
        ),
        (["MODEL.PATCH_SIZE", "1"], "METHOD.NORM_TARGET is True, but a patch has a single value"),
        (["METHOD.DECODER_HEADS", "3"], "DECODER_WIDTH 8 is not a multiple of METHOD.DECODER_HE"),
        (["METHOD.DECODER_WIDTH", "2"], "METHOD.DECODER_WIDTH is 2, expected a multiple of 4"),
        (["MODEL.PATCH_DROP", "0.5"], "MODEL.PATCH_DROP is 0.5, expected 0"),
        (
            ["MODEL.PATCH_DROP", "0.5", "MODEL.PATCH_DROP_END", "0"],
            "MODEL.PATCH_DROP is 0.5, expected 0",
        ),
        (["MODEL.TYPE", "resnet"], "MAE can't train ResNet: it needs a Hiera, or an encoder"),
        (["DATA.MULTI_SCALE", "[8,16]"], "but MaskedAutoencoder takes images of 8 x 8; set it to"),
        (["MODEL.NUM_CLASSES", "10"], "MODEL.NUM_CLASSES has no effect without TASK"),
        (["TRAIN.SMOOTHING", "0.1"], "TRAIN.SMOOTHING has no effect without TASK"),
    ):
        given = options
        if changes[0] == "MODEL.TYPE":
            given = without(options, "MODEL.")
        refused(message, [*given, *changes], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_picture_has_each_image_its_visible_patches_and_the_reconstruction(tmp_path, options):
    paddle.seed(0)
    task, network, _, val = datasets_of(options)
    network.eval()
    task.draw(network, val, tmp_path)
    with Image.open(tmp_path / "reconstructions.png") as file:
        picture = np.asarray(file)
    # Three rows of eight images of 8 x 8, each enlarged to 96 x 96 and followed by a gap of 4.
    assert picture.shape == (300, 800)
    columns = picture.reshape(3, 100, 8, 100)[:, :96:12, :, :96:12].transpose(2, 0, 1, 3)
    indices = np.linspace(0, len(val) - 1, 8).astype(int)
    mean = round(255 * task.config.DATA.IMAGENET_MEAN[0])
    for index, (image, seen, reconstructed) in zip(indices.tolist(), columns, strict=True):
        sample = val.sample(index)
        np.testing.assert_array_equal(image, sample["pixels"][:, :, 0])
        hidden = np.zeros(16, bool)
        hidden[sample["order"][4:]] = True
        hidden = hidden.reshape(4, 4).repeat(2, axis=0).repeat(2, axis=1)
        for part in (seen, reconstructed):
            np.testing.assert_array_equal(part[~hidden], image[~hidden])
        assert np.abs(seen[hidden].astype(int) - mean).max() <= 1
        assert np.ptp(reconstructed[hidden]) > 20


# Hiera on enlarged digits of 2 x 2 mask units.
HIERA = [
    "TASK", "mae", "DATA.DATASET", "digits", "DATA.IMAGE_SIZE", "64", "DATA.IMAGE_CHANNELS", "1",
    "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5", "DATA.NUM_WORKERS", "0",
    "MODEL.TYPE", "Hiera", "MODEL.STAGE_DEPTHS", "[1,1,1,1]", "MODEL.EMBED_DIM", "4",
    "MODEL.Q_POOL", "2", "MODEL.WEIGHT_INIT", "mae", "REPORT", "False",
    "METHOD.DECODER_WIDTH", "8", "METHOD.DECODER_DEPTH", "1", "METHOD.DECODER_HEADS", "2",
    "TRAIN.NUM_EPOCHS", "1", "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.OPTIMIZER.NAME", "SGD",
    "TRAIN.BASE_LR", "0.1", "DATA.GLOBAL_BATCH", "16",
]  # fmt: skip


def test_a_hiera_is_trained_the_same_on_two_processes_and_becomes_a_model(tmp_path):
    options = [*HIERA, "SAVE_STEPS", "1", "KEEP_LAST", "9"]
    middle = str(tmp_path / "one" / "checkpoints" / "epoch_0001_sample_000000016")
    resumed = [*options, "MODEL.RESUME", middle]
    train_all([(options, tmp_path / "one", 32), (resumed, tmp_path / "resumed", 32)])
    assert_same_run(tmp_path / "one", tmp_path / "resumed")
    run_ranks(train_all, [(options, tmp_path / "two", 32)])
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert_close(one, two, atol=1e-6)
    assert {"multi_scale_fusion_heads.0.weight", "encoder.head.norm.weight"} < one.keys()
    log = (tmp_path / "one" / "log.txt").read_text()
    # The method's own share: 0.6 of 4 units are masked, rounded up.
    assert "1 of 4 mask units are visible" in log

    # A column of three pictures for each of eight images.
    with Image.open(tmp_path / "one" / "reconstructions.png") as picture:
        rows = np.asarray(picture).reshape(3, 132, 8, 132)[:, :128:2, :, :128:2]
    for image, seen, reconstructed in rows.transpose(2, 0, 1, 3):
        # 0 is the mean colour.
        units = seen.reshape(2, 32, 2, 32).transpose(0, 2, 1, 3)
        hidden = (units == 128).all(axis=(2, 3))
        assert hidden.sum() == 3
        hidden = hidden.repeat(32, axis=0).repeat(32, axis=1)
        np.testing.assert_array_equal(seen[~hidden], image[~hidden])
        np.testing.assert_array_equal(reconstructed[~hidden], image[~hidden])
        assert np.ptp(reconstructed[hidden]) > 20

    # Pooled three times, as for a classification.
    config = get_config(None, [*without(HIERA, "TASK", "METHOD.", "MODEL.Q_POOL", "TRAIN.")])
    model = build_model(config)
    report = load_weights(model, tmp_path / "one" / "checkpoints" / "last", strict=False)
    assert set(report.fresh) == {"head.fc.weight", "head.fc.bias"}
    found = model.state_dict()["blocks.3.proj.weight"].numpy()
    np.testing.assert_array_equal(found.T, one["encoder.blocks.3.proj.weight"])


def test_what_does_not_fit_a_hiera_is_one_line(tmp_path):
    for changes, message in (
        (["METHOD.MASK_RATIO", "0.8"], "leaves 0 of 4 mask units visible, expected 1 to 3"),
        (["DATA.IMAGE_SIZE", "48"], "32, a mask unit's side; choose one that is"),
        (["MODEL.PATCH_DROP", "0.5"], "MODEL.PATCH_DROP is 0.5, expected 0"),
        (["METHOD.DECODER_HEADS", "3"], "DECODER_WIDTH 8 is not a multiple of METHOD.DECODER_HE"),
    ):
        refused(message, [*HIERA, *changes], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_picture_that_fails_is_one_line_of_the_log(tmp_path, options, monkeypatch):
    def draw(*_):
        raise ValueError("8 rows of\n7 columns")

    monkeypatch.setattr(MaskedAutoencoding, "draw", draw)
    train([*options, "DATA.GLOBAL_BATCH", "16"], tmp_path / "run", 16)
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    [line] = [line for line in lines if "picture of the evaluation" in line]
    assert "can't be written (ValueError: 8 rows of" in line
    assert "writes it again" in line
    assert (tmp_path / "run" / "result.json").exists()
