"""Adapters: a few parameters train beside a frozen model, and every file that a run leaves is merged."""

import json

import numpy as np
import paddle
import pytest
from conftest import without
from runs import assert_same_run, refused, train, weights
from safetensors.numpy import load_file, save_file

from config import get_config, resolved_yaml
from errors import InputError
from inference import Predictor
from models import create_model
from training.command_line import config_from_arguments
from training.optim import freeze
from weights import file_arrays, load_weights
from weights.formats import write_weights

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
        (LORA, {f"blocks.{i}.attn.{n}.lora_{x}.weight" for i in (0, 1) for n in ("qkv", "proj") for x in "AB"}, 8),
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
    model = create_model("vit_tiny_patch16_224", prompt_tokens=3, **SMALL["vit_tiny_patch16_224"], **SIZES)
    before = {name for name, _ in model.named_parameters()}
    frozen = freeze(get_config(None, [*BASED, *options]), model)
    names = {name for name, parameter in model.named_parameters() if not parameter.stop_gradient}
    assert {name for name, _ in model.named_parameters()} - before == added
    assert names.isdisjoint(frozen)
    assert len(names) == trained + 2
    assert {"head.weight", "head.bias"} <= names
    model(paddle.ones([2, 3, 32, 32])).sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == names


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "vit_tiny_patch16_224",
            [*LORA, "TRAIN.ADAPTER.TARGETS", "['*.attn.qvk']"],
            r"TARGETS: '\*.attn.qvk' matches none of 8 Linear layers but the classifier; did you mean \*.attn.qkv\?",
        ),
        ("convnext_tiny", LORA, r"TARGETS: '\*.attn.qkv' matches none of 8 Linear layers but the classifier"),
        (
            "vit_tiny_patch16_224",
            [*LORA, "TRAIN.ADAPTER.RANK", "25"],
            r"RANK is 25, blocks.0.attn.qkv takes 1 to 24, its smaller side",
        ),
        ("vit_tiny_patch16_224", ["TRAIN.ADAPTER.NAME", "prompt"], "no prompt tokens; set MODEL.PROMPT_TOKENS 10"),
        (
            "vit_tiny_patch16_224",
            [*LORA, "MODEL.PRETRAINED", "null"],
            "ADAPTER.NAME is lora, but the weights that it freezes are random; give -pretrained=FILE",
        ),
    ],
)
def test_an_adapter_that_has_nothing_to_act_on_is_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        freeze(get_config(None, [*BASED, *options]), create_model(name, **SMALL[name], **SIZES))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*BASED, "TRAIN.ADAPTER.RANK", "4"], "TRAIN.ADAPTER.RANK does nothing without TRAIN.ADAPTER.NAME lora"),
        (
            [*BASED, *LORA, "TRAIN.FREEZE", "backbone"],
            "TRAIN.FREEZE does nothing with TRAIN.ADAPTER.NAME; leave it out",
        ),
        ([*BASED, "TRAIN.ADAPTER.NAME", "lorra"], "expected one of None, .*; did you mean lora?"),
        (["MODEL.PRETRAINED_ADAPTER", "x"], "MODEL.PRETRAINED_ADAPTER does nothing without MODEL.PRETRAINED"),
        (["MODEL.PROMPT_DEEP", "True"], "MODEL.PROMPT_DEEP does nothing without MODEL.PROMPT_TOKENS above 0"),
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
RECIPE = ["DATA.BATCH_SIZE", "8", "TRAIN.BASE_LR", "0.01", "SAVE_STEPS", "1", "KEEP_LAST", "9", "REPORT_FREQ", "2"]
KINDS = {
    "lora": [*LORA, "TRAIN.ADAPTER.DROPOUT", "0.2", "TRAIN.MODEL_EMA", "True", "TRAIN.LAYER_DECAY", "0.8"],
    "prompt": ["TRAIN.ADAPTER.NAME", "prompt", "MODEL.PROMPT_TOKENS", "2", "MODEL.PROMPT_DEEP", "True"],
    "bitfit": ["TRAIN.ADAPTER.NAME", "bitfit", "TRAIN.MODEL_EMA", "True"],
}


def of_model(options):
    return without(options, "TRAIN.", "SAVE", "KEEP", "REPORT")


def evaluated(options, output, *more):
    train([*of_model(options), "EVAL", "True", *more], output)
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
    one, other = Predictor(last), Predictor(base, options=["MODEL.PRETRAINED_ADAPTER", str(last)])
    assert one.classes == other.classes == [str(digit) for digit in range(10)]
    pixels = np.stack([one.pixels(image) for image in images])
    np.testing.assert_allclose(one.logits(pixels), other.logits(pixels), rtol=1e-5, atol=1e-6)


def test_an_adapter_knows_its_base(tmp_path, tiny, base):
    train([*tiny, *RECIPE, *LORA, "MODEL.PRETRAINED", str(base)], tmp_path / "run", 16)
    other = tmp_path / "other.safetensors"
    paddle.seed(4)
    write_weights(other, file_arrays(create_model("vit_digits", **SHAPE, num_classes=5)))
    joined = ["EVAL", "True", "MODEL.PRETRAINED_ADAPTER", str(tmp_path / "run" / "checkpoints" / "last")]
    options = [*of_model(tiny), *joined]
    refused("was trained on other weights than", [*options, "MODEL.PRETRAINED", str(other)], tmp_path / "eval", None)
    tell = "it is no adapter: its metadata don't say so, and there is no adapter_config.json beside it"
    strange = [*of_model(tiny), "EVAL", "True", "MODEL.PRETRAINED", str(base), "MODEL.PRETRAINED_ADAPTER"]
    refused(tell, [*strange, str(other)], tmp_path / "eval", None)
    file = tmp_path / "run" / "checkpoints" / "last" / "unmerged.safetensors"
    assert {name.partition("/")[0] for name in load_file(file)} == {"val"}


# ------------------------------------------------------------------ peft's


A = "base_model.model.blocks.1.attn.qkv.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "strange", "message"),
    [
        ({}, {}, ""),
        ({"use_rslora": True}, {}, "its adapter_config.json has use_rslora, which isn't computed here"),
        ({"r": "2"}, {}, "its adapter_config.json's r is '2', expected a rank"),
        ({}, {A: numbers(3, 16)}, r"blocks.1.attn.qkv is \[16, 48\], its product \[16, 3\] times \[2, 48\]"),
        ({}, {A: numbers(2, 1, 16)}, r"blocks.1.attn.qkv is \[16, 48\], its product \[16, 1, 2\] times \[2, 48\]"),
        ({}, {A.replace("qkv", "q"): numbers(2, 16)}, r"can't be read as an adapter \(KeyError: .*attn.q.lora_B"),
        ({}, {"gone.weight": numbers(1)}, "an adapter of another model: it has gone.weight"),
        ({}, {A.replace("A.weight", "A.bias"): numbers(2)}, "lora_A.bias, which no Linear takes"),
    ],
)
def test_pefts_folder_is_read(tmp_path, base, change, strange, message):
    a, b, head = numbers(2, 16), numbers(48, 2, seed=1), numbers(10, 16, seed=2)
    tensors = {"blocks.1.attn.qkv.lora_A": a, "blocks.1.attn.qkv.lora_B": b, "head": head}
    tensors = {f"base_model.model.{name}.weight": array for name, array in tensors.items()}
    tensors |= {"base_model.model.head.bias": numbers(10)} | strange
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 8} | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    model, before = create_model("vit_digits", **SHAPE), load_file(base)
    if message:
        with pytest.raises(InputError, match=message):
            load_weights(model, base, adapter=tmp_path)
        return
    report = load_weights(model, base, adapter=tmp_path)
    assert f"merged with {tmp_path / 'adapter_model.safetensors'}" in str(report)
    found = file_arrays(model)
    wanted = before["blocks.1.attn.qkv.weight"] + 4 * b @ a
    np.testing.assert_allclose(found["blocks.1.attn.qkv.weight"], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["head.weight"], head)
    np.testing.assert_array_equal(found["blocks.0.attn.qkv.weight"], before["blocks.0.attn.qkv.weight"])


def test_an_adapter_in_a_file_belongs_to_the_weights_beside_it(tmp_path):
    file = tmp_path / "config.yaml"
    keys = ["MODEL.PRETRAINED", "base", "MODEL.PRETRAINED_ADAPTER", "own"]
    file.write_text(resolved_yaml(get_config("vit_digits", keys)))

    def adapter(*words):
        return config_from_arguments("main_single_gpu.py", [f"-cfg={file}", *words]).MODEL.PRETRAINED_ADAPTER

    assert adapter() == "own"
    assert adapter("-eval", "-pretrained=best") is None  # a run's own file has it merged
    assert adapter("-eval", "-pretrained=best", "-o", "MODEL.PRETRAINED_ADAPTER", "other") == "other"
    file.write_text("BASE: vit_digits\nMODEL: {PRETRAINED_ADAPTER: own}\n")
    assert adapter("-eval", "-pretrained=base") == "own"
