"""Pre-training by SimMIM: masks, pictures, and runs on any number of processes."""

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
from settings.registry import tasks
from training.reconstructions import draw_reconstructions
from training.simmim import draw_mask, masked_count
from weights import load_weights

OPTIONS = ["TASK", "simmim", "METHOD.MASK_PATCH", "2", "MODEL.PATCH_SIZE", "2"]


@pytest.fixture
def options(tiny):
    """Options of a small training; the encoder has no classifier."""
    return [*without(tiny, "MODEL.NUM_CLASSES", "MODEL.PATCH_SIZE"), *OPTIONS]


# ------------------------------------------------------------------ masks


@pytest.mark.parametrize(
    ("squares", "ratio", "count"), [(36, 0.6, 22), (49, 0.6, 30), (5, 0.6, 3), (16, 0.01, 1)]
)
def test_the_number_of_masked_squares_is_rounded_up(squares, ratio, count):
    assert masked_count(squares, ratio) == count
    rng = np.random.default_rng(0)
    assert draw_mask(rng, units=(1, squares), ratio=ratio).sum() == count


def test_each_square_is_masked_equally_often():
    rng = np.random.default_rng(0)
    masks = np.stack([draw_mask(rng, units=(2, 5), ratio=0.6) for _ in range(4000)])
    assert (masks.sum((1, 2)) == 6).all()
    # The deviation of a mean is sqrt(0.6 x 0.4 / 4000).
    np.testing.assert_allclose(masks.mean(0), 0.6, atol=4 * 0.0078)


def datasets_of(options):
    config, data, val = get_datasets(get_config(None, options))
    task = tasks.choose(config)(config)
    network = task.build_network()
    task.prepare_data(data, "train")
    task.prepare_data(val, "val")
    return task, network, data, val


def test_a_samples_mask_depends_on_the_epoch_in_training_alone(options):
    _, _, data, val = datasets_of(options)
    first, again, later = (data.sample((epoch, 3, 0))["masked"] for epoch in (0, 0, 1))
    assert first.shape == (4, 4)
    assert first.sum() == 10
    np.testing.assert_array_equal(first, again)
    assert (first != later).any()
    first, later = (val.sample((epoch, 3, 0))["masked"] for epoch in (0, 1))
    np.testing.assert_array_equal(first, later)


# ------------------------------------------------------------------- runs


def train_all(runs):
    for run in runs:
        train(*run)


@pytest.mark.smoke
def test_a_run_is_resumed_in_the_same_bits_and_is_the_same_on_two_processes(tmp_path, options):
    options += ["DATA.GLOBAL_BATCH", "16", "SAVE_STEPS", "1", "KEEP_LAST", "9"]
    options += ["TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.BASE_LR", "0.1"]
    middle = str(tmp_path / "one" / "checkpoints" / "epoch_0001_sample_000000016")
    runs = [
        (options, tmp_path / "one", 48),
        ([*options, "MODEL.RESUME", middle], tmp_path / "resumed", 48),
    ]
    train_all(runs)
    assert_same_run(tmp_path / "one", tmp_path / "resumed")
    run_ranks(train_all, [(options, tmp_path / "two", 48)])
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert_close(one, two, atol=1e-6)
    assert {"mask_token", "decoder.0.weight", "encoder.pos_embed"} < one.keys()
    losses = [records(tmp_path / name)[-1]["loss"] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_an_evaluations_loss_is_the_mean_over_the_images(tmp_path, options):
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
    pixels = np.stack([sample["pixels"] for sample in samples])
    masks = np.stack([sample["masked"] for sample in samples])
    images = task.normalize(paddle.to_tensor(pixels))
    predicted = network.reconstruct(images, paddle.to_tensor(masks)).numpy()
    hidden = masks.repeat(2, axis=1).repeat(2, axis=2)[:, None] > 0
    differences = np.abs(predicted - images.numpy())[hidden]
    assert result["loss"] == pytest.approx(differences.mean(), abs=1e-6)


def test_masks_of_everything_and_sizes_that_do_not_fit_are_one_line(tmp_path, options):
    for changes, message in (
        (["METHOD.MASK_RATIO", "0.95"], "masks the whole image, which has 16 squares"),
        (["METHOD.MASK_PATCH", "8"], "masks the whole image, which has 1 squares of 8 x 8"),
        (["METHOD.MASK_PATCH", "32"], "METHOD.MASK_PATCH is 32, which doesn't divide images of 8"),
        (
            ["METHOD.MASK_PATCH", "3"],
            "METHOD.MASK_PATCH is 3, not a multiple of MODEL.PATCH_SIZE 2",
        ),
        (["DATA.MULTI_SCALE", "[8,16]"], "but SimMIM takes images of 8 x 8; set it to null"),
        (["MODEL.NUM_CLASSES", "10"], "MODEL.NUM_CLASSES has no effect without TASK"),
        (["TRAIN.SMOOTHING", "0.1"], "TRAIN.SMOOTHING has no effect without TASK"),
    ):
        refused(message, [*options, *changes], tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------- pictures


def test_the_picture_has_each_image_what_is_seen_of_it_and_its_prediction(tmp_path, options):
    paddle.seed(0)
    task, network, _, val = datasets_of(options)
    network.eval()
    task.draw(network, val, tmp_path)
    with Image.open(tmp_path / "reconstructions.png") as file:
        picture = np.asarray(file)
    # Three rows of eight images of 8 x 8, each enlarged to 96 x 96 and followed by a gap of 4.
    assert picture.shape == (300, 800)
    columns = picture.reshape(3, 100, 8, 100)[:, :96:12, :, :96:12].transpose(2, 0, 1, 3)
    # The images are spread over the 364 of the dataset.
    indices = [0, 51, 103, 155, 207, 259, 311, 363]
    for index, (image, seen, predicted) in zip(indices, columns, strict=True):
        sample = val.sample(index)
        np.testing.assert_array_equal(image, sample["pixels"][:, :, 0])
        hidden = np.kron(sample["masked"], np.ones((2, 2))) > 0
        np.testing.assert_array_equal(seen[~hidden], image[~hidden])
        np.testing.assert_array_equal(predicted[~hidden], image[~hidden])
        # 0, which is the mean colour.
        assert set(seen[hidden]) == {128}
        assert len(set(predicted[hidden])) > 8


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (5, "L")])
def test_pictures_of_any_number_of_channels(tmp_path, channels, mode):
    config = get_config(None, ["DATA.IMAGENET_MEAN", "0.0", "DATA.IMAGENET_STD", "1.0"])
    image = paddle.full([1, channels, 2, 4], 0.5)
    draw_reconstructions(config, [image, image * 4], tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert (picture.mode, picture.size) == (mode, (100, 104))
        values = np.asarray(picture.convert("L"))
    assert (values[0, 0], values[52, 0], values[51, 0]) == (128, 255, 255)
