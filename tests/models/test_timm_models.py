"""timm's name and arguments of a configuration, and the tensors of what timm builds of them."""

import json

import paddle
import pytest
from conftest import ROOT
from golden.timm_models import CASES

from config import get_config
from errors import InputError
from models import build_model
from models.timm_models import timm_model
from weights import file_arrays

SHAPES = json.loads((ROOT / "tests" / "golden" / "timm_models.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_timm_builds_the_same_tensors(case):
    name, options, timm_name, arguments = CASES[case]
    config = get_config(name, [*options, "MODEL.NUM_CLASSES", "5"])
    found = timm_model(config)
    assert (found.architecture, found.arguments) == (timm_name, arguments)
    assert found.takes_size == ("img_size" in arguments)
    paddle.seed(0)
    arrays = file_arrays(build_model(config))
    assert {name: list(array.shape) for name, array in arrays.items()} == SHAPES[case]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cswin_tiny_224", [], "^timm has no model cswin_tiny_224 of type CSwin$"),
        ("vit_tiny_patch16_224", ["MODEL.NORM_EPS", "1e-5"], r"^MODEL.NORM_EPS is 1e-05, timm's vit_tiny_patch16_224 has None, and no argument"),
        ("vit_tiny_patch16_224", ["MODEL.PROMPT_TOKENS", "4"], "^MODEL.PROMPT_TOKENS is 4, timm's"),
        ("poolformer_s12", [], "^MODEL.FC_NORM is False, timm's poolformer_s12 has True"),
        ("mixer_s16_224", ["MODEL.DEPTH", "2"], "^MODEL.DEPTH is 2, timm's mixer_s16_224 has 8"),
        ("resnet50", ["MODEL.SMALL_STEM", "True"], "^MODEL.SMALL_STEM is True, timm's resnet50 has False"),
    ],
)  # fmt: skip
def test_what_timm_has_no_argument_for_is_told(name, options, message):
    with pytest.raises(InputError, match=message):
        timm_model(get_config(name, options))


def test_what_matters_in_training_alone_is_no_difference():
    plain = timm_model(get_config("vit_tiny_patch16_224"))
    words = ["MODEL.DROPPATH", "0.2", "MODEL.DROPOUT", "0.1", "MODEL.WEIGHT_INIT", "mae"]
    assert timm_model(get_config("vit_tiny_patch16_224", words)) == plain
    # A name that isn't timm's is told by the nearest model of its type.
    words = ["MODEL.NAME", "mine", "MODEL.DEPTH", "3"]
    assert timm_model(get_config("vit_tiny_patch16_224", words)) == plain._replace(
        arguments={"depth": 3, "img_size": 224}
    )
