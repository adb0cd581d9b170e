"""Precedence, strictness and PaddleViT's files."""

import math
import subprocess
import sys
import time

import paddle
import pytest
from conftest import ROOT

from config import CONFIG_DIR, differences, get_config, resolved_yaml, with_values
from errors import InputError
from models import build_model
from settings.configuration import WRITTEN_OUT, is_given, value_sources
from training.command_line import config_from_arguments

# As in PaddleViT's configs/ of each model: (TYPE, MODEL), and parameters of timm's.
PADDLEVIT = {
    "swin_tiny": ("swin", 28_288_354, """
    DROP_PATH: 0.2
    TRANS:
        EMBED_DIM: 96
        STAGE_DEPTHS: [2, 2, 6, 2]
        NUM_HEADS: [3, 6, 12, 24]
        WINDOW_SIZE: 7
        PATCH_SIZE: 4"""),
    "poolformer_s12": ("poolformer", 11_915_176, """
    LAYERS: [2, 2, 6, 2]
    EMBED_DIMS: [64, 128, 320, 512]
    LAYER_SCALE_INIT_VALUE: 1e-5"""),
    "convnext_tiny": ("convnext", 28_589_128, """
    DEPTHS: [3, 3, 9, 3]
    DIMS: [96, 192, 384, 768]
    DROPPATH: 0.1"""),
    "mixer": ("Mixer", 59_880_472, """
    MIXER:
        PATCH_SIZE: 16
        EMBED_DIM: 768
        DEPTH: 12"""),
    "gmlp_s16": ("gMLP", 19_422_656, """
    MIXER:
        PATCH_SIZE: 16
        HIDDEN_SIZE: 256
        NUM_LAYERS: 30"""),
    "convmixer_768_32": ("convmixer", 21_110_248, """
    CNN:
        DIM: 768
        DEPTH: 32
        KERNEL_SIZE: 7
        PATCH_SIZE: 7
        ACTIVATION: relu"""),
    "beit_base": ("BEiT", 86_530_984, """
    EMBED_DIM: 768
    USE_ABS_POS_EMB: False
    USE_REL_POS_BIAS: True
    INIT_VALUES: 0.1"""),
}  # fmt: skip


@pytest.mark.parametrize("name", PADDLEVIT)
def test_paddlevits_files_build_timms_models(name, tmp_path):
    kind, parameters, model = PADDLEVIT[name]
    (tmp_path / "model.yaml").write_text(f"MODEL:\n    TYPE: {kind}\n    NAME: {name}{model}\n")
    with paddle.LazyGuard():
        built = build_model(
            get_config(tmp_path / "model.yaml"), head_init_scale=1.0
        )  # LazyGuard has no values to scale
    assert sum(math.prod(parameter.shape) for parameter in built.parameters()) == parameters


@pytest.fixture
def files(tmp_path):
    """A YAML file in PaddleViT's style, with BASE, numbers as YAML 1.1 strings and the TRANS group."""
    (tmp_path / "base.yaml").write_text(
        "TRAIN:\n  BASE_LR: 0.5\n  END_LR: 0.25\nDATA:\n  BATCH_SIZE: 7\nTAG: base\n"
    )
    (tmp_path / "model.yaml").write_text(
        "BASE: ['base.yaml']\n"
        "DATA:\n    IMAGE_SIZE: 384\n    CROP_PCT: 1.0\n"
        "MODEL:\n    TYPE: ViT\n    NAME: vit_base_patch32_384\n"
        "    TRANS:\n        PATCH_SIZE: 32\n        QKV_BIAS: false\n        MLP_RATIO: 4\n"
        "TRAIN:\n    WARMUP_START_LR: 1e-6\n    END_LR: 5e-4\n    OPTIMIZER:\n        BETAS: [0.8, 0.9]\n"
    )
    return tmp_path / "model.yaml"


def arguments(*argv):
    return config_from_arguments("test", argv)


@pytest.mark.smoke
def test_precedence_is_defaults_then_base_then_file_then_flags_then_options(files):
    config = arguments(
        f"-cfg={files}", "--batch_size", "9", "-o", "TRAIN.END_LR", "1e-3", "-o", "TAG", "mine"
    )
    assert config.TRAIN.NUM_EPOCHS == 300  # default
    assert config.TRAIN.BASE_LR == 0.5  # BASE
    assert config.DATA.BATCH_SIZE == 9  # flag over BASE
    assert config.TRAIN.END_LR == 1e-3  # option over file over BASE
    assert config.TAG == "mine"
    assert (
        arguments("-batch_size=4", "-batch_size=5", "-o", "DATA.BATCH_SIZE", "6").DATA.BATCH_SIZE
        == 6
    )


def test_paddlevits_swin_loads(tmp_path):
    (tmp_path / "swin.yaml").write_text(
        "MODEL:\n    TYPE: swin\n    NAME: swin\n    DROP_PATH: 0.5\n    TRANS:\n        EMBED_DIM: 128\n"
        "        STAGE_DEPTHS: [2, 2, 18, 2]\n        NUM_HEADS: [4, 8, 16, 32]\n        WINDOW_SIZE: 7\n"
    )
    model = get_config(tmp_path / "swin.yaml", ["MODEL.MLP_RATIO", "[4,2.5]"]).MODEL
    assert (model.DROPPATH, model.WINDOW_SIZE) == (0.5, 7)
    assert (model.STAGE_DEPTHS, model.NUM_HEADS, model.MLP_RATIO) == (
        [2, 2, 18, 2],
        [4, 8, 16, 32],
        [4.0, 2.5],
    )


def test_a_paddlevit_file_loads(files):
    config = get_config(files)
    assert (config.MODEL.PATCH_SIZE, config.MODEL.QKV_BIAS, config.MODEL.MLP_RATIO) == (
        32,
        False,
        4.0,
    )
    assert (config.TRAIN.WARMUP_START_LR, config.TRAIN.END_LR) == (1e-6, 5e-4)
    assert config.TRAIN.OPTIMIZER.BETAS == [0.8, 0.9]


def test_falsy_values_count():
    config = arguments(
        "-amp", "-amp=False", "-eval", "-last_epoch=0", "-o", "DATA.NUM_WORKERS", "0", "SEED", "0"
    )
    assert config.AMP is False
    assert config.EVAL is True
    assert config.DATA.NUM_WORKERS == 0
    assert (
        get_config(None, ["TRAIN.GRAD_CLIP", "1", "TRAIN.GRAD_CLIP", "null"]).TRAIN.GRAD_CLIP
        is None
    )


def test_batch_size_with_eval_alone_is_the_evaluation_batch():
    assert arguments("-eval", "-batch_size=16").DATA.BATCH_SIZE_EVAL == 16
    assert arguments("-eval", "-batch_size=16", "-batch_size_eval=4").DATA.BATCH_SIZE_EVAL == 4
    assert arguments("-batch_size=16").DATA.BATCH_SIZE_EVAL == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["TRAIN.BASELR", "1"],
            "command line: unknown key TRAIN.BASELR; did you mean TRAIN.BASE_LR?",
        ),
        (
            ["DATA.BATCH_SIZE", "1.5"],
            "command line: DATA.BATCH_SIZE takes int or auto, found 1.5 (float)",
        ),
        (["AMP", "1"], "command line: AMP takes bool, found 1 (int)"),
        (["TRAIN.BASE_LR", "fast"], "command line: TRAIN.BASE_LR takes float, found 'fast' (str)"),
        (
            ["TRAIN.SMOOTHING", "None"],
            "command line: TRAIN.SMOOTHING takes float, found None (NoneType)",
        ),
        (
            ["TRAIN.OPTIMIZER.BETAS", "[1, 'a']"],
            "TRAIN.OPTIMIZER.BETAS takes a list of floats, found [1, 'a'] (list)",
        ),
        (
            ["TRAIN.CROP_SCALE", "[0.1, 0.5, 1]"],
            "TRAIN.CROP_SCALE is [0.1, 0.5, 1.0], expected 2 values",
        ),
        (
            ["SEED", "9" * 30],
            "SEED is 999999999999999999999999999999, expected a whole number of at most",
        ),
        (["TRAIN.BASE_LR", "1e60"], "TRAIN.BASE_LR is 1e+60, expected a number of at most"),
        (
            ["TAG", "a\x07"],
            "TAG is 'a\\x07', expected text without control characters, found '\\x07'",
        ),
        (["DATA.BATCH_SIZE", "0"], "DATA.BATCH_SIZE is 0, expected 1 to 10000000"),
        (["NGPUS", "0"], "NGPUS is 0, expected -1 (all), or 1 to 10000"),
        (["MODEL.DROPPATH", "1.0"], "MODEL.DROPPATH is 1.0, expected 0 <= value < 1"),
        (["DATA.DATASET", "imagenet"], "voc_multilabel; did you mean imagenet2012?"),
        (
            ["DATA.IMAGE_CHANNELS", "1"],
            "DATA.IMAGENET_MEAN is [0.5, 0.5, 0.5], expected 1 value, as IMAGE_CHANNELS",
        ),
        (
            ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.LOSS", "cross_entropy"],
            "mixup and CutMix yield distributions, not labels",
        ),
        (
            ["TRAIN.CUTMIX_ALPHA", "1", "DATA.BATCH_SIZE", "7"],
            "DATA.BATCH_SIZE is 7, expected an even number: mixup",
        ),
        (
            ["TRAIN.MIXUP_MODE", "half"],
            "TRAIN.MIXUP_MODE is 'half', expected one of batch, pair, elem",
        ),
        (["TRAIN.LAYER_DECAY", "1.5"], "TRAIN.LAYER_DECAY is 1.5, expected 1e-12 to 1"),
        (
            ["TRAIN.CLASS_WEIGHTS", "even"],
            "TRAIN.CLASS_WEIGHTS takes a list of floats or auto, found 'even' (str)",
        ),
        (["AMP_EVAL", "True"], "AMP_EVAL has no effect without AMP True; leave it out"),
        (
            ["DETERMINISTIC", "True", "CUDNN_BENCHMARK", "True"],
            "CUDNN_BENCHMARK is True, expected False with DETERMINISTIC: which algorithm is fastest changes from run",
        ),
        (["TF32", "1"], "command line: TF32 takes bool, found 1 (int)"),
        (["SEED"], "'SEED' has no value; write SEED VALUE or SEED=VALUE"),
        # Not an architecture's MODEL.CROP_SCALE, which few configurations have.
        (["CROP_SCALE", "1"], "unknown key CROP_SCALE; did you mean TRAIN.CROP_SCALE?"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(InputError) as caught:
        get_config(None, options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MODEL:\n  DEPHT: 3\n", "unknown key MODEL.DEPHT; did you mean MODEL.DEPTH?"),
        ("- 1\n", "expected a mapping of keys, found list"),
        ("A: [1\n", "not valid YAML"),
        ("BASE: ['bad.yaml']\n", "BASE includes this file itself; remove it from BASE"),
        ("BASE: ['absent.yaml']\n", "no configuration file"),
        ("SEED: 2001-13-45\n", "found no timestamp in '2001-13-45': month must be in 1..12)"),
        ("MODEL: vit\n", "bad.yaml: MODEL is a section and needs keys; found 'vit'"),
        (
            "MODEL: &a {TRANS: *a}\n",
            "has more than 50000 values, or an alias refers to itself",
        ),
        (  # 9 ** 9 values
            "A: &a {X: 1}\n"
            + "".join(
                f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
                for a, b in zip("abcdefghi", "bcdefghij", strict=True)
            ),
            "has more than 50000 values",
        ),
        ("SEED: 1\nSEED: 2\n", "line 2: the key SEED occurs twice; remove one of the two"),
        (
            "TRAIN: {LOSS: a}\nTRAIN.LOSS: b\n",
            "the key TRAIN.LOSS occurs twice; remove one of the two",
        ),
        (
            "A: &a {X: 1}\nB: {<<: *a}\n",
            "line 2: the merge key << isn't supported; write the keys, or use BASE",
        ),
        ("1: 2\n", "line 1: found the key 1 (int), expected text"),
        ("[a]: 2\n", "line 1: found the key a list or a mapping, expected text"),
        (
            "SEED: !!python/name:os.system\n",
            "(line 1: found the tag tag:yaml.org,2002:python/name:os.system; write",
        ),
        (f"TAG: {'a' * 99999}\n", "line 1: found 99999 letters, expected a value of at most"),
        ("NAMES: {Timm: a}\n", "NAMES is {'Timm': 'a'}, expected {"),
        (
            "GIVEN: {SEED: 3}\n",
            "GIVEN names SEED, for which the file has no value; remove it there",
        ),
        pytest.param(
            "MODEL: " + "[" * 5000, "not valid YAML (line 1: it is nested too deeply)", id="nested"
        ),
    ],
)
def test_wrong_files_are_named(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError, match="bad.yaml|absent.yaml") as caught:
        get_config(tmp_path / "bad.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("coding", "found"),
    [("utf-16", "UTF-16 at position 0"), ("latin-1", "the byte 0xe9 at position 8")],
)
def test_a_file_that_is_not_in_utf_8_is_named(tmp_path, coding, found):
    (tmp_path / "bad.yaml").write_text("TAG: caf\u00e9\n", encoding=coding)
    with pytest.raises(InputError, match=f"isn't valid UTF-8: found {found}; save it as UTF-8"):
        get_config(tmp_path / "bad.yaml")


def test_the_configuration_is_frozen_and_its_dump_loads_again(tmp_path):
    config = get_config("vit_digits", ["TRAIN.GRAD_CLIP", "0.5"])
    with pytest.raises(AttributeError, match="immutable"):
        config.DATA.BATCH_SIZE = 1
    (tmp_path / "config.yaml").write_text(config.dump())
    assert get_config(tmp_path / "config.yaml") == config
    assert "TRAIN.GRAD_CLIP: None -> 0.5" in differences(config)
    assert differences(get_config()) == []
    assert with_values(config, TRAIN__NUM_EPOCHS=7).TRAIN.NUM_EPOCHS == 7


def test_configurations_are_found_by_name_and_by_paddlevits_path():
    expected = get_config(CONFIG_DIR / "vit" / "vit_base_patch16_224.yaml")
    assert get_config("vit_base_patch16_224") == expected
    assert get_config("./configs/vit_base_patch16_224.yaml") == expected
    with pytest.raises(InputError, match="did you mean vit_base_patch16_224"):
        get_config("vit_base_patch16_225")


@pytest.mark.parametrize("script", ["main_single_gpu.py", "main_multi_gpu.py"])
def test_help_answers_without_importing_paddle(script):
    code = (
        f"import sys, runpy; sys.argv = ['{script}', '-h']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: sys.exit(end.code or ('paddle' in sys.modules) * 3)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "-pretrained" in done.stdout
    assert time.perf_counter() - start < 10  # measured: 0.1 s; the bound is for a busy machine


@pytest.mark.parametrize(
    "flags", [["-no_such_flag"], ["-batch_size=x"], ["-cfg=absent.yaml"], ["-o", "SEEED", "1"]]
)
def test_a_wrong_command_line_exits_with_2_and_no_traceback(program, flags):
    status, _, errors = program("main_multi_gpu.py", *flags)
    assert status == 2
    assert "error: " in errors
    assert "Traceback" not in errors


def test_a_resolved_configuration_keeps_what_was_set_by_whom(tmp_path):
    config = get_config(None, ["TRAIN.HFLIP", "0.5", "TRAIN.BASE_LR", "1e-4"])
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    again = get_config(tmp_path / "config.yaml", ["SEED", "3"])
    assert with_values(again, SEED=0) == config
    levels = {key: where.level for key, where in value_sources(again).items()}
    assert levels["TRAIN.HFLIP"] == levels["TRAIN.BASE_LR"] == 0  # set, the first to the default
    assert levels["TRAIN.VFLIP"] == WRITTEN_OUT
    assert levels["SEED"] == 1
    assert value_sources(again)["TRAIN.HFLIP"].source.endswith("config.yaml")


@pytest.mark.parametrize("found", ["5", "[SEED]", "{SEED: true}", "{SEED: -2}", "{SEED: 1000000}"])
def test_levels_of_given_keys_that_are_none_are_one_line(tmp_path, found):
    (tmp_path / "config.yaml").write_text(f"GIVEN: {found}\nSEED: 1\n")
    with pytest.raises(
        InputError,
        match=r"config.yaml: GIVEN is .*, expected the \{key: \[level, source\]\} that a run",
    ):
        get_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("base", ["5", "[5]", "[[a]]", "{a: 1}", "true"])
def test_a_base_that_names_no_file_is_one_line(tmp_path, base):
    (tmp_path / "c.yaml").write_text(f"BASE: {base}\n")
    with pytest.raises(
        InputError, match=r"c.yaml: BASE is \[.*\], expected a file, or a list of files$"
    ):
        get_config(tmp_path / "c.yaml")


def test_without_takes_back_what_the_files_before_said(tmp_path):
    """As if nobody had set it: TRAIN.BCE_SUM would do nothing without its loss."""
    base = "BASE: ''\nTRAIN: {LOSS: bce, BCE_SUM: True, BASE_LR: 1e-4}\nMODEL: {DROPOUT: 0.1, DROPPATH: 0.2}\n"
    (tmp_path / "base.yaml").write_text(base)
    own = tmp_path / "own.yaml"
    own.write_text("BASE: base.yaml\nWITHOUT: [TRAIN, MODEL.DROPOUT]\nTRAIN: {BASE_LR: 2e-4}\n")
    config = get_config(own)
    changed = {line.split(":")[0] for line in differences(config)} - {"BASE"}
    assert changed == {"TRAIN.BASE_LR", "MODEL.DROPPATH"}
    assert (config.TRAIN.BASE_LR, config.MODEL.DROPPATH) == (2e-4, 0.2)
    assert not is_given(config, "TRAIN.BCE_SUM")
    (tmp_path / "run.yaml").write_text(resolved_yaml(config))
    assert differences(get_config(tmp_path / "run.yaml")) == differences(config)
    own.write_text("BASE: base.yaml\nWITHOUT: TRAIN.BCE_SUM\n")
    assert get_config(own).TRAIN.BCE_SUM is False
    own.write_text("BASE: base.yaml\nWITHOUT:\n")
    assert get_config(own).TRAIN.BCE_SUM is True
    for wrong, named in (
        ("[TRAIN.BCE_SUMS]", "'TRAIN.BCE_SUMS'"),
        ("[3]", "3"),
        ("{a: 1}", "{'a': 1}"),
        ("['']", "''"),
        ("''", "''"),
        ("0", "0"),
        ("false", "False"),
        ("BASE", "'BASE'"),
        ("[[TRAIN]]", "['TRAIN']"),
    ):
        own.write_text(f"BASE: base.yaml\nWITHOUT: {wrong}\n")
        with pytest.raises(InputError) as error:
            get_config(own)
        assert (
            str(error.value)
            == f"{own}: WITHOUT names {named}, expected keys or sections such as TRAIN"
        )
    own.write_text("MODEL: {TYPE: ViT}\nWITHOUT: [TRAIN]\n")
    with pytest.raises(
        InputError,
        match="own.yaml: WITHOUT needs a BASE whose keys it removes; add one",
    ):
        get_config(own)
    own.write_text("BASE: ''\nWITHOUT: [TRAIN]\n")
    (tmp_path / "both.yaml").write_text("BASE: [base.yaml, own.yaml]\n")
    assert get_config(tmp_path / "both.yaml").TRAIN.LOSS == "auto"


def test_an_error_tells_the_words_that_a_key_takes():
    found = "command line: TRAIN.LR_SCHEDULER.PER_EPOCH takes bool or start or late or end, found 'begin' (str)"
    with pytest.raises(InputError) as error:
        get_config(None, ["TRAIN.LR_SCHEDULER.PER_EPOCH", "begin"])
    assert str(error.value) == found
    with pytest.raises(InputError, match="MODEL.NUM_CLASSES takes int or auto, found 'all'"):
        get_config(None, ["MODEL.NUM_CLASSES", "all"])


@pytest.mark.parametrize(("key", "most"), [("DATA.CROP_PCT", 2), ("TRAIN.CROP_PCT", 1)])
@pytest.mark.parametrize("value", [1e-9, 0.001, -0.5, 2.01])
def test_a_crop_is_of_an_image_that_memory_holds(key, most, value):
    """At 0.001 each image would be resized to 1,000 times IMAGE_SIZE, a million times its memory."""
    told = (
        rf"{key} is {value}, expected 0.1 <= value <= {most}: images are resized to IMAGE_SIZE / it"
    )
    with pytest.raises(InputError, match=told):
        get_config(None, ["TRAIN.CROP", "squash", key, str(value)])
