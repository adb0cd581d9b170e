"""Adapters: a few parameters train beside a frozen model, and every file that a run leaves is
merged.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import without
from safetensors.numpy import load_file, save_file
from support.training_runs import assert_same_run, refused, train, weights

from config import get_config, resolved_yaml
from errors import InputError
from inference import Predictor
from models import create_model
from training.command_line import config_from_arguments
from training.optim import freeze
from weights import file_arrays, load_weights
from weights.formats import read_metadata, write_weights

LORA = ["TRAIN.ADAPTER.NAME", "lora", "TRAIN.ADAPTER.RANK", "2", "TRAIN.ADAPTER.ALPHA", "3.0"]
BASED = ["MODEL.PRETRAINED", "base"]
SIZES = {"num_classes": 5, "image_size": 32}
SMALL = {
    "vit_tiny_patch16_224": {"depth": 2, "embed_dim": 24},
    "convnext_tiny": {"embed_dims": [8, 16, 24, 32], "stage_depths": [1, 1, 1, 1]},
}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


# ---------------------------------------------------------------- what trains


@pytest.mark.parametrize(
    ("options", "added", "trained"),
    [
        (
            LORA,
            {
                f"blocks.{i}.attn.{n}.lora_{x}.weight"
                for i in (0, 1)
                for n in ("qkv", "proj")
                for x in "AB"
            },
            8,
        ),
        (
            ["TRAIN.ADAPTER.NAME", "bitfit"],
            set(),
            2 * 6 + 2,
        ),  # norms', qkv, proj, fc1, fc2; patches' and the last norm's
        (["TRAIN.ADAPTER.NAME", "prompt"], set(), 1),
    ],
    ids=["lora", "bitfit", "prompt"],
)
def test_the_adapter_and_the_classifier_train(options, added, trained):
    model = create_model(
        "vit_tiny_patch16_224", prompt_tokens=3, **SMALL["vit_tiny_patch16_224"], **SIZES
    )
    before = {name for name, _ in model.named_parameters()}
    frozen = freeze(get_config(None, [*BASED, *options]), model)
    names = {name for name, parameter in model.named_parameters() if not parameter.stop_gradient}
    assert {name for name, _ in model.named_parameters()} - before == added
    assert names.isdisjoint(frozen)
    assert len(names) == trained + 2
    assert {"head.weight", "head.bias"} <= names
    model(paddle.ones([2, 3, 32, 32])).sum().backward()
    assert {
        name for name, parameter in model.named_parameters() if parameter.grad is not None
    } == names


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "vit_tiny_patch16_224",
            [*LORA, "TRAIN.ADAPTER.TARGETS", "['*.attn.qvk']"],
            r"TARGETS: '\*.attn.qvk' matches none of the 8 Linear layers other than the classifier; did you mean \*.attn.qkv\?",
        ),
        (
            "convnext_tiny",
            LORA,
            r"TARGETS: '\*.attn.qkv' matches none of the 8 Linear layers other than the classifier",
        ),
        (
            "vit_tiny_patch16_224",
            [*LORA, "TRAIN.ADAPTER.RANK", "25"],
            r"RANK is 25, expected 1 to 24 \(the smaller side of blocks.0.attn.qkv\)",
        ),
        (
            "vit_tiny_patch16_224",
            ["TRAIN.ADAPTER.NAME", "prompt"],
            "no prompt tokens; set MODEL.PROMPT_TOKENS 10",
        ),
        (
            "vit_tiny_patch16_224",
            [*LORA, "MODEL.PRETRAINED", "null"],
            "ADAPTER.NAME is lora, but the weights to freeze are random; pass -pretrained=FILE",
        ),
    ],
)
def test_an_adapter_that_has_nothing_to_act_on_is_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        freeze(get_config(None, [*BASED, *options]), create_model(name, **SMALL[name], **SIZES))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [*BASED, "TRAIN.ADAPTER.RANK", "4"],
            "TRAIN.ADAPTER.RANK has no effect without TRAIN.ADAPTER.NAME lora",
        ),
        (
            [*BASED, *LORA, "TRAIN.FREEZE", "backbone"],
            "TRAIN.FREEZE has no effect with TRAIN.ADAPTER.NAME; leave it out",
        ),
        ([*BASED, "TRAIN.ADAPTER.NAME", "lorra"], "expected one of None, .*; did you mean lora?"),
        (
            ["MODEL.PRETRAINED_ADAPTER", "x"],
            "MODEL.PRETRAINED_ADAPTER has no effect without MODEL.PRETRAINED",
        ),
        (
            ["MODEL.PROMPT_DEEP", "True"],
            "MODEL.PROMPT_DEEP has no effect without MODEL.PROMPT_TOKENS above 0",
        ),
    ],
)
def test_keys_that_do_nothing_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        get_config(None, options)


# ----------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Weights of the tiny ViT, for five classes: not the digits' ten."""
    file = tmp_path_factory.mktemp("base") / "base.safetensors"
    paddle.seed(3)
    write_weights(file, file_arrays(create_model("vit_digits", **SHAPE, num_classes=5)))
    return file


SHAPE = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 4.0}
RECIPE = [
    "DATA.BATCH_SIZE",
    "8",
    "TRAIN.BASE_LR",
    "0.01",
    "SAVE_STEPS",
    "1",
    "KEEP_LAST",
    "9",
    "REPORT_FREQ",
    "2",
]
KINDS = {
    "lora": [
        *LORA,
        "TRAIN.ADAPTER.DROPOUT",
        "0.2",
        "TRAIN.MODEL_EMA",
        "True",
        "TRAIN.LAYER_DECAY",
        "0.8",
    ],
    "prompt": [
        "TRAIN.ADAPTER.NAME",
        "prompt",
        "MODEL.PROMPT_TOKENS",
        "2",
        "MODEL.PROMPT_DEEP",
        "True",
    ],
    "bitfit": ["TRAIN.ADAPTER.NAME", "bitfit", "TRAIN.MODEL_EMA", "True"],
}


def of_model(options):
    return without(options, "TRAIN.", "SAVE", "KEEP", "REPORT")


def evaluated(options, output, *more):
    train([*of_model(options), "EVAL", "True", *more], output, 32)
    return json.loads((output / "result.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_merged_alone_and_resumed(tmp_path, tiny, base, kind):
    options = [*tiny, *RECIPE, *KINDS[kind]]
    train([*options, "MODEL.PRETRAINED", str(base)], tmp_path / "whole", 32)
    last = tmp_path / "whole" / "checkpoints" / "last"
    middle = last.parent / "epoch_0001_sample_000000016"
    train([*options, "MODEL.RESUME", str(middle)], tmp_path / "resumed", 32)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    # The optimizer holds what trains, alone; the small file, too.
    alone = load_file(last / "adapter.safetensors")
    trained = {name.removeprefix("base_model.model.") for name in alone}
    assert {name.partition("/")[0] for name in load_file(last / "optimizer.safetensors")} == trained
    assert not any("lora" in name for name in weights(tmp_path / "whole"))
    assert ("prompt_tokens" in weights(tmp_path / "whole")) == (kind == "prompt")
    # One answer: of the run, of the merged file, of the base with the small file.
    found = json.loads((tmp_path / "whole" / "result.json").read_text())
    own = evaluated(options, tmp_path / "merged", "MODEL.PRETRAINED", str(last))
    joined = ["MODEL.PRETRAINED", str(base), "MODEL.PRETRAINED_ADAPTER", str(last)]
    two = evaluated(options, tmp_path / "joined", *joined)
    for key in ("loss", "acc1", "num_samples"):
        assert own[key] == pytest.approx(found[key], rel=1e-6)
        assert two[key] == pytest.approx(found[key], rel=1e-6)
    images = [np.full((8, 8), 9 * place, np.uint8) for place in range(8)]
    one = Predictor(last)
    other = Predictor(base, options=["MODEL.PRETRAINED_ADAPTER", str(last)])
    assert one.classes == other.classes == [str(digit) for digit in range(10)]
    pixels = np.stack([one.pixels(image) for image in images])
    np.testing.assert_allclose(one.logits(pixels), other.logits(pixels), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_adapter_lacks_nothing(tmp_path, tiny, base, kind):
    """Its metadata name its tensors. Those of earlier versions don't, but still need both factors."""
    options = [*tiny, *RECIPE, *KINDS[kind], "MODEL.PRETRAINED", str(base)]
    train(options, tmp_path / "run", 16)
    file = tmp_path / "run" / "checkpoints" / "last" / "adapter.safetensors"
    tensors = load_file(file)
    metadata = read_metadata(file)
    prompts = {"prompt_tokens": 2, "prompt_deep": True} if kind == "prompt" else {}

    def load(changed, told=metadata):
        save_file(changed, tmp_path / "own.safetensors", told)
        load_weights(
            create_model("vit_digits", **SHAPE, **prompts),
            base,
            adapter=tmp_path / "own.safetensors",
        )

    load(tensors)
    for name in tensors:
        with pytest.raises(InputError, match=f"it lacks {name.removeprefix('base_model.model.')}"):
            load({other: array for other, array in tensors.items() if other != name})
    old = {
        key: value
        for key, value in json.loads(metadata["adapter"]).items()
        if key not in ("rank", "tensors")
    }
    old = metadata | {"adapter": json.dumps(old)}
    load(tensors, old)
    if kind == "lora":
        for name in (name for name in tensors if "lora" in name):
            with pytest.raises(
                InputError, match=f"it lacks {name.removeprefix('base_model.model.')}$"
            ):
                load({other: array for other, array in tensors.items() if other != name}, old)
        widened = {
            name: np.repeat(array, 3, int("lora_B" in name))
            for name, array in tensors.items()
            if "lora" in name
        }
        with pytest.raises(
            InputError,
            match=r"lora_A and lora_B of .* are \[6, 16\] and \[\d+, 6\], expected \[2, 16\]",
        ):
            load(tensors | widened)


def test_an_adapter_knows_its_base(tmp_path, tiny, base):
    train([*tiny, *RECIPE, *LORA, "MODEL.PRETRAINED", str(base)], tmp_path / "run", 16)
    other = tmp_path / "other.safetensors"
    paddle.seed(4)
    write_weights(other, file_arrays(create_model("vit_digits", **SHAPE, num_classes=5)))
    joined = [
        "EVAL",
        "True",
        "MODEL.PRETRAINED_ADAPTER",
        str(tmp_path / "run" / "checkpoints" / "last"),
    ]
    options = [*of_model(tiny), *joined]
    refused(
        "was trained on other weights than",
        [*options, "MODEL.PRETRAINED", str(other)],
        tmp_path / "eval",
        None,
    )
    # What has no matrix: a norm's bias, another training's biases, tokens and positions.
    for name in (
        "norm.bias",
        "blocks.0.norm1.weight",
        "blocks.1.mlp.fc1.bias",
        "cls_token",
        "pos_embed",
    ):
        arrays = load_file(base)
        write_weights(other, arrays | {name: arrays[name] + np.float32(0.1)})
        told = name if name in ("cls_token", "pos_embed") else "biases or factors"
        message = f" (the {told} differ); set -pretrained to those weights"
        refused(message, [*options, "MODEL.PRETRAINED", str(other)], tmp_path / "eval", None)
    # The classifier is the adapter's own.
    write_weights(other, load_file(base) | {"head.bias": np.ones(5, np.float32)})
    assert evaluated(tiny, tmp_path / "eval", *joined[2:], "MODEL.PRETRAINED", str(other))
    # Metadata of earlier releases have less.
    last = tmp_path / "run" / "checkpoints" / "last" / "adapter.safetensors"
    told = json.loads(read_metadata(last)["adapter"])
    earlier = {key: told[key] for key in ("kind", "scale", "base")}
    save_file(load_file(last), tmp_path / "earlier.safetensors", {"adapter": json.dumps(earlier)})
    joined[-1] = str(tmp_path / "earlier.safetensors")
    assert evaluated(tiny, tmp_path / "eval", *joined[2:], "MODEL.PRETRAINED", str(base))
    # What its description doesn't name isn't used in silence.
    extra = {"base_model.model.norm.weight": np.ones(16, np.float32)}
    save_file(
        load_file(last) | extra, tmp_path / "extra.safetensors", {"adapter": json.dumps(told)}
    )
    joined[-1] = str(tmp_path / "extra.safetensors")
    message = "it contains norm.weight, which its description doesn't name"
    refused(
        message, [*of_model(tiny), *joined, "MODEL.PRETRAINED", str(base)], tmp_path / "eval", None
    )
    tell = "it isn't an adapter: its metadata don't say so, and there is no adapter_config.json next to it"
    strange = [
        *of_model(tiny),
        "EVAL",
        "True",
        "MODEL.PRETRAINED",
        str(base),
        "MODEL.PRETRAINED_ADAPTER",
    ]
    refused(tell, [*strange, str(other)], tmp_path / "eval", None)
    file = tmp_path / "run" / "checkpoints" / "last" / "unmerged.safetensors"
    assert {name.partition("/")[0] for name in load_file(file)} == {"val"}


# ------------------------------------------------------------------ peft's


A = "base_model.model.blocks.1.attn.qkv.lora_A.weight"
B = A.replace("lora_A", "lora_B")
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["blocks.1.attn.qkv"]}


def peft_folder(folder, change=None, strange=None):
    """Writes an adapter of the tiny ViT in peft's layout. None: what is taken away."""
    tensors = {A: numbers(2, 16), B: numbers(48, 2, seed=1)}
    tensors["base_model.model.head.weight"] = numbers(10, 16, seed=2)
    tensors["base_model.model.head.bias"] = numbers(10)
    tensors |= strange or {}
    folder.mkdir(exist_ok=True)
    save_file(
        {name: a for name, a in tensors.items() if a is not None},
        folder / "adapter_model.safetensors",
    )
    told = CONFIG | {"modules_to_save": ["head"]} | (change or {})
    (folder / "adapter_config.json").write_text(
        json.dumps({key: v for key, v in told.items() if v is not None})
    )
    return folder


SCALES = {
    "alpha over rank": ({}, 4.0),
    "alpha over its root": ({"use_rslora": True}, 8 / 2**0.5),
    "a layer's last name": (
        {"target_modules": ["qkv"], "layers_to_transform": [1], "layers_pattern": "blocks"},
        4.0,
    ),
    "all but one": (
        {"target_modules": ["attn.qkv"], "exclude_modules": ["blocks.0.attn.qkv"]},
        4.0,
    ),
    "a pattern": ({"target_modules": r"blocks\.(1|2)\.attn\.(qkv|k)"}, 4.0),
    "what Linears don't have": (
        {"fan_in_fan_out": True, "lora_dropout": 0.1, "peft_version": "1"},
        4.0,
    ),
}


@pytest.mark.parametrize(("change", "scale"), SCALES.values(), ids=list(SCALES))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pefts_folder_is_read(tmp_path, base, change, scale, dtype):
    a, b, head = (
        array.astype(dtype)
        for array in (numbers(2, 16), numbers(48, 2, seed=1), numbers(10, 16, seed=2))
    )
    peft_folder(tmp_path, change, {A: a, B: b, "base_model.model.head.weight": head})
    model = create_model("vit_digits", **SHAPE)
    before = load_file(base)
    report = load_weights(model, base, adapter=tmp_path)
    assert f"merged with {tmp_path / 'adapter_model.safetensors'}" in str(report)
    found = file_arrays(model)
    wanted = before["blocks.1.attn.qkv.weight"] + scale * b.astype("float32") @ a.astype("float32")
    np.testing.assert_allclose(found["blocks.1.attn.qkv.weight"], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["head.weight"], head.astype("float32"))
    np.testing.assert_array_equal(
        found["blocks.0.attn.qkv.weight"], before["blocks.0.attn.qkv.weight"]
    )


@pytest.mark.parametrize("kind", ["all", "lora_only"])
def test_pefts_biases_take_the_place_of_the_base_s(tmp_path, base, kind):
    model = create_model("vit_digits", **SHAPE)
    before = load_file(base)
    names = [name for name in before if "bias" in name and not name.startswith("head")]
    names = names if kind == "all" else ["blocks.1.attn.qkv.bias"]
    stored = {name: before[name] + 1 for name in names}
    inside = {
        name.replace("qkv.bias", "qkv.base_layer.bias") if ".1." in name else name: a
        for name, a in stored.items()
    }
    peft_folder(
        tmp_path,
        {"bias": kind},
        {f"base_model.model.{name}": array for name, array in inside.items()},
    )
    load_weights(model, base, adapter=tmp_path)
    found = file_arrays(model)
    for name in before:
        if name in stored:
            np.testing.assert_array_equal(found[name], stored[name])
        elif not name.startswith("head") and name != "blocks.1.attn.qkv.weight":
            np.testing.assert_array_equal(found[name], before[name])
    last = sorted(inside)[-1]
    peft_folder(
        tmp_path,
        {"bias": kind},
        {f"base_model.model.{n}": a for n, a in inside.items() if n != last},
    )
    with pytest.raises(InputError, match=f"it lacks {last.replace('.base_layer', '')}$"):
        load_weights(create_model("vit_digits", **SHAPE), base, adapter=tmp_path)


def test_an_adapter_of_other_classes_leaves_the_classifier_fresh(tmp_path, base):
    folder = peft_folder(tmp_path)
    model = create_model("vit_digits", **SHAPE, num_classes=3)
    before = load_file(base)
    fresh = file_arrays(model)["head.weight"]
    report = load_weights(model, base, strict=False, adapter=folder)
    assert report.fresh == ["head.weight", "head.bias"]
    assert report.reason == "10 classes in the file, 3 in the model"
    found = file_arrays(model)
    np.testing.assert_array_equal(found["head.weight"], fresh)
    wanted = before["blocks.1.attn.qkv.weight"] + 4 * numbers(48, 2, seed=1) @ numbers(2, 16)
    np.testing.assert_allclose(found["blocks.1.attn.qkv.weight"], wanted, rtol=1e-5, atol=1e-5)


def test_a_product_needs_the_weights_that_it_changes(tmp_path, base):
    """The base's classifier is of five classes, and would be left fresh."""
    head = {
        A.replace("blocks.1.attn.qkv", "head"): numbers(2, 16),
        B.replace("blocks.1.attn.qkv", "head"): numbers(3, 2),
    }
    own = dict.fromkeys(["base_model.model.head.weight", "base_model.model.head.bias"])
    change = {"target_modules": ["blocks.1.attn.qkv", "head"], "modules_to_save": None}
    folder = peft_folder(tmp_path, change, head | own)
    with pytest.raises(
        InputError, match=r"base.safetensors has no head.weight \[16, 3\], which .* adapts"
    ):
        load_weights(
            create_model("vit_digits", **SHAPE, num_classes=3), base, strict=False, adapter=folder
        )


def test_an_adapter_in_the_place_of_weights_is_named(tmp_path, base):
    folder = peft_folder(tmp_path / "peft")
    for path in (folder, folder / "adapter_model.safetensors"):
        message = (
            f"{path} (is|has) an adapter, not a whole model; .* -o MODEL.PRETRAINED_ADAPTER {path}$"
        )
        with pytest.raises(InputError, match=message):
            load_weights(create_model("vit_digits", **SHAPE), path)


LACKS = "an adapter of another model, or incomplete: it lacks "
REFUSED = {
    "no A": ({}, {A: None}, LACKS + r"blocks.1.attn.qkv.lora_A.weight$"),
    "no B": ({}, {B: None}, LACKS + r"blocks.1.attn.qkv.lora_B.weight$"),
    "neither": ({}, {A: None, B: None}, LACKS + r"blocks.1.attn.qkv.lora_A.weight and 1 more"),
    "another layer's": (
        {"target_modules": ["qkv"]},
        {},
        LACKS + r"blocks.0.attn.qkv.lora_A.weight and 1 more",
    ),
    "a saved layer": ({}, {"base_model.model.head.bias": None}, LACKS + "head.bias$"),
    "a saved layer of the base": (
        {"modules_to_save": ["head", "norm"]},
        {},
        LACKS + "norm.bias and 1 more",
    ),
    "an untargeted pair": (
        {},
        {A.replace("qkv", "proj"): numbers(2, 16), B.replace("qkv", "proj"): numbers(16, 2)},
        "it contains blocks.1.attn.proj.lora_A.weight, which its description doesn't name",
    ),
    "another rank": (
        {"r": 16},
        {},
        r"blocks.1.attn.qkv are \[2, 16\] and \[48, 2\], expected \[16, 16\] and \[48, 16\]",
    ),
    "a larger rank": (
        {},
        {A: numbers(9999, 16), B: numbers(48, 9999)},
        r"are \[9999, 16\] and \[48, 9999\], expected \[2, 16\]",
    ),
    "transposed": (
        {},
        {A: numbers(16, 2), B: numbers(2, 48)},
        r"are \[16, 2\] and \[2, 48\], expected \[2, 16\] and \[48, 2\]",
    ),
    "three axes": ({}, {A: numbers(2, 1, 16)}, r"are \[2, 1, 16\] and \[48, 2\], expected"),
    "no axes": ({}, {A: numbers()}, r"are \[\] and \[48, 2\], expected"),
    "zero sizes": (
        {},
        {A: numbers(0, 16), B: numbers(48, 0)},
        r"are \[0, 16\] and \[48, 0\], expected",
    ),
    "another width": (
        {},
        {A: numbers(2, 32), B: numbers(96, 2)},
        r"are \[2, 32\] and \[96, 2\], expected \[2, 16\] and \[48, 2\]",
    ),
    "another model's": (
        {},
        {A.replace("qkv", "q"): numbers(2, 16)},
        "another model: it has blocks.1.attn.q.lora_A.weight",
    ),
    "a strange tensor": (
        {},
        {"gone.weight": numbers(1)},
        "an adapter of another model: it has gone.weight",
    ),
    "a bias of a factor": (
        {},
        {A.replace("A.weight", "A.bias"): numbers(2)},
        "it has blocks.1.attn.qkv.lora_A.bias",
    ),
    "an adapter's name": (
        {},
        {A.replace("A.", "A.default."): numbers(2, 16)},
        "it has blocks.1.attn.qkv.lora_A.default.weight",
    ),
    "twice": ({}, {A[17:]: numbers(2, 16)}, "contains blocks.1.attn.qkv.lora_A.weight twice"),
    "NaN": (
        {},
        {A: np.full((2, 16), np.nan, "float32")},
        "32 of the 32 values of .*lora_A.weight are NaN",
    ),
    "whole numbers": (
        {},
        {A: np.ones((2, 16), np.int32)},
        "has the type int32, expected floating point",
    ),
    "too large": (
        {},
        {A: np.full((2, 16), 1e38, "float32"), B: np.full((48, 2), 1e3, "float32")},
        "that aren't finite",
    ),
    "another kind": ({"peft_type": "LOHA"}, {}, "peft_type is 'LOHA', expected LORA"),
    "no kind": ({"peft_type": None}, {}, "peft_type is missing, expected LORA"),
    "no rank": ({"r": None}, {}, "r is missing, expected a rank"),
    "a text as rank": ({"r": "2"}, {}, "adapter_config.json's r is '2', expected a rank"),
    "a broken rank": ({"r": 2.0}, {}, "r is 2.0, expected a rank"),
    "rank 0": ({"r": 0}, {}, "r is 0, expected a rank"),
    "an endless alpha": ({"lora_alpha": 1e300}, {}, "lora_alpha is 1e.300, expected a number"),
    "DoRA": ({"use_dora": True}, {}, "has use_dora True, which isn't supported"),
    "ranks by layer": (
        {"rank_pattern": {"qkv": 4}},
        {},
        "has rank_pattern a dictionary of 1, which isn't supported",
    ),
    "scales by layer": (
        {"alpha_pattern": {"qkv": 4}},
        {},
        "has alpha_pattern a dictionary of 1, which isn't",
    ),
    "what comes next": (
        {"use_next": True},
        {},
        "has use_next True, .* or remove the entry if it has no effect",
    ),
    "a changed base": (
        {"init_lora_weights": "pissa"},
        {},
        "init_lora_weights is 'pissa', expected true, false or one of",
    ),
    "no targets": (
        {"target_modules": None},
        {},
        "target_modules is missing, expected a list of layers' names",
    ),
    "an empty list": (
        {"target_modules": []},
        {},
        r"target_modules has \[\], which isn't an adaptable layer of this model",
    ),
    "a target that isn't there": (
        {"target_modules": ["blocks.1.attn.qkv", "gone"]},
        {},
        "target_modules has gone, which isn't",
    ),
    "a pattern of nothing": (
        {"target_modules": r".*\.gone"},
        {},
        r"target_modules has .*gone, which isn't",
    ),
    "a convolution": (
        {"target_modules": ["blocks.1.attn.qkv", "patch_embed.proj"]},
        {},
        LACKS + "patch_embed.proj.lora_A",
    ),
    "half a pattern": (
        {"target_modules": "("},
        {},
        r"target_modules has .*isn't a valid regular expression|isn't a valid regular expression",
    ),
}


@pytest.mark.parametrize(("change", "strange", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_no_whole_adapter_is_refused(tmp_path, base, change, strange, message):
    folder = peft_folder(tmp_path, change, strange)
    model = create_model("vit_digits", **SHAPE)
    before = file_arrays(model)
    with pytest.raises(InputError, match=message) as raised:
        load_weights(model, base, adapter=folder)
    assert str(folder / "adapter_model.safetensors") in str(raised.value)
    for name, array in file_arrays(model).items():
        np.testing.assert_array_equal(array, before[name])


def test_an_endless_pattern_is_ended(tmp_path, base, monkeypatch):
    monkeypatch.setattr("weights.peft._PATTERN_TIMEOUT", 0.5)
    folder = peft_folder(tmp_path, {"target_modules": "(([a-z0-9.]+)+)+!"})
    with pytest.raises(InputError, match="takes too long to match; list the names"):
        load_weights(create_model("vit_digits", **SHAPE), base, adapter=folder)


def test_an_adapter_in_a_file_belongs_to_the_weights_beside_it(tmp_path):
    file = tmp_path / "config.yaml"
    keys = ["MODEL.PRETRAINED", "base", "MODEL.PRETRAINED_ADAPTER", "own"]
    file.write_text(resolved_yaml(get_config("vit_digits", keys)))

    def adapter(*words):
        return config_from_arguments(
            "main_single_gpu.py", [f"-cfg={file}", *words]
        ).MODEL.PRETRAINED_ADAPTER

    assert adapter() == "own"
    assert adapter("-eval", "-pretrained=best") is None  # a run's own file has it merged
    assert (
        adapter("-eval", "-pretrained=best", "-o", "MODEL.PRETRAINED_ADAPTER", "other") == "other"
    )
    file.write_text("BASE: vit_digits\nMODEL: {PRETRAINED_ADAPTER: own}\n")
    assert adapter("-eval", "-pretrained=base") == "own"
