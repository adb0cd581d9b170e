"""transformers' files load with no other step: logits are its own
(golden/make_names_transformers.py).
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import positive, values

from config import get_config
from errors import InputError
from models import build_model, with_switches
from models.pretrained import with_preprocessing
from training.checkpoint.description import description_of
from weights import load_weights
from weights.formats import write_weights

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_transformers.json").read_text())


@pytest.fixture
def folder(tmp_path):
    """Returns a function that writes a case's folder, with changes of its config.json, and returns
    its path.
    """

    def folder(case, **changes):
        golden = GOLDEN[case]
        arrays = {name: positive(name, shape) for name, shape in golden["shapes"].items()}
        write_weights(tmp_path / "model.safetensors", arrays)
        (tmp_path / "config.json").write_text(json.dumps(golden["config"] | changes))
        return tmp_path

    return folder


def outputs(case, config):
    """What the model of a configuration gives, with its weights: logits, or the features that its
    head would read.
    """
    size = GOLDEN[case]["size"]
    model = build_model(config)
    load_weights(model, config.MODEL.PRETRAINED)
    model.eval()
    return model(paddle.to_tensor(values("images", (2, 3, size, size)))).numpy()


@pytest.mark.smoke
@pytest.mark.parametrize("case", GOLDEN)
def test_a_folder_alone_builds_the_model_and_gives_its_logits(case, folder):
    path = folder(case)
    config = description_of(path).to_config(["MODEL.PRETRAINED", str(path)])
    expected = np.array(GOLDEN[case]["outputs"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    np.testing.assert_allclose(
        outputs(case, config), expected, atol=2e-5 * np.ptp(expected), rtol=0
    )


def test_what_config_json_tells_counts_where_nobody_says_otherwise(folder):
    """An epsilon of 0.5, a head more and OpenAI's GELU change no shape: without them other logits
    would come.
    """
    path = folder("vit", layer_norm_eps=1e-4, hidden_act="quick_gelu", num_attention_heads=6)
    sizes = [
        "MODEL.PATCH_SIZE",
        4,
        "MODEL.EMBED_DIM",
        24,
        "MODEL.DEPTH",
        2,
        "MODEL.MLP_RATIO",
        2,
        "DATA.IMAGE_SIZE",
        16,
    ]
    words = [*map(str, sizes), "MODEL.NUM_CLASSES", "7", "MODEL.PRETRAINED", str(path)]
    config = with_preprocessing(get_config("vit_tiny_patch16_224", words))
    assert (config.MODEL.NORM_EPS, config.MODEL.ACT, config.MODEL.NUM_HEADS) == (
        1e-4,
        "quick_gelu",
        6,
    )
    told = [note for note in config.notes if f"according to the config.json of {path}" in note]
    assert [note.partition(",")[0] for note in told] == [
        "MODEL.NUM_HEADS 6",
        "MODEL.NORM_EPS 0.0001",
        "MODEL.ACT 'quick_gelu'",
    ]
    own = with_switches(
        get_config("vit_tiny_patch16_224", [*words, "MODEL.NORM_EPS", "1e-5"]), path
    )
    assert own.MODEL.NORM_EPS == 1e-5
    assert any(note.endswith("yours is 1e-05") for note in own.notes)


def test_other_models_and_settings_are_refused(folder):
    for case, changes, cfg, message in (
        (
            "vit",
            {"model_type": "bert"},
            "vit_tiny_patch16_224",
            "it describes a bert, which isn't supported; use other weights",
        ),
        (
            "swin",
            {},
            "vit_tiny_patch16_224",
            "it describes a Swin, but vit_tiny_patch16_224 is a ViT",
        ),
        (
            "swin",
            {"hidden_act": "relu"},
            "swin_tiny_patch4_window7_224",
            "hidden_act is 'relu', only 'gelu' is supported",
        ),
        (
            "vit",
            {"hidden_act": "silu"},
            "vit_tiny_patch16_224",
            "hidden_act is 'silu', expected one of gelu, ",
        ),
        (
            "vit",
            {"hidden_size": "wide"},
            "vit_tiny_patch16_224",
            "its hidden_size is 'wide', expected a whole number",
        ),
        (
            "vit",
            {"layer_norm_eps": 7},
            "vit_tiny_patch16_224",
            "MODEL.NORM_EPS is 7.0, expected 1e-12 to 0.001",
        ),
        (
            "resnet",
            {"downsample_in_bottleneck": True},
            "resnet18",
            "downsample_in_bottleneck is True, only",
        ),
        (
            "hiera",
            {"num_heads": [1, 2, 2, 2]},
            "hiera_tiny_224",
            "num_heads is [1, 2, 2, 2], only [1, 2, 4, 8]",
        ),
        (
            "hiera",
            {"masked_unit_size": [4, 4]},
            "hiera_tiny_224",
            "masked_unit_size is [4, 4], only [8, 8]",
        ),
        (
            "hiera",
            {"masked_unit_attention": [True, False, True, False]},
            "hiera_tiny_224",
            "masked_unit_attention is [True, False, True, False], only the first stages can have it",
        ),
        (
            "hiera",
            {"masked_unit_attention": "all"},
            "hiera_tiny_224",
            "expected a list of true and false",
        ),
        (
            "hiera",
            {"num_query_pool": 1},
            "hiera_tiny_224",
            "num_query_pool is 1, expected at least 2 with",
        ),
        (
            "hiera",
            {"num_query_pool": "two"},
            "hiera_tiny_224",
            "its num_query_pool is 'two', expected a whole number",
        ),
        (
            "swinv2",
            {"pretrained_window_sizes": 8},
            "swinv2_tiny_window8_256",
            "expected whole numbers",
        ),
        (
            "levit",
            {"key_dim": [8, 8, 4]},
            "levit_128s",
            "key_dim is [8, 8, 4], only [8, 8, 8] is supported",
        ),
        (
            "levit",
            {"down_ops": [[""]] * 3},
            "levit_128s",
            "down_ops has unsupported transitions between stages",
        ),
    ):
        path = folder(case, **changes)
        with pytest.raises(InputError) as caught:
            with_switches(get_config(cfg), path)
        assert message in str(caught.value), (case, changes)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("preprocessor", "expected"),
    [
        ({"size": {"height": 224, "width": 224}, "resample": 2}, ("bilinear", 1.0, "squash")),
        (
            {
                "size": {"shortest_edge": 256},
                "crop_size": {"height": 224, "width": 224},
                "do_center_crop": True,
            },
            (None, 0.875, "center"),
        ),
        (
            {"size": {"height": 256, "width": 256}, "crop_size": 224, "do_center_crop": True},
            (None, 0.875, "squash"),
        ),
        (
            {"size": {"shortest_edge": 224}, "crop_pct": 0.875, "resample": 3},
            ("bicubic", 0.875, "center"),
        ),
        (
            {"size": {"shortest_edge": 384}, "crop_pct": 0.875, "resample": 3},
            ("bicubic", 1.0, "squash"),
        ),
        ({"size": 224, "resample": 3}, ("bicubic", 1.0, "squash")),
    ],
)
def test_images_are_prepared_as_the_preprocessor_says(preprocessor, expected, folder):
    path = folder("vit", id2label={str(number): f"c{number}" for number in range(7)})
    preprocessor |= {
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.2, 0.2],
        "do_normalize": True,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    described = description_of(path)
    data = described.to_config(["MODEL.PRETRAINED", str(path)]).DATA
    interpolation, share, mode = expected
    assert (interpolation or "bicubic", share, mode) == (
        data.INTERPOLATION,
        data.CROP_PCT,
        data.CROP_MODE,
    )
    assert (data.IMAGENET_MEAN, data.IMAGENET_STD, data.IMAGE_SIZE) == (
        [0.5, 0.4, 0.3],
        [0.2, 0.2, 0.2],
        16,
    )
    assert described.classes == [f"c{number}" for number in range(7)]


def test_a_whole_clip_is_read_as_its_image_tower(folder):
    path = folder("clip")
    golden = GOLDEN["clip"]
    arrays = {name: positive(name, shape) for name, shape in golden["shapes"].items()}
    others = {
        "text_model.embeddings.token_embedding.weight": np.ones((3, 4), np.float32),
        "logit_scale": np.ones(1, np.float32),
    }
    write_weights(path / "model.safetensors", arrays | others)
    tower = {
        key: value
        for key, value in golden["config"].items()
        if key not in ("model_type", "architectures", "projection_dim")
    }
    whole = {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": 7,
        "vision_config": tower,
    }
    (path / "config.json").write_text(json.dumps(whole))
    config = description_of(path).to_config(["MODEL.PRETRAINED", str(path)])
    expected = np.array(golden["outputs"])
    np.testing.assert_allclose(
        outputs("clip", config), expected, atol=2e-5 * np.ptp(expected), rtol=0
    )


def test_a_swin_v2_of_fewer_stages_has_the_default_windows(folder):
    """transformers writes pretrained_window_sizes [0, 0, 0, 0] for any number of stages."""
    path = folder("swinv2", depths=[1, 1], num_heads=[1, 2], pretrained_window_sizes=[0, 0, 0, 0])
    config = description_of(path).to_config([])
    assert config.MODEL.PRETRAINED_WINDOW_SIZES == [0, 0]


def test_hieras_masked_pre_training_is_read_as_its_encoder(folder):
    """Its decoder is dropped, and MODEL.Q_POOL stays the classifier's."""
    path = folder("hiera")
    golden = GOLDEN["hiera"]
    shapes = {
        name: shape
        for name, shape in golden["shapes"].items()
        if not name.startswith("classifier.")
    }
    arrays = {
        name.replace("hiera.pooler.layernorm.", "encoder_norm."): positive(name, shape)
        for name, shape in shapes.items()
    }
    others = ("decoder.mask_token", "decoder.decoder_block.layers.0.attn.qkv.weight")
    others += ("multiscale_fusion.multi_scale_fusion_heads.0.weight",)
    write_weights(
        path / "model.safetensors", arrays | dict.fromkeys(others, np.ones(3, np.float32))
    )
    masked = golden["config"] | {"architectures": ["HieraForPreTraining"], "num_query_pool": 2}
    (path / "config.json").write_text(json.dumps(masked))
    words = ["MODEL.EMBED_DIM", "4", "MODEL.STAGE_DEPTHS", "[1, 2, 1, 1]", "DATA.IMAGE_SIZE", "64"]
    config = with_preprocessing(
        get_config("hiera_tiny_224", [*words, "MODEL.PRETRAINED", str(path)])
    )
    assert config.MODEL.Q_POOL == 3
    model = build_model(config)
    report = load_weights(model, path, strict=False)
    assert report.changes == [
        "classifier initialised randomly: none in the file, 1000 in the model"
    ]
    model.head.fc = paddle.nn.Linear(32, 7)
    for name, parameter in (("weight", model.head.fc.weight), ("bias", model.head.fc.bias)):
        value = positive(f"classifier.{name}", golden["shapes"][f"classifier.{name}"])
        parameter.set_value(value.T)
    model.eval()
    images = paddle.to_tensor(values("images", (2, 3, 64, 64)))
    expected = np.array(golden["outputs"])
    np.testing.assert_allclose(
        model(images).numpy(), expected, atol=2e-5 * np.ptp(expected), rtol=0
    )
