"""CoaT against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.coat import CASES, array
from support.parity import assert_parity
from support.small_models import small_coat

from config import get_config
from errors import InputError
from inference.visualization.cam import cam
from models import build_model
from models.coat import CoaT
from models.layers.resize import resize_evenly


class Joined(CoaT):
    """The features of the last three scales are one tensor, as golden/coat.py records them."""

    def forward_features(self, x):
        return paddle.concat(CoaT.forward_features(self, x), 1)

    def forward_head(self, x):
        scales = [
            rows * columns // 4**i + 1 for i in (1, 2, 3) for rows, columns in [self.cpe1.grid]
        ]
        return CoaT.forward_head(self, x.split(scales, 1))

    def _collect(self, *given):
        features, found = CoaT._collect(self, *given)
        return (paddle.concat(features, 1) if isinstance(features, list) else features), found


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    model = small_coat(name)
    if model.parallel_blocks:
        model.__class__ = Joined
    assert_parity(model, name, tmp_path, array)


def test_training_computes_what_evaluation_does_where_nothing_is_dropped():
    model = small_coat("coat_parallel")
    images = paddle.to_tensor(array("images", (2, 3, 64, 96)))
    logits = model(images).numpy()
    model.eval()
    np.testing.assert_array_equal(model(images).numpy(), logits)


@pytest.mark.parametrize(
    ("old", "new"), [((3, 2), (6, 4)), ((2, 1), (8, 4)), ((8, 12), (2, 3)), ((4, 2), (2, 2))]
)
def test_maps_are_resized_as_by_bilinear_interpolation(old, new):
    x = paddle.to_tensor(array("map", (2, 3, *old)))
    expected = paddle.nn.functional.interpolate(x, new, mode="bilinear").numpy()
    np.testing.assert_allclose(resize_evenly(x, old, new).numpy(), expected, atol=1e-6)


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_coat("coat_parallel", embed_dims=(64, 128, 128, 128), num_classes=200)
    block = model.serial_blocks2[0]
    for layer in (
        block.factoratt_crpe.qkv,
        block.mlp.fc1,
        model.parallel_blocks[0].mlp2.fc2,
        model.head,
    ):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.numpy().any()
    for layer, fan_in in (
        (model.patch_embed1.proj, 48), (model.patch_embed2.proj, 256), (model.cpe2.proj, 9),
        (model.crpe2.conv_list[2], 49),
    ):  # fmt: skip
        bound = fan_in**-0.5
        assert 0.95 * bound < float(layer.weight.abs().max()) <= bound
        assert 0.5 * bound < float(layer.bias.abs().max()) <= bound
    assert float(model.cls_token3.std()) == pytest.approx(0.02, rel=0.25)
    assert model.cls_token is model.cls_token4
    assert 0 < float(model.aggregate.weight.abs().max()) <= 3**-0.5
    epsilons = [model.patch_embed1.norm, block.norm1, model.parallel_blocks[1].norm23, model.norm4]
    assert [norm._epsilon for norm in epsilons] == [1e-5, 1e-6, 1e-6, 1e-6]


def test_every_block_has_one_rate_of_drop_path_and_dropout():
    model = small_coat("coat_parallel", droppath=0.4, dropout=0.1)
    calls = []
    for name, layer in model.named_sublayers():
        if name.endswith(("drop_path", "drop")):
            layer.register_forward_post_hook(
                lambda layer, *_: calls.append(getattr(layer, "drop_prob", layer.p))
            )
        if name.endswith("drop_path"):
            layer.p = None
    model(paddle.zeros([1, 3, 64, 96]))
    serial = [0.1, 0.4, 0.1, 0.1, 0.4]
    parallel = [0.1] * 3 + [0.4, 0.1, 0.1, 0.4] * 3
    assert calls == 5 * serial + 2 * parallel


def test_shared_layers_are_the_models_own_and_get_the_gradients_of_all_blocks():
    model = small_coat("coat_parallel")
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names)) == len(model.state_dict())
    assert not any(".cpe." in name or ".crpe." in name or ".mlp3." in name for name in names)
    assert (
        model.parallel_blocks[1].encodings[2][1]
        is model.serial_blocks4[0].encodings[1]
        is model.crpe4
    )


def test_recompute_gives_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        paddle.seed(0)
        model = small_coat("coat_parallel", recompute=recompute, droppath=0.3, dropout=0.2)
        paddle.seed(1)
        model(paddle.to_tensor(array("images", (2, 3, 64, 96)))).square().sum().backward()
        gradients.append(
            {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
        )
    assert all((gradients[1][name] == gradient).all() for name, gradient in gradients[0].items())


def test_layer_groups_are_in_order_and_hold_every_parameter_once():
    model = small_coat("coat_parallel")
    groups = model.layer_groups()
    assert groups == [
        ("cls_token1", "patch_embed1", "cpe1", "crpe1"),
        ("serial_blocks1.0",),
        ("serial_blocks1.1",),
        *(
            (f"cls_token{i}", f"patch_embed{i}", f"cpe{i}", f"crpe{i}", f"serial_blocks{i}.0")
            for i in (2, 3, 4)
        ),
        ("parallel_blocks.0",),
        ("parallel_blocks.1",),
        ("norm2", "norm3", "norm4", "aggregate", "head"),
    ]
    for name, _ in model.named_parameters():
        assert (
            sum(f"{name}.".startswith(f"{prefix}.") for group in groups for prefix in group) == 1
        ), name
    assert small_coat().layer_groups()[-1] == ("norm4", "head")
    assert model.no_weight_decay() == {"cls_token1", "cls_token2", "cls_token3", "cls_token4"}


def test_the_classifier_is_exchangeable():
    model = small_coat("coat_parallel")
    images = paddle.to_tensor(array("images", (2, 3, 64, 96)))
    tokens = paddle.stack([one[:, 0] for one in model.forward_features(images)], 1)
    model.reset_classifier(7)
    assert (model.classifier_names(), model.head.weight.shape) == (("head",), [8, 7])
    assert model(images).shape == [2, 7]
    model.reset_classifier(0)
    expected = (tokens * model.aggregate.weight).sum(1) + model.aggregate.bias
    np.testing.assert_allclose(model(images).numpy(), expected.numpy(), atol=1e-6)
    assert float(
        small_coat(num_classes=500, head_init_scale=0.1).head.weight.std()
    ) == pytest.approx(0.002, rel=0.05)


def test_the_parallel_blocks_have_intermediates_and_maps_of_a_class():
    model = small_coat("coat_parallel")
    model.eval()
    image = paddle.to_tensor(array("images", (1, 3, 64, 96)))
    features, found = model.forward_intermediates(image, [0, 3], return_prefix_tokens=True)
    assert [one.shape for one in features] == [[1, 97, 8], [1, 25, 8], [1, 7, 8]]
    assert [(one.shape, token.shape) for one, token in found] == [
        ([1, 8, 16, 24], [1, 1, 8]),
        ([1, 8, 2, 3], [1, 1, 8]),
    ]
    features, _ = model.forward_intermediates(image, [0], stop_early=True)
    assert features.shape == [1, 385, 8]
    assert cam(model, image).shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[2, 2]"], r"STAGE_DEPTHS is \[2, 2\], expected four numbers"),
        (["MODEL.MLP_RATIO", "[8, 4]"], r"MLP_RATIO is \[8.0, 4.0\], expected four numbers"),
        (
            ["DATA.IMAGE_SIZE", "240"],
            "IMAGE_SIZE 240 is not a multiple of 32; choose one that is: 224 or 256",
        ),
        (
            ["MODEL.NUM_HEADS", "7"],
            r"EMBED_DIMS is \[152, 216, 216, 216\], expected multiples of NUM_HEADS 7",
        ),
        (
            ["MODEL.NUM_HEADS", "4"],
            r"CRPE_WINDOW is .*, expected an odd side for each of 4 heads, with equal ones next to each other",
        ),
        (
            ["MODEL.CRPE_WINDOW", "[3, 3, 5, 5, 5, 7, 7, 3]"],
            "CRPE_WINDOW is .* with equal ones next to each other",
        ),
        (["MODEL.CRPE_WINDOW", "[3, 3, 5, 5, 5, 6, 6, 6]"], "CRPE_WINDOW is .* an odd side"),
        (
            ["MODEL.EMBED_DIMS", "[152, 216, 216, 232]"],
            "with PARALLEL_DEPTH the last three scales need equal values",
        ),
        (
            ["MODEL.ATTENTION_DROPOUT", "0.1"],
            "MODEL.ATTENTION_DROPOUT is 0.1, but CoaT takes no ATTENTION_DROPOUT",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("coat_mini", options))
