"""Names that Apple, PaddleViT and transformers give MobileViT's tensors, and how their models
compute.

golden/names_mobilevit.json was made by hand: the modules of apple/ml-cvnets 0.1 (d38a116, torch
2.13), which read blue, green, red, and of PaddleViT (5ac7d89), reduced, with golden/mobilevit.py's
weights under their names (Paddle's statistics under PyTorch's), gave the logits of its images.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import positive
from golden.mobilevit import array
from support.small_models import small_mobilevit

from config import get_config
from errors import InputError
from models import with_switches
from training.checkpoint.description import description_of
from weights import load_weights, save_weights
from weights.formats import write_weights
from weights.names import mobilevit, timm_names

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_mobilevit.json").read_text())
PADDLEVIT = {
    "stage_depths": (2, 4, 3),
    "hidden_dims": (8, 16, 16),
    "num_heads": 8,
    "last_norm_eps": 1e-6,
}
PADDLEVIT |= {"hidden_norm": True}
OURS = {"PaddleViT": PADDLEVIT, "apple/ml-cvnets": {}}


def stored(case, folder):
    """The golden case's weights, in a file of its toolkit."""
    arrays = {}
    for name, shape in GOLDEN[case]["shapes"].items():
        if case == "PaddleViT":  # Linears are the other way round
            linear = len(shape) == 2
            values = array(name.replace("._mean", ".running_mean").replace("._variance", ".running_var"),
                           tuple(shape)[::-1] if linear else tuple(shape))  # fmt: skip
            arrays[name] = values.T if linear else values
        else:
            arrays[name] = array(name, tuple(shape))
    file = folder / ("theirs.pdparams" if case == "PaddleViT" else "theirs.safetensors")
    write_weights(file, arrays)
    return file


def difference(model, case):
    """The largest one of the logits from theirs, of their range."""
    model.eval()
    expected = np.array(GOLDEN[case]["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    logits = model(paddle.to_tensor(array("images", (2, 3, 64, 64)))).numpy()
    return np.abs(logits - expected).max() / np.ptp(expected)


@pytest.mark.smoke
@pytest.mark.parametrize("case", GOLDEN)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, case):
    model = small_mobilevit(**OURS[case])
    report = load_weights(model, stored(case, tmp_path))
    assert (report.changes, report.notes) == ([], [])
    assert difference(model, case) < 1e-5


def test_apples_images_are_blue_green_red(tmp_path):
    model = small_mobilevit()
    file = stored("apple/ml-cvnets", tmp_path)
    load_weights(model, file)
    theirs = array("conv_1.block.conv.weight", (8, 3, 3, 3))
    np.testing.assert_array_equal(model.stem.conv.weight.numpy(), theirs[:, ::-1])
    save_weights(model, tmp_path / "ours.safetensors")  # and once alone
    load_weights(model, tmp_path / "ours.safetensors")
    np.testing.assert_array_equal(model.stem.conv.weight.numpy(), theirs[:, ::-1])
    strange = timm_names(
        mobilevit, {"conv_1.block.conv.weight": np.zeros(3, np.float32)}, "torch", ()
    )
    assert strange["stem.conv.weight"].shape == (3,)


def test_paddlevits_files_tell_how_its_model_computes(tmp_path):
    file = stored("PaddleViT", tmp_path)
    model = with_switches(get_config("mobilevit_xs"), file).MODEL
    assert (model.NUM_HEADS, model.LAST_NORM_EPS, model.HIDDEN_NORM) == (8, 1e-6, True)
    with pytest.raises(
        InputError, match=r"according to the names of its tensors, set MODEL\.EXPAND_RATIO 4\.0"
    ):
        load_weights(small_mobilevit(**PADDLEVIT, expand_ratio=2.0), file)
    other = small_mobilevit(**{**PADDLEVIT, "hidden_norm": False})
    before = other.stem.conv.weight.numpy()
    with pytest.raises(
        InputError, match=r"according to the names of its tensors, set MODEL\.HIDDEN_NORM True"
    ):
        load_weights(other, file)
    assert (other.stem.conv.weight.numpy() == before).all()
    four = small_mobilevit(**{**PADDLEVIT, "num_heads": 4, "last_norm_eps": 1e-5})
    assert load_weights(four, file).notes == [
        "according to the names of its tensors, MODEL.NUM_HEADS is 8, the model has 4",
        "according to the names of its tensors, MODEL.LAST_NORM_EPS is 1e-06, the model has 1e-05",
    ]
    assert difference(four, "PaddleViT") > 1e-3


def test_transformers_preparation_is_taken_and_another_order_of_colours_refused(tmp_path):
    golden = json.loads((ROOT / "tests" / "golden" / "names_transformers.json").read_text())[
        "mobilevit"
    ]
    arrays = {name: positive(name, shape) for name, shape in golden["shapes"].items()}
    write_weights(tmp_path / "model.safetensors", arrays)
    (tmp_path / "config.json").write_text(json.dumps(golden["config"]))
    prepared = {
        "do_center_crop": True,
        "crop_size": {"height": 64, "width": 64},
        "size": {"shortest_edge": 72},
    }
    prepared |= {"resample": 2, "do_flip_channel_order": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    config = description_of(tmp_path).to_config(["MODEL.PRETRAINED", str(tmp_path)])
    assert pytest.approx(64 / 72) == config.DATA.CROP_PCT
    assert (config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD) == ([0.0] * 3, [1.0] * 3)
    assert (config.DATA.INTERPOLATION, config.MODEL.EMBED_DIMS) == (
        "bilinear",
        [8, 8, 8, 8, 8, 16, 16, 16, 24],
    )
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(prepared | {"do_flip_channel_order": False})
    )
    with pytest.raises(InputError, match="do_flip_channel_order is False, expected True"):
        description_of(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(golden["config"] | {"output_stride": 16}))
    with pytest.raises(InputError, match="output_stride is 16, only 32 is supported"):
        description_of(tmp_path)


def test_names_and_shapes_tell_a_norm_before_the_attention_and_the_channels_between():
    assert mobilevit.model_keys(small_mobilevit().state_dict()) == {
        "HIDDEN_NORM": False,
        "EXPAND_RATIO": 4.0,
    }
    changed = small_mobilevit(hidden_norm=True, expand_ratio=2.0)
    assert mobilevit.model_keys(changed.state_dict()) == {"HIDDEN_NORM": True, "EXPAND_RATIO": 2.0}
    for shape in ((), (3,), (8, 0, 1, 1)):
        assert mobilevit.model_keys({"stages.0.0.conv1_1x1.conv.weight": np.ones(shape)}) == {}
    assert mobilevit.switches({"stem.conv.weight"}) == {}
