"""Names that other toolkits give ConvNeXt's and ConvNeXt V2's tensors: with their weights our
logits are theirs.

golden/names_convnext.json holds the logits, names and shapes of reduced models with the weights of
golden/convolutions.py under their names: of facebookresearch/ConvNeXt-V2 (2553895), which ran by
itself, and of transformers 5.23. FCMAE's names and shapes are written down from models/fcmae.py and
models/convnextv2_sparse.py there, with a norm and a classifier beside them;
``remap_checkpoint_keys`` read them. golden/names_convolutions.json has ConvNeXt's authors and
PaddleViT.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.convolutions import array
from support.small_models import small_convnext

from config import get_config
from models import with_switches
from weights import load_weights
from weights.formats import write_weights

CASES = json.loads((ROOT / "tests" / "golden" / "names_convnext.json").read_text())

FCMAES_REST = "left out: 2 tensors of decoder, 2 of pred, 2 of proj, 1 of mask_token"


def written(file, case, left_out=()):
    arrays = {name: array(name, tuple(shape)) for name, shape in CASES[case]["shapes"].items()}
    write_weights(
        file, {name: one for name, one in arrays.items() if not name.startswith(left_out or "?")}
    )
    return file


@pytest.mark.smoke
@pytest.mark.parametrize("conv_mlp", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, case, conv_mlp):
    eps = {"head_norm_eps": 1e-12} if "transformers" in case else {}
    model = small_convnext("convnext_v2" if "V2" in case else "convnext", conv_mlp=conv_mlp, **eps)
    report = load_weights(model, written(tmp_path / "model.safetensors", case))
    assert report.notes == ([FCMAES_REST] if "FCMAE" in case else [])
    model.eval()
    logits = model(paddle.to_tensor(array("images", (2, 3, 64, 64)))).numpy()
    expected = np.array(CASES[case]["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-4 * np.ptp(expected)  # the images matter
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_the_norm_that_fcmae_has_not_got_starts_at_one(tmp_path):
    file = written(
        tmp_path / "model.safetensors", "FCMAE of facebookresearch/ConvNeXt-V2", ("norm.", "head.")
    )
    model = small_convnext("convnext_v2", num_classes=7)
    model.head.norm.weight.set_value(paddle.full([16], 3.0))
    report = load_weights(model, file, strict=False)
    assert report.notes == [FCMAES_REST] + [
        f"head.norm.{one} computed, because files of its toolkit omit it"
        for one in ("weight", "bias")
    ]
    assert report.fresh == ["head.fc.weight", "head.fc.bias"]
    assert (model.head.norm.weight.numpy() == 1).all()
    assert not model.head.norm.bias.numpy().any()


def test_the_epsilon_of_transformers_is_taken_or_told(tmp_path):
    file = written(tmp_path / "model.safetensors", "transformers ConvNextV2ForImageClassification")
    assert with_switches(get_config("convnextv2_atto"), file).MODEL.HEAD_NORM_EPS == 1e-12
    report = load_weights(small_convnext("convnext_v2"), file)
    assert report.notes == [
        "according to the names of its tensors, MODEL.HEAD_NORM_EPS is 1e-12, the model has 1e-06"
    ]
    other = written(tmp_path / "other.safetensors", "facebookresearch/ConvNeXt-V2")
    assert with_switches(get_config("convnextv2_atto"), other).MODEL.HEAD_NORM_EPS == 1e-6
