"""What each key declares that it needs is true to the code: it acts there, and nowhere else."""

import itertools
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import write_images
from golden.optim_problem import gradients
from paddle import nn
from PIL import Image
from support.keys import DEFAULTS, met
from support.optim_model import OPTIMIZERS, Small

from config import get_config, with_values
from datasets import get_dataloader, get_dataset
from errors import InputError
from loading.label_sets import every_label
from loading.label_spaces import check_evaluation
from loading.transforms import BatchTransform, Mixup, RandomErasing, TrainTransform
from settings.architectures import all_keys
from settings.configuration import leaves
from settings.registry import datasets, losses
from settings.tasks import mixes
from training import parallel
from training.losses import build_criterion
from training.optim import (
    ModelEma,
    build_optimizer,
    build_schedule,
    clip_gradients,
    set_weight_decay,
    weight_decay_at,
)


def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8))


def of_schedules(config):
    schedule = build_schedule(config, 10, 64)
    return [schedule(update) for update in range(60)]


def of_updates(config):
    model = Small()
    train = config.TRAIN
    ema = (
        ModelEma(model, train.MODEL_EMA_DECAY, train.MODEL_EMA_WARMUP) if train.MODEL_EMA else None
    )
    optimizer = build_optimizer(config, model)
    norms = []
    for update in range(3):
        optimizer.clear_grad()
        model.set_gradients(gradients(update))
        norms.append(clip_gradients(config, model).numpy())
        set_weight_decay(optimizer, weight_decay_at(config, update / 3))
        optimizer.step()
        if ema:
            ema.update(model, update)
    return [*model.arrays().values(), *norms, *(p.numpy() for p in ema.model.parameters() if ema)] if ema else [
        *model.arrays().values(), *norms,
    ]  # fmt: skip


def of_images(config):
    transform = TrainTransform(config)
    found = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        found.append(transform(image(), rng))
        if config.TRAIN.RANDOM_ERASE_PROB:
            found.append(RandomErasing(config).draw(rng))
    return found


def of_batches(config):
    config = with_values(config, DATA__IMAGE_SIZE=16)
    pixels = paddle.to_tensor(np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), np.uint8))
    labels = paddle.arange(8) % 4
    if config.TASK == "multilabel":
        labels = (paddle.arange(32).reshape([8, 4]) % 3 == 0).astype("uint8")
    columns = {"pixels": pixels, "labels": labels}
    made = []
    for epoch, step in itertools.product((1, 2), range(1, 5)):
        if mixes(config):
            columns["mixed"] = paddle.to_tensor(Mixup(config).draw(epoch, step, 8))
        images, targets = BatchTransform(config)(columns, epoch)
        assert_targets(config, targets.numpy())
        made += [images, targets]
    return [tensor.numpy() for tensor in made]


def assert_targets(config, targets):
    """Targets of eight images of four classes are such as their task's loss takes."""
    if config.TASK == "multilabel":
        assert targets.shape == (8, 4)
        assert ((targets >= 0) & (targets <= 1)).all()
    elif targets.ndim == 2:
        np.testing.assert_allclose(targets.sum(1), np.ones(8), rtol=1e-6)
    else:
        assert set(targets.tolist()) <= {0, 1, 2, 3}


class FixedTeacher(nn.Layer):
    """A teacher whose logits don't depend on the images."""

    def forward(self, images):
        return paddle.to_tensor(np.random.default_rng(2).normal(size=(6, 5)).astype("float32"))


def of_losses(config):
    kind = config.TRAIN.DISTILLATION_TYPE
    logits = paddle.to_tensor(np.random.default_rng(1).normal(size=(6, 5)).astype("float32"))
    labels = paddle.arange(6) % 5
    if config.TASK == "multilabel":
        # smoothed, as batches have them
        labels = (paddle.arange(30).reshape([6, 5]) % 3 == 0).astype("float32") * 0.9 + 0.05
    criterion = build_criterion(config, None, FixedTeacher() if kind else None)
    return criterion(None, logits, labels).numpy()


def of_data(config):
    train = get_dataset(config, "train")
    val = get_dataset(config, "val")
    loader = get_dataloader(config, train, "train")
    order = [key for batch in loader.batch_sampler for key in batch]
    labels = every_label(train.labels)
    assert set(labels.tolist()) <= set(range(len(train.classes)))
    read = [*getattr(train, "paths", ()), *labels]
    return [
        loader.slots,
        len(loader),
        len(train),
        getattr(val, "exact", None),
        getattr(val, "root", None),
        order[:40],
        read,
    ]


def of_evaluation(config):
    val = get_dataset(config, "val")
    labels = every_label(val.labels)
    if config.EVAL and not config.DATA.LABELS:
        check_evaluation(config, val, [*val.classes, "c"])
    return [labels, np.array(val.compared), val[0][0]]


O, S = "TRAIN.OPTIMIZER.", "TRAIN.LR_SCHEDULER."  # noqa: E741
MIXUP = ("TRAIN.MIXUP_ALPHA", 0.8)
CUTMIX = ("TRAIN.CUTMIX_ALPHA", 1.0)
MINMAX = ("TRAIN.CUTMIX_MINMAX", [0.2, 0.5])
SIZES = ("DATA.MULTI_SCALE", [8, 12, 16])
# Losses that have keys. token_label needs a model's patches: tests/training/test_losses.py.
# Losses of embeddings or cosines need more of the model: tests/training/test_metric_losses.py.
OTHER_LOSSES = ("arcface", "proxy_anchor", "triplet", "token_label")
LOSSES = [
    name for name, loss in losses.components.items() if loss.keys and name not in OTHER_LOSSES
]
LARGE = [("DATA.DATASET", "folder"), ("DATA.IMAGE_SIZE", 32)]
# what shows an effect, the keys with a value that isn't the default, and where to try each of them
TRIED = [
    (
        of_schedules,
        {
            "TRAIN.WARMUP_START_LR": 0.5, "TRAIN.END_LR": 0.5, "TRAIN.COOLDOWN_EPOCHS": 2, "TRAIN.LR_SCALING": "sqrt",
            f"{S}WSD_DECAY_EPOCHS": 2.0, f"{S}WSD_DECAY": "linear", f"{S}MILESTONES": [3], f"{S}DECAY_EPOCHS": 2,
            f"{S}DECAY_RATE": 0.3, f"{S}POWER": 1.0,
        },
        [
            *([(f"{S}NAME", name)] for name in ("cosine", "linear", "poly", "wsd", "constant")),
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
            *([(f"{O}NAME", name)] for name in OPTIMIZERS),
            [(f"{O}NAME", "SGD"), (f"{O}MOMENTUM", 0.0)], [(f"{O}NAME", "SGD"), ("TRAIN.GRAD_CLIP", 0.01)],
            [("TRAIN.MODEL_EMA", True)], [("TRAIN.LAYER_DECAY", 0.5)],
        ],
    ),
    (
        of_images,
        {
            "TRAIN.CROP_SCALE": [0.3, 0.4], "TRAIN.CROP_RATIO": [1.0, 1.0], "TRAIN.RANDOM_ERASE_MODE": "rand",
            "TRAIN.RANDOM_ERASE_COUNT": 3, "TRAIN.CROP_PCT": 0.6, "TRAIN.CROP_BASE": "own",
        },
        [
            *([("TRAIN.CROP", crop)] for crop in ("simple", "random_resized_once", "short_side", "squash", "scale_jitter")),
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
            "TRAIN.DISTILLATION_TAU": 3.0, "TRAIN.POS_WEIGHT": [3.0], "TRAIN.FOCAL_GAMMA": 1.0,
            "TRAIN.FOCAL_ALPHA": 0.6,
            "TRAIN.ASL_GAMMA_NEG": 2.0, "TRAIN.ASL_GAMMA_POS": 0.5, "TRAIN.ASL_CLIP": 0.2,
        },
        [
            [], *([("TRAIN.DISTILLATION_TYPE", kind)] for kind in ("hard", "soft")),
            *([("TRAIN.LOSS", name)] for name in LOSSES),
        ],
    ),
    (
        of_data,
        {
            "DATA.PREFETCH": 5, "DATA.SYNTHETIC_SIZE": 24, "DATA.DATA_PATH": "other", "DATA.FAST_EVAL": True,
            "DATA.FOLDS": 2, "DATA.FOLD": 1, "DATA.SPLIT_SEED": 5, "DATA.SPLIT_GROUPS": "[0-9]",
            "DATA.SCALE_SCHEDULE": "progressive", "DATA.SCALE_SPREAD": 3.0, "DATA.SCALE_RANDOM": 1.0,
        },
        [
            *([("DATA.DATASET", name)] for name in ("digits", "synthetic", "folder")), [("DATA.NUM_WORKERS", 0)],
            *([("DATA.DATASET", name), ("DATA.FOLDS", 3)] for name in ("digits", "synthetic", "folder")),
            [SIZES], [SIZES, ("DATA.SCALE_SCHEDULE", "progressive")],
        ],
    ),
    (
        of_evaluation,
        {
            "DATA.CLASSES": "present", "DATA.LABELS": "real.json", "DATA.CORRUPTION": "snow", "DATA.SEVERITY": 4,
        },
        [LARGE, [*LARGE, ("EVAL", True)], [*LARGE, ("EVAL", True), ("DATA.CORRUPTION", "fog")]],
    ),
]  # fmt: skip


def read_for_one_label_alone():
    """Keys that only losses and datasets of images with one label read."""
    keys = set()
    for kind, declared in ((losses, "takes"), (datasets, "task")):
        for key, names in kind.readers().items():
            taken = {kind.components[name].given.get(declared) for name in names}
            if taken.isdisjoint({"any", "multilabel"}):
                keys.add(key)
    return keys


# With TASK multilabel there is no distillation, and outputs aren't chosen.
REFUSED_WITH_SEVERAL_LABELS = {
    "TRAIN.DISTILLATION_ALPHA",
    "TRAIN.DISTILLATION_TAU",
    "DATA.CLASSES",
    "DATA.LABELS",
    *read_for_one_label_alone(),
}
# Keys that act wherever they are taken: another value, and what shows the effect.
EVERYWHERE = {
    "SEED": (1, [of_data]),
    "DATA.BATCH_SIZE": (5, [of_data]),
    "DATA.IMAGENET_MEAN": ([0.1, 0.2, 0.3], [of_batches]),
    "DATA.IMAGENET_STD": ([0.1, 0.2, 0.3], [of_batches]),
    "DATA.IMAGE_SIZE": (12, [of_images]),
    "DATA.MULTI_SCALE": ([8, 12, 16], [of_data]),
    "DATA.NUM_WORKERS": (2, [of_data]),
    "DATA.SAMPLER": ("balanced", [of_data]),
    "TRAIN.AFFINE": ([30.0, 0.1, 0.1], [of_images]),
    "TRAIN.AUTO_AUGMENT": ("rand-m9", [of_images]),
    "TRAIN.BASE_LR": (0.2, [of_schedules]),
    "TRAIN.CLASS_WEIGHTS": ([1.0, 2.0, 3.0, 4.0, 5.0], [of_losses]),
    "TRAIN.COLOR_JITTER": (0.4, [of_images]),
    "TRAIN.CROP": ("simple", [of_images]),
    "TRAIN.CUTMIX_MINMAX": ([0.2, 0.5], [of_batches]),
    "TRAIN.DECAY_ALL": (True, [of_updates]),
    "TRAIN.GRAD_CLIP": (0.01, [of_updates]),
    "TRAIN.HEAD_LR": (3.0, [of_updates]),
    "TRAIN.HFLIP": (1.0, [of_images]),
    "TRAIN.INTERPOLATION": ("nearest", [of_images]),
    "TRAIN.LAYER_DECAY": (0.5, [of_updates]),
    "TRAIN.LINEAR_SCALED_LR": (32, [of_schedules]),
    "TRAIN.LOSS": ("focal", [of_losses]),
    "TRAIN.LR_SCHEDULER.NAME": ("linear", [of_schedules]),
    "TRAIN.LR_SCHEDULER.PER_EPOCH": (True, [of_schedules]),
    "TRAIN.LR_SCHEDULER.WARMUP_PREFIX": (False, [of_schedules]),
    "TRAIN.MIXUP_ALPHA": (0.8, [of_batches]),
    "TRAIN.MODEL_EMA": (True, [of_updates]),
    "TRAIN.NUM_EPOCHS": (9, [of_schedules]),
    "TRAIN.OPTIMIZER.NAME": ("SGD", [of_updates]),
    "TRAIN.PATCH_EMBED_LR": (0.2, [of_updates]),
    "TRAIN.PHOTOMETRIC": (True, [of_images]),
    "TRAIN.RANDOM_ERASE_PROB": (1.0, [of_images]),
    "TRAIN.REPEATED_AUGMENT": (2, [of_data]),
    # in the loss of classes, in the batch of several labels
    "TRAIN.SMOOTHING": (0.3, [of_losses, of_batches]),
    "TRAIN.VFLIP": (1.0, [of_images]),
    "TRAIN.WARMUP_EPOCHS": (2.0, [of_schedules]),
    "TRAIN.WEIGHT_DECAY": (0.1, [of_updates]),
    "TRAIN.WEIGHT_DECAY_END": (0.9, [of_updates]),
}
# What a task refuses of these.
REFUSED_EVERYWHERE = {"classification": set(), "multilabel": {"DATA.SAMPLER"}}
# The other keys, by where they are tried or why they aren't.
NOT_TRIED = {
    "what is built or read, each by the tests of its room": [
        "BASE", "TASK", "DATA.DATASET", "DATA.IMAGE_CHANNELS", "DATA.IMAGE_DTYPE", "DATA.CROP_PCT", "DATA.CROP_MODE",
        "DATA.INTERPOLATION", "DATA.EXIF_ORIENTATION", "DATA.IGNORE_INDEX", "DATA.MAX_PIXELS", "DATA.SKIP_BROKEN", "DATA.VAL_SPLIT", "MODEL.TYPE", "MODEL.NAME",
        "MODEL.NUM_CLASSES", "MODEL.PRETRAINED", "MODEL.PRETRAINED_ALLOW", "MODEL.PRETRAINED_CLASSES",
        "MODEL.PRETRAINED_ADAPTER", "TRAIN.ADAPTER.NAME", "TRAIN.ADAPTER.RANK", "TRAIN.ADAPTER.ALPHA",
        "TRAIN.ADAPTER.TARGETS", "TRAIN.ADAPTER.DROPOUT", "TRAIN.FREEZE", "TRAIN.DISTILLATION_TYPE",
        "TRAIN.TEACHER_MODEL", "TRAIN.TEACHER_PATH", "TRAIN.TOKEN_LABEL_WEIGHT", "TRAIN.TOKEN_LABEL_MIX",
    ],
    "of embeddings: tests/training/test_metric_losses.py, test_retrieval.py": [
        "RETRIEVAL", "TRAIN.ARCFACE_MARGIN", "TRAIN.PROXY_ALPHA", "TRAIN.PROXY_MARGIN",
        "TRAIN.TRIPLET_CROSS_ENTROPY", "TRAIN.TRIPLET_MARGIN",
    ],
    "of batches of some classes: tests/loading/test_samplers.py": ["DATA.PER_CLASS"],
    "a task's own: tests/training/test_<task>.py": [key for key in DEFAULTS if key.startswith("METHOD.")],
    "of masks: tests/loading/test_scale_jitter.py": ["TRAIN.CROP_MAX_CLASS"],
    "of masks: tests/loading/test_eval_size.py": ["DATA.EVAL_SIZE"],
    "of NaFlexViT: tests/loading/test_naflex.py": ["DATA.NUM_TOKENS", "DATA.TOKEN_LENGTHS"],
    "a head's: tests/models/test_heads_<head>.py": [key for key in DEFAULTS if key.startswith("HEAD.")],
    "a table's columns: tests/loading/test_csv_tables.py": [
        "DATA.IMAGE_COLUMN", "DATA.LABEL_COLUMN", "DATA.LABEL_SEPARATOR", "DATA.SPLIT_COLUMN",
    ],
    "where data come from or what they cost, not what they are": [
        "DATA.CACHE", "DATA.LOADER", "DATA.SHUFFLE_MODE", "DATA.SHARD_SHUFFLE", "DATA.DROP_LAST",
        "DATA.BATCH_SIZE_EVAL", "DATA.GLOBAL_BATCH",
    ],
    "the course of a run: tests/training": [
        "MODEL.RESUME", "TRAIN.LAST_EPOCH", "TRAIN.MAX_MINUTES", "TRAIN.EARLY_STOP", "TRAIN.EARLY_STOP_MIN",
        "TRAIN.ACCUM_ITER", "TRAIN.LR_SCALED", "TRAIN.RECIPE_BATCH", "TRAIN.SYNC_BN", "SAVE", "OUTPUT", "TRACKERS",
        "TAG", "SAVE_FREQ", "SAVE_STEPS", "SAVE_MINUTES", "KEEP_LAST", "BEST_METRIC", "SAVE_ON_ERROR", "REPORT_FREQ",
        "PROBE.FREQ", "PROBE.K", "PROBE.IMAGES", "PROFILE",
        "VALIDATE_FREQ", "REPORT", "EVAL", "EVAL_ENGINE", "AMP", "AMP_EVAL",
    ],
    "speed and processes, which change no result on one CPU": [
        "NGPUS", "DETERMINISTIC", "CUDNN_BENCHMARK", "TF32", "TUNE_CPU", "TO_STATIC", "DIST.TIMEOUT",
        "DIST.INIT_TIMEOUT", "DIST.MAX_RESTART", "DIST.ENGINE", "DIST.STRATEGY.sharding",
        "DIST.STRATEGY.sharding_configs.stage", "DIST.STRATEGY.fuse_grad_size_in_MB",
        "DIST.STRATEGY.find_unused_parameters",
    ],
}  # fmt: skip
SMALL = {
    "DATA.DATASET": "digits", "DATA.NUM_WORKERS": 1, "DATA.BATCH_SIZE": 4, "DATA.IMAGE_SIZE": 16,
    "MODEL.NUM_CLASSES": "auto", "TRAIN.NUM_EPOCHS": 6, "TRAIN.WARMUP_EPOCHS": 1, "TRAIN.BASE_LR": 0.1,
    "TRAIN.SMOOTHING": 0.1,
}  # fmt: skip


def changed_by(config, **values):
    return with_values(config, **{key.replace(".", "__"): value for key, value in values.items()})


@pytest.mark.parametrize(
    ("effects", "keys", "places"), TRIED, ids=lambda of: getattr(of, "__name__", "")
)
def test_a_key_acts_where_it_says_and_nowhere_else(effects, keys, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", "other"):
        for part in ("train", "val"):
            write_images(tmp_path / folder / part, {"a": 6, "b": 6})
    for number, file in enumerate(sorted((tmp_path / "val").rglob("*.png")), 1):
        file.rename(file.with_name(f"ILSVRC2012_val_{number:08}.png"))
    (tmp_path / "real.json").write_text(str([[7]] * 12))
    corrupt = {"corrupt": lambda pixels, severity, name, **_: pixels // (severity + len(name))}
    monkeypatch.setitem(sys.modules, "imagecorruptions", SimpleNamespace(**corrupt))
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
            acts = differ(before, after)
            assert acts == met(key, dict(leaves(config)) | {key: value}), (place, key)
            seen.add((key, acts))
    assert (
        {key for key, acts in seen if acts} == {key for key, acts in seen if not acts} == set(keys)
    )


@pytest.mark.parametrize(
    ("effects", "keys", "places"), TRIED, ids=lambda of: getattr(of, "__name__", "")
)
def test_a_key_that_is_taken_with_several_labels_an_image_acts(
    effects, keys, places, tmp_path, monkeypatch
):
    """With TASK multilabel each key has an effect where it is taken; otherwise it is refused."""
    monkeypatch.chdir(tmp_path)
    write_tables(tmp_path)
    several = data_of("multilabel", effects)
    taken = set()
    for place in places:
        for key, value in keys.items():
            try:
                before = get_config(None, given(SMALL | dict(place) | several))
                after = get_config(None, given(SMALL | dict(place) | several | {key: value}))
            except InputError:
                continue
            if dict(place).get(key) != value:
                assert differ(effects(before), effects(after)), (place, key)
                taken.add(key)
    assert taken == set(keys) - REFUSED_WITH_SEVERAL_LABELS


@pytest.mark.parametrize("task", REFUSED_EVERYWHERE)
def test_a_key_that_needs_nothing_acts_under_each_task_or_is_refused(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tables(tmp_path)
    refused = set()
    idle = set()
    for key, (value, ways) in EVERYWHERE.items():
        acts = []
        for effects in ways:
            options = SMALL | data_of(task, effects)
            assert options.get(key, DEFAULTS[key]) != value
            try:
                before = get_config(None, given(options))
                after = get_config(None, given(options | {key: value}))
            except InputError:
                refused.add(key)
            else:
                acts.append(differ(effects(before), effects(after)))
        if acts and not any(acts):
            idle.add(key)
    assert idle == set()
    assert refused == REFUSED_EVERYWHERE[task]


def data_of(task, effects):
    """The options of a task and of its dataset in the current folder."""
    dataset = {"classification": "folder", "multilabel": "multilabel_csv"}[task]
    return {
        "TASK": task,
        "DATA.DATASET": dataset,
        "DATA.DATA_PATH": ".",
        "MODEL.NUM_CLASSES": {of_losses: 5, of_batches: 4}.get(effects, "auto"),
    }


def write_tables(folder):
    """Images in folders of classes, and two tables of their labels, of which one is shorter."""
    for part in ("train", "val"):
        write_images(folder / part, {"a": 24, "b": 24})
        for place in (".", "other"):
            (folder / place).mkdir(exist_ok=True)
            rows = [f"{part}/{name}/{i}.png,1,{i % 2}" for i in range(24) for name in "ab"]
            text = "\n".join(["image,left,right", *rows[len(place) :]])
            (folder / place / f"{part}.csv").write_text(f"{text}\n")
        (folder / "other" / part).symlink_to(folder / part)


def given(options):
    """Words of a command line; without keys of a training for an evaluation, which refuses them."""
    return [
        str(word)
        for key, value in options.items()
        if not (options.get("EVAL") and key.startswith("TRAIN."))
        for word in (key, value)
    ]


def differ(before, after):
    return len(before) != len(after) or not all(map(np.array_equal, before, after))


def test_every_key_is_tried_or_says_why_it_is_not():
    """But for the arguments of architectures, which tests/models tries."""
    tried = {key for _, keys, _ in TRIED for key in keys} | EVERYWHERE.keys()
    elsewhere = [key for keys in NOT_TRIED.values() for key in keys]
    assert len(elsewhere) == len(set(elsewhere))
    assert tried.isdisjoint(elsewhere)
    shared = DEFAULTS.keys() - all_keys().keys()
    missing = sorted(shared - tried - set(elsewhere))
    assert not missing, (
        f"add {', '.join(missing)} to TRIED (a key that needs another one's value),"
        " EVERYWHERE (one that doesn't), or NOT_TRIED with the reason"
    )
    assert sorted((tried | set(elsewhere)) - shared) == []


def test_a_shard_shuffle_over_which_files_were_chosen_does_nothing(tmp_path):
    write_images(tmp_path / "train", {"a": 6, "b": 6})
    write_images(tmp_path / "val", {"a": 6, "b": 6})
    (tmp_path / "recipe.yaml").write_text(
        "DATA: {DATASET: shards, SHARD_SHUFFLE: 2, NUM_WORKERS: 0, BATCH_SIZE: 4}\n"
    )
    config = get_config(
        tmp_path / "recipe.yaml", ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(tmp_path)]
    )
    assert of_data(config) == of_data(changed_by(config, **{"DATA.SHARD_SHUFFLE": None}))


def test_sharding_over_which_another_engine_was_chosen_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "world_size", lambda: 2)
    (tmp_path / "recipe.yaml").write_text("DIST: {ENGINE: fleet, STRATEGY: {sharding: true}}\n")
    config = get_config(tmp_path / "recipe.yaml", ["DIST.ENGINE", "data_parallel"])
    optimizer = object()
    assert config.DIST.STRATEGY.sharding
    assert parallel.wrap_optimizer(config, optimizer) is optimizer
