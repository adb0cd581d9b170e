"""CvT: its class token, folding and errors. golden/paddlevit_models.py has its values."""

import numpy as np
import paddle
import pytest
from golden.paddlevit_models import array
from support.small_models import small_cvt

from config import get_config
from errors import InputError
from inference.visualization.attention import attention
from inference.visualization.cam import cam
from models import build_model
from models.layers.conv import Conv2D


def randomized(model):
    for name, tensor in model.state_dict().items():
        tensor.set_value(array(name.replace("._variance", ".running_var"), tuple(tensor.shape)))
    model.eval()
    return model


def test_the_classifier_reads_the_class_token():
    model = randomized(small_cvt())
    images = paddle.to_tensor(array("images", (2, 3, 48, 60)))
    features = model.forward_features(images)
    assert features.shape == [2, 1, 24]
    np.testing.assert_allclose(
        model(images).numpy(), model.head(features[:, 0]).numpy(), rtol=0, atol=1e-6
    )
    maps = model.forward_intermediates(images, intermediates_only=True)
    assert [one.shape for one in maps] == [[2, 8, 12, 15], [2, 16, 6, 8], [2, 24, 3, 4]]


def test_without_a_class_token_it_reads_the_mean_of_the_places():
    model = randomized(small_cvt(class_token=False))
    images = paddle.to_tensor(array("images", (2, 3, 48, 60)))
    features = model.forward_features(images)
    assert features.shape == [2, 3, 4, 24]
    expected = model.head(features.mean(axis=[1, 2]))
    np.testing.assert_allclose(model(images).numpy(), expected.numpy(), rtol=0, atol=1e-6)
    assert model.no_weight_decay() == set()
    assert small_cvt().no_weight_decay() == {"stage2.cls_token"}


def test_attention_and_evidence_are_drawn():
    model = randomized(small_cvt())
    image = paddle.to_tensor(array("images", (1, 3, 48, 60)))
    assert [attention(model, image, block).shape for block in range(4)] == [
        (1, 12, 15),
        (2, 6, 8),
        (3, 3, 4),
        (3, 3, 4),
    ]
    drawn = attention(model, image, 0)
    # Each key is drawn at up to four places, and there are 6 x 8 of them.
    assert drawn[0, ::2, ::2].sum() == pytest.approx(1.0, abs=1e-5)
    # A part of the class token's attention is to itself.
    assert 0 < attention(model, image, -1)[0, ::2, ::2].sum() < 1
    assert cam(model, image).shape == (3, 4)


@pytest.mark.smoke
def test_batch_norms_fold_into_the_convolutions():
    model = randomized(small_cvt())
    images = paddle.to_tensor(array("images", (2, 3, 48, 48)))
    folded = model.inference_model()
    attn = folded.stage1.blocks[0].attn
    assert isinstance(attn.conv_proj_k, Conv2D)
    assert attn.conv_proj_k._stride == [2, 2]
    expected = model(images).numpy()
    np.testing.assert_allclose(
        folded(images).numpy(), expected, rtol=0, atol=1e-5 * np.ptp(expected)
    )


def test_scores_are_divided_by_the_root_of_all_channels():
    assert small_cvt().stage2.blocks[0].attn.scale == 24**-0.5


def test_initialisation_is_the_authors():
    paddle.seed(0)
    model = small_cvt(embed_dims=(64, 64, 96))
    assert float(model.stage2.blocks[0].mlp.fc1.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(model.head.weight.std()) == pytest.approx(0.02, rel=0.1)
    # PyTorch's own of a Linear's bias and of convolutions.
    assert 0 < np.abs(model.head.bias.numpy()).max() <= 96**-0.5
    weight = model.stage1.patch_embed.proj.weight.numpy()
    assert np.abs(weight).max() == pytest.approx((9 * 64) ** -0.5, rel=0.01)
    assert (model.stage1.blocks[0].attn.proj_q.bias.numpy() == 0).all()


def test_layer_groups_are_in_order_and_drop_path_is_the_last_stages():
    model = small_cvt(droppath=0.3, stage_depths=(1, 2, 3))
    assert model.layer_groups() == [
        ("stage0.patch_embed",),
        ("stage0.blocks.0",),
        ("stage1.blocks.0", "stage1.patch_embed"),
        ("stage1.blocks.1",),
        ("stage2.blocks.0", "stage2.patch_embed", "stage2.cls_token"),
        ("stage2.blocks.1",),
        ("stage2.blocks.2",),
        ("norm", "head"),
    ]
    rates = [block.drop_path1.drop_prob for stage in model._stages() for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.15, 0.3])


def test_images_of_any_size_are_taken():
    model = small_cvt(image_size=3)
    model.eval()
    for side in (3, 5, 33, 65):
        logits = model(paddle.ones([1, 3, side, side + 1]))
        assert np.isfinite(logits.numpy()).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.EMBED_DIMS", "[8, 8]"], r"EMBED_DIMS is \[8, 8\], expected 3 numbers: one per"),
        (
            ["MODEL.NUM_HEADS", "[1, 3, 7]"],
            "NUM_HEADS has 7, expected a divisor of the 384 channels",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("cvt-13-224x224", options))
