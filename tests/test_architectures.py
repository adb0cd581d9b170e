"""An architecture's keys of MODEL are its constructor's arguments: read, checked, filled in,
listed, kept by runs.
"""

import inspect
import subprocess
import sys
import types
import typing
from collections.abc import Sequence

import pytest
import yaml
from conftest import ROOT
from support.training_runs import assert_same_run, train

from config import default_values, differences, get_config, resolved_yaml, with_values
from errors import InputError
from models import ARCHITECTURES, create_model
from settings.architectures import all_keys, architecture, architectures, kept_values
from settings.configuration import explicit_sources, leaves, plain
from settings.keys import Range
from training.checkpoint import saver

SHARED = {
    "TYPE",
    "NAME",
    "RESUME",
    "PRETRAINED",
    "PRETRAINED_ALLOW",
    "PRETRAINED_CLASSES",
    "NUM_CLASSES",
}
SHARED |= {"PRETRAINED_ADAPTER"}


def bare(hint):
    """(a type without what Annotated adds, the range that it adds or None)."""
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, None
    plain, *marks = typing.get_args(hint)
    return plain, next((mark for mark in marks if isinstance(mark, Range)), None)


def understood(hint):
    """(kinds, optional, choices, range) of a type, as Python has it."""
    kinds = []
    optional = False
    choices = ()
    hint, limits = bare(hint)
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for part in typing.get_args(hint) if union else (hint,):
        several = typing.get_origin(part) is Sequence
        part = typing.get_args(part)[0] if several else part
        part, found = bare(part)
        limits = limits or found
        if part is type(None):
            optional = True
        elif typing.get_origin(part) is typing.Literal:
            kinds = [*kinds, str]
            choices = typing.get_args(part)
        else:
            kinds.append([part] if several else part)
    return kinds, optional, choices, limits


# ------------------------------------------------------------------- the reading


@pytest.mark.smoke
@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_the_source_is_read_as_python_reads_it(kind):
    made = ARCHITECTURES[kind]
    parameters = inspect.signature(made).parameters
    hints = typing.get_type_hints(made.__init__, include_extras=True)
    names = [
        name for name in parameters if name not in ("image_size", "in_channels", "num_classes")
    ]
    arguments = architecture(kind).arguments
    assert list(arguments) == [f"MODEL.{name.upper()}" for name in names]
    for name, argument in zip(names, arguments.values(), strict=True):
        default = parameters[name].default
        assert argument.default == (list(default) if isinstance(default, tuple) else default), name
        kinds = list(argument.kind) if isinstance(argument.kind, tuple) else [argument.kind]
        assert (kinds, argument.optional, argument.choices, argument.range) == understood(
            hints[name]
        ), name
        assert argument.optional or argument.default == argument.value(argument.default, "here")
        assert argument.text, f"the docstring of {made.__name__} doesn't say what {name} is"


def test_each_name_is_registered_and_found_without_a_list():
    assert architectures().keys() == ARCHITECTURES.keys()
    assert {architecture(kind).module for kind in ARCHITECTURES} <= {
        file.stem for file in (ROOT / "models").iterdir()
    }
    assert ARCHITECTURES["deit"] is ARCHITECTURES["vit"]
    assert set(get_config().MODEL) - SHARED == {
        key.removeprefix("MODEL.") for key in architecture("ViT").arguments
    }


def test_what_a_docstring_says_is_found_in_the_class_and_above_it():
    keys = architecture("ResMLP").arguments
    # its own
    expected = "ratio of the MLP's hidden width to embed_dim."
    assert keys["MODEL.MLP_RATIO"].text == expected
    # MlpMixer's
    assert keys["MODEL.DROPOUT"].text == "dropout rate in the MLPs."
    # ImageModel's
    expected = "factor on the initial weight and bias of a new classifier."
    assert keys["MODEL.HEAD_INIT_SCALE"].text == expected
    lines = architecture("PoolFormer").arguments["MODEL.FC_NORM"].text
    assert "a layer norm named ``head.norm``, as in timm. Otherwise it comes before" in lines


# ----------------------------------------------------------------------- checks

KINDS = [
    ("ViT", "DEPTH", "1.5", 1.5, "takes int, found 1.5 (float)"),
    ("ViT", "DEPTH", "0", 0, "is 0, expected 1 to 200"),
    ("ViT", "REG_TOKENS", "-1", -1, "is -1, expected 0 to 1000000"),
    ("ViT", "NUM_HEADS", "[1,2]", [1, 2], "takes int, found [1, 2] (list)"),
    ("ViT", "QKV_BIAS", "1", 1, "takes bool, found 1 (int)"),
    ("ViT", "DROPPATH", "much", "much", "takes float, found 'much' (str)"),
    ("ViT", "DROPPATH", "1.0", 1.0, "is 1.0, expected 0 <= value < 1"),
    ("ViT", "INIT_VALUES", "0", 0, "is 0.0, expected 1e-12 to 1000000"),
    (
        "ViT",
        "GLOBAL_POOL",
        "max",
        "max",
        "is 'max', expected one of token, avg, map, token_avg; did you mean map?",
    ),
    ("ViT", "GLOBAL_POOL", "3", 3, "takes str, found 3 (int)"),
    ("ViT", "HEAD_INIT_SCALE", "-1", -1, "is -1.0, expected 0 to 1000000"),
    ("Swin", "NUM_HEADS", "many", "many", "takes a list of ints, found 'many' (str)"),
    ("Swin", "NUM_HEADS", "[1,2.5]", [1, 2.5], "takes a list of ints, found [1, 2.5] (list)"),
    ("Swin", "NUM_HEADS", "[4,0]", [4, 0], "is [4, 0], expected 1 to 1000000"),
    ("Swin", "NUM_HEADS", "[]", [], "is [], expected 1 to 1000000"),
    ("Swin", "MLP_RATIO", "[4,-2.5]", [4, -2.5], "is [4.0, -2.5], expected 1e-12 to 1000000"),
    ("ConvMixer", "ACT", "swish", "swish", "is 'swish', expected one of gelu, relu"),
]


@pytest.mark.parametrize(("kind", "name", "word", "value", "message"), KINDS)
def test_a_value_that_the_constructor_does_not_take_is_one_line(
    tmp_path, kind, name, word, value, message
):
    with pytest.raises(InputError) as caught:
        get_config(None, ["MODEL.TYPE", kind, f"MODEL.{name}={word}"])
    assert str(caught.value) == f"command line: MODEL.{name} {message}"
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"BASE": "", "MODEL": {"TYPE": kind, name: value}}))
    with pytest.raises(InputError) as caught:
        get_config(file)
    assert str(caught.value) == f"{file}: MODEL.{name} {message}"


def test_values_are_of_the_constructors_type():
    options = [
        "STAGE_DEPTHS",
        "2",
        "MLP_RATIO",
        "3",
        "DROPPATH",
        "0",
        "QKV_BIAS",
        "False",
        "EMBED_DIM",
        "24",
    ]
    words = [word if place % 2 else f"MODEL.{word}" for place, word in enumerate(options)]
    model = get_config(None, ["MODEL.TYPE", "swin", *words]).MODEL
    found = (model.STAGE_DEPTHS, model.MLP_RATIO, model.DROPPATH, model.QKV_BIAS, model.EMBED_DIM)
    assert found == ([2], 3.0, 0.0, False, 24)
    assert [type(value) for value in found] == [list, float, float, bool, int]
    model = get_config("swin_tiny_patch4_window7_224", ["MODEL.MLP_RATIO", "[4,4,4,2.5]"]).MODEL
    assert model.MLP_RATIO == [4.0, 4.0, 4.0, 2.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.DEPHT", "3"], "command line: unknown key MODEL.DEPHT; did you mean MODEL.DEPTH?"),
        (["MODEL.EMBED_DMS", "[1]"], "command line: unknown key MODEL.EMBED_DMS; did you mean MODEL.EMBED_DIMS?"),
        (["MODEL.SE_RATIO", "7"], "command line: MODEL.SE_RATIO is 7, but ViT takes no SE_RATIO; leave it out"),
        (["MODEL.TYPE", "vitt"], f"MODEL.TYPE is 'vitt', expected one of {', '.join(sorted(architectures()))}"),
    ],
)  # fmt: skip
def test_an_unknown_key_or_type_names_the_known(options, message):
    with pytest.raises(InputError) as caught:
        get_config(None, options)
    assert str(caught.value) == message


def test_a_size_that_an_architecture_does_not_take_is_refused_at_its_default_too():
    message = "command line: MODEL.EMBED_DIM is 768, but ConvNeXt takes no EMBED_DIM; leave it out"
    with pytest.raises(InputError, match=message):
        create_model("convnext_tiny", embed_dim=768)
    with pytest.raises(InputError, match=message):
        get_config("convnext_tiny", ["MODEL.EMBED_DIM", "768"])


def test_a_recipe_serves_an_architecture_that_does_not_take_all_of_it(tmp_path):
    (tmp_path / "recipe.yaml").write_text("MODEL: {DROPPATH: 0.1}\n")
    (tmp_path / "mine.yaml").write_text("BASE: recipe.yaml\nMODEL: {TYPE: ConvMixer, DEPTH: 18}\n")
    config = get_config(tmp_path / "mine.yaml")
    assert "DROPPATH" not in config.MODEL
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    assert get_config(tmp_path / "config.yaml").MODEL == config.MODEL
    with pytest.raises(
        InputError, match=r"MODEL.DROPPATH is 0.0, but ConvMixer takes no DROPPATH; leave it out"
    ):
        get_config(tmp_path / "mine.yaml", ["MODEL.DROPPATH", "0.0"])


@pytest.mark.parametrize("script", ["main_single_gpu.py", "main_multi_gpu.py"])
def test_it_is_said_before_data_are_read_and_a_folder_is_made(program, tmp_path, script):
    status, _, errors = program(
        script,
        "-cfg=convnext_tiny",
        "-data_path=absent",
        "-output=run",
        "-o",
        "MODEL.EMBED_DIM",
        "768",
    )
    assert (status, errors.splitlines()[-1].split("; ")[-1]) == (2, "leave it out")
    assert "error: command line: MODEL.EMBED_DIM is 768, but ConvNeXt takes no EMBED_DIM" in errors
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------- what a configuration holds


def test_a_configuration_has_the_constructors_defaults_and_no_others_keys():
    for kind in ARCHITECTURES:
        config = get_config(None, ["MODEL.TYPE", kind])
        own = architecture(kind).arguments
        assert {f"MODEL.{name}" for name in set(config.MODEL) - SHARED} == own.keys()
        assert {key: value for key, value in leaves(config) if key in own} == {
            k: a.default for k, a in own.items()
        }
        assert [line for line in differences(config) if "MODEL.TYPE" not in line] == []
        assert default_values(config) == dict(leaves(config)) | {"MODEL.TYPE": "ViT"}


def test_none_is_the_constructors_default(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "BASE: ''\nMODEL: {TYPE: ConvNeXt, INIT_VALUES: 0.5, DROPOUT: 0.5}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "BASE: base.yaml\nMODEL: {INIT_VALUES: null, WINDOW_SIZE: null}\n"
    )
    config = get_config(tmp_path / "own.yaml", ["MODEL.DROPOUT", "None"])
    assert (config.MODEL.INIT_VALUES, config.MODEL.DROPOUT) == (1e-6, 0.0)
    assert explicit_sources(config).keys() == {"MODEL.TYPE", "BASE"}
    assert with_values(config, MODEL__INIT_VALUES=None) == config


def test_a_type_that_is_set_over_another_leaves_its_own_defaults():
    config = get_config("vit_tiny_patch16_224", ["MODEL.TYPE", "Swin", "MODEL.DROPPATH", "0.3"])
    # a file's, own
    assert (config.MODEL.EMBED_DIM, config.MODEL.PATCH_SIZE, config.MODEL.WINDOW_SIZE) == (
        192,
        16,
        7,
    )
    assert "DEPTH" not in config.MODEL
    changed = with_values(get_config(), MODEL__TYPE="Swin")
    assert (changed.MODEL.EMBED_DIM, changed.MODEL.PATCH_SIZE) == (96, 4)


def test_defaults_are_nobodys_to_change():
    get_config(None, ["MODEL.TYPE", "Swin"]).MODEL.NUM_HEADS.append(7)
    assert get_config(None, ["MODEL.TYPE", "Swin"]).MODEL.NUM_HEADS == [3, 6, 12, 24]


# ---------------------------------------------------------------- runs of earlier days


def as_once(tree):
    """A run's configuration as it was: every architecture's keys, None for what the constructor's
    default was.
    """
    none = dict.fromkeys(key.removeprefix("MODEL.") for key in all_keys())
    tree["MODEL"] = (
        none | tree["MODEL"] | dict.fromkeys(("MLP_RATIO", "DROPPATH_SHAPE", "INIT_VALUES"))
    )
    return tree


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "convnext_tiny", "swin_tiny_patch4_window7_224", "lenet"]
)
def test_a_configuration_of_an_earlier_run_is_read_as_it_was_meant(tmp_path, name):
    config = with_values(get_config(name), BASE=[""])
    file = tmp_path / "config.yaml"
    once = as_once(yaml.safe_load(resolved_yaml(config)))
    file.write_text(yaml.safe_dump(once))
    again = get_config(file)
    assert again.MODEL == config.MODEL
    assert kept_values(once).items() >= dict(leaves(again.MODEL, "MODEL.")).items()
    file.write_text(resolved_yaml(again))
    assert get_config(file) == again
    assert set(yaml.safe_load(file.read_text())["MODEL"]) == set(config.MODEL)
    del once["GIVEN"]  # still earlier
    file.write_text(yaml.safe_dump(once))
    assert get_config(file).MODEL == config.MODEL


def test_a_checkpoint_of_an_earlier_run_goes_on(tmp_path, tiny, monkeypatch):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "TRAIN.NUM_EPOCHS", "2", "MODEL.DROPPATH", "0.2"]
    train(options, tmp_path / "whole", 32)
    with monkeypatch.context() as once:
        once.setattr(saver, "plain", lambda config: as_once(plain(config)))
        train(options, tmp_path / "once", 32)
    resume = ["MODEL.RESUME", str(tmp_path / "once" / "checkpoints" / "epoch_0001")]
    train([*options, *resume], tmp_path / "new", 32)
    assert_same_run(tmp_path / "whole", tmp_path / "new")
    message = r"other settings: MODEL.MLP_RATIO 4.0 -> 2.0, MODEL.QK_NORM False -> True;"
    with pytest.raises(InputError, match=message):
        train(
            [*options, *resume, "MODEL.QK_NORM", "True", "MODEL.MLP_RATIO", "2"],
            tmp_path / "other",
            32,
        )


# -------------------------------------------------------------------- what a user sees


def test_the_keys_of_a_model_are_listed_without_importing_paddle():
    code = (
        "import sys; sys.argv = ['list_models.py', '--keys', 'swin_tiny_patch4_window7_224']\n"
        "sys.path.insert(0, 'tools')\n"
        "import list_models; list_models.main(); sys.exit('paddle' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["key", "takes", "default", "here"]
    assert [line.split()[0] for line in lines] == sorted(architecture("swin").arguments)
    found = {
        line.split()[0]: [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in lines
    }
    assert found["MODEL.DROPPATH"][1:] == [
        "float, 0 <= value < 1", "0.0", "0.2",
        "stochastic depth rate of the last block; the rates grow linearly from 0 at the first.",
    ]  # fmt: skip
    assert found["MODEL.NUM_HEADS"][1:4] == [
        "list of ints, 1 to 1000000",
        "[3, 6, 12, 24]",
        "[3, 6, 12, 24]",
    ]
    assert found["MODEL.MLP_RATIO"][1] == "float or list of floats, 1e-12 to 1000000"


def test_what_a_key_takes_is_said_in_words():
    vit = architecture("vit").arguments
    mixer = architecture("mixer").arguments
    assert vit["MODEL.WEIGHT_INIT"].takes == "timm or deit or big_vision or mae"
    assert vit["MODEL.FC_NORM"].takes == "bool or None"
    assert mixer["MODEL.MLP_RATIO"].takes == "float or list of floats or None, 1e-12 to 1000000"
    assert isinstance(vit["MODEL.DEPTH"].range, Range)
