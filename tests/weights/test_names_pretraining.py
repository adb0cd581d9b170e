"""The model in a network for pre-training: told by names, taken out of it, and the rest is named."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.small_models import SMALL_MODELS

from config import get_config
from errors import InputError
from models import create_model, with_switches
from weights import file_arrays, load_weights
from weights.formats import write_weights
from weights.names import encoder_arrays

BACKBONE = {
    f"blocks.{block}.attn.qkv.weight": np.full([3, 1], block, np.float32) for block in range(2)
}


def prefixed(prefix, arrays):
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def ones(*names):
    return dict.fromkeys(names, np.ones(1, np.float32))


def assert_encoder(arrays, expected, note):
    found, left_out = encoder_arrays(arrays)
    assert found.keys() == expected.keys()
    assert all((found[name] == value).all() for name, value in expected.items())
    assert left_out == note


@pytest.mark.smoke
@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_an_encoder_of_each_architecture_is_a_model_by_its_names(tmp_path, kind):
    trained = file_arrays(SMALL_MODELS[kind](num_classes=0))
    network = prefixed("encoder.", trained)
    network |= ones("decoder.blocks.0.attn.qkv.weight", "decoder.norm.weight", "mask_token")
    write_weights(tmp_path / "model.safetensors", network)
    model = SMALL_MODELS[kind](num_classes=0)
    report = load_weights(model, tmp_path)
    assert report.notes == ["left out: 2 tensors of decoder, 1 of mask_token"]
    assert report.changes == []
    loaded = file_arrays(model)
    assert all((loaded[name] == array).all() for name, array in trained.items())


def test_an_encoder_is_fine_tuned_with_a_fresh_classifier_and_another_size(tmp_path):
    trained = create_model("vit_digits", num_classes=0)
    network = prefixed("encoder.", file_arrays(trained)) | ones("decoder.pred.weight")
    write_weights(tmp_path / "model.safetensors", network)
    with pytest.warns(UserWarning, match="head.weight, head.bias are new: none in the file, 7 in"):
        tuned = create_model("vit_digits", tmp_path, num_classes=7, image_size=16)
    assert (tuned.head.weight.shape[1], tuned.pos_embed.shape[1]) == (7, 65)
    kernel = "patch_embed.proj.weight"
    assert (file_arrays(tuned)[kernel] == network[f"encoder.{kernel}"]).all()
    # As a classifier it is refused.
    with pytest.raises(InputError, match="it has no classifier; train one, or use its feat"):
        create_model("vit_digits", tmp_path)
    assert create_model("vit_digits", tmp_path, num_classes=0).num_classes == 0


def test_names_within_an_encoder_tell_how_it_computes(tmp_path):
    """The place of a PoolFormer's last norm is told by a name, which the prefix doesn't hide."""
    model = SMALL_MODELS["poolformer"](fc_norm=True)
    write_weights(tmp_path / "model.safetensors", prefixed("encoder.", file_arrays(model)))
    config = get_config("poolformer_s12")
    assert (config.MODEL.FC_NORM, with_switches(config, tmp_path).MODEL.FC_NORM) == (False, True)


def test_a_network_gets_all_of_its_own_tensors():
    """As a resumed training needs them."""
    network = prefixed("encoder.", BACKBONE) | ones("decoder.pred.weight", "mask_token")
    found, left_out = encoder_arrays(network, network.keys())
    assert (found, left_out) == (network, "")
    distilled = prefixed("student.backbone.", BACKBONE) | prefixed("teacher.backbone.", BACKBONE)
    assert encoder_arrays(distilled, distilled.keys()) == (distilled, "")
    # The encoder of one network begins another one's; its decoder is left out.
    wanted = prefixed("encoder.", BACKBONE) | ones("head.weight")
    found, left_out = encoder_arrays(network, wanted.keys())
    assert found.keys() == prefixed("encoder.", BACKBONE).keys()
    assert left_out == "left out: 1 tensor of decoder, 1 of mask_token"


@pytest.mark.parametrize("backbone", ["", "backbone.", "module.", "module.backbone."])
def test_of_self_distillation_the_teacher_is_the_model(backbone):
    teacher = prefixed(f"teacher.{backbone}", BACKBONE)
    student = {name.replace("teacher.", "student."): array + 1 for name, array in teacher.items()}
    heads = ones("teacher.head.mlp.0.weight", "teacher.head.last_layer.weight_v", "center")
    assert_encoder(
        student | teacher | heads,
        BACKBONE,
        "left out: 2 tensors of student, 2 of teacher.head, 1 of center",
    )
    expected = {name: array + 1 for name, array in BACKBONE.items()}
    assert_encoder(student, expected, "")


def test_files_of_the_methods_authors():
    mae = ones(
        "mask_token", "decoder_pos_embed", "decoder_blocks.0.norm1.bias", "decoder_pred.bias"
    )
    assert_encoder(BACKBONE | mae, BACKBONE, "left out: 3 tensors of decoder, 1 of mask_token")
    paddlevits = ones("decoder.layers.0.mlp.fc1.bias", "reconstruction_layer.bias", "mask_token")
    note = "left out: 1 tensor of decoder, 1 of reconstruction_layer, 1 of mask_token"
    # The "encoder." of these names isn't a prefix of a model's.
    layers = {
        "encoder.layers.0.attn.qkv.weight": np.ones(1),
        "patch_embedding.cls_token": np.ones(1),
    }
    assert_encoder(layers | paddlevits, layers, note)
    transformers = ones(
        "vit.encoder.layer.0.attention.attention.query.weight", "vit.layernorm.bias"
    )
    rest = ones("decoder.mask_token", "decoder.decoder_layers.0.output.dense.bias")
    assert_encoder(transformers | rest, transformers, "left out: 2 tensors of decoder")
    simmim = prefixed("encoder.", BACKBONE) | ones("encoder.mask_token", "decoder.0.weight")
    assert_encoder(simmim, BACKBONE, "left out: 1 tensor of encoder.mask_token, 1 of decoder")
    dino = BACKBONE | ones("head.mlp.0.weight", "head.last_layer.weight_g", "head.last_layer2.bias")
    assert_encoder(dino, BACKBONE, "left out: 3 tensors of head")
    dinov2 = BACKBONE | ones("dino_head.mlp.0.bias", "ibot_head.mlp.0.bias")
    assert_encoder(dinov2, BACKBONE, "left out: 1 tensor of dino_head, 1 of ibot_head")
    moco = prefixed("base_encoder.", BACKBONE)
    moco |= {f"momentum_encoder.{name}": array + 1 for name, array in BACKBONE.items()}
    moco |= ones("base_encoder.head.0.weight", "predictor.0.weight")
    note = "left out: 2 tensors of momentum_encoder, 1 of base_encoder.head, 1 of predictor"
    assert_encoder(moco, BACKBONE, note)


def test_a_projection_within_a_models_pooling_is_no_head_of_a_pre_training():
    """transformers' SigLIP pools its patches in ``head.mlp``."""
    siglip = ones("head.mlp.fc1.weight", "head.probe", "head.fc.weight", "head.weight")
    assert_encoder(siglip, siglip, "")


def test_names_that_do_not_go_together_are_one_line(tmp_path):
    model = create_model("vit_digits", num_classes=0)
    arrays = file_arrays(model)
    both = prefixed("teacher.", arrays) | prefixed("teacher.backbone.", arrays)
    write_weights(tmp_path / "model.safetensors", both)
    message = (
        r"model\.safetensors: its tensors are inconsistent \(teacher\.backbone\.(\S+)"
        r" and teacher\.\1 both correspond to \1; remove one of them\)$"
    )
    with pytest.raises(InputError, match=message):
        load_weights(model, tmp_path)


def test_a_note_of_many_parts_is_short_and_can_be_printed():
    arrays = prefixed("encoder.", BACKBONE) | ones(*(f"part{n}.weight" for n in range(40)), "\n")
    _, note = encoder_arrays(arrays)
    assert note.endswith(", 1 of part5, 35 more")
    assert "\n" not in note


def test_an_average_keeps_the_whole_network(tmp_path):
    """tools/average_checkpoints.py averages a network, with what only its training needs."""
    from tools.average_checkpoints import average

    network = prefixed("encoder.", BACKBONE) | ones("decoder.pred.weight", "mask_token")
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, file in enumerate(files):
        write_weights(file, {name: array + number for name, array in network.items()})
    with average(files) as arrays:
        write_weights(tmp_path / "mean.safetensors", arrays)
    mean = load_file(tmp_path / "mean.safetensors")
    assert mean.keys() == network.keys()
    assert all((mean[name] == array + 0.5).all() for name, array in network.items())
