"""Runs of DINO: resumed, evaluated, with a large teacher, and what is refused."""

import json

import numpy as np
import paddle
import pytest
from conftest import without
from safetensors.numpy import load_file
from support.training_runs import assert_same_run, records, refused, train, weights, work

from config import get_config
from datasets import get_datasets
from settings.registry import tasks

OPTIONS = [
    "TASK", "dino", "MODEL.PATCH_SIZE", "2", "METHOD.PROTOTYPES", "12", "METHOD.HEAD_WIDTH", "16",
    "METHOD.HEAD_OUTPUTS", "8", "METHOD.LOCAL_VIEWS", "2", "METHOD.LOCAL_SIZE", "4",
]  # fmt: skip
PATCHES = ["METHOD.PATCH_LOSS", "1.0"]


@pytest.fixture
def options(tiny):
    """Options of a small training; the encoder has no classifier."""
    own = without(tiny, "MODEL.NUM_CLASSES", "MODEL.PATCH_SIZE")
    return [*own, *OPTIONS, "DATA.BATCH_SIZE", "16"]


@pytest.mark.smoke
@pytest.mark.parametrize("changes", [[], [*PATCHES, "METHOD.HEAD_BATCH_NORM", "True"]])
def test_a_run_is_resumed_in_the_same_bits(tmp_path, options, changes):
    # The first epoch trains without the last layer, which has no gradients then.
    options += [*changes, "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "2", "TRAIN.ACCUM_ITER", "2"]
    options += ["SAVE_STEPS", "1", "KEEP_LAST", "9", "TRAIN.WEIGHT_DECAY_END", "0.4"]
    train(options, tmp_path / "whole", 48)
    checkpoints = tmp_path / "whole" / "checkpoints"
    for name in ("epoch_0001_sample_000000016", "epoch_0002_sample_000000032"):
        resumed = [*options, "MODEL.RESUME", str(checkpoints / name)]
        train(resumed, tmp_path / name, 48)
        assert_same_run(tmp_path / "whole", tmp_path / name)
    stored = weights(tmp_path / "whole")
    assert {"center", "teacher.head.last_layer.weight_v", "encoder.pos_embed"} < stored.keys()
    # The teacher has followed the student, and isn't it.
    own, average = stored["encoder.pos_embed"], stored["teacher.encoder.pos_embed"]
    assert 0 < np.abs(own - average).max() < 0.1


def test_an_evaluation_repeats_the_last_one_of_the_run(tmp_path, options):
    options += PATCHES
    train([*options, "METHOD.KOLEO", "0.1"], tmp_path / "run", 48)
    last = records(tmp_path / "run")[-1]
    assert last.keys() >= {"loss", "view_loss", "patch_loss", "information"}
    evaluation = ["EVAL", "True", "MODEL.PRETRAINED", str(tmp_path / "run/checkpoints/last")]
    train([*without(options, "TRAIN."), *evaluation], tmp_path / "evaluated", 48)
    result = json.loads((tmp_path / "evaluated" / "result.json").read_text())
    assert result["num_samples"] == 91
    for name in ("loss", "view_loss", "patch_loss", "information"):
        assert result[name] == pytest.approx(last[name], rel=1e-5, abs=1e-6)


def test_the_newest_weights_count_as_the_best(tmp_path, options):
    train([*options, "TRAIN.NUM_EPOCHS", "3"], tmp_path / "run", 48)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["best"]["epoch"] == 3


def test_information_is_that_of_the_teachers_distributions(tmp_path, options):
    config, _, _ = get_datasets(get_config(None, options))
    task = tasks.choose(config)(config)
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 0.05, [50, 2, 12]).astype("float32")

    def information(logits):
        shares = np.exp(logits.astype(np.float64) / 0.04)
        shares /= shares.sum(-1, keepdims=True)
        mean = shares.mean((0, 1))
        entropies = -(shares * np.log(shares)).sum(-1)
        return -(mean * np.log(mean)).sum() - entropies.mean()

    for values in (logits, np.repeat(logits[:1, :1], 50, 0).repeat(2, 1)):
        found = evaluated(task, values)
        assert found["information"] == pytest.approx(information(values), abs=1e-5)
        assert found["num_samples"] == 50
    # All images have the same distribution.
    assert found["information"] == pytest.approx(0, abs=1e-6)


def evaluated(task, logits):
    """The metrics of an evaluation in which the network returns the teacher's ``logits``."""
    whole = paddle.to_tensor(logits)
    current = []

    def forward(images, local, chosen):
        part = current[0]
        center = paddle.zeros([12])
        return {"student": part, "teacher": part, "features": part, "center": center}

    def batches():
        for begin in range(0, len(logits), 16):
            current[:] = [whole[begin : begin + 16]]
            yield {"pixels": paddle.zeros([len(current[0]), 2, 8, 8, 1], "uint8")}

    return task.evaluate(forward, batches())


def test_a_large_teacher_stays_as_it_is(tmp_path, options):
    teacher = [*options, "METHOD.PATCH_LOSS", "1.0", "MODEL.EMBED_DIM", "24"]
    train(teacher, tmp_path / "teacher", 48)
    path = tmp_path / "teacher/checkpoints/last"
    before = load_file(path / "model.safetensors")
    student = [*options, *PATCHES, "METHOD.LARGE_TEACHER", str(tmp_path / "teacher/config.yaml")]
    student += ["METHOD.LARGE_TEACHER_PATH", str(path), "TRAIN.MODEL_EMA", "True"]
    train(student, tmp_path / "student", 48)
    stored = weights(tmp_path / "student")
    assert not any(name.startswith(("teacher.", "mask_token")) for name in stored)
    assert {"encoder.pos_embed", "head.mlp.0.weight", "center", "patch_center"} < stored.keys()
    assert (tmp_path / "student/checkpoints/last/ema.safetensors").exists()
    after = load_file(path / "model.safetensors")
    assert all((after[name] == value).all() for name, value in before.items())
    log = (tmp_path / "student/log.txt").read_text()
    assert "large teacher vit_base_patch16_224" in log


def test_what_does_not_fit_is_one_line(tmp_path, options):
    train([*options], tmp_path / "teacher", 48)
    file = str(tmp_path / "teacher/config.yaml")
    path = str(tmp_path / "teacher/checkpoints/last")
    large = ["METHOD.LARGE_TEACHER", file, "METHOD.LARGE_TEACHER_PATH", path]
    for changes, message in (
        (["TRAIN.MODEL_EMA", "True"], "TRAIN.MODEL_EMA is True, but the teacher of TASK dino is"),
        (
            ["METHOD.LOCAL_SIZE", "5"],
            "METHOD.LOCAL_SIZE is 5, but VisionTransformer takes images of",
        ),
        (
            [*PATCHES, "METHOD.MASK_RATIOS", "[0.5,0.1]"],
            "METHOD.MASK_RATIOS is [0.5, 0.1], expected",
        ),
        (
            [*PATCHES, "MODEL.PATCH_SIZE", "8", "METHOD.LOCAL_SIZE", "8"],
            "an image has 1 patch, but masking needs several",
        ),
        (
            [*PATCHES, "MODEL.GLOBAL_POOL", "avg"],
            "and doesn't apply to patches; set MODEL.GLOBAL_POOL",
        ),
        (
            ["MODEL.TYPE", "resnet", *PATCHES],
            "isn't a transformer with one token per patch",
        ),
        ([*PATCHES, "MODEL.GLOBAL_POOL", "token_avg"], "set METHOD.SEPARATE_HEAD True"),
        (
            [*PATCHES, "METHOD.MIN_BLOCK", "9"],
            "METHOD.MIN_BLOCK is 9, but no block of this size fits",
        ),
        ([*PATCHES, "METHOD.MASK_RATIOS", "[0.5,1.0]"], "METHOD.MASK_RATIOS masks 16 of 4 x 4"),
        (
            ["TRAIN.EARLY_STOP", "2"],
            "TRAIN.EARLY_STOP is 2, but the loss of TASK dino doesn't show",
        ),
        (large[:2], "METHOD.LARGE_TEACHER_PATH is None; set it to the teacher's weights"),
        ([*large, "METHOD.PROTOTYPES", "13"], "has 12 prototypes, METHOD.PROTOTYPES is 13"),
        (
            ["METHOD.LARGE_TEACHER", "gone/config.yaml", *large[2:]],
            "METHOD.LARGE_TEACHER: no configuration file gone/config.yaml",
        ),
        ([*large, *PATCHES], "but METHOD.LARGE_TEACHER was trained without it; set it to 0"),
        ([*large, "DATA.IMAGENET_MEAN", "0.4"], "normalises images differently"),
        (["METHOD.LARGE_TEACHER", "mae_vit_digits", *large[2:]], "has TASK mae, expected dino"),
        (["DATA.MULTI_SCALE", "[8,16]"], "DATA.MULTI_SCALE has no effect"),
        (["TRAIN.CROP_SCALE", "[0.5,1.0]"], "TRAIN.CROP_SCALE has no effect"),
        (["METHOD.SEPARATE_HEAD", "True"], "METHOD.SEPARATE_HEAD has no effect"),
        (["METHOD.MIN_BLOCK", "4"], "METHOD.MIN_BLOCK is 4, but no patches are masked"),
        (
            [*large, *PATCHES, "METHOD.MIN_BLOCK", "4"],
            "METHOD.MIN_BLOCK is 4, but no patches are masked",
        ),
        (
            ["TRAIN.FREEZE", "['teacher.*']"],
            "TRAIN.FREEZE: 'teacher.*' matches parameters that aren't trained anyway (teacher.",
        ),
        (
            ["MODEL.TYPE", "Mixer", "MODEL.PATCH_SIZE", "2"],
            "METHOD.LOCAL_SIZE is 4: MlpMixer needs images of one size; use another MODEL.TYPE, such"
            " as vit, deit, eva, swin, swinv2, xcit or convnext; or set METHOD.LOCAL_VIEWS 0",
        ),
        (
            ["METHOD.PROTOTYPES", "13", "MODEL.PRETRAINED", path],
            "; if its METHOD keys differ, set those of its run's config.yaml",
        ),
        (["METHOD.PROTOTYPES", "1"], "METHOD.PROTOTYPES is 1, expected 2 or more"),
        (["METHOD.PROTOTYPES", "0"], "METHOD.PROTOTYPES is 0, expected 1 to 1000000"),
        (["METHOD.MOMENTUM", "1.0"], "METHOD.MOMENTUM is 1.0, expected 0 <= value < 1"),
    ):
        given = options
        if changes[0] == "MODEL.TYPE":
            given = without(options, "MODEL.")
        refused(message, [*given, *changes], tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("is_sound", [True, False])
def test_a_collapse_is_seen_within_two_epochs(tmp_path, is_sound):
    changes = ["TRAIN.NUM_EPOCHS", "2", "TRAIN.WARMUP_EPOCHS", "1", "VALIDATE_FREQ", "1"]
    changes += ["DATA.NUM_WORKERS", "0", "REPORT", "False", "OUTPUT", str(tmp_path / "run")]
    if not is_sound:
        # The teacher's outputs aren't centred.
        changes += ["METHOD.CENTERING", "centering", "METHOD.CENTER_MOMENTUM", "1.0"]
        changes += ["METHOD.KOLEO", "0", "METHOD.HEAD_BATCH_NORM", "False"]
    work(*get_datasets(get_config("dino_digits", changes)))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("warning: collapse") == (0 if is_sound else 2)
    found = [line["information"] for line in records(tmp_path / "run") if line["split"] == "val"]
    assert len(found) == 2
    path = str(tmp_path / "run/checkpoints/last")
    evaluation = ["EVAL", "True", "MODEL.PRETRAINED", path, "OUTPUT", str(tmp_path / "eval")]
    work(*get_datasets(get_config(str(tmp_path / "run/config.yaml"), evaluation)))
    log = (tmp_path / "eval" / "log.txt").read_text()
    assert log.count("warning: collapse") == (0 if is_sound else 1)
    assert min(found) > 0.1 if is_sound else max(found) < 1e-3
