"""Flags, TF32, threads and allocator of a process."""

import os
import platform
from types import SimpleNamespace

import paddle
import pytest

from config import get_config
from launch import launchers
from launch.devices import num_cores
from ops import device


@pytest.mark.smoke
def test_device_flags_are_the_frameworks_own():
    if not paddle.device.is_compiled_with_cuda():
        pytest.skip("a CPU build has no cuDNN flags; the smoke run under paddlepaddle-gpu has")
    for wanted in (True, False):
        keys = ["DETERMINISTIC", str(wanted), "CUDNN_BENCHMARK", str(not wanted)]
        device.set_device_flags(get_config(None, keys), 1)
        flags = [
            "FLAGS_cudnn_deterministic",
            "FLAGS_embedding_deterministic",
            "FLAGS_cudnn_exhaustive_search",
        ]
        assert list(map(bool, paddle.get_flags(flags).values())) == [wanted, wanted, not wanted]


@pytest.fixture
def switches(monkeypatch):
    """Returns a function that tells whether cuBLAS and cuDNN may use TF32; both are restored."""
    core = paddle.base.core
    before = core.get_cublas_switch(), core.get_cudnn_switch()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")  # restored, too
    yield lambda: (core.get_cublas_switch(), core.get_cudnn_switch())
    core.set_cublas_switch(before[0])
    core.set_cudnn_switch(before[1])


@pytest.mark.smoke
def test_tf32_is_switched_in_both_libraries_where_asked(switches, monkeypatch):
    default = switches()
    device.set_device_flags(get_config(), 1)
    assert switches() == default
    for allowed, override in ((True, "1"), (False, "0")):
        device.set_device_flags(get_config(None, ["TF32", str(allowed)]), 1)
        assert switches() == (allowed, allowed)
        assert os.environ["NVIDIA_TF32_OVERRIDE"] == override  # of 3.3.1's newer convolutions, too
    device.set_tf32(True)
    with device.exact_float32():
        assert switches() == (False, False)
    assert switches() == (True, True)


@pytest.mark.smoke
def test_float32_by_tf32_is_told(switches, monkeypatch):
    device.set_tf32(True)
    assert device.float32_text() == "float32"  # a CPU's
    monkeypatch.setattr(device, "num_gpus", lambda: 1)
    for capability, told in (
        ((7, 5), "float32"),
        ((8, 0), "float32 (matrix products and convolutions by TF32)"),
    ):
        monkeypatch.setattr(
            paddle.device.cuda, "get_device_capability", lambda capability=capability: capability
        )
        assert device.float32_text() == told
    paddle.base.core.set_cublas_switch(False)  # 3.3.1's default
    assert device.float32_text() == "float32 (convolutions by TF32)"
    device.set_tf32(False)
    assert device.float32_text() == "float32"
    device.set_tf32(True)
    assert device.float32_text() == "float32"  # NVIDIA_TF32_OVERRIDE=0 goes before all


def test_cpu_settings_leave_alone_what_the_environment_sets(monkeypatch):
    monkeypatch.delenv("FLAGS_use_stride_kernel", raising=False)
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    told = device.tune_cpu(1)
    assert told.startswith(f"{num_cores()} thread")
    assert "stride kernels off" in told
    assert not paddle.get_flags("FLAGS_use_stride_kernel")["FLAGS_use_stride_kernel"]
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    monkeypatch.setenv("FLAGS_use_stride_kernel", "1")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    told = device.tune_cpu(10**6)
    assert told.split(", ")[:-1] == ["1 thread per process"]  # and what is said of the operators
    assert paddle.get_flags("FLAGS_use_stride_kernel")["FLAGS_use_stride_kernel"]


def test_threads_that_the_user_chose_are_those_of_the_environment_he_started(monkeypatch, tmp_path):
    """Paddle's import and launchers set OMP_NUM_THREADS, too: a rank goes by its parent's
    environment.
    """
    limits = []
    monkeypatch.setattr(device, "threadpool_limits", limits.append)
    for module in (device, launchers):
        monkeypatch.setattr(module, "Path", lambda path: tmp_path / path[1:])
    monkeypatch.setattr(os, "getppid", lambda: 7)
    monkeypatch.delenv("LAUNCHER_PID", raising=False)
    for process, content in (
        ("7", b"A=1\0OMP_NUM_THREADS=2\0"),
        ("8", b"OMP_NUM_THREADS=4"),
        ("9", b"NOT_OMP_NUM_THREADS=5"),
    ):
        (tmp_path / "proc" / process).mkdir(parents=True)
        (tmp_path / "proc" / process / "environ").write_bytes(content)
    own = tmp_path / "proc" / "self" / "environ"
    own.parent.mkdir()
    assert device._threads_chosen_by_user() is None  # no /proc
    for started, launcher, chosen in (
        (b"A=1\0OMP_NUM_THREADS=3\0B=2\0", None, 3),
        (b"OMP_NUM_THREADS=many\0", None, None),
        (b"OMP_NUM_THREADS=3\0PADDLE_TRAINER_ID=0\0", None, 2),
        (b"TORCHELASTIC_RUN_ID=a\0OMP_NUM_THREADS=3\0", "8", 4),
        (b"PADDLE_TRAINER_ID=0\0OMP_NUM_THREADS=3\0", "9", None),
        (b"OMP_NUM_THREADS=3\0", "8", 3),  # no rank
    ):
        own.write_bytes(started)
        monkeypatch.setenv("LAUNCHER_PID", launcher) if launcher else None
        assert device._threads_chosen_by_user() == chosen
    assert device.tune_cpu(1).startswith("3 threads (OMP_NUM_THREADS) per process, ")
    assert limits == [3]
    # a spawned rank
    monkeypatch.setattr(device.multiprocessing, "parent_process", lambda: object())
    assert device._threads_chosen_by_user() == 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_gpu_machine_keeps_large_buffers_unless_told_otherwise(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:0")
    told = "large buffers kept by the allocator"
    assert told in device.set_device_flags(get_config(None, []), 1).split(", ")
    assert told not in device.set_device_flags(get_config(None, ["TUNE_CPU", "False"]), 1)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert told not in device.set_device_flags(get_config(None, []), 1)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize("refused", [None, -1, -3])
def test_the_allocator_is_told_both_thresholds(monkeypatch, refused):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    told = {}
    libc = SimpleNamespace(
        mallopt=lambda which, size: told.update({which: size}) or which != refused
    )
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: libc)
    assert device.keep_buffers() == ("" if refused else "large buffers kept by the allocator")
    # malloc.h: mmap, then trim
    assert told == ({-3: 1 << 30} if refused == -3 else {-3: 1 << 30, -1: 1 << 30})


def test_a_cpu_is_set_up_as_one_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(device.images, "load", lambda: None)
    by_pillow = "images by Pillow (python -m ops.build)"
    assert device.set_device_flags(get_config(), 1) == f"{device.tune_cpu(1)}, {by_pillow}"
    monkeypatch.setattr(device.images, "load", lambda: object())
    off = device.set_device_flags(get_config(None, ["TUNE_CPU", "False"]), 1)
    assert off == "Paddle's defaults (TUNE_CPU is off), images by compiled operations"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_is_given_back_in_the_first_steps_alone_and_only_where_buffers_are_kept(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    given = []
    libc = SimpleNamespace(mallopt=lambda *_: 1, malloc_trim=given.append)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(device, "_calls", None)
    device.trim_buffers()
    assert given == []
    device.keep_buffers()
    after = [device.trim_buffers() or len(given) for _ in range(9)]
    assert (given, after) == ([0, 0, 0], [1, 2, 2, 3, 3, 3, 3, 3, 3])
