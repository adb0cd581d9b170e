"""Names that other toolkits give Swin's and BEiT's tensors.

golden/names_swin.json and names_beit.json were made by hand: PaddleViT's model files, at the
commits that the cases name, with weights and images by golden/make_names_vit.py's ``values``.
"""

import json
import re

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values

from models import ARCHITECTURES
from models.beit import Beit
from models.swin import SwinTransformer
from weights.names import beit, encoder_arrays, swin, timm_names

CASES = {}
for family in ("swin", "beit"):
    CASES |= json.loads((ROOT / "tests" / "golden" / f"names_{family}.json").read_text())
SWIN, BEIT = (
    next(case["model"] for case in CASES.values() if case["type"] == name)
    for name in ("Swin", "BEiT")
)
TABLE = "relative_position_bias_table"


def arrays_of(model):
    """The model's arrays by ``values``, in Paddle's layout."""
    return {name: values(name, tensor.shape) for name, tensor in model.state_dict().items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all((found[name] == value).all() for name, value in expected.items())


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_paddlevits_files_give_their_logits(case):
    golden = CASES[case]
    model = {"Swin": SwinTransformer, "BEiT": Beit}[golden["type"]](**golden["model"])
    arrays = {name: values(name, shape) for name, shape in golden["shapes"].items()}
    state = model.state_dict()
    named = timm_names(
        ARCHITECTURES[golden["type"].lower()].weight_names, arrays, golden["layout"], state
    )
    assert named.keys() == state.keys()
    for name, tensor in state.items():
        tensor.set_value(named[name])
    model.eval()
    images = values("images", (2, 3, golden["model"]["image_size"], golden["model"]["image_size"]))
    logits = model(paddle.to_tensor(images)).numpy()
    expected = np.array(golden["logits"])
    span = np.ptp(expected)
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * span  # the images matter
    np.testing.assert_allclose(logits, expected, atol=1e-5 * span, rtol=0)


def test_the_authors_swin_merges_patches_at_a_stages_end():
    expected = arrays_of(SwinTransformer(**SWIN))
    file = {}
    for name, array in expected.items():
        stage = re.match(r"layers\.(\d)\.downsample", name)
        if stage:
            name = name.replace(stage[0], f"layers.{int(stage[1]) - 1}.downsample")
        file[name.replace("head.fc.", "head.")] = array
    assert {
        "layers.0.downsample.norm.bias",
        "layers.1.downsample.reduction.weight",
        "head.bias",
    } < file.keys()
    buffers = {"layers.0.blocks.1.attn_mask": np.zeros((4, 16, 16))}
    buffers |= {"layers.0.blocks.0.attn.relative_position_index": np.zeros((16, 16))}
    assert_same(timm_names(swin, file | buffers, "torch", expected), expected)


def test_names_of_timm_and_unknown_ones_stay():
    for model_type, model in (("Swin", SwinTransformer(**SWIN)), ("BEiT", Beit(**BEIT))):
        expected = arrays_of(model) | {
            "absolute_pos_embed": np.zeros(2),
            "blocks.0.other": np.ones(1),
        }
        assert_same(
            timm_names(
                ARCHITECTURES[model_type.lower()].weight_names,
                expected,
                "torch",
                model.state_dict(),
            ),
            expected,
        )


def test_a_pretrained_beit_has_one_table_for_all_blocks_and_no_classifier():
    wanted = arrays_of(Beit(**BEIT))
    own = [name for name in wanted if name.endswith(TABLE)]
    file = {
        name: array
        for name, array in wanted.items()
        if name not in own and not name.startswith("head.")
    }
    file |= {
        name.replace("fc_norm.", "norm."): file.pop(name)
        for name in ("fc_norm.weight", "fc_norm.bias")
    }
    shared = {f"rel_pos_bias.{TABLE}": values(TABLE, (52, 3))}
    rest = {
        "mask_token": np.zeros(1),
        "lm_head.bias": np.zeros(1),
        "rel_pos_bias.relative_position_index": np.zeros(1),
    }
    arrays, note = encoder_arrays(file | shared | rest, wanted)
    assert note == "left out: 1 tensor of mask_token, 1 of lm_head"
    found = timm_names(beit, arrays, "torch", wanted)
    expected = {name: array for name, array in wanted.items() if not name.startswith("head.")}
    assert len(own) == 2
    assert_same(found, expected | dict.fromkeys(own, shared[f"rel_pos_bias.{TABLE}"]))


def test_a_shared_table_stays_where_it_is_wanted_and_is_not_lost_where_none_is():
    table = {f"rel_pos_bias.{TABLE}": values(TABLE, (52, 3))}
    for options in ({"use_shared_rel_pos_bias": True}, {"use_rel_pos_bias": False}):
        wanted = Beit(**BEIT | options).state_dict()
        assert_same(timm_names(beit, table, "torch", wanted), table)
