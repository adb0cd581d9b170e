"""What several test files share."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are of the CPU, whatever the machine has
# threads that spin as they wait take the other tests' cores
os.environ["OMP_WAIT_POLICY"] = "passive"
# Some tests import it themselves. Its reports deadlock with threadpoolctl (``import_extra``).
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import paddle
import threadpoolctl
import warm
from support import hostile_files, programs
from support.longest import LONGEST
from support.servers import (  # noqa: F401  (fixtures of several files)
    checkpoint,
    photographs,
    server,
)

import ops
from launch import secret
from ops.build import build

# (mutants.py) else each program compiles the toolkit: 0.3 s
if os.environ.get("PYTHONDONTWRITEBYTECODE") != "mutants":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_secret = tempfile.NamedTemporaryFile("w")  # noqa: SIM115  (as long as the tests; not in the user's home)
_secret.write(f"{'tests ' * 6}\n")
_secret.flush()
os.environ[secret.SECRET_FILE_VARIABLE] = _secret.name
gc.disable()  # until all is collected
ops.load()  # as runs do; tests/ops/test_ops.py compares

# Paddle notes the stack at each operator of a graph: with pytest's frames that takes a fifth of a
# graph's time. Nobody reads it here, so one frame will do.
_extract_stack = traceback.extract_stack
traceback.extract_stack = lambda f=None, limit=None: _extract_stack(
    f or sys._getframe(1), limit or 1
)

# set by that import; the programs that tests start would take it for a wish
os.environ.pop("OMP_NUM_THREADS", None)
ROOT = programs.ROOT
TINY = [
    "DATA.IMAGE_SIZE", "8", "DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5",
    "DATA.NUM_WORKERS", "0", "DATA.DATASET", "digits", "DATA.CROP_PCT", "1.0", "MODEL.PATCH_SIZE", "4",
    "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "2", "MODEL.NUM_HEADS", "2", "MODEL.NUM_CLASSES", "10",
    # half a second of each run
    "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.NUM_EPOCHS", "1", "REPORT", "False",
]  # fmt: skip


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def pytest_collection_finish():
    """Leaves what is imported by now to no collection of garbage: it stays, and forks share its
    pages.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # collections took a twelfth of the tests' time
    gc.enable()


def pytest_make_parametrize_id(val):
    """Shortens long texts in the names of tests, which the workers of pytest-xdist send each other."""
    return f"{val[:60]}..." if isinstance(val, str) and len(val) > 200 else None


def without(options, *beginnings):
    """The options but for those whose keys begin so: a key that would do nothing is an error."""
    pairs = zip(options[::2], options[1::2], strict=True)
    return [word for pair in pairs if not pair[0].startswith(beginnings) for word in pair]


def pytest_terminal_summary(terminalreporter):
    """The table of what was tried on readers, and of the faults that were injected into runs."""
    table = {kind: dict(counts) for kind, counts in hostile_files.tried.items()}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            if report.nodeid.startswith("tests/faults/"):
                kind = table.setdefault(report.nodeid.partition("::")[0], {})
                kind[outcome] = kind.get(outcome, 0) + 1
    for kind, counts in sorted(table.items()):
        words = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        terminalreporter.write_line(f"{kind:<40} {sum(counts.values()):6} tried: {words}")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The workers of pytest-xdist share the cores. A test that sets more threads leaves them to its
    own file alone.
    """
    threadpoolctl.threadpool_limits(1)


@pytest.fixture(autouse=True)
def _no_program_is_left():
    yield
    for process in programs.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    programs.started.clear()


@pytest.fixture
def tiny():
    """Options of a small, fast ViT on 8 x 8 grey images."""
    return list(TINY)


@pytest.fixture
def program(tmp_path):
    """Returns a function that runs a command of the toolkit in ``tmp_path``: (exit status, stdout,
    stderr).

    Two processes, whatever the machine's cores, unless the flags say another number.
    """

    def run(script, *flags, timeout=120, **environment):
        flags = flags if script == "main_single_gpu.py" else ("-ngpus=2", *flags)
        command = [warm.python() if script.endswith(".py") else "sh", str(ROOT / script), *flags]
        env = warm.environment(**environment)
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def counted_tensors(monkeypatch):
    """Returns a context that lists which of Paddle's functions made a tensor of numbers, call by
    call: each would be a copy to a GPU, or a kernel.
    """

    @contextlib.contextmanager
    def counted():
        made = []
        with monkeypatch.context() as patched:
            for name in ("full", "ones", "to_tensor", "zeros"):
                function = getattr(paddle, name)
                patched.setattr(
                    paddle,
                    name,
                    lambda *args, _of=(name, function), **how: (
                        made.append(_of[0]),
                        _of[1](*args, **how),
                    )[1],
                )
            yield made

    return counted


def write_images(folder: Path, classes: dict[str, int], size: int = 12, seed: int = 0) -> None:
    """Writes ``classes[name]`` random PNG images into ``folder/name/``."""
    rng = np.random.default_rng(seed)
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8)).save(
                folder / name / f"{index}.png"
            )


@pytest.fixture
def compiled_operators():
    """The operators of ops/, compiled and loaded; a test may switch them off."""
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    build()
    assert ops.load()
    yield
    ops.enable(True)
