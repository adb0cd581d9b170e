"""The tasks tokenizer and beit: a tokenizer trains, then BEiT predicts its tokens."""

import json

import numpy as np
import paddle
import pytest
from conftest import TINY, without
from PIL import Image
from support.ranks import run_ranks
from support.stopped_runs import stop_at
from support.training_runs import assert_same_run, records, refused, train, weights

from config import get_config
from datasets import ArrayDataset, get_dataloader, get_datasets
from errors import InputError
from models import build_model
from settings.registry import tasks
from training.reconstructions import shown_columns
from weights import load_weights

SHARED = [*without(TINY, "MODEL.NUM_CLASSES", "TRAIN.NUM_EPOCHS", "DATA.BATCH_SIZE")]
SHARED += ["MODEL.PATCH_SIZE", "2", "TRAIN.NUM_EPOCHS", "2"]
DECODER = ["METHOD.DECODER_WIDTH", "16", "METHOD.DECODER_HEADS", "2", "METHOD.CODE_DIM", "8"]
TOKENIZER = ["TASK", "tokenizer", *SHARED, *DECODER, "METHOD.VOCABULARY", "12"]
BEIT = ["TASK", "beit", *SHARED, "METHOD.MIN_BLOCK", "2"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Options that name a trained tokenizer of 4 x 4 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer") / "run"
    train([*TOKENIZER, "DATA.BATCH_SIZE", "16"], folder, 64)
    return [
        "METHOD.TOKENIZER",
        f"{folder}/config.yaml",
        "METHOD.TOKENIZER_PATH",
        f"{folder}/checkpoints/last",
    ]


def test_a_tokenizer_reports_its_codes_and_draws_reconstructions(tmp_path, tokenizer):
    train([*TOKENIZER, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 64)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["num_samples"] == 91
    # What the kept weights compute on the same images.
    config, _, val = get_datasets(get_config(None, [*TOKENIZER, "DATA.BATCH_SIZE", "16"]))
    task = tasks.choose(config)(config)
    network = task.build_network()
    load_weights(network, tmp_path / "run" / "checkpoints" / "last")
    network.eval()
    pixels = np.stack([val.sample(index)["pixels"] for index in range(91)])
    images = task.normalize(paddle.to_tensor(pixels))
    values = network(images)
    tokens = values["tokens"].numpy()
    shares = np.bincount(tokens.ravel(), minlength=12) / tokens.size
    used = shares[shares > 0]
    assert result["usage"] == pytest.approx(100 * len(used) / 12)
    assert result["perplexity"] == pytest.approx(np.exp(-(used * np.log(used)).sum()), rel=1e-6)
    error = float(values["reconstruction"].mean())
    assert result["reconstruction"] == pytest.approx(error, rel=1e-5)
    with Image.open(tmp_path / "run" / "reconstructions.png") as picture:
        drawn = np.asarray(picture)
    # Eight digits above, their reconstructions below.
    assert drawn.shape == (200, 800)
    assert np.abs(drawn[:96:12, :96:12].astype(int) - pixels[0, :, :, 0]).max() <= 1


@pytest.mark.parametrize("quantizer", ["gumbel", "nearest"])
def test_a_tokenizer_on_two_processes_is_that_on_one(tmp_path, quantizer):
    options = [*TOKENIZER, "METHOD.QUANTIZER", quantizer, "TRAIN.NUM_EPOCHS", "1"]
    for ranks in (1, 2):
        batch = ["DATA.BATCH_SIZE", str(16 // ranks)]
        run_ranks(train, [*options, *batch], tmp_path / str(ranks), 48, ranks=ranks)
    one, two = (weights(tmp_path / name) for name in "12")
    for key, value in one.items():
        np.testing.assert_allclose(two[key], value, atol=1e-4, rtol=1e-4, err_msg=key)


def test_the_temperature_falls_from_the_first_epoch_to_the_last():
    options = [*TOKENIZER, "TRAIN.NUM_EPOCHS", "5", "METHOD.TEMPERATURE_END", "0.0625"]
    config = get_config(None, options)
    task = tasks.choose(config)(config)
    found = [task._temperature(epoch) for epoch in range(1, 6)]
    assert found == pytest.approx([1, 0.5, 0.25, 0.125, 0.0625])


def both(options, folder, ranks):
    """Trains, and trains again with a stop and a resume."""
    train(options, folder / f"whole_{ranks}", 48)
    _, last = stop_at(2, options, folder / f"stopped_{ranks}", 48)
    checkpoint = folder / f"stopped_{ranks}" / "checkpoints" / last
    train([*options, "MODEL.RESUME", str(checkpoint)], folder / f"stopped_{ranks}", 48)


@pytest.mark.smoke
@pytest.mark.parametrize("head_layers", ["0", "1"])
def test_a_graph_trains_as_the_layers_do(tmp_path, head_layers):
    nearest = [*TOKENIZER, "METHOD.QUANTIZER", "nearest", "DATA.BATCH_SIZE", "16"]
    beit = [*BEIT, "METHOD.TOKENIZER", f"{tmp_path}/tokenizer_True/config.yaml"]
    beit += ["METHOD.TOKENIZER_PATH", f"{tmp_path}/tokenizer_True/checkpoints/last"]
    beit += ["MODEL.DEPTH", "2", "DATA.BATCH_SIZE", "16", "METHOD.HEAD_LAYERS", head_layers]
    if head_layers != "0":
        beit += ["METHOD.EARLY_LAYERS", "1"]
    for name, options in (("tokenizer", nearest), ("beit", beit)):
        for traced in ("True", "False"):
            train([*options, "TO_STATIC", traced], tmp_path / f"{name}_{traced}", 32)
        losses = [records(tmp_path / f"{name}_{traced}")[-1]["loss"] for traced in (True, False)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_codes_go_on_in_the_same_bits(tmp_path, ranks):
    """A checkpoint within an epoch holds them as they were at the last update."""
    options = [*TOKENIZER, "METHOD.QUANTIZER", "nearest", "METHOD.CODE_DECAY", "0.9"]
    options += ["TRAIN.ACCUM_ITER", "2", "TRAIN.MODEL_EMA", "True", "DATA.BATCH_SIZE", "6"]
    run_ranks(both, options, tmp_path, ranks, ranks=ranks)
    assert_same_run(tmp_path / f"whole_{ranks}", tmp_path / f"stopped_{ranks}")


@pytest.mark.parametrize("further", [0, 1])
def test_beit_goes_on_in_the_same_bits_and_two_processes_are_one(tmp_path, tokenizer, further):
    options = [*BEIT, *tokenizer]
    if further:
        options += ["METHOD.HEAD_LAYERS", "1", "METHOD.EARLY_LAYERS", "1", "MODEL.DEPTH", "2"]
    for ranks in (1, 2):
        batch = ["DATA.BATCH_SIZE", str(16 // ranks)]
        run_ranks(both, [*options, *batch], tmp_path, ranks, ranks=ranks)
        assert_same_run(tmp_path / f"whole_{ranks}", tmp_path / f"stopped_{ranks}")
    one, two = (weights(tmp_path / f"whole_{ranks}") for ranks in (1, 2))
    for key, value in one.items():
        np.testing.assert_allclose(two[key], value, atol=1e-4, rtol=1e-4, err_msg=key)
    assert one.keys() >= {"encoder.cls_token", "mask_token", "lm_head.weight"}
    ends = [records(tmp_path / f"whole_{ranks}")[-1] for ranks in (1, 2)]
    assert ends[0]["loss"] == pytest.approx(ends[1]["loss"], abs=1e-4)
    assert ends[0]["token_acc"] == pytest.approx(ends[1]["token_acc"], abs=1.5)
    log = (tmp_path / "whole_1" / "log.txt").read_text()
    assert "6 of 16 patches are masked" in log


def test_masks_are_of_the_sample_and_the_epoch_and_an_evaluations_of_the_sample(tokenizer):
    config, train_set, val = get_datasets(
        get_config(None, [*BEIT, *tokenizer, "DATA.BATCH_SIZE", "16"])
    )
    task = tasks.choose(config)(config)
    task.build_network()
    for dataset, mode in ((train_set, "train"), (val, "val")):
        task.prepare_data(dataset, mode)
    masks = [train_set.sample((epoch, 3, 0))["masked"] for epoch in (1, 1, 2)]
    np.testing.assert_array_equal(masks[0], masks[1])
    assert (masks[0] != masks[2]).any()
    first, again = (next(iter(get_dataloader(config, val, "val"))) for _ in range(2))
    np.testing.assert_array_equal(first["masked"].numpy(), again["masked"].numpy())
    assert list(first["masked"].shape) == [len(first["pixels"]), 16]
    assert 1 <= first["masked"].astype("int64").sum(1).min().item() <= 6


def test_an_evaluation_of_beit_needs_the_tokenizer_and_gives_the_runs_numbers(tmp_path, tokenizer):
    options = [*BEIT, *tokenizer, "DATA.BATCH_SIZE", "16"]
    train(options, tmp_path / "run", 48)
    last = str(tmp_path / "run" / "checkpoints" / "last")
    evaluated = without(options, "TRAIN.")
    train([*evaluated, "EVAL", "True", "MODEL.PRETRAINED", last], tmp_path / "eval", 48)
    of_run = records(tmp_path / "run")[-1]
    result = json.loads((tmp_path / "eval" / "result.json").read_text())
    for key in ("loss", "token_acc", "num_samples"):
        assert result[key] == pytest.approx(of_run[key], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["MODEL.PATCH_SIZE", "4"],
            "METHOD.TOKENIZER has 4 x 4 tokens, but the model 2 x 2 patches",
        ),
        (["METHOD.MASK_RATIO", "0.01"], "masks 0 of 4 x 4 patches, expected 1 to 15"),
        (["METHOD.MASK_RATIO", "0.99"], "masks 16 of 4 x 4 patches, expected 1 to 15"),
        (["METHOD.MIN_BLOCK", "9"], "METHOD.MIN_BLOCK is 9, but no block of this size fits"),
        (["METHOD.TOKENIZER", "vit_digits"], "has TASK classification, expected tokenizer"),
        (["METHOD.TOKENIZER_PATH", "nowhere"], "nowhere"),
        (["METHOD.TOKENIZER", "nowhere.yaml"], "nowhere.yaml"),
        (["METHOD.TOKENIZER", "mae_vit_digits"], "has TASK mae, expected tokenizer"),
        (["METHOD.TOKENIZER_PATH", "README.md"], "README.md"),
        (["METHOD.TOKENIZER_PATH", "null"], "set its YAML file and its weights"),
        (["DATA.IMAGE_SIZE", "16"], "has DATA.IMAGE_SIZE 8, the model 16; make them equal"),
        (["METHOD.HEAD_LAYERS", "2"], "EARLY_LAYERS is 0"),
        (["MODEL.PATCH_DROP", "0.5"], "MODEL.PATCH_DROP is 0.5"),
        (["DATA.MULTI_SCALE", "[8,12]"], "BeitPretraining takes images of 8 x 8"),
        (["MODEL.TYPE", "ConvMixer"], "use a BEiT, a ViT or an EVA"),
    ],
)
def test_what_does_not_fit_is_one_line_at_the_start(tmp_path, tokenizer, options, message):
    base = [*BEIT, *tokenizer, "DATA.BATCH_SIZE", "16"]
    if "ConvMixer" in options:
        base = without(base, "MODEL.")
    # Of a key that is given twice the last value counts.
    refused(message, [*base, *options], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_the_tokenizers_are_one_line(tmp_path, tokenizer):
    base = [*BEIT, *tokenizer, "DATA.BATCH_SIZE", "16"]
    mae = ["METHOD.DECODER_WIDTH", "16", "METHOD.DECODER_HEADS", "2", "METHOD.DECODER_DEPTH", "1"]
    train(["TASK", "mae", *SHARED, *mae, "DATA.BATCH_SIZE", "16"], tmp_path / "mae", 32)
    of_mae = ["METHOD.TOKENIZER_PATH", f"{tmp_path}/mae/checkpoints/last"]
    message = "has weights of TASK mae, expected tokenizer; use the weights of a tokenizer"
    refused(message, [*base, *of_mae], tmp_path / "run")
    other = [*TOKENIZER, "METHOD.VOCABULARY", "13", "DATA.IMAGENET_MEAN", "0.2"]
    train([*other, "DATA.BATCH_SIZE", "16"], tmp_path / "other", 32)
    weights_of_other = ["METHOD.TOKENIZER_PATH", f"{tmp_path}/other/checkpoints/last"]
    message = "was trained with DATA.IMAGENET_MEAN [0.2], found [0.5] in its YAML; use the config"
    refused(message, [*base, *weights_of_other], tmp_path / "run")
    yaml = tmp_path / "yaml.yaml"
    yaml.write_text(f"BASE: {tmp_path}/other/config.yaml\nMETHOD: {{VOCABULARY: 12}}\n")
    message = "codebook is [13, 8], the model's [12, 8]"
    named = ["METHOD.TOKENIZER", str(yaml)]
    refused(message, [*base, *weights_of_other, *named], tmp_path / "run")
    # Two processes say the same.
    base = [*base, "DATA.BATCH_SIZE", "8"]
    cases = [of_mae, weights_of_other, ["METHOD.MASK_RATIO", "0.99"], ["METHOD.MIN_BLOCK", "100"]]
    cases = [[*base, *case] for case in cases]
    alone = refusals(cases, tmp_path / "run")
    assert "no block of this size fits into the 6 masked of 4 x 4 patches" in alone[3]
    assert run_ranks(refusals, cases, tmp_path / "run") == [alone, alone]
    assert not (tmp_path / "run").exists()


def refusals(cases, output):
    """What training says with each case's options."""
    said = []
    for options in cases:
        with pytest.raises(InputError) as caught:
            train(options, output, 32)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["METHOD.DECODER_HEADS", "3"],
            "DECODER_WIDTH 16 is not a multiple of METHOD.DECODER_HEADS 3",
        ),
        (
            ["METHOD.TEACHER", "vit_digits"],
            "METHOD.TEACHER_PATH is None; set it to the teacher's weights",
        ),
        (
            ["METHOD.TEACHER_PATH", "nowhere"],
            "METHOD.TEACHER_PATH has no effect without METHOD.TEACHER",
        ),
        (
            ["METHOD.TEACHER_OUTPUTS", "8"],
            "METHOD.TEACHER_OUTPUTS has no effect without METHOD.TEACHER",
        ),
        (
            ["METHOD.CODE_DECAY", "0.9"],
            "METHOD.CODE_DECAY has no effect without METHOD.QUANTIZER nearest",
        ),
        (["MODEL.PATCH_DROP", "0.5"], "MODEL.PATCH_DROP is 0.5"),
        (["DATA.MULTI_SCALE", "[8,12]"], "Tokenizer takes images of 8 x 8"),
    ],
)
def test_a_tokenizer_that_can_not_be_is_one_line_at_the_start(tmp_path, options, message):
    refused(message, [*TOKENIZER, "DATA.BATCH_SIZE", "16", *options], tmp_path / "run")


def test_a_teachers_features_are_reconstructed(tmp_path):
    teacher = [*without(TINY, "MODEL.PATCH_SIZE"), "MODEL.PATCH_SIZE", "2", "DATA.BATCH_SIZE", "8"]
    train(teacher, tmp_path / "teacher", 32)
    told = [
        "METHOD.TEACHER",
        f"{tmp_path}/teacher/config.yaml",
        "METHOD.TEACHER_PATH",
        f"{tmp_path}/teacher/checkpoints/last",
    ]
    options = [*TOKENIZER, *told, "METHOD.QUANTIZER", "nearest", "DATA.BATCH_SIZE", "16"]
    train(options, tmp_path / "run", 64)
    # 1 minus a cosine.
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 0 < result["reconstruction"] < 1.2
    # The file tells its codes, which k-means has begun.
    codes = weights(tmp_path / "run")["codebook"]
    np.testing.assert_allclose(np.linalg.norm(codes, axis=1), 1, rtol=1e-5)
    assert not (tmp_path / "run" / "reconstructions.png").exists()
    # Such a tokenizer serves BEiT without its teacher's weights.
    beit = ["METHOD.TOKENIZER", f"{tmp_path}/run/config.yaml"]
    beit += ["METHOD.TOKENIZER_PATH", f"{tmp_path}/run/checkpoints/last"]
    train([*BEIT, *beit, "DATA.BATCH_SIZE", "16"], tmp_path / "beit", 32)
    assert_draws_right_and_wrong_tokens(tmp_path / "beit", [*BEIT, *beit])
    small = [*options, "MODEL.PATCH_SIZE", "4"]
    refused("has 16 positions, the tokenizer 2 x 2 tokens", small, tmp_path / "refused")


def test_a_teachers_classifier_maps_each_places_features(tmp_path):
    """As CLIP's projection does in BEiT v2."""
    teacher = [*without(TINY, "MODEL.PATCH_SIZE"), "MODEL.PATCH_SIZE", "2", "DATA.BATCH_SIZE", "8"]
    train(teacher, tmp_path / "teacher", 32)
    options = [*TOKENIZER, "METHOD.QUANTIZER", "nearest", "DATA.BATCH_SIZE", "16"]
    options += ["METHOD.TEACHER", f"{tmp_path}/teacher/config.yaml"]
    options += ["METHOD.TEACHER_PATH", f"{tmp_path}/teacher/checkpoints/last"]
    train([*options, "METHOD.TEACHER_OUTPUTS", "10"], tmp_path / "run", 32)
    task, network, pixels, _ = of_run(tmp_path / "run", [*options, "METHOD.TEACHER_OUTPUTS", "10"])
    images = task.normalize(pixels)
    model = build_model(get_config(f"{tmp_path}/teacher/config.yaml"))
    load_weights(model, tmp_path / "teacher" / "checkpoints" / "last")
    model.eval()
    expected = model.head(model.forward_features(images)[:, 1:])
    np.testing.assert_allclose(task.teacher(images).numpy(), expected.numpy(), atol=1e-5)
    assert network.decode_task_layer[2].weight.shape[1] == 10
    seven = [*options, "METHOD.TEACHER_OUTPUTS", "7"]
    refused("head.weight is [16, 10], the model's [16, 7]", seven, tmp_path / "refused")


def drawn_rows(run, rows):
    """The rows of a run's reconstructions.png, [rows, images, 8, 8]."""
    with Image.open(run / "reconstructions.png") as picture:
        drawn = np.asarray(picture)
    assert drawn.shape == (100 * rows, 800)
    # An image of 8 pixels along a side takes 96, and a gap of 4.
    return drawn.reshape(rows, 100, 8, 100)[:, :96:12, :, :96:12].transpose(0, 2, 1, 3)


def of_run(run, options):
    """The task, the network of a run's last checkpoint, and what is drawn of it."""
    config, _, val = get_datasets(get_config(None, [*options, "DATA.BATCH_SIZE", "16"]))
    val = ArrayDataset(config, "val", val.images[:91], val.labels[:91], val.classes)
    task = tasks.choose(config)(config)
    network = task.build_network()
    load_weights(network, run / "checkpoints" / "last")
    network.eval()
    task.prepare_data(val, "val")
    names = ["pixels", *val.draws]
    pixels, *drawn = shown_columns(val, *names)
    return task, network, pixels, drawn[0] if drawn else None


def of_pixels(patches):
    """[B, 16] -> [B, 8, 8]: the values of patches of 2 x 2 pixels."""
    return patches.reshape(-1, 4, 4).repeat(2, axis=1).repeat(2, axis=2)


def assert_draws_right_and_wrong_tokens(run, options):
    task, network, pixels, masked = of_run(run, options)
    images = task.normalize(pixels)
    right = (network.predict(images, masked) == task.teacher(images)).numpy()
    masked = masked.numpy().astype(bool)
    assert masked.any(1).all()
    first, _, third = drawn_rows(run, 3)
    expected = np.where(of_pixels(masked), 255 * of_pixels(right), first)
    np.testing.assert_allclose(third, expected, atol=1)


def test_beit_draws_its_masks_and_what_the_predicted_tokens_decode_to(tmp_path, tokenizer):
    # The tokenizer's normalisation is another one.
    options = [*BEIT, *tokenizer, "DATA.IMAGENET_MEAN", "0.3"]
    train([*options, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 48)
    task, network, pixels, masked = of_run(tmp_path / "run", options)
    first, second, third, fourth = drawn_rows(tmp_path / "run", 4)
    shown = pixels.numpy()[..., 0]
    np.testing.assert_allclose(first, shown, atol=1)
    hidden = of_pixels(masked.numpy()).astype(bool)
    np.testing.assert_allclose(second, np.where(hidden, round(0.3 * 255), shown), atol=1)
    images = task.normalize(pixels)
    tokens = task.teacher(images).numpy()
    predicted = network.predict(images, masked).numpy()
    mixed = np.where(masked.numpy() > 0, predicted, tokens)
    model = task.tokenizer
    for row, each in ((third, tokens), (fourth, mixed)):
        decoded = model.pictures(model.decode(model.codes(paddle.to_tensor(each)))).numpy()
        # The tokenizer's images have the mean 0.5.
        expected = (decoded[:, 0] * 0.5 + 0.5).clip(0, 1) * 255
        np.testing.assert_allclose(row, expected, atol=1)
