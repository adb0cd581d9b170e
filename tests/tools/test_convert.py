"""tools/convert_weights.py and tools/list_models.py, by value and by command line."""

import json
import subprocess

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT
from safetensors.numpy import load_file, save_file

from config import find_config, get_config
from errors import InputError
from models import create_model
from tools.convert_weights import convert
from tools.list_models import describe
from training.checkpoint import describe as of
from training.checkpoint import description_of
from training.checkpoint.description import METADATA
from weights import file_arrays, load_weights, save_weights


def run(tool, folder, *arguments):
    command = [warm.python(), str(ROOT / "tools" / tool), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def saved(tmp_path):
    """A file of vit_digits, and its arrays in timm's layout."""
    model = create_model("vit_digits")
    save_weights(model, tmp_path / "vit_digits.safetensors")
    return tmp_path / "vit_digits.safetensors", file_arrays(model)


def test_every_form_leads_to_every_other_and_back(saved):
    first, arrays = saved
    folder = first.parent
    source = first
    for step, ending in enumerate(
        (".pdparams", ".npz", ".pdparams", ".safetensors", ".npz", ".safetensors")
    ):
        target = folder / str(step) / f"vit_digits{ending}"
        target.parent.mkdir()
        convert(str(source), target)
        source = target
    back = load_file(source)
    assert back.keys() == arrays.keys()
    assert all((back[name] == value).all() for name, value in arrays.items())


def test_pdparams_are_what_paddle_loads(saved, tmp_path):
    source, arrays = saved
    convert(str(source), tmp_path / "out.pdparams")
    model = create_model("vit_digits")
    assert model.set_state_dict(paddle.load(str(tmp_path / "out.pdparams"))) == ([], [])
    assert all((value == arrays[name]).all() for name, value in file_arrays(model).items())


def test_statistics_have_paddles_names_in_pdparams_and_torchs_in_safetensors(tmp_path):
    model = create_model("resnet18", num_classes=3)
    model.bn1._mean.set_value(np.arange(64, dtype=np.float32))
    save_weights(model, tmp_path / "one.safetensors")
    assert (load_file(tmp_path / "one.safetensors")["bn1.running_mean"] == np.arange(64)).all()
    options = ["MODEL.NUM_CLASSES", "3"]
    convert(str(tmp_path / "one.safetensors"), tmp_path / "two.pdparams", "resnet18", options)
    state = paddle.load(str(tmp_path / "two.pdparams"), return_numpy=True)
    assert (state["bn1._mean"] == np.arange(64)).all()
    fresh = create_model("resnet18", num_classes=3)
    load_weights(fresh, tmp_path / "two.pdparams")
    assert (fresh.bn1._mean.numpy() == np.arange(64)).all()


def test_the_task_and_the_classes_go_along(saved, tmp_path):
    source, arrays = saved
    names = [f"label {number}" for number in range(10)]
    told = of(get_config("vit_digits"), names, "multilabel")
    save_file(arrays, source, {METADATA: told.to_json()})
    for cfg in (None, "vit_digits"):
        convert(str(source), tmp_path / "out.safetensors", cfg)
        assert description_of(tmp_path / "out.safetensors") == told


def test_the_model_is_told_by_the_config_beside_the_weights_or_by_name(saved, tmp_path):
    source, _ = saved
    folder = tmp_path / "hub"
    folder.mkdir()
    source.rename(folder / "model.safetensors")
    with pytest.raises(InputError, match="cannot determine the model; pass -cfg MODEL"):
        convert(str(folder), tmp_path / "out.npz")
    (folder / "config.json").write_text(json.dumps({"architecture": "vit_digits"}))
    assert convert(str(folder), tmp_path / "out.npz").startswith("72 tensors of ")
    convert(str(folder), tmp_path / "out.safetensors")  # which then says it itself
    assert convert(str(tmp_path / "out"), tmp_path / "again.npz").startswith("72 tensors of ")
    assert set(np.load(tmp_path / "out.npz")) >= {
        "cls",
        "head/kernel",
        "Transformer/encoderblock_3/LayerNorm_2/scale",
    }


def test_only_the_models_own_weights_are_converted(saved, tmp_path):
    source, _ = saved
    with pytest.raises(
        InputError,
        match=r"is from another model \(pos_embed resized from 4 x 4 to 8 x 8\); set the model",
    ):
        convert(str(source), tmp_path / "out.npz", "vit_digits", ["DATA.IMAGE_SIZE", "16"])
    with pytest.raises(InputError, match="expected .safetensors, .pdparams, .npz"):
        convert(str(source), tmp_path / "out.bin")
    status, _, errors = run("convert_weights.py", tmp_path, source, "out.npz", "-cfg=resnet18")
    assert status == 2
    assert errors.startswith(f"error: {source} doesn't fit the model: missing conv1.weight")
    assert errors.count("\n") == 1
    assert not list(tmp_path.glob("*out*"))


def test_sizes_are_those_of_the_papers():
    """DeiT: 17.6; Swin: 4.5; ResNet, ConvNeXt: 4.1, 4.5 billion multiply-adds. Paddle's LeNet by
    hand.
    """
    for name, macs in (
        ("deit_base_patch16_224", 17.6), ("swin_tiny_patch4_window7_224", 4.5), ("resnet50", 4.1),
        ("convnext_tiny", 4.5), ("vit_base_patch16_224", 17.6), ("beit_base_patch16_224", 17.6),
    ):  # fmt: skip
        assert describe(find_config(name))["macs"] / 1e9 == pytest.approx(macs, abs=0.06), name
    found = describe(find_config("lenet"))
    convolutions = 28 * 28 * 6 * 9 + 10 * 10 * 16 * 6 * 25
    assert found["macs"] == convolutions + 400 * 120 + 120 * 84 + 84 * 10
    assert found["images"] == [1, 28, 28]
    assert found["parameters"] == sum(p.size for p in create_model("lenet").parameters())
    # 4 heads of 16 channels, 17 tokens; the classifier reads one of them
    attention = 2 * 4 * 17 * 17 * 16
    block = 17 * (64 * 192 + 64 * 64 + 2 * 64 * 128) + attention
    norms = 9 * 5 * 17 * 64  # 5 per element, as fvcore counts
    assert describe(find_config("vit_digits"))["macs"] == 16 * 4 * 64 + 4 * block + 64 * 10 + norms


def test_models_are_listed(tmp_path):
    status, out, _ = run("list_models.py", tmp_path, "deit_tiny*224")
    lines = out.splitlines()
    assert status == 0
    assert lines[1].split()[:6] == [
        "deit_tiny_distilled_patch16_224",
        "5,910,800",
        "1.27",
        "3",
        "x",
        "224",
    ]
    assert lines[2].endswith("DeiT (arXiv:2012.12877) on ImageNet-1k, 224 x 224")
    status, _, errors = run("list_models.py", tmp_path, "nothing*")
    assert (status, errors.partition(";")[0]) == (2, "error: no model matches 'nothing*'")
