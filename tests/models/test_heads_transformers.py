"""UPerNet and DPT against transformers' models (golden/make_heads.py)."""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import array, places
from golden.heads import CLASSES, CONVNEXT, OTHER_SIZES, PLAIN, SIZES, SWIN, images, loss_weights
from safetensors.numpy import save_file
from support.parity import in_float64

from config import get_config
from errors import InputError
from models import build_model, with_switches
from models.layers.batch_norm import BatchNorm2D
from training.checkpoint import description_of, task_of
from weights import load_weights
from weights.layout import linear_weights
from weights.names import timm_names
from weights.transformers import read_transformers

GOLDEN = ROOT / "tests" / "golden"
STORED = json.loads((GOLDEN / "heads.json").read_text())
SWIN_KEYS = {
    "PATCH_SIZE": SWIN["patch_size"],
    "EMBED_DIM": SWIN["embed_dim"],
    "STAGE_DEPTHS": SWIN["depths"],
    "NUM_HEADS": SWIN["num_heads"],
    "WINDOW_SIZE": SWIN["window_size"],
    "PAD_FIRST": True,
    "ALWAYS_PARTITION": True,
}
CONVNEXT_KEYS = {"STAGE_DEPTHS": CONVNEXT["depths"], "EMBED_DIMS": CONVNEXT["hidden_sizes"]}
PLAIN_KEYS = {
    "EMBED_DIM": PLAIN["hidden_size"],
    "DEPTH": PLAIN["num_hidden_layers"],
    "NUM_HEADS": PLAIN["num_attention_heads"],
    "MLP_RATIO": 2.0,
    "NORM_EPS": 1e-12,
}
UPERNET = {"NAME": "upernet", "PYRAMID_CHANNELS": 10, "AUXILIARY_CHANNELS": 6}
DPT = {
    "NAME": "dpt",
    "INDICES": [0, 1, 3, 4],
    "NECK_CHANNELS": [6, 8, 10, 12],
    "FUSION_CHANNELS": 10,
}
VIT = "vit_tiny_patch16_224"
# The shipped model, keys of MODEL, keys of HEAD.
MODELS = {
    "upernet_swin": ("swin_tiny_patch4_window7_224", SWIN_KEYS, UPERNET),
    "upernet_convnext": (
        "convnext_tiny",
        CONVNEXT_KEYS,
        UPERNET | {"MAP_NORM_EPS": 1e-6, "POOL_SCALES": [1, 2, 4]},
    ),
    "upernet_beit": (
        "beit_base_patch16_224",
        PLAIN_KEYS | {"PATCH_SIZE": 8},
        UPERNET
        | {"PYRAMID_CHANNELS": 12, "INDICES": [0, 1, 2, 3], "MAP_NORMS": False, "STRIDE": 32},
    ),
    "dpt": (VIT, PLAIN_KEYS, DPT | {"FUSION_BATCH_NORM": False}),
    "dpt_add": (VIT, PLAIN_KEYS, DPT | {"READOUT": "add"}),
    "dpt_ignore": (VIT, PLAIN_KEYS, DPT | {"READOUT": "ignore", "FUSION_BATCH_NORM": False}),
}


def loaded(name, folder):
    """Returns a case's model without dropout, with the weights of a file of transformers."""
    shipped, keys, head = MODELS[name]
    options = ["TASK", "segmentation", "MODEL.NUM_CLASSES", CLASSES, "HEAD.DROPOUT", 0.0]
    # Swin's last map of this size has 2 x 2 places, fewer than its windows.
    options += ["DATA.IMAGE_SIZE", 64 if "swin" in name else SIZES[name][0]]
    options += ["MODEL.DROPPATH", 0.0, "DATA.CROP_MODE", "squash", "DATA.CROP_PCT", 1.0]
    for key, value in keys.items():
        options += [f"MODEL.{key}", value]
    for key, value in head.items():
        options += [f"HEAD.{key}", value]
    model = build_model(get_config(shipped, options))
    write(name, folder)
    load_weights(model, folder / "model.safetensors")
    return model


def write(name, folder):
    tensors = {key: array(key, shape) for key, shape in STORED[name]["tensors"].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(STORED[name]["config"]))


def assert_near(found, expected, key):
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0, err_msg=key)


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    with np.load(GOLDEN / f"heads_{name}.npz") as file:
        golden = dict(file)
    model = loaded(name, tmp_path)
    inputs = paddle.to_tensor(images(name))
    model.eval()
    logits = model(inputs)
    assert logits.shape == [2, CLASSES, *SIZES[name]]
    # The images have an effect, which is well above the tolerance.
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3 * np.ptp(golden["logits"])
    assert_near(places(logits.numpy(), 512), golden["logits"], "logits")

    model.train()
    with paddle.no_grad():
        main, auxiliary = model(inputs)
    assert_near(places(main.numpy(), 512), golden["train"], "train")
    assert_near(places(auxiliary.numpy(), 512), golden["auxiliary"], "auxiliary")

    with in_float64():
        model = loaded(name, tmp_path)
    inputs = inputs.astype("float64")
    model.train()
    with paddle.no_grad():
        model(inputs)
    for layer in model.sublayers():
        if isinstance(layer, BatchNorm2D):
            layer.eval()
    outputs = model(inputs)
    loss = paddle.zeros([], "float64")
    for key, output in zip(("train", "auxiliary"), outputs, strict=True):
        loss += (output * paddle.to_tensor(loss_weights(name, key, tuple(output.shape)))).sum()
    loss.backward()
    assert_gradients(model, golden)


def assert_gradients(model, golden):
    """Asserts that gradients are those of the golden file, whose names are transformers'."""
    stored = {key.removeprefix("grad/"): golden[key] for key in golden if key.startswith("grad/")}
    expected = timm_names(model.weight_names, stored, "torch", model.state_dict())
    transposed = linear_weights(model)
    largest = {key: np.abs(value).max() for key, value in expected.items()}
    # A gradient whose terms cancel out is only rounding.
    least = 2e-2 * max(largest.values())
    gradients = {
        key: parameter.grad.numpy()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert gradients.keys() == expected.keys()
    for key, value in expected.items():
        found = gradients[key].T if key in transposed else gradients[key]
        np.testing.assert_allclose(
            found, value, atol=1e-5 * max(largest[key], least), rtol=0, err_msg=key
        )


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_alone_describes_the_model(name, tmp_path):
    """The description of weights with config.json builds the model and gives its logits."""
    write(name, tmp_path)
    description = description_of(tmp_path)
    assert (description.task, task_of(tmp_path)) == ("segmentation", "segmentation")
    model = build_model(description.to_config())
    load_weights(model, tmp_path)
    model.eval()
    logits = model(paddle.to_tensor(images(name))).numpy()
    with np.load(GOLDEN / f"heads_{name}.npz") as golden:
        assert_near(places(logits, 512), golden["logits"], "logits")


@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize("size", OTHER_SIZES["dpt"])
def test_dpts_positions_are_resized_bilinearly(size, is_declared, tmp_path):
    """Both where images of IMAGE_SIZE have other positions than the file, and where an image has
    other ones than those.
    """
    write("dpt", tmp_path)
    if is_declared:
        preprocessor = {"size": {"height": size[0], "width": size[1]}}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    model = build_model(description_of(tmp_path).to_config())
    report = load_weights(model, tmp_path)
    assert ("pos_embed resized from 4 x 4" in str(report)) is is_declared
    model.eval()
    logits = model(paddle.to_tensor(images("dpt", size)))
    with np.load(GOLDEN / "heads_dpt.npz") as golden:
        assert_near(places(logits.numpy(), 512), golden[f"logits_{size[0]}"], "logits")


@pytest.mark.parametrize("side", [32, 64])
def test_swins_windows_keep_their_size_for_small_images(side, tmp_path):
    """Whatever IMAGE_SIZE is, the logits of transformers' Swin are the same ones."""
    write("upernet_swin", tmp_path)
    preprocessor = {"size": {"height": side, "width": side}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    model = build_model(description_of(tmp_path).to_config())
    report = load_weights(model, tmp_path)
    assert "resized" not in str(report)
    model.eval()
    logits = model(paddle.to_tensor(images("upernet_swin"))).numpy()
    with np.load(GOLDEN / "heads_upernet_swin.npz") as golden:
        assert_near(places(logits, 512), golden["logits"], "logits")


def changed(folder, name, **changes):
    """Writes a case whose config.json differs; a change within the backbone has its prefix."""
    write(name, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        part = config["backbone_config"] if key.startswith("backbone__") else config
        part[key.removeprefix("backbone__")] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "upernet_swin",
            {"auxiliary_num_convs": 2},
            "auxiliary_num_convs is 2, only 1",
        ),
        ("upernet_swin", {"auxiliary_concat_input": True}, "auxiliary_concat_input is True"),
        ("upernet_swin", {"backbone__out_features": ["stage4"]}, r"out_features is \['stage4'\]"),
        (
            "upernet_swin",
            {"backbone__model_type": "nat"},
            "it describes a nat, which isn't supported",
        ),
        (
            "upernet_swin",
            {"backbone__model_type": "swinv2"},
            "its backbone is a 'swinv2', expected",
        ),
        ("upernet_swin", {"backbone_config": None}, "it describes a None, which isn't supported"),
        ("upernet_swin", {"pool_scales": [0]}, r"its pool_scales is \[0\], expected whole numbers"),
        ("upernet_beit", {"out_indices": [1, 2, 3, 4]}, "out_indices is .*, expected four numbers"),
        ("upernet_beit", {"out_indices": [5]}, r"out_indices is \[5\], expected four numbers"),
        ("dpt", {"is_hybrid": True}, "is_hybrid is True, only False is supported"),
        ("dpt", {"reassemble_factors": [4, 2, 1, 1]}, r"reassemble_factors is \[4, 2, 1, 1\]"),
        ("dpt", {"use_bias_in_fusion_residual": False}, "use_bias_in_fusion_residual is False"),
        (
            "dpt",
            {"architectures": ["DPTForDepthEstimation"]},
            "is DPTForDepthEstimation, which isn't",
        ),
    ],
)
def test_other_heads_are_refused(name, changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        description_of(changed(tmp_path, name, **changes))


def test_what_changes_no_shapes_is_taken_from_config_json(tmp_path):
    """The user's own value stays, and both are noted."""
    write("upernet_convnext", tmp_path)
    options = ["TASK", "segmentation", "HEAD.NAME", "upernet", "MODEL.NUM_CLASSES", CLASSES]
    options += ["DATA.CROP_MODE", "squash", "DATA.CROP_PCT", 1.0]
    config = with_switches(get_config("convnext_tiny", options), tmp_path)
    assert (config.HEAD.POOL_SCALES, config.HEAD.MAP_NORM_EPS) == ([1, 2, 4], 1e-6)
    own = get_config("convnext_tiny", [*options, "HEAD.POOL_SCALES", [1, 2, 3]])
    assert with_switches(own, tmp_path).HEAD.POOL_SCALES == [1, 2, 3]
    other = get_config("convnext_tiny", [*options, "HEAD.NAME", "segmenter"])
    assert with_switches(other, tmp_path).HEAD.NAME == "segmenter"


def test_images_have_the_preprocessors_size(tmp_path):
    write("upernet_swin", tmp_path)
    assert read_transformers(tmp_path)["images"]["input_size"] == [3, 512, 512]
    preprocessor = {"size": {"height": 256, "width": 384}, "image_mean": [0.5, 0.4, 0.3]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    values = description_of(tmp_path).values
    assert values["DATA.IMAGE_SIZE"] == [256, 384]
    assert (values["DATA.CROP_MODE"], values["DATA.CROP_PCT"]) == ("squash", 1.0)
    assert values["DATA.IMAGENET_MEAN"] == [0.5, 0.4, 0.3]
