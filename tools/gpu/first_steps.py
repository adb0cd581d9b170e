"""Runs the checks of ``tools/doctor.py --gpu`` in order, below a header that describes the machine,
so that the output can be pasted into a report.
"""

import argparse
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from errors import InputError, RunError
from launch.files import temporary_folder
from launch.launchers import is_launched
from tools.benchmarks import measure
from tools.checks.machine import Finding
from tools.gpu import checks
from tools.gpu.checks import LIMIT, ROOT, Bench

REHEARSAL = "rehearsal on a CPU: the results don't apply to a GPU"
CHECKS: dict[str, Callable[[Bench], Finding]] = {
    "attention": checks.attention,
    "flash": checks.flash,
    "transfers": checks.transfers,
    "parity": checks.parity,
    "same-bits": checks.same_bits,
    "resumed": checks.resume,
    "sharded": checks.sharding,
    "all-reduce": checks.all_reduce,
    "rate": checks.rate,
    "rate-large": partial(checks.rate, name="ViT-B", share=2),
    "float32": partial(checks.rate, amp=False),
    "loader": checks.loader,
    "host": checks.host,
}


def main(arguments: argparse.Namespace, tell: Callable[[str, Finding, bool], None]) -> int:
    """Makes the checks and returns the exit status.

    Args:
        arguments: the doctor's ``gpu``, ``rehearse``, ``only`` and ``ngpus``. ``changed`` has the
            names
            of all flags that were given.
        tell: is called with the name and the finding of each check as soon as it is made.

    Raises:
        InputError: there is no GPU, or a flag that does nothing here.
    """
    if not arguments.gpu:
        raise InputError("--rehearse and --only need --gpu; add it, or leave them out")
    for flag in arguments.changed:
        if flag not in ("gpu", "rehearse", "only", "ngpus"):
            raise InputError(f"-{flag} has no effect with --gpu; leave it out")
    if is_launched():
        raise InputError(
            "--gpu starts ranks by itself, but a launcher started this;"
            " run python tools/doctor.py --gpu"
        )
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise InputError(f"{error.strerror}; set TMPDIR to a writable folder") from None
    begun = time.monotonic()
    todo = 0
    with temporary_folder() as folder:
        bench = Bench(folder, arguments.rehearse, {}, arguments.ngpus)
        bench.about = bench.ask("about", {})
        if not (bench.about["gpus"] or arguments.rehearse):
            raise InputError(no_gpu(bench.about))
        print("\n".join(header(bench)), flush=True)
        for name in arguments.only or CHECKS:
            finding = run_check(CHECKS[name], bench)
            is_well, _ = finding
            if not is_well:
                todo += 1
            tell(name, finding, True)
    verdict = f"{todo} to do" if todo else "all is well"
    summary = f"{verdict}, {time.monotonic() - begun:.0f} s"
    if arguments.rehearse:
        summary += f"; {REHEARSAL}"
    print(summary)
    return 1 if todo else 0


def no_gpu(about: dict[str, Any]) -> str:
    """Returns the error that Paddle sees no GPU, with advice."""
    advice = "install paddlepaddle-gpu"
    if about["built"]:
        advice = "check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES"
    found = f"--gpu: Paddle {about['paddle']} sees no GPU, expected at least one"
    return f"{found}; {advice} (docs/guides/gpu.md), or rehearse on the CPU with --gpu --rehearse"


def run_check(check: Callable[[Bench], Finding], bench: Bench) -> Finding:
    """Returns the finding of a check, which has LIMIT seconds. A check that raises an error counts
    as something to do, and the other checks continue.
    """
    bench.deadline = time.monotonic() + LIMIT
    try:
        return check(bench)
    except Exception as error:
        kind = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
        return False, f"failed: {kind}{' '.join(str(error).split())[:300]}"


def header(bench: Bench) -> list[str]:
    """Returns the lines above the checks, which describe toolkit, Paddle and machine."""
    about = bench.about
    git = ("git", "-C", str(ROOT))
    commit = _output_of(*git, "rev-parse", "--short", "HEAD")
    toolkit = commit or "no git checkout"
    if commit and _output_of(*git, "status", "--porcelain", "--untracked-files=no"):
        toolkit += ", with changes"
    described = {"toolkit": toolkit, "paddle": about["paddle"]}
    if not bench.rehearsing:
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        described["gpus"] = about["kinds"]
        described["cuda"] = about["cuda"]
        described["driver"] = ", ".join(sorted(set(driver.split()))) or "nvidia-smi not found"
    machine = measure.machine()
    python = f"Python {platform.python_version()}"
    cpu = f"{machine['cpu']}, {machine['cores']} cores"
    described["host"] = f"{python}, {cpu}, {platform.platform()}"
    title = f"first steps on a GPU, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    if bench.rehearsing:
        title += f": {REHEARSAL}"
    return [title, *(f"      {name:10}  {text}" for name, text in described.items())]


def _output_of(*command: str) -> str:
    """Returns what a command prints; "" if there is no such command, or if it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
