"""Names of RepLKNet's tensors in the files of its authors and of PaddleViT, merged or not."""

import re

import numpy as np
import pytest
from golden.paddlevit_models import array
from support.small_models import small_replknet

from config import get_config
from errors import InputError
from models import build_model, with_switches
from weights import load_weights, save_weights
from weights.formats import write_weights
from weights.layout import file_name
from weights.names import replknet, timm_names

SIZES = ["MODEL.STAGE_DEPTHS", "[1, 1, 2, 1]", "MODEL.EMBED_DIMS", "[8, 12, 16, 24]"]
SIZES += ["MODEL.LARGE_KERNEL_SIZES", "[13, 9, 7, 5]", "MODEL.FFN_RATIO", "2"]
SIZES += ["MODEL.NUM_CLASSES", "5"]
# PaddleViT's names of layers (replknet.py of 5ac7d89), by ours.
PADDLEVIT = (
    (r"\.bn\.running_mean", ".norm._mean"),
    (r"\.bn\.running_var", ".norm._variance"),
    (r"\.running_mean", "._mean"),
    (r"\.running_var", "._variance"),
    (r"\.bn\.", ".norm."),
    (r"\.pw(\d)\.", r".pw_conv_\1."),
    (r"\.prelkb_bn\.", ".pre_large_kernel_bn."),
    (r"\.preffn_bn\.", ".pre_ffn_bn."),
    (r"\.lkb_(origin|reparam)\.", r".large_kernel_\1."),
    (r"\.small_conv\.", ".small_kernel_conv."),
)


def of_paddlevit(name):
    for ours, theirs in PADDLEVIT:
        name = re.sub(ours, theirs, name)
    return name


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("naming", ["authors", "PaddleViT"])
def test_a_file_tells_whether_its_kernels_are_merged(tmp_path, naming, merged):
    state = {
        file_name(name): array(file_name(name), tuple(tensor.shape))
        for name, tensor in small_replknet(small_kernel_merged=merged).state_dict().items()
    }
    if naming == "authors":
        file = tmp_path / "theirs.safetensors"
        arrays = state | {"head.weight": state["head.weight"].T}
    else:
        file = tmp_path / "theirs.pdparams"
        arrays = {of_paddlevit(name): values for name, values in state.items()}
        assert arrays.keys() != state.keys()
    write_weights(file, {name: np.ascontiguousarray(values) for name, values in arrays.items()})
    config = with_switches(get_config("replknet_31b", SIZES), file)
    assert merged == config.MODEL.SMALL_KERNEL_MERGED
    model = build_model(config)
    report = load_weights(model, file)
    assert not report.fresh
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), state[file_name(name)], err_msg=name)


@pytest.mark.parametrize("merged", [False, True])
def test_a_file_of_the_other_form_is_refused_with_the_key(tmp_path, merged):
    save_weights(small_replknet(small_kernel_merged=not merged), tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=f"set MODEL.SMALL_KERNEL_MERGED {not merged}"):
        load_weights(small_replknet(small_kernel_merged=merged), tmp_path / "other.safetensors")


def test_names_of_other_layers_pass():
    arrays = {"norm.weight": np.ones(2), "stages.0.norm.weight": np.ones(2), "more": np.ones(1)}
    assert timm_names(replknet, arrays, "torch", ()).keys() == arrays.keys()
    assert replknet.switches({"more": 1}) == {}
