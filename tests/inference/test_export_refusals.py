"""An export that can't be, or isn't what it was, is one line, and leaves nothing."""

import json
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import array
from paddle import nn
from support import exports
from support.exports import exported, replace_file, small_model
from support.programs import wait_for

from config import get_config
from errors import InputError, RunError
from inference import formats
from inference.backends import open_export
from inference.export_manifest import read_export
from inference.exporting import check_combination, write_export
from inference.fidelity import compare_with_eager, in_batches
from models import build_model
from models.paddle_inference import Program

onnx = pytest.importorskip("onnx", reason="the extra export isn't installed")
temporary = exports.temporary
weights = exports.weights


@pytest.mark.parametrize(
    ("kind", "precision", "line"),
    [
        (
            "paddle",
            "float16",
            "-format paddle -precision float16: Paddle Inference has no float16 on a CPU",
        ),
        (
            "paddle",
            "int8",
            "-format paddle -precision int8: int8 and int4 are for ONNX Runtime and Open",
        ),
        (
            "paddle",
            "int8_weights",
            "-format paddle -precision int8_weights: int8 and int4 are for ONNX Runtime and Open",
        ),
        (
            "paddle",
            "int4_weights",
            "-format paddle -precision int4_weights: int8 and int4 are for ONNX Runtime and",
        ),
        (
            "onnx",
            "bfloat16",
            "-format onnx -precision bfloat16: ONNX Runtime has no bfloat16 on a CPU",
        ),
    ],
)
def test_what_a_cpu_cant_is_refused_with_the_reason(kind, precision, line, tmp_path):
    with pytest.raises(InputError, match=line):
        check_combination(kind, precision)


def test_int8_without_images_and_a_missing_package_are_refused(weights, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="-precision int8 needs images of the training set"):
        exported(weights, tmp_path / "out", "onnx", "int8")
    monkeypatch.setitem(sys.modules, "paddle2onnx", None)
    with pytest.raises(
        InputError, match=r"^paddle2onnx .*; pip install paddle2onnx==\S+ .* nncf==\S+$"
    ):
        exported(weights, tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_an_export_that_answers_otherwise_is_refused(weights):
    config = get_config(None, weights[1])
    model = build_model(config)
    model.head.weight.set_value(array("head", (16, 5)))
    model.eval()

    def shifted(images):
        return np.roll(model(paddle.to_tensor(images)).numpy(), 1, axis=1)

    with pytest.raises(RunError, match=r"differ from those of the eager model by \d"):
        compare_with_eager(config, model, shifted, "float32")
    with pytest.raises(
        RunError,
        match=r"^int8: on crops of photographs, .* on \d+ of 16; expected at least 80%",
    ):
        compare_with_eager(config, model, shifted, "int8")
    with pytest.raises(
        RunError, match=r"their cosine similarity is -?0\.\d{3} on average; expected"
    ):
        compare_with_eager(config, model, shifted, "int8", outputs="features")
    doubled = compare_with_eager(
        config,
        model,
        lambda images: np.roll(shifted(images), -1, 1) * 2,
        "int8",
        outputs="features",
    )
    assert doubled.agreement == pytest.approx(1)
    with pytest.raises(RunError, match="the logits of the exported model aren't finite in float16"):
        compare_with_eager(config, model, lambda images: shifted(images) * np.inf, "float16")


def test_batches_are_of_several_sizes():
    sizes = []
    found = in_batches(lambda images: sizes.append(len(images)) or images, np.arange(20)[:, None])
    assert sizes == [1, 3, 8, 8]
    assert found[:, 0].tolist() == list(range(20))


@pytest.mark.parametrize("kind", ["paddle", "onnx", "openvino"])
def test_a_damaged_export_is_a_line(kind, weights, tmp_path):
    exported(weights, tmp_path / "out", kind)
    manifest = tmp_path / "out" / "preprocess.json"
    whole = manifest.read_text()
    for name in json.loads(whole)["files"]:
        shutil.copytree(tmp_path / "out", tmp_path / "damaged")
        file = tmp_path / "damaged" / name
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(
            InputError,
            match=rf"{name}: its SHA-256 differs from that of the export.*; export the model again",
        ):
            open_export(tmp_path / "damaged")
        file.unlink()
        with pytest.raises(InputError, match=rf"{name}: can't be read as a file of an export"):
            open_export(tmp_path / "damaged")
        shutil.rmtree(tmp_path / "damaged")
    for text in (
        "{",
        "[]",
        manifest.read_text().replace('"float32"', '"float8"'),
        manifest.read_text().replace(kind, "tf"),
    ):
        manifest.write_text(text)
        with pytest.raises(InputError, match=r"preprocess\.json: .*; export the model again"):
            open_export(tmp_path / "out")
    with pytest.raises(
        InputError, match="its files is a dictionary of 0, expected a SHA-256 per file"
    ):
        manifest.write_text(json.dumps(json.loads(whole) | {"files": {}}))
        open_export(tmp_path / "out")
    with pytest.raises(
        InputError, match="it isn't an export of tools/export_model.py: it has no preprocess.json"
    ):
        open_export(tmp_path)


@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_a_model_that_is_none_is_a_line_though_its_sum_fits(kind, weights, tmp_path):
    exported(weights, tmp_path / "out", kind)
    name = {"onnx": "model.onnx", "openvino": "model.xml"}[kind]
    whole = (tmp_path / "out" / name).read_bytes()
    for content in (
        b"",
        b"\0" * 100,
        whole[:-200],
        whole[: len(whole) // 2],
        whole[len(whole) // 2 :],
    ):
        replace_file(tmp_path / "out", name, content)
        with pytest.raises(InputError, match=rf"out: can't be read as an export of format {kind}"):
            open_export(tmp_path / "out")


@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_images_that_a_model_cant_take_are_a_line(kind, weights, tmp_path):
    exported(weights, tmp_path / "out", kind)
    run = open_export(tmp_path / "out")
    with pytest.raises(
        InputError, match=rf"^{tmp_path}/out: can't be read as an export of format {kind} \("
    ) as caught:
        run(np.zeros((1, 3, 40, 40), np.float32))
    assert "\n" not in str(caught.value)


def test_a_graph_that_is_wrong_is_refused_in_every_precision(weights, tmp_path, monkeypatch):
    """(A half precision is held to its best classes alone, and a wrong graph may well have those.)"""
    simplified = formats.simplify

    def wrong(graph, scratch):
        graph = simplified(graph, scratch)
        for weight in graph.graph.initializer:
            if weight.name == "head.bias":
                weight.CopyFrom(
                    onnx.numpy_helper.from_array(np.full(5, 0.01, np.float32), weight.name)
                )
        return graph

    monkeypatch.setattr(formats, "simplify", wrong)
    for kind in ("onnx", "openvino"):
        with pytest.raises(
            RunError,
            match=r"the logits of the exported model differ from those of the eager model by [\d.e-]+ of their range",
        ):
            exported(weights, tmp_path / "out", kind, "float16")


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("link", "link exists; choose another -output"),
        ("file/out", r"file/out can't be created \(Not a directory\); choose another -output"),
        ("/proc/out", r"/proc/out can't be created \(.*\); choose another -output"),
    ],
)
def test_a_folder_that_cant_be_made_is_a_line(target, line, tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=line):
        write_export(get_config(), ReadsValues(), tmp_path / target, [])


@pytest.mark.parametrize("kind", ["paddle", "onnx", "openvino"])
def test_a_full_disk_is_told_whatever_the_converter_says(kind, weights, tmp_path, monkeypatch):
    def cut_off(layer, path, inputs):
        path.with_suffix(".json").write_text("{")
        raise ValueError("is not output of any previous nodes.")

    monkeypatch.setattr("inference.formats.save_program", cut_off)
    monkeypatch.setattr("inference.exporting.save_program", cut_off)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(
        RunError, match=r"out can't be written \(No space left on device\); free some space"
    ):
        exported(weights, tmp_path / "out", kind)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["small.yaml"]


def test_an_export_of_the_first_release_is_read_with_a_warning(weights, tmp_path, capsys):
    trained, _ = exported(weights, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "preprocess.json").read_text())
    for name in ("task", "values", "format", "precision", "files"):
        del content[name]
    (tmp_path / "out" / "preprocess.json").unlink()
    (tmp_path / "out" / "preprocessing.json").write_text(json.dumps(content))
    export = read_export(tmp_path / "out")
    assert (export.format, export.precision) == ("paddle", "float32")
    assert capsys.readouterr().err == (
        f"warning: {tmp_path / 'out'}: an export with preprocessing.json is deprecated since version 1.0"
        " and will be removed in version 1.2; export the model again\n"
    )
    data = export.description.to_config().DATA
    assert (data.IMAGE_SIZE, data.CROP_PCT, data.INTERPOLATION) == (32, 0.9, "bicubic")
    images = np.ones((2, 3, 32, 32), np.float32)
    expected = trained.model(paddle.to_tensor(images)).numpy()
    np.testing.assert_allclose(open_export(tmp_path / "out")(images), expected, atol=1e-5, rtol=0)


class ReadsValues(nn.Layer):
    """A model that reads values, which a graph hasn't: NumPy finds no axis to sort."""

    image_size = (4, 4)
    in_channels = 3

    def inference_model(self):
        return self

    def forward(self, x):
        return paddle.to_tensor(np.sort(x.numpy()))[:, 0, 0]


def test_a_model_that_cant_be_exported_is_an_error_of_one_line_and_leaves_nothing(tmp_path):
    with pytest.raises(
        InputError,
        match=r"^the model can't be exported \(.*AxisError: .+\); use EVAL_ENGINE eager$",
    ):
        write_export(get_config(), ReadsValues(), tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_differs_is_never_written(monkeypatch, tmp_path):
    model = small_model("lenet")
    config = get_config(None, ["DATA.IMAGE_SIZE", "28", "MODEL.NUM_CLASSES", "10"])
    monkeypatch.setattr(
        Program, "__call__", lambda self, images: self._predictor.run([images])[0] * 1.001
    )
    with pytest.raises(
        RunError,
        match=r"the logits of the exported model differ from those of the eager model by [\d.]+e-04 of their range",
    ):
        write_export(config, model, tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []
    model.fc[0].weight.set_value(paddle.full_like(model.fc[0].weight, float("nan")))
    with pytest.raises(RunError, match="the weights yield non-finite logits"):
        write_export(config, model, tmp_path / "out", [])


def test_a_stop_leaves_nothing(weights, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "tools" / "export_model.py"),
        "-cfg=small.yaml",
        f"-pretrained={weights[0]}",
    ]
    (tmp_path / "small.yaml").write_text("TAG: of a test\n")
    command += ["-output=out", "-format=onnx", "-o", *weights[1]]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert wait_for(lambda: list(tmp_path.glob(".out.*")), process)
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in err
    assert b"C++" not in out + err  # Paddle's own handler tells of its stack
    assert [file.name for file in tmp_path.iterdir()] == ["small.yaml"]


def test_group_norms_of_one_epsilon_have_it_in_onnx_and_others_are_refused():
    """All nodes get one epsilon, so of a model with two some would compute other logits."""
    told = SimpleNamespace(name="epsilon", f=-9.7e-07)
    other = SimpleNamespace(name="epsilon", f=1e-12)
    nodes = [
        SimpleNamespace(op_type=kind, attribute=[a])
        for kind, a in (("InstanceNormalization", told), ("Other", other))
    ]
    onnx = SimpleNamespace(graph=SimpleNamespace(node=nodes))
    norms = [paddle.nn.GroupNorm(1, 2, epsilon) for epsilon in (1e-5, 1e-5, 1e-6)]
    formats._correct_epsilons(onnx, paddle.nn.Sequential(*norms[:2]))
    assert (told.f, other.f) == (1e-5, 1e-12)
    with pytest.raises(
        InputError,
        match=r"group norms have epsilons of \[1e-06, 1e-05\]: the conversion to ONNX would be wrong",
    ):
        formats._correct_epsilons(onnx, paddle.nn.Sequential(*norms))
