"""How this process computes: flags and TF32 of a GPU; threads, allocator and compiled operators of
a CPU.
"""

import contextlib
import ctypes
import multiprocessing
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import paddle
from threadpoolctl import threadpool_limits

import ops
from launch.environment import cores_each, set_by_launcher
from ops import images
from settings.options import Configuration
from utils import num_gpus

_TRIMMED = (1, 2, 4)  # calls of ``trim_buffers`` that do something
_calls: int | None = None  # of it since ``keep_buffers``


def set_device_flags(config: Configuration, local_processes: int) -> str:
    """Applies DETERMINISTIC, CUDNN_BENCHMARK, TF32 and TUNE_CPU to this process; returns one line
    that tells it.
    """
    if paddle.device.is_compiled_with_cuda():
        flags = {
            "FLAGS_cudnn_deterministic": config.DETERMINISTIC,
            "FLAGS_embedding_deterministic": int(config.DETERMINISTIC),
            "FLAGS_cudnn_exhaustive_search": config.CUDNN_BENCHMARK,
        }
        paddle.set_flags(flags)
    if config.TF32 is not None:
        set_tf32(config.TF32)
    if paddle.device.get_device() == "cpu":
        told = [
            tune_cpu(local_processes) if config.TUNE_CPU else "Paddle's defaults (TUNE_CPU is off)"
        ]
    else:
        told = [f"DETERMINISTIC={config.DETERMINISTIC} CUDNN_BENCHMARK={config.CUDNN_BENCHMARK}"]
        told += [kept] if config.TUNE_CPU and (kept := keep_buffers()) else []
    told.append(
        "images by compiled operations"
        if images.load()
        else "images by Pillow (python -m ops.build)"
    )
    return ", ".join(told)


def set_tf32(allowed: bool) -> None:
    """Lets GPUs, or not, round the factors of float32 matrix products and convolutions to TF32's 10
    bits of mantissa.

    Paddle's default: in both (2.6.2), in convolutions alone (3.3.1). It is called before the first
    operator.
    """
    paddle.base.core.set_cublas_switch(allowed)
    paddle.base.core.set_cudnn_switch(allowed)
    # read by cuBLAS and cuDNN themselves: Paddle's newer convolutions go by a flag of their own
    if not allowed:
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Computes without TF32, where figures are compared to another program's."""
    core = paddle.base.core
    before = core.get_cublas_switch(), core.get_cudnn_switch()
    core.set_cublas_switch(False)
    core.set_cudnn_switch(False)
    try:
        yield
    finally:
        core.set_cublas_switch(before[0])
        core.set_cudnn_switch(before[1])


def float32_text() -> str:
    """Returns "float32", and what of it is computed by TF32: GPUs from Ampere on can."""
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0" or not num_gpus():
        return "float32"
    core = paddle.base.core
    capability = paddle.device.cuda.get_device_capability()
    uses = {"matrix products": core.get_cublas_switch(), "convolutions": core.get_cudnn_switch()}
    by_tf32 = [name for name, used in uses.items() if used and capability >= (8, 0)]
    return f"float32 ({' and '.join(by_tf32)} by TF32)" if by_tf32 else "float32"


def tune_cpu(local_processes: int) -> str:
    """Sets this process up for speed on a CPU, without touching what the user's environment sets.

    There are four settings (measured in docs/performance.md). The machine's cores are shared out as
    threads. Stride kernels are off: their views are copied element by element on a CPU. glibc keeps
    large buffers instead of mapping and faulting them in anew at each operator. The compiled
    operators of ops/ are used if they were built.

    Returns:
        one line that tells what was set and what was left.
    """
    told = []
    chosen = _threads_chosen_by_user()
    threads = chosen or cores_each(local_processes)
    threadpool_limits(threads)
    told.append(
        f"{threads} thread{'s' * (threads > 1)}{' (OMP_NUM_THREADS)' if chosen else ''} per process"
    )
    if "FLAGS_use_stride_kernel" not in os.environ:
        paddle.set_flags({"FLAGS_use_stride_kernel": False})
        told.append("stride kernels off")
    if kept := keep_buffers():
        told.append(kept)
    told.append(
        "compiled operators" if ops.load() else "compiled operators missing (python -m ops.build)"
    )
    return ", ".join(told)


def keep_buffers() -> str:
    """Tells glibc to keep large buffers instead of mapping and faulting them in anew, unless the
    user's environment sets its allocator. Returns what was set, or "".
    """
    tuned_by_user = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not tuned_by_user:
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold = -1
        m_mmap_threshold = -3
        gib = 1 << 30
        if mallopt(m_mmap_threshold, gib) and mallopt(m_trim_threshold, gib):
            global _calls
            _calls = 0
            return "large buffers kept by the allocator"
    return ""


def trim_buffers() -> None:
    """Gives the system back what is free between the buffers that ``keep_buffers`` keeps, in the
    first steps.

    These leave gaps that the tensors of later steps don't fit into. A training's peak falls by up
    to a fifth (docs/performance.md). Mapping the memory again makes a step a quarter of a second
    longer, three times in a process.
    """
    global _calls
    if _calls is not None and _calls < _TRIMMED[-1]:
        _calls += 1
        if _calls in _TRIMMED:
            ctypes.CDLL(None).malloc_trim(0)


def _threads_chosen_by_user() -> int | None:
    """OMP_NUM_THREADS as the user set it. Paddle's import sets it to 1 where it is unset, torchrun
    does, too, and the processes they start inherit that: what counts then is the environment in
    which the user started the parent.
    """
    with contextlib.suppress(OSError):
        inherits = set_by_launcher() or multiprocessing.parent_process()
        parent = os.environ.get("LAUNCHER_PID") or os.getppid()  # (launch.launched sets it)
        environment = Path(f"/proc/{parent if inherits else 'self'}/environ").read_bytes()
        found = re.search(rb"(?:^|\0)OMP_NUM_THREADS=(\d+)(?:\0|$)", environment)
        return int(found[1]) if found else None
    return None
