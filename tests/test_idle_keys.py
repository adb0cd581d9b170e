"""A key that does nothing where it stands is an error: every key says what it needs, and that is true to the code."""

import copy
import itertools
import time
from pathlib import Path

import numpy as np
import paddle
import pytest
from conftest import write_images
from golden.optim_problem import gradients
from PIL import Image
from small import Small
from test_losses import Fixed

from config import get_config, resolved, with_values
from config_checks import NEEDS, carried_out
from configs.architectures import all_keys, architectures
from datasets import get_dataloader, get_dataset
from errors import InputError
from loading.transforms import BatchTransform, Mixup, RandomErasing, TrainTransform, mixes
from options import given, leaves
from training.command_line import config_from_arguments
from training.losses import build_criterion
from training.optim import ModelEma, build_optimizer, build_schedule, clip_gradients

DEFAULTS = dict(leaves(get_config()))


def met(key, values):
    return all(need.met(values) for need in NEEDS[key])


# ------------------------------------------------------------ the declarations


@pytest.mark.smoke
def test_every_key_declares_what_it_needs():
    models = all_keys().keys()
    assert set(DEFAULTS) - models == set(NEEDS) - models
    assert set(NEEDS) <= set(DEFAULTS) | models
    for one in architectures().values():  # an architecture that takes a key takes those that it needs
        needed = {key for key in one.arguments for need in NEEDS.get(key, ()) for key in need.keys}
        assert needed <= (set(DEFAULTS) - models) | one.arguments.keys()


def test_what_is_of_training_does_nothing_under_eval():
    """But for the flags that scripts for both pass on."""
    kept = {"TRAIN.LAST_EPOCH", "TRAIN.ACCUM_ITER"}
    evaluating = DEFAULTS | {"EVAL": True}
    idle = {key for key in DEFAULTS if key.startswith(("TRAIN.", "DIST.STRATEGY."))} - kept
    assert not any(met(key, evaluating) for key in idle)
    assert all(met(key, evaluating) for key in [*kept, "AMP", "DATA.BATCH_SIZE", "DATA.BATCH_SIZE_EVAL"])


@pytest.mark.parametrize("evaluating", [False, True])
def test_an_idle_key_is_refused_at_its_default_too(evaluating):
    mode = ["EVAL", str(evaluating)]
    values, refused = DEFAULTS | {"EVAL": evaluating}, set()
    for key, default in DEFAULTS.items():
        if key in ("EVAL", "BASE") or default is None:
            continue
        if met(key, values) if key in NEEDS else True:
            get_config(None, [*mode, key, default])
            continue
        with pytest.raises(
            InputError, match=rf"^command line: {key} does nothing (without|with|under) .*; leave it out"
        ):
            get_config(None, [*mode, key, default])
        refused.add(key)
    of_both = {
        "TRAIN.MODEL_EMA_DECAY",
        "TRAIN.MIXUP_PROB",
        "DATA.SYNTHETIC_SIZE",
        "DIST.STRATEGY.sharding_configs.stage",
    }
    assert refused >= of_both | ({"TRAIN.MIXUP_ALPHA", "TO_STATIC", "SAVE_FREQ"} if evaluating else {"EVAL_ENGINE"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["TRAIN.MODEL_EMA_DECAY", "0.9"],
            "DECAY does nothing without TRAIN.MODEL_EMA True; leave it out, or set that",
        ),
        (["TRAIN.TEACHER_PATH", "x"], "TEACHER_PATH does nothing without TRAIN.DISTILLATION_TYPE hard or soft; leave"),
        (["TRAIN.BCE_SUM", "True"], "TRAIN.BCE_SUM does nothing without TRAIN.LOSS bce; leave it out, or set that"),
        (
            ["TRAIN.GRAD_CLIP_MODE", "agc"],
            "TRAIN.GRAD_CLIP_MODE does nothing without TRAIN.GRAD_CLIP; leave it out, or",
        ),
        (
            ["TRAIN.MIXUP_OFF_EPOCH", "3"],
            "nothing without TRAIN.MIXUP_ALPHA or TRAIN.CUTMIX_ALPHA above 0, or TRAIN.CUT",
        ),
        (
            ["TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.OPTIMIZER.BETAS", "[0.9,0.99]"],
            "with TRAIN.OPTIMIZER.NAME SGD or LARS; leave",
        ),
        (
            ["MODEL.PRETRAINED_CLASSES", "imagenet22k"],
            "PRETRAINED_CLASSES does nothing without MODEL.PRETRAINED; leave",
        ),
        (
            ["TRAIN.LAYER_DECAY_GROUPS", "timm"],
            "LAYER_DECAY_GROUPS does nothing without TRAIN.LAYER_DECAY; leave it out",
        ),
        (["EVAL_ENGINE", "inference"], "EVAL_ENGINE does nothing without EVAL True; leave it out, or set that"),
        (
            ["EVAL", "True", "TRAIN.MIXUP_ALPHA", "0.2"],
            "command line: TRAIN.MIXUP_ALPHA does nothing under EVAL; leave",
        ),
        (["DATA.DATASET", "digits", "DATA.DATA_PATH", "x"], "DATA.DATA_PATH does nothing with DATA.DATASET digits or"),
        (
            ["DATA.BATCH_SIZE", "8", "DATA.GLOBAL_BATCH", "16"],
            "BATCH_SIZE does nothing with DATA.GLOBAL_BATCH, of which",
        ),
    ],
)
def test_the_line_names_what_is_missing(options, message):
    with pytest.raises(InputError) as caught:
        get_config(None, options)
    assert message in str(caught.value)
    assert str(caught.value).count("\n") == 0


# ------------------------------------------------- they are true to the code


def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8))


def of_schedules(config):
    schedule = build_schedule(config, 10, 64)
    return [schedule(update) for update in range(60)]


def of_updates(config):
    model, train = Small(), config.TRAIN
    ema = ModelEma(model, train.MODEL_EMA_DECAY, train.MODEL_EMA_WARMUP) if train.MODEL_EMA else None
    optimizer, norms = build_optimizer(config, model), []
    for update in range(3):
        optimizer.clear_grad()
        model.set_gradients(gradients(update))
        norms.append(clip_gradients(config, model).numpy())
        optimizer.step()
        if ema:
            ema.update(model, update)
    return [*model.arrays().values(), *norms, *(p.numpy() for p in ema.model.parameters() if ema)] if ema else [
        *model.arrays().values(), *norms,
    ]  # fmt: skip


def of_images(config):
    transform, found = TrainTransform(config), []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        found.append(transform(image(), rng))
        if config.TRAIN.RANDOM_ERASE_PROB:
            found.append(RandomErasing(config).draw(rng))
    return found


def of_batches(config):
    config = with_values(config, DATA__IMAGE_SIZE=16)
    pixels = paddle.to_tensor(np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), np.uint8))
    columns, made = {"pixels": pixels, "labels": paddle.arange(8) % 4}, []
    for epoch, step in itertools.product((1, 2), range(1, 5)):
        if mixes(config):
            columns["mixed"] = paddle.to_tensor(Mixup(config).draw(epoch, step, 8))
        made += BatchTransform(config)(columns, epoch)
    return [tensor.numpy() for tensor in made]


def of_losses(config):
    kind = config.TRAIN.DISTILLATION_TYPE
    logits = paddle.to_tensor(np.random.default_rng(1).normal(size=(6, 5)).astype("float32"))
    return build_criterion(config, None, Fixed() if kind else None)(None, logits, paddle.arange(6) % 5).numpy()


def of_data(config):
    train, val = get_dataset(config, "train"), get_dataset(config, "val")
    loader = get_dataloader(config, train, "train")
    order = [key for batch in loader.batch_sampler for key in batch]
    return [loader.slots, len(train), getattr(val, "exact", None), getattr(val, "root", None), order[:40]]


def of_strategies(config):
    return list(carried_out(config).items())


O, S = "TRAIN.OPTIMIZER.", "TRAIN.LR_SCHEDULER."  # noqa: E741
MIXUP, CUTMIX, MINMAX = (("TRAIN.MIXUP_ALPHA", 0.8), ("TRAIN.CUTMIX_ALPHA", 1.0), ("TRAIN.CUTMIX_MINMAX", [0.2, 0.5]))
FLEET = ("DIST.ENGINE", "fleet")
# what shows an effect, the keys with a value that isn't the default, and where to try each of them
TRIED = [
    (
        of_schedules,
        {
            "TRAIN.WARMUP_START_LR": 0.5, "TRAIN.END_LR": 0.5, "TRAIN.COOLDOWN_EPOCHS": 2, "TRAIN.LR_SCALING": "sqrt",
            f"{S}MILESTONES": [3], f"{S}DECAY_EPOCHS": 2, f"{S}DECAY_RATE": 0.3, f"{S}POWER": 1.0,
        },
        [
            *([(f"{S}NAME", name)] for name in ("cosine", "linear", "poly", "constant")),
            *([(f"{S}NAME", name), (f"{S}DECAY_EPOCHS", 1)] for name in ("step",)),
            *([(f"{S}NAME", name), (f"{S}MILESTONES", [1, 2, 3, 4, 5])] for name in ("multistep", "multi-step")),
            [("TRAIN.WARMUP_EPOCHS", 0)], [("TRAIN.LINEAR_SCALED_LR", 32)],
        ],
    ),
    (
        of_updates,
        {
            f"{O}EPS": 0.5, f"{O}BETAS": [0.3, 0.7], f"{O}MOMENTUM": 0.2, f"{O}NESTEROV": False,
            f"{O}TRUST_COEFFICIENT": 0.1,
            "TRAIN.GRAD_CLIP_MODE": "value", "TRAIN.MODEL_EMA_DECAY": 0.1, "TRAIN.MODEL_EMA_WARMUP": False,
            "TRAIN.LAYER_DECAY_GROUPS": "timm",
        },
        [
            *([(f"{O}NAME", name)] for name in ("AdamW", "Adam", "SGD", "LAMB", "LARS", "Lion", "Muon")),
            [(f"{O}NAME", "SGD"), (f"{O}MOMENTUM", 0.0)], [(f"{O}NAME", "SGD"), ("TRAIN.GRAD_CLIP", 0.01)],
            [("TRAIN.MODEL_EMA", True)], [("TRAIN.LAYER_DECAY", 0.5)],
        ],
    ),
    (
        of_images,
        {
            "TRAIN.CROP_SCALE": [0.3, 0.4], "TRAIN.CROP_RATIO": [1.0, 1.0], "TRAIN.RANDOM_ERASE_MODE": "rand",
            "TRAIN.RANDOM_ERASE_COUNT": 3, "TRAIN.CROP_PCT": 0.6,
        },
        [
            *([("TRAIN.CROP", crop)] for crop in ("simple", "random_resized_once", "short_side", "squash")),
            [], [("TRAIN.RANDOM_ERASE_PROB", 1.0)],
        ],
    ),
    (
        of_batches,
        {
            "TRAIN.MIXUP_PROB": 0.5, "TRAIN.MIXUP_MODE": "elem", "TRAIN.MIXUP_OFF_EPOCH": 1,
            "TRAIN.MIXUP_SWITCH_PROB": 0.1, "TRAIN.CUTMIX_ALPHA": 0.3,
        },
        [[], [MIXUP], [CUTMIX], [MIXUP, CUTMIX], [MINMAX], [MIXUP, MINMAX]],
    ),
    (
        of_losses,
        {
            "TRAIN.BCE_TARGET_THRESH": 0.5, "TRAIN.BCE_SUM": True, "TRAIN.DISTILLATION_ALPHA": 0.2,
            "TRAIN.DISTILLATION_TAU": 3.0,
        },
        [[], *([("TRAIN.DISTILLATION_TYPE", kind)] for kind in ("hard", "soft")), [("TRAIN.LOSS", "bce")]],
    ),
    (
        of_data,
        {
            "DATA.PREFETCH": 5, "DATA.SYNTHETIC_SIZE": 24, "DATA.DATA_PATH": "other", "DATA.FAST_EVAL": True,
        },
        [*([("DATA.DATASET", name)] for name in ("digits", "synthetic", "folder")), [("DATA.NUM_WORKERS", 0)]],
    ),
    (
        of_strategies,
        {
            "DIST.STRATEGY.gradient_merge": True, "DIST.STRATEGY.recompute": True, "DIST.STRATEGY.amp": True,
            "DIST.STRATEGY.gradient_merge_configs.k_steps": 3,
        },
        [[], [FLEET], [FLEET, ("DIST.STRATEGY.gradient_merge", True)]],
    ),
]  # fmt: skip
SMALL = {
    "DATA.DATASET": "digits", "DATA.NUM_WORKERS": 1, "DATA.BATCH_SIZE": 4, "DATA.IMAGE_SIZE": 16,
    "MODEL.NUM_CLASSES": "auto", "TRAIN.NUM_EPOCHS": 6, "TRAIN.WARMUP_EPOCHS": 1, "TRAIN.BASE_LR": 0.1,
    "TRAIN.SMOOTHING": 0.1,
}  # fmt: skip


def changed_by(config, **values):
    return with_values(config, **{key.replace(".", "__"): value for key, value in values.items()})


@pytest.mark.parametrize(("effects", "keys", "places"), TRIED, ids=lambda of: getattr(of, "__name__", ""))
def test_a_key_acts_where_it_says_and_nowhere_else(effects, keys, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("config.check", lambda config: None)  # DIST.STRATEGY asks other keys to be as it says
    for folder in (".", "other"):
        for part in ("train", "val"):
            write_images(tmp_path / folder / part, {"a": 6, "b": 6})
    classes = {"of_losses": 5, "of_batches": 4}.get(effects.__name__, "auto")
    base = changed_by(get_config(), **SMALL | {"DATA.DATA_PATH": ".", "MODEL.NUM_CLASSES": classes})
    seen = set()
    for place in places:
        config = changed_by(base, **dict(place))
        before = effects(config)
        for key, value in keys.items():
            assert DEFAULTS[key] != value
            if dict(place).get(key) == value:
                continue
            after = effects(changed_by(config, **{key: value}))
            acts = len(before) != len(after) or not all(map(np.array_equal, before, after))
            assert acts == met(key, dict(leaves(config)) | {key: value}), (place, key)
            seen.add((key, acts))
    assert {key for key, acts in seen if acts} == {key for key, acts in seen if not acts} == set(keys)


def test_a_shard_shuffle_over_which_files_were_chosen_does_nothing(tmp_path):
    write_images(tmp_path / "train", {"a": 6, "b": 6})
    write_images(tmp_path / "val", {"a": 6, "b": 6})
    (tmp_path / "recipe.yaml").write_text("DATA: {DATASET: shards, SHARD_SHUFFLE: 2, NUM_WORKERS: 0, BATCH_SIZE: 4}\n")
    config = get_config(tmp_path / "recipe.yaml", ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(tmp_path)])
    assert of_data(config) == of_data(changed_by(config, **{"DATA.SHARD_SHUFFLE": None}))


def test_sharding_over_which_another_engine_was_chosen_does_nothing(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "DIST: {ENGINE: fleet, STRATEGY: {gradient_merge: true, gradient_merge_configs: {k_steps: 4}}}\n"
    )
    config = get_config(tmp_path / "recipe.yaml", ["DIST.ENGINE", "data_parallel"])
    assert (carried_out(config), config.TRAIN.ACCUM_ITER) == ({}, 1)


# --------------------------------------------------------- where it was set

RECIPE = """TRAIN:
  MIXUP_ALPHA: 0.8
  CUTMIX_ALPHA: 1.0
  MIXUP_PROB: 0.5
  OPTIMIZER: {BETAS: [0.9, 0.95]}
"""
OFF = ["TRAIN.MIXUP_ALPHA", "0", "TRAIN.CUTMIX_ALPHA", "0", "TRAIN.OPTIMIZER.NAME", "SGD"]


@pytest.fixture
def recipe(tmp_path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_what_was_switched_off_over_a_key_is_meant(recipe):
    assert get_config(recipe, OFF).TRAIN.MIXUP_PROB == 0.5
    (recipe.parent / "mine.yaml").write_text("BASE: recipe.yaml\nTRAIN: {MIXUP_ALPHA: 0, CUTMIX_ALPHA: 0}\n")
    assert get_config(recipe.parent / "mine.yaml").TRAIN.MIXUP_PROB == 0.5
    with pytest.raises(InputError, match=r"^command line: TRAIN.MIXUP_PROB does nothing without TRAIN.MIXUP_ALPHA or"):
        get_config(recipe.parent / "mine.yaml", ["TRAIN.MIXUP_PROB", "0.5"])
    with pytest.raises(InputError, match=r"^command line: TRAIN.MIXUP_PROB does nothing"):
        get_config(recipe, [*OFF, "TRAIN.MIXUP_PROB", "1.0"])


def test_a_file_is_named_that_sets_an_idle_key(tmp_path):
    (tmp_path / "idle.yaml").write_text("TRAIN: {WARMUP_EPOCHS: 0, WARMUP_START_LR: 1e-6}\n")
    (tmp_path / "mine.yaml").write_text("BASE: idle.yaml\nTRAIN: {BASE_LR: 1.0}\n")
    with pytest.raises(
        InputError, match=r"/idle.yaml: TRAIN.WARMUP_START_LR does nothing without TRAIN.WARMUP_EPOCHS above 0;"
    ):
        get_config(tmp_path / "mine.yaml")


def test_none_takes_back_what_another_file_set(tmp_path):
    (tmp_path / "mine.yaml").write_text("TRAIN: {LOSS: auto, BCE_TARGET_THRESH: null}\n")
    assert get_config(tmp_path / "mine.yaml").TRAIN.BCE_TARGET_THRESH is None


def test_the_configuration_that_a_run_writes_is_taken_again(recipe, tmp_path):
    config = get_config(recipe, [*OFF, "OUTPUT", "x"])
    (tmp_path / "config.yaml").write_text(resolved(changed_by(config, OUTPUT=None)))
    again = get_config(tmp_path / "config.yaml")
    assert changed_by(again, OUTPUT="x") == config
    assert given(again)["TRAIN.MIXUP_PROB"].level < given(again)["TRAIN.MIXUP_ALPHA"].level
    (tmp_path / "config.yaml").write_text(resolved(again))  # and what that one writes
    get_config(tmp_path / "config.yaml", ["TRAIN.BASE_LR", "0.1"])
    with pytest.raises(InputError, match=r"^command line: TRAIN.MIXUP_PROB does nothing"):
        get_config(tmp_path / "config.yaml", ["TRAIN.MIXUP_PROB", "0.5"])


def test_evaluating_takes_files_and_flags_of_a_training(recipe):
    flags = ["-eval", "-batch_size=4", "-accum_iter=2", "-last_epoch=3", "-amp"]
    assert config_from_arguments("main", [f"-cfg={recipe}", *flags]).DATA.BATCH_SIZE_EVAL == 4
    (recipe.parent / "eval.yaml").write_text(f"EVAL: true\nTO_STATIC: true\n{RECIPE}")
    assert get_config(recipe.parent / "eval.yaml").EVAL
    with pytest.raises(InputError, match=r"command line: TRAIN.MIXUP_ALPHA does nothing under EVAL; leave it out$"):
        config_from_arguments("main", [f"-cfg={recipe}", "-eval", "-o", "TRAIN.MIXUP_ALPHA", "0.2"])


def test_a_configuration_stays_quick():
    config = copy.deepcopy(get_config("swin_tiny_patch4_window7_224"))
    begun = time.perf_counter()
    for _ in range(100):
        get_config(None, ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.MIXUP_PROB", "0.5"])
    assert time.perf_counter() - begun < 5  # measured: 0.2 s; the bound is for a busy machine
    assert config == get_config("swin_tiny_patch4_window7_224")
