"""SegFormer's head against transformers and PaddleViT."""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import positive, values
from golden.make_paddlevit_heads import array
from support.small_models import small_pvtv2

from models.heads.base import Maps
from models.heads.network import SegmentationModel
from models.heads.segformer import SegFormerHead
from weights import load_weights
from weights.formats import write_weights
from weights.layout import linear_weights
from weights.names import segmentation, timm_names

GOLDEN_FOLDER = ROOT / "tests" / "golden"
GOLDEN = np.load(GOLDEN_FOLDER / "segformer.npz")
SIDES = (70, 45)
GRADIENTS = "masks/grad/"


def small(image_size=SIDES, **head):
    """A small SegFormer with the sizes of the golden files."""
    encoder = small_pvtv2(mlp_ratio=4, norm_eps=1e-5, num_classes=0, image_size=image_size)
    maps = Maps([4, 8, 12, 16], [4, 8, 16, 32], image_size)
    head = SegFormerHead(maps, 5, **{"fused_channels": 12} | head)
    return SegmentationModel(encoder, head, [0, 1, 2, 3], 5, None)


def transformers_shapes():
    shapes = {
        name.removeprefix(GRADIENTS): GOLDEN[name].shape
        for name in GOLDEN
        if name.startswith(GRADIENTS)
    }
    statistics = ("decode_head.batch_norm.running_mean", "decode_head.batch_norm.running_var")
    return shapes | dict.fromkeys(statistics, (12,))


def written(path, shapes):
    write_weights(path, {name: positive(name, shape) for name, shape in shapes.items()})
    return path


def nvidias_name(name):
    """The name in the authors' files of one of transformers' names of the head."""
    for transformers, nvidia in (
        *((f".linear_c.{i}.", f".linear_c{i + 1}.") for i in range(4)),
        (".linear_fuse.", ".linear_fuse.conv."),
        (".batch_norm.", ".linear_fuse.bn."),
        ("decode_head.classifier.", "decode_head.linear_pred."),
    ):
        name = name.replace(transformers, nvidia)
    return name


@pytest.mark.smoke
def test_logits_and_gradients_are_transformers(tmp_path):
    model = small()
    load_weights(model, written(tmp_path / "model.safetensors", transformers_shapes()))
    model.eval()
    images = paddle.to_tensor(values("images", (2, 3, *SIDES)))
    features = model.decode_head.features(model.encoder, images, model.indices)
    logits = model.decode_head(features)
    expected = GOLDEN["masks/logits"]
    # The images have an effect.
    assert np.abs(np.diff(expected, axis=0)).max() > 0.1 * np.ptp(expected)
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0)
    (logits * paddle.to_tensor(values("loss", tuple(logits.shape)))).sum().backward()
    assert_gradients(model)
    assert model(images).shape == [2, 5, *SIDES]


def assert_gradients(model):
    stored = {
        name: GOLDEN[GRADIENTS + name] for name in transformers_shapes() if "running" not in name
    }
    wanted = model.state_dict().keys()
    # Gradients are renamed, joined and split as the weights are.
    expected = timm_names(segmentation, stored, "torch", wanted)
    found = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name in linear_weights(model):
        found[name] = found[name].T
    # A gradient whose terms cancel out is only rounding.
    least = 2e-2 * max(np.ptp(value) for value in expected.values())
    for name, value in expected.items():
        tolerance = 1e-5 * max(np.ptp(value), least)
        np.testing.assert_allclose(found[name], value, atol=tolerance, rtol=0, err_msg=name)


def test_the_authors_names_of_the_head_are_read(tmp_path):
    shapes = transformers_shapes()
    arrays = {name: positive(name, shape) for name, shape in shapes.items()}
    # The authors' base class has a classifier that nothing reads.
    unread = {"decode_head.conv_seg.weight": positive("unread", (5, 12, 1, 1))}
    theirs = {nvidias_name(name): array for name, array in arrays.items()}
    assert len(theirs.keys() - arrays.keys()) == 15
    write_weights(tmp_path / "theirs.safetensors", theirs | unread)
    found = small()
    load_weights(found, tmp_path / "theirs.safetensors")
    expected = small()
    load_weights(expected, written(tmp_path / "model.safetensors", shapes))
    state = expected.state_dict()
    for name, tensor in found.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), state[name].numpy(), err_msg=name)


@pytest.mark.smoke
def test_logits_are_paddlevits(tmp_path):
    golden = json.loads((GOLDEN_FOLDER / "paddlevit_segformer.json").read_text())
    path = tmp_path / "model.pdparams"
    write_weights(path, {name: array(name, shape) for name, shape in golden["shapes"].items()})
    model = small(tuple(golden["size"]), map_batch_norms=True)
    load_weights(model, path)
    model.eval()
    expected = np.load(GOLDEN_FOLDER / "paddlevit_segformer.npz")["logits"]
    assert np.abs(np.diff(expected, axis=0)).max() > 0.1 * np.ptp(expected)
    found = model(paddle.to_tensor(values("images", (2, 3, *golden["size"])))).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_training_leaves_out_channels_and_gives_small_maps():
    model = small(dropout=0.5)
    model.train()
    paddle.seed(0)
    dropped = []
    model.decode_head.dropout.register_forward_post_hook(
        lambda layer, inputs, outputs: dropped.append(outputs.numpy())
    )
    [logits] = model(paddle.to_tensor(values("images", (2, 3, *SIDES))))
    assert logits.shape == [2, 5, 18, 12]
    # A channel of an image is left out at all its places.
    empty = (dropped[0] == 0).all(axis=(2, 3))
    assert 0.2 < empty.mean() < 0.8


def test_the_classifier_alone_depends_on_the_classes():
    model = small()
    assert model.classifier_names() == ("decode_head.classifier",)
    assert model.head_names() == ("decode_head",)
    groups = [name for group in model.layer_groups() for name in group]
    assert groups[-1] == "decode_head"
