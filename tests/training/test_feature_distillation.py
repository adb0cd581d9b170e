"""Feature distillation: a student's last map learns to be its teacher's."""

import json

import numpy as np
import paddle
import pytest
from conftest import without
from safetensors.numpy import load_file
from support.ranks import run_ranks
from support.training_runs import assert_same_run, records, refused, train, weights

from config import get_config
from errors import InputError
from models import create_model
from training.feature_distillation import feature_distance
from weights import save_weights


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


@pytest.mark.smoke
def test_the_distance_is_the_papers_formula():
    found = 3 * numbers(2, 4, 4, 6)
    wanted = 5 + 2 * numbers(2, 6, 4, 4, seed=1)
    target = wanted.transpose(0, 2, 3, 1).astype(np.float64)
    target = (target - target.mean(-1, keepdims=True)) / np.sqrt(
        target.var(-1, keepdims=True) + 1e-5
    )
    far = np.abs(found - target)
    each = np.where(far < 2, far**2 / 4, far - 1)  # torch's smooth_l1_loss with beta 2
    assert (far > 2).any()
    loss = feature_distance(paddle.to_tensor(found), paddle.to_tensor(wanted))
    np.testing.assert_allclose(loss.numpy(), each.mean((1, 2, 3)), rtol=1e-5)
    # of twice the grid, its mean is the same map
    large = paddle.to_tensor(wanted.repeat(2, 2).repeat(2, 3))
    np.testing.assert_allclose(
        feature_distance(paddle.to_tensor(found), large).numpy(), loss.numpy(), rtol=1e-5
    )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Options for a student of a ViT with more channels, twice the places and other classes."""
    from conftest import TINY

    folder = tmp_path_factory.mktemp("teacher") / "run"
    options = without(TINY, "MODEL.PATCH_SIZE", "MODEL.EMBED_DIM")
    train(
        [*options, "MODEL.PATCH_SIZE", "2", "MODEL.EMBED_DIM", "24", "DATA.BATCH_SIZE", "8"],
        folder,
        8,
    )
    told = [
        "TRAIN.TEACHER_MODEL",
        f"{folder}/config.yaml",
        "TRAIN.TEACHER_PATH",
        f"{folder}/checkpoints/last",
    ]
    return ["TRAIN.DISTILLATION_TYPE", "feature", *told]


@pytest.mark.parametrize("kind", ["ViT", "Swin"])
def test_a_student_goes_on_in_the_same_bits(tmp_path, tiny, teacher, kind):
    if kind == "Swin":
        tiny = without(tiny, "MODEL.")
        tiny += [
            "MODEL.TYPE",
            "Swin",
            "MODEL.PATCH_SIZE",
            "2",
            "MODEL.EMBED_DIM",
            "8",
            "MODEL.STAGE_DEPTHS",
            "[1,1]",
        ]
        tiny += ["MODEL.NUM_HEADS", "[1,2]", "MODEL.WINDOW_SIZE", "2", "MODEL.NUM_CLASSES", "10"]
    options = [
        *tiny,
        *teacher,
        "DATA.BATCH_SIZE",
        "8",
        "TRAIN.BASE_LR",
        "0.01",
        "TRAIN.MODEL_EMA",
        "True",
    ]
    options += ["SAVE_STEPS", "1", "KEEP_LAST", "9", "REPORT_FREQ", "1", "TRAIN.LAYER_DECAY", "0.8"]
    train(options, tmp_path / "whole", 48)
    checkpoints = tmp_path / "whole" / "checkpoints"
    train(
        [*options, "MODEL.RESUME", str(checkpoints / "epoch_0001_sample_000000016")],
        tmp_path / "resumed",
        48,
    )
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    left = load_file(checkpoints / "last" / "unmerged.safetensors")
    width = 16
    assert {name: array.shape for name, array in left.items()} == {
        f"{split}/feature_projection.{part}": shape
        for split in ("val", "ema")
        for part, shape in (("weight", (width, 24)), ("bias", (24,)))
    }
    plain = weights(tmp_path / "whole")
    assert not any("projection" in name for name in plain)
    state = {
        name.partition("/")[0] for name in load_file(checkpoints / "last" / "optimizer.safetensors")
    }
    assert state == plain.keys() | {"feature_projection.weight", "feature_projection.bias"}
    train(
        [
            *without(options, "TRAIN.", "SAVE", "KEEP", "REPORT"),
            "EVAL",
            "True",
            "MODEL.PRETRAINED",
            str(checkpoints / "last"),
        ],
        tmp_path / "eval",
        48,
    )
    results = [
        json.loads((tmp_path / run / "result.json").read_text()) for run in ("whole", "eval")
    ]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-6)


def test_the_features_alone_are_learnt(tmp_path, tiny, teacher):
    """With a share of 1 the classifier gets no gradient, and the loss is the maps' distance, which
    falls.
    """
    options = [
        *without(tiny, "TRAIN.NUM_EPOCHS"),
        *teacher,
        "TRAIN.DISTILLATION_ALPHA",
        "1.0",
        "DATA.BATCH_SIZE",
        "16",
    ]
    options += [
        "TRAIN.NUM_EPOCHS",
        "6",
        "TRAIN.BASE_LR",
        "0.01",
        "TRAIN.WEIGHT_DECAY",
        "0.0",
        "REPORT_FREQ",
        "100",
    ]
    train(options, tmp_path / "run", 64)
    losses = [record["loss"] for record in records(tmp_path / "run") if record["split"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    assert not load_file(tmp_path / "run" / "checkpoints" / "last" / "optimizer.safetensors")[
        "head.weight/moment2_0"
    ].any()


def test_ranks_average_the_gradients_of_what_is_added(tmp_path, tiny, teacher):
    """Of the projection, and of an adapter's matrices."""
    base = create_model(
        "vit_digits", patch_size=4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=4.0
    )
    save_weights(base, tmp_path / "base.safetensors")
    options = [
        *tiny,
        *teacher,
        "DATA.GLOBAL_BATCH",
        "8",
        "TRAIN.OPTIMIZER.NAME",
        "SGD",
        "TRAIN.BASE_LR",
        "0.1",
    ]
    options += [
        "TRAIN.ADAPTER.NAME",
        "lora",
        "MODEL.PRETRAINED",
        str(tmp_path / "base.safetensors"),
    ]
    for ranks in (1, 2):
        assert len(set(run_ranks(train, options, tmp_path / str(ranks), 32, ranks=ranks))) == 1
    one, two = (
        load_file(tmp_path / n / "checkpoints" / "last" / "unmerged.safetensors") for n in "12"
    )
    parts = {name.rpartition(".")[0].rpartition(".")[2] for name in one}
    assert parts == {"lora_A", "lora_B", "qkv", "proj", "val/feature_projection"}
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-6, err_msg=name)
        assert one[name].any()


def test_maps_that_cant_be_aligned_are_refused(tmp_path, tiny, teacher):
    one_place = [*without(tiny, "MODEL.PATCH_SIZE"), "MODEL.PATCH_SIZE", "8", *teacher]
    refused(
        "the student's last map is [1, 1], the teacher's [4, 4]: their positions can't be",
        one_place,
        tmp_path / "run",
    )
    with pytest.raises(
        InputError, match="MODEL.PATCH_DROP is 0.5, expected 0 with DISTILLATION_TYPE feature"
    ):
        get_config(None, [*teacher, "MODEL.PATCH_DROP", "0.5"])
    with pytest.raises(
        InputError,
        match="TRAIN.LOSS is 'token_label', expected another optimizer with DISTILLATION_TYPE fea",
    ):
        get_config(None, [*teacher, "TRAIN.LOSS", "token_label"])
