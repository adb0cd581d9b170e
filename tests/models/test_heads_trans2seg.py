"""Trans2Seg's head against PaddleViT's logits, and its place in a network."""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values
from golden.make_paddlevit_heads import array, trans2seg_maps

from config import get_config
from errors import InputError
from models import build_model
from models.heads.base import Maps
from models.heads.trans2seg import Trans2SegHead
from models.resnet import ResNet
from weights.names import segmentation, timm_names

GOLDEN_FOLDER = ROOT / "tests" / "golden"
GOLDEN = json.loads((GOLDEN_FOLDER / "paddlevit_trans2seg.json").read_text())
SMALL = {
    "transformer_channels": 16,
    "transformer_depth": 3,
    "transformer_heads": 4,
    "class_channels": 8,
}


def small():
    """A head with the sizes of the golden file."""
    return Trans2SegHead(Maps([12, 24], [4, 16], (72, 72)), 5, **SMALL)


def load(head):
    """Sets the golden weights, which PaddleViT's names have, and returns the names in the head."""
    state = head.state_dict()
    wanted = {f"decode_head.{name}" for name in state}
    arrays = {name: array(name, shape) for name, shape in GOLDEN["shapes"].items()}
    named = timm_names(segmentation, arrays, "paddle", wanted)
    found = {
        name.removeprefix("decode_head.")
        .replace("running_mean", "_mean")
        .replace("running_var", "_variance"): value
        for name, value in named.items()
    }
    assert found.keys() == state.keys()
    for name, value in found.items():
        state[name].set_value(value)
    head.eval()
    return head


@pytest.mark.smoke
def test_logits_are_paddlevits():
    head = load(small())
    images = paddle.to_tensor(values("images", (2, 3, *GOLDEN["size"])))
    expected = np.load(GOLDEN_FOLDER / "paddlevit_trans2seg.npz")["logits"]
    # The images have an effect.
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-3 * np.ptp(expected)
    found = head(trans2seg_maps(images)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_all_parameters_learn():
    head = load(small())
    head.train()
    maps = [paddle.to_tensor(values(name, (2, *shape))) for name, shape in
            (("fine", (12, 18, 18)), ("coarse", (24, 5, 5)))]  # fmt: skip
    logits = head(maps)
    assert logits.shape == [2, 5, 18, 18]
    (logits * paddle.to_tensor(values("loss", (2, 5, 18, 18)))).sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert np.abs(parameter.grad.numpy()).max() > 0, name


def test_images_of_another_size_are_refused():
    maps = [paddle.zeros([1, 12, 16, 18]), paddle.zeros([1, 24, 4, 5])]
    with pytest.raises(
        InputError, match="got maps of 4 x 5, expected 5 x 5, of images of 72.*STRIDE"
    ):
        small()(maps)


@pytest.mark.parametrize(
    ("maps", "options", "message"),
    [
        (Maps([12], [4], (72, 72)), {}, "got 1 maps, expected two"),
        (Maps([12, 24], [4, 16], (72, 72)), {"transformer_heads": 3}, "256, not a multiple of"),
    ],
)
def test_what_does_not_fit_is_named(maps, options, message):
    with pytest.raises(InputError, match=message):
        Trans2SegHead(maps, 5, **options)


def test_the_shipped_model_reads_a_dilated_resnet():
    with paddle.LazyGuard():
        model = build_model(get_config("trans2seg_resnet50c_trans10k"))
    assert isinstance(model.encoder, ResNet)
    assert model.indices == [1, 4]
    assert model.encoder.feature_info[-1]["reduction"] == 16
    assert model.decode_head.pos_embed.shape == [1, 1 + 32 * 32, 256]
    assert model.classifier_names() == ("decode_head.cls_embed",)
    assert "decode_head.cls_embed" in model.no_weight_decay()
