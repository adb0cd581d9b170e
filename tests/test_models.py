"""Models by name: what is shipped, how it is made, and timm's published sizes."""

import paddle
import pytest

from config import get_config
from errors import InputError
from models import create_model, list_models

PARAMETERS = {
    "vit_tiny_patch16_224": 5_717_416,
    "vit_tiny_patch16_384": 5_790_376,
    "vit_small_patch16_224": 22_050_664,
    "vit_small_patch16_384": 22_196_584,
    "vit_small_patch32_224": 22_878_952,
    "vit_small_patch32_384": 22_915_432,
    "vit_base_patch16_224": 86_567_656,
    "vit_base_patch16_384": 86_859_496,
    "vit_base_patch32_224": 88_224_232,
    "vit_base_patch32_384": 88_297_192,
    "vit_large_patch16_224": 304_326_632,
    "vit_large_patch16_384": 304_715_752,
    "vit_large_patch32_224": 306_535_400,
    "vit_large_patch32_384": 306_632_680,
    "vit_huge_patch14_224": 632_045_800,
    "vit_base_patch16_224_finetune": 86_567_656,
    "vit_large_patch16_224_finetune": 304_326_632,
    "vit_huge_patch14_224_finetune": 632_045_800,
    "deit_tiny_patch16_224": 5_717_416,
    "deit_small_patch16_224": 22_050_664,
    "deit_base_patch16_224": 86_567_656,
    "deit_base_patch16_384": 86_859_496,
    "deit_tiny_distilled_patch16_224": 5_910_800,
    "deit_small_distilled_patch16_224": 22_436_432,
    "deit_base_distilled_patch16_224": 87_338_192,
    "deit_base_distilled_patch16_384": 87_630_032,
    "deit3_small_patch16_224": 22_059_496,
    "deit3_medium_patch16_224": 38_849_512,
    "deit3_base_patch16_224": 86_585_320,
    "deit3_large_patch16_224": 304_374_760,
    "deit3_huge_patch14_224": 632_126_440,
}


def test_every_model_of_paddlevit_is_shipped_under_its_name():
    assert {*list_models("vit_*"), *list_models("deit*")} == {*PARAMETERS, "vit_digits"}
    for name in list_models():
        assert name == get_config(name).MODEL.NAME


def test_recipes_are_configurations_but_no_models(tmp_path, monkeypatch):
    for folder in ("vit", "recipes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"of_{folder}.yaml").write_text("MODEL:\n  DEPTH: 3\n")
    monkeypatch.setattr("models.CONFIG_DIR", tmp_path)
    monkeypatch.setattr("config.CONFIG_DIR", tmp_path)
    assert list_models() == ["of_vit"]
    assert get_config("of_recipes").MODEL.DEPTH == 3
    with pytest.raises(InputError, match="no model of_recipes"):
        create_model("of_recipes")


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameter_counts_are_timms(name):
    c = get_config(name)
    d, hidden = c.MODEL.EMBED_DIM, int(c.MODEL.EMBED_DIM * c.MODEL.MLP_RATIO)
    block = 2 * 2 * d + (3 * d * d + 3 * d) + (d * d + d) + (d * hidden + hidden) + (hidden * d + d)
    block += 2 * d * (c.MODEL.INIT_VALUES is not None)
    prefix = 1 + c.MODEL.DISTILLED
    positions = (c.DATA.IMAGE_SIZE // c.MODEL.PATCH_SIZE) ** 2 + prefix * (not c.MODEL.NO_EMBED_CLASS)
    patches, heads = 3 * c.MODEL.PATCH_SIZE**2 * d + d, prefix * (d * 1000 + 1000)
    assert prefix * d + positions * d + patches + c.MODEL.DEPTH * block + 2 * d + heads == PARAMETERS[name]
    if d <= 384:  # the formula is the model's: checked on the small ones, which build in a second
        assert sum(p.size for p in create_model(name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", list_models("deit*"))
def test_images_are_read_as_timm_reads_them(name):
    data = get_config(name).DATA
    assert (data.IMAGE_SIZE, data.CROP_PCT) in ((224, 0.9), (384, 1.0))
    assert str(data.IMAGE_SIZE) in name
    assert (data.IMAGENET_MEAN, data.IMAGENET_STD) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert data.INTERPOLATION == "bicubic"


def test_create_model_takes_overrides_and_names_what_is_wrong():
    model = create_model("vit_tiny_patch16_224", num_classes=3, image_size=32, depth=1)
    assert model(paddle.zeros([2, 3, 32, 32])).shape == [2, 3]
    assert create_model("vit_tiny_patch16_224", image_size=(32, 16), image_channels=1, depth=1)(
        paddle.zeros([2, 1, 32, 16])
    ).shape == [2, 1000]
    model.reset_classifier(5)
    assert model(paddle.zeros([1, 3, 32, 32])).shape == [1, 5]
    model.reset_classifier(0)
    assert model(paddle.zeros([1, 3, 32, 32])).shape == [1, 192]
    with pytest.raises(InputError, match="takes images of 32 x 32"):
        model(paddle.zeros([1, 3, 48, 48]))
    with pytest.raises(InputError, match="no model vit_bas_patch16_224; did you mean vit_base_patch16_224"):
        create_model("vit_bas_patch16_224")
    with pytest.raises(InputError, match="unknown key MODEL.NUM_CLASES; did you mean MODEL.NUM_CLASSES"):
        create_model("vit_tiny_patch16_224", num_clases=3)
