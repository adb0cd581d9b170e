"""A key that does nothing where it stands is an error: every key says what it needs."""

import copy
import time
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from support.keys import DEFAULTS, met

from config import _KEYS, get_config, resolved_yaml, with_values
from errors import InputError
from settings.architectures import all_keys, architectures
from settings.configuration import Given, value_sources
from settings.idle import refuse_idle, with_tasks
from settings.needs import ONE_VIEW
from settings.registry import tasks
from settings.tasks import is_read_by, view_columns
from training.command_line import config_from_arguments

# ------------------------------------------------------------ the declarations


@pytest.mark.smoke
def test_every_key_declares_what_it_needs():
    models = all_keys().keys()
    assert set(DEFAULTS) - models == set(_KEYS.needs) - models
    assert set(_KEYS.needs) <= set(DEFAULTS) | models
    # an architecture that takes a key takes those that it needs
    for one in architectures().values():
        needed = {
            key for key in one.arguments for need in _KEYS.needs.get(key, ()) for key in need.keys
        }
        assert needed <= (set(DEFAULTS) - models) | one.arguments.keys()


def test_what_is_of_training_does_nothing_under_eval():
    """But for the flags that scripts for both pass on."""
    kept = {"TRAIN.LAST_EPOCH", "TRAIN.ACCUM_ITER"}
    evaluating = DEFAULTS | {"EVAL": True}
    idle = {key for key in DEFAULTS if key.startswith(("TRAIN.", "DIST.STRATEGY."))} - kept
    assert not any(met(key, evaluating) for key in idle)
    assert all(
        met(key, evaluating) for key in [*kept, "AMP", "DATA.BATCH_SIZE", "DATA.BATCH_SIZE_EVAL"]
    )


# What a task without labels and classes reads of the shared keys, as patterns. A new key has to be
# declared with LABELS or CLASSIFIER, or to be listed here. A task with one view reads those of ONE_VIEW.
WITHOUT_LABELS = [
    "BASE",
    "TASK",
    "SAVE",
    "OUTPUT",
    "TRACKERS",
    "TAG",
    "SAVE_*",
    "KEEP_LAST",
    "BEST_METRIC",
    "REPORT",
    "REPORT_FREQ",
    "PROFILE",
    "VALIDATE_FREQ",
    "SEED",
    "EVAL",
    "AMP",
    "AMP_EVAL",
    "NGPUS",
    "DETERMINISTIC",
    "CUDNN_BENCHMARK",
    "TF32",
    "TUNE_CPU",
    "TO_STATIC",
    "PROBE.*",
    "DIST.*",
    "DATA.BATCH_SIZE",
    "DATA.BATCH_SIZE_EVAL",
    "DATA.GLOBAL_BATCH",
    "DATA.DATA_PATH",
    "DATA.DATASET",
    "DATA.IMAGE*",
    "DATA.LABEL_*",
    "DATA.CROP_PCT",
    "DATA.CROP_MODE",
    "DATA.INTERPOLATION",
    "DATA.EXIF_ORIENTATION",
    "DATA.FAST_EVAL",
    "DATA.NUM_WORKERS",
    "DATA.PREFETCH",
    "DATA.LOADER",
    "DATA.DROP_LAST",
    "DATA.SHUFFLE_MODE",
    "DATA.MULTI_SCALE",
    "DATA.SCALE_*",
    "DATA.SHARD_SHUFFLE",
    "DATA.CACHE",
    "DATA.MAX_PIXELS",
    "DATA.VAL_SPLIT",
    "DATA.FOLD",
    "DATA.FOLDS",
    "DATA.SPLIT_*",
    "DATA.CORRUPTION",
    "DATA.SEVERITY",
    "DATA.SKIP_BROKEN",
    "DATA.SYNTHETIC_SIZE",
    "DATA.IGNORE_INDEX",
    "MODEL.TYPE",
    "MODEL.NAME",
    "MODEL.RESUME",
    "MODEL.PRETRAINED",
    "MODEL.PRETRAINED_ALLOW",
    "MODEL.PRETRAINED_ADAPTER",
    "TRAIN.LAST_EPOCH",
    "TRAIN.NUM_EPOCHS",
    "TRAIN.MAX_MINUTES",
    "TRAIN.EARLY_STOP*",
    "TRAIN.*_EPOCHS",
    "TRAIN.BASE_LR",
    "TRAIN.WARMUP_START_LR",
    "TRAIN.END_LR",
    "TRAIN.LINEAR_SCALED_LR",
    "TRAIN.WEIGHT_DECAY*",
    "TRAIN.DECAY_ALL",
    "TRAIN.LR_SCALING",
    "TRAIN.LR_SCALED",
    "TRAIN.RECIPE_BATCH",
    "TRAIN.LAYER_DECAY*",
    "TRAIN.PATCH_EMBED_LR",
    "TRAIN.FREEZE",
    "TRAIN.ADAPTER.*",
    "TRAIN.GRAD_CLIP*",
    "TRAIN.SYNC_BN",
    "TRAIN.ACCUM_ITER",
    "TRAIN.LR_SCHEDULER.*",
    "TRAIN.OPTIMIZER.*",
    "TRAIN.MODEL_EMA*",
    "TRAIN.CROP",
    "TRAIN.CROP_[BPRS]*",
    "TRAIN.INTERPOLATION",
    "TRAIN.HFLIP",
    "TRAIN.VFLIP",
    "TRAIN.AFFINE",
    "TRAIN.AUTO_AUGMENT",
    "TRAIN.COLOR_JITTER",
    "TRAIN.PHOTOMETRIC",
    "TRAIN.REPEATED_AUGMENT",
]
# What decides where an encoder's features are read, though no classifier is there.
READ_BY_ENCODERS = {"MODEL.GLOBAL_POOL", "MODEL.HEAD_NORM_EPS", "MODEL.HEAD_NORM_FIRST"}


def is_refused(key, value, *options):
    """Returns whether a key does nothing under a configuration's TASK."""
    try:
        get_config(None, [*options, key, str(value)])
    except InputError as error:
        line = f"command line: {key} has no effect without TASK "
        return str(error).startswith(line) and "\n" not in str(error)
    return False


@pytest.mark.parametrize("task", ["mae", "simmim", "beit", "fcmae", "tokenizer"])
def test_a_task_without_labels_refuses_each_key_that_needs_them(task):
    """A key is refused at its default, too, and one whose default is None is shown by its needs."""
    task_needs = {
        key: [need for need in needs if need.keys == ("TASK",) and not need.met({"TASK": task})]
        for key, needs in _KEYS.needs.items()
        if key in _KEYS.shared and not key.startswith("METHOD.")
    }
    for key, unmet in task_needs.items():
        reads = any(fnmatchcase(key, pattern) for pattern in WITHOUT_LABELS)
        assert reads != bool(unmet), key
        if DEFAULTS[key] is not None and met(key, DEFAULTS) and key not in ("TASK", "BASE"):
            assert is_refused(key, DEFAULTS[key], "TASK", task) == bool(unmet), key
    assert len([key for key, unmet in task_needs.items() if unmet]) > 30


def test_what_is_of_a_classifier_is_refused_where_there_is_none(monkeypatch):
    """A task of its own classes has a classifier, though it reads no labels."""
    own = tasks.components["mae"]._replace(given={"columns": "", "classes": "0 90"})
    monkeypatch.setitem(tasks.components, "turns", own)
    counted = 0
    for name, one in architectures().items():
        for key, argument in one.arguments.items():
            needs = dict(_KEYS.needs_of(get_config(None, ["MODEL.TYPE", name])))[key]
            classes = "classifier" in argument.text and "classifiers read" not in argument.text
            if not (classes or key.startswith("MODEL.HEAD_")) or key in READ_BY_ENCODERS:
                continue
            if name == "metaformer" or key != "MODEL.HEAD_NORM_EPS":
                [need] = [need for need in needs if need.keys == ("TASK",)]
                met_by = [task for task in tasks.names() if need.met({"TASK": task})]
                expected = ["classification", "fixmatch", "multilabel", "turns"]
                assert met_by == expected, (name, key)
                counted += 1
    assert counted > 40
    for key, value in (("MODEL.HEAD_BATCH_NORM", True), ("MODEL.HEAD_INIT_SCALE", 0.1)):
        assert is_refused(key, value, "TASK", "mae")
        assert not is_refused(key, value)


def test_a_task_with_views_of_its_own_reads_no_keys_of_one_view(monkeypatch):
    own = tasks.components["mae"]._replace(given={"columns": "", "views": "pixels local"})
    monkeypatch.setitem(tasks.components, "own_views", own)
    others = [task for task in tasks.names() if not view_columns(task)]
    unread = [key for key, key_needs in _KEYS.shared.items() if ONE_VIEW in key_needs.needs]
    assert set(unread) == {
        "DATA.LOADER",
        "DATA.MULTI_SCALE",
        "TRAIN.CROP",
        "TRAIN.CROP_PCT",
        "TRAIN.CROP_SCALE",
        "TRAIN.CROP_BASE",
        "TRAIN.AUTO_AUGMENT",
        "TRAIN.COLOR_JITTER",
        "TRAIN.PHOTOMETRIC",
    }
    for key in unread:
        needs = with_tasks({key: _KEYS.shared[key].needs})[key]
        [need] = [need for need in needs if need.keys == ("TASK",)]
        assert [task for task in tasks.names() if need.met({"TASK": task})] == others
        line = f"command line: {key} has no effect {need.text}; leave it out"
        given = {key: Given(1, "command line")}
        with pytest.raises(InputError, match=f"^{line}$"):
            refuse_idle(DEFAULTS | {"TASK": "own_views", key: 1}, given, {key: needs})
        refuse_idle(DEFAULTS | {"TASK": "mae", key: 1}, given, {key: (need,)})
    assert need.text.startswith("with TASK ")
    # What erases boxes is read by tasks with labels alone.
    assert not is_read_by("own_views", "TRAIN.RANDOM_ERASE_PROB")


@pytest.mark.parametrize("evaluating", [False, True])
def test_an_idle_key_is_refused_at_its_default_too(evaluating):
    mode = ["EVAL", str(evaluating)]
    values = DEFAULTS | {"EVAL": evaluating}
    refused = set()
    for key, default in DEFAULTS.items():
        if key in ("EVAL", "BASE") or default is None:
            continue
        if met(key, values) if key in _KEYS.needs else True:
            get_config(None, [*mode, key, default])
            continue
        with pytest.raises(
            InputError,
            match=rf"^command line: {key} has no effect (without|with|under) .*; leave it out",
        ):
            get_config(None, [*mode, key, default])
        refused.add(key)
    of_both = {
        "TRAIN.MODEL_EMA_DECAY",
        "TRAIN.MIXUP_PROB",
        "DATA.SYNTHETIC_SIZE",
        "DIST.STRATEGY.sharding_configs.stage",
    }
    assert refused >= of_both | (
        {"TRAIN.MIXUP_ALPHA", "TO_STATIC", "SAVE_FREQ"} if evaluating else {"EVAL_ENGINE"}
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["TRAIN.MODEL_EMA_DECAY", "0.9"],
            "DECAY has no effect without TRAIN.MODEL_EMA True; leave it out, or set what it needs",
        ),
        (
            ["TRAIN.TEACHER_PATH", "x"],
            "TEACHER_PATH has no effect without TRAIN.DISTILLATION_TYPE hard or soft or feature; leave",
        ),
        (
            ["TRAIN.BCE_SUM", "True"],
            "TRAIN.BCE_SUM has no effect without TRAIN.LOSS bce; leave it out, or set what it needs",
        ),
        (
            ["TRAIN.GRAD_CLIP_MODE", "agc"],
            "TRAIN.GRAD_CLIP_MODE has no effect without TRAIN.GRAD_CLIP; leave it out, or",
        ),
        (
            ["TRAIN.MIXUP_OFF_EPOCH", "3"],
            "no effect without TRAIN.MIXUP_ALPHA or TRAIN.CUTMIX_ALPHA above 0, or TRAIN.CUT",
        ),
        (
            ["TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.OPTIMIZER.BETAS", "[0.9,0.99]"],
            "BETAS has no effect with TRAIN.OPTIMIZER.NAME ",
        ),
        (
            ["MODEL.PRETRAINED_CLASSES", "imagenet22k"],
            "PRETRAINED_CLASSES has no effect without MODEL.PRETRAINED; leave",
        ),
        (
            ["TRAIN.LAYER_DECAY_GROUPS", "timm"],
            "LAYER_DECAY_GROUPS has no effect without TRAIN.LAYER_DECAY; leave it out",
        ),
        (
            ["EVAL_ENGINE", "inference"],
            "EVAL_ENGINE has no effect without EVAL True; leave it out, or set what it needs",
        ),
        (
            ["EVAL", "True", "TRAIN.MIXUP_ALPHA", "0.2"],
            "command line: TRAIN.MIXUP_ALPHA has no effect under EVAL; leave",
        ),
        (
            ["DATA.DATASET", "digits", "DATA.DATA_PATH", "x"],
            "DATA.DATA_PATH has no effect with DATA.DATASET ",
        ),
        (
            ["DATA.BATCH_SIZE", "8", "DATA.GLOBAL_BATCH", "16"],
            "BATCH_SIZE has no effect with DATA.GLOBAL_BATCH, which",
        ),
    ],
)
def test_the_line_names_what_is_missing(options, message):
    with pytest.raises(InputError) as caught:
        get_config(None, options)
    assert message in str(caught.value)
    assert str(caught.value).count("\n") == 0


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
    (recipe.parent / "mine.yaml").write_text(
        "BASE: recipe.yaml\nTRAIN: {MIXUP_ALPHA: 0, CUTMIX_ALPHA: 0}\n"
    )
    assert get_config(recipe.parent / "mine.yaml").TRAIN.MIXUP_PROB == 0.5
    with pytest.raises(
        InputError,
        match=r"^command line: TRAIN.MIXUP_PROB has no effect without TRAIN.MIXUP_ALPHA or",
    ):
        get_config(recipe.parent / "mine.yaml", ["TRAIN.MIXUP_PROB", "0.5"])
    with pytest.raises(InputError, match=r"^command line: TRAIN.MIXUP_PROB has no effect"):
        get_config(recipe, [*OFF, "TRAIN.MIXUP_PROB", "1.0"])


def test_a_file_is_named_that_sets_an_idle_key(tmp_path):
    (tmp_path / "idle.yaml").write_text("TRAIN: {WARMUP_EPOCHS: 0, WARMUP_START_LR: 1e-6}\n")
    (tmp_path / "mine.yaml").write_text("BASE: idle.yaml\nTRAIN: {BASE_LR: 1.0}\n")
    with pytest.raises(
        InputError,
        match=r"/idle.yaml: TRAIN.WARMUP_START_LR has no effect without TRAIN.WARMUP_EPOCHS above 0;",
    ):
        get_config(tmp_path / "mine.yaml")


def test_none_takes_back_what_another_file_set(tmp_path):
    (tmp_path / "mine.yaml").write_text("TRAIN: {LOSS: auto, BCE_TARGET_THRESH: null}\n")
    assert get_config(tmp_path / "mine.yaml").TRAIN.BCE_TARGET_THRESH is None


def test_the_configuration_that_a_run_writes_is_taken_again(recipe, tmp_path):
    config = get_config(recipe, [*OFF, "OUTPUT", "x"])
    (tmp_path / "config.yaml").write_text(resolved_yaml(with_values(config, OUTPUT=None)))
    again = get_config(tmp_path / "config.yaml")
    assert with_values(again, OUTPUT="x") == config
    assert (
        value_sources(again)["TRAIN.MIXUP_PROB"].level
        < value_sources(again)["TRAIN.MIXUP_ALPHA"].level
    )
    (tmp_path / "config.yaml").write_text(resolved_yaml(again))  # and what that one writes
    get_config(tmp_path / "config.yaml", ["TRAIN.BASE_LR", "0.1"])
    with pytest.raises(InputError, match=r"^command line: TRAIN.MIXUP_PROB has no effect"):
        get_config(tmp_path / "config.yaml", ["TRAIN.MIXUP_PROB", "0.5"])


def test_evaluating_takes_files_and_flags_of_a_training(recipe):
    flags = ["-eval", "-batch_size=4", "-accum_iter=2", "-last_epoch=3", "-amp"]
    assert config_from_arguments("main", [f"-cfg={recipe}", *flags]).DATA.BATCH_SIZE_EVAL == 4
    (recipe.parent / "eval.yaml").write_text(f"EVAL: true\nTO_STATIC: true\n{RECIPE}")
    assert get_config(recipe.parent / "eval.yaml").EVAL
    with pytest.raises(
        InputError, match=r"command line: TRAIN.MIXUP_ALPHA has no effect under EVAL; leave it out$"
    ):
        config_from_arguments("main", [f"-cfg={recipe}", "-eval", "-o", "TRAIN.MIXUP_ALPHA", "0.2"])


def test_a_configuration_stays_quick():
    config = copy.deepcopy(get_config("swin_tiny_patch4_window7_224"))
    begun = time.perf_counter()
    for _ in range(100):
        get_config(None, ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.MIXUP_PROB", "0.5"])
    assert time.perf_counter() - begun < 5  # measured: 0.2 s; the bound is for a busy machine
    assert config == get_config("swin_tiny_patch4_window7_224")
