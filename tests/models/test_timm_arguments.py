"""What timm's config.json says of the model: taken, refused, or the user's; weights never answer as
another model.
"""

import json

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from config import get_config, model_files
from errors import InputError
from inference import Predictor
from models import build_model, create_model
from models.pretrained import with_preprocessing
from models.timm_arguments import from_timm_names, with_timm_arguments
from settings.names import hub_weights, matching_file, names, tags
from training.checkpoint import describe, description_of
from training.checkpoint.description import METADATA
from weights import file_arrays, save_weights

ANY = {"any": np.ones(1, np.float32)}
TINY = ["MODEL.DEPTH", "2", "DATA.IMAGE_SIZE", "32", "MODEL.NUM_CLASSES", "3"]
BUILT = {
    "depth": 2,
    "img_size": [32, 32],
    "num_classes": 3,
    "drop_rate": 0.5,
    "drop_path_rate": 0.1,
    "in_chans": 3,
}
BUILT |= {
    "global_pool": "token",
    "qk_norm": False,
    "class_token": True,
    "init_values": None,
    "weight_init": "jax",
    "scale_mlp_norm": False,
}


def stored(folder, model=None, name="vit_tiny_patch16_224", arguments=None, **settings):
    """Writes config.json, of settings beside timm's arguments, and a model's weights."""
    settings = {"fixed_input_size": True, "input_size": [3, 32, 32]} | settings
    content = {
        "architecture": name,
        "num_classes": 3,
        "model_args": BUILT if arguments is None else arguments,
    }
    (folder / "config.json").write_text(json.dumps(content | {"pretrained_cfg": settings}))
    if model is not None:
        save_weights(model, folder / "model.safetensors")
    else:
        save_file(ANY, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "key", [[], ["MODEL.NUM_HEADS", "6"], ["MODEL.GLOBAL_POOL", "avg", "MODEL.FC_NORM", "False"]]
)
def test_weights_answer_as_the_model_that_they_were_made_by(tmp_path, key):
    own = build_model(get_config("vit_tiny_patch16_224", [*TINY, *key]))
    own.eval()
    changes = {
        name.removeprefix("MODEL.").lower(): value
        for name, value in zip(key[::2], key[1::2], strict=True)
    }
    changes = {name: {"6": 6, "False": False}.get(value, value) for name, value in changes.items()}
    stored(tmp_path, own, arguments=BUILT | changes)
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    predictor = Predictor(tmp_path)
    pixels = predictor.pixels(image)[None]
    data = predictor.config.DATA
    with paddle.no_grad():
        scaled = (pixels / 255 - data.IMAGENET_MEAN) / data.IMAGENET_STD
        expected = own(paddle.to_tensor(scaled.astype("float32").transpose(0, 3, 1, 2))).numpy()
    np.testing.assert_allclose(predictor.logits(pixels), expected, atol=1e-5)
    by_name = Predictor(
        tmp_path, "vit_tiny_patch16_224", ["MODEL.NUM_CLASSES=3", "DATA.IMAGE_SIZE=32"]
    )
    np.testing.assert_allclose(
        by_name.model(paddle.to_tensor(scaled.astype("float32").transpose(0, 3, 1, 2))),
        expected,
        atol=1e-5,
    )
    created = create_model("vit_tiny_patch16_224", str(tmp_path), num_classes=3, image_size=32)
    assert (created.blocks[0].attn.num_heads, created.global_pool) == (
        own.blocks[0].attn.num_heads,
        own.global_pool,
    )


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "vit_tiny_patch16_224",
            {"act_layer": "relu"},
            "act_layer is 'relu'; MODEL.ACT is 'relu', expected one of gelu",
        ),
        (
            "vit_tiny_patch16_224",
            {"global_pool": "max"},
            "global_pool is 'max'; .*expected one of token, avg",
        ),
        ("vit_tiny_patch16_224", {"num_heads": "x"}, "num_heads is 'x'; .*MODEL.NUM_HEADS"),
        (
            "vit_tiny_patch16_224",
            {"pos_embed": "none"},
            "pos_embed is 'none', which ViT doesn't support",
        ),
        (
            "eva02_tiny_patch14_224",
            {"use_rot_pos_emb": False},
            "use_rot_pos_emb is False, but Eva only supports True",
        ),
        (
            "vit_tiny_patch16_224",
            {"scale_attn_norm": True},
            "scale_attn_norm is True, but ViT has no such argument",
        ),
        (
            "vit_tiny_patch16_224",
            {"a\nb": {"c": 1}},
            r"a\\nb is a dictionary of 1, but ViT has no such argument",
        ),
        (
            "swin_tiny_patch4_window7_224",
            {"global_pool": "max"},
            "global_pool is 'max', but Swin only supports 'avg'",
        ),
        (
            "convnext_tiny",
            {"output_stride": 8},
            "output_stride is 8, but ConvNeXt only supports 32",
        ),
        (
            "vit_small_patch16_dinov3",
            {"rope_type": "cat"},
            "rope_type is 'cat', but .*_dinov3 only supports 'dinov3'",
        ),
        (
            "eva02_tiny_patch14_224",
            {"rope_type": "dinov3"},
            "rope_type is 'dinov3', but .*_224 only supports 'cat'",
        ),
        (
            "vit_small_patch16_dinov3",
            {"rope_rotate_half": False},
            "rope_rotate_half is False, but .* only supports True",
        ),
        (
            "eva02_tiny_patch14_224",
            {"rope_rotate_half": True},
            "rope_rotate_half is True, but .* only supports False",
        ),
        (
            "convnext_atto",
            {"conv_bias": False},
            "conv_bias is False, but ConvNeXt only supports True",
        ),
        (
            "xcit_nano_12_p16_224",
            {"use_pos_embed": False},
            "use_pos_embed is False, but XCiT only supports True",
        ),
        (
            "resnet18",
            {"act_layer": "gelu"},
            "act_layer is 'gelu', but ResNet only supports 'relu'",
        ),
        (
            "resnet18",
            {"aa_layer": "blurpc"},
            "aa_layer is 'blurpc', but ResNet only supports 'avg' or 'blur'",
        ),
        (
            "resnet18",
            {"block_args": {"attn_layer": "ese"}},
            "block_args is .* only supports an attn_layer of 'se' or 'eca'; use",
        ),
        (
            "resnet18",
            {"block_args": {"attn_layer": "se", "rd_ratio": 0.5}},
            "block_args is .* only supports an attn_layer of",
        ),
        ("resnet18", {"block_args": ["se"]}, "block_args is .* only supports an attn_layer of"),
        (
            "resnet18",
            {"stem_type": "overlap"},
            "stem_type is 'overlap'; MODEL.STEM_TYPE is 'overlap', expected one of",
        ),
        (
            "resnet18",
            {"layers": [1, 1, 1, 1]},
            "layers is .*, but ResNet has no such argument",
        ),
        (
            "convnext_atto",
            {"block_args": {"attn_layer": "se"}},
            "block_args is .*, but ConvNeXt has no such arg",
        ),
    ],
)
def test_what_no_model_here_computes_is_refused(tmp_path, name, arguments, message):
    stored(tmp_path, name=name, arguments=arguments)
    for cfg in (None, name):
        with pytest.raises(InputError, match=r"^the config\.json of .*: model_args\." + message):
            Predictor(tmp_path, cfg)


def test_the_users_value_counts_and_another_models_isnt_guessed(tmp_path):
    stored(tmp_path, arguments={"num_heads": 6})
    taken = with_timm_arguments(get_config("vit_tiny_patch16_224"), tmp_path)
    assert (taken.MODEL.NUM_HEADS, taken.notes) == (
        6,
        [f"MODEL.NUM_HEADS 6, according to the config.json of {tmp_path}"],
    )
    mine = with_timm_arguments(
        get_config("vit_tiny_patch16_224", ["MODEL.NUM_HEADS", "3"]), tmp_path
    )
    assert mine.MODEL.NUM_HEADS == 3
    assert mine.notes == [f"the config.json of {tmp_path}: model_args.num_heads is 6, yours 3"]
    with pytest.raises(
        InputError,
        match="num_heads is 6, but vit_base_patch16_224 has MODEL.NUM_HEADS 12; choose one by -o",
    ):
        with_timm_arguments(get_config("vit_base_patch16_224"), tmp_path)
    other = get_config("vit_base_patch16_224", ["MODEL.NUM_HEADS", "12"])
    assert with_timm_arguments(other, tmp_path).MODEL.NUM_HEADS == 12


def test_arguments_have_their_names_here(tmp_path):
    stored(
        tmp_path,
        name="xcit_nano_12_p16_224",
        arguments={"eta": 0.1, "cls_attn_layers": 3, "use_pos_embed": True},
    )
    model = with_timm_arguments(get_config("xcit_nano_12_p16_224"), tmp_path).MODEL
    assert (model.INIT_VALUES, model.DEPTH_TOKEN_ONLY) == (0.1, 3)


@pytest.mark.parametrize(
    ("name", "arguments", "keys"),
    [
        ("resnet26", {"stem_type": "deep"}, {"STEM_TYPE": "deep", "STEM_WIDTH": 64}),
        (
            "resnet26",
            {"stem_type": "deep", "stem_width": 24},
            {"STEM_TYPE": "deep", "STEM_WIDTH": 24},
        ),
        ("resnet26d", {"stem_type": "deep_tiered"}, {"STEM_TYPE": "deep_tiered", "STEM_WIDTH": 32}),
        (
            "resnet26d",
            {"stem_type": "", "avg_down": False},
            {"STEM_TYPE": "plain", "AVG_DOWN": False},
        ),
        (
            "resnetrs50",
            {"replace_stem_pool": False, "stem_type": None},
            {"STEM_POOL": "max", "STEM_TYPE": "deep"},
        ),
        (
            "resnet18",
            {"replace_stem_pool": True, "aa_layer": "avg_pool"},
            {"STEM_POOL": "conv", "ANTI_ALIAS": "avg"},
        ),
        (
            "resnet18",
            {"aa_layer": "Blur-Pool", "replace_stem_pool": True},
            {"STEM_POOL": "conv", "ANTI_ALIAS": "blur"},
        ),
        ("resnetaa50d", {"aa_layer": None}, {"ANTI_ALIAS": "avg"}),
        ("resnet18", {"block_args": {"attn_layer": "SE"}}, {"SE_RATIO": 0.0625, "ECA": False}),
        ("ecaresnet26t", {"block_args": {"attn_layer": True}}, {"SE_RATIO": 0.0625, "ECA": False}),
        ("seresnet50", {"block_args": {"attn_layer": "eca"}}, {"SE_RATIO": 0.0, "ECA": True}),
        ("resnetrs50", {"block_args": {}}, {"SE_RATIO": 0.0, "ECA": False}),
        ("seresnet50", {"block_args": {"attn_layer": None}}, {"SE_RATIO": 0.0, "ECA": False}),
        ("seresnet50", {"block_args": None}, {"SE_RATIO": 0.0625, "ECA": False}),
    ],
)
def test_resnets_arguments_have_other_values_here(tmp_path, name, arguments, keys):
    stored(tmp_path, name=name, arguments=arguments)
    model = with_timm_arguments(get_config(name), tmp_path).MODEL
    assert {key: model[key] for key in keys} == keys
    if "stem_type" not in arguments and None not in arguments.values():
        assert from_timm_names("ResNet", arguments) == {
            key.lower(): value for key, value in keys.items()
        }


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_small_patch16_dinov3", {"rope_type": "dinov3", "rope_rotate_half": True}),
        ("eva02_tiny_patch14_224", {"rope_type": "cat", "rope_rotate_half": False}),
        ("hiera_tiny_224", {"abs_win_pos_embed": False}),
    ],
)
def test_what_a_model_is_anyway_may_be_named(tmp_path, name, arguments):
    stored(tmp_path, name=name, arguments=arguments)
    config = get_config(name)
    assert with_timm_arguments(config, tmp_path).MODEL == config.MODEL


def test_hieras_arguments_are_taken(tmp_path):
    made = {
        "stages": [1, 1, 1, 1],
        "abs_win_pos_embed": True,
        "global_pos_size": [5, 5],
        "q_pool": 2,
        "dim_mul": 2.0,
    }
    stored(tmp_path, name="hiera_tiny_224", arguments=made)
    model = with_timm_arguments(get_config("hiera_tiny_224"), tmp_path).MODEL
    assert (model.STAGE_DEPTHS, model.GLOBAL_POS_SIZE, model.Q_POOL) == ([1, 1, 1, 1], [5, 5], 2)


def test_what_config_json_leaves_out_is_as_timm_has_it(tmp_path):
    imagenet = [0.485, 0.456, 0.406]
    for settings in (
        {},
        {"mean": None, "std": None, "crop_pct": 0, "interpolation": None, "crop_mode": None},
    ):
        data = description_of(stored(tmp_path, arguments={}, **settings)).to_config().DATA
        assert list(data.IMAGENET_MEAN) == imagenet
        assert data.IMAGENET_STD == [0.229, 0.224, 0.225]
        assert (data.CROP_PCT, data.CROP_MODE, data.INTERPOLATION) == (0.875, "center", "bicubic")
        by_default = with_preprocessing(get_config(None, ["MODEL.PRETRAINED", str(tmp_path)]))
        assert list(by_default.DATA.IMAGENET_MEAN) == imagenet
    # its YAML file has bilinear
    (tmp_path / "config.json").write_text('{"architecture": "resnet18"}')
    assert description_of(tmp_path).values["DATA.INTERPOLATION"] == "bicubic"


def test_another_preparation_is_refused_and_options_come_first(tmp_path):
    stored(
        tmp_path, arguments={}, input_size=[3, 32, 64], crop_mode="border", interpolation="lanczos"
    )
    options: list[str] = []
    for key, value, message in (
        (
            "DATA.CROP_MODE",
            "center",
            "DATA.CROP_MODE is 'border', expected one of center, squash, short, own",
        ),
        (
            "DATA.INTERPOLATION",
            "bicubic",
            "DATA.INTERPOLATION is 'lanczos', expected one of bicubic",
        ),
    ):
        with pytest.raises(
            InputError,
            match=rf"^the config.json of .*: {message}.*; set the key by -o KEY VALUE$",
        ):
            description_of(tmp_path, options)
        options += [key, value]
    data = description_of(tmp_path, options).to_config().DATA
    assert (data.IMAGE_SIZE, data.CROP_MODE, data.INTERPOLATION) == ([32, 64], "center", "bicubic")


def test_windows_that_timm_keeps_for_other_images_are_refused(tmp_path):
    name = "swin_tiny_patch4_window7_224"
    made = {"img_size": [224, 224], "strict_img_size": False}
    stored(tmp_path, name=name, arguments=made, input_size=[3, 256, 256])
    with pytest.raises(
        InputError,
        match=r"input_size is 256, but its windows stay those of 224 pixels \(DATA.IMAGE_SI",
    ):
        description_of(tmp_path)
    assert description_of(tmp_path, ["DATA.IMAGE_SIZE", "224"]).values["DATA.IMAGE_SIZE"] == 224
    stored(tmp_path, name=name, arguments=made, input_size=[3, 224, 224])
    assert description_of(tmp_path).values["DATA.IMAGE_SIZE"] == 224


@pytest.mark.parametrize("mean", [[0.4], None])
def test_weights_of_one_channel(tmp_path, mean):
    own = build_model(get_config("vit_tiny_patch16_224", [*TINY, "DATA.IMAGE_CHANNELS=1", "DATA.IMAGENET_MEAN=0.5",
                                                          "DATA.IMAGENET_STD=0.5"]))  # fmt: skip
    stored(tmp_path, own, arguments=BUILT | {"in_chans": 1}, mean=mean)
    config = Predictor(tmp_path).config
    assert config.DATA.IMAGE_CHANNELS == 1
    np.testing.assert_allclose(config.DATA.IMAGENET_MEAN, [0.4 if mean else 0.449], atol=1e-9)


@pytest.mark.parametrize(
    ("tag", "arguments", "named"),
    [
        ("augreg_in21k_ft_in1k", {}, True),
        ("fb_in22k_ft_in1k_384", {"img_size": 384}, True),
        ("a1_in1k", {"num_classes": 1000}, False),
        ("in1k_ft_in22k", {}, False),
        ("augreg_in21k", {}, False),
        (None, {}, False),
    ],
)
def test_outputs_are_imagenets_where_the_tag_says_so(tmp_path, tag, arguments, named):
    content = {"architecture": "vit_tiny_patch16_224", "num_classes": 1000, "model_args": arguments}
    save_file(ANY, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(content | {"pretrained_cfg": {"tag": tag}}))
    assert description_of(tmp_path).classes[:1] == (["tench"] if named else [])
    (tmp_path / "config.json").write_text(
        json.dumps(content | {"pretrained_cfg": {}, "label_names": ["a\nb"]})
    )
    with pytest.raises(
        InputError, match=r"the class name 'a\\nb' has unprintable characters; rename it there$"
    ):
        description_of(tmp_path)


@pytest.mark.parametrize(
    "lie", [{"MODEL.EMBED_DIM": 9600}, {"MODEL.DEPTH": 200}, {"MODEL.NUM_CLASSES": 8_000_000}]
)
def test_a_description_of_more_than_the_file_holds_is_refused_before_it_is_built(
    tmp_path, lie, monkeypatch
):
    config = get_config("vit_tiny_patch16_224", TINY)
    told = describe(config, [])
    told.values.update(lie)
    file = tmp_path / "lie.safetensors"
    save_file(file_arrays(build_model(config)), file, {METADATA: told.to_json()})
    made = []
    monkeypatch.setattr(
        paddle.nn.Layer, "create_parameter", _counted(paddle.nn.Layer.create_parameter, made)
    )
    with pytest.raises(
        InputError,
        match=r"lie.safetensors: it describes a model of more than .* parameters, but doesn't",
    ):
        Predictor(file)
    assert sum(made) < 26e6


def _counted(create, made):
    def counted(layer, shape, *rest, **named):
        made.append(int(np.prod(shape)))
        return create(layer, shape, *rest, **named)

    return counted


# model_args.global_pool as timm 1.0.31's save_for_hf writes it for one model of each family.
POOLED = dict.fromkeys(
    (
        "beit_base_patch16_224",
        "convmixer_768_32",
        "convnext_atto",
        "eva02_tiny_patch14_224",
        "gmlp_s16_224",
    ),
    "avg",
)
POOLED |= dict.fromkeys(
    ("hiera_tiny_224", "levit_128s", "caformer_s18", "mixer_b16_224", "mobileone_s0"), "avg"
)
POOLED |= dict.fromkeys(
    ("mobilevit_xxs", "poolformer_s12", "pvt_v2_b0", "regnety_160", "resmlp_12_224"), "avg"
)
POOLED |= dict.fromkeys(
    ("resnet18", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"), "avg"
)
POOLED |= dict.fromkeys(("tiny_vit_5m_224", "vit_small_patch16_dinov3"), "avg")
POOLED |= dict.fromkeys(
    ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "cait_xxs24_224"), "token"
)
POOLED |= dict.fromkeys(
    ("coat_lite_tiny", "crossvit_9_224", "pit_ti_224", "pit_ti_distilled_224"), "token"
)
POOLED |= dict.fromkeys(("volo_d1_224", "xcit_nano_12_p16_224"), "token")
POOLED |= {"vit_base_patch16_siglip_224": "map"}


@pytest.mark.parametrize("name", POOLED)
def test_what_timm_saves_of_each_family_is_taken(tmp_path, name):
    stored(
        tmp_path,
        name=name,
        arguments={"num_classes": 3, "in_chans": 3, "global_pool": POOLED[name]},
    )
    described = description_of(tmp_path)
    assert described.values["MODEL.NUM_CLASSES"] == 3
    assert described.values.get("MODEL.GLOBAL_POOL", POOLED[name]) == POOLED[name]
    if "MODEL.GLOBAL_POOL" not in described.values:
        other = "avg" if POOLED[name] == "token" else "token"
        stored(tmp_path, name=name, arguments={"global_pool": other})
        with pytest.raises(
            InputError,
            match=f"model_args.global_pool is '{other}', but .* only supports '{POOLED[name]}'",
        ):
            description_of(tmp_path)


def test_a_folder_may_name_the_model_as_timm_does(tmp_path):
    """pvt_v2_b0 is pvtv2_b0 here; its arguments are those of no other model."""
    stored(tmp_path, name="pvt_v2_b0", arguments={"depths": [1, 1, 1, 1]})
    assert description_of(tmp_path).values["MODEL.STAGE_DEPTHS"] == [1, 1, 1, 1]


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_a_folder_of_timms_tells_no_task(tmp_path, task):
    stored(tmp_path)
    assert description_of(tmp_path, ["TASK", task]).task == task


# ------------------------------------------------------------------ create_model

SMALL = {"depth": 1, "embed_dim": 16, "num_heads": 2}


def test_timms_keywords_build_the_same_model_as_ours():
    theirs = create_model(
        "vit_tiny_patch16_224", pretrained=False, in_chans=1, img_size=(32, 48), num_classes=5, drop_path_rate=0.3,
        attn_drop_rate=0.1, global_pool="avg", features_only=False, out_indices=None, exportable=False, scriptable=None,
        checkpoint_path="", drop_rate=0.0, **SMALL,
    )  # fmt: skip
    ours = create_model(
        "vit_tiny_patch16_224", None, image_channels=1, image_size=(32, 48), num_classes=5, droppath=0.3,
        attention_dropout=0.1, global_pool="avg", **SMALL,
    )  # fmt: skip
    assert str(theirs) == str(ours)
    assert [p.shape for p in theirs.parameters()] == [p.shape for p in ours.parameters()]
    assert theirs(paddle.zeros([2, 1, 32, 48])).shape == [2, 5]
    assert (
        create_model(
            "vit_tiny_patch16_224", num_classes=None, img_size=None, in_chans=None, **SMALL
        ).head
        is not None
    )
    # it has no other
    assert (
        create_model("resnet18", in_chans=1, global_pool="avg", num_classes=2).num_features == 512
    )


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        (
            "vit_digits",
            {"features_only": True},
            "create_model doesn't take features_only; model.forward_intermediates(i",
        ),
        (
            "vit_digits",
            {"out_indices": [1]},
            "create_model doesn't take out_indices; model.forward_intermediates(images",
        ),
        (
            "vit_digits",
            {"scriptable": True},
            "create_model doesn't take scriptable; leave it out: paddle.jit.to_static",
        ),
        (
            "vit_digits",
            {"exportable": True},
            "create_model doesn't take exportable; leave it out: tools/export_model.py",
        ),
        (
            "vit_digits",
            {"drop_rate": 0.1},
            "create_model doesn't take drop_rate; timm's dropout before the classifier",
        ),
        (
            "vit_digits",
            {"proj_drop_rate": 0.1},
            "create_model doesn't take proj_drop_rate; dropout=RATE applies after",
        ),
        (
            "vit_digits",
            {"pretrained_cfg": {"a": 1}},
            "create_model doesn't take pretrained_cfg; pass pretrained='hf-hub",
        ),
        (
            "vit_digits",
            {"cache_dir": "x"},
            "create_model doesn't take cache_dir; set HF_HOME before the program starts",
        ),
        ("vit_digits", {"in_chans": 0}, "image_channels is 0, expected a number of at least 1"),
        ("vit_digits", {"in_chans": "3"}, "image_channels is '3', expected a number of at least 1"),
        ("vit_digits", {"img_size": -8}, "DATA.IMAGE_SIZE is -8, expected 1 to 10000"),
        (
            "vit_digits",
            {"img_size": 8.5},
            "command line: DATA.IMAGE_SIZE takes int or a list of ints, found 8.5",
        ),
        (
            "vit_digits",
            {"global_pool": "max"},
            "command line: MODEL.GLOBAL_POOL is 'max', expected one of token, av",
        ),
        (
            "resnet18",
            {"global_pool": "max"},
            "global_pool is 'max', but ResNet only supports 'avg'; leave it out",
        ),
        (
            "vit_digits",
            {"depths": 3},
            "depths is 3, but ViT has no such argument; leave it out",
        ),
        ("vit_digits", {"pretrained": 1}, "pretrained is 1, expected True, False or weights"),
        (
            "vit_digits",
            {"pretrained": True},
            "timm has no weights of vit_digits; pass pretrained=FILE, or leave it",
        ),
        ("vit_digits", {"checkpoint_path": "/none"}, "no weights at /none"),
        (
            "vit_digits",
            {"checkpoint_path": "a", "pretrained": "b"},
            "checkpoint_path is a, and pretrained is b; pass only one",
        ),
        (
            "vit_digits",
            {"num_clases": 3},
            "command line: unknown key MODEL.NUM_CLASES; did you mean MODEL.NUM_CLASS",
        ),
    ],
)
def test_what_has_no_counterpart_is_one_line(name, words, message):
    with pytest.raises(InputError) as caught:
        create_model(name, **words)
    assert str(caught.value).startswith(message)


def test_another_number_of_classes_tells_which_head_is_new(tmp_path):
    """By ``pretrained`` and by ``checkpoint_path``; without a classifier there is nothing to tell."""
    file = str(tmp_path / "weights.safetensors")
    model = create_model("vit_tiny_patch16_224", image_size=32, num_classes=3, **SMALL)
    save_weights(model, file)
    for words in ({"pretrained": file}, {"checkpoint_path": file}):
        with pytest.warns(
            UserWarning,
            match=r"^head\.weight, head\.bias are new: 3 classes in the file, 5 in the model",
        ):
            other = create_model(
                "vit_tiny_patch16_224", img_size=32, num_classes=5, **words, **SMALL
            )
        assert paddle.equal_all(other.patch_embed.proj.weight, model.patch_embed.proj.weight)
        # no warning
        features = create_model(
            "vit_tiny_patch16_224", img_size=32, num_classes=0, **words, **SMALL
        )
        assert paddle.equal_all(features.norm.weight, model.norm.weight)
    with pytest.raises(InputError, match=r"doesn't fit the model: head.weight is \[16, 3\], the m"):
        # 1000, as nobody asked for
        create_model("vit_tiny_patch16_224", img_size=32, pretrained=file, **SMALL)


def test_the_hub_has_weights_by_timms_name_and_tag():
    def of(name):
        return hub_weights(name, matching_file(name, model_files()))

    assert of("vit_base_patch16_224") == "hf-hub:timm/vit_base_patch16_224.augreg2_in21k_ft_in1k"
    assert of("vit_base_patch16_224.dino") == "hf-hub:timm/vit_base_patch16_224.dino"
    assert of("resnet50") == "hf-hub:timm/resnet50.a1_in1k"
    assert of("pvtv2_b1") == "hf-hub:timm/pvt_v2_b1.in1k"
    assert of("convnext_base_384_21k_1k") == "hf-hub:timm/convnext_base.fb_in22k_ft_in1k_384"
    assert (
        of("vit_base_patch16_clip_quickgelu_224.openai")
        == "hf-hub:timm/vit_base_patch16_clip_224.openai"
    )
    for file in model_files():
        if tags(names(file).get("timm", "").partition(".")[0]):
            assert of(file.stem).startswith("hf-hub:timm/")


def test_attention_pooling_reads_patches_alone(tmp_path):
    """As timm's ``pool_include_prefix`` False: the class token and the registers change nothing."""
    words = ["MODEL.GLOBAL_POOL", "map", "MODEL.REG_TOKENS", "2", "MODEL.NUM_CLASSES", "0"]
    model = build_model(get_config("vit_tiny_patch16_224", [*TINY, *words]))
    model.eval()
    tokens = paddle.randn([2, 3 + 4, 192])
    others = tokens.clone()
    others[:, :3] += 1
    np.testing.assert_array_equal(
        model.forward_head(tokens).numpy(), model.forward_head(others).numpy()
    )
    expected = model.head(model.fc_norm(model.attn_pool(tokens[:, 3:])))
    np.testing.assert_allclose(model.forward_head(tokens).numpy(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (None, {}, "the model's name is None, expected a string"),
        (
            "vit_tiny_patch16_224",
            {"pos_embed": "none"},
            "pos_embed is 'none', which ViT doesn't support; leave it out",
        ),
        (
            "vit_tiny_patch16_224",
            {"drop_block_rate": 0.1},
            "take drop_block_rate; use droppath=RATE",
        ),
    ],
)
def test_calls_that_would_build_another_model_are_refused(name, arguments, message):
    with pytest.raises(InputError, match=message):
        create_model(name, **arguments)


def test_deits_usual_call_is_taken():
    model = create_model(
        "vit_tiny_patch16_224", False, depth=1, drop_rate=0.0, drop_block_rate=None, img_size=32
    )
    assert len(model.blocks) == 1
