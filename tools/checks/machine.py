"""What tools/doctor.py looks at in one machine. A check returns (whether all is well, what was
found or is to do).
"""

import argparse
import ctypes
import importlib.metadata
import itertools
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from errors import InputError, RunError
from launch.environment import is_launched
from launch.rendezvous import addresses
from tools.checks import network

Finding = tuple[bool, str]

GB = 1 << 30
LEAST_SHM = GB  # what NVIDIA's containers ask for; Docker gives 64 MB
LEAST_MEMORY = GB  # per process, for a small model
LEAST_FILES = 1024
LEAST_IMAGES = 100.0  # per second and worker; a core decodes and augments 350 to 1150 photographs
LOADER_SECONDS = 1.0
SOURCE_TIME = 1_760_000_000  # October 2025
PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "numpy", "protobuf", "simplejpeg")

# ------------------------------------------------------------ before Paddle


def installed_versions() -> dict[str, str]:
    """Returns the versions of those of PACKAGES that are installed."""
    found = {}
    for name in PACKAGES:
        if any(importlib.metadata.distributions(name=name)):
            found[name] = importlib.metadata.version(name)
    return found


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """The interpreter."""
    found = ".".join(map(str, version))
    if (3, 10) <= version[:2] <= (3, 12):
        return True, found
    return False, f"{found}, expected 3.10 to 3.12; make PYTHON=python3.11 install"


def paddle_package(found: dict[str, str]) -> Finding:
    """Paddle among the packages ``found`` (``gpu_ids``)."""
    builds = [name for name in PACKAGES[:2] if name in found]
    if len(builds) != 1:
        what = (
            "paddlepaddle and paddlepaddle-gpu, of which the last one installed wins"
            if builds
            else "no Paddle"
        )
        return False, f"found {what}; {'uninstall both, then ' * bool(builds)}make install"
    version = found[builds[0]]
    if _numbers(version) < (2, 6):
        return False, f"{builds[0]} {version}, expected 2.6.2 or 3.3.1; make install"
    return (
        True,
        f"{builds[0]} {version}{'' if version in ('2.6.2', '3.3.1') else ' (2.6.2 and 3.3.1 are tested)'}",
    )


def libraries(found: dict[str, str]) -> Finding:
    """NumPy, protobuf and simplejpeg, for the Paddle among the packages ``found``."""
    paddle = found.get("paddlepaddle-gpu") or found.get("paddlepaddle", "")
    missing = [name for name in ("numpy", "protobuf", "simplejpeg") if name not in found]
    if missing:
        return False, f"{', '.join(missing)} not installed; make install"
    shown = ", ".join(f"{name} {found[name]}" for name in PACKAGES[2:])
    if _numbers(paddle) < (3,) and _numbers(found["numpy"]) >= (2,):
        return False, f'{shown}: Paddle {paddle} was built against NumPy 1; pip install "numpy<2"'
    if _numbers(paddle) < (3,) and _numbers(found["protobuf"]) >= (7,):
        return (
            False,
            f'{shown}: Paddle {paddle}\'s fleet asks for what 7 has no more; pip install "protobuf<7"',
        )
    return True, shown


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


# ------------------------------------------------------------------- devices


def devices() -> Finding:
    """What this Paddle computes on, and whether it sees the GPUs that it should."""
    import paddle

    from launch.gpus import check, gpu_ids, visible_gpus
    from utils import num_gpus

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = visible_gpus() or []
    try:
        check()  # before Paddle counts
    except InputError as error:
        return False, str(error)
    gpus = num_gpus()
    build = "a GPU build" if paddle.device.is_compiled_with_cuda() else "a CPU build"
    if len(listed) > gpus:
        names = (
            f"CUDA_VISIBLE_DEVICES={visible} names {len(listed)} GPUs, Paddle ({build}) sees {gpus}"
        )
        return False, f"{names}; name GPUs that nvidia-smi -L lists, or unset it"
    here = len(gpu_ids())
    if here and not paddle.device.is_compiled_with_cuda():
        return (
            False,
            f"{here} GPUs, but Paddle is a CPU build; make install PADDLE=... (docs/quick_start.md)",
        )
    if not gpus:
        text = f"no GPU is visible to {build}: on the CPU, over gloo"
        # Paddle's launcher ends in an IndexError with "" and with "-1".
        if visible is not None and not listed:
            text += f"; unset CUDA_VISIBLE_DEVICES='{visible}' for paddle.distributed.launch"
        return True, text
    kinds = sorted({paddle.device.cuda.get_device_properties(gpu).name for gpu in range(gpus)})
    return True, f"{gpus} of {here or gpus} GPUs ({', '.join(kinds)})"


def cuda() -> Finding:
    """The CUDA that Paddle was built for, against the driver's; NCCL."""
    import paddle
    from paddle import version

    from utils import num_gpus

    built = str(version.cuda())
    if not paddle.device.is_compiled_with_cuda():
        return True, "not needed by a CPU build"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True, f"Paddle is built for {built}; no driver here: it runs on the CPU"
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    theirs = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if _numbers(theirs)[0] < _numbers(built)[0]:  # within a major version, drivers run newer builds
        return (
            False,
            f"Paddle is built for {built}, the driver is of {theirs}; install a newer driver or another Paddle",
        )
    if not num_gpus():
        return True, f"Paddle is built for {built}, the driver is of {theirs}"
    try:
        core: Any = paddle.base.core
        nccl = core.nccl_version()
    except RuntimeError:
        return (
            False,
            "libnccl.so isn't found: no more than one GPU works; pip install nvidia-nccl-cu11 or -cu12",
        )
    return True, f"Paddle is built for {built}, the driver is of {theirs}, NCCL {nccl}"


# ------------------------------------------------------------------- network


def interfaces() -> Finding:
    """The network interfaces, and those that the environment chooses for gloo and NCCL."""
    found = addresses()
    shown = ", ".join(f"{name} {address}" for name, address in found.items())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        chosen = os.environ.get(variable, "")
        # NCCL's may be a list of prefixes, or of what to leave out (^) or to take exactly (=).
        if (
            chosen
            and chosen[0] not in "^="
            and not any(n.startswith(c) for c in chosen.split(",") for n in found)
        ):
            return (
                False,
                f"{variable}={chosen} names no interface with an address; there are {shown}",
            )
    return True, shown


def host(name: str, several: bool) -> Finding:
    """The address that the host's name resolves to, where gloo listens.

    Args:
        several: whether ranks of other machines have to reach it.
    """
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return (
            False,
            f"{name} resolves to no address ({error.strerror}); name it in /etc/hosts, with its address",
        )
    loopback = address.startswith("127.")
    if loopback and several and not os.environ.get("GLOO_SOCKET_IFNAME"):
        reason = (
            f"{name} resolves to {address}, where gloo would listen and no other machine reaches it"
        )
        return (
            False,
            f"{reason}; give it its address in /etc/hosts, or set GLOO_SOCKET_IFNAME and launch with --host",
        )
    if not loopback and address not in addresses().values():
        return (
            False,
            f"{name} resolves to {address}, which is no address of this machine; correct /etc/hosts or DNS",
        )
    told = (
        f", but gloo listens at {os.environ.get('GLOO_SOCKET_IFNAME')}"
        if several
        else " (enough for one machine)"
    )
    return True, f"{name} is {address}{told * loopback}"


def is_far(master: str | None) -> bool:
    """Whether HOST:PORT is meant for other machines, too: no loopback address."""
    try:
        return bool(master) and not socket.gethostbyname(master.rpartition(":")[0]).startswith(
            "127."
        )
    except OSError:
        return True


def port(master: str, timeout: float = 3.0) -> Finding:
    """Whether HOST:PORT is free, on this machine, or can be reached, on another.

    Raises:
        InputError: ``master`` isn't HOST:PORT.
    """
    name, _, number = master.rpartition(":")
    if not name or not number.isdigit() or not 0 < int(number) < 65536:
        raise InputError(f"-master {master}: expected HOST:PORT, such as 10.0.0.1:6170")
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return (
            False,
            f"{name} resolves to no address; give the master's address, or name it in /etc/hosts",
        )
    if address.startswith("127.") or address in addresses().values():
        with socket.socket() as tried:
            try:
                tried.bind((address, int(number)))
            except OSError as error:
                return (
                    False,
                    f"{master} can't be used here ({error.strerror}); choose another port (ss -ltnp)",
                )
        return True, f"{master} is free on this machine"
    try:
        socket.create_connection((address, int(number)), timeout).close()
    except ConnectionRefusedError:
        return True, f"{name} answers; nothing listens at {number} yet: start there first"
    except OSError as error:
        return False, f"{master} doesn't answer ({error}); check the address, routes and firewalls"
    return True, f"{master} answers"


# ----------------------------------------------------------------- resources


def shared_memory(folder: str = "/dev/shm", least: int = LEAST_SHM) -> Finding:
    """The space in ``folder``, in bytes at least ``least``."""
    advice = "docker run --shm-size=1g, or --ipc=host (NCCL and Paddle's own loader put their buffers there)"
    if not os.access(folder, os.W_OK | os.X_OK):
        return False, f"{folder} isn't there or can't be written; {advice}"
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < least:
        return False, f"{folder} has {free / GB:.2f} GB free, expected {least / GB:g}; {advice}"
    return True, f"{folder} has {free / GB:.1f} GB free"


def ranks_here(ngpus: int | None) -> int:
    """Returns how many ranks run on this machine: the launcher's, or as many as -ngpus asks for."""
    import utils

    if is_launched():
        return int(os.environ.get("PADDLE_LOCAL_SIZE") or 1)
    return utils.num_gpus() or 2 if ngpus is None else utils.num_processes(ngpus)


def memory(processes: int, least: int = LEAST_MEMORY) -> Finding:
    """Memory and cores left by the machine or its container, for so many processes of ``least``
    bytes.
    """
    from utils import free_memory, num_cores

    free = free_memory()
    cores = num_cores()
    found = (
        f"{free / GB:.1f} GB free, {cores} cores, for {processes} process{'es' * (processes > 1)}"
    )
    if free < processes * least:
        return (
            False,
            f"{found}: expected {least / GB:g} GB each; raise the container's limit, or lower -ngpus",
        )
    return True, found


def open_files() -> Finding:
    """The limit on open files and sockets."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < LEAST_FILES:
        return False, f"at most {limit} open files, expected {LEAST_FILES}; ulimit -n 65536"
    return True, "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit}"


def clock(now: float) -> Finding:
    """The time of day, ``now`` in seconds since 1970."""
    shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < SOURCE_TIME:
        return False, f"{shown} is before this toolkit was written: let NTP set the clock"
    return True, shown


def operators() -> Finding:
    """The compiled operators of ops/, which CPUs are slow without."""
    import ops
    from ops import images
    from utils import num_gpus

    missed = (
        "" if images.load() else "; not those of images, which Pillow computes: python -m ops.build"
    )
    if num_gpus() or ops.load():
        return True, ("a GPU needs none" if num_gpus() else ops.library().parent.name) + missed
    return (
        False,
        "not compiled for this Paddle, which makes training slow (docs/performance.md); python -m ops.build",
    )


def loader(cfg: str, options: Sequence[str], least: float = LEAST_IMAGES) -> Finding:
    """How many training images one worker loads in a second; expected: ``least``."""
    from config import get_config, with_values
    from datasets import get_dataloader, get_dataset
    from settings.options import size_text

    fixed = {
        "DATA__NUM_WORKERS": 1,
        "DATA__BATCH_SIZE": 32,
        "DATA__DROP_LAST": False,
        "TRAIN__NUM_EPOCHS": 1000000,
    }
    try:
        config = with_values(get_config(cfg, options), **fixed)
        dataset = get_dataset(config, "train", alone=True)
        found = get_dataloader(config, dataset, "train")
        batches = _batches(found)
        next(batches)  # the worker starts
        start = time.perf_counter()
        images = 0
        while time.perf_counter() - start < LOADER_SECONDS:
            images += len(next(batches)["pixels"])
        rate = images / (time.perf_counter() - start)
        found.close()
    except RunError as error:
        return False, str(error)
    told = f"{config.DATA.DATASET}, {size_text(config.DATA.IMAGE_SIZE)} pixels: {rate:.0f} images/s per worker"
    if rate < least:
        return (
            False,
            f"{told}: few; pack slow storage by tools/make_shards.py, or set DATA.CACHE (docs/performance.md)",
        )
    return True, told


def _batches(found: Any) -> Iterator[dict]:
    for epoch in itertools.count(1):
        found.batch_sampler.set_epoch(epoch)
        yield from found


# ------------------------------------------------------------------------ all


def checks(arguments: argparse.Namespace, several: bool) -> Iterator[tuple[str, Finding]]:
    """Yields (name, finding) of this machine; where packages are wrong, no more than those: Paddle
    may not import.
    """
    packages = installed_versions()
    found = {"python": python(), "paddle": paddle_package(packages)}
    found["libraries"] = libraries(packages)
    yield from found.items()
    if not all(ok for ok, _ in found.values()):
        return
    others: dict[str, Callable[[], Finding]] = {
        "devices": devices,
        "cuda": cuda,
        "interfaces": interfaces,
        "host": lambda: host(socket.gethostname(), several or is_far(arguments.master)),
        "port": lambda: port(arguments.master),
        "secret": network.common_secret,
        "store": network.can_fence,
        "shm": lambda: shared_memory(arguments.shm),
        "memory": lambda: memory(ranks_here(arguments.ngpus)),
        "files": open_files,
        "operators": operators,
        "clock": lambda: clock(time.time()),
        "loader": lambda: loader(arguments.cfg, _options(arguments)),
    }
    if not arguments.master:
        del others["port"]
    for name, check in others.items():
        yield name, check()


def _options(arguments: argparse.Namespace) -> list[str]:
    named = {"DATA.DATASET": arguments.dataset, "DATA.DATA_PATH": arguments.data_path}
    return [word for pair in named.items() if pair[1] for word in pair] + arguments.o
