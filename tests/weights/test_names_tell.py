"""What the names of a file's tensors tell about its model: set, or refused with the key to set."""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values
from support.small_models import small_beit, small_convnext, small_pyramid, small_vit
from support.weight_files import Call, Named, numpy_array, program, write_pickle

from config import get_config
from errors import InputError
from models import build_model, create_model, with_switches
from models.pretrained import with_preprocessing
from weights import file_arrays, load_weights, save_weights
from weights.formats import write_weights

GOLDEN = {
    kind: json.loads((ROOT / "tests" / "golden" / f"names_{kind}.json").read_text())
    for kind in ("poolformer", "pvtv2", "mixer")
}
SIZES = {  # of the golden models, as options
    "poolformer": [
        "MODEL.STAGE_DEPTHS",
        "[1, 2, 1, 1]",
        "MODEL.EMBED_DIMS",
        "[4, 8, 12, 16]",
        "MODEL.NUM_CLASSES",
        "5",
    ],
    "pvtv2": [
        *(
            "MODEL.STAGE_DEPTHS",
            "[2, 1, 1, 1]",
            "MODEL.EMBED_DIMS",
            "[4, 8, 12, 16]",
            "MODEL.NUM_CLASSES",
            "5",
        ),
        *("MODEL.NUM_HEADS", "[1, 2, 3, 4]"),
    ],
}


def stored(kind, case, folder):
    """The golden case's weights, in a file of its toolkit."""
    golden = GOLDEN[kind][case]
    file = folder / ("theirs.pdparams" if golden["layout"] == "paddle" else "theirs.safetensors")
    write_weights(
        file, {name: values(name, tuple(shape)) for name, shape in golden["shapes"].items()}
    )
    return file


def timms_poolformer(folder):
    """A file of a reduced PoolFormer in timm's names: its norm comes after the pooling."""
    file = folder / "timm.safetensors"
    save_weights(small_pyramid("poolformer", "poolformer", fc_norm=True), file)
    return file


def evaluated(config, size):
    """The logits of a configuration's model with its weights, of the golden images."""
    model = build_model(config, image_size=size)
    load_weights(model, config.MODEL.PRETRAINED)
    model.eval()
    return model(paddle.to_tensor(values("images", (2, 3, *size)))).numpy()


def assert_golden(found, kind, case):
    expected = np.array(GOLDEN[kind][case]["logits"])
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


# ------------------------------------------------------------------ switches


@pytest.mark.smoke
@pytest.mark.parametrize("case", GOLDEN["poolformer"])
def test_poolformers_norm_is_where_the_file_has_it(tmp_path, case):
    file = stored("poolformer", case, tmp_path)
    options = [*SIZES["poolformer"], "MODEL.PRETRAINED", str(file)]
    config = with_preprocessing(get_config("poolformer_s12", options))
    # the authors' place is the recipe's
    assert (config.MODEL.FC_NORM, config.notes) == (False, [])
    assert_golden(evaluated(config, GOLDEN["poolformer"][case]["size"]), "poolformer", case)
    timms = timms_poolformer(tmp_path)
    options = [*SIZES["poolformer"], "MODEL.PRETRAINED", str(timms)]
    config = with_preprocessing(get_config("poolformer_s12", options))
    assert config.MODEL.FC_NORM is True
    assert config.notes == [f"MODEL.FC_NORM True, according to the names in {timms}"]
    size = GOLDEN["poolformer"][case]["size"]
    expected = evaluated(get_config("poolformer_s12", [*options, "MODEL.FC_NORM", "True"]), size)
    assert (evaluated(config, size) == expected).all()
    given = with_preprocessing(get_config("poolformer_s12", [*options, "MODEL.FC_NORM", "True"]))
    assert (given.MODEL.FC_NORM, given.notes) == (True, [])


def test_a_norm_at_another_place_is_refused_with_the_key(tmp_path):
    theirs = stored("poolformer", "PaddleViT", tmp_path)
    given = with_preprocessing(
        get_config(
            "poolformer_s12",
            [*SIZES["poolformer"], "MODEL.PRETRAINED", str(theirs), "MODEL.FC_NORM", "True"],
        )
    )
    message = (
        r"theirs\.pdparams doesn't fit the model: missing head\.norm\.weight, head\.norm\.bias;"
        r" unexpected norm\.weight, norm\.bias; according to the names of its tensors, set MODEL\.FC_NORM False$"
    )
    with pytest.raises(InputError, match=message):
        load_weights(build_model(given), theirs)
    with pytest.raises(
        InputError, match="according to the names of its tensors, set MODEL.FC_NORM False"
    ):
        load_weights(build_model(given), theirs, strict=False)  # for fine-tuning, too
    with pytest.raises(
        InputError, match="according to the names of its tensors, set MODEL.FC_NORM True"
    ):
        load_weights(small_pyramid("poolformer", "poolformer"), timms_poolformer(tmp_path))


def test_what_this_toolkit_writes_tells_it_too(tmp_path):
    own = tmp_path / "own.safetensors"
    timms = tmp_path / "timm.safetensors"
    sizes = {"stage_depths": "[1, 2, 1, 1]", "embed_dims": "[4, 8, 12, 16]", "num_classes": 5}
    for file, fc_norm in ((own, False), (timms, True)):
        save_weights(small_pyramid("poolformer", "poolformer", fc_norm=fc_norm), file)
        assert create_model("poolformer_s12", pretrained=str(file), **sizes).fc_norm is fc_norm


@pytest.mark.parametrize(("case", "epsilon"), [("PaddleViT", 1e-6), ("whai362/PVT", None)])
def test_pvtv2s_norms_have_the_files_epsilon(tmp_path, case, epsilon):
    file = stored("pvtv2", case, tmp_path)
    config = with_preprocessing(
        get_config("pvtv2_b0", [*SIZES["pvtv2"], "MODEL.PRETRAINED", str(file)])
    )
    assert epsilon == config.MODEL.NORM_EPS
    assert_golden(evaluated(config, GOLDEN["pvtv2"][case]["size"]), "pvtv2", case)
    report = load_weights(small_pyramid("pvtv2", case, norm_eps=1e-3), file)
    told = (
        ["according to the names of its tensors, MODEL.NORM_EPS is 1e-06, the model has 0.001"]
        if epsilon
        else []
    )
    assert report.notes == told


def test_gmlps_gates_have_the_files_epsilon(tmp_path):
    case = "PaddleViT's gMLP"
    golden = GOLDEN["mixer"][case]
    file = stored("mixer", case, tmp_path)
    options = [word for key, value in golden["model"].items() if key != "image_size"
               for word in (f"MODEL.{key.upper()}", str(value))]  # fmt: skip
    options += ["DATA.IMAGE_SIZE", "16", "MODEL.PRETRAINED", str(file)]
    config = with_preprocessing(get_config("gmlp_s16_224", options))
    assert config.MODEL.NORM_EPS == 1e-6
    model = build_model(config)
    assert {layer._epsilon for name, layer in model.named_sublayers() if name.endswith("norm")} == {
        1e-6
    }
    assert_golden(evaluated(config, (16, 16)), "mixer", case)
    assert (
        with_switches(
            get_config("mixer_b16_224"), stored("mixer", "PaddleViT's Mixer", tmp_path)
        ).MODEL.NORM_EPS
        is None
    )


# --------------------------------------------------- keys that need other tensors


@pytest.mark.parametrize(
    ("file", "model", "keys"),
    [
        ({"distilled": True}, {}, "MODEL.DISTILLED True"),
        ({}, {"distilled": True}, "MODEL.DISTILLED False"),
        ({"reg_tokens": 4}, {}, "MODEL.REG_TOKENS 4"),
        ({"class_token": False, "global_pool": "avg"}, {}, "MODEL.CLASS_TOKEN False and MODEL.GLOBAL_POOL avg and"
         " MODEL.FC_NORM True"),
        ({"global_pool": "avg"}, {}, "MODEL.GLOBAL_POOL avg"),
        ({}, {"global_pool": "avg"}, "MODEL.GLOBAL_POOL token"),
        ({"no_embed_class": True}, {}, "MODEL.NO_EMBED_CLASS True"),
        ({}, {"no_embed_class": True}, "MODEL.NO_EMBED_CLASS False"),
        ({"pos_embed": "sincos2d"}, {}, "MODEL.POS_EMBED sincos2d"),
        ({}, {"pos_embed": "sincos2d"}, "MODEL.POS_EMBED learn and MODEL.NO_EMBED_CLASS False"),
        ({"pre_norm": True}, {}, "MODEL.PRE_NORM True"),
        ({"init_values": 0.1}, {}, "MODEL.INIT_VALUES 1e-05"),
        ({"qk_norm": True}, {}, "MODEL.QK_NORM True"),
        ({"qkv_bias": False}, {}, "MODEL.QKV_BIAS False"),
    ],
)  # fmt: skip
def test_a_vit_that_computes_otherwise_is_refused_with_the_keys(tmp_path, file, model, keys):
    save_weights(small_vit(**file), tmp_path / "file.safetensors")
    with pytest.raises(InputError, match=f"; according to the names of its tensors, set {keys}$"):
        load_weights(small_vit(**model), tmp_path / "file.safetensors")


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ({"global_pool": "token"}, "MODEL.GLOBAL_POOL token"),
        ({"use_abs_pos_emb": True}, "MODEL.USE_ABS_POS_EMB True"),
        ({"use_rel_pos_bias": True}, "MODEL.USE_REL_POS_BIAS True"),
        ({"use_shared_rel_pos_bias": True}, "MODEL.USE_SHARED_REL_POS_BIAS True"),
        ({"init_values": 1.0}, "MODEL.INIT_VALUES 0.1"),
        ({"qkv_bias": False}, "MODEL.QKV_BIAS False"),
    ],
)
def test_a_beit_that_computes_otherwise_is_refused_with_the_keys(tmp_path, file, keys):
    plain = {"use_abs_pos_emb": False, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": False}
    plain |= {"init_values": None, "global_pool": "avg", "fc_norm": None}
    save_weights(small_beit(**plain | file), tmp_path / "file.safetensors")
    with pytest.raises(InputError, match=f"; according to the names of its tensors, set {keys}$"):
        load_weights(small_beit(**plain), tmp_path / "file.safetensors")


@pytest.mark.parametrize(
    ("case", "options", "key"),
    [("linear", {}, "MODEL.LINEAR True"), ("pvtv2", {"qkv_bias": False}, "MODEL.QKV_BIAS False")],
)
def test_pvtv2s_attention_is_told(tmp_path, case, options, key):
    save_weights(small_pyramid("pvtv2", case, **options), tmp_path / "file.safetensors")
    with pytest.raises(InputError, match=f"; according to the names of its tensors, set {key}$"):
        load_weights(small_pyramid("pvtv2", "pvtv2"), tmp_path / "file.safetensors")


@pytest.mark.parametrize(("file", "model"), [(1e-6, 0.0), (0.0, 1e-6)])
def test_convnexts_layer_scale_is_told(tmp_path, file, model):
    save_weights(small_convnext(init_values=file), tmp_path / "file.safetensors")
    with pytest.raises(
        InputError,
        match=f"; according to the names of its tensors, set MODEL.INIT_VALUES {file}$",
    ):
        load_weights(small_convnext(init_values=model), tmp_path / "file.safetensors")


@pytest.mark.parametrize(
    ("file", "model", "keys"),
    [
        ("convnext_v2", {}, "MODEL.INIT_VALUES 0.0 and MODEL.USE_GRN True"),
        ("convnext", {"stem_type": "overlap"}, "MODEL.STEM_TYPE patch"),
        (
            "convnext_tiered",
            {"conv_mlp": True, "embed_dims": (22, 8, 8, 16)},
            "MODEL.STEM_TYPE overlap_tiered",
        ),
        (
            "convnext_v2_conv",
            {},
            "MODEL.INIT_VALUES 0.0 and MODEL.USE_GRN True and MODEL.STEM_TYPE overlap",
        ),
    ],
)
def test_convnexts_stem_and_norm_are_told(tmp_path, file, model, keys):
    save_weights(small_convnext(file), tmp_path / "file.safetensors")
    with pytest.raises(InputError, match=f"; according to the names of its tensors, set {keys}$"):
        load_weights(small_convnext(**model), tmp_path / "file.safetensors")


def test_a_file_of_another_family_tells_no_keys(tmp_path):
    poolformer = small_pyramid("poolformer", "poolformer")
    pvtv2 = small_pyramid("pvtv2", "pvtv2")
    for source, model in (
        (poolformer, small_vit()),
        (poolformer, small_beit()),
        (pvtv2, poolformer),
    ):
        save_weights(source, tmp_path / "file.safetensors")
        with pytest.raises(InputError) as refusal:
            load_weights(model, tmp_path / "file.safetensors")
        assert "according to the names of its tensors" not in str(refusal.value)


def test_an_activation_that_only_the_name_of_the_model_tells_is_refused(tmp_path):
    save_weights(small_vit(pre_norm=True), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": "vit_base_patch32_clip_quickgelu_224"}')
    with pytest.raises(InputError, match="its model uses the quick GELU; set MODEL.ACT quick_gelu"):
        load_weights(small_vit(pre_norm=True), tmp_path)
    assert load_weights(small_vit(pre_norm=True, act="quick_gelu"), tmp_path).missing == []


def test_the_command_line_evaluates_and_trains_with_what_the_names_tell(program, tmp_path):
    file = timms_poolformer(tmp_path)
    words = [
        *SIZES["poolformer"],
        "DATA.SYNTHETIC_SIZE",
        "4",
        "DATA.IMAGE_SIZE",
        "64",
        "DATA.NUM_WORKERS",
        "0",
    ]
    short = ["TRAIN.NUM_EPOCHS", "1", "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.COOLDOWN_EPOCHS", "0"]
    flags = ["-cfg=poolformer_s12", "-dataset=synthetic", "-batch_size=4", f"-pretrained={file}"]
    for others, more in ((["-output=trained"], short), (["-eval", "-output=evaluated"], [])):
        status, _, errors = program("main_single_gpu.py", *flags, *others, "-o", *words, *more)
        assert status == 0, errors
        run = tmp_path / others[-1].partition("=")[2]
        assert (
            f"MODEL.FC_NORM True, according to the names in {file}" in (run / "log.txt").read_text()
        )
        assert json.loads((run / "result.json").read_text())["config"]["MODEL"]["FC_NORM"] is True
    status, _, errors = program(
        "main_single_gpu.py", *flags, "-eval", "-o", *words, "MODEL.FC_NORM", "False"
    )
    assert (status, errors.count("error: ")) == (2, 1)
    assert "according to the names of its tensors, set MODEL.FC_NORM True" in errors


# ---------------------------------------------------------- PaddleViT's MAE


def maes(model):
    """A plain ViT's arrays as PaddleViT's MAE names them: without its position embedding, which is
    computed there.
    """
    theirs = {}
    for name, array in file_arrays(model).items():
        if name == "pos_embed":
            continue
        for ours, other in (
            ("cls_token", "patch_embedding.cls_token"), ("patch_embed.proj.", "patch_embedding.patch_embedding."),
            ("blocks.", "encoder.layers."), ("norm1.", "attn_norm."), ("norm2.", "mlp_norm."),
            ("attn.proj.", "attn.out."), ("head.", "classifier."),
        ):  # fmt: skip
            name = name.replace(ours, other)
        name = f"encoder.encoder_{name}" if name.startswith("norm.") else name
        theirs[name] = array.T if array.ndim == 2 else array
    return theirs


def test_the_position_that_paddlevits_mae_computes_is_computed(tmp_path):
    theirs = maes(small_vit())
    write_weights(tmp_path / "mae.pdparams", theirs)
    model = small_vit()
    report = load_weights(model, tmp_path / "mae.pdparams")
    assert report.notes == ["pos_embed computed, because files of its toolkit omit it"]
    position = model.pos_embed.numpy()
    _, length, channels = position.shape
    for place in (0, 1, length - 1):
        for channel in (0, 5, channels - 2):
            even = channel // 2 * 2
            wave = np.cos if channel % 2 else np.sin
            assert position[0, place, channel] == pytest.approx(
                wave(place / 10000 ** (even / channels)), abs=1e-6
            )
    with pytest.raises(
        InputError,
        match="unexpected norm.weight, norm.bias; according to the names of its tensors, set MODEL.GLOBAL_POOL token",
    ):
        load_weights(small_vit(global_pool="avg"), tmp_path / "mae.pdparams")
    with pytest.raises(InputError, match="missing pos_embed"):  # there the class token has no place
        load_weights(small_vit(no_embed_class=True), tmp_path / "mae.pdparams")
    del theirs["encoder.encoder_norm.weight"], theirs["encoder.encoder_norm.bias"]
    norm = {f"encoder_norm.{leaf}": np.full(24, 2, np.float32) for leaf in ("weight", "bias")}
    # its later MAE, which reads the patches' mean
    write_weights(tmp_path / "mean.pdparams", theirs | norm)
    with pytest.raises(
        InputError, match="according to the names of its tensors, set MODEL.GLOBAL_POOL avg"
    ):
        load_weights(small_vit(), tmp_path / "mean.pdparams")


# ------------------------------------------------- PaddleViT's checkpoints


def paddles(arrays):
    """Arrays as ``paddle.save`` writes tensors inside of a dictionary: (name, array)."""
    return {
        name: Call(
            "builtins",
            "tuple",
            ((f"parameter_{i}", numpy_array(array.shape, array.astype("<f4").tobytes())),),
        )
        for i, (name, array) in enumerate(arrays.items())
    }


@pytest.mark.parametrize("average", [False, True])
def test_a_training_checkpoint_gives_its_weights_and_tells_which(tmp_path, average):
    own = {name: tensor.numpy() for name, tensor in small_vit().state_dict().items()}
    content = {"model": paddles(own)}
    if average:
        content["model_ema"] = paddles({name: array + 1 for name, array in own.items()})
    content |= {
        "optimizer": paddles({"linear_0.w_0_moment1_0": np.ones((24, 24))})
        | {"LR_Scheduler": {"last_lr": 0.1}}
    }
    content |= {
        "epoch": 7,
        "lr_scheduler": {"last_epoch": 7, "last_lr": 1e-3},
        "amp_grad_scaler": {"scale": None},
    }
    file = write_pickle(tmp_path / "Epoch-7-Loss-2.5.pdparams", program(content))
    model = small_vit()
    report = load_weights(model, file)
    assert (model.head.bias.numpy() == own["head.bias"] + average).all()
    assert report.notes == (
        ["its model_ema was used (it contains model_ema, model)"] if average else []
    )


def test_an_optimizers_state_is_no_weights(tmp_path):
    (tmp_path / "a.pdopt").write_bytes(program({}))
    with pytest.raises(
        InputError, match=r"a\.pdopt is the state of an optimizer; pass its weights, .*a\.pdparams$"
    ):
        load_weights(small_vit(), tmp_path / "a.pdopt")


def test_code_in_a_training_checkpoint_is_not_run(tmp_path):
    content = {
        "model": {"head.bias": Call("os", "system", ("true",))},
        "optimizer": {"x": Named("os", "system")},
    }
    file = write_pickle(tmp_path / "hostile.pdparams", program(content))
    with pytest.raises(
        InputError, match="it asks to load os.system; only arrays and plain containers are read"
    ):
        load_weights(small_vit(), file)
