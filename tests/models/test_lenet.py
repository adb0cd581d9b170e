"""LeNet against paddle.vision's."""

import numpy as np
import paddle
import pytest
from paddle.vision.models import LeNet as PaddleLeNet

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.lenet import LeNet
from weights import load_weights, save_weights


@pytest.mark.smoke
def test_logits_and_gradients_are_paddle_visions(tmp_path):
    paddle.seed(0)
    theirs = PaddleLeNet()
    images = paddle.rand([2, 1, 28, 28])
    save_weights(theirs, tmp_path / "lenet.safetensors")
    ours = create_model("lenet", num_classes=10)
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]
    load_weights(ours, tmp_path / "lenet.safetensors")
    np.testing.assert_allclose(ours(images).numpy(), theirs(images).numpy(), rtol=1e-5, atol=1e-6)
    for model in (ours, theirs):
        model(images).square().sum().backward()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(own.grad.numpy(), other.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_sizes_classes_and_groups():
    model = LeNet(image_size=(12, 20), in_channels=3, num_classes=4)
    images = paddle.rand([2, 3, 12, 20])
    assert model(images).shape == [2, 4]
    assert (
        sum(p.size for p in model.parameters())
        == 3 * 9 * 6 + 6 + 6 * 25 * 16 + 16 + 48 * 120 + 10_284 + 340
    )
    groups = model.layer_groups()
    for name, _ in model.named_parameters():
        assert (
            sum(f"{name}.".startswith(f"{prefix}.") for group in groups for prefix in group) == 1
        ), name
    assert groups[-1] == model.classifier_names() == ("fc.2",)
    model.reset_classifier(0)
    features = model.fc[1](model.fc[0](model.features(images).flatten(1)))
    np.testing.assert_array_equal(model(images).numpy(), features.numpy())


def test_head_init_scale_multiplies_the_fresh_classifier():
    weights = []
    for scale in (1.0, 0.5):
        paddle.seed(0)
        model = LeNet(head_init_scale=scale)
        weights.append([model.fc[1].weight.numpy().copy(), model.fc[2].weight.numpy().copy()])
        paddle.seed(1)
        model.reset_classifier(9)
        weights[-1].append(model.fc[2].weight.numpy())
    for own, scaled, factor in zip(*weights, (1, 0.5, 0.5), strict=True):
        assert (scaled == own * np.float32(factor)).all()


def test_wrong_sizes_are_named():
    with pytest.raises(
        InputError, match="IMAGE_SIZE is 11, LeNet takes images of at least 12 x 12"
    ):
        build_model(get_config("lenet", ["DATA.IMAGE_SIZE", "11"]))
    with pytest.raises(InputError, match="the model takes images of 28 x 28, found 30 x 28"):
        create_model("lenet")(paddle.zeros([1, 1, 30, 28]))
    with pytest.raises(InputError, match="MODEL.DROPOUT is 0.1, but LeNet takes no DROPOUT"):
        build_model(get_config("lenet", ["MODEL.DROPOUT", "0.1"]))
