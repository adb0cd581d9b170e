"""Names that other toolkits give MobileOne's tensors: with their weights our logits are theirs.

golden/names_mobile.json was made by hand: the models of apple/ml-mobileone (b7f4e6d) and of
PaddleViT (MobileOne/ of 5ac7d89), as they train and folded, with golden/trained.py's weights under
their names (Paddle's statistics under PyTorch's), gave the logits of its images; kept are these,
the names and the shapes.
"""

import json
import re

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.trained import array_of
from support.small_models import small_mobileone

from config import get_config
from errors import InputError
from models import build_model, with_switches
from weights import load_weights, save_weights
from weights.formats import write_weights
from weights.layout import file_name
from weights.names import mobileone, timm_names

CASES = json.loads((ROOT / "tests" / "golden" / "names_mobile.json").read_text())
SIZES = [
    "MODEL.STAGE_DEPTHS",
    "[1, 1, 2, 1]",
    "MODEL.EMBED_DIMS",
    "[16, 32, 128, 128]",
    "MODEL.NUM_BRANCHES",
    "2",
]
SIZES += ["MODEL.USE_SE", "True", "MODEL.NUM_CLASSES", "5"]
KEY = "MODEL.DEPLOY True"

array = array_of("mobileone")


def stored(case, folder):
    """The golden case's weights, in a file of its toolkit."""
    golden = CASES[case]
    file = folder / ("theirs.pdparams" if golden["layout"] == "paddle" else "theirs.safetensors")
    write_weights(
        file, {name: array(name, tuple(shape)) for name, shape in golden["shapes"].items()}
    )
    return file


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_weights_of_other_toolkits_give_their_logits_folded_or_not(tmp_path, case):
    golden = CASES[case]
    file = stored(case, tmp_path)
    config = with_switches(get_config("mobileone_s4", SIZES), file)
    assert case.endswith("folded") == config.MODEL.DEPLOY
    assert [KEY in note for note in config.notes] == [True] * config.MODEL.DEPLOY
    model = build_model(config)
    named = timm_names(
        mobileone, dict.fromkeys(golden["shapes"], np.zeros(1)), golden["layout"], ()
    )
    assert named.keys() == {file_name(name) for name in model.state_dict()}
    load_weights(model, file)
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, golden["size"], golden["size"])))
    expected = np.array(golden["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    np.testing.assert_allclose(
        model(images).numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0
    )


@pytest.mark.parametrize("deploy", [False, True])
def test_a_file_of_the_other_form_is_refused_with_the_key(tmp_path, deploy):
    save_weights(small_mobileone(deploy=not deploy), tmp_path / "other.safetensors")
    model = small_mobileone(deploy=deploy)
    before = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        InputError,
        match=re.escape(f"according to the names of its tensors, set MODEL.DEPLOY {not deploy}"),
    ):
        load_weights(model, tmp_path / "other.safetensors")
    assert all(
        (tensor.numpy() == before[name]).all() for name, tensor in model.state_dict().items()
    )


def test_timms_names_pass_but_for_the_count_of_batches():
    state = {
        file_name(name): tensor.numpy() for name, tensor in small_mobileone().state_dict().items()
    }
    counted = state | {"stem.conv_scale.bn.num_batches_tracked": np.ones(()), "extra": np.ones(1)}
    named = timm_names(mobileone, counted, "torch", state)
    assert named.keys() == {*state, "extra"}
    assert all(named[name] is value for name, value in state.items())
    assert mobileone.switches(state) == {"DEPLOY": False}
    assert mobileone.switches({"extra": 1}) == {}
