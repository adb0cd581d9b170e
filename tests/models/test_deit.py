"""DeiT's and DeiT-III's networks and flows, as facebookresearch/deit has them (models.py,
models_v2.py, main.py).
"""

import json

import numpy as np
import paddle
import pytest
from support.document_commands import REGIONS, write_data
from support.small_models import SMALL_DEIT_OPTIONS

from config import get_config, shipped_configs
from models import build_model
from weights import load_weights, save_weights

FILES = [file.stem for file in shipped_configs() if file.stem.startswith("deit")]
NAMES = [name for name in FILES if get_config(name).MODEL.NAME.startswith("deit")]
DEIT3 = [name for name in NAMES if name.startswith("deit3")]
SHARED = {"deit", "deit3", "deit3_finetune", "deit3_21k", "deit3_21k_finetune", "deit_transfer"}


def test_every_file_but_the_shared_ones_has_a_model():
    assert set(FILES) - set(NAMES) == SHARED
    assert (len(NAMES), len(DEIT3)) == (30, 19)


@pytest.mark.parametrize("name", NAMES)
def test_drop_path_layer_scale_and_positions_are_the_authors(name):
    """DeiT-III: models_v2.py:200, 182 and 198; DeiT: timm 0.3.2's, linear, without scales, of all
    tokens.
    """
    config = get_config(
        name, [*SMALL_DEIT_OPTIONS, "TRAIN.DISTILLATION_TYPE", "null", "MODEL.DEPTH", "5"]
    )
    paddle.seed(0)
    model = build_model(config)
    shares = [1, 1, 1, 1, 1] if name in DEIT3 else [0, 0.25, 0.5, 0.75, 1]
    for share, block in zip(shares, model.blocks, strict=True):
        found = [block.drop_path1.drop_prob, block.drop_path2.drop_prob]
        assert found == pytest.approx([share * config.MODEL.DROPPATH] * 2)
        scales = [
            scale.gamma.numpy() for scale in (block.ls1, block.ls2) if hasattr(scale, "gamma")
        ]
        assert len(scales) == (2 if name in DEIT3 else 0)
        assert all((scale == np.float32(1e-4)).all() for scale in scales)
    assert 0.012 < float(model.cls_token.std()) < 0.028  # models_v2.py:217
    tokens = 0 if name in DEIT3 else 1 + config.MODEL.DISTILLED
    assert model.pos_embed.shape[1] == model.patch_embed.num_patches + tokens


@pytest.mark.parametrize(
    ("first", "size", "second", "grids"),
    [
        ("deit3_large_patch16_224", 192, "deit3_finetune_large", "12 x 12 to 14 x 14"),
        ("deit3_small_patch16_224", 224, "deit3_small_patch16_384", "14 x 14 to 24 x 24"),
        ("deit3_finetune_base", 224, "deit3_base_patch16_384", "14 x 14 to 24 x 24"),
        ("deit3_finetune_large", 224, "deit3_large_patch16_384", "14 x 14 to 24 x 24"),
        ("deit3_21k_huge", 126, "deit3_21k_finetune_huge", "9 x 9 to 16 x 16"),
        ("deit3_21k_base", 224, "deit3_21k_finetune_base", None),
        ("deit_base_patch16_224", 224, "deit_transfer_inat", None),
    ],
)
def test_a_second_step_takes_the_weights_of_the_first(tmp_path, first, size, second, grids):
    """A classifier of other classes starts afresh (main.py:283)."""
    classes = "12" if "21k" in second or "transfer" in second else "10"
    small = [*SMALL_DEIT_OPTIONS, "MODEL.DEPTH", "1"]
    config = get_config(first, [*small, "MODEL.NUM_CLASSES", classes, "DATA.IMAGE_SIZE", str(size)])
    save_weights(build_model(config), tmp_path / "model.safetensors")
    report = load_weights(build_model(get_config(second, small)), tmp_path, strict=False)
    assert report.resized == ([f"pos_embed resized from {grids}"] if grids else [])
    assert sorted(report.fresh) == (["head.bias", "head.weight"] if classes == "12" else [])


def test_a_folder_of_21k_then_imagenet_1k(tmp_path, program):
    write_data(tmp_path / "data")
    common = [
        "-batch_size=8",
        "-o",
        *SMALL_DEIT_OPTIONS[:6],
        "MODEL.DEPTH",
        "1",
        "DATA.IMAGE_SIZE",
        "32",
        "DATA.NUM_WORKERS",
        "0",
    ]
    common += ["TRAIN.NUM_EPOCHS", "1", "TRAIN.WARMUP_EPOCHS", "0"]
    first = ["-cfg=deit3_21k_small", "-data_path=data/flowers", "-output=first"]
    second = ["-cfg=deit3_21k_finetune_small", "-data_path=data/imagenet", "-output=second"]
    for flags in (first, [*second, "-pretrained=first/checkpoints/best"]):
        status, printed, errors = program("main_single_gpu.py", *flags, *common)
        assert status == 0, errors
    assert "classifier initialised randomly: 4 classes in the file, 1000 in the model" in printed
    assert json.loads((tmp_path / "first" / "classes.json").read_text()) == REGIONS
    results = [
        json.loads((tmp_path / run / "result.json").read_text()) for run in ("first", "second")
    ]
    assert [result["config"]["MODEL"]["NUM_CLASSES"] for result in results] == [4, 1000]
    assert [result["num_samples"] for result in results] == [10, 11]
    assert [result["config"]["TRAIN"]["CROP"] for result in results] == ["simple", "simple"]
