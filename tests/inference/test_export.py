"""An export gives the eager model's logits in every format, whole or not at all; its graph gives Pillow's pixels."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import ROOT, without
from golden.formula import array
from paddle import nn
from programs import wait_for
from test_inference import EXPORTED, images_of, small

from config import get_config
from errors import InputError, RunError
from inference import Predictor, formats
from inference.backends import OnnxRuntime, OpenVino, open_export
from inference.exporting import check_combination, write_export
from inference.fidelity import crops, held_to_eager, in_batches
from inference.folder import read_export
from models import build_model
from models.inference import Predictor as Program
from models.inference import inputs_of
from weights import save_weights

onnx = pytest.importorskip("onnx", reason="requirements-export.txt isn't installed")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize("kind", EXPORTED)
def test_every_architecture_gives_the_eager_logits_in_onnx_and_openvino(kind, tmp_path):
    model = small(kind)
    images = images_of(model).numpy()
    expected = model(paddle.to_tensor(images)).numpy()
    graph = formats.simplified(formats.onnx_of(model, tmp_path, inputs_of(model), "logits"), tmp_path)
    sizes = [
        [s.dim_param or s.dim_value for s in v.type.tensor_type.shape.dim]
        for v in (graph.graph.input[0], graph.graph.output[0])
    ]
    assert sizes == [["batch", 3, *model.image_size], ["batch", expected.shape[1]]]
    assert [graph.graph.input[0].name, graph.graph.output[0].name] == ["images", "logits"]
    assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", 17)]
    formats.save_openvino(formats.openvino_of(graph, tmp_path), tmp_path / "model.xml", False)
    (tmp_path / "model.onnx").write_bytes(graph.SerializeToString())
    for runner in (OnnxRuntime, OpenVino):
        run = runner(tmp_path, "model", "float32")
        for count in (3, 1):
            np.testing.assert_allclose(run(images[:count]), expected[:count], atol=1e-5 * np.ptp(expected), rtol=0)


# ------------------------------------------------------------------ folders


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A small ViT of 32 x 32 colours, and the options that build it."""
    options = ["DATA.IMAGE_SIZE", "32", "DATA.CROP_PCT", "0.9", "MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16"]
    options += ["MODEL.DEPTH", "2", "MODEL.NUM_HEADS", "2", "MODEL.NUM_CLASSES", "5"]
    paddle.seed(3)
    model = build_model(get_config(None, options))
    model.head.weight.set_value(array("head", (16, 5)))
    folder = tmp_path_factory.mktemp("weights")
    save_weights(model, folder / "model.safetensors")
    return folder / "model.safetensors", options


def exported(weights, target, kind="paddle", precision="float32", **how):
    file, options = weights
    (target.parent / "small.yaml").write_text("TAG: of a test\n")
    trained = Predictor(file, str(target.parent / "small.yaml"), options)
    names = [f"class {number}" for number in range(5)]
    found = write_export(trained.config, trained.model, target, names, kind, precision, **how)
    return trained, found


@pytest.mark.parametrize("kind", ["paddle", "onnx", "openvino"])
def test_a_folder_holds_a_model_that_runs_and_says_what_it_is(kind, weights, tmp_path, capfd):
    trained, found = exported(weights, tmp_path / "out", kind)
    assert capfd.readouterr() == ("", "")
    assert found.difference < 1e-5
    assert (found.agreement, found.images) == (1, 20)
    export = read_export(tmp_path / "out")
    assert (export.format, export.precision) == (kind, "float32")
    assert export.description.classes == [f"class {number}" for number in range(5)]
    assert export.description.configured().MODEL.EMBED_DIM == 16
    assert (tmp_path / "out" / "labels.txt").read_text().splitlines() == export.description.classes
    pixels = np.stack([trained.pixels(crop) for crop in crops(5)])
    images = trained._normalize(paddle.to_tensor(pixels)).numpy()
    np.testing.assert_allclose(open_export(tmp_path / "out")(images), trained.logits(pixels), atol=1e-5, rtol=0)
    with pytest.raises(InputError, match="out exists; choose another -output"):
        exported(weights, tmp_path / "out", kind)


@pytest.mark.parametrize(
    ("kind", "precision"), [("onnx", "float16"), ("openvino", "float16"), ("openvino", "bfloat16")]
)
def test_half_precisions_are_near_float32_and_arent_it(kind, precision, weights, tmp_path):
    if precision == "bfloat16" and not paddle.base.core.supports_bfloat16_fast_performance():
        pytest.skip("the CPU has no bfloat16")
    _, found = exported(weights, tmp_path / "out", kind, precision, least=0)
    assert 1e-5 < found.difference < 0.05
    name = {"onnx": "model.onnx", "openvino": "model.bin"}[kind]
    if precision == "float16":
        exported(weights, tmp_path / "whole", kind)
        assert (tmp_path / "out" / name).stat().st_size < 0.75 * (tmp_path / "whole" / name).stat().st_size


def test_pixels_go_in_of_any_size_and_logits_come_out(weights, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    trained, _ = exported(weights, tmp_path / "out", "onnx")
    session = runtime.InferenceSession(str(tmp_path / "out" / "model_with_preprocessing.onnx"))
    assert session.get_inputs()[0].shape == ["batch", "height", "width", 3]
    for crop in crops(8):
        expected = trained.logits(trained.pixels(crop)[None])
        [found] = session.run(None, {"pixels": np.asarray(crop)[None]})
        np.testing.assert_allclose(found, expected, atol=2e-3 * np.ptp(expected), rtol=0)


def test_int8_of_the_same_images_has_the_same_weights(weights, tmp_path):
    pytest.importorskip("nncf")
    images = 2 * np.random.default_rng(0).normal(size=(6, 3, 32, 32)).astype(np.float32)
    for name in ("one", "two"):
        _, found = exported(weights, tmp_path / name, "openvino", "int8", calibration=images, least=0)
    assert 1e-4 < found.difference < 0.2
    # The names in model.xml count on within a process; of two processes they are the same.
    assert (tmp_path / "one" / "model.bin").read_bytes() == (tmp_path / "two" / "model.bin").read_bytes()
    exported(weights, tmp_path / "whole", "openvino")
    assert 2 * (tmp_path / "one" / "model.bin").stat().st_size < (tmp_path / "whole" / "model.bin").stat().st_size


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("kind", "precision", "line"),
    [
        ("paddle", "float16", "-format paddle -precision float16: Paddle Inference has no float16 on a CPU"),
        ("paddle", "int8", "-format paddle -precision int8: int8 is made for ONNX Runtime and OpenVINO; use"),
        ("onnx", "bfloat16", "-format onnx -precision bfloat16: ONNX Runtime has no bfloat16 on a CPU"),
    ],
)
def test_what_a_cpu_cant_is_refused_with_the_reason(kind, precision, line, tmp_path):
    with pytest.raises(InputError, match=line):
        check_combination(kind, precision)


def test_int8_without_images_and_a_missing_package_are_refused(weights, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="-precision int8 needs images of the training set"):
        exported(weights, tmp_path / "out", "onnx", "int8")
    monkeypatch.setitem(sys.modules, "paddle2onnx", None)
    with pytest.raises(InputError, match=r"^paddle2onnx .*; pip install -r requirements-export\.txt$"):
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

    with pytest.raises(RunError, match=r"logits differ from eager by \d"):
        held_to_eager(config, model, shifted, "float32")
    with pytest.raises(
        RunError, match=r"^int8: on crops of photographs, .* on \d+ of 16; expected 80% of them at least"
    ):
        held_to_eager(config, model, shifted, "int8")
    with pytest.raises(RunError, match="the exported model's logits aren't finite in float16"):
        held_to_eager(config, model, lambda images: shifted(images) * np.inf, "float16")


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
        with pytest.raises(InputError, match=rf"{name}: it isn't what was exported.*; export the model anew"):
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
        with pytest.raises(InputError, match=r"preprocess\.json: .*; export the model anew"):
            open_export(tmp_path / "out")
    with pytest.raises(InputError, match="its files is a dictionary of 0, expected a SHA-256 per file"):
        manifest.write_text(json.dumps(json.loads(whole) | {"files": {}}))
        open_export(tmp_path / "out")
    with pytest.raises(InputError, match="no export: it holds no preprocess.json"):
        open_export(tmp_path)


@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_a_model_that_is_none_is_a_line_though_its_sum_fits(kind, weights, tmp_path):
    exported(weights, tmp_path / "out", kind)
    name = {"onnx": "model.onnx", "openvino": "model.xml"}[kind]
    whole = (tmp_path / "out" / name).read_bytes()
    for content in (b"", b"\0" * 100, whole[:-200], whole[: len(whole) // 2], whole[len(whole) // 2 :]):
        replace_file(tmp_path / "out", name, content)
        with pytest.raises(InputError, match=rf"out: can't be read as an export of format {kind}"):
            open_export(tmp_path / "out")


def replace_file(folder, name, content):
    """Writes a file of an export, and its new sum."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "preprocess.json").read_text())
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    (folder / "preprocess.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_images_that_a_model_cant_take_are_a_line(kind, weights, tmp_path):
    exported(weights, tmp_path / "out", kind)
    run = open_export(tmp_path / "out")
    with pytest.raises(InputError, match=rf"^{tmp_path}/out: can't be read as an export of format {kind} \(") as caught:
        run(np.zeros((1, 3, 40, 40), np.float32))
    assert "\n" not in str(caught.value)


def test_a_graph_that_is_wrong_is_refused_in_every_precision(weights, tmp_path, monkeypatch):
    """(A half precision is held to its best classes alone, and a wrong graph may well have those.)"""
    simplified = formats.simplified

    def wrong(graph, scratch):
        graph = simplified(graph, scratch)
        for weight in graph.graph.initializer:
            if weight.name == "head.bias":
                weight.CopyFrom(onnx.numpy_helper.from_array(np.full(5, 0.01, np.float32), weight.name))
        return graph

    monkeypatch.setattr(formats, "simplified", wrong)
    for kind in ("onnx", "openvino"):
        with pytest.raises(RunError, match=r"the exported model's logits differ from eager by [\d.e-]+ of their range"):
            exported(weights, tmp_path / "out", kind, "float16")


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("link", "link exists; choose another -output"),
        ("file/out", r"file/out can't be made \(Not a directory\); choose another -output"),
        ("/proc/out", r"/proc/out can't be made \(.*\); choose another -output"),
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
    with pytest.raises(RunError, match=r"out isn't written \(No space left on device\); free some space"):
        exported(weights, tmp_path / "out", kind)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["small.yaml"]


def test_an_export_of_the_first_release_is_read(weights, tmp_path):
    trained, _ = exported(weights, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "preprocess.json").read_text())
    for name in ("task", "values", "format", "precision", "files"):
        del content[name]
    (tmp_path / "out" / "preprocess.json").unlink()
    (tmp_path / "out" / "preprocessing.json").write_text(json.dumps(content))
    export = read_export(tmp_path / "out")
    assert (export.format, export.precision) == ("paddle", "float32")
    data = export.description.configured().DATA
    assert (data.IMAGE_SIZE, data.CROP_PCT, data.INTERPOLATION) == (32, 0.9, "bicubic")
    images = np.ones((2, 3, 32, 32), np.float32)
    expected = trained.model(paddle.to_tensor(images)).numpy()
    np.testing.assert_allclose(open_export(tmp_path / "out")(images), expected, atol=1e-5, rtol=0)


class ReadsValues(nn.Layer):
    """A model that reads values, which a graph hasn't: NumPy finds no axis to sort."""

    image_size, in_channels = (4, 4), 3

    def forward(self, x):
        return paddle.to_tensor(np.sort(x.numpy()))[:, 0, 0]


def test_a_model_that_cant_be_exported_is_an_error_of_one_line_and_leaves_nothing(tmp_path):
    with pytest.raises(InputError, match=r"^the model can't be exported \(.*AxisError: .+\); use EVAL_ENGINE eager$"):
        write_export(get_config(), ReadsValues(), tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_differs_is_never_written(monkeypatch, tmp_path):
    model = small("lenet")
    config = get_config(None, ["DATA.IMAGE_SIZE", "28", "MODEL.NUM_CLASSES", "10"])
    monkeypatch.setattr(Program, "__call__", lambda self, images: self._predictor.run([images])[0] * 1.001)
    with pytest.raises(RunError, match=r"the exported model's logits differ from eager by [\d.]+e-04 of their range"):
        write_export(config, model, tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []
    model.fc[0].weight.set_value(paddle.full_like(model.fc[0].weight, float("nan")))
    with pytest.raises(RunError, match="the weights give no finite logits"):
        write_export(config, model, tmp_path / "out", [])


def test_the_tool_writes_what_runs_without_the_toolkit(tiny, tmp_path):
    paddle.seed(3)
    model = build_model(get_config(None, tiny))
    model.head.weight.set_value(array("head", (16, 10)))
    weights = tmp_path / "model.safetensors"
    save_weights(model, weights)
    words = [*without(tiny, "TRAIN.", "DATA.DATASET"), "DATA.INTERPOLATION", "bilinear", "DATA.CROP_MODE", "squash"]
    (tmp_path / "tiny.yaml").write_text("TAG: of a test\n")
    command = [sys.executable, str(ROOT / "tools" / "export_model.py"), "-cfg=tiny.yaml", f"-pretrained={weights}"]
    command += ["-output=out", "-o", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "random images, logits differ from the eager ones by " in done.stdout
    content = json.loads((tmp_path / "out" / "preprocess.json").read_text())
    assert content.items() >= {
        "image_size": 8, "channels": 1, "mean": [0.5], "std": [0.5], "crop_pct": 1.0, "crop_mode": "squash",
        "interpolation": "bilinear",
        "num_classes": 10, "classes": [],
    }.items()  # fmt: skip
    config = get_config(None, words)
    paddle.seed(3)
    model = build_model(config)
    model.head.weight.set_value(array("head", (16, 10)))
    images = images_of(model)
    np.testing.assert_allclose(Program(tmp_path / "out")(images).numpy(), model(images).numpy(), atol=1e-5, rtol=0)
    with pytest.raises(InputError, match="out exists; choose another -output"):
        write_export(config, model, tmp_path / "out", [])


def test_a_stop_leaves_nothing(weights, tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "export_model.py"), "-cfg=small.yaml", f"-pretrained={weights[0]}"]
    (tmp_path / "small.yaml").write_text("TAG: of a test\n")
    command += ["-output=out", "-format=onnx", "-o", *weights[1]]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert wait_for(lambda: list(tmp_path.glob(".out.*")), process)
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in err
    assert b"C++" not in out + err  # Paddle's own handler tells of its stack
    assert [file.name for file in tmp_path.iterdir()] == ["small.yaml"]
