"""Runs exports on a CPU, with the library of their format.

A runner maps images [B, C, H, W] float32 to logits [B, K] float32, or [B, K, H, W] of pixels. It
computes in the precision for which the export was made and checked, whatever the library's default
is. (OpenVINO's default is bfloat16 if the CPU has it.)
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from errors import InputError, Unreadable, counted, install, reading
from inference.export_manifest import ADVICE, Export, read_export
from launch import progress
from models.paddle_inference import Program, num_threads, quiet
from settings.configuration import pair
from settings.tasks import answers_of

Runner = Callable[[np.ndarray], np.ndarray]


def open_export(folder: str | Path) -> Runner:
    """Returns the runner of an export, after it has run the model on two blank images.

    If the model has no classifier, the runner returns features [B, D].

    Raises:
        InputError: the folder isn't an export; a file is missing, damaged or can't be run; the library
            isn't installed; or the graph doesn't return a row of logits for each image. The runner
            checks the last of these for each batch.
    """
    export = read_export(folder)
    export.check_files()
    run = open_runner(export)
    config = export.description.to_config()
    outputs = config.MODEL.NUM_CLASSES
    gives_maps = answers_of(export.description.task) == "pixels"

    def checked(images: np.ndarray) -> np.ndarray:
        # A graph may run forever, and then only another process can stop it. The process that
        # watches this one measures the time from here.
        progress.beat(progress.EVALUATING)
        logits = run(images)
        with _as_export(export):
            _check_logits(logits, images, outputs, gives_maps)
        return logits

    # With a single image, a graph that always returns one row would pass.
    checked(np.zeros((2, config.DATA.IMAGE_CHANNELS, *pair(config.DATA.IMAGE_SIZE)), np.float32))
    return checked


def _check_counts(inputs: int, outputs: int) -> None:
    """Raises Unreadable unless a graph has one input and one output."""
    if (inputs, outputs) != (1, 1):
        raise Unreadable(
            f"its graph's inputs are {inputs} and its outputs {outputs}, expected one of each"
        )


def _check_logits(logits: Any, images: np.ndarray, outputs: int, gives_maps: bool) -> None:
    """Raises Unreadable unless a graph's output is float32 [images, outputs], or of maps [images,
    outputs, height, width].

    Args:
        images: [B, C, H, W].
        outputs: 0: features, of any number.
    """
    expected = [len(images), outputs or "features"]
    if gives_maps:
        expected += images.shape[2:]
    output = type(logits).__name__
    if isinstance(logits, np.ndarray):
        shape = list(logits.shape)
        if outputs == 0 and logits.ndim == 2:
            expected[1] = shape[1]
        if logits.dtype == np.float32 and shape == expected:
            return
        output = f"{logits.dtype} {shape}"
    kind = f" of {outputs} classes" if outputs else ""
    raise Unreadable(
        f"its graph gives {output} for {counted(len(images), 'image')}{kind},"
        f" expected float32 {expected}"
    )


def open_runner(export: Export, stem: str = "", precision: str = "") -> Runner:
    """Returns the runner of an export's model, or of another graph in its folder.

    Args:
        stem: the graph's file without its ending; "": the model's.
        precision: the precision to compute in; "": the export's.
    """
    with _as_export(export):
        run = RUNNERS[export.format](
            export.folder, stem or STEMS[export.format], precision or export.precision
        )

    def checked(images: np.ndarray) -> np.ndarray:
        with _as_export(export):
            return run(images)

    return checked


def _as_export(export: Export) -> AbstractContextManager[None]:
    return reading(export.folder, f"an export of format {export.format}", ADVICE)


def import_extra(package: str) -> Any:
    """Imports a module of a package of the extra ``export``, and returns it.

    The packages report nothing to their makers, and keep no number of this machine.

    Raises:
        InputError: the package isn't installed.
    """
    import importlib

    # ONNX Runtime would report its use to Microsoft, from threads of its own. These look a host up
    # by loading libraries, which may deadlock with threadpoolctl (``num_threads``).
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    # NNCF would report to Google Analytics by this package. It does without, if there is none.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        with quiet():
            return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        if name in ("onnx", "paddle2onnx") and sys.version_info >= (3, 13):
            raise InputError(
                "paddle2onnx, which writes ONNX and OpenVINO, has no release for Python"
                f" 3.{sys.version_info[1]}; use -format paddle, or Python 3.10 to 3.12"
            ) from None
        problem = "isn't installed" if error.name == name else f"can't be imported ({error})"
        raise InputError(f"{name} {problem}; {install('export')}") from None


class PaddleInference:
    """Runs a program by Paddle Inference with oneDNN.

    Args:
        folder: the folder of the export.
        stem: the name of the graph's file without its ending.
        precision: one of ``export_manifest.PRECISIONS``.
    """

    def __init__(self, folder: Path, stem: str, precision: str) -> None:
        self.predictor = Program(folder, precision == "bfloat16", stem)
        _check_counts(*self.predictor.counts())

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self.predictor(paddle.to_tensor(images)).numpy()


class OnnxRuntime:
    """Runs an ONNX model by ONNX Runtime's CPU provider."""

    def __init__(self, folder: Path, stem: str, precision: str) -> None:
        runtime = import_extra("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = num_threads()
        options.inter_op_num_threads = 1
        if precision in ("int8_weights", "int4_weights"):
            # Weights become float32 once, as the model is loaded, instead of in each call.
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        # 4 silences warnings, which are about its own optimisations. Errors are raised.
        options.log_severity_level = 4
        self.session = runtime.InferenceSession(
            str(folder / f"{stem}.onnx"), options, ["CPUExecutionProvider"]
        )
        _check_counts(len(self.session.get_inputs()), len(self.session.get_outputs()))
        self.name = self.session.get_inputs()[0].name

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self.session.run(None, {self.name: images})[0]


class OpenVino:
    """Runs an IR by OpenVINO's CPU plugin."""

    def __init__(self, folder: Path, stem: str, precision: str) -> None:
        core = import_extra("openvino").Core()
        settings = {
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",
            # A single request gets all threads.
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": num_threads(),
            # Where weights are whole numbers, it would round activations to int8 on some CPUs.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
        self.compiled = core.compile_model(core.read_model(folder / f"{stem}.xml"), "CPU", settings)
        _check_counts(len(self.compiled.inputs), len(self.compiled.outputs))
        self.request = self.compiled.create_infer_request()

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self.request.infer([images], share_inputs=True)[0].copy()


# The class that runs each format; its arguments are those of ``PaddleInference``.
RUNNERS: dict[str, Callable[[Path, str, str], Runner]] = {
    "paddle": PaddleInference,
    "paddle-legacy": PaddleInference,
    # These two return probabilities instead of logits.
    "paddlex": PaddleInference,
    "paddleclas": OnnxRuntime,
    "onnx": OnnxRuntime,
    "openvino": OpenVino,
}
# The name of the model's file in each format, without its ending.
STEMS = {
    "paddle": "inference",
    "paddle-legacy": "inference",
    "paddlex": "inference",
    "paddleclas": "inference",
    "onnx": "model",
    "openvino": "model",
}
