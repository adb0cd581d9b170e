"""Names that other toolkits give PVTv2's and PoolFormer's tensors: with their weights our logits
are theirs.

golden/names_pvtv2.json and golden/names_poolformer.json were made by hand: reduced models of
PaddleViT's (PVTv2 and PoolFormer, 29bb793 and 30ba34a), whai362/PVT's (0a0f63c) and
sail-sg/poolformer's (0c2a8f5) layers, written down without what they don't use, with weights and
images by ``values``; kept are names, shapes and logits. "PaddleViT MiT" is the encoder of its
SegFormer, as its code computes it, with a classifier of the last stage's mean.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values
from support.small_models import small_pyramid

from models import ARCHITECTURES
from weights import load_weights
from weights.formats import write_weights
from weights.layout import linear_weights
from weights.names import timm_names

GOLDEN = {
    kind: json.loads((ROOT / "tests" / "golden" / f"names_{kind}.json").read_text())
    for kind in ("pvtv2", "poolformer")
}
CASES = [(kind, case) for kind, cases in GOLDEN.items() for case in cases]


def logits(model, kind, case, folder):
    """Those of the golden images with the case's weights, read from a file of its toolkit."""
    golden = GOLDEN[kind][case]
    file = folder / ("model.pdparams" if golden["layout"] == "paddle" else "model.safetensors")
    write_weights(
        file, {name: values(name, tuple(shape)) for name, shape in golden["shapes"].items()}
    )
    load_weights(model, file)
    model.eval()
    return model(paddle.to_tensor(values("images", (2, 3, *golden["size"])))).numpy()


@pytest.mark.smoke
@pytest.mark.parametrize(("kind", "case"), CASES)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, kind, case):
    expected = np.array(GOLDEN[kind][case]["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    found = logits(small_pyramid(kind, case), kind, case, tmp_path)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_names_are_timms_and_values_stay_in_place(kind, case):
    golden = GOLDEN[kind][case]
    model = small_pyramid(kind, case)
    arrays = {name: np.full(shape, i) for i, (name, shape) in enumerate(golden["shapes"].items())}
    named = timm_names(
        ARCHITECTURES[kind.lower()].weight_names,
        arrays,
        golden["layout"],
        model.state_dict().keys(),
    )
    transposed = linear_weights(model) if golden["layout"] == "torch" else ()
    shapes = {
        key: tuple(t.shape)[:: -1 if key in transposed else 1]
        for key, t in model.state_dict().items()
    }
    assert {key: array.shape for key, array in named.items()} == shapes
    # A kernel of 1 x 1 that becomes the weight of a Linear is a view of the file's array.
    assert all(
        any(np.may_share_memory(array, other) for other in arrays.values())
        for array in named.values()
    )
    assert (
        timm_names(ARCHITECTURES[kind.lower()].weight_names, named, golden["layout"], ()) == named
    )  # timm's names pass
