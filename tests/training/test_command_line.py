"""The words that users of PaddleViT, PaddleClas, timm and Hydra type, and what they get for them."""

import functools
import json
import re
import shlex

import pytest
from support.parity import compared

import models
from config import CONFIG_DIR, get_config, model_files
from errors import InputError
from models import create_model, list_models
from settings import merging, suggestions
from settings import names as names_module
from settings.configuration import leaves, option_keys
from settings.names import images_of, matching_file, names
from tools import list_models as list_models_tool
from training.command_line import FLAGS, config_from_arguments

KEYS = dict(leaves(get_config()))


def config_of(*argv):
    return config_from_arguments("test", argv)


def refused(*argv):
    with pytest.raises(InputError) as caught:
        config_of(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("command line: ")


@pytest.mark.smoke
def test_options_are_written_with_a_space_or_an_equals_sign():
    config = config_of(
        "-o", "SEED=3", "TRAIN.BASE_LR", "1e-4", "TAG=a=b c", "-amp", "-o", "DATA.IMAGENET_MEAN=[0.1,0.2,0.3]",
        "DATA.IMAGENET_STD", "[0.1, 0.2, 0.3]", "TRAIN.FREEZE=[head.*,blocks.0.*]", "NGPUS", "-1",
    )  # fmt: skip
    assert (config.SEED, config.TRAIN.BASE_LR, config.TAG, config.AMP, config.NGPUS) == (
        3,
        1e-4,
        "a=b c",
        True,
        -1,
    )
    assert (config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD) == (
        [0.1, 0.2, 0.3],
        [0.1, 0.2, 0.3],
    )
    assert config.TRAIN.FREEZE == ["head.*", "blocks.0.*"]
    keys = "SEED TRAIN.BASE_LR TAG AMP DATA.IMAGENET_MEAN DATA.IMAGENET_STD TRAIN.FREEZE NGPUS"
    assert option_keys(config) == set(keys.split())  # what a resumed run may change
    assert get_config(None, ["SEED=3", "TAG", "SEEDS=1"]).TAG == "SEEDS=1"
    assert config_of("-o", "SEED=3", "SEED=4", "-o", "SEED", "5").SEED == 5
    # a flag's value, not a key
    model = "-cfg=vit_base_patch16_224"
    assert config_of(model, "-output=AMP", "-data_path", "EVAL=1").OUTPUT == "AMP"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("SEED", "'SEED' has no value; write SEED VALUE or SEED=VALUE"),
        ("SEED=1 2", "'2' has no value; write 2 VALUE or 2=VALUE"),
        (
            "TRAIN.BASE_LR=",
            "'TRAIN.BASE_LR=' has no value; write TRAIN.BASE_LR VALUE or TRAIN.BASE_LR=VALUE",
        ),
        ("TAG = x", "'TAG' has no value; write TAG VALUE or TAG=VALUE"),
        ("TAG SEED 3", "TAG has no value: the next word is 'SEED'; write TAG=VALUE"),
        ("TAG SEED=3", "TAG has no value: the next word is 'SEED=3'; write TAG=VALUE"),
        ("TAG ''", "TAG has an empty value; is a variable of the script unset?"),
        ("SEED=x", "SEED takes int, found 'x' (str)"),
        ("SEED={[]:1}", "SEED takes int, found '{[]:1}' (str)"),
        ("Global.epochs=10", "unknown key Global.epochs; did you mean TRAIN.NUM_EPOCHS?"),
        (
            "Optimizer.lr.learning_rate=0.1",
            "unknown key Optimizer.lr.learning_rate; did you mean TRAIN.BASE_LR?",
        ),
        ("Optimizer.name=SGD", "unknown key Optimizer.name; did you mean TRAIN.OPTIMIZER.NAME?"),
        ("Global.seed=1", "unknown key Global.seed; did you mean SEED?"),
        ("Arch.name=ViT", "unknown key Arch.name; write -cfg=VALUE"),
        ("train.num_epochs=10", "unknown key train.num_epochs; did you mean TRAIN.NUM_EPOCHS?"),
        ("+SEED=1", "unknown key +SEED; did you mean SEED?"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_the_word(words, message):
    assert refused("-o", *shlex.split(words)) == message


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        # timm's
        ("--epochs 10", "-o TRAIN.NUM_EPOCHS 10"),
        ("--epochs=10", "-o TRAIN.NUM_EPOCHS 10"),
        ("--epochs", "-o TRAIN.NUM_EPOCHS VALUE"),
        ("--lr 1e-3", "-o TRAIN.BASE_LR 1e-3"),
        ("-b 64", "-batch_size=64"),
        ("--model vit_tiny_patch16_224", "-cfg=vit_tiny_patch16_224"),
        ("--data-dir '/a b'", "-data_path='/a b'"),
        ("--opt adamw", "-o TRAIN.OPTIMIZER.NAME adamw"),
        ("--weight-decay 0.05", "-o TRAIN.WEIGHT_DECAY 0.05"),
        ("--mixup 0.8 -eval", "-o TRAIN.MIXUP_ALPHA 0.8"),
        ("--workers -1", "-o DATA.NUM_WORKERS -1"),
        ("--seed 1", "-o SEED 1"),
        ("--drop-path 0.1", "-o MODEL.DROPPATH 0.1"),
        ("--smoothing 0.1", "-o TRAIN.SMOOTHING 0.1"),
        ("--mean 0.1 0.2 0.3", "-o DATA.IMAGENET_MEAN '[0.1,0.2,0.3]'"),
        ("--input-size 3 224 224", "-image_size=224"),
        ("--input-size 3 224 160", "-image_size=224x160"),
        ("--model-ema", "-o TRAIN.MODEL_EMA True"),
        ("--grad-checkpointing", "-o MODEL.RECOMPUTE True"),
        ("--num-classes 10", "-o MODEL.NUM_CLASSES 10"),
        # PaddleClas's
        ("-c vit.yaml", "-cfg=vit.yaml"),
        # PaddleViT's
        ("-num_classes=10", "-o MODEL.NUM_CLASSES 10"),
        (
            "-teacher_model='./regnety_160'",
            "-o TRAIN.TEACHER_MODEL regnety_160 TRAIN.TEACHER_PATH ./regnety_160",
        ),
        (
            "-teacher_model_path=r.pdparams",
            "-o TRAIN.TEACHER_MODEL regnety_160 TRAIN.TEACHER_PATH r.pdparams",
        ),
        ("--config setr.yaml", "-cfg=setr.yaml"),
        ("--model_path s.pdparams", "-eval -pretrained=s.pdparams"),
        (
            "--multi_scales True",
            "-o METHOD.SCALES '[0.5,0.75,1.0,1.25,1.5,1.75]' METHOD.FLIP True",
        ),
        ("--pretrained_backbone b.pdparams", "-pretrained=b.pdparams"),
        ("--img_dir ./img", "python tools/predict.py CHECKPOINT ./img -format masks -output DIR"),
        ("--results_dir ./out", "-output=./out"),
        # others'
        ("--TRAIN.NUM_EPOCHS 3", "-o TRAIN.NUM_EPOCHS 3"),
        ("--gpus 0,1", "CUDA_VISIBLE_DEVICES=0,1 before the command"),
    ],
)
def test_a_flag_of_another_toolkit_is_answered_by_what_to_write(words, instead):
    flag = re.match(r"[^ =]+", words)[0]
    assert refused(*shlex.split(words)) == f"unknown flag {flag}; write {instead}"


def test_all_unknown_flags_are_in_the_one_line():
    told = refused("--epochs", "10", "-batchsize=3", "-no_such_flag", "-amp")
    assert told == (
        "unknown flag --epochs; write -o TRAIN.NUM_EPOCHS 10;"
        " unknown flag -batchsize; did you mean -batch_size?; unknown flag -no_such_flag; -h lists the flags,"
        " config.py the keys of -o"
    )


# What PaddleViT's three scripts of MAE's pre-training pass on, and what they mean in another folder.
PRETRAINING = "-dataset='imagenet2012' -batch_size=8 -data_path='/dataset/imagenet' -mae_pretrain"


@pytest.mark.parametrize(
    ("words", "name", "depth"),
    [
        (
            f"-cfg='./configs/vit_base_patch16_224_pretrain.yaml' {PRETRAINING}",
            "base_patch16_224",
            8,
        ),
        (
            f"-cfg='./configs/vit_base_patch16_224_pretrain_dec1.yaml' {PRETRAINING} -amp",
            "base_patch16_224_dec1",
            1,
        ),
        (
            f"-cfg='./configs/vit_base_patch16_224_pretrain.yaml' {PRETRAINING} -last_epoch=12"
            " -resume='./output/train-20211210-08-41-14/MAE-Epoch-12-Loss-0.9377176860235059'",
            "base_patch16_224",
            8,
        ),
        (
            f"-cfg=./configs/vit_large_patch16_224_pretrain.yaml {PRETRAINING}",
            "large_patch16_224",
            8,
        ),
        (PRETRAINING.replace("-mae_pretrain", "--mae-pretrain"), "base_patch16_224", 8),
        ("-cfg=vit_huge_patch14_224 -mae_pretrain", "huge_patch14_224", 8),
        ("-cfg=mae_vit_digits -mae_pretrain", "digits", 2),
    ],
)
def test_mae_pretrain_means_maes_recipe_of_a_model(tmp_path, monkeypatch, words, name, depth):
    monkeypatch.chdir(tmp_path)
    config = config_from_arguments("main_multi_gpu.py", shlex.split(words))
    assert ("mae", f"mae_vit_{name}") == (config.TASK, config.MODEL.NAME)
    assert depth == config.METHOD.DECODER_DEPTH
    assert config.TRAIN.OPTIMIZER.BETAS == [0.9, 0.95]


def test_mae_pretrain_leaves_a_file_of_maes_pretraining_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    file = tmp_path / "configs/vit_base_patch16_224_pretrain.yaml"
    model = "MODEL: {TYPE: MAE, NAME: vit_base_patch16_224, MAE_PRETRAIN: True}"
    file.write_text(f"{model}\nTRAIN: {{ACCUM_ITER: 2, BASE_LR: 1.5e-4}}\n")
    words = shlex.split(f"-cfg='./configs/{file.name}' {PRETRAINING}")
    config = config_from_arguments("main_single_gpu.py", words)
    assert "is read as PaddleViT's" in config.notes[0]
    assert (config.TASK, config.MODEL.NAME) == ("mae", "vit_base_patch16_224")
    assert (config.METHOD.DECODER_HEADS, config.TRAIN.ACCUM_ITER) == (8, 2)
    assert config_from_arguments("main_single_gpu.py", words[:-1]) == config


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("-cfg=swin_tiny_patch4_window7_224", "classification in swin_tiny_patch4_window7_224"),
        ("-cfg=simmim_digits", "simmim in simmim_digits"),
        ("-cfg=finetune.yaml", "classification in finetune.yaml"),
        ("-o TASK simmim", "simmim in mae_vit_base_patch16_224"),
    ],
)
def test_mae_pretrain_of_another_task_is_one_line(tmp_path, monkeypatch, words, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "finetune.yaml").write_text("MODEL: {TYPE: MAE}\n")
    with pytest.raises(InputError) as caught:
        config_from_arguments("main_multi_gpu.py", ["-mae_pretrain", *words.split()])
    assert str(caught.value) == (
        f"flag -mae_pretrain needs a configuration of TASK mae, but TASK is {found};"
        " use one of TASK mae, such as -cfg=mae_vit_base_patch16_224, or PaddleViT's file"
        " with MODEL.MAE_PRETRAIN: True"
    )


def test_every_entry_of_other_toolkits_names_leads_to_a_key_that_exists():
    for target in suggestions._FOREIGN:
        key, *value = target.split()
        words = ("-cfg=", "-eval", "CUDA_VISIBLE_DEVICES=", "python tools/predict.py ")
        assert key in KEYS or target.startswith(words)
        if key in KEYS and len(value) == 1:
            get_config(None, [key, *value])
    names = [name for listed in suggestions._FOREIGN.values() for name in listed.split()]
    assert len(names) == len(set(names))
    assert not set(names) & {*FLAGS, "cfg", "o", "h", "help"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["-eval", " ", "-amp"],
            "unexpected argument ' '; in a script, nothing may follow the backslash at a line's end",
        ),
        (
            ["-eval", "-amp\\"],
            r"unexpected argument '-amp\\\\'; in a script, nothing may follow the backslash",
        ),
        (
            ["-data_path=/data\r"],
            r"unexpected argument '-data_path=/data\\r'; in a script, nothing may follow",
        ),
        (
            ["-output", ""],
            "-output has an empty value; is a variable of the script unset?",
        ),
        (
            ["-pretrained="],
            "-pretrained has an empty value; is a variable of the script unset?",
        ),
        (["-pretrained", "-eval"], "-pretrained has no value; -h lists the options"),
        (["-o", "-eval"], "-o has no value; -h lists the options"),
        (["vit_tiny"], "unexpected argument 'vit_tiny'"),
        (["tests"], "unexpected argument 'tests'; write -data_path=tests if it is a dataset"),
        (
            ["–cfg=vit_tiny"],
            "unexpected argument '–cfg=vit_tiny'; it begins with a typographic dash; write",
        ),
        (["SEED=4"], "unexpected argument 'SEED=4'; write -o before KEY=VALUE"),
    ],
)
def test_what_a_script_gets_wrong_is_one_line(words, message):
    assert refused(*words).startswith(message.replace(r"\\\\", r"\\").replace(r"\\r", r"\r"))


def test_paddlevits_flags_are_taken():
    config = config_of(
        *shlex.split(
            "-cfg='./configs/vit_base_patch16_224.yaml' -dataset='imagenet2012' -data_path='/dataset/imagenet'"
            " --batch-size 8 -batch_size_eval=4 -image_size=384 -accum_iter=2 -ngpus=4 -pretrained='./vit'"
            " -last_epoch=12 -output=./out -amp"
        )
    )
    assert (
        config.DATA.BATCH_SIZE,
        config.DATA.BATCH_SIZE_EVAL,
        config.DATA.IMAGE_SIZE,
        config.NGPUS,
    ) == (8, 4, 384, 4)
    assert (config.TRAIN.ACCUM_ITER, config.TRAIN.LAST_EPOCH, config.AMP) == (2, 12, True)
    assert (config.MODEL.PRETRAINED, config.OUTPUT, config.DATA.DATA_PATH) == (
        "./vit",
        "./out",
        "/dataset/imagenet",
    )


def test_the_line_is_the_whole_output(program):
    status, output, errors = program("main_single_gpu.py", "--epochs", "10", "-lr=1e-3")
    message = "unknown flag --epochs; write -o TRAIN.NUM_EPOCHS 10; unknown flag -lr; write -o TRAIN.BASE_LR 1e-3"
    assert (status, output, errors) == (2, "", f"error: command line: {message}\n")


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("mixer_base_patch16_224", "mixer_b16_224"),
        ("mixer_large_patch16_224", "mixer_l16_224"),
        ("ViT_base_patch16_224", "vit_base_patch16_224"),
        ("SwinTransformer_tiny_patch4_window7_224", "swin_tiny_patch4_window7_224"),
        ("DeiT_base_distilled_patch16_224", "deit_base_distilled_patch16_224"),
        ("PVT_V2_B2_Linear", "pvtv2_b2_linear"),
        ("ConvNeXt_tiny", "convnext_tiny"),
        ("beit_base_patch16_224_ft22kto1k", "beit_base_patch16_224_21k_1k"),
        ("vit_tiny", "vit_tiny_patch16_224"),
        ("ResNet50_vd", "resnet50d"),
        ("SE_ResNeXt50_32x4d", "seresnext50_32x4d"),
        ("resnet1001", "resnet101"),  # of its own family, though regnetx_016 and others are as near
        ("regnety_033", "regnety_032"),
    ],
)
def test_a_models_name_elsewhere_is_answered_by_the_name_here(name, own):
    for ask in (create_model, get_config, lambda name: get_config(f"./configs/{name}.yaml")):
        with pytest.raises(InputError, match=rf"{name}(\.yaml)?; did you mean {own}\?$"):
            ask(name)


def test_timms_names_of_the_shipped_models_are_taken(monkeypatch):
    """golden/parity has timm's name of each model, or says that it is PaddleViT's."""
    # Each question lists all files, and reads the names in them.
    for module, function in (
        (merging, merging.shipped_configs),
        (models, merging.model_files),
        (names_module, names),
    ):
        monkeypatch.setattr(module, function.__name__, functools.cache(function))
    rows = [(row["model"], row["reference"]) for row in compared()]
    shipped = set(list_models())
    assert {own for own, _ in rows} == shipped
    for own, theirs in rows:
        if theirs == "PaddleViT":
            continue
        assert {own, theirs} & set(list_models(theirs)), own
        assert (theirs if theirs in shipped else own) == get_config(theirs).MODEL.NAME


def test_a_tag_of_timms_tells_how_images_are_prepared_and_where_the_weights_are():
    config = get_config("vit_base_patch16_224.augreg_in21k", ["DATA.CROP_PCT", "0.8"])
    assert (config.MODEL.NAME, config.DATA.IMAGENET_MEAN, config.DATA.CROP_PCT) == (
        "vit_base_patch16_224",
        [0.5] * 3,
        0.8,
    )
    assert config.notes == [
        "pass -pretrained=hf-hub:timm/vit_base_patch16_224.augreg_in21k to load the weights"
        " vit_base_patch16_224.augreg_in21k"
    ]
    other = get_config("vit_base_patch16_224.dino")
    assert (other.DATA.IMAGENET_MEAN, other.DATA.CROP_PCT) == ([0.485, 0.456, 0.406], 0.9)
    assert get_config("pvt_v2_b0.in1k").MODEL.NAME == "pvtv2_b0"
    assert get_config("convnext_xlarge.fb_in22k_ft_in1k_384").MODEL.NAME == "convnext_xlarge_384"
    larger = get_config("convnext_base.fb_in22k_ft_in1k_384")
    assert (larger.MODEL.NAME, larger.DATA.IMAGE_SIZE) == ("convnext_base_384_21k_1k", 384)
    assert create_model("pvt_v2_b0.in1k", num_classes=2).num_classes == 2
    for ask in (create_model, get_config):
        with pytest.raises(
            InputError,
            match=r"timm has no weights pvt_v2_b0\.in2k; of pvt_v2_b0 it has in1k$|no model",
        ):
            ask("pvt_v2_b0.in2k")
        with pytest.raises(
            InputError,
            match=r"; the model is pvtv2_b0, its weights are -pretrained=hf-hub:timm/pvt_v2_b0.in1k",
        ):
            ask("hf-hub:timm/pvt_v2_b0.in1k")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "resnet50_gn",
            r"\d+ of the 80 names of timm's resnet are included, but not this one; the nearest are resnet50, ",
        ),
        (
            "resnet50_gn.a1h_in1k",
            "names of timm's resnet are included, but not this one; the nearest are resnet50, ",
        ),
        ("vit_base_patch16_xp_224", "but not this one; the nearest are vit_base_patch16_"),
        ("mobilevitv2_150_in22ft1k", "but not this one; the nearest are mobilevit_"),
        ("pvt_v2_b9", "did you mean pvtv2_b"),
        (
            "efficientnet_b0",
            "timm's efficientnet isn't included, docs/models/index.md lists the models that are$",
        ),
        (
            "densenet121.ra_in1k",
            "timm's densenet isn't included, docs/models/index.md lists the models that are$",
        ),
    ],
)
def test_a_name_of_timms_that_is_not_here_says_so(name, message):
    for ask in (create_model, get_config):
        with pytest.raises(InputError, match=rf"{re.escape(name)}; .*{message}"):
            ask(name)
    with pytest.raises(InputError, match=message):
        get_config(f"hf-hub:timm/{name}")


@pytest.mark.parametrize(
    ("name", "now", "own", "values"),
    [
        ("convnext_base_in22k", "convnext_base.fb_in22k", "convnext_base", (224, 0.875)),
        (
            "convnext_base_384_in22ft1k",
            "convnext_base.fb_in22k_ft_in1k_384",
            "convnext_base_384_21k_1k",
            (384, 1.0),
        ),
        (
            "xcit_nano_12_p8_384_dist",
            "xcit_nano_12_p8_384.fb_dist_in1k",
            "xcit_nano_12_p8_384",
            (384, 1.0),
        ),
        ("tv_resnet50", "resnet50.tv_in1k", "resnet50", (224, 0.875)),
        ("vit_base_patch8_224_dino", "vit_base_patch8_224.dino", "vit_base_patch8_224", (224, 0.9)),
    ],
)
def test_names_that_timm_gave_up_mean_what_it_says(name, now, own, values):
    config = get_config(name)
    assert own == config.MODEL.NAME
    assert values == (config.DATA.IMAGE_SIZE, config.DATA.CROP_PCT)
    assert config.notes == [f"pass -pretrained=hf-hub:timm/{now} to load the weights {now}"]
    if "nano" in name:
        assert create_model(name, num_classes=2).num_classes == 2


def test_every_name_that_timm_gave_up_is_taken_where_its_model_is_here():
    table = json.loads((CONFIG_DIR.parent / "settings" / "timm_tags.json").read_text())
    files = model_files()
    here = {names(file).get("timm", "").partition(".")[0] for file in files}
    for old, now in table["old"].items():
        plain, _, tag = now.partition(".")
        found = matching_file(old, files)
        assert (found is not None) == (plain in here), old
        assert not tag or plain not in here or images_of(old), old


def test_models_are_listed_by_patterns_in_any_case():
    assert list_models("ViT_Tiny_*4") == ["vit_tiny_patch16_224", "vit_tiny_patch16_384"]
    assert list_models(["vit_tiny*384", "lenet", "*digits"]) == [
        "lenet",
        "vit_digits",
        "vit_tiny_patch16_384",
    ]
    assert list_models("vit_tiny") == list_models([]) == []


@pytest.mark.parametrize(
    ("pattern", "wider"),
    [
        ("vit_tiny", "; did you mean 'vit_tiny*'?"),
        ("Distilled", "; did you mean '*Distilled*'?"),
        ("pvtv2_b9", "; did you mean pvtv2_b5?"),
        ("qqq", ""),
    ],
)
def test_the_tool_suggests_a_wider_pattern(pattern, wider, monkeypatch):
    monkeypatch.setattr("sys.argv", ["list_models.py", pattern])
    with pytest.raises(InputError) as caught:
        list_models_tool.main()
    number = len(list_models())
    assert (
        str(caught.value)
        == f"no model matches '{pattern}'{wider}; without a pattern all {number} are listed"
    )
