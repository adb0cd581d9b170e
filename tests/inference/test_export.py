"""An export gives the eager model's logits in every format, whole or not at all; its graph gives
Pillow's pixels.
"""

import json
import os
import subprocess
import sys

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT, without
from golden.formula import array
from support import exports
from support.exports import exported, images_for

from config import get_config
from errors import InputError
from inference import Predictor
from inference.backends import open_export
from inference.export_manifest import read_export
from inference.exporting import write_export
from inference.fidelity import crops
from models import build_model
from models.paddle_inference import Program
from weights import save_weights

onnx = pytest.importorskip("onnx", reason="the extra export isn't installed")
temporary = exports.temporary
weights = exports.weights


@pytest.fixture(scope="module")
def whole(weights, tmp_path_factory):
    """Returns the exports in float32 by format: (the Predictor of the weights, the folder)."""
    root = tmp_path_factory.mktemp("whole")
    return {
        kind: (exported(weights, root / kind, kind)[0], root / kind)
        for kind in ("onnx", "openvino")
    }


# Paddle's C++ prints a warning in a process's first graph, which is one of ``whole``.
@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("kind", ["paddle", "onnx", "openvino"])
def test_a_folder_holds_a_model_that_runs_and_says_what_it_is(kind, weights, tmp_path, capfd):
    trained, found = exported(weights, tmp_path / "out", kind)
    assert capfd.readouterr() == ("", "")
    assert found.difference < 1e-5
    assert (found.agreement, found.images) == (1, 20)
    export = read_export(tmp_path / "out")
    assert (export.format, export.precision) == (kind, "float32")
    assert export.description.classes == [f"class {number}" for number in range(5)]
    assert export.description.to_config().MODEL.EMBED_DIM == 16
    assert (tmp_path / "out" / "labels.txt").read_text().splitlines() == export.description.classes
    pixels = np.stack([trained.pixels(crop) for crop in crops(5)])
    images = trained._normalize(paddle.to_tensor(pixels)).numpy()
    np.testing.assert_allclose(
        open_export(tmp_path / "out")(images), trained.logits(pixels), atol=1e-5, rtol=0
    )
    with pytest.raises(InputError, match="out exists; choose another -output"):
        exported(weights, tmp_path / "out", kind)


@pytest.mark.parametrize(
    ("kind", "precision"), [("onnx", "float16"), ("openvino", "float16"), ("openvino", "bfloat16")]
)
def test_half_precisions_are_near_float32_and_arent_it(kind, precision, weights, whole, tmp_path):
    if precision == "bfloat16" and not paddle.base.core.supports_bfloat16_fast_performance():
        pytest.skip("the CPU has no bfloat16")
    _, found = exported(weights, tmp_path / "out", kind, precision, least=0)
    assert 1e-5 < found.difference < 0.05
    name = {"onnx": "model.onnx", "openvino": "model.bin"}[kind]
    if precision == "float16":
        _, folder = whole[kind]
        sizes = [(each / name).stat().st_size for each in (tmp_path / "out", folder)]
        assert sizes[0] < 0.75 * sizes[1]


def test_pixels_go_in_of_any_size_and_logits_come_out(whole):
    runtime = pytest.importorskip("onnxruntime")
    trained, folder = whole["onnx"]
    session = runtime.InferenceSession(str(folder / "model_with_preprocessing.onnx"))
    assert session.get_inputs()[0].shape == ["batch", "height", "width", 3]
    for crop in crops(8):
        expected = trained.logits(trained.pixels(crop)[None])
        [found] = session.run(None, {"pixels": np.asarray(crop)[None]})
        np.testing.assert_allclose(found, expected, atol=2e-3 * np.ptp(expected), rtol=0)


@pytest.mark.parametrize("name", ["preparation", "model", "model_with_preprocessing"])
def test_onnxs_own_tools_take_each_file(name, whole, tmp_path):
    """onnx.compose.merge_models lists an operator set once for each part, which quantize_dynamic
    doesn't take.
    """
    _, folder = whole["onnx"]
    graph = onnx.load(str(folder / f"{name}.onnx"))
    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", 17)]
    converted = pytest.importorskip("onnx.version_converter").convert_version(graph, 18)
    assert [(entry.domain, entry.version) for entry in converted.opset_import] == [("", 18)]
    try:
        from onnxruntime.quantization import quantize_dynamic
    except ImportError as error:  # of ml_dtypes, which onnxruntime doesn't install
        pytest.skip(str(error))
    quantize_dynamic(folder / f"{name}.onnx", tmp_path / "int8.onnx")
    session = pytest.importorskip("onnxruntime").InferenceSession(str(tmp_path / "int8.onnx"))
    shape = [3, 3, 32, 32] if name == "model" else [3, 40, 50, 3]
    images = np.zeros(shape, np.float32 if name == "model" else np.uint8)
    [found] = session.run(None, {session.get_inputs()[0].name: images})
    assert found.shape == ((3, 3, 32, 32) if name == "preparation" else (3, 5))


def test_int8_of_the_same_images_has_the_same_weights(weights, whole, tmp_path):
    pytest.importorskip("nncf")
    images = 2 * np.random.default_rng(0).normal(size=(6, 3, 32, 32)).astype(np.float32)
    for name in ("one", "two"):
        _, found = exported(
            weights, tmp_path / name, "openvino", "int8", calibration=images, least=0
        )
    assert 1e-4 < found.difference < 0.2
    # The names in model.xml count on within a process; of two processes they are the same.
    assert (tmp_path / "one" / "model.bin").read_bytes() == (
        tmp_path / "two" / "model.bin"
    ).read_bytes()
    _, folder = whole["openvino"]
    sizes = [(each / "model.bin").stat().st_size for each in (tmp_path / "one", folder)]
    assert 2 * sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("kind", "precision", "share", "least", "most"),
    [
        ("onnx", "int8_weights", 0.4, 1e-4, 0.03),
        ("openvino", "int8_weights", 0.4, 1e-4, 0.03),
        ("openvino", "int4_weights", 0.25, 1e-3, 0.4),
        ("onnx", "int4_weights", 0.4, 1e-3, 0.4),
    ],
)
@pytest.mark.parametrize("kept", ["ViT", "ConvNeXt"])
def test_weights_in_whole_numbers_make_a_smaller_file(
    kept, kind, precision, share, least, most, tmp_path
):
    pytest.importorskip("nncf")
    # ConvNeXt has convolutions, of which some are depthwise.
    options = {
        "ViT": [
            "MODEL.PATCH_SIZE",
            "8",
            "MODEL.EMBED_DIM",
            "64",
            "MODEL.DEPTH",
            "2",
            "MODEL.NUM_HEADS",
            "4",
        ],
        "ConvNeXt": [
            "MODEL.TYPE",
            "ConvNeXt",
            "MODEL.STAGE_DEPTHS",
            "[1,1,1,1]",
            "MODEL.EMBED_DIMS",
            "[32,32,64,64]",
        ],
    }[kept]
    paddle.seed(3)
    config = get_config(None, ["DATA.IMAGE_SIZE", "32", "MODEL.NUM_CLASSES", "7", *options])
    model = build_model(config)
    head = model.head.fc if kept == "ConvNeXt" else model.head
    head.weight.set_value(array("head", (64, 7)))
    sizes = []
    for number in ("float32", precision):
        found = write_export(config, model, tmp_path / number, [], kind, number, least=0)
        file = tmp_path / number / ("model.onnx" if kind == "onnx" else "model.bin")
        sizes.append(file.stat().st_size)
    assert sizes[1] < share * sizes[0]
    assert least < found.difference < most
    assert read_export(tmp_path / precision).precision == precision
    # Batches of other sizes, and what predict.py and the server read.
    images = images_for(model).numpy()
    run = open_export(tmp_path / precision)
    np.testing.assert_allclose(run(images[:1]), run(images)[:1], rtol=0, atol=1e-4)
    assert Predictor(tmp_path / precision).report.endswith(f"{kind}, {precision}")


def test_the_tool_writes_what_runs_without_the_toolkit(tiny, tmp_path):
    paddle.seed(3)
    model = build_model(get_config(None, tiny))
    model.head.weight.set_value(array("head", (16, 10)))
    weights = tmp_path / "model.safetensors"
    save_weights(model, weights)
    words = [
        *without(tiny, "TRAIN.", "DATA.DATASET"),
        "DATA.INTERPOLATION",
        "bilinear",
        "DATA.CROP_MODE",
        "squash",
    ]
    (tmp_path / "tiny.yaml").write_text("TAG: of a test\n")
    command = [
        warm.python(),
        str(ROOT / "tools" / "export_model.py"),
        "-cfg=tiny.yaml",
        f"-pretrained={weights}",
    ]
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
    images = images_for(model)
    np.testing.assert_allclose(
        Program(tmp_path / "out")(images).numpy(), model(images).numpy(), atol=1e-5, rtol=0
    )
    with pytest.raises(InputError, match="out exists; choose another -output"):
        write_export(config, model, tmp_path / "out", [])


# Stacks of matrices (RepMLP, MobileFormer), and convolutions of pooled vectors (RegNet, RepMLP).
@pytest.mark.parametrize(
    ("format_", "precision", "most"),
    [
        ("onnx", "int8_weights", 0.1),
        ("openvino", "int8_weights", 0.1),
        ("onnx", "int4_weights", 0.5),
    ],
)
@pytest.mark.parametrize("kind", ["regnet", "repmlp", "mobileformer"])
def test_weights_of_other_shapes_become_whole_numbers(kind, format_, precision, most, tmp_path):
    pytest.importorskip("nncf")
    if (kind, precision) == ("repmlp", "int4_weights"):
        pytest.skip("ONNX Runtime has no blocks of int4 in stacks of matrices; the export says so")
    model = exports.small_model(kind)
    images = images_for(model)
    with paddle.no_grad():
        expected = model(images).numpy()
    options = {
        "DATA.IMAGE_SIZE": list(model.image_size),
        "DATA.IMAGE_CHANNELS": model.in_channels,
        "MODEL.NUM_CLASSES": model.num_classes,
    }
    config = get_config(None, [str(word) for pair in options.items() for word in pair])
    write_export(config, model, tmp_path / "x", [], format_, precision, least=0)
    run = open_export(tmp_path / "x")
    found = run(images.numpy())
    difference = np.abs(found - expected).max() / np.ptp(expected)
    assert 1e-4 < difference < most
    single = np.concatenate([run(image[None]) for image in images.numpy()])
    np.testing.assert_allclose(single, found, atol=1e-5 * np.ptp(expected))


def test_an_export_that_its_library_doesnt_run_is_refused_by_its_flags(tmp_path):
    pytest.importorskip("nncf")
    model = exports.small_model("halonet")
    options = ["DATA.IMAGE_SIZE", str(list(model.image_size)), "MODEL.NUM_CLASSES", "5"]
    with pytest.raises(InputError) as caught:
        write_export(
            get_config(None, options),
            model,
            tmp_path / "x",
            [],
            "openvino",
            "int8_weights",
            least=0,
        )
    assert str(caught.value).startswith(
        "-format openvino -precision int8_weights was exported, but its library can't run it; use another"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_libraries_report_nothing(tmp_path, weights):
    """ONNX Runtime reports to Microsoft, and NNCF to Google, unless they are told not to. Both keep
    a number of the machine in the home folder.
    """
    pytest.importorskip("nncf")
    names = ("ORT_DISABLE_TELEMETRY", "NNCF_CI", "NNCF_DEV", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    file, options = weights
    words = ["-pretrained", file, "-format", "onnx", "-precision", "int8_weights", "-cfg", "x.yaml"]
    (tmp_path / "x.yaml").write_text("MODEL: {TYPE: ViT}\n")
    (tmp_path / "home").mkdir()
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "export_model.py", *words, "-output=x", "-o", *options],
        cwd=tmp_path,
        env=environment | {"HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    made = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert [path for path in made if "paddle" not in path.parts] == []
