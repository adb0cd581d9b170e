"""``tools/doctor.py --gpu``: which checks are made, in which order, and what stands above them to
be pasted.
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

REHEARSAL = "rehearsal on a CPU: says nothing about a GPU"
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
    """Makes the checks and tells each as soon as it is made; returns the exit status.

    Args:
        arguments: the doctor's: ``gpu``, ``rehearse``, ``only``, ``ngpus``; ``changed`` are those
            that were given.

    Raises:
        InputError: there is no GPU, or a flag that does nothing here.
    """
    if not arguments.gpu:
        raise InputError("--rehearse and --only go with --gpu; write that, too, or leave them out")
    if idle := [
        flag for flag in arguments.changed if flag not in ("gpu", "rehearse", "only", "ngpus")
    ]:
        raise InputError(f"-{idle[0]} does nothing with --gpu; leave it out")
    if is_launched():
        raise InputError(
            "--gpu starts ranks by itself, but a launcher started this; run python tools/doctor.py --gpu"
        )
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise InputError(
            f"{error.strerror}; let TMPDIR name a folder that can be written"
        ) from None
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
            todo += not finding[0]
            tell(name, finding, True)
    took = f"{time.monotonic() - begun:.0f} s{f'; {REHEARSAL}' if arguments.rehearse else ''}"
    print(f"{f'{todo} to do' if todo else 'all is well'}, {took}")
    return 1 if todo else 0


def no_gpu(about: dict[str, Any]) -> str:
    """Returns the line that says what stands in the way of a GPU."""
    advice = (
        "look at nvidia-smi, the driver and CUDA_VISIBLE_DEVICES"
        if about["built"]
        else "install paddlepaddle-gpu"
    )
    found = f"--gpu: Paddle {about['paddle']} sees no GPU, expected at least one"
    return f"{found}; {advice} (docs/gpu.md), or rehearse on the CPU with --gpu --rehearse"


def run_check(check: Callable[[Bench], Finding], bench: Bench) -> Finding:
    """Returns what a check finds, within its time; a check that fails is something to do, and the
    others go on.
    """
    bench.deadline = time.monotonic() + LIMIT
    try:
        return check(bench)
    except Exception as error:
        kind = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
        return False, f"failed: {kind}{' '.join(str(error).split())[:300]}"


def header(bench: Bench) -> list[str]:
    """Returns the lines above the checks: what they were made with."""
    about = bench.about
    git = ("git", "-C", str(ROOT))
    commit = _output_of(*git, "rev-parse", "--short", "HEAD")
    changed = _output_of(*git, "status", "--porcelain", "--untracked-files=no")
    told = {
        "toolkit": f"{commit}{', with changes' * bool(changed)}" if commit else "no git checkout"
    }
    told["paddle"] = about["paddle"]
    if not bench.rehearsing:
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        told |= {"gpus": about["kinds"], "cuda": about["cuda"]}
        told["driver"] = ", ".join(sorted(set(driver.split()))) or "nvidia-smi isn't there"
    here = measure.machine()
    told["host"] = (
        f"Python {platform.python_version()}, {here['cpu']}, {here['cores']} cores, {platform.platform()}"
    )
    title = f"first steps on a GPU, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    first = [f"{title}: {REHEARSAL}" if bench.rehearsing else title]
    return first + [f"      {name:10}  {text}" for name, text in told.items()]


def _output_of(*command: str) -> str:
    """What a command prints; nothing where it isn't there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
