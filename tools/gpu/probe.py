"""The probes of ``tools/doctor.py --gpu``. Each asks the device one question, in a process of its
own.

The arguments are the probe's name and a request in JSON. The answer is the last line that is
printed, in JSON, too. Such a process leaves no memory on the device. If it hangs, it can be ended,
and if it crashes, the others continue.
"""

import collections
import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Run by its path, Python would look in tools/gpu/ alone.
sys.path.insert(0, str(ROOT))

import errors  # noqa: E402  (before Paddle)

Answer = dict[str, Any]
# Paddle's operators that compute attention in one kernel, by the names of ``paddle._C_ops``.
BACKENDS = ("flash_attn", "flash_attn_v3", "memory_efficient_attention")
# The function behind all names of paddle.to_tensor.
TO_TENSOR = "_to_tensor_non_static"
# Methods that copy a tensor's values to the host, or a tensor to another place.
METHODS = (
    "numpy",
    "item",
    "tolist",
    "_getitem_from_offset",
    "__array__",
    "__float__",
    "__int__",
    "__index__",
    "__bool__",
    "__nonzero__",
    "_copy_to",
    "cpu",
    "cuda",
    "pin_memory",
    "set_value",
)
# Operators that copy values from the host, or ask the device for a number.
OPERATORS = (
    "assign_value",
    "assign_value_",
    "nonzero",
    "masked_select",
    "unique",
    "unique_consecutive",
    "bincount",
    "histogram",
    "repeat_interleave_with_tensor_index",
    "memcpy_d2h",
    "memcpy_h2d",
    "allclose",
    "equal_all",
)
# With a mask as the index, these ask the device how many of its places are true.
INDEXED = ("__getitem__", "__setitem__")


def about(request: Answer) -> Answer:
    """Describes Paddle and the GPUs that it sees. ``memory`` is that of the first GPU, in GB."""
    import paddle
    from paddle import version

    from tools.checks import machine
    from utils import num_gpus

    built = paddle.device.is_compiled_with_cuda()
    build = "a CPU build"
    if built:
        build = f"built for CUDA {version.cuda()} and cuDNN {version.cudnn()}"
    found = {
        "paddle": f"{version.full_version}, {build}, commit {version.commit[:10]}",
        "built": built,
        "gpus": num_gpus(),
        "capability": 0.0,
        "precision": "float32",
    }
    if not found["gpus"]:
        return found
    gpus = [paddle.device.cuda.get_device_properties(number) for number in range(found["gpus"])]
    kinds = collections.Counter(
        f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 1e9:.1f} GB"
        for gpu in gpus
    )
    return found | {
        "name": gpus[0].name,
        "capability": gpus[0].major + gpus[0].minor / 10,
        "memory": gpus[0].total_memory / 1e9,
        "kinds": "; ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "precision": "bfloat16" if paddle.amp.is_bfloat16_supported() else "float16",
        # whether matrix products use TF32
        "tf32": bool(paddle.base.core.get_cublas_switch()),
        "cuda": f"{machine.cuda()[1]}; cuDNN {paddle.device.get_cudnn_version()}",
    }


# --------------------------------------------------------------------- watching


@contextlib.contextmanager
def replacing(
    places: Iterable[tuple[Any, str]], by: Callable[[str, Callable], Callable]
) -> Iterator[None]:
    """Replaces the functions ``owner.name`` of ``places`` by ``by(name, function)``, within the
    body.
    """
    kept = [(owner, name, getattr(owner, name)) for owner, name in places if hasattr(owner, name)]
    for owner, name, function in kept:
        setattr(owner, name, by(name, function))
    try:
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


@contextlib.contextmanager
def counting_copies() -> Iterator[collections.Counter]:
    """Counts copies to the device and from it, by the function and the line that calls it:
    "to_tensor loading/transforms/batch.py:61".

    If such calls are nested, the outermost one counts. Only calls in this thread count, because
    another thread copies batches to a GPU. Copies that Paddle makes in C++ for an operator aren't
    seen.
    """
    import paddle
    from paddle import _C_ops

    count = collections.Counter()
    inside = [False]
    thread = threading.get_ident()

    def counting(name: str, function: Callable) -> Callable:
        def counts(*args: Any, **keywords: Any) -> Any:
            if inside[0] or not _copies(name, args) or threading.get_ident() != thread:
                return function(*args, **keywords)
            shown = "to_tensor" if name == TO_TENSOR else name
            count[f"{shown} {_caller()}"] += 1
            inside[0] = True
            try:
                return function(*args, **keywords)
            finally:
                inside[0] = False

        return counts

    places = [
        (paddle.tensor.creation, TO_TENSOR),
        *((paddle.Tensor, name) for name in METHODS + INDEXED),
        *((_C_ops, name) for name in OPERATORS),
    ]
    with replacing(places, counting):
        yield count


def _copies(name: str, args: tuple) -> bool:
    """Returns whether a call of a function of this name copies values, given its arguments."""
    import paddle

    if name == "set_value":
        return not isinstance(args[1], paddle.Tensor)
    if name in INDEXED:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, paddle.Tensor) and part.dtype == paddle.bool for part in parts)
    return True


def _caller() -> str:
    """Returns the file and line of the innermost frame of the toolkit outside this file."""
    frame = sys._getframe(2)
    while frame:
        file = frame.f_code.co_filename
        if file.startswith(f"{ROOT}{os.sep}") and "site-packages" not in file and file != __file__:
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


# ------------------------------------------------------------------ attention


def route(request: Answer) -> Answer:
    """Returns which kernels compute the attention of a training step.

    Args:
        request: ``words``: the command line of main_single_gpu.py.
    """
    import paddle
    from paddle import _C_ops

    from models import build_model
    from models.layers.attention import Attention
    from training.command_line import config_from_arguments
    from training.engine import autocast
    from training.setup import precision

    config = config_from_arguments("main_single_gpu.py", request["words"])
    model = build_model(config)
    types = []
    backends = []

    def noted(name: str, function: Callable) -> Callable:
        def note(q: paddle.Tensor, *others: Any, **keywords: Any) -> Any:
            if name in BACKENDS:
                backends.append(name)
            else:
                types.append(str(q.dtype).removeprefix("paddle."))
            return function(q, *others, **keywords)

        return note

    images = paddle.rand([2, 3, *model.image_size])
    places = [
        (paddle.nn.functional, "scaled_dot_product_attention"),
        *((_C_ops, name) for name in BACKENDS),
    ]
    with replacing(places, noted):
        with autocast(config):
            logits = model(images)
        logits.astype("float32").sum().backward()
    return {
        "attentions": sum(isinstance(layer, Attention) for layer in model.sublayers()),
        "fused": len(types),
        "types": sorted(set(types)),
        "backends": dict(collections.Counter(backends)),
        "precision": precision(config),
    }


def sdpa(request: Answer) -> Answer:
    """Measures time, memory and results of Paddle's ``scaled_dot_product_attention`` and of plain
    products.

    Returns for both, "fused" and "plain", the ``ms`` of forward and backward pass, and the ``MB``
    kept for the backward pass (on a GPU). ``error`` is the largest error of output and gradients,
    over the largest value of plain float32 products.

    Args:
        request: ``shape`` [batch, length, heads, channels of a head], ``dtype``, ``repeats``.
    """
    import paddle
    from paddle.nn import functional as F

    def plain(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q * q.shape[-1] ** -0.5, k, v))
        return paddle.matmul(F.softmax(paddle.matmul(q, k, transpose_y=True), -1), v).transpose(
            [0, 2, 1, 3]
        )

    paddle.seed(0)
    # q, k, v and the gradient of the output
    exact = [paddle.randn(request["shape"]) for _ in range(4)]
    expected, _ = _forward_backward(plain, exact)
    rounded = [x.astype(request["dtype"]) for x in exact]
    answer = {}
    for name, function in (("fused", F.scaled_dot_product_attention), ("plain", plain)):
        for number in range(request["repeats"] + 2):
            # The first two don't count.
            if number == 2:
                start = time.perf_counter()
            results, kept = _forward_backward(function, rounded)
            if number in (1, request["repeats"] + 1):
                # Reading a value waits for the device.
                results[-1].flatten()[0].item()
        seconds = (time.perf_counter() - start) / request["repeats"]
        errors = [
            float((result.astype("float32") - exact_result).abs().max() / exact_result.abs().max())
            for result, exact_result in zip(results, expected, strict=True)
        ]
        answer[name] = {"ms": 1e3 * seconds, "MB": kept / 1e6, "error": max(errors)}
    return answer


def _forward_backward(function: Callable, inputs: list) -> tuple[list, int]:
    """Returns ([the output, the gradients of q, k and v], the bytes that a GPU keeps from the
    forward to the backward pass).

    Args:
        inputs: q, k, v and the gradient of the output.
    """
    import paddle

    from utils import num_gpus

    def allocated() -> int:
        return paddle.device.cuda.memory_allocated() if num_gpus() else 0

    q, k, v = (x.detach() for x in inputs[:3])
    for x in (q, k, v):
        x.stop_gradient = False
    before = allocated()
    output = function(q, k, v)
    kept = allocated() - before
    return [output.detach(), *paddle.grad([output], [q, k, v], [inputs[3]])], kept


# ------------------------------------------------------------------- training


class Enough(Exception):
    """All requested steps are done."""


def train(request: Answer) -> Answer:
    """Makes the first steps of training runs, by the toolkit's own worker. The runs are given up
    before anything is saved.

    Returns for each job ``reports`` (the lines of metrics.jsonl), ``weights`` (a SHA-256 of each),
    ``transfers`` (of the later half, {origin: number per step}) and the number of ``columns`` of a
    batch. For a job that failed it is ``error``, one line.

    Args:
        request: ``jobs``: {name: words of main_single_gpu.py's command line}; ``steps``: their
            number;
            ``keep``: whether all steps use the first batch, which stays on the device;
            ``transfers``: whether copies are counted.
    """
    from main_multi_gpu import import_paddle, main_worker, read_datasets

    import_paddle()
    from training.command_line import config_from_arguments
    from training.window import Window

    answers: Answer = {}
    for name, words in request["jobs"].items():
        config = config_from_arguments("main_single_gpu.py", words)
        answer = answers[name] = {}
        try:
            with replacing(
                [(Window, "timed_batches")],
                lambda _, timed, answer=answer: _limit(timed, request, answer),
            ):
                main_worker(*read_datasets(config))
        except Enough:
            file = Path(config.OUTPUT) / "metrics.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            answer["reports"] = [json.loads(line) for line in lines]
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            answer["error"] = f"{type(error).__name__}: {lines[-1].strip()}"
    return answers


def _limit(timed: Callable, request: Answer, answer: Answer) -> Callable:
    """Returns a ``Window.timed_batches`` that ends after the requested number of steps, and writes
    its results to ``answer``.
    """

    def limited(window: Any, loader: Any, step: int) -> Iterator[list]:
        batches = timed(window, loader, step)
        batch = next(batches)
        answer["columns"] = len(batch)
        counting = contextlib.nullcontext(collections.Counter())
        if request.get("transfers"):
            counting = counting_copies()
        # ``steps`` is even.
        half = request["steps"] // 2
        with counting as count:
            for number in range(2 * half):
                if number == half:
                    count.clear()
                yield batch
                if not request.get("keep"):
                    batch = next(batches)
            answer["transfers"] = {where: many / half for where, many in count.items()}
        state = window.training.model.state_dict()
        answer["weights"] = {
            key: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for key, t in state.items()
        }
        raise Enough

    return limited


def logits(request: Answer) -> Answer:
    """Computes logits of random weights. Those of the CPU are stored, and others are compared with
    them.

    Returns for each job ``difference``, the largest one, and ``varies``, how much the stored logits
    differ from image to image. Both are over the range of the stored logits, and ``varies`` has to
    be much larger.

    Args:
        request: ``jobs``: {name: words of main_single_gpu.py's command line}; ``folder``: where the
            logits are stored; ``cpu``: whether the CPU computes them, by Paddle's own operators.
            Without ``cpu`` and without a GPU, the toolkit's compiled operators compute them.
    """
    import numpy as np
    import paddle

    import ops
    from models import build_model
    from training.command_line import config_from_arguments
    from utils import num_gpus

    if request.get("cpu"):
        paddle.set_device("cpu")
    elif not num_gpus():
        ops.load()
    answers = {}
    for name, words in request["jobs"].items():
        config = config_from_arguments("main_single_gpu.py", words)
        model = build_model(config)
        draw = np.random.default_rng(0)
        model.eval()
        _randomise(model, draw)
        images = draw.standard_normal([8, 3, *model.image_size]).astype(np.float32)
        with paddle.no_grad():
            logits = model(paddle.to_tensor(images)).numpy()
        file = Path(request["folder"]) / f"{name}.npy"
        if request.get("cpu"):
            np.save(file, logits)
        stored = np.load(file)
        difference = np.abs(logits - stored).max() / np.ptp(stored)
        varies = stored.std(0).mean() / np.ptp(stored)
        answers[name] = {"difference": float(difference), "varies": float(varies)}
    return answers


def _randomise(model: Any, draw: Any) -> None:
    """Gives each parameter random values. Without this, biases would be 0 and scales 1."""
    import numpy as np

    for name, parameter in model.named_parameters():
        noise = draw.standard_normal(parameter.shape).astype(np.float32)
        if parameter.ndim > 1:
            # Paddle's linear weights are [inputs, outputs], and convolutions [outputs, inputs,
            # ...].
            fan_in = parameter.shape[0]
            if parameter.ndim > 2:
                fan_in = max(1, parameter.size // parameter.shape[0])
            parameter.set_value(noise * np.float32(fan_in**-0.5))
        else:
            # Scales and variances are around 1, and biases around 0.
            mean = np.float32(name.endswith(("weight", "variance")))
            parameter.set_value(mean + np.float32(0.1) * noise)


PROBES = {probe.__name__: probe for probe in (about, route, sdpa, train, logits)}

if __name__ == "__main__":
    with errors.reporting():
        print(f"\n{json.dumps(PROBES[sys.argv[1]](json.loads(sys.argv[2])))}", flush=True)
