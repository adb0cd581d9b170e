"""VOLO against timm's outputs and numbers."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.volo import BOX, CASES, array
from paddle.nn import functional as F
from support.parity import assert_parity, load_formula
from support.small_models import small_volo

from config import get_config
from errors import InputError
from inference.visualization.attention import attention, has_rollout
from inference.visualization.cam import cam
from inference.visualization.positions import similarities
from models import build_model
from models.volo import VOLO, neighbours, sum_windows
from training.classification import Classification
from weights import load_weights, save_weights
from weights.layout import linear_weights
from weights.resize import bicubic_matrix


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_volo(name), name, tmp_path, array)


def close(found, expected):
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0)


@pytest.mark.smoke
def test_dense_training_gives_what_timms_forward_train_does(tmp_path, monkeypatch):
    golden = np.load(ROOT / "tests" / "golden" / "volo.npz")
    model = small_volo()
    images = paddle.to_tensor(array("images", (2, 3, *model.image_size)))
    model.dense_training = True
    box = np.zeros((1, 5, 4), "float32")
    box[:, BOX[0] : BOX[2], BOX[1] : BOX[3]] = 1
    monkeypatch.setattr(VOLO, "_random_rectangle", lambda self: paddle.to_tensor(box))
    for end, mixed in (("train", 0.0), ("mixed", 9 / 20)):
        load_formula(model, tmp_path, array).train()
        model.mix_token = end == "mixed"
        logits, dense, share = model(images)
        close(logits, golden[f"logits_{end}"])
        close(dense, golden[f"dense_{end}"])
        assert (share.shape, float(share)) == ([], pytest.approx(mixed))
    weighted = ((logits, "logits_mixed"), (dense, "dense_mixed"))
    sum(
        (out * paddle.to_tensor(array(key, tuple(out.shape)))).sum() for out, key in weighted
    ).backward()
    transposed = linear_weights(model)
    keys = [key for key in golden if key.startswith("mixed_grad/")]
    assert len(keys) > 8
    for key in keys:
        name = key.partition("/")[2]
        gradient = dict(model.named_parameters())[name].grad
        close(gradient.t() if name in transposed else gradient, golden[key])
    for key in (key for key in golden if key.startswith("state/")):  # of a training step
        name = (
            key.partition("/")[2]
            .replace("running_mean", "_mean")
            .replace("running_var", "_variance")
        )
        close(model.state_dict()[name], golden[key])
    model.eval()
    assert model(images).shape == [2, 5]


def test_a_rectangle_has_the_share_that_is_drawn():
    """Its sides are floor(r n), r = sqrt of a uniform share, around a uniform middle, cut at the
    border.
    """
    paddle.seed(0)
    model = small_volo(image_size=(80, 64))
    found = np.stack([model._random_rectangle().numpy()[0] for _ in range(400)])
    assert set(np.unique(found)) == {0, 1}
    for one in found:
        rows, columns = one.any(1), one.any(0)
        assert one.sum() == rows.sum() * columns.sum()
        for line in (rows, columns):  # one piece each
            assert np.abs(np.diff(np.pad(line.astype(int), 1))).sum() in (0, 2)
    rng = np.random.default_rng(0)
    expected = []
    for _ in range(20_000):
        side = np.sqrt(rng.random())
        sides = []
        for count in (10, 8):
            cut = int(side * count)
            middle = rng.integers(count)
            sides.append(min(count, middle + (cut + 1) // 2) - max(0, middle - cut // 2))
        expected.append(sides[0] * sides[1] / 80)
    assert found.mean() == pytest.approx(np.mean(expected), abs=0.03)


def test_windows_are_unfolds_and_folds():
    x = paddle.randn([2, 6, 4, 3])
    windows = neighbours(neighbours(x, 1), 3)  # [2, 3, 3, 2, 3, 3]
    # D, 3, 3, h, w
    unfolded = F.unfold(x.transpose([0, 3, 1, 2]), 3, 2, 1).reshape([2, 3, 3, 3, 3, 2])
    np.testing.assert_array_equal(windows.numpy(), unfolded.transpose([0, 4, 2, 5, 3, 1]).numpy())
    folded = F.fold(unfolded.reshape([2, 27, 6]), [6, 4], 3, 2, 1).transpose([0, 2, 3, 1])
    np.testing.assert_allclose(
        sum_windows(sum_windows(windows, 3), 1).numpy(), folded.numpy(), rtol=1e-6
    )


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_volo(embed_dims=(32, 64, 64, 64), stem_hidden_dim=32, num_classes=200)
    outlook = model.network[0][0]
    block = model.network[2][0]
    last = model.post_network[1]
    for layer in (
        outlook.attn.attn,
        outlook.attn.v,
        block.attn.qkv,
        block.mlp.fc1,
        last.attn.kv,
        model.aux_head,
    ):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert layer.bias is None or not layer.bias.numpy().any()
    # PyTorch's own
    for layer, fan_in in ((model.patch_embed.conv[3], 9 * 32), (model.network[1].proj, 4 * 32)):
        assert float(layer.weight.abs().max()) == pytest.approx(fan_in**-0.5, rel=0.01)
        assert float(layer.weight.std()) == pytest.approx((3 * fan_in) ** -0.5, rel=0.05)
    for token in (model.pos_embed, model.cls_token):
        assert float(token.std()) == pytest.approx(0.02, rel=0.2)
    assert {
        layer._epsilon for layer in model.sublayers() if isinstance(layer, paddle.nn.LayerNorm)
    } == {1e-5}


def test_drop_path_rises_after_the_first_stage():
    model = small_volo("volo_biased", droppath=0.5, dropout=0.1, attention_dropout=0.2)
    rates = [(block.drop_path1.drop_prob, block.drop_path2.drop_prob) for block in model.blocks]
    assert rates == [(pytest.approx(rate),) * 2 for rate in (0, 0, 0.2, 0.3, 0.4, 0.5, 0, 0)]
    assert model.pos_drop.p == 0.1
    assert [getattr(b.attn, "attn_drop", None) is not None for b in model.blocks] == [False] * 2 + [
        True
    ] * 6
    assert model.network[0][0].attn.drop.p == model.post_network[0].attn.attn_drop.p == 0.2
    assert {block.mlp.drop.p for block in model.blocks} == {0.0}


def test_layer_groups_are_in_order_and_hold_every_parameter_once():
    model = small_volo("volo_biased")
    groups = model.layer_groups()
    assert groups == [
        ("patch_embed",),
        ("network.0.0",),
        ("network.0.1",),
        ("network.2.0", "network.1", "pos_embed"),
        ("network.3.0",),
        ("network.4.0",),
        ("network.4.1",),
        ("post_network.0", "cls_token"),
        ("post_network.1",),
        ("norm", "head", "aux_head"),
    ]
    for name, _ in model.named_parameters():
        assert (
            sum(f"{name}.".startswith(f"{prefix}.") for group in groups for prefix in group) == 1
        ), name
    assert model.no_weight_decay() == {"pos_embed", "cls_token"}


def test_the_logits_are_the_class_tokens_and_half_the_largest_of_the_patches():
    model = small_volo()
    model.eval()
    features = model.forward_features(paddle.to_tensor(array("images", (2, 3, *model.image_size))))
    assert features.shape == [2, 21, 8]
    dense = features[:, 1:] @ model.aux_head.weight + model.aux_head.bias
    expected = features[:, 0] @ model.head.weight + model.head.bias + dense.max(axis=1) / 2
    np.testing.assert_allclose(model.forward_head(features).numpy(), expected.numpy(), atol=1e-6)
    model.reset_classifier(0)
    np.testing.assert_array_equal(model.forward_head(features).numpy(), features[:, 0].numpy())


def test_positions_fit_another_image(tmp_path):
    model = small_volo()
    larger = small_volo(image_size=(32, 32))
    save_weights(model, tmp_path / "model.safetensors")
    assert load_weights(larger, tmp_path).resized == ["pos_embed resized from 5 x 4 to 4 x 4"]
    expected = np.einsum("nr,rcd->ncd", bicubic_matrix(5, 4), model.pos_embed[0].numpy())
    np.testing.assert_allclose(larger.pos_embed[0].numpy(), expected, atol=1e-6)


def test_what_it_looks_at_has_the_grid_of_its_patches():
    model = small_volo()
    model.eval()
    image = paddle.to_tensor(array("images", (1, 3, *model.image_size)))
    assert [attention(model, image, block).shape for block in (0, -1)] == [(2, 5, 4), (4, 5, 4)]
    assert attention(model, image, 0).sum(axis=(1, 2)) == pytest.approx(1, rel=1e-5)
    # the class token keeps the rest
    assert (attention(model, image, -1).sum(axis=(1, 2)) < 1).all()
    assert cam(model, image, None).shape == (5, 4)
    assert not has_rollout(model)
    assert similarities(model).shape == (5, 4, 5, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[2, 4]"], r"STAGE_DEPTHS is \[2, 4\], expected four numbers"),
        (
            ["MODEL.NUM_HEADS", "[2, 4]"],
            r"NUM_HEADS is \[2, 4\], expected 4 numbers: one per stage",
        ),
        (
            ["MODEL.NUM_HEADS", "[5, 12, 12, 12]"],
            "NUM_HEADS has 5, expected a divisor of the 192 channels",
        ),
        (
            ["MODEL.EMBED_DIMS", "[6, 12, 24, 24]"],
            r"EMBED_DIMS is \[6, 12, 24, 24\], expected three equal values at the end",
        ),
        (["MODEL.PATCH_SIZE", "7"], "PATCH_SIZE is 7, expected 4, 8 or 16"),
        (
            ["DATA.IMAGE_SIZE", "200"],
            "IMAGE_SIZE 200 is not a multiple of 16, two patches; choose one that is: 192 or 208",
        ),
        (["MODEL.EMBED_DIM", "64"], "MODEL.EMBED_DIM is 64, but VOLO takes no EMBED_DIM"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("volo_d1_224", options))


def test_token_labels_train_the_classifier_of_patches_and_no_other_model_takes_them(tiny):
    model = small_volo()
    rng = np.random.default_rng(0)
    options = [
        "MODEL.TYPE",
        "volo",
        "MODEL.NUM_CLASSES",
        str(model.num_classes),
        "TRAIN.LOSS",
        "token_label",
    ]
    config = get_config(None, options)
    task = Classification(config)
    train = SimpleNamespace(labels=np.zeros(1, np.int64))
    with pytest.raises(
        InputError,
        match="TRAIN.LOSS is token_label, but VisionTransformer doesn't classify patches",
    ):
        task.prepare(build_model(get_config(None, tiny)), train, None)
    task.prepare(model, train, None)
    pixels = paddle.to_tensor(rng.integers(0, 256, (2, *model.image_size, 3), np.uint8))
    task.step(model.train(), {"pixels": pixels, "labels": paddle.to_tensor([0, 1])}, 0)[
        "loss"
    ].sum().backward()
    assert model.mix_token
    assert model.aux_head.weight.grad.abs().sum() > 0.1
