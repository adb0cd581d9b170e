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
from datasets import get_dataloader, get_datasets
from settings.registry import tasks
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
    masks = [train_set.sample((epoch, 3, 0))["mask"] for epoch in (1, 1, 2)]
    np.testing.assert_array_equal(masks[0], masks[1])
    assert (masks[0] != masks[2]).any()
    first, again = (next(iter(get_dataloader(config, val, "val"))) for _ in range(2))
    np.testing.assert_array_equal(first["mask"].numpy(), again["mask"].numpy())
    assert list(first["mask"].shape) == [len(first["pixels"]), 16]
    assert 1 <= first["mask"].astype("int64").sum(1).min().item() <= 6


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
        (["MODEL.PATCH_SIZE", "4"], "METHOD.TOKENIZER has 4 x 4 tokens, the model 2 x 2 patches"),
        (["METHOD.MASK_RATIO", "0.01"], "masks 0 of 4 x 4 patches, expected 1 to 15"),
        (["METHOD.MASK_RATIO", "0.99"], "masks 16 of 4 x 4 patches, expected 1 to 15"),
        (["METHOD.MIN_BLOCK", "9"], "METHOD.MIN_BLOCK is 9, but no such block fits"),
        (["METHOD.TOKENIZER", "vit_digits"], "has TASK classification, expected tokenizer"),
        (["METHOD.TOKENIZER_PATH", "nowhere"], "nowhere"),
        (["METHOD.TOKENIZER_PATH", "null"], "give its YAML and its weights"),
        (["DATA.IMAGE_SIZE", "16"], "has DATA.IMAGE_SIZE 8, the model 16; make them equal"),
        (["METHOD.HEAD_LAYERS", "2"], "EARLY_LAYERS is 0"),
        (["MODEL.PATCH_DROP", "0.5"], "MODEL.PATCH_DROP is 0.5"),
        (["DATA.MULTI_SCALE", "[8,12]"], "BeitPretraining takes images of 8 x 8"),
        (["MODEL.TYPE", "ConvMixer"], "take a BEiT, a ViT or an EVA"),
    ],
)
def test_what_does_not_fit_is_one_line_at_the_start(tmp_path, tokenizer, options, message):
    base = [*BEIT, *tokenizer, "DATA.BATCH_SIZE", "16"]
    if "ConvMixer" in options:
        base = without(base, "MODEL.")
    # Of a key that is given twice the last value counts.
    refused(message, [*base, *options], tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["METHOD.DECODER_HEADS", "3"],
            "DECODER_WIDTH 16 is not a multiple of METHOD.DECODER_HEADS 3",
        ),
        (["METHOD.TEACHER", "vit_digits"], "give both or neither"),
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
    assert not (tmp_path / "run" / "reconstructions.png").exists()
    # Such a tokenizer serves BEiT without its teacher's weights.
    beit = ["METHOD.TOKENIZER", f"{tmp_path}/run/config.yaml"]
    beit += ["METHOD.TOKENIZER_PATH", f"{tmp_path}/run/checkpoints/last"]
    train([*BEIT, *beit, "DATA.BATCH_SIZE", "16"], tmp_path / "beit", 32)
    small = [*options, "MODEL.PATCH_SIZE", "4"]
    refused("has 16 places, the tokenizer 2 x 2 tokens", small, tmp_path / "refused")
