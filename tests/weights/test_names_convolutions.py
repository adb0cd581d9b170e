"""Names that other toolkits give the tensors of convolutional models: with their weights our logits
are theirs.

golden/names_convolutions.json was made by hand: reduced models of PaddleViT's (ConvNeXt c055bc0,
ConvMixer 7d0ceb9, DeiT/regnet.py 5ba4761), facebookresearch/ConvNeXt's (06f7b05) and
locuslab/convmixer's (6108d53) layers, written down without what they don't use, and of torchvision
0.28's RegNet, with the weights of golden/convolutions.py under their names (Paddle's statistics
under PyTorch's), gave the logits of its images; kept are these, the names and the shapes.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.convolutions import array
from paddle.vision.models import resnet18
from support.small_models import SMALL_MODELS

from errors import InputError
from models import ARCHITECTURES
from models.resnet import ResNet
from weights import load_weights
from weights.formats import write_weights
from weights.layout import file_name
from weights.names import regnet as regnet_names
from weights.names import timm_names

CASES = json.loads((ROOT / "tests" / "golden" / "names_convolutions.json").read_text())
KINDS = ("convnext", "convmixer", "regnet")


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, case):
    golden = CASES[case]
    kind = next(kind for kind in KINDS if kind in case.lower())
    model = SMALL_MODELS[kind]()
    arrays = {
        name: array(file_name(name), tuple(shape)) for name, shape in golden["shapes"].items()
    }
    assert timm_names(
        ARCHITECTURES[kind.lower()].weight_names, arrays, golden["layout"], ()
    ).keys() == {file_name(name) for name in model.state_dict()}
    file = tmp_path / ("model.pdparams" if golden["layout"] == "paddle" else "model.safetensors")
    write_weights(file, arrays)
    load_weights(model, file)
    model.eval()
    size = golden["size"]
    logits = model(paddle.to_tensor(array("images", (2, 3, size, size)))).numpy()
    expected = np.array(golden["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-4 * np.ptp(expected)  # the images matter
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_paddle_visions_resnet_is_read(tmp_path):
    paddle.seed(0)
    theirs, ours = resnet18(num_classes=5), ResNet(depth=18, num_classes=5)
    for name, tensor in theirs.state_dict().items():
        if tensor.ndim == 1:
            tensor.set_value(array(file_name(name), tuple(tensor.shape)))
    paddle.save(theirs.state_dict(), str(tmp_path / "resnet18.pdparams"))
    load_weights(ours, tmp_path / "resnet18.pdparams")
    images = paddle.to_tensor(array("images", (2, 3, 40, 40)))
    ours.eval(), theirs.eval()
    expected = theirs(images).numpy()
    np.testing.assert_allclose(ours(images).numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_timms_names_pass_but_for_the_count_of_batches(kind):
    state = {
        file_name(name): tensor.numpy()
        for name, tensor in SMALL_MODELS[kind]().state_dict().items()
    }
    counted = state | {"stem.1.num_batches_tracked": np.ones(())} if kind != "convnext" else state
    named = timm_names(
        ARCHITECTURES[kind.lower()].weight_names, counted | {"extra": np.ones(1)}, "torch", state
    )
    assert named.keys() == {*state, "extra"}
    assert all(named[name] is value for name, value in state.items())


def test_a_bias_before_batch_norm_moves_its_mean():
    mean = np.array([1.0, 2.0])
    bias = np.array([0.5, -1.0])
    arrays = {"stages.0.blocks.1.conv3.bias": bias, "stages.0.blocks.1.bn3._mean": mean}
    named = timm_names(regnet_names, arrays, "paddle", ())
    assert named.keys() == {"s1.b2.conv3.bn.running_mean"}
    assert named["s1.b2.conv3.bn.running_mean"].tolist() == [0.5, 3.0]
    assert mean.tolist() == [1.0, 2.0]


def test_statistics_under_both_names_are_an_error():
    arrays = {"bn1._mean": np.zeros(2), "bn1.running_mean": np.ones(2)}
    with pytest.raises(
        InputError, match=r"bn1\._mean and bn1\.running_mean both correspond to bn1\.running_mean"
    ):
        timm_names(None, arrays, "paddle", ())
