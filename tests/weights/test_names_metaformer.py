"""Names that the authors give CAFormer's and ConvFormer's tensors, and their classifier's epsilon.

golden/names_metaformer.json was made by hand: the authors' module (sail-sg/metaformer 64c534a,
torch 2.13), reduced, with the weights below under their names.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.metaformer import array
from support.small_models import small_metaformer

from config import get_config
from models import with_switches
from weights import load_weights, save_weights
from weights.formats import write_weights

# The authors' module was given images of these sizes.
SIZES = {"metaformer": (59, 74), "metaformer_conv": (64, 64)}
GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_metaformer.json").read_text())


@pytest.fixture
def file(request, tmp_path):
    """The authors' file of a case. The MLP's first layer gives so little that the epsilon after it
    matters.
    """
    arrays = {
        name: array(name, tuple(shape)) for name, shape in GOLDEN[request.param]["shapes"].items()
    }
    arrays |= {
        name: values * np.float32(0.05) for name, values in arrays.items() if "head.fc1." in name
    }
    write_weights(tmp_path / "a.safetensors", arrays)
    return tmp_path / "a.safetensors"


def difference(model, name):
    """The largest one of the logits from the authors', of their range."""
    model.eval()
    expected = np.array(GOLDEN[name]["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-3 * np.ptp(expected)  # the images matter
    logits = model(paddle.to_tensor(array("images", (2, 3, *model.image_size)))).numpy()
    return np.abs(logits - expected).max() / np.ptp(expected)


@pytest.mark.smoke
@pytest.mark.parametrize(("file", "name"), [(name, name) for name in GOLDEN], indirect=["file"])
def test_the_authors_files_give_their_logits(file, name):
    model = small_metaformer(name, head_norm_eps=1e-5, image_size=SIZES[name])
    report = load_weights(model, file)
    assert (report.changes, report.notes) == ([], [])
    assert difference(model, name) < 1e-5


@pytest.mark.parametrize("file", ["metaformer"], indirect=True)
def test_the_authors_epsilon_is_taken_and_told(file, tmp_path):
    model = small_metaformer(image_size=SIZES["metaformer"])
    assert load_weights(model, file).notes == [
        "according to the names of its tensors, MODEL.HEAD_NORM_EPS is 1e-05, the model has 1e-06"
    ]
    assert difference(model, "metaformer") > 1e-4
    assert with_switches(get_config("caformer_s18"), file).MODEL.HEAD_NORM_EPS == 1e-5
    save_weights(model, tmp_path / "ours.safetensors")
    assert (
        with_switches(get_config("caformer_s18"), tmp_path / "ours.safetensors").MODEL.HEAD_NORM_EPS
        == 1e-6
    )


@pytest.mark.parametrize("file", ["metaformer"], indirect=True)
def test_another_number_of_classes_leaves_the_mlp_of_the_classifier(file):
    model = small_metaformer(num_classes=3, head_norm_eps=1e-5, image_size=SIZES["metaformer"])
    report = load_weights(model, file, strict=False)
    assert set(report.fresh) == {"head.fc.fc2.weight", "head.fc.fc2.bias"}
    expected = array(
        "head.fc1.weight", tuple(GOLDEN["metaformer"]["shapes"]["head.fc1.weight"])
    ).T * np.float32(0.05)
    np.testing.assert_array_equal(model.head.fc.fc1.weight.numpy(), expected)
