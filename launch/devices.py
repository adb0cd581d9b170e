"""The GPUs and CPU cores that this process may use.

GPUs and CUDA_VISIBLE_DEVICES are read as CUDA reads them, without Paddle and without opening a GPU:
a process that has opened one can't be forked.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
from pathlib import Path

from errors import InputError, counted

# a folder per GPU; on WSL2 and in some containers there is none
DRIVER = Path("/proc/driver/nvidia/gpus")
# NVML, which comes with the driver
_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
# SLURM writes NoDevFiles for a job without GPUs.
_NONE = ("-1", "NoDevFiles")
# ``int`` also takes the digits of other scripts, and raises for more than 4,300.
_NUMBER = re.compile(r"[0-9]{1,4}")
# NVML's names have at most 95 bytes.
_NAME = re.compile(r"[0-9]{1,4}|(GPU|MIG)-[A-Za-z0-9_/-]{1,90}")
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SELECTED = "FLAGS_selected_gpus"


def num_cores() -> int:
    """Returns the number of cores this process may use, by its affinity and its container's quota
    (cgroup v2).
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    # There may be no such file, or "max" in it: no quota.
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def gpu_uuids() -> list[str]:
    """Returns the UUID of each GPU that this process may use, by PCI address; "" for an unknown
    one.

    NVML is asked only once, because it takes up to a second. In a container or a job's cgroup it
    lists only the GPUs that belong to it, where /proc may list all of the machine. A GPU counts
    once, however many MIG slices it has.
    """
    uuids = _uuids_by_nvml()
    if uuids is None:
        uuids = [_uuid_in(entry) for entry in sorted(DRIVER.glob("*"))]
    return uuids


def visible_names() -> list[str] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names, "00" as "0"; None if it is unset. As CUDA
    does, it stops at the first name that means no GPU, such as -1.
    """
    if _VARIABLE not in os.environ:
        return None
    names = []
    for name in map(str.strip, os.environ[_VARIABLE].rstrip(", ").split(",")):
        if name in _NONE:
            break
        names.append(str(int(name)) if _NUMBER.fullmatch(name) else name)
    return [] if names == [""] else names


def num_gpus_of_cuda() -> int:
    """Returns how many GPUs CUDA gives a process. Of several MIG slices, CUDA gives only one."""
    names = visible_names()
    gpus = len(gpu_uuids())
    if names is None:
        return gpus
    if any(name.startswith("MIG-") for name in names):
        return min(gpus, 1)
    return min(gpus, len(names))


def num_gpus_of_paddle() -> int:
    """Returns the number of GPUs that Paddle will find; 0 for its CPU build."""
    gpus = num_gpus_of_cuda()
    paddle = importlib.util.find_spec("paddle")
    if not gpus or not paddle or not paddle.submodule_search_locations:
        return 0
    version = Path(paddle.submodule_search_locations[0], "version", "__init__.py").read_text()
    is_cpu_build = re.search(r"^cuda_version\s*=\s*'False'", version, re.MULTILINE)
    return 0 if is_cpu_build else gpus


def check_seen(gpus_seen: int) -> None:
    """Raises InputError if Paddle sees no GPU although the machine has some. Paddle would use the
    CPU without a warning.
    """
    if not gpus_seen and (gpus := num_gpus_of_paddle()):
        verb = "GPUs are" if gpus > 1 else "GPU is"
        raise InputError(
            f"{gpus} {verb} visible, but Paddle finds none;"
            " run tools/doctor.py to find the cause; CUDA_VISIBLE_DEVICES=-1 selects the CPU"
        )


def check_visible() -> None:
    """Checks CUDA_VISIBLE_DEVICES and writes it back as Paddle reads it: Paddle compares the names
    as they are written and counts all of them. "0, 1" becomes "0,1", "0,-1,1" becomes "0", and "-1"
    becomes "".

    Raises:
        InputError: CUDA would see fewer GPUs than it names, or none.
    """
    names = visible_names()
    if names is not None:
        _check_names(names)
        os.environ[_VARIABLE] = ",".join(names)


def _check_names(names: list[str]) -> None:
    value = os.environ[_VARIABLE]
    shown = repr(value if len(value) <= 100 else f"{value[:100]}...")
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{_VARIABLE} is {shown}, expected numbers from 0 or names that nvidia-smi -L shows"
                " (GPU-..., MIG-...), separated by commas; unset it for all GPUs, or set it to -1"
                " for the CPU"
            )
    uuids = gpu_uuids()
    # A GPU may be named by its number and by its UUID, which may be cut short.
    numbers = [
        next((str(number) for number, uuid in enumerate(uuids) if uuid.startswith(name)), name)
        for name in names
    ]
    for name, number in zip(names, numbers, strict=True):
        if numbers.count(number) > 1:
            raise InputError(
                f"{_VARIABLE} is {shown}, which names {name} twice; name each GPU once"
            )
    if len(names) > 1 and any(name.startswith("MIG-") for name in names):
        raise InputError(
            f"{_VARIABLE} is {shown}, but CUDA gives a process only one MIG slice; name one"
        )
    if not uuids:
        # Without a driver nothing is known, and the run uses the CPU.
        return
    for name in names:
        if _NUMBER.fullmatch(name):
            is_known = int(name) < len(uuids)
        else:
            matching = [uuid for uuid in uuids if uuid.startswith(name)]
            is_known = len(matching) == 1 or "" in uuids or name.startswith("MIG-")
        if not is_known:
            gpus = counted(len(uuids), "GPU")
            raise InputError(
                f"{_VARIABLE} is {shown}, but there is no GPU {name}: this machine has {gpus};"
                " nvidia-smi -L lists them"
            )


def selected_gpu() -> str:
    """Returns which GPU FLAGS_selected_gpus leaves to this process: its UUID or MIG slice; "" if
    unknown.
    """
    chosen = (os.environ.get(_SELECTED) or "0").split(",")[0].strip()
    if not _NUMBER.fullmatch(chosen):
        raise InputError(
            f"{_SELECTED} is {chosen[:100]!r},"
            " expected a GPU's number among the visible ones, from 0"
        )
    place = int(chosen)
    uuids = gpu_uuids()
    names = visible_names()
    if names is None:
        names = [str(number) for number in range(len(uuids))]
    name = names[place] if place < len(names) else ""
    if _NUMBER.fullmatch(name):
        return uuids[int(name)] if int(name) < len(uuids) else ""
    return next((uuid for uuid in uuids if name and uuid.startswith(name)), name)


@functools.cache
def _uuids_by_nvml() -> list[str] | None:
    """Returns the UUIDs that NVML lists; None if it doesn't answer. It opens no GPU, so this
    process may fork later.
    """
    for name in _LIBRARIES:
        # There may be no such library, or one that lacks a function.
        with contextlib.suppress(OSError, AttributeError):
            return _uuids_of(ctypes.CDLL(name))
    return None


def _uuids_of(nvml: ctypes.CDLL) -> list[str] | None:
    if nvml.nvmlInit_v2() != 0:
        # The driver isn't loaded, or has another version.
        return None
    count = ctypes.c_uint()
    uuids = []
    try:
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        for place in range(count.value):
            device = ctypes.c_void_p()
            uuid = ctypes.create_string_buffer(96)
            is_known = nvml.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(device)) == 0
            is_known = is_known and nvml.nvmlDeviceGetUUID(device, uuid, len(uuid)) == 0
            uuids.append(uuid.value.decode(errors="replace") if is_known else "")
    finally:
        nvml.nvmlShutdown()
    return uuids


def _uuid_in(entry: Path) -> str:
    """Returns the UUID in a GPU's folder of the driver; "" if it has none."""
    try:
        text = (entry / "information").read_text()
    except OSError:
        return ""
    match = re.search(r"^GPU UUID:\s*(GPU-[\w-]+)", text, re.MULTILINE)
    return match[1] if match else ""
