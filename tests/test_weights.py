"""Saving and loading weights; what is refused."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from errors import InputError
from models import create_model
from weights import find_weights, load_weights, save_weights


@pytest.fixture
def saved(tmp_path):
    model = create_model("vit_digits")
    save_weights(model, tmp_path / "model.safetensors")
    return model, tmp_path


def test_weights_come_back_exactly_by_every_form_of_the_path(saved):
    model, folder = saved
    for path in (folder, folder / "model", folder / "model.safetensors"):
        fresh = create_model("vit_digits")
        report = load_weights(fresh, path)
        assert str(report) == f"{len(model.state_dict())} tensors loaded from {folder / 'model.safetensors'}"
        for name, tensor in model.state_dict().items():
            assert (fresh.state_dict()[name].numpy() == tensor.numpy()).all(), name


def test_the_file_has_timms_layout(saved):
    model, folder = saved
    stored = load_file(folder / "model.safetensors")
    assert stored["blocks.0.mlp.fc1.weight"].shape == (128, 64)  # [out, in]
    assert (stored["blocks.0.attn.proj.weight"] == model.blocks[0].attn.proj.weight.numpy().T).all()
    assert (stored["patch_embed.proj.weight"] == model.patch_embed.proj.weight.numpy()).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("head.bias"), r"missing head\.bias$"),
        (lambda a: a.update(extra=np.zeros(1)), r"unexpected extra$"),
        (lambda a: a.update({"head.bias": np.zeros(3)}), r"head\.bias is \[3\], the model's \[10\]"),
        (lambda a: [a.pop(n) for n in list(a)[:7]], r"and 4 more$"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(saved, change, message):
    _, folder = saved
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "other.safetensors")
    fresh = create_model("vit_digits")
    before = {name: tensor.numpy().copy() for name, tensor in fresh.state_dict().items()}
    with pytest.raises(InputError, match=message):
        load_weights(fresh, folder / "other.safetensors")
    assert all((fresh.state_dict()[name].numpy() == value).all() for name, value in before.items())


def test_files_that_are_no_weights_are_refused(tmp_path):
    model = create_model("vit_digits")
    with pytest.raises(InputError, match="no weights at"):
        find_weights(tmp_path / "absent")
    (tmp_path / "weights.pdparams").write_bytes(b"x")
    with pytest.raises(InputError, match=r"not a \.safetensors file"):
        load_weights(model, tmp_path / "weights.pdparams")
    for content in (b"", b"short", b"\xff" * 64):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(InputError, match="not a readable safetensors file"):
            load_weights(model, tmp_path / "bad")
