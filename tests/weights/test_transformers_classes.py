"""What of transformers' classes and configurations is read, and that all else is refused by its
name.
"""

import json
import re
import subprocess

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT
from golden.make_names_vit import positive
from golden.make_names_vit import values as numbers

from config import get_config
from errors import InputError
from inference import Predictor
from models import build_model, create_model, with_switches
from models.transformers_arguments import described_model
from models.transformers_heads import described_head
from training.checkpoint import check_task, description_of, task_of
from weights import load_weights
from weights.formats import write_weights
from weights.transformers import HEADS, read_transformers

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_transformers.json").read_text())
HEADS_GOLDEN = json.loads((ROOT / "tests" / "golden" / "heads.json").read_text())
KINDS = json.loads((ROOT / "tests" / "golden" / "transformers_kinds.json").read_text())
WHOLE = {
    "clip": "clip_vision_model",
    "siglip": "siglip_vision_model",
    "siglip2": "siglip2_vision_model",
}
# Keys that change nothing that a model here computes: of training, of heads that aren't read, of
# feature maps.
NO_EFFECT = {
    *(
        "decoder_num_attention_heads",
        "decoder_hidden_size",
        "decoder_num_hidden_layers",
        "decoder_intermediate_size",
        "mask_ratio",
        "norm_pix_loss",
    ),
    *(
        "initializer_range",
        "initializer_factor",
        "layer_norm_init",
        "drop_path_rate",
        "attention_dropout",
    ),
    *(
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "classifier_dropout_prob",
        "aspp_dropout_prob",
    ),
    *(
        "pooler_output_size",
        "pooler_act",
        "encoder_stride",
        "vocab_size",
        "use_mask_token",
        "mask_ratio",
    ),
    *("normalize_pixel_loss", "decoder_hidden_size", "decoder_depth", "decoder_num_heads"),
    *(
        "pool_scales",
        "use_auxiliary_head",
        "auxiliary_loss_weight",
        "auxiliary_channels",
        "auxiliary_num_convs",
    ),
    *(
        "auxiliary_concat_input",
        "semantic_loss_ignore_index",
        "loss_ignore_index",
        "add_fpn",
        "aspp_out_channels",
        "atrous_rates",
    ),
    *("stage_names", "out_features", "out_indices", "reshape_hidden_states", "apply_layernorm"),
    *("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"),
    *("text_config", "logit_scale_init_value"),
    *("no_object_weight", "class_weight", "mask_weight", "dice_weight"),
    *("train_num_points", "oversample_ratio", "importance_sample_ratio"),
}
# Keys that repeat others, or that the tensors' shapes tell.
TOLD = {
    "swin": {"num_layers", "hidden_size"},
    "swinv2": {"num_layers", "hidden_size"},
    "hiera": {"hidden_size"},
}
TOLD |= {"resnet": {"hidden_sizes"}, "convnext": {"num_stages"}, "convnextv2": {"num_stages"}}
TOLD |= {
    "poolformer": {"patch_size", "stride"},
    "clip": {"vision_config"},
    "siglip": {"vision_config"},
    "siglip2": {"vision_config"},
}
# SegFormer's norms have an epsilon of 1e-5, whatever its configuration says.
TOLD |= {"segformer": {"layer_norm_eps"}}
TOLD |= {"clip_vision_model": {"projection_dim"}}
TOLD |= {"upernet": {"auxiliary_in_channels"}}
# Of the hybrid, and of the head for depths.
TOLD |= {"dpt": {"backbone_featmap_shape", "neck_ignore_stages", "add_projection"}}


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def told(path):
    """All that config.json tells: the architecture, its keys, the head, the outputs, the images."""
    config = read_transformers(path)
    # BEiT's configuration has no four maps by default (tests/models/test_heads_transformers.py).
    head = {} if config["model_type"] == "beit" else described_head(path)
    return described_model(path), head, config["outputs"], config["images"]


@pytest.fixture
def folder(tmp_path):
    """Returns a function that writes a case's folder, with changes of its config.json, and returns
    its path.
    """

    def folder(case, **changes):
        shapes = GOLDEN[case]["shapes"]
        write_weights(
            tmp_path / "model.safetensors",
            {name: positive(name, shape) for name, shape in shapes.items()},
        )
        return written(tmp_path, GOLDEN[case]["config"] | changes)

    return folder


def test_each_class_that_is_read_has_its_answers_in_the_golden_file():
    assert HEADS.keys() == KINDS.keys()
    tested = {
        (entry["config"]["model_type"], *entry["config"]["architectures"])
        for entry in GOLDEN.values()
    }
    tested |= {("eomt", "EomtForUniversalSegmentation")}  # tests/models/test_eomt.py
    tested |= {("hiera", "HieraForPreTraining")}  # tests/weights/test_names_transformers.py
    # ViTMAEForPreTraining without its decoder
    tested |= {("vit_mae", "ViTMAEModel")}
    # tests/models/test_heads_segformer.py, test_heads_transformers.py
    tested |= {("segformer", "SegformerForSemanticSegmentation")}
    tested |= {
        (entry["config"]["model_type"], *entry["config"]["architectures"])
        for entry in HEADS_GOLDEN.values()
    }
    # A tower's class may stand in a file of either kind.
    tested |= {
        (kind, name)
        for whole, tower in WHOLE.items()
        for kind in (whole, tower)
        for name in HEADS[whole]
    }
    for kind, classes in HEADS.items():
        assert set(classes) <= set(KINDS[kind]["classes"])
        assert {(kind, name) for name in classes} <= tested


@pytest.mark.parametrize("page", ["models/weights.md", "zh/models/weights.md"])
def test_the_document_tells_the_classes(page):
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| (.*?) \| (.*?) \|$",
        (ROOT / "docs" / page).read_text(),
        re.MULTILINE,
    )
    documented = {}
    for kinds, read, refused in rows:
        for kind in re.findall(r"`(\w+)`", kinds):
            if kind in KINDS:
                documented[kind] = (
                    set(re.findall(r"`(\w+)`", read)),
                    set(re.findall(r"`(\w+)`", refused)),
                )
    assert documented == {
        kind: (set(classes), set(KINDS[kind]["classes"]) - set(classes))
        for kind, classes in HEADS.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_other_class_is_refused_by_its_name(kind, tmp_path):
    for name in ({*KINDS[kind]["classes"]} - HEADS[kind].keys()) | {"ViTForSomethingElse"}:
        path = written(
            tmp_path, KINDS[kind]["keys"] | {"model_type": kind, "architectures": [name]}
        )
        with pytest.raises(
            InputError,
            match=rf"its class \(architectures\) is {name}, which isn't supported; expected one",
        ):
            described_model(path)
    for several in ([], None, [*HEADS[kind]][:1] * 2):
        path = written(
            tmp_path, KINDS[kind]["keys"] | {"model_type": kind, "architectures": several}
        )
        with pytest.raises(InputError, match="which isn't supported; expected one of"):
            described_model(path)


# UPerNet's default is a backbone that no model here has.
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"upernet"}))
def test_a_key_that_is_left_out_has_the_default_of_its_class(kind, tmp_path):
    """transformers leaves out of vision_config what has its default."""
    named = {"model_type": kind, "architectures": [next(iter(HEADS[kind]))]}
    whole = KINDS[kind]["keys"]
    sparse = told(written(tmp_path, named))
    assert sparse == told(written(tmp_path, whole | named))


def others(value):
    """Other values of a key's type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value * 2 or 1]
    if isinstance(value, list):
        return [[*others(value[0]), *value[1:]]] if value else [[1]]
    return ["relu6"] if isinstance(value, str) else [1]


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_that_a_configuration_has_is_read_refused_or_without_effect(kind, tmp_path):
    """Another value of a key changes what is told of one of the kind's classes, or is refused."""
    keys = KINDS[kind]["keys"]
    tower = KINDS[WHOLE.get(kind, kind)]["keys"]
    without = NO_EFFECT | TOLD.get(WHOLE.get(kind, kind), set())

    def answers(changed):
        found = []
        for name in HEADS[kind]:
            path = written(tmp_path, keys | {"model_type": kind, "architectures": [name]} | changed)
            try:
                found.append(told(path))
            except InputError:
                found.append(None)
        return found

    own = answers({})
    assert None not in own
    for key, value in tower.items():
        for other in others(value) if key not in without else ():
            changed = {key: other}
            assert (
                answers({"vision_config": tower | changed} if kind in WHOLE else changed) != own
            ), (key, other)
    assert keys.keys() - tower.keys() <= NO_EFFECT | TOLD.get(kind, set()) | {"projection_dim"}


def test_what_stands_beside_a_tower_is_no_setting_of_it(tmp_path):
    """transformers reads the tower's sizes in vision_config, and nowhere else; the outputs are the
    whole's.
    """
    named = {"model_type": "clip", "architectures": ["CLIPModel"]}
    own = told(
        written(tmp_path, named | {"projection_dim": 7, "vision_config": {"projection_dim": 9}})
    )
    assert own[2] == 7
    assert told(written(tmp_path, named | {"projection_dim": 7, "num_attention_heads": 2})) == own
    plain = {"model_type": "vit", "architectures": ["ViTModel"]}
    own = told(written(tmp_path, plain))
    assert told(written(tmp_path, plain | {"vision_config": {"hidden_act": "relu"}})) == own


def test_the_task_is_that_of_problem_type(folder):
    case = "vit_multilabel"
    path = folder(case)
    golden = GOLDEN[case]
    assert (task_of(path), description_of(path).task) == ("multilabel", "multilabel")
    predictor = Predictor(path)
    images = paddle.to_tensor(numbers("images", (2, 3, 16, 16)))
    shares = predictor.probabilities(predictor.model(images).numpy())
    np.testing.assert_allclose(shares, 1 / (1 + np.exp(-np.array(golden["outputs"]))), atol=1e-5)
    assert Predictor(path, options=["TASK", "multilabel"]).task == "multilabel"
    with pytest.raises(
        InputError,
        match="the weights are for TASK multilabel, found TASK classification; pass -o TASK multi",
    ):
        Predictor(path, options=["TASK", "classification"])
    with pytest.raises(
        InputError, match="the weights are for TASK multilabel, found TASK classification"
    ):
        check_task(path, "classification")
    check_task(path, "multilabel")


def test_without_a_problem_type_the_user_decides(folder):
    path = folder("vit", problem_type=None)
    assert task_of(path) is None
    assert [Predictor(path).task, Predictor(path, options=["TASK", "multilabel"]).task] == [
        "classification",
        "multilabel",
    ]
    check_task(path, "multilabel")
    path = folder("vit", problem_type="single_label_classification")
    with pytest.raises(
        InputError, match="the weights are for TASK classification, found TASK multilabel"
    ):
        check_task(path, "multilabel")
    with pytest.raises(
        InputError, match="the weights are for TASK classification, found TASK multilabel"
    ):
        Predictor(path, options=["TASK", "multilabel"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"problem_type": "regression"},
            "problem_type is 'regression', expected single_label_classification, multi_",
        ),
        (
            {"problem_type": "ranking"},
            "problem_type is 'ranking', expected single_label_classification, multi_label",
        ),
        ({"problem_type": 3}, "its problem_type is 3, expected a short text"),
        (
            {"id2label": {"0": "a"}},
            "it has one label, which means regression or a sigmoid; expected two labels",
        ),
        (
            {"id2label": None, "num_labels": 1},
            "it has one label, which means regression or a sigmoid; expected",
        ),
        *(
            (
                {"id2label": dict.fromkeys(keys, "a")},
                "expected an object with the names of all outputs, from 0 on",
            )
            for keys in (
                ("1", "2"),
                ("0", "2"),
                ("0.0", "1.0"),
                ("0", " 1"),
                ("-1", "0"),
                ("cat", "dog"),
            )
        ),
        (
            {"id2label": {"0": 0, "1": 1}},
            "its id2label is a dictionary of 2, expected an object with the names of all outputs, from 0",
        ),
        (
            {"id2label": ["a", "b"]},
            "its id2label is ['a', 'b'], expected an object with the names of all outputs, from 0",
        ),
        (
            {"architectures": "ViTModel"},
            "its architectures is 'ViTModel', expected a list of names",
        ),
        (
            {"quantization_config": {"bits": 8}},
            "quantization_config is a dictionary of 1, only None is supported",
        ),
    ],
)
def test_heads_that_compute_otherwise_are_refused(changes, message, folder):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        description_of(folder("vit", **changes))
    assert str(caught.value).isprintable()


def test_labels_are_counted_as_transformers_does(tmp_path):
    named = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    assert read_transformers(written(tmp_path, named))["outputs"] == 2
    assert read_transformers(written(tmp_path, named | {"num_labels": 5}))["outputs"] == 5
    labels = {str(number): str(number) for number in range(3)}
    assert (
        read_transformers(written(tmp_path, named | {"num_labels": 5, "id2label": labels}))[
            "outputs"
        ]
        == 3
    )


def test_labels_may_stand_in_any_order_and_have_equal_names(tmp_path):
    """As ImageNet's 134 and 517, which are both called crane."""
    written(tmp_path, {"model_type": "vit", "id2label": {"2": "crane", "0": "bee", "1": "crane"}})
    assert read_transformers(tmp_path)["label_names"] == ["bee", "crane", "crane"]


@pytest.mark.parametrize(
    ("kind", "depths", "depth"),
    [("bottleneck", [2, 2, 2, 2], 26), ("basic", [2, 2, 2, 2], 18), ("basic", [1] * 4, 10)],
)
def test_a_resnet_of_any_depth_here_is_read(folder, kind, depths, depth):
    path = folder("resnet", layer_type=kind, depths=depths)
    read = described_model(path)
    assert read is not None
    assert read[1]["DEPTH"] == depth


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "pvt_v2",
            {"strides": [4, 2, 2, 1]},
            "strides is [4, 2, 2, 1], only [4, 2, 2, 2] is supported",
        ),
        (
            "poolformer",
            {"padding": [2, 1, 1, 0]},
            "padding is [2, 1, 1, 0], only [2, 1, 1, 1] is supported",
        ),
        (
            "resnet",
            {"depths": [2, 2, 3, 2]},
            "depths is [2, 2, 3, 2] of layer_type 'basic', which isn't supported",
        ),
        ("dinov3", {"key_bias": True}, "key_bias is True, only False is supported"),
        (
            "dinov3_gated",
            {"hidden_act": "gelu"},
            "hidden_act is 'gelu', only 'silu' is supported",
        ),
    ],
)
def test_settings_without_tensors_of_their_own_are_refused(kind, changes, message, folder):
    with pytest.raises(InputError, match=re.escape(message)):
        described_model(folder(kind, **changes))


def test_a_levit_may_have_been_built_and_saved_again(folder):
    """transformers appends an empty entry to down_ops whenever it builds the model."""
    own = GOLDEN["levit"]["config"]["down_ops"]
    assert own[-1] == [""]
    expected = described_model(folder("levit"))
    assert described_model(folder("levit", down_ops=[*own, [""], [""]])) == expected
    assert described_model(folder("levit", down_ops=own[:-1])) == expected


def test_an_encoder_leaves_the_pooling_to_the_model(folder):
    """DINOv3's classifier here reads the mean of the patches; transformers' class has none."""
    sizes = [
        "MODEL.EMBED_DIM",
        "24",
        "MODEL.NUM_HEADS",
        "3",
        "MODEL.DEPTH",
        "2",
        "MODEL.PATCH_SIZE",
        "4",
    ]
    config = with_switches(
        get_config("vit_small_patch16_dinov3", [*sizes, "MODEL.MLP_RATIO", "2"]), folder("dinov3")
    )
    assert (
        config.MODEL.GLOBAL_POOL
        == get_config("vit_small_patch16_dinov3").MODEL.GLOBAL_POOL
        == "avg"
    )


@pytest.mark.parametrize("case", ["vit_model", "dinov3", "siglip", "clip", "clip_whole"])
def test_features_are_no_classes(case, folder):
    predictor = Predictor(folder(case))
    with pytest.raises(
        InputError,
        match=r"has no classifier: it gives features, not classes; compute its features by tools/features\.py",
    ):
        predictor([np.zeros((16, 16, 3), np.uint8)])


def test_an_exported_projection_gives_features(folder, tmp_path):
    """The export tells it; its client gets no probabilities of features."""
    command = [
        warm.python(),
        str(ROOT / "tools" / "export_model.py"),
        f"-pretrained={folder('clip')}",
    ]

    def export(*flags):
        return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)

    done = export(f"-output={tmp_path}/out")
    assert done.returncode == 0, done.stderr
    exported = Predictor(tmp_path / "out")
    assert exported.logits(np.zeros((1, 16, 16, 3), np.uint8)).shape[0] == 1
    told = f"{tmp_path}/out has no classifier: it gives features, not classes; export a classifier"
    with pytest.raises(InputError, match=f"^{re.escape(told)}"):
        exported([np.zeros((16, 16, 3), np.uint8)])
    done = export(f"-output={tmp_path}/for-paddlex", "-format=paddlex")
    assert done.returncode == 2
    assert "has no classifier: it gives features, not classes" in done.stderr
    assert not (tmp_path / "for-paddlex").exists()


@pytest.mark.parametrize(
    ("preprocessor", "expected"),
    [
        (
            {
                "size": 224,
                "crop_size": 224,
                "do_center_crop": True,
                "feature_extractor_type": "CLIPFeatureExtractor",
            },
            1.0,
        ),
        (
            {
                "size": 224,
                "crop_size": 224,
                "do_center_crop": True,
                "feature_extractor_type": "LevitFeatureExtractor",
            },
            0.875,
        ),
        (
            {
                "size": {"shortest_edge": 224},
                "crop_size": {"height": 224, "width": 224},
                "do_center_crop": True,
            }
            | {"image_processor_type": "LevitImageProcessorFast"},
            0.875,
        ),
    ],
)
def test_the_shorter_side_is_what_the_processor_means(preprocessor, expected, tmp_path):
    """A single number is the shorter side's length to some processors; LeViT's resizes to 256 / 224
    of it.
    """
    path = written(tmp_path, {"model_type": "vit", "architectures": ["ViTModel"]})
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    images = read_transformers(path)["images"]
    assert (images["crop_pct"], images["crop_mode"]) == (expected, "center")


@pytest.mark.parametrize("rescale", [{"do_rescale": False}, {"rescale_factor": 1 / 127.5}])
def test_pixels_of_another_range_are_refused(rescale, tmp_path):
    path = written(tmp_path, {"model_type": "vit", "architectures": ["ViTModel"]})
    (path / "preprocessor_config.json").write_text(json.dumps(rescale))
    with pytest.raises(
        InputError, match=r"pixels are multiplied by .* \(rescale_factor\), expected 1/255"
    ):
        read_transformers(path)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("clip_classes", "MODEL.FINAL_NORM False"),
        ("dinov2_classes", "MODEL.GLOBAL_POOL token_avg"),
        ("deit_alone", "MODEL.REG_TOKENS 1"),
    ],
)
def test_names_tell_the_keys_of_a_head_where_the_model_has_another(case, told, folder):
    """Without config.json, whose keys are taken otherwise."""
    path = folder(case)
    config = description_of(path).to_config()
    (path / "config.json").unlink()
    other = {"global_pool": "token", "final_norm": True, "reg_tokens": 0}
    with pytest.raises(InputError, match=f"according to the names of its tensors.*{told}"):
        load_weights(build_model(config, **other), path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"fc_norm": True},
            "FC_NORM is True, expected False, because GLOBAL_POOL token_avg needs normalised tokens",
        ),
        (
            {"class_token": False},
            "GLOBAL_POOL is 'token_avg', expected 'avg' or 'map', because the model has no",
        ),
        (
            {"distilled": True},
            "GLOBAL_POOL is 'token_avg', expected 'token', because DISTILLED heads read their tokens",
        ),
    ],
)
def test_what_goes_beside_both_tokens(arguments, message):
    with pytest.raises(InputError, match=message):
        create_model("vit_digits", global_pool="token_avg", **arguments)
