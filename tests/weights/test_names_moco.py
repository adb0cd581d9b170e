"""Checkpoints of MoCo v3: the network, the model, and what a network starts from."""

import numpy as np
import paddle
import pytest
from golden.make_names_vit import SIZES, positive
from support.weight_files import made

from models.pretraining.moco import MoCo
from models.vit import VisionTransformer
from weights import file_arrays, load_weights, save_weights
from weights.layout import encoder_of


def vit(image_size=16, **options):
    return VisionTransformer(image_size, **SIZES | {"num_classes": 0} | options)


def network(image_size=16):
    return MoCo(vit(image_size), 16, 12)


def checkpoint():
    """Returns the names of the published files: the projector is in the place of the head."""
    shapes = {name: array.shape for name, array in file_arrays(network()).items()}
    renamed = {
        "momentum.projector.": "module.momentum_encoder.head.",
        "momentum.encoder.": "module.momentum_encoder.",
        "projector.": "module.base_encoder.head.",
        "encoder.": "module.base_encoder.",
        "predictor.": "module.predictor.",
    }
    arrays = {}
    for name, shape in shapes.items():
        own = next(prefix for prefix in renamed if name.startswith(prefix))
        theirs = renamed[own] + name.removeprefix(own)
        arrays[theirs] = positive(theirs, shape)
        if theirs.endswith("running_var"):
            counted = theirs.replace("running_var", "num_batches_tracked")
            arrays[counted] = np.array(7, np.int64)
    return arrays


def test_a_checkpoint_fills_both_encoders_and_the_mlps(tmp_path):
    arrays = checkpoint()
    # The layers of the published files.
    assert arrays["module.base_encoder.head.6.weight"].shape == (12, 16)
    assert arrays["module.base_encoder.head.7.running_mean"].shape == (12,)
    assert "module.base_encoder.head.7.weight" not in arrays
    assert arrays["module.predictor.3.weight"].shape == (12, 16)
    model = network()
    report = load_weights(model, made(tmp_path / "moco.safetensors", arrays))
    assert not report.changes
    assert not report.notes
    loaded = file_arrays(model)
    for ours, theirs in (
        ("encoder.", "base_encoder."),
        ("momentum.encoder.", "momentum_encoder."),
        ("projector.0.weight", "base_encoder.head.0.weight"),
        ("momentum.projector.7.running_var", "momentum_encoder.head.7.running_var"),
        ("predictor.4.running_mean", "predictor.4.running_mean"),
    ):
        names = [name for name in loaded if name.startswith(ours)]
        assert names
        for name in names:
            stored = arrays[f"module.{theirs}{name.removeprefix(ours)}"]
            np.testing.assert_array_equal(loaded[name], stored, err_msg=name)


def test_the_model_is_the_encoder_that_gradients_train(tmp_path):
    arrays = checkpoint()
    model = vit()
    report = load_weights(model, made(tmp_path / "moco.safetensors", arrays))
    np.testing.assert_array_equal(
        model.norm.weight.numpy(), arrays["module.base_encoder.norm.weight"]
    )
    assert report.notes[0].startswith("left out: ")
    for part in ("of momentum_encoder", "of base_encoder.head", "of predictor"):
        assert part in report.notes[0]
    # Our own run's
    trained = network()
    for parameter in trained.parameters():
        parameter.set_value(paddle.randn(parameter.shape))
    save_weights(trained, tmp_path / "run.safetensors")
    assert encoder_of(trained) is trained.encoder
    report = load_weights(model, tmp_path / "run.safetensors")
    for name, array in file_arrays(model).items():
        expected = file_arrays(trained.encoder)[name]
        np.testing.assert_array_equal(array, expected, err_msg=name)
    assert report.notes[0].startswith("left out: ")
    for part in ("of momentum", "of projector", "of predictor"):
        assert part in report.notes[0]


@pytest.mark.smoke
def test_a_models_weights_begin_both_encoders(tmp_path):
    model = vit(num_classes=7)
    save_weights(model, tmp_path / "model.safetensors")
    start = network()
    before = file_arrays(start)
    report = load_weights(start, tmp_path / "model.safetensors", strict=False)
    assert report.notes[0] == (
        "the file's tensors are those of momentum.encoder and encoder;"
        " projector, predictor, momentum.projector are initialised randomly; not trained: pos_embed"
    )
    arrays = file_arrays(model)
    for name, array in file_arrays(start).items():
        plain = name.removeprefix("momentum.").removeprefix("encoder.")
        expected = arrays[plain] if "encoder." in name else before[name]
        np.testing.assert_array_equal(array, expected, err_msg=name)


def test_another_image_size_resizes_both_encoders(tmp_path):
    save_weights(network(), tmp_path / "run.safetensors")
    report = load_weights(network(image_size=32), tmp_path / "run.safetensors")
    assert report.resized == [
        f"{name}.pos_embed resized from 4 x 4 to 8 x 8" for name in ("encoder", "momentum.encoder")
    ]
