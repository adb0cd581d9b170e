"""Exports a model into a folder, which is whole or absent.

The export is run and compared with the eager model before the folder gets its name. Besides the
model, it contains ``preparation``, a graph from pixels of any size to the model's input. For ONNX
it also contains both graphs in one file. ``export_manifest`` and ``conventions`` document the other
files.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from inference import formats, paddlex
from inference.backends import RUNNERS, STEMS, Runner, import_extra, open_export
from inference.conventions import write_conventions
from inference.export_manifest import ADVICE, MANIFEST, PRECISIONS
from inference.fidelity import LEAST_AGREEMENT, Fidelity, compare_with_eager
from inference.map_fidelity import ONE_SIZE, compare_maps, images_differ
from inference.prediction_writers import writing
from inference.preparation import Preparation
from inference.quantise import OF_WEIGHTS, check_calibration, compress_weights, quantise
from launch.files import making_folder
from loading.transforms import pixel_dtype
from models.base import ImageModel
from models.paddle_inference import PROGRAM, inputs_of, save_program
from settings.configuration import Configuration
from settings.tasks import answers_of
from training.checkpoint import describe
from training.checkpoint.calibration import Calibration
from utils import sync_directory
from weights.sums import sha256_of

# The files of the preparation, without its ending, and of both graphs in one.
PREPARATION = "preparation"
JOINED = "model_with_preprocessing.onnx"
# How float images are scaled before they are normalised, as the manifest says it.
_UNIT = "values of uint8 / 255, of uint16 / 65535, of float32 as they are"
_NO_FLOAT16 = "Paddle Inference has no float16 on a CPU; use bfloat16, or -format openvino"
_NO_INT8 = "int8 and int4 are for ONNX Runtime and OpenVINO; use -format onnx or openvino"
_NO_BFLOAT16 = "ONNX Runtime has no bfloat16 on a CPU; use -format openvino or paddle"
_FLOAT32_ALONE = "it only supports float32; leave out -precision"
# The precisions that a format doesn't have, with the reason for each.
_NOT_OF_PADDLE = {
    "float16": _NO_FLOAT16,
    "int8": _NO_INT8,
    "int8_weights": _NO_INT8,
    "int4_weights": _NO_INT8,
}
_IMPOSSIBLE: dict[str, dict[str, str]] = {
    "paddle": _NOT_OF_PADDLE,
    "paddle-legacy": _NOT_OF_PADDLE,
    "onnx": {"bfloat16": _NO_BFLOAT16},
    **dict.fromkeys(paddlex.FORMATS, dict.fromkeys(PRECISIONS[1:], _FLOAT32_ALONE)),
}


def check_combination(kind: str, precision: str) -> None:
    """Raises InputError if a format doesn't have a precision, on this CPU or at all, or if this
    version of Paddle can't write it.
    """
    if reason := _IMPOSSIBLE.get(kind, {}).get(precision):
        raise InputError(f"-format {kind} -precision {precision}: {reason}")
    if precision == "bfloat16" and not paddle.base.core.supports_bfloat16_fast_performance():
        raise InputError("-precision bfloat16 needs a CPU with bfloat16 (avx512_bf16); use float32")
    if kind == "paddle-legacy" and not paddle.__version__.startswith("2."):
        raise InputError(
            f"-format paddle-legacy: Paddle {paddle.__version__} only writes .json programs;"
            " export with Paddle 2.6 (this version can run its files)"
        )


def write_export(
    config: Configuration,
    model: ImageModel,
    target: Path,
    classes: list[str],
    kind: str = "paddle",
    precision: str = "float32",
    task: str = "classification",
    calibration: np.ndarray | None = None,
    least: float = LEAST_AGREEMENT,
    thresholds: Sequence[float] = (),
    features: bool = False,
    calibrated: Calibration | None = None,
) -> Fidelity:
    """Writes an export into the folder ``target``, whole or not at all.

    Args:
        classes: names by output; empty: they aren't known.
        kind, precision: one of FORMATS and of PRECISIONS.
        calibration: images of the training set, [n, C, H, W] float32, for int8.
        least: the least agreement with the model (``Fidelity``). In float32 the outputs have to
            agree within TOLERANCE instead.
        thresholds: of a multi-label model, by output.
        features: whether the outputs are features instead of classes.
        calibrated: the calibration of the weights; None: they have none.

    Returns:
        how far the export's outputs are from the model's.

    Raises:
        InputError: ``target`` exists, the model can't be exported so, or a package isn't installed.
        RunError: the export's outputs differ from the model's by too much.
    """
    check_combination(kind, precision)
    # These formats are for clients that compute no probabilities themselves.
    for_client = kind in paddlex.FORMATS
    if for_client:
        paddlex.check_paddlex(config, kind, task)
    if config.DATA.NUM_TOKENS is not None:
        raise InputError(
            f"DATA.NUM_TOKENS is {config.DATA.NUM_TOKENS}, but an export takes images of one size;"
            " pass -o DATA.NUM_TOKENS None, and DATA.IMAGE_SIZE"
        )
    check_target(target)
    gives_maps = answers_of(task) == "pixels"
    if gives_maps:
        _check_views(config)
    if precision == "int8":
        if gives_maps:
            raise InputError(
                f"-precision int8 isn't supported for TASK {task}; use another -precision"
            )
        check_calibration(calibration)
    model.eval()
    description = describe(config, classes, task, thresholds, calibrated)
    eager: nn.Layer = model
    if for_client:
        eager = paddlex.Probabilities(model, task, description.thresholds)
    with writing(str(target)), _new_folder(target) as temporary:
        with tempfile.TemporaryDirectory(dir=temporary) as scratch, _raising_full_disk(temporary):
            if for_client:
                graph = paddlex.Probabilities(model.inference_model(), task, description.thresholds)
                _write_for_client(graph, temporary, Path(scratch), kind)
                paddlex.write_settings(temporary, config, description, kind)
            else:
                exported = model.inference_model()
                _write_graphs(
                    config, exported, temporary, Path(scratch), kind, precision, calibration
                )
        if not gives_maps:
            write_conventions(temporary, config, description, model.num_features)
        content = _manifest(config) | description.entries()
        content["format"] = kind
        content["precision"] = precision
        content["features"] = features
        content["files"] = {file.name: sha256_of(file) for file in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        outputs = "probabilities" if for_client else "features" if features else "logits"
        runner = _opened(temporary, kind, precision)
        if gives_maps:
            fidelity = compare_maps(config, eager, runner, precision, least)
        else:
            fidelity = compare_with_eager(
                config, eager, runner, precision, calibration, least, outputs
            )
        for file in temporary.iterdir():
            sync_directory(file)
    return fidelity


def _opened(folder: Path, kind: str, precision: str) -> Runner:
    """Returns the runner of an export that was just made.

    Raises:
        InputError: the format's library doesn't run it.
    """
    try:
        return open_export(folder)
    except InputError as error:
        reason = str(error).removesuffix(ADVICE)
        raise InputError(
            f"-format {kind} -precision {precision} was exported, but its library can't run it; use"
            f" another -precision or -format ({reason})"
        ) from None


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Makes a folder by ``making_folder``; an error advises another -output."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(making_folder(target))
        except OSError as error:
            raise InputError(
                f"{target} can't be created ({error.strerror}); choose another -output"
            ) from None
        yield folder


@contextlib.contextmanager
def _raising_full_disk(folder: Path) -> Iterator[None]:
    """Raises the OSError of a full disk in place of a converter's error.

    Converters don't notice that a file was cut off, and fail when they read it.
    """
    try:
        yield
    except Exception:
        if shutil.disk_usage(folder).free < 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise


def check_target(target: Path) -> None:
    """Raises InputError if an export's folder exists already."""
    if os.path.lexists(target):
        raise InputError(f"{target} exists; choose another -output")


def _check_views(config: Configuration) -> None:
    """Raises InputError if the configuration averages views, which an export doesn't."""
    method = config.METHOD
    for key, value, one_view in (
        ("METHOD.SCALES", list(method.SCALES), [1.0]),
        ("METHOD.FLIP", method.FLIP, False),
    ):
        if value != one_view:
            raise InputError(
                f"{key} is {value}, expected {one_view} for an export, whose graph computes one view;"
                " pass it to the program that runs the export, such as tools/predict.py"
            )


def _manifest(config: Configuration) -> dict[str, Any]:
    """Returns the entries that preprocessing.json of earlier releases had."""
    data = config.DATA
    unit = _UNIT if pixel_dtype(config) is np.float32 else "RGB / 255"
    return {
        "input": f"images [B, C, H, W] float32: ({unit} - mean) / std",
        "image_size": data.IMAGE_SIZE,
        "channels": data.IMAGE_CHANNELS,
        "crop_pct": data.CROP_PCT,
        "crop_mode": data.CROP_MODE,
        "interpolation": data.INTERPOLATION,
        "mean": data.IMAGENET_MEAN,
        "std": data.IMAGENET_STD,
        "num_classes": config.MODEL.NUM_CLASSES,
    }


def _write_for_client(graph: paddlex.Probabilities, folder: Path, scratch: Path, kind: str) -> None:
    """Writes the graph of an export for PaddleX or PaddleClas, which prepare images themselves."""
    if kind == "paddlex":
        save_program(graph, folder / PROGRAM, paddlex.INPUTS)
    else:
        converted = formats.onnx_of(graph, scratch, paddlex.INPUTS, "probabilities")
        import_extra("onnx").save(
            formats.simplify(converted, scratch), str(folder / f"{PROGRAM}.onnx")
        )


def _write_graphs(
    config: Configuration,
    model: ImageModel,
    folder: Path,
    scratch: Path,
    kind: str,
    precision: str,
    calibration: np.ndarray | None,
) -> None:
    """Writes the model and its preparation in one format."""
    if answers_of(config.TASK) == "pixels":
        _write_graph_of_maps(config, model, folder, scratch, kind, precision)
        return
    preparation = Preparation(config)
    dtype = np.dtype(pixel_dtype(config))
    pixels = paddle.static.InputSpec(
        [None, None, None, config.DATA.IMAGE_CHANNELS], dtype, "pixels"
    )
    if kind.startswith("paddle"):
        save_program(model, folder / PROGRAM, inputs_of(model))
        save_program(preparation, folder / PREPARATION, pixels)
        return
    graph = formats.simplify(formats.onnx_of(model, scratch, inputs_of(model), "logits"), scratch)
    onnx = import_extra("onnx")
    # Errors of the conversion itself would be hidden by the error of a lower precision.
    if precision != "float32":
        onnx.save(graph, str(scratch / "model.onnx"))
        compare_with_eager(config, model, RUNNERS["onnx"](scratch, "model", "float32"), "float32")
    prepared = formats.simplify(formats.onnx_of(preparation, scratch, pixels, "prepared"), scratch)
    stem = STEMS[kind]
    if kind == "onnx":
        if precision == "int8":
            graph = quantise(graph, check_calibration(calibration))
        graph = _smaller_onnx(graph, precision)
        onnx.save(graph, str(folder / f"{stem}.onnx"))
        onnx.save(prepared, str(folder / f"{PREPARATION}.onnx"))
        onnx.save(formats.join_models(prepared, graph), str(folder / JOINED))
    else:
        converted = formats.openvino_of(graph, scratch)
        if precision == "int8":
            converted = quantise(converted, check_calibration(calibration))
        _save_smaller_openvino(converted, folder / f"{stem}.xml", precision)
        converted = formats.openvino_of(prepared, scratch)
        formats.save_openvino(converted, folder / f"{PREPARATION}.xml", half=False)


def _smaller_onnx(graph: Any, precision: str) -> Any:
    """Returns an ONNX model with its weights as ``precision`` stores them."""
    if precision == "float16":
        return formats.to_float16(graph)
    if precision == "int4_weights":
        graph = formats.with_int4(graph)
    if precision in OF_WEIGHTS:
        return compress_weights(graph, precision)
    return graph


def _save_smaller_openvino(model: Any, file: Path, precision: str) -> None:
    """Writes OpenVINO's IR with its weights as ``precision`` stores them."""
    if precision in OF_WEIGHTS:
        model = compress_weights(model, precision)
    formats.save_openvino(model, file, half=precision == "float16")


def _write_graph_of_maps(
    config: Configuration,
    model: ImageModel,
    folder: Path,
    scratch: Path,
    kind: str,
    precision: str,
) -> None:
    """Writes a model of TASK segmentation in one format, without a preparation.

    Raises:
        InputError: its graph would be of one size, and the configuration's images differ in size.
    """
    inputs = inputs_of(model)
    if images_differ(config):
        inputs = paddle.static.InputSpec([None, model.in_channels, None, None], "float32", "images")
    stem = STEMS[kind]
    if not kind.startswith("paddle"):
        # A missing package isn't a matter of sizes.
        import_extra("onnx")
        import_extra("paddle2onnx")
    try:
        if kind.startswith("paddle"):
            save_program(model, folder / PROGRAM, inputs)
            return
        graph = formats.simplify(formats.onnx_of(model, scratch, inputs, "logits"), scratch)
    except InputError as error:
        if images_differ(config):
            raise InputError(
                f"the exported graph needs images of one size; {ONE_SIZE} ({error})"
            ) from None
        raise
    if kind == "onnx":
        import_extra("onnx").save(_smaller_onnx(graph, precision), str(folder / f"{stem}.onnx"))
        return
    converted = formats.openvino_of(graph, scratch)
    _save_smaller_openvino(converted, folder / f"{stem}.xml", precision)
