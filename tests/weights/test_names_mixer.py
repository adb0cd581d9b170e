"""Names that other toolkits give the tensors of MLP-Mixer, gMLP and ResMLP.

Google's: models_mixer.py in google-research/vision_transformer. golden/names_mixer.json was made by
hand: PaddleViT's model files, at the commits that the cases name, with weights and images by
golden/make_names_vit.py's ``values``. Its layers are as here but for the epsilon of gMLP's gate
(1e-6; 1e-5 here and in timm).
"""

import json
import re

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import array
from golden.make_names_vit import values
from support.small_models import MIXERS, small_mixer

from errors import InputError
from models import create_model
from weights import file_arrays, load_weights
from weights.formats import write_weights
from weights.names import google_names, mixer, timm_names

PADDLEVIT = json.loads((ROOT / "tests" / "golden" / "names_mixer.json").read_text())


def filled(name):
    """The small model with the formula's weights."""
    model = small_mixer(name)
    for key, tensor in model.state_dict().items():
        tensor.set_value(array(key, tuple(tensor.shape)))
    return model


def assert_same(one, two):
    state = two.state_dict()
    assert one.state_dict().keys() == state.keys()
    for key, tensor in one.state_dict().items():
        assert (tensor.numpy() == state[key].numpy()).all(), key


@pytest.mark.smoke
@pytest.mark.parametrize("case", PADDLEVIT)
def test_paddlevits_files_give_their_logits(tmp_path, case):
    golden = PADDLEVIT[case]
    model = MIXERS[golden["type"].lower()](**golden["model"])
    write_weights(
        tmp_path / "theirs.pdparams",
        {name: values(name, shape) for name, shape in golden["shapes"].items()},
    )
    load_weights(model, tmp_path / "theirs.pdparams")
    model.eval()
    logits = model(paddle.to_tensor(values("images", (2, 3, 16, 16)))).numpy()
    expected = np.array(golden["logits"])
    span = np.ptp(expected)
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * span  # the images matter
    np.testing.assert_allclose(logits, expected, atol=1e-5 * span, rtol=0)


def test_the_authors_resmlp_is_read(tmp_path):
    model = filled("resmlp")
    theirs = {}
    for key, value in file_arrays(model).items():
        if key.endswith((".alpha", ".beta")):
            value = value.reshape(-1)
        key = (
            key.replace("stem.", "patch_embed.")
            .replace("linear_tokens", "attn")
            .replace("mlp_channels", "mlp")
        )
        theirs[re.sub(r"\.ls([12])$", r".gamma_\1", key)] = value
    assert {"blocks.1.attn.weight", "blocks.0.gamma_2", "norm.alpha"} <= theirs.keys()
    write_weights(tmp_path / "theirs.safetensors", theirs)
    fresh = small_mixer("resmlp")
    load_weights(fresh, tmp_path / "theirs.safetensors")
    assert_same(fresh, model)


def test_googles_mixer_is_written_and_read(tmp_path):
    model = filled("mixer")
    arrays = file_arrays(model)
    theirs = google_names(model, arrays)
    shapes = {name: value.shape for name, value in theirs.items() if "_1" not in name}
    assert shapes == {
        "stem/kernel": (4, 4, 3, 24),
        "stem/bias": (24,),
        "MixerBlock_0/LayerNorm_0/scale": (24,),
        "MixerBlock_0/LayerNorm_0/bias": (24,),
        "MixerBlock_0/token_mixing/Dense_0/kernel": (16, 12),
        "MixerBlock_0/token_mixing/Dense_0/bias": (12,),
        "MixerBlock_0/channel_mixing/Dense_0/kernel": (24, 72),
        "MixerBlock_0/channel_mixing/Dense_0/bias": (72,),
        "pre_head_layer_norm/scale": (24,),
        "pre_head_layer_norm/bias": (24,),
        "head/kernel": (24, 7),
        "head/bias": (7,),
    }
    assert (
        theirs["MixerBlock_0/token_mixing/Dense_0/kernel"]
        == arrays["blocks.0.mlp_tokens.fc1.weight"].T
    ).all()
    assert (
        theirs["MixerBlock_1/channel_mixing/Dense_1/bias"]
        == arrays["blocks.1.mlp_channels.fc2.bias"]
    ).all()
    assert (theirs["MixerBlock_1/LayerNorm_1/scale"] == arrays["blocks.1.norm2.weight"]).all()
    kernel = arrays["stem.proj.weight"]
    assert (theirs["stem/kernel"] == np.moveaxis(kernel, (0, 1), (3, 2))).all()
    write_weights(
        tmp_path / "mixer.npz", {f"opt/target/{name}": value for name, value in theirs.items()}
    )
    fresh = small_mixer("mixer")
    load_weights(fresh, tmp_path / "mixer.npz")
    assert_same(fresh, model)


def test_only_mixers_are_written_under_googles_names():
    model = small_mixer("gmlp")
    with pytest.raises(
        InputError, match=r"blocks\.0\.norm\.weight can't be written to Google's format"
    ):
        google_names(model, file_arrays(model))


@pytest.mark.parametrize("name", ["mixer_b16_224", "resmlp_12_224"])
def test_timms_names_and_unknown_ones_pass_untouched(name):
    model = create_model(name, depth=1, embed_dim=8, image_size=32)
    arrays = file_arrays(model) | {"extra.weight": np.ones(1)}
    named = timm_names(mixer, arrays, "torch", arrays.keys())
    assert named.keys() == arrays.keys()
    assert all((named[key] == value).all() for key, value in arrays.items())
