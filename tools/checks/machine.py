"""The checks of one machine in tools/doctor.py.

A check returns a finding: whether all is well, and a text that says what was found or what to do.
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
from launch.launchers import is_launched
from launch.rendezvous import addresses
from tools.checks import network

Finding = tuple[bool, str]

GB = 1 << 30
# Bytes of shared memory. NVIDIA's containers need this much; Docker's default is 64 MB.
MIN_SHARED_MEMORY = GB
# Bytes of memory for each process, with a small model.
MIN_MEMORY = GB
MIN_OPEN_FILES = 1024
# Images per second and worker. A core decodes and augments 350 to 1,150 photographs per second.
MIN_IMAGES = 100.0
LOADER_SECONDS = 1.0
# October 2025, when this toolkit was written. An earlier clock is wrong.
SOURCE_TIME = 1_760_000_000
PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "numpy", "protobuf", "simplejpeg")

# ------------------------------------------------------------ before Paddle


def installed_versions() -> dict[str, str]:
    """Returns the versions of those of PACKAGES that are installed."""
    versions = {}
    for name in PACKAGES:
        if any(importlib.metadata.distributions(name=name)):
            versions[name] = importlib.metadata.version(name)
    return versions


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Checks the interpreter."""
    shown = ".".join(map(str, version))
    if (3, 10) <= version[:2] <= (3, 13):
        return True, shown
    return False, f"{shown}, expected 3.10 to 3.13; make PYTHON=python3.11 install"


def paddle_package(versions: dict[str, str]) -> Finding:
    """Checks that one build of Paddle is installed, of a version that works."""
    builds = [name for name in PACKAGES[:2] if name in versions]
    if not builds:
        return False, "found no Paddle; make install"
    if len(builds) == 2:
        both = "paddlepaddle and paddlepaddle-gpu, of which the one installed last is used"
        return False, f"found {both}; uninstall both, then make install"
    version = versions[builds[0]]
    if _numbers(version) < (2, 6):
        return False, f"{builds[0]} {version}, expected 2.6.2 or 3.3.1; make install"
    note = "" if version in ("2.6.2", "3.3.1") else " (2.6.2 and 3.3.1 are tested)"
    return True, f"{builds[0]} {version}{note}"


def libraries(versions: dict[str, str]) -> Finding:
    """Checks NumPy, protobuf and simplejpeg, which have to fit the installed Paddle."""
    paddle = versions.get("paddlepaddle-gpu") or versions.get("paddlepaddle", "")
    missing = [name for name in ("numpy", "protobuf", "simplejpeg") if name not in versions]
    if missing:
        return False, f"{', '.join(missing)} not installed; make install"
    shown = ", ".join(f"{name} {versions[name]}" for name in PACKAGES[2:])
    if _numbers(paddle) < (3,) and _numbers(versions["numpy"]) >= (2,):
        return False, f'{shown}: Paddle {paddle} was built against NumPy 1; pip install "numpy<2"'
    if _numbers(paddle) < (3,) and _numbers(versions["protobuf"]) >= (7,):
        reason = f"Paddle {paddle}'s fleet uses functions that protobuf 7 removed"
        return False, f'{shown}: {reason}; pip install "protobuf<7"'
    return True, shown


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


# ------------------------------------------------------------------- devices


def devices() -> Finding:
    """Checks that Paddle sees the machine's GPUs, and says which devices it computes on."""
    import paddle

    from launch.devices import check_visible, gpu_uuids, visible_names
    from utils import num_gpus

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = visible_names() or []
    try:
        # Before Paddle counts the GPUs.
        check_visible()
    except InputError as error:
        return False, str(error)
    gpus = num_gpus()
    build = "a GPU build" if paddle.device.is_compiled_with_cuda() else "a CPU build"
    if len(listed) > gpus:
        names = (
            f"CUDA_VISIBLE_DEVICES={visible} names {len(listed)} GPUs, Paddle ({build}) sees {gpus}"
        )
        return False, f"{names}; name GPUs that nvidia-smi -L lists, or unset it"
    here = len(gpu_uuids())
    if here and not paddle.device.is_compiled_with_cuda():
        advice = "make install PADDLE=... (docs/start/install.md)"
        return False, f"{here} GPUs, but Paddle is a CPU build; {advice}"
    if not gpus:
        text = f"no GPU is visible to {build}: on the CPU, over gloo"
        # Paddle's launcher ends in an IndexError with "" and with "-1".
        if visible is not None and not listed:
            text += f"; unset CUDA_VISIBLE_DEVICES='{visible}' for paddle.distributed.launch"
        return True, text
    kinds = sorted({paddle.device.cuda.get_device_properties(gpu).name for gpu in range(gpus)})
    return True, f"{gpus} of {here or gpus} GPUs ({', '.join(kinds)})"


def cuda() -> Finding:
    """Checks that the driver is new enough for Paddle's CUDA, and that NCCL is found."""
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
    supported = f"{number.value // 1000}.{number.value % 1000 // 10}"
    # Within a major version, a driver runs newer builds.
    if _numbers(supported)[0] < _numbers(built)[0]:
        versions = f"Paddle is built for {built}, the driver is of {supported}"
        return False, f"{versions}; install a newer driver or another Paddle"
    if not num_gpus():
        return True, f"Paddle is built for {built}, the driver is of {supported}"
    try:
        core: Any = paddle.base.core
        nccl = core.nccl_version()
    except RuntimeError:
        reason = "libnccl.so isn't found: no more than one GPU works"
        return False, f"{reason}; pip install nvidia-nccl-cu11 or -cu12"
    return True, f"Paddle is built for {built}, the driver is of {supported}, NCCL {nccl}"


# ------------------------------------------------------------------- network


def interfaces() -> Finding:
    """Checks the network interfaces that the environment variables choose for gloo and NCCL."""
    interface_addresses = addresses()
    shown = ", ".join(f"{name} {address}" for name, address in interface_addresses.items())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        chosen = os.environ.get(variable, "")
        # NCCL's may be a list of prefixes, or of what to leave out (^) or to take exactly (=).
        if not chosen or chosen[0] in "^=":
            continue
        prefixes = tuple(chosen.split(","))
        if not any(name.startswith(prefixes) for name in interface_addresses):
            problem = f"{variable}={chosen} isn't an interface with an address"
            return False, f"{problem}; there are {shown}"
    return True, shown


def host(name: str, several: bool) -> Finding:
    """Checks the address that the host's name resolves to, at which gloo listens.

    Args:
        several: whether ranks of other machines have to reach the address.
    """
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        problem = f"{name} resolves to no address ({error.strerror})"
        return False, f"{problem}; name it in /etc/hosts, with its address"
    loopback = address.startswith("127.")
    if loopback and several and not os.environ.get("GLOO_SOCKET_IFNAME"):
        problem = f"{name} resolves to {address}, where gloo would listen, but which no other machine can reach"
        advice = (
            "give it its address in /etc/hosts, or set GLOO_SOCKET_IFNAME and launch with --host"
        )
        return False, f"{problem}; {advice}"
    if not loopback and address not in addresses().values():
        problem = f"{name} resolves to {address}, which isn't an address of this machine"
        return False, f"{problem}; correct /etc/hosts or DNS"
    note = ""
    if loopback and several:
        note = f", but gloo listens at {os.environ.get('GLOO_SOCKET_IFNAME')}"
    elif loopback:
        note = " (enough for one machine)"
    return True, f"{name} is {address}{note}"


def is_far(master: str | None) -> bool:
    """Returns whether HOST:PORT isn't a loopback address, so that other machines can reach it."""
    if not master:
        return False
    host, _, _ = master.rpartition(":")
    try:
        return not socket.gethostbyname(host).startswith("127.")
    except OSError:
        return True


def port(master: str, timeout: float = 3.0) -> Finding:
    """Checks that HOST:PORT is free if it is on this machine. Otherwise it has to be reachable.

    Raises:
        InputError: ``master`` isn't HOST:PORT.
    """
    name, _, number = master.rpartition(":")
    if not name or not number.isdigit() or not 0 < int(number) < 65536:
        raise InputError(f"-master {master}: expected HOST:PORT, such as 10.0.0.1:6170")
    try:
        address = socket.gethostbyname(name)
    except OSError:
        advice = "give the master's address, or name it in /etc/hosts"
        return False, f"{name} resolves to no address; {advice}"
    if address.startswith("127.") or address in addresses().values():
        with socket.socket() as tried:
            try:
                tried.bind((address, int(number)))
            except OSError as error:
                problem = f"{master} can't be used here ({error.strerror})"
                return False, f"{problem}; choose another port (ss -ltnp)"
        return True, f"{master} is free on this machine"
    try:
        socket.create_connection((address, int(number)), timeout).close()
    except ConnectionRefusedError:
        return (
            True,
            f"{name} answers; nothing listens at {number} yet: start the program there first",
        )
    except OSError as error:
        return False, f"{master} doesn't answer ({error}); check the address, routes and firewalls"
    return True, f"{master} answers"


# ----------------------------------------------------------------- resources


def shared_memory(folder: str = "/dev/shm", least: int = MIN_SHARED_MEMORY) -> Finding:
    """Checks that ``folder`` has ``least`` bytes free."""
    users = "NCCL and Paddle's own loader put their buffers there"
    advice = f"docker run --shm-size=1g, or --ipc=host ({users})"
    if not os.access(folder, os.W_OK | os.X_OK):
        return False, f"{folder} doesn't exist or isn't writable; {advice}"
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < least:
        return False, f"{folder} has {free / GB:.2f} GB free, expected {least / GB:g}; {advice}"
    return True, f"{folder} has {free / GB:.1f} GB free"


def ranks_here(ngpus: int | None) -> int:
    """Returns how many ranks run on this machine: the launcher's number, or that of -ngpus."""
    import utils

    if is_launched():
        return int(os.environ.get("PADDLE_LOCAL_SIZE") or 1)
    if ngpus is None:
        return utils.num_gpus() or 2
    return utils.num_processes(ngpus)


def memory(processes: int, least: int = MIN_MEMORY) -> Finding:
    """Checks that the machine, or its container, has ``least`` bytes free for each process."""
    from utils import free_memory, num_cores

    free = free_memory()
    cores = num_cores()
    plural = "process" if processes == 1 else "processes"
    found = f"{free / GB:.1f} GB free, {cores} cores, for {processes} {plural}"
    if free < processes * least:
        advice = "raise the container's limit, or lower -ngpus"
        return False, f"{found}: expected {least / GB:g} GB each; {advice}"
    return True, found


def open_files() -> Finding:
    """Checks the limit on open files and sockets."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return True, "no limit"
    if limit < MIN_OPEN_FILES:
        return False, f"at most {limit} open files, expected {MIN_OPEN_FILES}; ulimit -n 65536"
    return True, f"at most {limit}"


def clock(now: float) -> Finding:
    """Checks this machine's clock.

    Args:
        now: its time, in seconds since 1970.
    """
    shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < SOURCE_TIME:
        return False, f"{shown} is before this toolkit was written: set the clock by NTP"
    return True, shown


def operators() -> Finding:
    """Checks that the operators of ops/ are compiled, without which CPUs are slow."""
    import ops
    from ops import images
    from utils import num_gpus

    missing = ""
    if not images.load():
        missing = "; except those of images, for which Pillow is used: python -m ops.build"
    if num_gpus():
        return True, f"not needed on a GPU{missing}"
    if ops.load():
        return True, f"{ops.library().parent.name}{missing}"
    problem = "not compiled for this Paddle, so training is slow (docs/evidence/performance.md)"
    return False, f"{problem}; python -m ops.build"


def loader(cfg: str, options: Sequence[str], least: float = MIN_IMAGES) -> Finding:
    """Checks that one worker loads ``least`` training images in a second."""
    from config import get_config, with_values
    from datasets import get_dataloader, get_dataset
    from settings.configuration import size_text

    fixed = {
        "DATA__NUM_WORKERS": 1,
        "DATA__BATCH_SIZE": 32,
        "DATA__DROP_LAST": False,
        "TRAIN__NUM_EPOCHS": 1000000,
    }
    try:
        config = with_values(get_config(cfg, options), **fixed)
        dataset = get_dataset(config, "train", alone=True)
        train_loader = get_dataloader(config, dataset, "train")
        batches = _batches(train_loader)
        # The first batch starts the worker.
        next(batches)
        start = time.perf_counter()
        images = 0
        while time.perf_counter() - start < LOADER_SECONDS:
            images += len(next(batches)["pixels"])
        rate = images / (time.perf_counter() - start)
        train_loader.close()
    except RunError as error:
        return False, str(error)
    images_text = f"{config.DATA.DATASET}, {size_text(config.DATA.IMAGE_SIZE)} pixels"
    shown = f"{images_text}: {rate:.0f} images/s per worker"
    if rate < least:
        advice = "for slow storage, use tools/make_shards.py or DATA.CACHE (docs/evidence/performance.md)"
        return False, f"{shown}: few; {advice}"
    return True, shown


def _batches(train_loader: Any) -> Iterator[dict]:
    for epoch in itertools.count(1):
        train_loader.batch_sampler.set_epoch(epoch)
        yield from train_loader


# ------------------------------------------------------------------------ all


def checks(arguments: argparse.Namespace, several: bool) -> Iterator[tuple[str, Finding]]:
    """Yields the name and the finding of each check of this machine.

    If a package is wrong, the other checks aren't made, because importing Paddle may fail.
    """
    versions = installed_versions()
    packages = {
        "python": python(),
        "paddle": paddle_package(versions),
        "libraries": libraries(versions),
    }
    yield from packages.items()
    if not all(ok for ok, _ in packages.values()):
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
    options = []
    if arguments.dataset:
        options += ["DATA.DATASET", arguments.dataset]
    if arguments.data_path:
        options += ["DATA.DATA_PATH", arguments.data_path]
    return options + arguments.o
