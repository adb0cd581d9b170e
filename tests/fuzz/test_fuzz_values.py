"""Every key of the configuration with values that nobody means: refused in a line, or a run starts
with them.
"""

import functools
import itertools
import resource

import pytest
from conftest import TINY, without, write_images
from hypothesis import settings
from support import hostile_files
from support.mask_files import write_masks
from support.training_runs import work

from config import get_config
from datasets import get_datasets
from errors import InputError, reporting_memory
from settings.architectures import all_keys, architectures
from settings.configuration import leaves
from settings.registry import heads, losses, optimizers, schedules, tasks
from settings.tasks import columns_of
from training import engine

# all values; in the suite each key's extremes
WHOLE = settings.get_current_profile_name() != "suite"
HELD = 300 << 20  # bytes of a file that would allow a start's memory
BASE = [*TINY, "DATA.DATASET", "synthetic", "DATA.SYNTHETIC_SIZE", "16", "DATA.BATCH_SIZE", "4"]
BASE += ["TUNE_CPU", "False", "NGPUS", "1"]
MIXED = ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.CUTMIX_ALPHA", "1.0"]
OPTIMIZER = "TRAIN.OPTIMIZER.NAME"
SCHEDULE = "TRAIN.LR_SCHEDULER.NAME"
FOLDER = ["DATA.DATASET", "folder", "DATA.DATA_PATH", "."]
RGB = ["DATA.IMAGE_CHANNELS", "3", "DATA.IMAGE_SIZE", "32"]
SETS = ["TASK", "multilabel", "DATA.DATASET", "multilabel_list", "DATA.DATA_PATH", "."]
# The encoders of heads that don't read a ViT's maps.
STAGES = ["MODEL.STAGE_DEPTHS", "[1,1,1,1]", "MODEL.EMBED_DIMS", "[8,8,8,8]"]
ENCODERS = {
    "segformer": ["MODEL.TYPE", "PVTv2", *STAGES, "MODEL.NUM_HEADS", "[1,1,1,1]"],
    "upernet": ["MODEL.TYPE", "ConvNeXt", *STAGES],
    "topformer": ["MODEL.TYPE", "topformer"],
    "trans2seg": ["MODEL.TYPE", "ResNet", "MODEL.OUTPUT_STRIDE", "16", "HEAD.STRIDE", "32"],
}


def _segmentation(head):
    """A place of a head for segmentation, on images with masks."""
    return [
        *("TASK", "segmentation", "DATA.DATASET", "masks", "DATA.DATA_PATH", "."),
        *("DATA.CROP_MODE", "squash", "DATA.IMAGE_SIZE", "32"),
        *("HEAD.NAME", head, *ENCODERS.get(head, ())),
    ]


FEW_LABELS = ["TASK", "fixmatch", "METHOD.LABELS_PER_CLASS", "1", "TRAIN.AUTO_AUGMENT", "rand-m5"]
# Where a key does something; the first of these counts that takes it.
PLACES = [
    [],
    MIXED,
    ["TRAIN.MODEL_EMA", "True"],
    ["TRAIN.RANDOM_ERASE_PROB", "1.0"],
    ["TRAIN.GRAD_CLIP", "1.0"],
    ["TRAIN.WARMUP_EPOCHS", "0.5"],
    ["TRAIN.LOSS", "bce", "TRAIN.SMOOTHING", "0.1"],
    ["TRAIN.LOSS", "proxy_anchor", "MODEL.HEAD_COSINE", "16"],
    ["TRAIN.LOSS", "arcface", "MODEL.HEAD_COSINE", "64"],
    ["TRAIN.LOSS", "triplet"],
    ["DATA.SAMPLER", "per_class"],
    ["PROBE.FREQ", "1"],
    ["TRAIN.LAYER_DECAY", "0.7"],
    ["TRAIN.LINEAR_SCALED_LR", "512"],
    ["TRAIN.CROP", "squash"],
    ["DATA.NUM_WORKERS", "1"],
    *([SCHEDULE, name] for name in schedules.names()),
    *([OPTIMIZER, name] for name in optimizers.names()),
    ["TRAIN.DISTILLATION_TYPE", "soft", "TRAIN.TEACHER_MODEL", "vit_digits"],
    ["DIST.ENGINE", "fleet"],
    ["DIST.ENGINE", "fleet", "DIST.STRATEGY.sharding", "True"],
    ["EVAL", "True", "MODEL.PRETRAINED", "absent"],
    ["MODEL.PRETRAINED", "absent"],
    ["OUTPUT", "run"],
    ["MODEL.DROPPATH", "0.1"],
    ["EVAL", "True", "MODEL.PRETRAINED", "absent", "AMP", "True"],
    FOLDER,
    [*FOLDER, "DATA.DATASET", "shards"],
    [*FOLDER, "DATA.DATASET", "csv"],
    ["DATA.GLOBAL_BATCH", "4"],
    [*FOLDER, "DATA.FOLDS", "2"],
    [*FOLDER, "DATA.VAL_SPLIT", "0.5"],
    ["TRAIN.EARLY_STOP", "1"],
    ["TRAIN.ADAPTER.NAME", "lora", "MODEL.PRETRAINED", "absent"],
    *([*SETS, "TRAIN.LOSS", name] for name in losses.names()),
    *(["TRAIN.LOSS", name] for name in losses.names()),
    ["EVAL", "True", "MODEL.PRETRAINED", "absent", *FOLDER],
    ["EVAL", "True", "MODEL.PRETRAINED", "absent", "DATA.CORRUPTION", "fog", *RGB],
    ["DATA.MULTI_SCALE", "[8,16]", "DATA.SCALE_SCHEDULE", "progressive"],
    *(["TASK", task] for task in tasks.names() if not columns_of(task)),
    *(_segmentation(head) for head in heads.names()),
    [*_segmentation("linear"), "METHOD.LOSS", "ohem"],
    [*_segmentation("linear"), "METHOD.LOSS", "focal"],
    [*_segmentation("linear"), "TRAIN.CROP", "scale_jitter"],
    [*_segmentation("linear"), "EVAL", "True", "MODEL.PRETRAINED", "absent"],
    ["TASK", "beit", "METHOD.HEAD_LAYERS", "1"],
    ["TASK", "tokenizer", "METHOD.QUANTIZER", "nearest"],
    ["TASK", "tokenizer", "METHOD.TEACHER", "absent"],
    ["TASK", "dino", "METHOD.PATCH_LOSS", "1.0"],
    [*FEW_LABELS, "TRAIN.MODEL_EMA", "True"],
    ["TASK", "dino", "METHOD.WARMUP_TEACHER_TEMP_EPOCHS", "1"],
    ["TASK", "dino", "METHOD.LARGE_TEACHER", "absent"],
    ["MODEL.TYPE", "NaFlexViT"],
    ["MODEL.TYPE", "NaFlexViT", "DATA.NUM_TOKENS", "4"],
]
INTEGERS = [
    "-1",
    "0",
    "1",
    "2",
    "100",
    "1000",
    "1000000",
    "2147483647",
    "2147483648",
    "1" + "0" * 30,
    "9" * 5000,
]
NUMBERS = [
    "-1",
    "-1e-9",
    "0",
    "1e-300",
    "1e-12",
    "1e-6",
    "0.5",
    "1",
    "1.5",
    "999",
    "1e6",
    "1e9",
    "1e300",
    "1e400",
]
STRANGE = [
    "nan",
    ".inf",
    "inf",
    "-inf",
    "[]",
    "[nan]",
    "[[1]]",
    "{}",
    "{[]: 1}",
    "-" * 5000 + "1",
    "[" * 9000,
    "x",
]
TEXT = [
    "",
    " ",
    "a" * 300,
    "a" * 5000,
    "a" * 100_000,
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "\udcff",
    "/dev/zero",
    "/dev/null/a",
]
TEXT += [
    "%s",
    "{}",
    "[",
    "*" * 300,
    "[[]*",
    "../" * 900,
    "~",
    "\u202e",
    "auto",
    "rand-m9e999",
    "-",
    "augmix-w999999999",
]
DEFAULTS = dict(leaves(get_config(None, TINY)))
NONES = {"MODEL.INIT_VALUES": 1.0, "MODEL.ATTN_HEAD_SIZE": 4, "TRAIN.CLASS_WEIGHTS": [1.0] * 10}


def words(default):
    """What a key may be given by a stranger."""
    if isinstance(default, bool):
        return [*STRANGE, "2", "-1"]
    if isinstance(default, int):
        return INTEGERS + STRANGE
    if isinstance(default, float):
        return NUMBERS + STRANGE
    if isinstance(default, list) and default and not isinstance(default[0], str):
        values = words(default[0])
        several = [f"[{','.join([value] * len(default))}]" for value in values if len(value) < 20]
        return [*values, *several, f"[{','.join(['1'] * 10_000)}]"]
    return INTEGERS + NUMBERS + STRANGE + TEXT


def read(options):
    """The configuration, or None where it is refused in a line; anything else is raised."""
    try:
        return get_config(None, options)
    except InputError as error:
        hostile_files.check_line(str(error))
        return None


def base(key, place):
    """The options of a small run at a place where the key is to be set."""
    other = {"folder", "shards", "csv", "multilabel_list", "masks"} & set(place)
    gone = ("DATA.SYNTHETIC_SIZE",) * bool(other or key == "DATA.DATASET")
    gone += ("DATA.BATCH_SIZE",) * ("DATA.GLOBAL_BATCH" in (key, *place))
    gone += ("TRAIN.",) * ("EVAL" in place)
    gone += ("MODEL.NUM_CLASSES",) * ("TASK" in place)
    gone += ("MODEL.",) * ("MODEL.TYPE" in place)
    gone += ("DATA.CROP_PCT",) * ("DATA.NUM_TOKENS" in (key, *place))
    # 1000 pixels are 15,625 tokens then
    small = ["MODEL.PATCH_SIZE", "8", "MODEL.DEPTH", "1", "MODEL.NUM_HEADS", "1"]
    return [
        *without(BASE, *gone),
        "DATA.BATCH_SIZE_EVAL",
        "4",
        *small * (key == "DATA.IMAGE_SIZE"),
        *place,
    ]


def place_of(key):
    """The first of the places where the key does something."""
    default = DEFAULTS.get(key, NONES.get(key))
    given = [
        "1",
        "0.5",
        "[0.2,0.5]",
        "random",
        "imagenet22k",
        "comma",
        "x",
        "rand-m9",
        "True",
        "4",
        "lora",
        "fog",
    ]
    given += ["tensorboard", "[4]"]
    given = given if default is None else [default]
    for place, value in itertools.product(PLACES, given):
        if read([*base(key, place), key, value]):
            return base(key, place)
    return None


def start(config):
    """A run's start and its first step, in a process that gets a gigabyte."""
    hostile_files.one_thread()
    limit = hostile_files._memory("VmData") + (900 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def step(*_):
        raise SystemExit

    train = engine.train_one_epoch
    engine.train_one_epoch = lambda training, progress, *_: train(training, progress, step)
    try:
        with reporting_memory(lambda: "take less"):
            work(*get_datasets(config))
    except SystemExit:
        pass


CHOOSERS = ("BASE", "DATA.LOADER", "TRAIN.DISTILLATION_TYPE", "HEAD.NAME")
KEYS = [key for key in DEFAULTS if key not in CHOOSERS]
KEYS = [key for key in KEYS if key not in all_keys()]


def check_key(key, place):
    """Tries what the checks let pass of a key's values; at once all that fails."""
    default = DEFAULTS.get(key, all_keys()[key].default if key in all_keys() else None)
    told = []
    values = dict.fromkeys(words(NONES.get(key) if default is None else default))
    taken = [value for value in values if read([*place, key, value])]
    for value in taken if WHOLE else dict.fromkeys([*taken[:1], *taken[-1:]]):
        try:
            config = read([*place, key, value])
            hostile_files.attempt("starts of runs", HELD, functools.partial(start, config))
        except AssertionError as error:
            told.append(f"{key}={value[:60]}: {str(error)[-600:]}")
    assert not told, "\n".join(told)


@pytest.mark.parametrize("key", KEYS if WHOLE else KEYS[::6])
def test_no_value_passes_the_checks_and_then_breaks_a_run(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_masks(tmp_path, train=8, val=4)
    for part in ("train", "val"):
        write_images(tmp_path / part, {"a": 4, "b": 4})
        listed = [
            f"{part}/{name}/{number}.png\t{number % 2},7\n" for name in "ab" for number in range(4)
        ]
        (tmp_path / f"{part}_list.txt").write_text("".join(listed))
        rows = "".join(line.replace("\t", ",").replace(",7", "") for line in listed)
        (tmp_path / f"{part}.csv").write_text(f"path,label\n{rows}")
    place = place_of(key)
    assert place is not None, f"{key} has no effect in any of the places"
    check_key(key, place)


SMALL = {
    "EMBED_DIM": "24", "EMBED_DIMS": "[8,16,24,32]", "STAGE_DEPTHS": "[1,1,1,1]", "PATCH_SIZE": "4", "WINDOW_SIZE": "2",
    "GROUP_WIDTH": "8", "KERNEL_SIZE": "3",
}  # fmt: skip


@pytest.mark.parametrize("kind", architectures() if WHOLE else ["beit"])
def test_no_key_of_an_architecture_breaks_its_start(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = architectures()[kind].arguments
    place = [
        *without(BASE, "MODEL.", "DATA.IMAGE_SIZE"),
        "DATA.IMAGE_SIZE",
        "32",
        "DATA.BATCH_SIZE_EVAL",
        "4",
    ]
    place += ["MODEL.TYPE", kind, "MODEL.NUM_CLASSES", "10", "BASE", ""]
    place += [
        word
        for key, value in SMALL.items()
        if f"MODEL.{key}" in own
        for word in (f"MODEL.{key}", value)
    ]
    if "MODEL.DEPTH" in own and kind != "resnet":
        place += ["MODEL.DEPTH", "1"]
    if "MODEL.NUM_HEADS" in own:
        place += [
            "MODEL.NUM_HEADS",
            "[1,2,3,4]" if "MODEL.EMBED_DIMS" in own else "[1,1,1,1]" if kind == "swin" else "2",
        ]
    for key in own:
        check_key(key, place)
