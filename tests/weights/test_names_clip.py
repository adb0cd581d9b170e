"""CLIP's image towers from OpenAI's and OpenCLIP's files (golden/make_clip.py)."""

import numpy as np
import paddle
import pytest
from conftest import ROOT

from config import get_config
from errors import InputError
from models import build_model
from weights import load_weights
from weights.formats import read_weights, write_weights
from weights.names.clip import from_clip

GOLDEN = ROOT / "tests" / "golden"
CLIP = [
    "DATA.IMAGE_SIZE", "8", "MODEL.PATCH_SIZE", "4", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "2", "MODEL.NUM_HEADS",
    "2", "MODEL.NUM_CLASSES", "6",
]  # fmt: skip


def assert_clips_outputs(model):
    golden = np.load(GOLDEN / "clip.npz")
    model.eval()
    outputs = model(paddle.to_tensor(golden["images"])).numpy()
    np.testing.assert_allclose(
        outputs, golden["outputs"], atol=1e-5 * np.ptp(golden["outputs"]), rtol=0
    )


@pytest.mark.smoke
def test_openais_own_file_is_a_program_and_needs_the_quick_gelu():
    with pytest.raises(InputError, match="its model uses the quick GELU; set MODEL.ACT quick_gelu"):
        load_weights(build_model(get_config("vit_base_patch16_clip_224", CLIP)), GOLDEN / "clip.pt")
    model = build_model(get_config("vit_base_patch16_clip_quickgelu_224", CLIP))
    report = load_weights(model, GOLDEN / "clip.pt")
    assert (report.missing, report.unexpected) == ([], [])
    assert_clips_outputs(model)


@pytest.mark.parametrize("prefix", ["visual.", "visual.trunk."])
def test_openclips_names(tmp_path, prefix):
    """Both of its forms; neither tells the activation, which its configuration has."""
    arrays = {
        key: value
        for key, value in read_weights(GOLDEN / "clip.pt").arrays.items()
        if key != "vocab_size"
    }
    if prefix == "visual.trunk.":
        arrays = {f"{prefix}{key}": value for key, value in from_clip(arrays).items()}
    write_weights(tmp_path / "open_clip_model.safetensors", arrays)
    model = build_model(get_config("vit_base_patch16_clip_224", [*CLIP, "MODEL.ACT", "quick_gelu"]))
    load_weights(model, tmp_path / "open_clip_model.safetensors")
    assert_clips_outputs(model)
