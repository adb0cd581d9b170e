"""Device settings of this process: flags and TF32 of a GPU; threads, memory allocator and compiled
operators of a CPU.
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
from errors import counted
from launch.launchers import cores_each, set_by_launcher
from ops import images
from settings.configuration import Configuration
from utils import num_gpus

# The calls of ``trim_buffers`` that trim, counted from 1.
_TRIMMED = (1, 2, 4)
# The number of its calls since ``keep_buffers``.
_calls: int | None = None


def set_device_flags(config: Configuration, local_processes: int) -> str:
    """Applies DETERMINISTIC, CUDNN_BENCHMARK, TF32 and TUNE_CPU to this process; returns one line
    that describes the settings.
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
    if paddle.device.get_device() != "cpu":
        notes = [f"DETERMINISTIC={config.DETERMINISTIC} CUDNN_BENCHMARK={config.CUDNN_BENCHMARK}"]
        if config.TUNE_CPU and (kept := keep_buffers()):
            notes.append(kept)
    elif config.TUNE_CPU:
        notes = [tune_cpu(local_processes)]
    else:
        notes = ["Paddle's defaults (TUNE_CPU is off)"]
    if images.load():
        notes.append("images by compiled operations")
    else:
        notes.append("images by Pillow (python -m ops.build)")
    return ", ".join(notes)


def set_tf32(allowed: bool) -> None:
    """Sets whether GPUs may round the factors of float32 matrix products and convolutions to TF32,
    which has 10 bits of mantissa.

    Paddle's default is to round in both (2.6.2), or in convolutions only (3.3.1). This has to be
    called before the first operator runs.
    """
    paddle.base.core.set_cublas_switch(allowed)
    paddle.base.core.set_cudnn_switch(allowed)
    # cuBLAS and cuDNN read this variable themselves. Paddle's newer convolutions ignore the switch
    # above.
    if not allowed:
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Computes without TF32 within this context, to compare results with another program's."""
    core = paddle.base.core
    cublas_before = core.get_cublas_switch()
    cudnn_before = core.get_cudnn_switch()
    core.set_cublas_switch(False)
    core.set_cudnn_switch(False)
    try:
        yield
    finally:
        core.set_cublas_switch(cublas_before)
        core.set_cudnn_switch(cudnn_before)


def float32_text() -> str:
    """Returns "float32", with the operations that use TF32, which GPUs have from Ampere on."""
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0" or not num_gpus():
        return "float32"
    core = paddle.base.core
    capability = paddle.device.cuda.get_device_capability()
    uses = {"matrix products": core.get_cublas_switch(), "convolutions": core.get_cudnn_switch()}
    by_tf32 = [name for name, used in uses.items() if used and capability >= (8, 0)]
    return f"float32 ({' and '.join(by_tf32)} by TF32)" if by_tf32 else "float32"


def tune_cpu(local_processes: int) -> str:
    """Sets this process up for speed on a CPU, except for what the user's environment sets.

    There are four settings (measured in docs/evidence/performance.md). The machine's cores are divided among
    the processes as threads. Stride kernels are off, because their views are copied element by
    element on a CPU. glibc keeps large buffers instead of mapping and faulting them in again at each
    operator. The compiled operators of ops/ are used if they were built.

    Returns:
        One line that describes the settings.
    """
    notes = []
    user_threads = _threads_chosen_by_user()
    threads = user_threads or cores_each(local_processes)
    threadpool_limits(threads)
    source = " (OMP_NUM_THREADS)" if user_threads else ""
    notes.append(f"{counted(threads, 'thread')}{source} per process")
    if "FLAGS_use_stride_kernel" not in os.environ:
        paddle.set_flags({"FLAGS_use_stride_kernel": False})
        notes.append("stride kernels off")
    if kept := keep_buffers():
        notes.append(kept)
    if ops.load():
        notes.append("compiled operators")
    else:
        notes.append(
            "compiled operators missing: a training of a large model takes 3 to 10 times as long"
            " (python -m ops.build compiles them in about a minute)"
        )
    return ", ".join(notes)


def keep_buffers() -> str:
    """Makes glibc keep large buffers instead of mapping and faulting them in again, unless the
    user's environment tunes the allocator. Returns a description of the setting, or "" if it wasn't
    made.
    """
    tuned_by_user = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not tuned_by_user:
        mallopt = ctypes.CDLL(None).mallopt
        # The parameters' numbers in malloc.h.
        m_trim_threshold = -1
        m_mmap_threshold = -3
        gib = 1 << 30
        if mallopt(m_mmap_threshold, gib) and mallopt(m_trim_threshold, gib):
            global _calls
            _calls = 0
            return "large buffers kept by the allocator"
    return ""


def trim_buffers() -> None:
    """Gives the free memory between the buffers that ``keep_buffers`` keeps back to the system, in
    some of the first steps. It is called once per step.

    The first steps leave gaps that the tensors of later steps don't fit into. Trimming lowers the
    peak memory of a training by up to a fifth (docs/evidence/performance.md). Mapping the memory again takes
    a quarter of a second, three times in a process.
    """
    global _calls
    if _calls is not None and _calls < _TRIMMED[-1]:
        _calls += 1
        if _calls in _TRIMMED:
            ctypes.CDLL(None).malloc_trim(0)


def _threads_chosen_by_user() -> int | None:
    """Returns OMP_NUM_THREADS as the user set it, or None.

    Paddle's import and torchrun set the variable to 1 if it isn't set, and the processes they start
    inherit that. Such a process reads the environment in which the user started its parent.
    """
    with contextlib.suppress(OSError):
        process = "self"
        if set_by_launcher() or multiprocessing.parent_process():
            # ``launch.launched`` sets LAUNCHER_PID.
            process = os.environ.get("LAUNCHER_PID") or str(os.getppid())
        variables = Path(f"/proc/{process}/environ").read_bytes()
        match = re.search(rb"(?:^|\0)OMP_NUM_THREADS=(\d+)(?:\0|$)", variables)
        return int(match[1]) if match else None
    return None
