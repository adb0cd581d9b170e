"""The machine's GPUs and CUDA_VISIBLE_DEVICES, read as CUDA does: without Paddle, and without
opening a GPU.
"""

import contextlib
import ctypes
import functools
import os
import re
from pathlib import Path

from errors import InputError

# a folder per GPU; on WSL2 and in some containers there is none
DRIVER = Path("/proc/driver/nvidia/gpus")
# NVML, which comes with the driver
_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_NONE = ("-1", "NoDevFiles")  # NoDevFiles: SLURM's word for a job without GPUs
# int takes other scripts' digits, too, and raises at 4,301 of them
_NUMBER = re.compile(r"[0-9]{1,4}")
_NAME = re.compile(r"[0-9]{1,4}|(GPU|MIG)-[A-Za-z0-9_/-]{1,90}")  # NVML's have 95 bytes at most
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SELECTED = "FLAGS_selected_gpus"


def gpu_ids() -> list[str]:
    """Returns the UUID of each GPU that this process may use, by PCI address; "" for an unknown
    one.

    NVML is asked only once, because it takes up to a second. In a container or a job's cgroup it
    lists only the GPUs that belong to it, where /proc may list all of the machine. A GPU counts
    once, however many MIG slices it has.
    """
    found = _by_nvml()
    return found if found is not None else [_uuid_in(entry) for entry in sorted(DRIVER.glob("*"))]


def visible_gpus() -> list[str] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names, "00" as "0"; None if it is unset. As CUDA
    does, it stops at the first name that means no GPU, such as -1.
    """
    if _VARIABLE not in os.environ:
        return None
    listed = [part.strip() for part in os.environ[_VARIABLE].rstrip(", ").split(",")]
    listed = listed[: next((place for place, part in enumerate(listed) if part in _NONE), None)]
    return [
        str(int(part)) if _NUMBER.fullmatch(part) else part for part in listed if listed != [""]
    ]


def visible() -> int:
    """Returns how many GPUs CUDA gives a process. Of several MIG slices, CUDA gives only one."""
    listed = visible_gpus()
    found = len(gpu_ids())
    if listed is None:
        return found
    return min(found, 1 if any(part.startswith("MIG-") for part in listed) else len(listed))


def check() -> None:
    """Writes CUDA_VISIBLE_DEVICES back as Paddle reads it. Paddle compares its parts as they are
    written and counts them to the end. "0, 1" becomes "0,1", "0,-1,1" becomes "0", and "-1" becomes
    "".

    Raises:
        InputError: CUDA would see fewer GPUs than it names, or none.
    """
    listed = visible_gpus()
    if listed is None:
        return
    whole = os.environ[_VARIABLE]
    uuids = gpu_ids()
    found = f"{_VARIABLE} is {whole if len(whole) <= 100 else f'{whole[:100]}...'!r}"
    places = [
        next((str(at) for at, uuid in enumerate(uuids) if uuid.startswith(part)), part)
        for part in listed
    ]
    for part in listed:
        if not _NAME.fullmatch(part):
            expected = "numbers from 0 or names that nvidia-smi -L shows (GPU-..., MIG-...), separated by commas"
            raise InputError(
                f"{found}, expected {expected}; unset it for all GPUs, or set it to -1 for none"
            )
    if same := [
        part for place, part in zip(places, listed, strict=True) if places.count(place) > 1
    ]:
        raise InputError(f"{found}, which names {same[0]} twice; name each GPU once")
    slices = [part for part in listed if part.startswith("MIG-")]
    if slices and len(listed) > 1:
        raise InputError(f"{found}, but CUDA gives a process only one MIG slice; name one")
    # without a driver nothing is known, and the run uses the CPU
    for part in listed if uuids else ():
        matching = [uuid for uuid in uuids if uuid.startswith(part)]
        known = (
            int(part) < len(uuids) if _NUMBER.fullmatch(part) else len(matching) == 1 or "" in uuids
        )
        if not (known or part in slices):
            here = f"this machine has {len(uuids)} GPU{'s' * (len(uuids) > 1)}"
            raise InputError(
                f"{found}, but there is no GPU {part}: {here}; nvidia-smi -L lists them"
            )
    os.environ[_VARIABLE] = ",".join(listed)


def own() -> str:
    """Returns which GPU FLAGS_selected_gpus leaves to this process: its UUID or MIG slice; "" if
    unknown.
    """
    chosen = (os.environ.get(_SELECTED) or "0").split(",")[0].strip()
    if not _NUMBER.fullmatch(chosen):
        raise InputError(
            f"{_SELECTED} is {chosen[:100]!r}, expected a GPU's number among the visible ones, from 0"
        )
    listed = visible_gpus()
    uuids = gpu_ids()
    names = [str(place) for place in range(len(uuids))] if listed is None else listed
    name = dict(enumerate(names)).get(int(chosen), "")
    if _NUMBER.fullmatch(name):
        return dict(enumerate(uuids)).get(int(name), "")
    return next((uuid for uuid in uuids if name and uuid.startswith(name)), name)


@functools.cache
def _by_nvml() -> list[str] | None:
    """Returns the UUIDs that NVML lists; None if it doesn't answer. It opens no GPU, so this
    process may fork later.
    """
    for name in _LIBRARIES:
        # no such library, or one that lacks a function
        with contextlib.suppress(OSError, AttributeError):
            return _ids_by_nvml(ctypes.CDLL(name))
    return None


def _ids_by_nvml(nvml: ctypes.CDLL) -> list[str] | None:
    if nvml.nvmlInit_v2() != 0:  # the driver isn't loaded, or is of another version
        return None
    count = ctypes.c_uint()
    uuids = []
    try:
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        for place in range(count.value):
            device = ctypes.c_void_p()
            uuid = ctypes.create_string_buffer(96)
            told = nvml.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(device)) == 0
            told = told and nvml.nvmlDeviceGetUUID(device, uuid, len(uuid)) == 0
            uuids.append(uuid.value.decode(errors="replace") if told else "")
    finally:
        nvml.nvmlShutdown()
    return uuids


def _uuid_in(entry: Path) -> str:
    try:
        told = re.search(
            r"^GPU UUID:\s*(GPU-[\w-]+)", (entry / "information").read_text(), re.MULTILINE
        )
    except OSError:
        return ""
    return told[1] if told else ""
