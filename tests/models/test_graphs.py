"""What every architecture's training step computes on a GPU, by the graph that Paddle makes of it
on a CPU.
"""

from collections import Counter

import paddle
import pytest
import yaml
from conftest import ROOT
from paddle.amp import amp_lists

if not hasattr(paddle.nn.functional, "sdpa"):
    pytest.skip("autocast needs a device in the graphs of Paddle 2", allow_module_level=True)
from support.traced_graphs import EXTRAS, graph, half_operators, loss_graphs, types_of, variants

from config import get_config

pytestmark = pytest.mark.long
GOLDEN = ROOT / "tests" / "golden"
TYPES = yaml.safe_load((GOLDEN / "types.yaml").read_text())
GRADIENTS = yaml.safe_load((GOLDEN / "gradients.yaml").read_text())
HALF = (GOLDEN / "half_operators.txt").read_text().split()
FLASH = {
    "vit": 2,
    "deit": 2,
    "eva": 2,
    "naflexvit": 2,
    "pit": 4,
    "volo": 3,
    "hiera": 2,
    "crossvit": 6,
    "cswin": 9,
    "metaformer": 2,
    "mobilevit": 4,
    "t2t_vit": 2,
    "hvt": 2,
}  # blocks of the small form


def test_every_model_computes_in_the_types_of_the_table():
    found = {variant: types_of(graph(variant)) for variant in variants()}
    assert found == TYPES


def test_what_has_to_be_exact_is_float32_in_every_row():
    for variant, row in TYPES.items():
        model = get_config(variants()[variant][0]).MODEL
        # Performers multiply exponentials of squares. NaFlexViT resizes positions by products.
        exact = model.get("TOKEN_TYPE") == "performer" or (
            model.TYPE == "NaFlexViT" and model.POS_RESIZE in ("bicubic", "antialiased")
        )
        assert row["products"] == ("float32 and half" if exact else "half"), variant
        assert {row.get(key, "float32") for key in ("softmax", "norms", "loss", "depthwise")} == {
            "float32"
        }, variant
        if "norms" in row:
            assert "float32" in row["residual sums"], variant


def test_attention_of_every_vision_transformer_is_flash_attention():
    """Each block's queries, keys and values are of one half type, and no softmax over N x N is
    left.
    """
    for variant, (name, _) in variants().items():
        blocks = FLASH.get(get_config(name).MODEL.TYPE.lower(), 0)
        model = get_config(name).MODEL
        # those of the first tokens, too
        blocks += 2 * (model.get("TOKEN_TYPE") == "transformer")
        if (
            not model.get("ATTENTION_STAGES", 1) or model.get("ATTENTION") == "differential"
        ):  # ConvFormer; two softmaxes
            blocks = 0
        noted = [types for kind, *types in graph(variant).replaced if kind == "flash_attn"]
        assert noted == [["bfloat16"] * 3] * blocks, variant
        # One query's softmax, outlook attention's, that of pooled queries.
        pooled = model.get("GLOBAL_POOL") == "map" or model.TYPE in ("VOLO", "Hiera", "CrossViT")
        assert not (blocks and "softmax" in types_of(graph(variant))) or pooled, variant


def test_without_flash_attention_softmax_is_float32_between_half_products():
    found = types_of(graph("vit, QK_NORM", flash=False))
    assert (found["softmax"], found["products"], found["residual sums"]) == (
        "float32",
        "half",
        "float32",
    )
    assert "flash attention" not in found


def test_every_gradient_is_added_up_in_one_order():
    known = {name for group in GRADIENTS.values() for name in group}
    unread = {}
    for variant in variants():
        backward = {op.name for op in graph(variant).operators if op.backward}
        unread |= dict.fromkeys(backward - known, variant)
    plain = graph("vit, QK_NORM", flash=False)
    unread |= {
        op.name: "no flash" for op in plain.operators if op.backward and op.name not in known
    }
    unread |= {
        op.name: "losses"
        for losses in loss_graphs()
        for op in losses
        if op.backward and op.name not in known
    }
    assert not unread, (
        "read their kernels for atomic additions, then see tests/golden/gradients.yaml"
    )


def test_no_step_waits_for_the_host():
    """Operators that copy between host and device, or that need a tensor's value on the host to go
    on.
    """
    waiting = {
        "memcpy",
        "memcpy_d2h",
        "memcpy_h2d",
        "py_func",
        "print",
        "assert",
        "if",
        "while",
        "shape",
        "shape64",
    }
    waiting |= {"nonzero", "masked_select", "unique"}
    for variant in variants():
        assert not waiting & {op.name for op in graph(variant).operators}, variant


def test_gradients_that_add_atomically_are_where_it_makes_no_difference():
    for variant in variants():
        count = Counter(op.name for op in graph(variant).operators)
        assert count["gather_grad"] == variant.endswith(", PATCH_DROP"), variant
        # Paddle has ordered gradients of pooling for float32 and float16 alone.
        pooled = {op.inputs[0] for op in graph(variant).operators if op.name == "pool2d_grad"}
        assert pooled <= {"float32"}, variant


def test_the_list_of_half_operators_is_whole():
    """test_kernels.py looks for their GPU kernels, where there is a build with GPUs."""
    assert half_operators() == HALF


@pytest.mark.smoke
def test_float16_and_bfloat16_have_the_same_lists():
    """So that a graph of one tells the types of the other."""
    white = amp_lists.white_list()
    black = amp_lists.black_list()
    assert white["float16"]["O1"] - amp_lists.ONLY_FP16_WHITE_LIST == white["bfloat16"]["O1"]
    assert black["float16"]["O1"] == black["bfloat16"]["O1"]


def test_the_table_has_every_extra():
    assert set(EXTRAS) < set(TYPES)
