"""PaddleViT's YAML files for segmentation mean here what they mean there.

The expected values follow from the code of BR-IDL/PaddleViT's semantic_segmentation (5ac7d89). The
files are small ones with the keys of its own (golden/paddlevit_segmentation.py).
"""

import json

import numpy as np
import paddle
import pytest
from golden.paddlevit_segmentation import FILES
from PIL import Image
from support.training_runs import work

from config import get_config
from datasets import get_datasets
from errors import InputError
from models import build_model
from settings.configuration import leaves
from training.optim import build_schedule

# What each file becomes, in this toolkit's keys.
MODELS = {
    "setr_mla": {
        "MODEL.TYPE": "ViT",
        "MODEL.CLASS_TOKEN": False,
        "MODEL.FINAL_NORM": False,
        "MODEL.EMBED_DIM": 24,
        "MODEL.DEPTH": 4,
        "MODEL.NUM_HEADS": 3,
        "HEAD.NAME": "setr_mla",
        "HEAD.INDICES": [0, 1, 2, 3],
        "HEAD.DECODER_CHANNELS": 256,
        "HEAD.MLA_CHANNELS": 16,
        "HEAD.AUXILIARY": True,
        "TRAIN.HEAD_LR": 10.0,
    },
    "setr_pup": {"HEAD.NAME": "setr_pup", "HEAD.AUXILIARY": True, "TRAIN.HEAD_LR": 10.0},
    "setr_naive": {"HEAD.NAME": "setr_naive", "MODEL.CLASS_TOKEN": False},
    "upernet_swin": {
        "MODEL.TYPE": "Swin",
        "MODEL.EMBED_DIM": 12,
        "MODEL.STAGE_DEPTHS": [2, 2, 2, 1],
        "MODEL.NUM_HEADS": [1, 2, 3, 6],
        "MODEL.WINDOW_SIZE": 7,
        "MODEL.DROPPATH": 0.1,
        "MODEL.PRETRAINED": None,
        "HEAD.NAME": "upernet",
        "HEAD.PYRAMID_CHANNELS": 16,
        "HEAD.POOL_SCALES": [1, 2, 3, 6],
        "HEAD.AUXILIARY": True,
        # Its decoder has the rate of the encoder.
        "TRAIN.HEAD_LR": 1.0,
    },
    "upernet_cswin": {
        "MODEL.TYPE": "CSwin",
        "MODEL.EMBED_DIM": 16,
        "MODEL.STAGE_DEPTHS": [1, 1, 2, 1],
        "MODEL.SPLIT_SIZES": [3, 2, 3, 3],
        "MODEL.NUM_HEADS": [2, 4, 4, 8],
        "MODEL.PAD_TOKENS": True,
        "MODEL.DROPPATH": 0.1,
        "HEAD.NAME": "upernet",
        "HEAD.PYRAMID_CHANNELS": 16,
    },
    "upernet_focal": {
        "MODEL.TYPE": "Focal",
        "MODEL.EMBED_DIM": 12,
        "MODEL.WINDOW_SIZE": 6,
        "MODEL.EXPAND_SIZES": [3, 2, 2, 1],
        "MODEL.FOCAL_WINDOWS": [5, 3, 0, 1],
        "MODEL.CONV_EMBED": True,
        "HEAD.NAME": "upernet",
    },
    "segmenter": {
        "MODEL.TYPE": "ViT",
        "MODEL.CLASS_TOKEN": True,
        "MODEL.FINAL_NORM": True,
        "MODEL.DISTILLED": False,
        "HEAD.NAME": "segmenter",
        "HEAD.INDICES": [3],
        "HEAD.MASK_LAYERS": 2,
        "HEAD.MASK_DROPOUT": 0.0,
        "TRAIN.HEAD_LR": 10.0,
    },
    "segmenter_linear": {"HEAD.NAME": "linear", "HEAD.BATCH_NORM": False, "HEAD.DROPOUT": 0.0},
    "segmenter_deit": {"HEAD.NAME": "segmenter", "MODEL.DISTILLED": True},
    "segmenter_deit_linear": {"HEAD.NAME": "linear", "MODEL.DISTILLED": True},
    "dpt": {
        "MODEL.CLASS_TOKEN": True,
        "MODEL.FINAL_NORM": False,
        "HEAD.NAME": "dpt",
        "HEAD.READOUT": "project",
        "HEAD.NECK_CHANNELS": [8, 16, 24, 32],
        "HEAD.FUSION_CHANNELS": 16,
        "HEAD.FUSION_BATCH_NORM": True,
        "HEAD.AUXILIARY": False,
        "TRAIN.HEAD_LR": 1.0,
    },
    "segformer": {
        "MODEL.TYPE": "PVTv2",
        "MODEL.EMBED_DIMS": [8, 16, 40, 64],
        "MODEL.STAGE_DEPTHS": [2, 1, 1, 1],
        "MODEL.NUM_HEADS": [1, 2, 5, 8],
        "MODEL.SR_RATIO": [8, 4, 2, 1],
        "MODEL.MLP_RATIO": 4,
        "MODEL.NORM_EPS": 1e-5,
        "MODEL.DROPPATH": 0.1,
        "HEAD.NAME": "segformer",
        "HEAD.FUSED_CHANNELS": 16,
        "HEAD.MAP_BATCH_NORMS": True,
        "TRAIN.HEAD_LR": 1.0,
    },
    "topformer": {
        "MODEL.TYPE": "TopFormer",
        "MODEL.STAGE_DEPTHS": [3, 2, 2, 2],
        "MODEL.EMBED_DIMS": [8, 8, 16, 24],
        "MODEL.STEM_DIM": 16,
        "MODEL.KERNEL_SIZE": [3, 3, 3, 5, 5, 3, 3, 5, 5],
        "MODEL.EXPAND_RATIO": [1, 4, 3, 3, 3, 3, 3, 6, 6],
        "MODEL.DEPTH": 2,
        "MODEL.NUM_HEADS": 4,
        "MODEL.KEY_DIM": 8,
        "MODEL.ATTN_RATIO": 2.0,
        "MODEL.MLP_RATIO": 2.0,
        "MODEL.POOL_STRIDE": 2,
        "HEAD.NAME": "topformer",
        "HEAD.INJECTED_CHANNELS": 16,
        "HEAD.DEPTHWISE_FUSION": True,
        "HEAD.GATED_TWICE": True,
        "TRAIN.HEAD_LR": 1.0,
    },
    "trans2seg": {
        "MODEL.TYPE": "ResNet",
        "MODEL.DEPTH": 50,
        "MODEL.STEM_TYPE": "deep",
        "MODEL.STEM_WIDTH": 64,
        "MODEL.OUTPUT_STRIDE": 16,
        "HEAD.NAME": "trans2seg",
        "HEAD.TRANSFORMER_CHANNELS": 24,
        "HEAD.TRANSFORMER_DEPTH": 2,
        "HEAD.TRANSFORMER_HEADS": 3,
        "HEAD.TRANSFORMER_MLP_RATIO": 3.0,
        "HEAD.CLASS_CHANNELS": 8,
        "TRAIN.HEAD_LR": 1.0,
    },
}
# Of all files.
COMMON = {
    "TASK": "segmentation",
    "MODEL.NUM_CLASSES": 7,
    "DATA.DATASET": "ade20k",
    "DATA.DATA_PATH": "/dataset/ADEChallengeData2016",
    "DATA.BATCH_SIZE": 2,
    "DATA.NUM_WORKERS": 0,
    "DATA.CROP_MODE": "short",
    "DATA.EVAL_SIZE": None,
    "DATA.INTERPOLATION": "bilinear",
    "METHOD.AUX_WEIGHT": 0.4,
    "TRAIN.CROP": "scale_jitter",
    "TRAIN.CROP_BASE": "own",
    "TRAIN.CROP_SCALE": [0.5, 2.0],
    "TRAIN.HFLIP": 0.5,
    "TRAIN.PHOTOMETRIC": True,
    "TRAIN.NUM_EPOCHS": 16,
    "TRAIN.WARMUP_EPOCHS": 0.0,
    "TRAIN.LR_SCHEDULER.NAME": "poly",
    "TRAIN.LR_SCHEDULER.POWER": 0.9,
    "TRAIN.BASE_LR": 0.001,
    "TRAIN.END_LR": 1e-4,
    "TRAIN.OPTIMIZER.NAME": "SGD",
    "TRAIN.OPTIMIZER.MOMENTUM": 0.9,
    "TRAIN.OPTIMIZER.NESTEROV": False,
    "TRAIN.WEIGHT_DECAY": 0.0,
    "TRAIN.GRAD_CLIP": None,
    "SAVE": "./output",
    "KEEP_LAST": 10,
    "SAVE_STEPS": 1000,
    "REPORT_FREQ": 50,
}


@pytest.fixture
def read(tmp_path):
    """Returns a function that reads a file with some of its lines replaced."""

    def read(name, *changes):
        text = FILES[name]
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        file = tmp_path / "theirs.yaml"
        file.write_text(text)
        return get_config(file)

    return read


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_a_network_here(name, read):
    config = read(name)
    values = dict(leaves(config))
    expected = COMMON | MODELS[name]
    assert {key: values[key] for key in expected} == expected
    assert values["DATA.IMAGE_SIZE"] == values["HEAD.STRIDE"]
    assert values["DATA.IMAGENET_MEAN"] == pytest.approx([0.485, 0.456, 0.406], abs=1e-6)
    assert values["DATA.IMAGENET_STD"] == pytest.approx([0.229, 0.224, 0.225], abs=1e-6)
    assert "with the defaults of configs/paddlevit/segmentation.yaml" in config.notes[0]
    with paddle.LazyGuard():
        build_model(config)


def test_keys_that_its_code_does_not_read_are_named(read):
    [note, _] = read("upernet_swin").notes
    assert note.endswith(
        "without effect in PaddleViT, and ignored: DATA.BATCH_SIZE_VAL, MODEL.TRANS.HIDDEN_SIZE,"
        " MODEL.TRANS.PATCH_NORM, MODEL.UPERHEAD.DROP_RATIO, MODEL.UPERHEAD.IN_INDEX,"
        " TRAIN.DECODER_LR_COEF, VAL.MULTI_SCALES_VAL"
    )
    changed = ("NAME: 'DPT'", "NAME: 'DPT'\n    SEGMENTER: {NUM_LAYERS: 5}\n    NUM_CLASSES: 150")
    [note, _] = read("dpt", changed).notes
    assert "MODEL.NUM_CLASSES, MODEL.SEGMENTER.NUM_LAYERS" in note


def test_windows_and_sizes_of_an_evaluation(read):
    """Windows and strides are (width, height) there, sizes of images (height, width)."""
    size = ("CROP_SIZE: (64,64)", "CROP_SIZE: (64,96)")
    window = ("CROP_SIZE: [64,64]", "CROP_SIZE: [96,64]")
    stride = ("STRIDE_SIZE: [64,64]", "STRIDE_SIZE: [48,32]")
    config = read("segmenter", size, window, stride)
    found = config.DATA.IMAGE_SIZE, config.HEAD.STRIDE
    assert found == ([64, 96], [32, 48])

    base = "IMAGE_BASE_SIZE: 64"
    for changed, mode, evaluated in (
        ("IMAGE_BASE_SIZE: 80", "short", 80),
        ("IMAGE_BASE_SIZE: [80, 96]", "squash", [80, 96]),
        ("IMAGE_BASE_SIZE: [64, 64]", "squash", None),
        ("IMAGE_BASE_SIZE: 80\n    KEEP_ORI_SIZE: True", "own", None),
        ("IMAGE_BASE_SIZE: 64\n    SIZE_DIVISOR: 32", "short", None),
    ):
        config = read("segmenter", (base, changed))
        assert (mode, evaluated) == (config.DATA.CROP_MODE, config.DATA.EVAL_SIZE)
    config = read("segmenter", (base, f"{base}\n    IS_SLIDE: False"))
    assert config.HEAD.STRIDE is None
    levels = f"{base}\n    MEAN: [127.5, 127.5, 127.5]\n    STD: [127.5, 127.5, 51]"
    config = read("segmenter", (base, levels))
    found = config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD
    assert found == ([0.5, 0.5, 0.5], [0.5, 0.5, 0.2])


@pytest.mark.parametrize(
    ("dataset", "steps", "name", "epochs"),
    [
        ("Cityscapes", 40_000, "cityscapes", 27),
        ("PascalContext", 80_000, "pascal_context", 33),
        ("Vaihingen", 20_000, "vaihingen", 117),
        ("ADE20K", 2_000, "ade20k", 1),
        ("Trans10kV2", 16_000, "trans10k", 7),
    ],
)
def test_iterations_become_epochs_of_the_dataset(dataset, steps, name, epochs, read):
    changes = ("'ADE20K'", f"'{dataset}'"), ("ITERS: 160000", f"ITERS: {steps}")
    config = read("setr_pup", *changes)
    assert (name, epochs) == (config.DATA.DATASET, config.TRAIN.NUM_EPOCHS)
    crop = config.TRAIN.CROP
    assert crop == ("squash" if name == "trans10k" else "scale_jitter")
    assert "n processes train n times as long" in config.notes[-1]
    assert ("swaps height and width" in config.notes[-1]) == (name != "trans10k")


def test_rates_are_those_of_its_schedulers(read):
    """PolynomialDecay of Paddle, and its own WarmupPolyLR, over the steps of NUM_EPOCHS."""
    config = read("upernet_swin", ("BASE_LR: 0.001", "BASE_LR: 0.00006"))
    schedule = build_schedule(config, 1000, 2)
    theirs = paddle.optimizer.lr.PolynomialDecay(6e-5, 16_000, end_lr=1e-4, power=0.9)
    expected = []
    for _ in range(300):
        expected.append(theirs())
        theirs.step()
    # The file's END_LR is above its BASE_LR.
    assert expected[-1] > expected[0]
    np.testing.assert_allclose([schedule(step) for step in range(300)], expected, rtol=1e-9)

    warm = "NAME: 'WarmupPolyLR'\n        WARM_UP_STEPS: 1500\n        POWER: 1.0"
    changes = [("NAME: 'PolynomialDecay'", warm), ("END_LR: 1e-4", "END_LR: 0.0")]
    config = read("upernet_swin", *changes, ("BATCH_SIZE: 2", "BATCH_SIZE: 32"))
    found = config.TRAIN.WARMUP_EPOCHS, config.TRAIN.LR_SCHEDULER.POWER
    assert found == pytest.approx((1500 * 32 / 20_210, 1.0))
    steps_per_epoch = 20_210 / 32
    total = config.TRAIN.NUM_EPOCHS * steps_per_epoch
    schedule = build_schedule(config, steps_per_epoch, 32)
    for step in (0, 1, 750, 1499, 1500, 1501, 5000, 100_000):
        rate = step / 1500 if step < 1500 else 1 - (step - 1500) / (total - 1500)
        assert schedule(step) == pytest.approx(0.001 * rate, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ("{NAME: SGD, MOMENTUM: 0.8, GRAD_CLIP: 1.0}", ("SGD", 0.8, 1e-8, [0.9, 0.999], 1.0)),
        (
            "{NAME: AdamW, BETAS: [0.8, 0.99], EPS: 1e-6, GRAD_CLIP: 2.0, WEIGHT_DECAY: 1e-2}",
            ("AdamW", 0.9, 1e-6, [0.8, 0.99], 2.0),
        ),
        # Its Adam takes neither the bound nor BETAS.
        (
            "{NAME: ADAM, BETAS: [0.8, 0.99], GRAD_CLIP: 1.0}",
            ("Adam", 0.9, 1e-8, [0.9, 0.999], None),
        ),
    ],
)
def test_each_optimizer_has_its_keys(theirs, expected, read):
    changed = ("    LR_SCHEDULER:", f"    OPTIMIZER: {theirs}\n    LR_SCHEDULER:")
    train = read("segmenter", changed).TRAIN
    optimizer = train.OPTIMIZER
    assert (
        optimizer.NAME,
        optimizer.MOMENTUM,
        optimizer.EPS,
        list(optimizer.BETAS),
        train.GRAD_CLIP,
    ) == expected
    decay = train.WEIGHT_DECAY
    assert decay == (0.01 if "1e-2" in theirs else 0.0)


# Of UPerNet's file: a line, what replaces it, and the error.
REFUSED = [
    (
        "'SwinTransformer'",
        "'ResNet'",
        "MODEL.ENCODER.TYPE is 'ResNet', expected SwinTransformer or CSwinTransformer or FocalTransformer,",
    ),
    ("'SwinTransformer'", "[Swin]", "MODEL.ENCODER.TYPE takes a word in PaddleViT's files, found"),
    (
        "DECODER_TYPE: 'UperHead'",
        "NO_SUCH: 1",
        "PaddleViT's files for semantic segmentation have no key 'MODEL.NO_SUCH'",
    ),
    (
        "DECODER_TYPE: 'UperHead'",
        "DECODER_TIPE: 'UperHead'",
        "have no key 'MODEL.DECODER_TIPE'; did you mean MODEL.DECODER_TYPE?",
    ),
    ("AUXIHEAD: True", "LOSS: False", "MODEL.AUX.LOSS is False, expected True"),
    ("AUXIHEAD: True", "AUXIHEAD: False", "MODEL.AUX.AUXIHEAD is False, expected True"),
    (
        "NAME: 'UperNet_Swin'",
        "NAME: 'MaskFormer'",
        "MODEL.NAME is 'MaskFormer', expected a name with SETR, UperNet",
    ),
    ("'ADE20K'", "'COCO'", "DATA.DATASET is 'COCO', expected one of ADE20K, Cityscapes, Pascal"),
    (
        "NAME: 'PolynomialDecay'",
        "NAME: 'WarmupMultiStepLR'",
        "TRAIN.LR_SCHEDULER.NAME is 'WarmupMultiStepLR', expected PolynomialDecay or WarmupPolyLR",
    ),
    (
        "ITERS: 160000",
        "LOSS: MultiCrossEntropyLoss",
        "TRAIN.LOSS is 'MultiCrossEntropyLoss', expected MixSoftmaxCrossEntropyLoss or CrossEntropyLoss",
    ),
    (
        "CROP_SIZE: [128,128]",
        "CROP_SIZE: [96,96]",
        "VAL.CROP_SIZE is [96, 96], expected [128, 128], the windows of DATA.CROP_SIZE",
    ),
    (
        "CROP_SIZE: (128,128)",
        "CROP_SIZE: (128,0)",
        "DATA.CROP_SIZE is [128, 0], expected two numbers of pixels",
    ),
    (
        "IMAGE_BASE_SIZE: 128",
        "IMAGE_BASE_SIZE: None",
        "VAL.IMAGE_BASE_SIZE is None, expected the pixels of the short side, or of both sides",
    ),
    (
        "DECODER_LR_COEF: 10.0",
        "OPTIMIZER: {NAME: RMSProp}",
        "TRAIN.OPTIMIZER.NAME is 'RMSProp', expected SGD, Adam or AdamW",
    ),
    (
        "IN_CHANNELS: [12, 24, 48, 96]",
        "IN_CHANNELS: [1, 2, 4, 8]",
        "MODEL.UPERHEAD.IN_CHANNELS is [1, 2, 4, 8], expected [12, 24, 48, 96], which",
    ),
]


@pytest.mark.parametrize(("line", "changed", "expected"), REFUSED)
def test_what_is_not_here_is_one_line(line, changed, expected, read):
    with pytest.raises(InputError) as error:
        read("upernet_swin", (line, changed))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "changed", "expected"),
    [
        ("[[3, 1, 16, 1]", "[[3, 1, 16]", "MODEL.TRANS.CFGS is [[3, 1, 16], [3, 4, 8, 2], "),
        (
            "CFGS: [[3, 1, 16, 1]",
            "CFGS: [[3, 1, 16, 2]",
            "expected stages that end with the blocks",
        ),
        (
            "[2, 4, 6, 8]",
            "[2, a, 6, 8]",
            "MODEL.TRANS.EMBED_OUT_INDICE is [2, 'a', 6, 8], expected 4",
        ),
        ("[2, 4, 6, 8]", "[2, 4, 6, 7]", "which halve the size"),
        ("[None, 16, 16, 16]", "[None, 16, 8, 16]", "expected three times 16 after the first"),
        ("IS_DW: True", "IS_DW: 3", "MODEL.SIMPLE.IS_DW takes True or False in PaddleViT's files"),
    ],
)
def test_pyramids_that_are_not_here_are_one_line(line, changed, expected, read):
    with pytest.raises(InputError) as error:
        read("topformer", (line, changed))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_its_defaults_name_no_model():
    with pytest.raises(
        InputError, match="it only has PaddleViT's defaults, which don't name a model"
    ):
        get_config("paddlevit/segmentation.yaml")


def test_a_file_of_ones_own_is_told_whose_the_key_is(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("BASE: vit_digits\nVAL: {IS_SLIDE: True}\n")
    with pytest.raises(InputError, match="unknown key VAL.IS_SLIDE; it is PaddleViT's, for files"):
        get_config(file)


def write_ade20k(folder):
    """Writes photographs of noise and masks, in ADE20K's layout."""
    rng = np.random.default_rng(0)
    for part, count in (("training", 4), ("validation", 2)):
        for kind in ("images", "annotations"):
            (folder / kind / part).mkdir(parents=True)
        for index in range(count):
            picture = rng.integers(0, 256, (50 + index, 70, 3)).astype(np.uint8)
            Image.fromarray(picture).save(folder / "images" / part / f"{index}.jpg")
            mask = rng.integers(0, 151, (50 + index, 70)).astype(np.uint8)
            Image.fromarray(mask).save(folder / "annotations" / part / f"{index}.png")


@pytest.mark.long
def test_a_file_is_trained_and_evaluated(tmp_path):
    write_ade20k(tmp_path / "ade20k")
    text = FILES["segformer"].replace("NUM_CLASSES: 7", "NUM_CLASSES: 150")
    text = text.replace("/dataset/ADEChallengeData2016", str(tmp_path / "ade20k"))
    file = tmp_path / "theirs.yaml"
    # The windows are smaller than the images.
    file.write_text(text.replace("IMAGE_BASE_SIZE: 64", "IMAGE_BASE_SIZE: 80"))

    def run(*words):
        config = get_config(file, ["REPORT", "False", *words])
        work(*get_datasets(config))

    run("OUTPUT", str(tmp_path / "run"), "TRAIN.NUM_EPOCHS", "1")
    weights = tmp_path / "run" / "checkpoints" / "last"
    run("OUTPUT", str(tmp_path / "evaluated"), "EVAL", "True", "MODEL.PRETRAINED", str(weights))
    results = [
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "evaluated")
    ]
    trained, evaluated = ({key: result[key] for key in ("mIoU", "loss")} for result in results)
    assert evaluated == pytest.approx(trained, abs=1e-6)
    assert 0 < evaluated["loss"] < 10
