"""PaddleViT's YAML files mean here what they mean there; files of one's own aren't taken for
PaddleViT's.

The expected values are those of BR-IDL/PaddleViT's config.py files (5ac7d89, and the trees of
2021-12 and 2022-03).
"""

import numpy as np
import paddle
import pytest
from conftest import write_images
from support.paddlevit_families import FAMILIES, HALF, IMAGENET, RECIPE

from config import get_config
from errors import InputError
from models import build_model
from settings.configuration import WRITTEN_OUT, value_sources
from training.optim import build_optimizer, build_schedule, decayed_parameters


@pytest.fixture
def read(tmp_path):
    """Returns a function that writes a YAML file and reads it."""

    def read(text, *options):
        (tmp_path / "model.yaml").write_text(text)
        return get_config(tmp_path / "model.yaml", options)

    return read


def value(config, key):
    for part in key.split("."):
        config = config[part]
    return config


@pytest.mark.parametrize("model", FAMILIES)
def test_a_file_is_a_difference_to_its_familys_defaults(model, read):
    name, expected = FAMILIES[model]
    config = read(f"MODEL: {model if model[0] == '{' else f'{{{model}}}'}\n")
    assert {key: value(config, key) for key in expected} == expected
    assert (
        f"is read as PaddleViT's, with the defaults of configs/paddlevit/{name}.yaml"
        in config.notes[0]
    )
    with paddle.LazyGuard():
        # every key of MODEL is one that the architecture takes
        build_model(config, head_init_scale=1.0)


@pytest.mark.parametrize("kind", ["ViP"])
def test_a_key_of_2021_alone_tells_the_format(kind, read):
    """Its keys of MODEL are those of 2022."""
    config = read(f"MODEL: {{TYPE: {kind}}}\nTAG: default\n")
    assert f"with the defaults of configs/paddlevit/{kind.lower()}_2021.yaml" in config.notes[0]
    assert config.TRAIN.AUTO_AUGMENT == "original"
    with paddle.LazyGuard():
        build_model(config, head_init_scale=1.0)


NO_MODEL = {  # of files whose models aren't here
    "{TYPE: RepMLP, HEIGHTS: [28, 14, 7, 7]}": r"HEIGHTS is \[28, 14, 7, 7\], expected the places .*: \[56, 28, 14, 7\]",
    "{TYPE: RepMLP_ResNet, MIXER: {IMG_H: 256}}": r"IMG_H, IMG_W, H and W are \[256, 224, 7, 7\], expected IMAGE_SIZE",
    "{TYPE: RepMLP_ResNet, MIXER: {H: 14}}": "expected IMAGE_SIZE 224 twice, and equal H and W",
    "{TYPE: RepMLP, WIDTHS: 7}": r"WIDTHS takes a list",
    "{TYPE: ViP, MIXER: {SEGMENT_DIM: [32, 16, 16, 8]}}": r"expected the places along a side .*: \[32, 16, 16, 16\]",
    "{TYPE: TopFormer, CFGS: [[3, 1, 16, 2]]}": r"CFGS is \[\[3, 1, 16, 2\]\], expected stages that end with",
    "{TYPE: crossvit, DEPTH: [[1, 4, 0], [1, 5, 0]]}": r"DEPTH \[\[1, 4, 0\], \[1, 5, 0\]\], IMG_SIZE \[240, 224\]",
    "{TYPE: crossvit, DEPTH: [[1, 4, 1]]}": "expected sizes in pixels, and equal stages: blocks of both",
    "{TYPE: crossvit, IMG_SIZE: null}": "IMG_SIZE None, IMAGE_SIZE 224: expected sizes in pixels",
    "{TYPE: CvT, CLS_TOKEN: [True, False, True]}": r"CLS_TOKEN \[True, False, True\], .* a class token and drop path",
    "{TYPE: CvT, DROP_RATE: [0.0, 0.1]}": r"DROP_RATE \[0.0, 0.1\], .* expected NUM_STAGES 3 values each",
    "{TYPE: focal, FOCAL: {FOCAL_LEVELS: [3, 1, 1, 1]}}": r"FOCAL_LEVELS \[3, 1, 1, 1\]: expected the pool",
    "{TYPE: halo, ACT: relu, CHANNEL: [32, 64, 128, 256, 512]}": "expected a stem of 64 channels, and four stages",
    "{TYPE: halo}": "ACT is None, which PaddleViT doesn't support either; set relu or silu",
    "{TYPE: halo, ACT: relu, STAGE1_BLOCK: [attn, bottle, attn]}": r"STAGE1_BLOCK to 4 \[\['attn', 'bottle', 'attn'\]",
    "{TYPE: halo, ACT: relu, STAGE4_BLOCK: [attn, attn, attn], HIDDEN_CHANNEL: 512}": "HIDDEN_CHANNEL 512: expected",
    "{TYPE: halo, ACT: relu, STAGE4_BLOCK: [[attn]]}": "expected a stem of 64 channels",
}


@pytest.mark.parametrize("model", NO_MODEL)
def test_a_model_of_several_keys_that_is_not_here_is_refused(model, read):
    with pytest.raises(InputError, match=NO_MODEL[model]):
        read(f"MODEL: {model}\n")


def test_the_multi_scale_samplers_sizes_are_the_images_by_quarters(read):
    """The multiples of 32 below half, three quarters, ... of the images' sides
    (multi_scale_sampler.py:30-34).
    """
    for side, expected in (
        (256, [128, 192, 256, 320, 384]),
        (224, [96, 160, 224, 256, 320]),
        (64, [32, 64, 96]),
    ):
        config = read(
            f"DATA: {{IMAGE_SIZE: {side}}}\nMODEL: {{TYPE: MobileViT}}\nTRAIN: {{MULTI_SCALE_SAMPLER_DDP: True}}\n"
        )
        found = config.DATA.MULTI_SCALE
        assert found == expected
    with pytest.raises(
        InputError,
        match="MULTI_SCALE_SAMPLER_DDP is True, expected False, the only value that this toolkit supports",
    ):
        read("MODEL: {TYPE: MobileOne}\nTRAIN: {MULTI_SCALE_SAMPLER_DDP: True}\n")


def test_what_the_file_says_holds_over_its_familys_defaults(read):
    config = read(
        "MODEL: {TYPE: swin, DROPPATH: 0.4}\nTRAIN: {BASE_LR: 2e-4, GRAD_CLIP: None, OPTIMIZER: {EPS: 1e-6}}\n"
    )
    assert (config.MODEL.DROPPATH, config.TRAIN.BASE_LR, config.TRAIN.GRAD_CLIP) == (
        0.4,
        2e-4,
        None,
    )
    assert config.TRAIN.OPTIMIZER.EPS == 1e-6
    # PaddleViT's files may hold what does nothing
    assert value_sources(config)["TRAIN.BASE_LR"].level == WRITTEN_OUT


@pytest.mark.parametrize(
    ("train", "policy", "jitter"),
    [
        ("{RAND_AUGMENT_LAYERS: 3, RAND_AUGMENT_MAGNITUDE: 5}", "rand-m5-n3-mstd0.5-inc1", 0.0),
        ("{RAND_AUGMENT: False, AUTO_AUGMENT: True}", "original-mstd0.5", 0.0),
        ("{RAND_AUGMENT: True, AUTO_AUGMENT: True}", "rand-m9-n2-mstd0.5-inc1", 0.0),
        ("{RAND_AUGMENT: False, AUTO_AUGMENT: False, COLOR_JITTER: 0.3}", None, 0.3),
    ],
)
def test_the_first_policy_that_is_on_replaces_the_colour_jitter(train, policy, jitter, read):
    config = read(f"MODEL: {{TYPE: swin}}\nTRAIN: {train}\n")
    expected = {"TRAIN.AUTO_AUGMENT": policy, "TRAIN.COLOR_JITTER": jitter}
    assert {key: value(config, key) for key in expected} == expected


@pytest.mark.parametrize("name", ["cosine", "multi-step"])
def test_a_schedule_of_2021_without_warmup_falls_to_zero(name, read):
    config = read(
        f"MODEL: {{TYPE: swin}}\nTRAIN: {{END_LR: 0.1, LR_SCHEDULER: {{NAME: {name}}}}}\n"
    )
    assert (config.TRAIN.WARMUP_EPOCHS, config.TRAIN.END_LR) == (0, 0.0)


def test_the_teacher_is_a_file_of_weights(read):
    config = read(
        "MODEL: {TYPE: deit}\nTRAIN: {DISTILLATION_TYPE: soft, TEACHER_MODEL: ./teacher}\n"
    )
    assert config.MODEL.DISTILLED
    assert (config.TRAIN.TEACHER_MODEL, config.TRAIN.TEACHER_PATH) == (
        "regnety_160",
        "./teacher.pdparams",
    )
    config = read("MODEL: {TYPE: deit}\nTRAIN: {DISTILLATION_TYPE: none}\n")
    assert not config.MODEL.DISTILLED
    assert (
        config.TRAIN.DISTILLATION_TYPE,
        config.TRAIN.TEACHER_MODEL,
        config.TRAIN.TEACHER_PATH,
    ) == (None, None, None)


def test_one_classifier_may_serve_both_losses(read):
    config = read("MODEL: {TYPE: xcit}\nTRAIN: {DISTILLATION_TYPE: hard}\n")
    assert (config.TRAIN.DISTILLATION_TYPE, config.TRAIN.TEACHER_MODEL) == ("hard", "regnety_160")
    assert "DISTILLED" not in config.MODEL


def test_keys_that_paddlevit_doesnt_read_are_named_once(read):
    text = "MODEL: {TYPE: BEiT, DROPPATH: 0.2}\nTRAIN: {COLOR_JITTER: 0.2, MODEL_EMA_FORCE_CPU: True}\n"
    config = read(text, "EVAL", "True")
    assert [line.partition("; ")[2] for line in config.notes] == [
        "without effect in PaddleViT, and ignored: MODEL.DROPPATH, TRAIN.COLOR_JITTER, TRAIN.MODEL_EMA_FORCE_CPU"
    ]
    assert config.MODEL.DROPPATH == 0.0  # as PaddleViT builds it, whatever the file says


def test_training_tells_where_paddlevits_differs_until_its_way_is_chosen(read):
    told = read("MODEL: {TYPE: deit}\n").notes[1]
    for key in (
        "TRAIN.LR_SCHEDULER.PER_EPOCH True",
        "TRAIN.DECAY_ALL True",
        "TRAIN.MODEL_EMA_WARMUP False",
    ):
        assert key in told
    own_way = [
        "TRAIN.LR_SCHEDULER.PER_EPOCH",
        "True",
        "TRAIN.DECAY_ALL",
        "True",
        "TRAIN.MODEL_EMA_WARMUP",
        "False",
    ]
    assert read("MODEL: {TYPE: deit}\nTRAIN: {RAND_AUGMENT: False}\n", *own_way).notes[1:] == []
    assert len(read("MODEL: {TYPE: deit}\n", "EVAL", "True").notes) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "MODEL: {TYPE: swin, APE: True}",
            "MODEL.APE is True, expected False, the only value that this toolkit supports",
        ),
        (
            "MODEL: {TYPE: xcit, USE_POS: False}",
            "MODEL.USE_POS is False, expected True, the only value that this toolkit supports",
        ),
        (
            "MODEL: {TYPE: convnext, STEM_TYPE: overlap}",
            "MODEL.STEM_TYPE is overlap, expected patch, the only",
        ),
        (
            "MODEL: {TYPE: swin}\nTRAIN: {BASELR: 1}",
            "unknown key TRAIN.BASELR; did you mean TRAIN.BASE_LR",
        ),
        (
            "MODEL: {TYPE: swin}\nTRAIN: {BASE_LR: fast}",
            "model.yaml: TRAIN.BASE_LR takes a number in PaddleViT's files, found 'fast'; a file with BASE uses the keys",
        ),
        (
            "MODEL: {TYPE: MobileOne, NUM_BLOCKS: [2, 2, 8, 10, 1]}",
            "expected five numbers each: a stem of one block",
        ),
        (
            "MODEL: {TYPE: MobileOne, CHANNELS: [a, 1]}",
            r"CHANNELS \['a', 1\] x EXPANSIONS .*: expected five numbers each",
        ),
        # values of this toolkit's keys that have the same names there
        (
            "MODEL: {TYPE: swin}\nTRAIN: {RAND_AUGMENT: False, AUTO_AUGMENT: rand-m9-mstd0.5-inc1}",
            "TRAIN.AUTO_AUGMENT takes True or False in PaddleViT's files, found 'rand-m9-mstd0.5-inc1'",
        ),
        (
            "MODEL: {TYPE: swin, EMBED_DIM: [96]}",
            r"MODEL.EMBED_DIM takes a number in PaddleViT's files, found \[96\]",
        ),
        (
            "MODEL: {TYPE: pvtv2, EMBED_DIM: 32}",
            "MODEL.EMBED_DIM takes a list in PaddleViT's files, found 32",
        ),
        (
            "MODEL: {TYPE: deit}\nTRAIN: {TEACHER_MODEL: 5}",
            "TRAIN.TEACHER_MODEL takes a word in PaddleViT's files",
        ),
        (
            "MODEL: {TYPE: convmixer, CNN: {ACTIVATION: 5}}",
            "MODEL.CNN.ACTIVATION takes a word in PaddleViT's files",
        ),
        (
            "MODEL: {TYPE: swin}\nTRAIN: {OPTIMIZER: AdamW}",
            "TRAIN.OPTIMIZER is a section and needs keys",
        ),
        # a key of PaddleViT's where its keys aren't taken; what nobody has is named before it
        (
            "MODEL: {TYPE: swin}\nTRAIN: {RAND_AUGMENT: True, BASELR: 1}",
            "unknown key TRAIN.BASELR; did you mean",
        ),
        (
            "MODEL: {TYPE: swin}\nTRAIN: {RAND_AUGMENT: True, HFLIP: 1}",
            "swin has no TRAIN.HFLIP; choose the defaults",
        ),
        (
            "BASE: paddlevit/swin.yaml\nAUG: {MIXUP: 1}",
            "unknown key AUG.MIXUP; it is PaddleViT's, for files with its",
        ),
    ],
)
def test_what_cant_be_meant_is_one_line(text, message, read):
    with pytest.raises(InputError, match=message):
        read(text + "\n")


def test_a_file_of_maes_pretraining_is_the_task_of_that_name(read):
    decoder = "DECODER: {EMBED_DIM: 256, DEPTH: 1, NUM_HEADS: 4}"
    text = f"MODEL: {{TYPE: MAE, MAE_PRETRAIN: True, TRANS: {{MASK_RATIO: 0.6, {decoder}}}}}\n"
    config = read(text + "TRAIN: {NORMALIZE_TARGET: False}\n")
    method = config.METHOD
    decoder = (method.DECODER_WIDTH, method.DECODER_DEPTH, method.DECODER_HEADS)
    assert (config.TASK, config.MODEL.TYPE, decoder) == ("mae", "ViT", (256, 1, 4))
    assert (method.MASK_RATIO, method.NORM_TARGET) == (0.6, False)
    assert "no effect" not in " ".join(config.notes)
    # PaddleViT's defaults are those of a pre-training, too.
    method = read("MODEL: {TYPE: MAE, MAE_PRETRAIN: True}\n").METHOD
    decoder = (method.DECODER_WIDTH, method.DECODER_DEPTH, method.DECODER_HEADS)
    assert (method.MASK_RATIO, method.NORM_TARGET, decoder) == (0.75, True, (512, 8, 8))
    assert read("MODEL: {TYPE: MAE}\n").TASK == "classification"


DINO = """
DATA: {IMAGE_SIZE: 224, CROP_PCT: 0.875, GLOBAL_CROPS_SCALE: [0.25, 1.0], LOCAL_CROPS_SCALE: [0.05, 0.25], LOCAL_CROPS_NUMBER: 10}
MODEL:
  TYPE: ViT
  NAME: vit_small_patch16_224
  OUT_DIM: 65536
  NORM_LAST_LAYER: False
  DROPPATH: 0.1
  TRANS: {PATCH_SIZE: 16, EMBED_DIM: 384, MLP_RATIO: 4.0, DEPTH: 12, NUM_HEADS: 6, QKV_BIAS: true}
TRAIN:
  {WARMUP_TEACHER_TEMP: 0.04, TEACHER_TEMP: 0.07, WARMUP_TEACHER_TEMP_EPOCHS: 30, WEIGHT_DECAY: 0.04,
   WEIGHT_DECAY_END: 0.4, GRAD_CLIP: None, NUM_EPOCHS: 800, FREEZE_LAST_LAYER: 1, BASE_LR: 0.0005,
   WARMUP_EPOCHS: 10, END_LR: 1e-5, WARMUP_START_LR: 0.0, ACCUM_ITER: 1, MOMENTUM_TEACHER: 0.996,
   USE_BN_IN_HEAD: False}
"""


def test_a_file_of_dinos_pretraining_is_the_task_of_that_name(read):
    """The values are those of self_supervised_learning/dino/configs/vit_small_patch16_224.yaml."""
    config = read(DINO)
    expected = {
        "TASK": "dino",
        "DATA.BATCH_SIZE": 16,
        "DATA.IMAGENET_MEAN": IMAGENET,
        "MODEL.TYPE": "ViT",
        "MODEL.NUM_CLASSES": 0,
        "MODEL.EMBED_DIM": 384,
        "MODEL.DROPPATH": 0.1,
        "METHOD.PROTOTYPES": 65536,
        "METHOD.NORM_LAST_LAYER": False,
        "METHOD.HEAD_BATCH_NORM": False,
        "METHOD.FREEZE_LAST_LAYER": 1,
        "METHOD.MOMENTUM": 0.996,
        "METHOD.TEACHER_TEMP": 0.07,
        "METHOD.WARMUP_TEACHER_TEMP": 0.04,
        "METHOD.WARMUP_TEACHER_TEMP_EPOCHS": 30,
        "METHOD.GLOBAL_SCALE": [0.25, 1.0],
        "METHOD.LOCAL_SCALE": [0.05, 0.25],
        "METHOD.LOCAL_VIEWS": 10,
        "METHOD.LOCAL_SIZE": 96,
        "TRAIN.WEIGHT_DECAY": 0.04,
        "TRAIN.WEIGHT_DECAY_END": 0.4,
        "TRAIN.GRAD_CLIP": None,
        "TRAIN.BASE_LR": 5e-4,
        "TRAIN.LINEAR_SCALED_LR": 256,
        "TRAIN.END_LR": 1e-5,
        "TRAIN.OPTIMIZER.NAME": "AdamW",
    }
    assert {key: value(config, key) for key in expected} == expected
    [note] = config.notes
    assert note.endswith("with the defaults of configs/paddlevit/dino.yaml")
    with paddle.LazyGuard():
        build_model(config)
    # What a file doesn't set is PaddleViT's default.
    config = read("DATA: {LOCAL_CROPS_NUMBER: 6}\nMODEL: {TYPE: dino_vit}\n")
    assert (config.METHOD.LOCAL_VIEWS, config.METHOD.NORM_LAST_LAYER) == (6, True)
    assert (config.METHOD.FREEZE_LAST_LAYER, config.TRAIN.GRAD_CLIP) == (3, 0.3)
    config = read("DATA: {LOCAL_CROPS_NUMBER: 6}\nMODEL: {TYPE: ViT}\nTRAIN: {SMOOTHING: 0.2}\n")
    assert config.notes[0].endswith("without effect in PaddleViT, and ignored: TRAIN.SMOOTHING")


def test_a_file_of_a_vit_is_none_of_dinos(read):
    """Both have the same MODEL.TYPE."""
    for text in (
        "MODEL: {TYPE: ViT}",
        "MODEL: {TYPE: ViT, TRANS: {PATCH_SIZE: 32}}",
        "BASE: ''\nMODEL: {TYPE: ViT}",
    ):
        assert read(text + "\n").TASK == "classification"
    with pytest.raises(InputError, match=r"OUT_DIM"):
        read("MODEL: {TYPE: ViT, OUT_DIM: 8}\n")
    assert read("BASE: paddlevit/dino.yaml\nMODEL: {NUM_HEADS: 6}\n").METHOD.LOCAL_VIEWS == 10


def test_sections_may_be_empty_as_paddlevits_are(read):
    for text in (
        "MODEL: {TYPE: swin, TRANS: }\nAUG:\nTRAIN:\n",
        "MODEL: {TYPE: mae, TRANS: {ENCODER: , DECODER: }}\n",
    ):
        assert "is read as PaddleViT's" in read(text).notes[0]


def test_a_teacher_without_weights_is_no_file(read):
    config = read("MODEL: {TYPE: deit}\nTRAIN: {DISTILLATION_TYPE: hard, TEACHER_MODEL: null}\n")
    assert (config.TRAIN.TEACHER_MODEL, config.TRAIN.TEACHER_PATH) == ("regnety_160", None)


# ------------------------------------------------------- files of one's own


def test_a_file_that_names_a_base_is_ones_own(read):
    for base in ("''", "['']", "[]"):
        config = read(f"BASE: {base}\nMODEL: {{TYPE: Swin}}\nDATA: {{CROP_PCT: 1.0}}\n")
        assert (config.DATA.IMAGENET_MEAN, config.TRAIN.MIXUP_ALPHA, config.notes) == (
            HALF,
            0.0,
            [],
        )


@pytest.mark.parametrize(
    ("model", "own"),
    [("{TYPE: Swin}", "SAVE_MINUTES: 5"), ("{TYPE: vit, TRANS: {DEPTH: 3}}", "SAVE_MINUTES: 5")],
)
def test_a_file_that_may_be_meant_in_two_ways_is_refused(model, own, read):
    with pytest.raises(
        InputError,
        match="it has no BASE, like PaddleViT's files, but .* has no SAVE_MINUTES; choose the",
    ):
        read(f"MODEL: {model}\n{own}\n")
    assert read(f"BASE: ''\nMODEL: {model}\n{own}\n").DATA.IMAGENET_MEAN == HALF
    assert read("BASE: paddlevit/swin.yaml\nSAVE_MINUTES: 5\n").DATA.IMAGENET_MEAN == IMAGENET


def test_a_vit_with_keys_of_this_toolkit_is_ones_own(read):
    """Both readings give it the same defaults."""
    config = read("MODEL: {TYPE: ViT}\nDATA: {INTERPOLATION: bilinear}\n")
    assert (config.DATA.NUM_WORKERS, config.DATA.IMAGENET_MEAN, config.notes) == (2, HALF, [])


@pytest.mark.parametrize("model", ["{NAME: mine}", "{TYPE: ResNet}"])
def test_a_type_that_paddlevit_lacks_makes_a_file_ones_own(model, read):
    config = read(f"MODEL: {model}\n")
    assert (config.DATA.NUM_WORKERS, config.notes) == (2, [])


def test_a_file_of_ones_own_may_be_based_on_a_family(read):
    config = read(
        "BASE: paddlevit/swin.yaml\nDATA: {INTERPOLATION: bilinear}\nTRAIN: {BASE_LR: 1e-4}\n"
    )
    assert config.MODEL.TYPE == "Swin"
    assert {key: value(config, key) for key in RECIPE} == RECIPE
    assert (config.DATA.INTERPOLATION, config.DATA.CROP_PCT, config.TRAIN.BASE_LR) == (
        "bilinear",
        0.9,
        1e-4,
    )
    assert "PaddleViT itself applies weight decay to biases" in config.notes[0]


# ------------------------------------------------ PaddleViT's way of training


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_rate_of_an_epoch_is_that_of_paddlevits_scheduler(warmup):
    options = ["TRAIN.NUM_EPOCHS", "10", "TRAIN.WARMUP_EPOCHS", str(warmup), "TRAIN.BASE_LR", "0.5"]
    options += ["TRAIN.END_LR", "0.002", "TRAIN.LR_SCHEDULER.PER_EPOCH", "True"]
    options += ["TRAIN.WARMUP_START_LR", "0.01"] if warmup else []
    schedule = build_schedule(get_config(None, options), 7, 1)
    lr = paddle.optimizer.lr
    theirs = lr.CosineAnnealingDecay(
        0.5, T_max=10 - warmup, eta_min=0.002, last_epoch=0 if not warmup else -1
    )
    if warmup:
        theirs = lr.LinearWarmup(theirs, warmup_steps=3, start_lr=0.01, end_lr=0.5, last_epoch=0)
    for epoch in range(10):
        assert {schedule(epoch * 7 + step) for step in range(7)} == {schedule(epoch * 7)}
        np.testing.assert_allclose(schedule(epoch * 7), theirs(), rtol=1e-6)
        theirs.step()


def test_everything_decays_if_asked_to(tiny):
    config = get_config(
        None,
        [*tiny, "TRAIN.DECAY_ALL", "True", "TRAIN.BASE_LR", "0.1", "TRAIN.WEIGHT_DECAY", "0.5"],
    )
    model = build_model(config)
    names = [name for name, _ in model.named_parameters()]
    assert decayed_parameters(config, model) == names
    before = {name: p.numpy() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = paddle.zeros_like(parameter)
    build_optimizer(config, model).step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(
            parameter.numpy(), before[name] * (1 - 0.1 * 0.5), rtol=1e-6, atol=1e-12
        )


def test_a_run_takes_a_file_of_paddlevits_as_it_is(program, tmp_path):
    write_images(tmp_path / "data" / "train", {"cat": 4, "dog": 4}, size=40)
    write_images(tmp_path / "data" / "val", {"cat": 3, "dog": 2}, size=40)
    (tmp_path / "swin.yaml").write_text(
        "DATA:\n    IMAGE_SIZE: 28\n    CROP_PCT: 0.875\nMODEL:\n    TYPE: swin\n    NAME: swin_mini\n"
        "    EMBED_DIM: 8\n    NUM_HEADS: [1, 2, 2, 2]\n    STAGE_DEPTHS: [1, 1, 1, 1]\n    PATCH_SIZE: 4\n"
        "    PATCH_NORM: True\nTRAIN:\n    NUM_EPOCHS: 1\n    WARMUP_EPOCHS: 0\n"
    )
    flags = ["-cfg=swin.yaml", "-dataset=folder", "-data_path=data", "-batch_size=4", "-output=run"]
    status, out, err = program("main_single_gpu.py", *flags, "-o", "MODEL.NUM_CLASSES", "2")
    assert (status, err) == (0, "")
    assert (
        out.count("is read as PaddleViT's, with the defaults of configs/paddlevit/swin.yaml") == 1
    )
    assert "and ignored: MODEL.PATCH_NORM" in out
    assert out.count("PaddleViT itself applies weight decay to biases") == 1
    assert "learning rate 3.91e-06" in out  # 5e-4 x 4 / 512
    evaluation = [
        "-cfg=run/config.yaml",
        "-eval",
        "-pretrained=run/checkpoints/last",
        "-output=again",
    ]
    status, out, err = program("main_single_gpu.py", *evaluation)
    assert (status, err) == (0, "")
    assert "samples: 5" in out
