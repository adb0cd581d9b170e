"""Files of EVA-02's and DINOv3's authors and of transformers: with their weights our answers are
theirs.

golden/names_eva.json holds reduced models of theirs (golden/make_names_eva.py).
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values
from support.small_models import small_eva

from config import get_config
from errors import InputError
from models import with_switches
from models.eva import Eva
from weights import file_arrays, load_weights
from weights.formats import write_weights
from weights.names import eva

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_eva.json").read_text())
SIZES = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
EVA02 = SIZES | {"num_classes": 7, "mlp_ratio": 8 / 3, "swiglu_mlp": True, "ref_feat_shape": 4}
DINOV3 = SIZES | {
    "num_classes": 0, "rope_type": "dinov3", "rope_temperature": 100, "use_abs_pos_emb": False, "reg_tokens": 2,
    "init_values": 1e-5, "global_pool": "token", "norm_eps": 1e-5,
}  # fmt: skip


def build(case, **changes):
    """Our model of a case."""
    theirs = EVA02 if "EVA" in case else DINOV3 | {"rope_bfloat16": "DINO" in case}
    theirs = theirs | ({"qkv_fused": False, "scale_mlp": True} if "subln" in case else {})
    theirs = theirs | ({"swiglu_mlp": True, "swiglu_align_to": 8} if "gated" in case else {})
    return Eva(GOLDEN[case]["size"], **theirs | changes)


def arrays(case):
    golden = GOLDEN[case]
    made = {name: values(name, tuple(shape)) for name, shape in golden["shapes"].items()}
    return made | {name: np.float32(value) for name, value in golden["stored"].items()}


def stored(case, folder, **changes):
    """The case's weights, in a file of its toolkit; ``changes`` are functions by what the names end
    with.
    """
    found = arrays(case)
    for name in found:
        for ending, change in changes.items():
            found[name] = change(found[name]) if name.endswith(ending) else found[name]
    write_weights(folder / "theirs.safetensors", found)
    return folder / "theirs.safetensors"


def answers(model, case, file):
    load_weights(model, file)
    model.eval()
    return model(paddle.to_tensor(values("images", (2, 3, *GOLDEN[case]["size"])))).numpy()


def distance(found, case):
    expected = np.array(GOLDEN[case]["answers"])
    return np.abs(found - expected).max() / np.ptp(expected)


@pytest.mark.smoke
@pytest.mark.parametrize("case", GOLDEN)
def test_weights_of_other_toolkits_give_their_answers(tmp_path, case):
    expected = np.array(GOLDEN[case]["answers"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    assert distance(answers(build(case), case, stored(case, tmp_path)), case) < 1e-5


@pytest.mark.parametrize("case", GOLDEN)
def test_timms_names_pass(case):
    model = build(case)
    ours = file_arrays(model)
    assert eva.timm_names(dict(ours), "torch", model.state_dict().keys()) == ours


def test_periods_in_bfloat16_are_the_files_and_told(tmp_path):
    case = "DINOv3 wide"
    file = stored(case, tmp_path)
    exact = build(case, rope_bfloat16=False)
    assert 1e-4 < distance(answers(exact, case, file), case) < 1e-1
    assert (
        "according to the names of its tensors, MODEL.ROPE_BFLOAT16 is True, the model has False"
        in str(load_weights(exact, file))
    )
    config = with_switches(get_config("vit_small_patch16_dinov3"), file)
    assert (config.MODEL.ROPE_BFLOAT16, len(config.notes)) == (True, 1)
    powers = np.float32(100) ** np.float32([0, 0.25, 0.5, 0.75])
    config = with_switches(config, stored(case, tmp_path, periods=lambda _: powers))
    assert eva.switches({"rope_embed.periods": powers}) == {"ROPE_BFLOAT16": False}
    with pytest.raises(InputError, match="rope_embed.periods aren't powers of 100"):
        load_weights(exact, stored(case, tmp_path, periods=lambda _: powers**2))


@pytest.mark.parametrize("shape", [(), (4, 1), (0,)])
def test_periods_of_a_strange_shape_are_refused(shape):
    with pytest.raises(InputError, match="aren't powers of 100"):
        eva.switches({"rope_embed.periods": np.full(shape, np.nan, np.float32)})


def test_the_scale_of_eva02s_rows_and_columns_is_read_from_their_table(tmp_path):
    found = {case: eva.switches(arrays(case)) for case in GOLDEN if "EVA" in case}
    assert list(found.values()) == [{"REF_FEAT_SHAPE": 4}] * 2
    report = load_weights(build("EVA-02 24", ref_feat_shape=6), stored("EVA-02 24", tmp_path))
    assert (
        "according to the names of its tensors, MODEL.REF_FEAT_SHAPE is 4, the model has 6"
        in str(report)
    )
    # of the pre-training
    grid = np.float32(arrays("EVA-02 24")["rope.freqs_cos"]).reshape(6, 6, -1)
    assert eva.switches({"blocks.0.attn.rope.freqs_cos": grid}) == {"REF_FEAT_SHAPE": 4}
    for strange in (np.full((4, 2), np.nan), np.zeros((1, 1)), np.zeros((0, 3)), np.zeros(3)):
        assert set(eva.switches({"rope.freqs_cos": strange}).values()) <= {None, 1, 2}


def test_biases_of_zeros_are_dropped_where_the_model_has_none_and_others_are_refused(tmp_path):
    for case, bias in (("DINOv3 wide", "qkv.bias"), ("transformers wide", "_proj.bias")):
        expected = answers(build(case), case, stored(case, tmp_path, **{bias: np.zeros_like}))
        plain = answers(build(case, qkv_bias=False), case, tmp_path / "theirs.safetensors")
        np.testing.assert_allclose(plain, expected, atol=1e-6 * np.ptp(expected), rtol=0)
        with pytest.raises(
            InputError,
            match="unexpected .*_bias.*according to the names of its tensors, set MODEL.QKV_BIAS True",
        ):
            answers(build(case, qkv_bias=False), case, stored(case, tmp_path))


def test_a_bias_of_the_keys_is_refused_unless_it_is_masked(tmp_path):
    with pytest.raises(InputError, match=r"unexpected blocks.0.attn.k_bias"):
        load_weights(build("DINOv3 wide"), stored("DINOv3 wide", tmp_path, bias_mask=np.ones_like))
    with pytest.raises(InputError, match=r"and its mask are \[96\] and \[32\], expected one shape"):
        load_weights(
            build("DINOv3 wide"), stored("DINOv3 wide", tmp_path, bias_mask=lambda mask: mask[:32])
        )


def test_the_image_tower_of_a_clip_and_a_pre_trainings_norm_are_taken():
    model = small_eva()
    ours = file_arrays(model)
    tower = {f"visual.{name}": array for name, array in ours.items()} | {"text.proj": np.zeros(3)}
    assert eva.timm_names(tower, "torch", model.state_dict().keys()) == ours
    pretrained = {
        name.replace("fc_norm.", "norm."): array
        for name, array in ours.items()
        if "head" not in name
    }
    found = eva.timm_names(pretrained, "torch", model.state_dict().keys())
    assert found == {name: array for name, array in ours.items() if "head" not in name}


def test_names_tell_how_the_model_computes():
    told = {
        name: eva.model_keys(small_eva(name).state_dict())
        for name in ("eva", "eva_subln", "eva_dinov3")
    }
    subln = {"SCALE_MLP": True, "SCALE_ATTN_INNER": True, "QKV_FUSED": False, "FC_NORM": False}
    dinov3 = {"QKV_BIAS": False, "INIT_VALUES": 1e-5, "USE_ABS_POS_EMB": False, "FC_NORM": False}
    assert told["eva"] == {
        "SCALE_MLP": False, "SCALE_ATTN_INNER": False, "QKV_FUSED": True, "QKV_BIAS": True, "INIT_VALUES": None,
        "USE_ABS_POS_EMB": True, "FC_NORM": True,
    }  # fmt: skip
    assert told["eva_subln"] == told["eva"] | subln
    assert told["eva_dinov3"] == told["eva"] | dinov3
    assert eva.model_keys({"cls_token"}) == {}
