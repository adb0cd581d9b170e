"""What a run computes on, and with which versions."""

import contextlib
import platform
import subprocess
from pathlib import Path

import numpy as np
import paddle

from settings.options import __version__
from utils import num_gpus


def device() -> str:
    """Returns what this process computes on: "cpu", or "gpu:0 (NVIDIA A100-SXM4-80GB)"."""
    name = paddle.device.get_device()
    return (
        f"{name} ({paddle.device.cuda.get_device_name()})"
        if num_gpus() and name.startswith("gpu")
        else name
    )


def commit() -> str | None:
    """Returns the toolkit's commit, with "-dirty" where files differ from it; None where git
    doesn't tell.
    """
    root = Path(__file__).parents[1]
    if (root / ".git").exists():  # else it would tell of a repository that the toolkit is put into
        git = [
            "git",
            "-C",
            str(root),
            "describe",
            "--always",
            "--dirty",
            "--exclude=*",
            "--abbrev=12",
        ]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(
                git, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
    return None


def versions() -> dict[str, str]:
    """Returns what computes: the toolkit itself, and what it stands on."""
    return {
        "toolkit": __version__,
        "python": platform.python_version(),
        "paddle": paddle.__version__,
        "numpy": np.__version__,
    }
