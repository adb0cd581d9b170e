"""Layers and tokens that learn beside frozen ones: they compute their papers' formulas, merged or
not.
"""

import numpy as np
import paddle
import pytest

import ops
from config import get_config
from errors import InputError
from models import create_model
from models.layers import LayerNorm, Linear
from models.layers.lora import LoRALinear, adapt
from models.layers.mlp import Mlp
from training.optim import freeze
from weights import file_arrays

LORA = ["TRAIN.ADAPTER.NAME", "lora", "TRAIN.ADAPTER.RANK", "2", "TRAIN.ADAPTER.ALPHA", "3.0"]
BASED = ["MODEL.PRETRAINED", "base"]
SIZES = {"num_classes": 5, "image_size": 32, "droppath": 0.0}
SMALL = {
    "vit_tiny_patch16_224": {"depth": 2, "embed_dim": 24},
    "swin_tiny_patch4_window7_224": {
        "embed_dim": 12,
        "stage_depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 4,
    },
    "swinv2_tiny_window8_256": {
        "embed_dim": 12,
        "stage_depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 4,
    },
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
    layer = Linear(5, 7)
    x = numbers(4, 3, 5)
    out = numbers(4, 3, 7, seed=1)
    plain = layer(paddle.to_tensor(x)).numpy()
    adapt(layer, rank=2, alpha=3.0, dropout=0.0)
    assert sorted(name for name, _ in layer.named_parameters()) == [
        "bias",
        "lora_A.weight",
        "lora_B.weight",
        "weight",
    ]
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), plain, atol=1e-6)  # B is 0
    assert np.abs(layer.lora_A.weight.numpy()).max() <= 5**-0.5
    fill(layer, "lora_B")
    layer._parameters["weight"].stop_gradient = True
    w, a, b = (
        p.numpy() for p in (layer._parameters["weight"], layer.lora_A.weight, layer.lora_B.weight)
    )
    flat = x.reshape(-1, 5)
    grad = out.reshape(-1, 7)
    for read in (layer, lambda x: paddle.matmul(x, layer.weight) + layer.bias):
        layer.clear_gradients()
        found = read(inputs := paddle.to_tensor(x, stop_gradient=False))
        np.testing.assert_allclose(
            found.numpy(), x @ (w + 1.5 * a @ b) + layer.bias.numpy(), rtol=1e-5, atol=1e-5
        )
        (found * paddle.to_tensor(out)).sum().backward()
        np.testing.assert_allclose(
            layer.lora_A.weight.grad.numpy(), 1.5 * flat.T @ grad @ b.T, rtol=1e-4, atol=1e-4
        )
        np.testing.assert_allclose(
            layer.lora_B.weight.grad.numpy(), 1.5 * (flat @ a).T @ grad, rtol=1e-4, atol=1e-4
        )
        np.testing.assert_allclose(layer.bias.grad.numpy(), grad.sum(0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            inputs.grad.numpy(), out @ (w + 1.5 * a @ b).T, rtol=1e-4, atol=1e-4
        )
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
        np.testing.assert_allclose(
            logits.numpy(), wanted, rtol=1e-4, atol=2e-5, err_msg=f"training {training}"
        )


def test_recomputation_and_a_graph_compute_the_same():
    keys = SMALL["vit_tiny_patch16_224"] | SIZES | {"prompt_tokens": 2, "prompt_deep": True}
    images = paddle.to_tensor(numbers(2, 3, 32, 32))
    found = []
    for recompute, traced in ((False, False), (True, False), (False, True)):
        paddle.seed(0)
        model = create_model("vit_tiny_patch16_224", recompute=recompute, **keys)
        freeze(get_config(None, [*BASED, *LORA]), model)
        fill(model)
        if traced:
            paddle.jit.to_static(model, full_graph=True)
        logits = model(images)
        logits.square().sum().backward()
        found.append(
            {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
            | {"": logits.numpy()}
        )
    for name, one in found[0].items():
        for other in found[1:]:
            np.testing.assert_allclose(
                other[name], one, rtol=1e-3, atol=1e-3 * np.abs(one).max(), err_msg=name
            )


def test_dropout_is_of_what_the_first_matrix_reads():
    model = adapted(
        "vit_tiny_patch16_224", "TRAIN.ADAPTER.DROPOUT", "0.5", "TRAIN.ADAPTER.TARGETS", "['*.fc1']"
    )
    assert not model.blocks[0].mlp.fused  # the fused operator would pass it by
    fill(model)
    layer = model.blocks[0].mlp.fc1
    x = paddle.to_tensor(numbers(3, 24))
    paddle.seed(5)
    kept = paddle.nn.functional.dropout(x, 0.5).numpy()
    paddle.seed(5)
    a, b = layer.lora_A.weight.numpy(), layer.lora_B.weight.numpy()
    plain = x.numpy() @ layer._parameters["weight"].numpy() + layer.bias.numpy()
    np.testing.assert_allclose(layer(x).numpy(), plain + 1.5 * kept @ a @ b, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        InputError, match="DROPOUT: this model reads the weights of a target directly; set it to 0"
    ):
        assert layer.weight is None


@pytest.mark.parametrize(
    "name", ["beit_base_patch16_224", "eva02_tiny_patch14_224", "swinv2_tiny_window8_256"]
)
def test_dropout_reaches_layers_whose_bias_is_given_beside(name):
    fused = {"qkv_fused": True} if name.startswith("eva") else {}
    model = create_model(name, **SMALL[name], **SIZES, **fused)
    words = ["TRAIN.ADAPTER.DROPOUT", "0.5", "TRAIN.ADAPTER.TARGETS", "['*.qkv']"]
    freeze(get_config(None, [*BASED, *LORA, *words]), model)
    fill(model)
    images = paddle.to_tensor(numbers(2, 3, 32, 32))
    found = [model(images).numpy() for _ in range(2)]
    assert np.abs(found[0] - found[1]).max() > 1e-3 * np.abs(found[0]).max()


@pytest.mark.smoke
@pytest.mark.parametrize("compiled", [True, False])
def test_a_gradient_passes_frozen_layers_as_it_passes_others(compiled):
    """Paddle 2.6's and 3.3's layer norm leaves its weight out of the gradient of x where that is
    frozen.
    """
    ops.enable(compiled)
    try:
        for layer in (LayerNorm(6), Linear(6, 5), Mlp(6, 9)):
            fill(layer)
            found = []
            for frozen in (False, True):
                for parameter in layer.parameters():
                    parameter.stop_gradient = frozen
                x = paddle.to_tensor(numbers(3, 4, 6), stop_gradient=False)
                layer(x).square().sum().backward()
                found.append(x.grad.numpy())
            np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)
    finally:
        ops.enable(True)


# -------------------------------------------------------------- prompt tokens


def test_shallow_prompts_are_registers_without_a_position():
    keys = SMALL["vit_tiny_patch16_224"] | SIZES
    one = create_model("vit_tiny_patch16_224", prompt_tokens=3, **keys)
    two = create_model("vit_tiny_patch16_224", reg_tokens=3, **keys)
    state = one.state_dict()
    state["reg_token"] = state.pop("prompt_tokens")
    place = state["pos_embed"]
    state["pos_embed"] = paddle.concat(
        [place[:, :1], paddle.zeros([1, 3, 24]), place[:, 1:]], axis=1
    )
    two.set_state_dict(state)
    images = paddle.to_tensor(numbers(2, 3, 32, 32))
    np.testing.assert_allclose(one(images).numpy(), two(images).numpy(), rtol=1e-5, atol=1e-6)
    bound = (6 / (3 * 16 * 16 + 24)) ** 0.5
    assert 0.9 * bound < one.prompt_tokens.abs().max().item() <= bound


def test_deep_prompts_take_the_last_ones_place():
    model = create_model(
        "vit_tiny_patch16_224",
        prompt_tokens=2,
        prompt_deep=True,
        **SMALL["vit_tiny_patch16_224"],
        **SIZES,
    )
    assert model.prompt_tokens.shape == [2, 2, 24]
    images = paddle.to_tensor(numbers(2, 3, 32, 32))
    x = model.patch_embed(images)
    x = paddle.concat([model.cls_token.expand([2, -1, -1]), x], axis=1) + model.pos_embed
    cls = x[:, :1]
    patches = x[:, 1:]
    for block, own in zip(model.blocks, model.prompt_tokens, strict=True):
        x = block(paddle.concat([cls, own.unsqueeze(0).expand([2, -1, -1]), patches], axis=1))
        cls = x[:, :1]
        patches = x[:, 3:]
    np.testing.assert_allclose(
        model(images).numpy(), model.head(model.norm(x)[:, 0]).numpy(), rtol=1e-5, atol=1e-6
    )
    features, [last] = model.forward_intermediates(images, 1)
    assert (features.shape, last.shape) == ([2, 7, 24], [2, 24, 2, 2])
