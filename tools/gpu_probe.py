"""What ``tools/doctor.py --gpu`` asks of a device: a question by its name, in a process of its own.

Name and request (JSON) are its arguments; the answer, in JSON too, is the last line that it prints. A process of its
own leaves no memory on the device, can be ended when it hangs, and takes nobody along when it crashes.
"""

import collections
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import errors  # noqa: E402  (before Paddle)
from tools.gpu_watch import counted, watched  # noqa: E402

Answer = dict[str, Any]
# Paddle's operators that compute attention in one kernel, by the names of ``paddle._C_ops``.
BACKENDS = ("flash_attn", "flash_attn_v3", "memory_efficient_attention")


def about(request: Answer) -> Answer:
    """What Paddle says of itself and of the GPUs it sees; ``memory`` in GB."""
    import paddle

    from tools import machine
    from utils import num_gpus

    version, built = paddle.version, paddle.device.is_compiled_with_cuda()
    how = f"built for CUDA {version.cuda()} and cuDNN {version.cudnn()}" if built else "a CPU build"
    found = {
        "paddle": f"{version.full_version}, {how}, commit {version.commit[:10]}",
        "built": built,
        "gpus": num_gpus(),
    }
    found |= {
        "name": "",
        "capability": 0.0,
        "memory": 0.0,
        "kinds": "none",
        "precision": "float32",
        "cuda": "none",
        "tf32": False,
    }
    if not found["gpus"]:
        return found
    kinds = collections.Counter()
    for number in reversed(range(found["gpus"])):
        gpu = paddle.device.cuda.get_device_properties(number)
        kinds[f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 1e9:.1f} GB"] += 1
    found |= {"name": gpu.name, "capability": gpu.major + gpu.minor / 10, "memory": gpu.total_memory / 1e9}
    found["kinds"] = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    found["precision"] = "bfloat16" if paddle.amp.is_bfloat16_supported() else "float16"
    found["tf32"] = bool(paddle.base.core.get_cublas_switch())  # of matrix products
    found["cuda"] = f"{machine.cuda()[1]}; cuDNN {paddle.device.get_cudnn_version()}"
    return found


# ------------------------------------------------------------------ attention


def route(request: Answer) -> Answer:
    """Which way the attention of a training step goes.

    Args:
        request: ``words``: the command line of main_single_gpu.py.
    """
    import paddle
    from paddle.nn import functional as F

    from command_line import config_from_arguments
    from engine import autocast
    from models import build_model
    from models.layers.attention import Attention
    from prepare import precision

    config = config_from_arguments("main_single_gpu.py", request["words"])
    model = build_model(config)
    types, backends = [], []
    images = paddle.rand([2, 3, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_SIZE])
    with (
        watched(F, ("scaled_dot_product_attention",), lambda _, q, *others: types.append(str(q.dtype))),
        watched(paddle._C_ops, BACKENDS, lambda name, *_: backends.append(name)),
    ):
        with autocast(config):
            logits = model(images)
        logits.astype("float32").sum().backward()
    return {
        "attentions": sum(isinstance(layer, Attention) for layer in model.sublayers()),
        "fused": len(types),
        "types": sorted({kind.removeprefix("paddle.") for kind in types}),
        "backends": dict(collections.Counter(backends)),
        "precision": precision(config),
    }


def sdpa(request: Answer) -> Answer:
    """Time, memory and results of Paddle's ``scaled_dot_product_attention`` beside the plain products.

    Args:
        request: ``shape`` [batch, length, heads, channels of a head], ``dtype``, ``repeats``.

    Returns:
        of each way ``ms`` of forward and backward, ``MB`` that it keeps for the backward pass (on a GPU), and its
        largest ``error`` from plain products in float32, of output and gradients, over their largest value.
    """
    import paddle
    from paddle.nn import functional as F

    paddle.seed(0)
    exact = [paddle.randn(request["shape"]) for _ in range(4)]  # q, k, v and the output's gradient

    def plain(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q * q.shape[-1] ** -0.5, k, v))
        return paddle.matmul(F.softmax(paddle.matmul(q, k, transpose_y=True), -1), v).transpose([0, 2, 1, 3])

    def fused(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    wanted, _ = _both_ways(plain, exact)
    given = [x.astype(request["dtype"]) for x in exact]
    answer = {}
    for name, function in (("fused", fused), ("plain", plain)):
        found, kept = _both_ways(function, given)
        worst = [
            float((a.astype("float32") - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)
        ]
        seconds = _timed(lambda function=function: _both_ways(function, given), request["repeats"])
        answer[name] = {"ms": 1e3 * seconds, "MB": kept / 1e6, "error": max(worst)}
    return answer


def _both_ways(function: Callable, given: list) -> tuple[list, int]:
    """([the output, the gradients of q, k, v], bytes kept between the forward and the backward pass)."""
    import paddle

    q, k, v = (x.detach() for x in given[:3])
    for x in (q, k, v):
        x.stop_gradient = False
    before = _allocated()
    output = function(q, k, v)
    kept = _allocated() - before
    gradients = paddle.grad([output], [q, k, v], [given[3]])
    return [output.detach(), *gradients], kept


def _allocated() -> int:
    import paddle

    return paddle.device.cuda.memory_allocated() if paddle.device.get_device().startswith("gpu") else 0


def _timed(function: Callable[[], Any], repeats: int) -> float:
    """The seconds of one call, of ``repeats`` after two that don't count."""
    import paddle

    def wait() -> None:
        if paddle.device.get_device().startswith("gpu"):
            paddle.device.cuda.synchronize()

    for _ in range(2):
        function()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    wait()
    return (time.perf_counter() - start) / repeats


# ------------------------------------------------------------------- training


class Enough(Exception):
    """The steps that were asked for are done."""


def train(request: Answer) -> Answer:
    """The first steps of training runs, by the toolkit's own worker; they are given up before anything is saved.

    Args:
        request: ``jobs``: {name: words of main_single_gpu.py's command line}; ``steps``; ``keep``: the first batch
            serves for all steps, and stays on the device; ``transfers``: to count them.

    Returns:
        by name ``reports`` (the lines of metrics.jsonl), ``weights`` (a SHA-256 of each), ``transfers`` (per step, of
        the later half: {where it comes from: number}), ``columns`` of a batch; or ``error``, one line.
    """
    from main_multi_gpu import built, import_paddle, main_worker

    import_paddle()
    import reports
    from command_line import config_from_arguments

    answers: Answer = {}
    original = reports.Window.timed
    for name, words in request["jobs"].items():
        config = config_from_arguments("main_single_gpu.py", words)
        answers[name] = {}
        reports.Window.timed = _limited(original, request, answers[name])
        try:
            main_worker(*built(config))
        except Enough:
            file = Path(config.OUTPUT) / "metrics.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            answers[name]["reports"] = [json.loads(line) for line in lines]
        except Exception as error:
            told = [line.strip() for line in str(error).splitlines() if line.strip()]
            answers[name] = {"error": f"{type(error).__name__}: {told[-1] if told else ''}"}
        finally:
            reports.Window.timed = original
    return answers


def _limited(timed: Callable, request: Answer, answer: Answer) -> Callable:
    """``Window.timed``, which yields the batches of an epoch, for so many steps."""

    def limited(window: Any, loader: Any, step: int) -> Iterator[list]:
        batches = timed(window, loader, step)
        batch = next(batches)
        answer["columns"] = len(batch)
        with counted() if request.get("transfers") else contextlib.nullcontext(collections.Counter()) as count:
            begun = None
            for number in range(request["steps"]):
                if number == request["steps"] // 2:
                    begun = count.copy()
                yield batch
                batch = batch if request.get("keep") else next(batches)
            steps = request["steps"] - request["steps"] // 2
            answer["transfers"] = {where: many / steps for where, many in (count - begun).items()}
        state = window.training.model.state_dict()
        answer["weights"] = {key: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for key, t in state.items()}
        raise Enough

    return limited


# ---------------------------------------------------------------------- logits


def logits(request: Answer) -> Answer:
    """Logits of random weights; the first call, on the CPU by Paddle's own operators, keeps them, later ones compare.

    Args:
        request: ``jobs``: {name: words of main_single_gpu.py's command line}; ``folder``: where they are kept;
            ``compiled``: on a CPU by the toolkit's compiled operators.

    Returns:
        by name ``difference``: the largest one over the range of the kept logits; ``varies``: how much they differ from
        image to image over that range, which has to be far above it.
    """
    import numpy as np
    import paddle

    import ops
    from command_line import config_from_arguments
    from models import build_model

    files = {name: Path(request["folder"]) / f"{name}.npy" for name in request["jobs"]}
    first = not any(file.exists() for file in files.values())
    if first:
        paddle.set_device("cpu")
    elif request["compiled"]:
        ops.load()
    answers = {}
    for name, words in request["jobs"].items():
        config = config_from_arguments("main_single_gpu.py", words)
        model, draw = build_model(config), np.random.default_rng(0)
        model.eval()
        _randomise(model, draw)
        images = draw.standard_normal([8, 3, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_SIZE]).astype(np.float32)
        with paddle.no_grad():
            found = model(paddle.to_tensor(images)).numpy()
        if first:
            np.save(files[name], found)
        kept = np.load(files[name])
        size = np.ptp(kept)
        answers[name] = {"difference": np.abs(found - kept).max() / size, "varies": kept.std(0).mean() / size}
        answers[name] = {key: float(value) for key, value in answers[name].items()}
    return answers


def _randomise(model: Any, draw: Any) -> None:
    """Gives every parameter a value that counts: fresh biases would be 0, and fresh scales 1."""
    import numpy as np

    for name, parameter in model.named_parameters():
        noise = draw.standard_normal(parameter.shape).astype(np.float32)
        if parameter.ndim > 1:
            fan_in = parameter.shape[0] if parameter.ndim == 2 else max(1, parameter.size // parameter.shape[0])
            parameter.set_value(noise * np.float32(fan_in**-0.5))
        else:
            parameter.set_value(np.float32(name.endswith(("weight", "variance"))) + np.float32(0.1) * noise)


PROBES = {probe.__name__: probe for probe in (about, route, sdpa, train, logits)}

if __name__ == "__main__":
    with errors.reported():
        print(f"\n{json.dumps(PROBES[sys.argv[1]](json.loads(sys.argv[2])))}", flush=True)
