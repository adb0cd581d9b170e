"""Models as programs of Paddle Inference, which run on a CPU by oneDNN.

``-eval -o EVAL_ENGINE inference`` evaluates with such a program (``inference_engine``), and
tools/export_model.py writes one (inference/exporting.py). A program takes normalised images. If it
normalised them itself, bfloat16 would round that, too. The logits of ViT-S/16 would then differ by
2.4% of their range instead of 0.7%.
"""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.jit.dy2static import convert_call_func
from paddle.jit.dy2static.program_translator import FunctionCache
from threadpoolctl import threadpool_info

import ops
from errors import InputError, RunError, Unreadable
from launch.files import temporary_folder
from models.base import ImageModel
from ops.device import exact_float32
from settings.configuration import Configuration
from utils import num_gpus

# The largest difference from eager logits in float32, over their range.
TOLERANCE = 1e-4
# The name of a program's files, without their suffixes.
PROGRAM = "inference"


class Program:
    """Runs an exported program: images [B, C, S, S] float32 -> logits [B, K] float32, of any B.

    Args:
        folder: the folder that ``export`` wrote to.
        bfloat16: whether oneDNN computes in bfloat16 where it can.
        name: name of the program's files, without their suffixes.

    Raises:
        Unreadable: there is no program in the folder.
    """

    def __init__(self, folder: Path, bfloat16: bool = False, name: str = PROGRAM) -> None:
        self.bfloat16 = bfloat16
        ops.install_signal_stack()
        program = program_in(folder, name)
        config = paddle.inference.Config(str(program), str(folder / f"{name}.pdiparams"))
        config.disable_gpu()
        config.disable_glog_info()
        config.enable_mkldnn()
        config.set_cpu_math_library_num_threads(num_threads())
        config.enable_memory_optim()
        # Paddle 3's format.
        if program.suffix == ".json":
            config.enable_new_ir(True)
            config.enable_new_executor(True)
            # In Paddle 3.3.1 this pass loses a reshape between a transposition and a Linear, as
            # earlier exports of Swin's windows have it.
            config.delete_pass("operator_reshape_onednn_fuse_pass")
        if bfloat16:
            config.enable_mkldnn_bfloat16()
        with quiet():
            self._predictor = paddle.inference.create_predictor(config)
        self._first = True

    def counts(self) -> tuple[int, int]:
        """Returns how many inputs and outputs the program has."""
        return len(self._predictor.get_input_names()), len(self._predictor.get_output_names())

    def __call__(self, images: paddle.Tensor) -> paddle.Tensor:
        # oneDNN prints a line in the first run.
        with quiet() if self._first else contextlib.nullcontext():
            self._first = False
            return self._predictor.run([images])[0]


def num_threads() -> int:
    """Returns the number of threads of this process, as ``ops.device.tune_cpu`` or OMP_NUM_THREADS
    set it.
    """
    openmp_pools = [pool for pool in threadpool_info() if pool["user_api"] == "openmp"]
    return max((pool["num_threads"] for pool in openmp_pools), default=1)


def export(model: ImageModel, folder: Path) -> None:
    """Writes the program and weights of ``model`` into ``folder``: inference.json (in Paddle 2.6
    inference.pdmodel) and inference.pdiparams.

    Raises:
        InputError: the model can't be exported.
    """
    save_program(model.inference_model(), folder / PROGRAM, inputs_of(model))


def inputs_of(model: ImageModel) -> paddle.static.InputSpec:
    """Returns the input of a program of ``model``: any number of images."""
    return paddle.static.InputSpec(
        [None, model.in_channels, *model.image_size], "float32", "images"
    )


def save_program(layer: nn.Layer, path: Path, inputs: paddle.static.InputSpec) -> None:
    """Writes the program and weights of a layer to ``path`` with the suffixes .json (in Paddle 2.6
    .pdmodel) and .pdiparams.

    Raises:
        InputError: the layer can't be exported.
    """
    layer.eval()
    with warnings.catch_warnings(), refusing("exported"), _functions_seen_once():
        # Paddle's own functions cause warnings in a static graph.
        warnings.simplefilter("ignore")
        paddle.jit.save(layer, str(path), input_spec=[inputs])


@contextlib.contextmanager
def _functions_seen_once() -> Iterator[None]:
    """Makes Paddle examine and convert a method once instead of once for each layer that has it.
    Each of the two halves the time of an export.

    Paddle caches what it has converted, but by bound methods, which Python creates again at each
    access. Functions of Paddle and of other packages stay as they are. To know them, Paddle builds
    a list of all 19,000 at each call.
    """
    convert = FunctionCache.convert_with_cache
    is_unsupported = convert_call_func.is_unsupported
    known: dict[Any, bool] = {}

    def is_known_unsupported(func: Any) -> bool:
        key = getattr(func, "__func__", func)
        if isinstance(func, nn.Layer):
            # Paddle looks at the method ``forward``. The type itself stands for its constructor.
            key = (nn.Layer, type(func))
        if not isinstance(key, Hashable):
            return is_unsupported(func)
        if key not in known:
            known[key] = is_unsupported(func)
        return known[key]

    FunctionCache.convert_with_cache = lambda self, func: convert(
        self, getattr(func, "__func__", func)
    )
    convert_call_func.is_unsupported = is_known_unsupported
    try:
        yield
    finally:
        FunctionCache.convert_with_cache = convert
        convert_call_func.is_unsupported = is_unsupported


def program_in(folder: Path, name: str = PROGRAM) -> Path:
    """Returns the file of a program that ``save_program`` has written.

    Raises:
        Unreadable: there is none.
    """
    files = [folder / f"{name}{suffix}" for suffix in (".json", ".pdmodel")]
    for file in files:
        if file.is_file():
            return file
    raise Unreadable(f"it has neither {files[0].name} nor {files[1].name}")


def difference(model: ImageModel, program: Program) -> float:
    """Returns the largest difference between the logits of the program and of the model on random
    images, over their range.

    Raises:
        InputError: the program can't run.
        RunError: logits aren't finite, or differ by more than TOLERANCE in float32.
    """
    shape = (4, model.in_channels, *model.image_size)
    images = paddle.to_tensor(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    with paddle.no_grad(), exact_float32():
        expected = model(images).numpy()
    use = "run by Paddle Inference"
    if program.bfloat16:
        use += " in bfloat16"
    with refusing(use), quiet():
        logits = program(images).numpy()
    if not np.isfinite(expected).all():
        raise RunError("the weights yield non-finite logits", shared=True)
    largest = float(np.abs(logits - expected).max() / (np.ptp(expected) or 1))
    # ``not <=`` refuses NaN as well.
    if not (program.bfloat16 or largest <= TOLERANCE):
        raise RunError(
            "the logits of the exported model differ from those of the eager model by"
            f" {largest:.1e} of their range",
            shared=True,
        )
    return largest


def inference_engine(
    config: Configuration, model: ImageModel, tell: Callable[[str], None]
) -> Program:
    """Returns the program for EVAL_ENGINE inference, checked against ``model``.

    Args:
        tell: called with one line about the export and the check.

    Raises:
        InputError: there is a GPU, AMP is on and the CPU has no bfloat16, or the model can't be
            exported or run.
    """
    if num_gpus():
        raise InputError(
            f"EVAL_ENGINE inference runs on CPUs only, found {num_gpus()} GPUs; use EVAL_ENGINE"
            " eager"
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
    largest = difference(model, program)
    dtype = "bfloat16" if config.AMP else "float32"
    tell(
        f"{dtype} by Paddle Inference, exported in {seconds:.1f} s; on random images, logits differ"
        f" from the eager ones by {largest:.1e} of their range"
    )
    return program


@contextlib.contextmanager
def refusing(what: str, advice: str = "use EVAL_ENGINE eager") -> Iterator[None]:
    """Turns Paddle's errors, pages of C++ and Python, into an InputError of one line.

    Args:
        what: what couldn't be done with the model: "exported".
        advice: what the user can do instead.
    """
    try:
        yield
    except (OSError, MemoryError):
        # These are about the disk or the memory, not about the model.
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        lines = lines or [type(error).__name__]
        cause = next((line for line in reversed(lines) if "Error: " in line), lines[-1])
        raise InputError(f"the model can't be {what} ({cause}); {advice}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences stdout and stderr, where Paddle's C++ code prints about its passes and kernels.

    Its errors are Python exceptions and pass through.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    duplicates = {stream: os.dup(stream) for stream in (1, 2)}
    try:
        with open(os.devnull, "w") as devnull:
            for stream in duplicates:
                os.dup2(devnull.fileno(), stream)
        yield
    finally:
        # What Python printed meanwhile is silenced, too.
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, duplicate in duplicates.items():
            os.dup2(duplicate, stream)
            os.close(duplicate)
