"""Models by name: what is shipped, how it is made, and timm's published sizes."""

import paddle
import pytest
from support.timm_names import CLAIMED, claimed, count, of_page

from config import get_config, model_files
from errors import InputError
from models import create_model, list_models
from settings.names import families, names
from tools.package import docs_tables


def test_every_model_of_paddlevit_is_shipped_under_its_name():
    sizes = (
        "tiny_patch16",
        "small_patch16",
        "small_patch32",
        "base_patch16",
        "base_patch32",
        "large_patch16",
    )
    names = {f"vit_{size}_{pixels}" for size in (*sizes, "large_patch32") for pixels in (224, 384)}
    names |= {"vit_huge_patch14_224", "vit_digits"}
    names |= {
        f"vit_{size}_224_finetune" for size in ("base_patch16", "large_patch16", "huge_patch14")
    }
    names |= {f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")} | {
        "deit_base_patch16_384"
    }
    names |= {
        name.replace("_patch", "_distilled_patch") for name in names if name.startswith("deit")
    }
    names |= {f"deit3_{size}_patch16_224" for size in ("small", "medium", "base", "large")} | {
        "deit3_huge_patch14_224"
    }
    names |= {f"deit3_{size}_patch16_384" for size in ("small", "base", "large")}
    shipped = [
        file.stem for file in model_files() if file.parent.name in ("vit", "deit", "deit3", "mae")
    ]
    assert names <= set(shipped)
    for name in list_models():
        assert name == get_config(name).MODEL.NAME


def test_the_pages_say_how_many_of_timms_names_are_available():
    """tools/package/docs_tables.py shows what ``of_page`` finds."""
    of_timm = {name for claim in CLAIMED for name in families()[claim.module]}
    theirs = {
        names(file)["timm"].partition(".")[0] for file in model_files() if "timm" in names(file)
    }
    assert theirs <= of_timm
    shown = docs_tables.pages()
    assert {file.parent.name for file in model_files()} == shown.keys()
    available, missing = set(), []
    for page in set(shown.values()):
        found = of_page([folder for folder, its in shown.items() if its == page], page)
        available |= {*found[0]}
        missing += found[1]
    assert available == theirs
    assert len(missing) == len(set(missing))
    assert not theirs & {*missing}
    assert claimed().keys() <= theirs | {*missing}
    assert count() == (len(claimed()) - len(missing), len(claimed()))


def test_recipes_are_configurations_but_no_models(tmp_path, monkeypatch):
    for folder in ("vit", "recipes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"of_{folder}.yaml").write_text("MODEL:\n  DEPTH: 3\n")
    monkeypatch.setattr("settings.merging.CONFIG_DIR", tmp_path)
    assert list_models() == ["of_vit"]
    assert get_config("of_recipes").MODEL.DEPTH == 3
    with pytest.raises(InputError, match="no model of_recipes"):
        create_model("of_recipes")


@pytest.mark.parametrize("name", list_models("deit*"))
def test_images_are_read_as_the_authors_read_them(name):
    """main.py:174 of facebookresearch/deit, and --eval-crop-ratio 1.0 of each command in its
    README_revenge.md.
    """
    data = get_config(name).DATA
    expected = 1.0 if name.startswith("deit3") else 0.875
    assert expected == data.CROP_PCT
    assert name.endswith(f"_{data.IMAGE_SIZE}")
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
    with pytest.raises(
        InputError, match="no model vit_bas_patch16_224; did you mean vit_base_patch16_224"
    ):
        create_model("vit_bas_patch16_224")
    with pytest.raises(
        InputError, match="unknown key MODEL.NUM_CLASES; did you mean MODEL.NUM_CLASSES"
    ):
        create_model("vit_tiny_patch16_224", num_clases=3)


def test_models_of_segmentation_are_listed_by_their_task():
    names = list_models(task="segmentation")
    assert {"segformer_b0_ade20k", "upernet_swin_tiny_ade20k", "segformer_shapes"} < set(names)
    assert set(names).isdisjoint(list_models())
    assert list_models("SegFormer_b*_ade20k", task="segmentation") == [
        f"segformer_b{number}_ade20k" for number in range(6)
    ]
    with pytest.raises(InputError, match="task is 'pixels', expected classification or segment"):
        list_models(task="pixels")


def test_models_of_segmentation_are_created_by_name():
    model = create_model("segformer_b0_ade20k", num_classes=3)
    model.eval()
    assert list(model(paddle.rand([1, 3, 64, 32])).shape) == [1, 3, 64, 32]
    with pytest.raises(InputError, match="no model segformer_b9_ade20k; did you mean segformer_b"):
        create_model("segformer_b9_ade20k")
    with pytest.raises(InputError, match="timm has no weights of segformer_b0_ade20k"):
        create_model("segformer_b0_ade20k", pretrained=True)
