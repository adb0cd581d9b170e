"""The device, the commit and the versions that a run computes with, for its records."""

import contextlib
import platform
import subprocess
from pathlib import Path

import numpy as np
import paddle

import ops
from settings.parser import __version__
from utils import num_gpus


def device() -> str:
    """Returns this process's device: "cpu", or "gpu:0 (NVIDIA A100-SXM4-80GB)"."""
    name = paddle.device.get_device()
    if num_gpus() and name.startswith("gpu"):
        return f"{name} ({paddle.device.cuda.get_device_name()})"
    return name


def commit() -> str | None:
    """Returns the toolkit's commit, with "-dirty" if files differ from it; None outside of git."""
    root = Path(__file__).parents[1]
    # Without this check git would name the commit of a repository that the toolkit is copied into.
    if not (root / ".git").exists():
        return None
    options = ["--always", "--dirty", "--exclude=*", "--abbrev=12"]
    command = ["git", "-C", str(root), "describe", *options]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None


def versions() -> dict[str, str]:
    """Returns the versions of the toolkit, Python, Paddle and NumPy, and whose operators compute:
    the compiled ones of ``ops``, or those of Paddle.
    """
    return {
        "toolkit": __version__,
        "python": platform.python_version(),
        "paddle": paddle.__version__,
        "numpy": np.__version__,
        "operators": "compiled" if ops.are_used() else "paddle",
    }
