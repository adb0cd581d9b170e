"""A device that isn't the CPU, on a CPU: a plugin of Paddle's, compiled on first use. The tests run
on it what, by its place, would fail on a GPU alone: a collective on a tensor of the CPU, a device's
tensor read by its host.

Where the environment names the plugin's folder as Paddle is imported, "stand_in:0" is the default
device. Two more variables are its own: STAND_IN_MEMORY, the bytes of a device (8 GiB), and
STAND_IN_DEVICES, how many there are (2).

It isn't a GPU: it draws random numbers from the CPU's generator, has no stream of its own, and no
kernel of a GPU runs.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import paddle

_HERE = Path(__file__).resolve().parent
_PADDLE = Path(paddle.__file__).resolve().parent


def why_not() -> str:
    """Why there can be no stand-in for the Paddle at hand; nothing, if it can be built."""
    if not hasattr(paddle.base.core, "ProcessGroupCustom"):
        return f"Paddle {paddle.__version__} of this build loads no device's plugin (PADDLE_WITH_CUSTOM_DEVICE is off)"
    return "" if shutil.which("g++") else "g++ wasn't found"


def library() -> Path:
    """Returns the plugin of these sources and this Paddle; compiles it, unless it is there."""
    sources = sorted(path for path in _HERE.iterdir() if path.suffix in (".cc", ".h", ".py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    target = _HERE / "built" / f"{paddle.__version__}-{digest[:12]}" / "stand_in.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent.parent) as folder:
            built = Path(folder) / target.name
            command = [
                "g++",
                "-std=c++17",
                "-O1",
                "-fPIC",
                "-shared",
                "-DPADDLE_WITH_CUSTOM_DEVICE",
            ]
            for include in (_PADDLE / "include", _PADDLE / "include" / "third_party"):
                command += ["-isystem", str(include)]
            command += [str(path) for path in sources if path.suffix == ".cc"]
            command += ["-o", str(built), f"-L{_PADDLE / 'libs'}", "-lphi_core", "-lcommon", "-lrt"]
            subprocess.run(command, check=True)
            os.replace(built, target)  # two may build at a time
    return target


def environment() -> dict[str, str]:
    """What a process's environment has to hold, as it starts, to have the stand-in, and collectives
    on it.
    """
    quiet = {"GLOG_minloglevel": "1"}  # Paddle tells what it loads
    return {"CUSTOM_DEVICE_ROOT": str(library().parent), "PADDLE_DISTRI_BACKEND": "xccl", **quiet}


def copies() -> tuple[int, int, int]:
    """How many copies this process has made: to the device, to the host, within the device.

    An operator makes some, too: Paddle runs the CPU's kernel where the stand-in has none.
    """
    plugin = ctypes.CDLL(str(library()))
    return tuple(plugin.stand_in_copies(kind) for kind in range(3))
