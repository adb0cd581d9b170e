"""Names that other toolkits give Swin V2's tensors, and by which windows their models measure
offsets.

golden/names_swinv2.json was made by hand: the authors' module, reduced, with weights and images by
golden/make_names_vit.py's ``values``; "largest" are the largest offsets in its tables.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values

from config import get_config
from models import build_model, with_switches
from models.swinv2 import SwinTransformerV2, relative_coords_table
from weights import load_weights
from weights.formats import write_weights
from weights.names import beit, eva, swinv2

CASE = json.loads((ROOT / "tests" / "golden" / "names_swinv2.json").read_text())[
    "microsoft/Swin-Transformer"
]


def stored(folder, **others):
    """A file of the authors', with its tables of offsets."""
    arrays = {name: values(name, tuple(shape)) for name, shape in CASE["shapes"].items()}
    for name, largest in CASE["largest"].items():
        side = (arrays[name].shape[1] + 1) // 2
        unit = 3 if largest > 1.1 else side
        arrays[name] = relative_coords_table((side, side), (unit, unit)).reshape(arrays[name].shape)
        assert float(arrays[name].max()) == pytest.approx(largest, abs=1e-6)
    write_weights(folder / "theirs.safetensors", arrays | others)
    return folder / "theirs.safetensors"


@pytest.mark.smoke
def test_the_authors_files_give_their_logits(tmp_path):
    model = SwinTransformerV2(**CASE["model"])
    report = load_weights(model, stored(tmp_path))
    model.eval()
    assert report.notes == report.changes == []
    logits = model(paddle.to_tensor(values("images", (2, 3, 32, 32)))).numpy()
    expected = np.array(CASE["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_a_file_tells_by_which_windows_it_measures(tmp_path):
    file = stored(tmp_path)
    words = ["MODEL.TYPE", "SwinV2", "DATA.IMAGE_SIZE", "32"]
    words += [
        word
        for key, value in CASE["model"].items()
        if key not in ("image_size", "pretrained_window_sizes")
        for word in (f"MODEL.{key.upper()}", str(value))
    ]
    config = with_switches(get_config(None, words), file)
    assert config.MODEL.PRETRAINED_WINDOW_SIZES == [3, 3, 2]
    assert any(
        "MODEL.PRETRAINED_WINDOW_SIZES [3, 3, 2], according to the names in" in note
        for note in config.notes
    )
    model = build_model(config)
    load_weights(model, file)
    model.eval()
    logits = model(paddle.to_tensor(values("images", (2, 3, 32, 32)))).numpy()
    np.testing.assert_allclose(logits, CASE["logits"], atol=1e-5 * np.ptp(CASE["logits"]), rtol=0)
    own = SwinTransformerV2(**CASE["model"] | {"pretrained_window_sizes": None})
    told = "according to the names of its tensors, MODEL.PRETRAINED_WINDOW_SIZES is [3, 3, 2], the model has [4, 4, 2]"
    assert load_weights(own, file).notes == [told]


@pytest.mark.parametrize(
    "table",
    [
        np.zeros((1, 7, 7, 2)),
        np.ones(3),
        np.full((1, 7, 7, 2), np.nan),
        np.ones((0, 7, 7, 2)),
        np.ones((1, 1, 1, 2)),
    ],
)
def test_a_table_that_is_none_tells_nothing(table):
    assert (
        swinv2.switches({"layers.0.blocks.0.attn.relative_coords_table": table.astype(np.float32)})
        == {}
    )


@pytest.mark.parametrize(("window", "unit"), [(8, 8), (12, 12), (16, 12), (24, 12), (8, 6), (7, 8)])
def test_windows_are_told_exactly(window, unit):
    table = relative_coords_table((window, window), (unit, unit)).reshape(1, 2 * window - 1, -1, 2)
    names = [f"layers.{stage}.blocks.0.attn.relative_coords_table" for stage in range(2)]
    assert swinv2.switches(dict.fromkeys(names, table)) == {"PRETRAINED_WINDOW_SIZES": [unit, unit]}


@pytest.mark.parametrize("family", [beit, eva, swinv2])
def test_a_traced_programs_keys_without_a_bias_are_left_out(family):
    """timm keeps zeros for them, which isn't supported; others aren't dropped."""
    block = "layers.0.blocks.0." if family is swinv2 else "blocks.0."
    arrays = {
        f"{block}attn.k_bias": np.zeros(3, np.float32),
        f"{block}attn.proj.bias": np.ones(3, np.float32),
    }
    assert list(family.timm_names(arrays, "torch", ())) == [f"{block}attn.proj.bias"]
    arrays[f"{block}attn.k_bias"][1] = 1e-9
    assert family.timm_names(arrays, "torch", ()).keys() == arrays.keys()
