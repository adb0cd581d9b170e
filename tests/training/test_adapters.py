"""Adapters: a few parameters train beside a frozen model, and every file that a run leaves is merged."""

import json

import numpy as np
import paddle
import pytest
from conftest import without
from runs import assert_same_run, refused, train, weights
from safetensors.numpy import load_file, save_file

from config import get_config
from errors import InputError
from inference import Predictor
from models import create_model
from models.layers import Linear
from models.layers.lora import LoRALinear, adapt
from training.optim import freeze
from weights import file_arrays, load_weights
from weights.formats import write_weights

LORA = ["TRAIN.ADAPTER.NAME", "lora", "TRAIN.ADAPTER.RANK", "2", "TRAIN.ADAPTER.ALPHA", "3.0"]
BASED = ["MODEL.PRETRAINED", "base"]
SIZES = {"num_classes": 5, "image_size": 32, "droppath": 0.0}
SMALL = {
    "vit_tiny_patch16_224": {"depth": 2, "embed_dim": 24},
    "swin_tiny_patch4_window7_224": {"embed_dim": 12, "stage_depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "swinv2_tiny_window8_256": {"embed_dim": 12, "stage_depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "beit_base_patch16_224": {"embed_dim": 24, "depth": 2, "num_heads": 2},
    "eva02_tiny_patch14_224": {"embed_dim": 24, "depth": 2, "num_heads": 2, "patch_size": 8},
    "convnext_tiny": {"embed_dims": [8, 16, 24, 32], "stage_depths": [1, 1, 1, 1]},
    "mixer_b16_224": {"embed_dim": 24, "depth": 2},
}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def fill(model, names=""):
    """Adds noise to the parameters whose name holds ``names``: some begin as zeros."""
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if names in name:
            parameter.set_value(parameter.numpy() + 0.2 * numbers(*parameter.shape, seed=place))


def set_scale(model, scale):
    for layer in model.sublayers():
        if isinstance(layer, LoRALinear):
            layer.scale = scale


def adapted(name, *options):
    model = create_model(name, **SMALL[name], **SIZES)
    freeze(get_config(None, [*BASED, *LORA, *options]), model)
    return model


# ----------------------------------------------------------------- the layer


@pytest.mark.smoke
def test_the_layer_and_its_gradients_are_the_formulas():
    """In training by the narrow way, and by the sum, which whoever reads ``weight`` takes."""
    layer, x, out = Linear(5, 7), numbers(4, 3, 5), numbers(4, 3, 7, seed=1)
    plain = layer(paddle.to_tensor(x)).numpy()
    adapt(layer, rank=2, alpha=3.0, dropout=0.0)
    assert sorted(name for name, _ in layer.named_parameters()) == ["bias", "lora_A.weight", "lora_B.weight", "weight"]
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), plain, atol=1e-6)  # B is 0
    assert np.abs(layer.lora_A.weight.numpy()).max() <= 5**-0.5
    fill(layer, "lora_B")
    layer._parameters["weight"].stop_gradient = True
    w, a, b = (p.numpy() for p in (layer._parameters["weight"], layer.lora_A.weight, layer.lora_B.weight))
    flat, grad = x.reshape(-1, 5), out.reshape(-1, 7)
    for read in (layer, lambda x: paddle.matmul(x, layer.weight) + layer.bias):
        layer.clear_gradients()
        found = read(inputs := paddle.to_tensor(x, stop_gradient=False))
        np.testing.assert_allclose(found.numpy(), x @ (w + 1.5 * a @ b) + layer.bias.numpy(), rtol=1e-5, atol=1e-5)
        (found * paddle.to_tensor(out)).sum().backward()
        np.testing.assert_allclose(layer.lora_A.weight.grad.numpy(), 1.5 * flat.T @ grad @ b.T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(layer.lora_B.weight.grad.numpy(), 1.5 * (flat @ a).T @ grad, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(layer.bias.grad.numpy(), grad.sum(0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(inputs.grad.numpy(), out @ (w + 1.5 * a @ b).T, rtol=1e-4, atol=1e-4)
        assert layer._parameters["weight"].grad is None


@pytest.mark.parametrize("name", SMALL)
def test_merged_is_unmerged_in_every_kind_of_layer(name):
    """Every Linear is a target: one whose weights somebody reads past the layer would show."""
    model = adapted(name, "TRAIN.ADAPTER.TARGETS", "['*']", "TRAIN.ADAPTER.RANK", "1")
    fill(model)
    images = paddle.to_tensor(numbers(2, 3, 32, 32))
    model.eval()
    set_scale(model, 0.0)
    plain = model(images).numpy()
    set_scale(model, 1.5)
    found = {}
    for training in (True, False):
        model.train() if training else model.eval()
        found[training] = model(images)
    other = create_model(name, **(SMALL[name] | SIZES))
    other.eval()
    arrays = file_arrays(model)
    assert arrays.keys() == file_arrays(other).keys()
    other.set_state_dict({k: v for k, v in model.state_dict().items() if "lora" not in k})
    for layer, own in dict(other.named_sublayers()).items():
        if isinstance(own, Linear):
            own.weight.set_value(np.ascontiguousarray(arrays[f"{layer}.weight"].T))
    wanted = other(images).numpy()
    assert np.abs(wanted - plain).max() > 0.01 * np.abs(plain).max()
    for training, logits in found.items():
        np.testing.assert_allclose(logits.numpy(), wanted, rtol=1e-4, atol=2e-5, err_msg=f"training {training}")


def test_dropout_is_of_what_the_first_matrix_reads():
    model = adapted("vit_tiny_patch16_224", "TRAIN.ADAPTER.DROPOUT", "0.5", "TRAIN.ADAPTER.TARGETS", "['*.fc1']")
    assert not model.blocks[0].mlp.fused  # the fused operator would pass it by
    fill(model)
    layer, x = model.blocks[0].mlp.fc1, paddle.to_tensor(numbers(3, 24))
    paddle.seed(5)
    kept = paddle.nn.functional.dropout(x, 0.5).numpy()
    paddle.seed(5)
    a, b = layer.lora_A.weight.numpy(), layer.lora_B.weight.numpy()
    plain = x.numpy() @ layer._parameters["weight"].numpy() + layer.bias.numpy()
    np.testing.assert_allclose(layer(x).numpy(), plain + 1.5 * kept @ a @ b, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="DROPOUT: this model reads a target's weights themselves; set it to 0"):
        adapted("beit_base_patch16_224", "TRAIN.ADAPTER.DROPOUT", "0.5")(paddle.ones([1, 3, 32, 32]))


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
            "ADAPTER.NAME is lora, but what it leaves frozen is random; give -pretrained=FILE",
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


# -------------------------------------------------------------- prompt tokens


def test_shallow_prompts_are_registers_without_a_position():
    keys = SMALL["vit_tiny_patch16_224"] | SIZES
    one, two = (
        create_model("vit_tiny_patch16_224", prompt_tokens=3, **keys),
        create_model("vit_tiny_patch16_224", reg_tokens=3, **keys),
    )
    state = one.state_dict()
    state["reg_token"] = state.pop("prompt_tokens")
    place = state["pos_embed"]
    state["pos_embed"] = paddle.concat([place[:, :1], paddle.zeros([1, 3, 24]), place[:, 1:]], axis=1)
    two.set_state_dict(state)
    images = paddle.to_tensor(numbers(2, 3, 32, 32))
    np.testing.assert_allclose(one(images).numpy(), two(images).numpy(), rtol=1e-5, atol=1e-6)
    bound = (6 / (3 * 16 * 16 + 24)) ** 0.5
    assert 0.9 * bound < one.prompt_tokens.abs().max().item() <= bound


def test_deep_prompts_take_the_last_ones_place():
    model = create_model(
        "vit_tiny_patch16_224", prompt_tokens=2, prompt_deep=True, **SMALL["vit_tiny_patch16_224"], **SIZES
    )
    assert model.prompt_tokens.shape == [2, 2, 24]
    images = paddle.to_tensor(numbers(2, 3, 32, 32))
    x = model.patch_embed(images)
    x = paddle.concat([model.cls_token.expand([2, -1, -1]), x], axis=1) + model.pos_embed
    cls, patches = x[:, :1], x[:, 1:]
    for block, own in zip(model.blocks, model.prompt_tokens, strict=True):
        x = block(paddle.concat([cls, own.unsqueeze(0).expand([2, -1, -1]), patches], axis=1))
        cls, patches = x[:, :1], x[:, 3:]
    np.testing.assert_allclose(model(images).numpy(), model.head(model.norm(x)[:, 0]).numpy(), rtol=1e-5, atol=1e-6)
    features, [last] = model.forward_intermediates(images, 1)
    assert (features.shape, last.shape) == ([2, 7, 24], [2, 24, 2, 2])


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
    tell = "it is no adapter: its metadata don't tell, and beside it there is no adapter_config.json"
    strange = [*of_model(tiny), "EVAL", "True", "MODEL.PRETRAINED", str(base), "MODEL.PRETRAINED_ADAPTER"]
    refused(tell, [*strange, str(other)], tmp_path / "eval", None)
    file = tmp_path / "run" / "checkpoints" / "last" / "unmerged.safetensors"
    assert {name.partition("/")[0] for name in load_file(file)} == {"val"}


# ------------------------------------------------------------------ peft's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"use_rslora": True}, "its adapter_config.json has use_rslora, which isn't computed here"),
        ({"r": "2"}, "its adapter_config.json's r is '2', expected a rank"),
    ],
)
def test_pefts_folder_is_read(tmp_path, base, change, message):
    a, b, head = numbers(2, 16), numbers(48, 2, seed=1), numbers(10, 16, seed=2)
    tensors = {"blocks.1.attn.qkv.lora_A": a, "blocks.1.attn.qkv.lora_B": b, "head": head}
    tensors = {f"base_model.model.{name}.weight": array for name, array in tensors.items()}
    save_file(tensors | {"base_model.model.head.bias": numbers(10)}, tmp_path / "adapter_model.safetensors")
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
