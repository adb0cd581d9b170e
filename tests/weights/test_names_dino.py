"""Checkpoints of DINO, iBOT and DINOv2: the network, the model, and what a network starts from."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from golden.make_names_dino import MASK, checkpoint
from golden.make_names_vit import IMAGES, SIZES
from safetensors.numpy import load_file, save_file
from support.weight_files import Built, Call, program, storage, tensor, write_zip

from errors import InputError
from models.pretraining.dino import Dino
from models.pretraining.mae import MaskedAutoencoder
from models.vit import VisionTransformer
from weights import file_arrays, load_weights, save_weights
from weights.layout import encoder_of

CASES = json.loads((Path(__file__).parent.parent / "golden/names_dino.json").read_text("utf-8"))
# The options of the model, and whether patches have a head of their own; None: there is no loss of
# patches.
OPTIONS = {
    "DINO": ({}, None),
    "iBOT, one head": ({}, False),
    "iBOT, two heads": ({}, True),
    "DINOv2": ({"init_values": 0.1}, True),
    "DINOv2, registers": ({"init_values": 0.1, "no_embed_class": True, "reg_tokens": 2}, False),
}
MASKED = np.broadcast_to(MASK.reshape(1, -1), (2, 16)).reshape(1, 32)


def vit(case="DINO", image_size=16, **options):
    sizes = SIZES | {"num_classes": 0} | OPTIONS[case][0] | options
    return VisionTransformer(image_size, **sizes)


def dino(case="DINO", image_size=16, **options):
    separate = OPTIONS[case][1]
    masked = 0 if separate is None else int(MASKED.sum())
    heads = {"max_masked": masked, "separate_head": bool(separate)} | options
    return Dino(vit(case, image_size), 10, 16, 12, **heads)


def write(path, case):
    """Writes the authors' checkpoint as torch.save does, with what else is in it."""
    storages = {}

    def saved(array):
        key = str(len(storages))
        storages[key] = array.tobytes()
        strides = tuple(stride // 4 for stride in array.strides)
        return tensor(storage(key, array.size), array.shape, strides)

    content = {
        part: {name: saved(array) for name, array in arrays.items()}
        for part, arrays in checkpoint(CASES[case]["parts"], case == "iBOT, one head").items()
    }
    moments = {"state": {0: {"exp_avg": saved(np.ones(3, np.float32))}}}
    content |= {"optimizer": moments, "epoch": 3}
    content["args"] = Built(Call("argparse", "Namespace"), {"arch": "vit_small"})
    return write_zip(path, program(content), storages)


def outputs(network, case):
    """Returns what student and teacher make of the two images, as a pair of global views."""
    network.eval()
    given = {} if OPTIONS[case][1] is None else {"chosen": paddle.to_tensor(MASKED)}
    return network(paddle.to_tensor(IMAGES), **given)


@pytest.mark.smoke
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_gives_the_authors_student_and_teacher(tmp_path, case, strict):
    network = dino(case)
    report = load_weights(network, write(tmp_path / "checkpoint.pth", case), strict=strict)
    assert set(report.loaded) == set(file_arrays(network))
    assert not report.changes
    found = outputs(network, case)
    expected = CASES[case]
    for name in ("student", "teacher"):
        np.testing.assert_allclose(found[name][0].numpy(), expected[name], rtol=1e-5, atol=1e-5)
        if "places" in found:
            places = found["places"][0].numpy()
            assert set(places.tolist()) == set(MASKED[0].nonzero()[0].tolist())
            patches = np.reshape(expected[f"{name}_patches"], (32, 10))[places]
            ours = found[f"{name}_patches"][0].numpy()
            np.testing.assert_allclose(ours, patches, rtol=1e-5, atol=1e-5)
    parts = checkpoint(CASES[case]["parts"], shared=False)
    flat = {name: array for arrays in parts.values() for name, array in arrays.items()}
    centre = flat.get("center", flat.get("dino_loss.center"))
    np.testing.assert_array_equal(network.center.numpy(), centre[0])
    if network.patches:
        of_patches = flat.get("center2", flat.get("ibot_patch_loss.center"))
        np.testing.assert_array_equal(network.patch_center.numpy(), of_patches[0, 0])


# What is beside the teacher's encoder.
LEFT_OUT = {
    "DINO": "38 tensors of student, 8 of teacher.head, 1 of dino_loss",
    "iBOT, one head": "41 tensors of student, 10 of teacher.head, 2 of ibot_loss",
    "iBOT, two heads": "41 tensors of student, 10 of teacher.head, 2 of ibot_loss",
    "DINOv2": "51 tensors of student, 8 of teacher.dino_head, 8 of teacher.ibot_head,"
    " 1 of teacher.backbone.mask_token, 1 of dino_loss, 1 of ibot_patch_loss",
    "DINOv2, registers": "44 tensors of student, 8 of teacher.dino_head,"
    " 1 of teacher.backbone.mask_token, 1 of dino_loss, 1 of ibot_patch_loss",
}


@pytest.mark.parametrize("case", CASES)
def test_the_model_of_a_checkpoint_is_its_teachers(tmp_path, case):
    file = write(tmp_path / "checkpoint.pth", case)
    network = dino(case)
    load_weights(network, file)
    model = vit(case)
    report = load_weights(model, file)
    assert report.notes == [f"left out: {LEFT_OUT[case]}"]
    assert_same(model, network.teacher.encoder)


def assert_same(model, other):
    expected = file_arrays(other)
    for name, array in file_arrays(model).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def trained(tmp_path, case="DINOv2", **options):
    """Returns a network whose student and teacher differ, and its file."""
    paddle.seed(1)
    network = dino(case, **options)
    for parameter in network.parameters():
        parameter.set_value(paddle.randn(parameter.shape))
    save_weights(network, tmp_path / "run.safetensors")
    return network, tmp_path / "run.safetensors"


LEFT_OUT_OF_OURS = {
    "DINO": "30 tensors of encoder, 8 of head, 8 of teacher.head, 1 of center",
    "DINOv2, registers": "35 tensors of encoder, 8 of head, 8 of teacher.head, 1 of center,"
    " 1 of mask_token, 1 of patch_center",
}


@pytest.mark.parametrize("case", LEFT_OUT_OF_OURS)
def test_the_model_of_our_own_run_is_the_teachers(tmp_path, case):
    network, file = trained(tmp_path, case)
    assert encoder_of(network) is network.teacher.encoder
    model = vit(case)
    report = load_weights(model, file)
    assert_same(model, network.teacher.encoder)
    assert report.notes == [f"left out: {LEFT_OUT_OF_OURS[case]}"]
    # A network goes on with both.
    other = dino(case)
    assert not load_weights(other, file).changes
    assert_same(other, network)


def test_a_small_student_of_a_large_teacher_is_the_model(tmp_path):
    network, file = trained(tmp_path, has_teacher=False)
    assert encoder_of(network) is network.encoder
    model = vit("DINOv2")
    load_weights(model, file)
    assert_same(model, network.encoder)


@pytest.mark.smoke
def test_a_models_weights_begin_student_and_teacher(tmp_path):
    model = vit("DINOv2", num_classes=7)
    save_weights(model, tmp_path / "model.safetensors")
    arrays = load_file(tmp_path / "model.safetensors")
    save_file(arrays | {"mask_token": np.ones([1, 24], np.float32)}, tmp_path / "model.safetensors")
    network = dino("DINOv2")
    before = file_arrays(network)
    report = load_weights(network, tmp_path / "model.safetensors", strict=False, checksums=True)
    after = file_arrays(network)
    for name, array in after.items():
        model_name = name.removeprefix("teacher.").removeprefix("encoder.")
        expected = arrays[model_name] if "encoder." in name else before[name]
        np.testing.assert_array_equal(array, expected, err_msg=name)
    assert report.notes[0] == (
        "the file's tensors are those of encoder and teacher.encoder;"
        " center, patch_center, mask_token, head, patch_head, teacher.head, teacher.patch_head"
        " are initialised randomly"
    )
    assert set(report.loaded) == {name for name in after if "encoder." in name}
    assert set(report.checksums) == {name for name in after if name.startswith("encoder.")}
    with pytest.raises(
        InputError, match=r"doesn't fit the model: missing center, patch_center, encoder"
    ):
        load_weights(network, tmp_path / "model.safetensors")


def test_a_published_teacher_alone_begins_both_encoders(tmp_path):
    """DINOv2's evaluation saves {"teacher": ...}, with heads."""
    arrays = checkpoint(CASES["DINOv2"]["parts"], shared=False)["model"]
    teacher = {name: array for name, array in arrays.items() if name.startswith("teacher.")}
    save_file(
        {name.removeprefix("teacher."): a for name, a in teacher.items()},
        tmp_path / "t.safetensors",
    )
    network = dino("DINOv2")
    report = load_weights(network, tmp_path / "t.safetensors", strict=False)
    assert report.notes[1] == "left out: 8 tensors of dino_head, 8 of ibot_head, 1 of mask_token"
    assert_same(network.encoder, network.teacher.encoder)
    key = "teacher.backbone.norm.bias"
    np.testing.assert_array_equal(network.encoder.norm.bias.numpy(), arrays[key])


def test_other_methods_networks_give_their_models(tmp_path):
    network, file = trained(tmp_path, "DINO")
    mae = MaskedAutoencoder(vit(), 0.75, 8, 1, 2)
    load_weights(mae, file, strict=False)
    assert_same(mae.encoder, network.teacher.encoder)
    save_weights(mae, tmp_path / "mae.safetensors")
    other = dino("DINO")
    load_weights(other, tmp_path / "mae.safetensors", strict=False)
    assert_same(other.encoder, mae.encoder)
    assert_same(other.teacher.encoder, mae.encoder)


@pytest.mark.parametrize("strict", [False, True])
def test_another_image_size_resizes_student_and_teacher(tmp_path, strict):
    """The high-resolution phase of DINOv2 begins so."""
    network, file = trained(tmp_path)
    larger = dino("DINOv2", image_size=32)
    report = load_weights(larger, file, strict=strict)
    assert report.resized == [
        f"{name}.pos_embed resized from 4 x 4 to 8 x 8" for name in ("encoder", "teacher.encoder")
    ]
    for encoder, enlarged in zip(encoders(network), encoders(larger), strict=True):
        save_weights(encoder, tmp_path / "model.safetensors")
        model = vit("DINOv2", image_size=32)
        load_weights(model, tmp_path / "model.safetensors")
        assert_same(enlarged, model)


def encoders(network):
    return network.encoder, network.teacher.encoder


def test_one_channel_adapts_the_stems_of_student_and_teacher(tmp_path):
    network, file = trained(tmp_path, "DINO")
    grey = Dino(vit(in_channels=1), 10, 16, 12)
    report = load_weights(grey, file)
    assert report.resized == [
        f"{name}.patch_embed.proj.weight adapted from 3 channels to 1"
        for name in ("encoder", "teacher.encoder")
    ]
    for own, other in zip(encoders(grey), encoders(network), strict=True):
        expected = other.patch_embed.proj.weight.numpy().sum(1, keepdims=True)
        found = own.patch_embed.proj.weight.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_heads_that_do_not_fit_are_refused(tmp_path):
    file = write(tmp_path / "two.pth", "iBOT, two heads")
    with pytest.raises(InputError, match=r"unexpected (teacher\.)?head\.last_layer2\.weight_"):
        load_weights(dino("iBOT, one head"), file, strict=False)
    file = write(tmp_path / "one.pth", "DINOv2, registers")
    network = Dino(vit("DINOv2, registers"), 10, 16, 12, max_masked=4, separate_head=True)
    with pytest.raises(InputError, match=r"missing patch_head\.mlp\.0\.weight"):
        load_weights(network, file, strict=False)
    # With a shared head in the file, both heads begin with it.
    file = write(tmp_path / "shared.pth", "iBOT, one head")
    network = dino("iBOT, two heads")
    load_weights(network, file, strict=False)
    assert_same(network.head, network.patch_head)
    assert_same(network.teacher.head, network.teacher.patch_head)
