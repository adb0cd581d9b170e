"""A file of PaddleViT's whose family or task isn't here is refused for that, before its keys are
read.
"""

import pytest

from config import get_config
from errors import InputError
from models import create_model
from settings.architectures import architectures
from settings.paddlevit.absent import FAMILIES
from settings.paddlevit.reading import families

# The TYPE of each family's files (of every year), one of its names, and a key that this toolkit
# doesn't have.
ABSENT = [
    ("BoTNet", "BoTNet", "botnet50", "DATA: {FMAP_SIZE: 14}"),
    ("ConvMLP", "ConvMLP", "convmlp_l", ""),
    ("CycleMLP", "CycleMLP", "cyclemlp_b1", ""),
    ("HVT", "hvt", "hvt_s0_patch16_224", ""),
    ("HVT", "hvt", "scale_hvt_ti_4_patch16_224", ""),
    ("MobileFormer", "MobileFormer", "mobileformer_151m", ""),
    ("RepLKNet", "RepLKNet", "replknet_31b", ""),
    ("RepMLP", "RepMLP", "repmlp_b_224", ""),
    ("RepMLP", "RepMLP_ResNet", "repmlp_b_256", ""),
    ("ResT", "ResT", "rest_base", ""),
    ("ResT", "ResT_V2", "restv2_small", ""),
    ("T2T-ViT", "T2T-ViT", "t2t_vit_7", "DATA: {CROP_PCT: 0.9}"),
]


@pytest.mark.parametrize(("family", "kind", "name", "rest"), ABSENT)
@pytest.mark.parametrize("base", ["", "BASE: ''\n"])
def test_a_family_is_named_before_the_keys(family, kind, name, rest, base, tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(
        f"{base}MODEL: {{TYPE: {kind}, NAME: {name}, NO_SUCH_KEY: 1, TRANS: {{DEPTH: [1]}}}}\n{rest}\n"
    )
    with pytest.raises(InputError) as error:
        get_config(file)
    assert str(error.value) == (
        f"{file}: MODEL.TYPE is '{kind}': PaddleViT's {family} isn't here; docs/paddlevit.md lists what is"
    )


@pytest.mark.parametrize(("family", "kind", "name", "rest"), ABSENT)
def test_a_family_is_named_for_its_models_names(family, kind, name, rest):
    line = f"{name}: PaddleViT's {family} isn't here; docs/paddlevit.md lists what is"
    with pytest.raises(InputError, match=f"no configuration file {line}$"):
        get_config(name)
    with pytest.raises(InputError, match=f"no model {line}$"):
        create_model(name)
    with pytest.raises(InputError, match=f"PaddleViT's {family} isn't here"):
        get_config(None, ["MODEL.TYPE", kind.upper()])


def test_what_is_here_is_no_absent_family():
    assert {family for family, *_ in ABSENT} == set(FAMILIES)
    assert not any(kind.lower() in architectures() or families(kind) for _, kind, *_ in ABSENT)
    for near in ("focalnet_tiny", "resnet51", "vit_7"):  # other toolkits' names begin alike
        with pytest.raises(InputError, match="no configuration file (?!.*PaddleViT)"):
            get_config(near)


TASKS = {
    "MODEL: {TYPE: TransGAN, GEN_MODEL: ViT_custom}": "GANs",
    "DATA: {MAX_GEN_NUM: 50000}\nMODEL: {TYPE: Styleformer}": "GANs",
    "MODEL: {BACKBONE: resnet50, NUM_QUERIES: 100}": "object detection",
    "MODEL: {TYPE: PVTv2, NAME: pvtv2_b0}\nFPN: {OUT_CHANNELS: 256}": "object detection",
    "MODEL: {DROPOUT: 0.1, TRANS: {WINDOW_SIZE: 7, NUM_HEADS: [3, 6]}}": "object detection",
}


@pytest.mark.parametrize("text", TASKS)
def test_a_task_is_named_before_the_keys(text, tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(f"{text}\n")
    with pytest.raises(InputError, match=TASKS[text]) as error:
        get_config(file)
    assert "PaddleViT's" in str(error.value)
    assert str(error.value).endswith(" isn't here; docs/paddlevit.md lists what is")


def test_a_type_of_nobodys_is_named_before_the_keys(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("BASE: ''\nMODEL: {TYPE: vitt, DEPT: 3}\n")
    with pytest.raises(
        InputError, match=r"mine.yaml: MODEL.TYPE is 'vitt', expected one of beit, "
    ):
        get_config(file)
