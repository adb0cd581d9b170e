"""What ``tools/doctor.py --gpu`` asks of a device: a question by its name, in a process of its own.

Name and request (JSON) are its arguments; the answer, in JSON too, is the last line that it prints.
A process of its own leaves no memory on the device, can be ended when it hangs, and takes nobody
along when it crashes.
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
sys.path.insert(0, str(ROOT))  # it is run by its path

import errors  # noqa: E402  (before Paddle)

Answer = dict[str, Any]
# Paddle's operators that compute attention in one kernel, by the names of ``paddle._C_ops``.
BACKENDS = ("flash_attn", "flash_attn_v3", "memory_efficient_attention")
TO_TENSOR = "_to_tensor_non_static"  # what paddle.to_tensor does, under all of its names
# How a tensor's values come to the host, or a tensor to another place, and the operators that copy
# values from the host or ask the device for a number.
METHODS = (
    "numpy",
    "item",
    "tolist",
    "_getitem_from_offset",
    "__array__",
    "__float__",
    "__int__",
    "__index__",
)
METHODS += ("__bool__", "__nonzero__", "_copy_to", "cpu", "cuda", "pin_memory", "set_value")
OPERATORS = (
    "assign_value",
    "assign_value_",
    "nonzero",
    "masked_select",
    "unique",
    "unique_consecutive",
    "bincount",
)
OPERATORS += (
    "histogram",
    "repeat_interleave_with_tensor_index",
    "memcpy_d2h",
    "memcpy_h2d",
    "allclose",
    "equal_all",
)
# by a mask: the device is asked how many of its places are true
INDEXED = ("__getitem__", "__setitem__")


def about(request: Answer) -> Answer:
    """Returns what Paddle says of itself and of the GPUs it sees; ``memory`` in GB, of the first."""
    import paddle
    from paddle import version

    from tools.checks import machine
    from utils import num_gpus

    built = paddle.device.is_compiled_with_cuda()
    how = f"built for CUDA {version.cuda()} and cuDNN {version.cudnn()}" if built else "a CPU build"
    found = {
        "paddle": f"{version.full_version}, {how}, commit {version.commit[:10]}",
        "built": built,
    }
    found |= {"gpus": num_gpus(), "capability": 0.0, "precision": "float32"}
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
        "tf32": bool(paddle.base.core.get_cublas_switch()),  # of matrix products
        "cuda": f"{machine.cuda()[1]}; cuDNN {paddle.device.get_cudnn_version()}",
    }


# --------------------------------------------------------------------- watching


@contextlib.contextmanager
def replacing(
    places: Iterable[tuple[Any, str]], by: Callable[[str, Callable], Callable]
) -> Iterator[None]:
    """Has the functions ``owner.name`` of ``places`` replaced by ``by(name, function)``."""
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
    """Counts copies to the device and from it by who asks for them: "to_tensor
    loading/transforms/batch.py:61".

    Of calls within each other the outermost counts, and only this thread's: another one copies
    batches to a GPU. Copies that Paddle makes in C++ for an operator aren't seen.
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
            count[f"{'to_tensor' if name == TO_TENSOR else name} {_asked_by()}"] += 1
            inside[0] = True
            try:
                return function(*args, **keywords)
            finally:
                inside[0] = False

        return counts

    places = [(paddle.tensor.creation, TO_TENSOR)]
    places += [(paddle.Tensor, name) for name in METHODS + INDEXED] + [
        (_C_ops, name) for name in OPERATORS
    ]
    with replacing(places, counting):
        yield count


def _copies(name: str, args: tuple) -> bool:
    import paddle

    if name == "set_value":
        return not isinstance(args[1], paddle.Tensor)
    if name in INDEXED:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, paddle.Tensor) and part.dtype == paddle.bool for part in parts)
    return True


def _asked_by() -> str:
    """file:line of the innermost of the toolkit's frames, but for this file's."""
    frame = sys._getframe(2)
    while frame:
        file = frame.f_code.co_filename
        if file.startswith(f"{ROOT}{os.sep}") and "site-packages" not in file and file != __file__:
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


# ------------------------------------------------------------------ attention


def route(request: Answer) -> Answer:
    """Returns which way the attention of a training step goes.

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
            (backends if name in BACKENDS else types).append(
                (name, str(q.dtype).removeprefix("paddle."))
            )
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
        "types": sorted({dtype for _, dtype in types}),
        "backends": dict(collections.Counter(name for name, _ in backends)),
        "precision": precision(config),
    }


def sdpa(request: Answer) -> Answer:
    """Measures time, memory and results of Paddle's ``scaled_dot_product_attention`` beside the
    plain products.

    Args:
        request: ``shape`` [batch, length, heads, channels of a head], ``dtype``, ``repeats``.

    Returns:
        by way: ``ms`` of forward and backward, and ``MB`` kept for the backward pass (on a GPU).
            Also the largest
        ``error`` of output and gradients, over the largest value of plain float32 products.
    """
    import paddle
    from paddle.nn import functional as F

    def plain(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q * q.shape[-1] ** -0.5, k, v))
        return paddle.matmul(F.softmax(paddle.matmul(q, k, transpose_y=True), -1), v).transpose(
            [0, 2, 1, 3]
        )

    paddle.seed(0)
    exact = [paddle.randn(request["shape"]) for _ in range(4)]  # q, k, v and the output's gradient
    wanted, _ = _both_ways(plain, exact)
    given = [x.astype(request["dtype"]) for x in exact]
    answer = {}
    for name, function in (("fused", F.scaled_dot_product_attention), ("plain", plain)):
        for number in range(request["repeats"] + 2):
            if number == 2:  # the first two don't count
                start = time.perf_counter()
            found, kept = _both_ways(function, given)
            if number in (1, request["repeats"] + 1):
                found[-1].flatten()[0].item()  # waits for the device
        seconds = (time.perf_counter() - start) / request["repeats"]
        worst = [
            ((a.astype("float32") - b).abs().max() / b.abs().max())
            for a, b in zip(found, wanted, strict=True)
        ]
        answer[name] = {"ms": 1e3 * seconds, "MB": kept / 1e6, "error": max(map(float, worst))}
    return answer


def _both_ways(function: Callable, given: list) -> tuple[list, int]:
    """([the output, the gradients of q, k, v], bytes that a GPU keeps between the forward and the
    backward pass).
    """
    import paddle

    from utils import num_gpus

    def allocated() -> int:
        return paddle.device.cuda.memory_allocated() if num_gpus() else 0

    q, k, v = (x.detach() for x in given[:3])
    for x in (q, k, v):
        x.stop_gradient = False
    before = allocated()
    output = function(q, k, v)
    kept = allocated() - before
    return [output.detach(), *paddle.grad([output], [q, k, v], [given[3]])], kept


# ------------------------------------------------------------------- training


class Enough(Exception):
    """The steps that were asked for are done."""


def train(request: Answer) -> Answer:
    """Makes the first steps of training runs, by the toolkit's own worker; they are given up before
    anything is saved.

    Args:
        request: ``jobs``: {name: words of main_single_gpu.py's command line}; ``steps``; ``keep``:
            the first batch serves for all steps, and stays on the device; ``transfers``: to count
            them.

    Returns:
        by name ``reports`` (the lines of metrics.jsonl), ``weights`` (a SHA-256 of each),
            ``transfers`` (per step of the later half: {origin: number}) and the ``columns`` of a
            batch; or ``error``, one line.
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
                lambda _, timed, told=answer: _limit(timed, request, told),
            ):
                main_worker(*read_datasets(config))
        except Enough:
            file = Path(config.OUTPUT) / "metrics.jsonl"
            answer["reports"] = (
                [json.loads(line) for line in file.read_text().splitlines()]
                if file.exists()
                else []
            )
        except Exception as error:
            answer["error"] = (
                f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1].strip()}"
            )
    return answers


def _limit(timed: Callable, request: Answer, answer: Answer) -> Callable:
    """``Window.timed_batches``, which yields the batches of an epoch, for so many steps."""

    def limited(window: Any, loader: Any, step: int) -> Iterator[list]:
        batches = timed(window, loader, step)
        batch = next(batches)
        answer["columns"] = len(batch)
        with (
            counting_copies()
            if request.get("transfers")
            else contextlib.nullcontext(collections.Counter()) as count
        ):
            half = request["steps"] // 2  # which is even
            for number in range(2 * half):
                if number == half:
                    count.clear()
                yield batch
                batch = batch if request.get("keep") else next(batches)
            answer["transfers"] = {where: many / half for where, many in count.items()}
        state = window.training.model.state_dict()
        answer["weights"] = {
            key: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for key, t in state.items()
        }
        raise Enough

    return limited


def logits(request: Answer) -> Answer:
    """Computes logits of random weights: the CPU's, which are kept, or others, which are compared
    with those.

    Args:
        request: ``jobs``: {name: words of main_single_gpu.py's command line}; ``folder``: where
            they are kept; ``cpu``: on the CPU by Paddle's own operators. Without it, and without a
            GPU, by the toolkit's compiled operators.

    Returns:
        two figures by name. ``difference``: the largest one over the range of the kept logits.
        ``varies``: how much they differ from image to image over that range, which has to be far
        above it.
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
            found = model(paddle.to_tensor(images)).numpy()
        file = Path(request["folder"]) / f"{name}.npy"
        if request.get("cpu"):
            np.save(file, found)
        kept = np.load(file)
        difference = np.abs(found - kept).max() / np.ptp(kept)
        varies = kept.std(0).mean() / np.ptp(kept)
        answers[name] = {"difference": float(difference), "varies": float(varies)}
    return answers


def _randomise(model: Any, draw: Any) -> None:
    """Gives every parameter a value that counts: fresh biases would be 0, and fresh scales 1."""
    import numpy as np

    for name, parameter in model.named_parameters():
        noise = draw.standard_normal(parameter.shape).astype(np.float32)
        if parameter.ndim > 1:
            fan_in = (
                parameter.shape[0]
                if parameter.ndim == 2
                else max(1, parameter.size // parameter.shape[0])
            )
            parameter.set_value(noise * np.float32(fan_in**-0.5))
        else:
            parameter.set_value(
                np.float32(name.endswith(("weight", "variance"))) + np.float32(0.1) * noise
            )


PROBES = {probe.__name__: probe for probe in (about, route, sdpa, train, logits)}

if __name__ == "__main__":
    with errors.reporting():
        print(f"\n{json.dumps(PROBES[sys.argv[1]](json.loads(sys.argv[2])))}", flush=True)
