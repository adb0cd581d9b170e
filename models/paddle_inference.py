"""A model as a program of Paddle Inference, run on a CPU by oneDNN.

``-eval -o EVAL_ENGINE inference`` evaluates by it (``inference_engine``), tools/export_model.py
keeps it (inference/exporting.py). Images come normalised: within the program, bfloat16 would round
the normalisation too, which makes ViT-S/16's logits differ by 2.4% of their range instead of 0.7%.
"""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from paddle.jit.dy2static.program_translator import FunctionCache
from threadpoolctl import threadpool_info

import ops
from errors import InputError, RunError, Unreadable
from launch.files import temporary_folder
from models.base import ImageModel
from ops.device import exact_float32
from settings.options import Configuration
from utils import num_gpus

TOLERANCE = 1e-4  # largest difference from eager logits, over their range, in float32
PROGRAM = "inference"  # the files' name, without their endings


class Program:
    """Runs an exported program: images [B, C, S, S] float32 -> logits [B, K] float32, of any B.

    Args:
        folder: where ``export`` has written.
        bfloat16: whether oneDNN computes in bfloat16 where it can.
        name: of the program's files.

    Raises:
        Unreadable: the folder holds no program.
    """

    def __init__(self, folder: Path, bfloat16: bool = False, name: str = PROGRAM) -> None:
        self.bfloat16 = bfloat16
        ops.install_signal_stack()
        program = program_in(folder, name)
        settings = paddle.inference.Config(str(program), str(folder / f"{name}.pdiparams"))
        settings.disable_gpu()
        settings.disable_glog_info()
        settings.enable_mkldnn()
        settings.set_cpu_math_library_num_threads(num_threads())
        settings.enable_memory_optim()
        if program.suffix == ".json":  # Paddle 3's
            settings.enable_new_ir(True)
            settings.enable_new_executor(True)
            # It loses a reshape between a transposition and a Linear (Paddle 3.3.1): Swin's windows
            # in earlier exports.
            settings.delete_pass("operator_reshape_onednn_fuse_pass")
        if bfloat16:
            settings.enable_mkldnn_bfloat16()
        with quiet():
            self._predictor = paddle.inference.create_predictor(settings)
        self._first = True

    def counts(self) -> tuple[int, int]:
        """Returns how many inputs and outputs the program has."""
        return len(self._predictor.get_input_names()), len(self._predictor.get_output_names())

    def __call__(self, images: paddle.Tensor) -> paddle.Tensor:
        # oneDNN says a word as it first runs
        with quiet() if self._first else contextlib.nullcontext():
            self._first = False
            return self._predictor.run([images])[0]


def num_threads() -> int:
    """Returns how many threads this process computes with, as ``ops.device.tune_cpu`` or
    OMP_NUM_THREADS set it.
    """
    return max(
        (pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "openmp"),
        default=1,
    )


def export(model: ImageModel, folder: Path) -> None:
    """Writes the program and weights of ``model`` into ``folder``: inference.json (Paddle 2.6:
    .pdmodel), .pdiparams.

    Raises:
        InputError: the model can't be exported.
    """
    save_program(model.inference_model(), folder / PROGRAM, inputs_of(model))


def inputs_of(model: ImageModel) -> paddle.static.InputSpec:
    """Returns what a program of ``model`` takes: images of any number."""
    return paddle.static.InputSpec(
        [None, model.in_channels, *model.image_size], "float32", "images"
    )


def save_program(layer: nn.Layer, path: Path, inputs: paddle.static.InputSpec) -> None:
    """Writes the program and weights of a layer: ``path`` with the endings .json (Paddle 2.6:
    .pdmodel), .pdiparams.

    Raises:
        InputError: it can't be exported.
    """
    layer.eval()
    with warnings.catch_warnings(), refusing("exported"), _methods_converted_once():
        warnings.simplefilter("ignore")  # on what Paddle's own functions do in a static graph
        paddle.jit.save(layer, str(path), input_spec=[inputs])


@contextlib.contextmanager
def _methods_converted_once() -> Iterator[None]:
    """Lets Paddle convert a method once, not once for each layer that has it. That halves the time
    of an export.

    Paddle remembers what it has converted, but by bound methods, which Python makes anew at each
    access.
    """
    convert = FunctionCache.convert_with_cache
    FunctionCache.convert_with_cache = lambda self, func: convert(
        self, getattr(func, "__func__", func)
    )
    try:
        yield
    finally:
        FunctionCache.convert_with_cache = convert


def program_in(folder: Path, name: str = PROGRAM) -> Path:
    """Returns the file of a program that ``save_program`` has written.

    Raises:
        Unreadable: there is none.
    """
    found = [folder / f"{name}{ending}" for ending in (".json", ".pdmodel")]
    try:
        return next(file for file in found if file.is_file())
    except StopIteration:
        raise Unreadable(f"it holds neither {found[0].name} nor {found[1].name}") from None


def difference(model: ImageModel, program: Program) -> float:
    """Returns the largest difference of the program's logits from the model's, over their range, on
    random images.

    Raises:
        InputError: the program can't run.
        RunError: logits aren't finite, or in float32 differ by more than TOLERANCE.
    """
    shape = (4, model.in_channels, *model.image_size)
    images = paddle.to_tensor(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    with paddle.no_grad(), exact_float32():
        expected = model(images).numpy()
    with refusing("run by Paddle Inference" + " in bfloat16" * program.bfloat16), quiet():
        found = program(images).numpy()
    if not np.isfinite(expected).all():
        raise RunError("the weights give no finite logits", shared=True)
    differs = float(np.abs(found - expected).max() / (np.ptp(expected) or 1))
    if not (program.bfloat16 or differs <= TOLERANCE):
        raise RunError(
            f"the exported model's logits differ from eager by {differs:.1e} of their range",
            shared=True,
        )
    return differs


def inference_engine(
    config: Configuration, model: ImageModel, tell: Callable[[str], None]
) -> Program:
    """Returns the program for EVAL_ENGINE inference, checked against ``model``; tells what that
    took.

    Raises:
        InputError: there is a GPU, AMP is on and the CPU has no bfloat16, or the model can't be
            exported or run.
    """
    if num_gpus():
        raise InputError(
            f"EVAL_ENGINE inference runs on the CPU, found {num_gpus()} GPUs; use EVAL_ENGINE eager"
        )
    if config.AMP and not paddle.base.core.supports_bfloat16_fast_performance():
        raise InputError(
            "-amp with EVAL_ENGINE inference needs a CPU with bfloat16 (avx512_bf16); leave out -amp"
        )
    start = time.monotonic()
    with temporary_folder() as folder:
        export(model, folder)
        program = Program(folder, config.AMP)
    seconds = time.monotonic() - start
    differs = difference(model, program)
    tell(
        f"{'bfloat16' if config.AMP else 'float32'} by Paddle Inference, exported in {seconds:.1f} s;"
        f" on random images, logits differ from the eager ones by {differs:.1e} of their range"
    )
    return program


@contextlib.contextmanager
def refusing(what: str, advice: str = "use EVAL_ENGINE eager") -> Iterator[None]:
    """Turns Paddle's errors, pages of C++ and Python, into one line."""
    try:
        yield
    except (OSError, MemoryError):  # the disk's, and what errors.out_of_memory tells
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
            type(error).__name__
        ]
        cause = next((line for line in reversed(lines) if "Error: " in line), lines[-1])
        raise InputError(f"the model can't be {what} ({cause}); {advice}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps off the console what Paddle's C++ prints of its passes and kernels; errors are
    Python's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    try:
        with open(os.devnull, "w") as nowhere:
            for stream in kept:
                os.dup2(nowhere.fileno(), stream)
        yield
    finally:
        sys.stdout.flush()  # Python's own lines of that time, too
        sys.stderr.flush()
        for stream, own in kept.items():
            os.dup2(own, stream)
            os.close(own)
