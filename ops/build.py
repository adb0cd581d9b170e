"""Compiles the operators for the Paddle at hand: ``python -m ops.build``, or ``make ops``. Needs
g++. What this user has compiled before is used again (``ops.paths``).
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import paddle

from errors import RunError, remedy, reporting
from launch.devices import num_cores
from launch.files import remove, temporary_folder, writing_whole
from launch.startup import stop_at_once
from ops import images
from ops.paths import is_built, library, sources_and_headers, why_unsafe
from utils import free_memory

# Without -fno-math-errno and -fno-trapping-math, roundings and comparisons stay scalar.
# PADDLE_WITH_CUSTOM_KERNEL is what Paddle's own build of custom operators defines.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-w",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-DNDEBUG",
    "-DPADDLE_WITH_CUSTOM_KERNEL",
]
# Paddle's own oneDNN and OpenMP: with another OpenMP, each thread would start threads in a product.
# Where they are isn't noted in the library: Paddle has loaded them by then, and another environment
# that uses the library has them elsewhere.
LIBRARIES = ["-l:libdnnl.so.3", "-l:libiomp5.so", "-Wl,--no-as-needed", "-l:libpaddle.so"]
# The number of compilers at work, each on its part of the sources. To read Paddle's headers takes
# 6.6 s of a core, all the rest 20: one compiler for each of the sources would take four times as
# long in all. The number is the same on every machine, so that the library is, too.
PARTS = 2
# Bytes of memory that a compiler needs; 0.75 GB were measured.
MEMORY = 1 << 30
# The libraries that are kept, those that were used last; one has 1 MB.
KEPT = 12
_FOLDER = re.compile(r"[\w.+]+-[0-9a-f]{12}")
_NO_COMPILER = "g++ wasn't found"
_WITHOUT = (
    "without the compiled operators, CPUs train and evaluate at a third to a tenth of the speed"
)


def build() -> Path:
    """Compiles the operators where ``ops.paths.library`` expects them, unless they are there;
    returns that place.

    Raises:
        RunError: there is no compiler, it failed, or the cache can't be written to.
    """
    return _build(library(), compile_operators, f"operators can't be compiled ({{}}); {_WITHOUT}")


def build_images() -> Path:
    """Compiles the operations on images, which need no Paddle, unless they are there; returns that
    place.

    Raises:
        RunError: as ``build``.
    """
    without = "Pillow computes them instead, which takes longer"
    message = f"image operations can't be compiled ({{}}); {without}"
    return _build(images.library(), compile_images, message)


def _build(target: Path, compile_to: Callable[[Path], None], message: str) -> Path:
    """Writes ``target`` by ``compile_to`` unless it is there; returns it.

    Args:
        message: that of the RunError that says why there is none.
    """
    if is_built(target):
        return target
    try:
        if problem := why_unsafe(target):
            problem += "; set XDG_CACHE_HOME to a folder of your own"
            raise RunError(f"the {message.format(problem)}")
        if not shutil.which("g++"):
            raise RunError(f"the {message.format(_NO_COMPILER)}")
        _make_folders(target.parent)
        with _alone(target.parents[1]), temporary_folder() as folder:
            # Another process may have compiled it while this one waited.
            if not is_built(target):
                built = folder / target.name
                compile_to(built)
                with writing_whole(target, "wb") as file:
                    os.fchmod(file.fileno(), 0o755)
                    file.write(built.read_bytes())
                _remove_oldest(target.parents[1])
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines() or ["no output"]
        told = next((line for line in lines if "error" in line), lines[-1])
        raise RunError(f"the {message.format(told.strip())}") from None
    except OSError as error:
        problem = f"{error}; {remedy(error)}, or set XDG_CACHE_HOME to another folder"
        raise RunError(f"the {message.format(problem)}") from None
    return target


def _make_folders(folder: Path) -> None:
    """Makes a library's folder and those around it, which other users can read but not change."""
    cache, *ours = reversed([folder, *list(folder.parents)[:3]])
    cache.mkdir(parents=True, exist_ok=True)
    for path in ours:
        path.mkdir(mode=0o755, exist_ok=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process of this machine compiles into ``folder``, and keeps the others
    waiting meanwhile.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some network file systems have no such lock. Then two may compile the same thing.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("another process is compiling; waiting for it", flush=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def compile_operators(target: Path) -> None:
    """Compiles the operators into the new file ``target``, PARTS compilers at once if there are
    enough cores and memory.

    Raises:
        CalledProcessError: a compiler failed; its ``stderr`` says why.
    """
    here = Path(__file__).resolve().parent
    headers = Path(paddle.sysconfig.get_include())
    compatible = headers / "paddle/phi/api/include/compat"
    includes = [here, headers, headers / "third_party", compatible]
    includes += [compatible / "torch/csrc/api/include", sysconfig.get_path("include")]
    names = [path.name for path in sources_and_headers() if path.suffix == ".cc"]
    commands = []
    objects = []
    for number in range(PARTS):
        source = target.with_name(f"part_{number}.cc")
        source.write_text("".join(f'#include "{name}"\n' for name in names[number::PARTS]))
        objects.append(str(source.with_suffix(".o")))
        options = [*FLAGS, *(f"-I{path}" for path in includes)]
        commands.append(["g++", *options, "-c", str(source), "-o", objects[-1]])
    at_once = PARTS
    if num_cores() < PARTS or free_memory() < PARTS * MEMORY:
        at_once = 1
    for first in range(0, PARTS, at_once):
        _run(commands[first : first + at_once])
    folders = (paddle.sysconfig.get_lib(), Path(paddle.base.__file__).parent)
    link = ["g++", "-shared", *objects, *(f"-L{folder}" for folder in folders), *LIBRARIES]
    _run([[*link, "-o", str(target)]])


def compile_images(target: Path) -> None:
    """Compiles the operations on images into the new file ``target``; raises as
    ``compile_operators``.
    """
    _run([["g++", "-shared", "-fPIC", *images.FLAGS, str(images.SOURCE), "-o", str(target)]])


def _run(commands: list[list[str]]) -> None:
    """Runs commands at the same time, and waits for all of them."""
    started = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    errors = [process.communicate()[1] for process in started]
    for process, stderr in zip(started, errors, strict=True):
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, "g++", stderr=stderr)


def _remove_oldest(folder: Path) -> None:
    """Removes the libraries in ``folder`` that weren't loaded for the longest time, but KEPT."""
    libraries = [
        path
        for path in folder.glob("*/*.so")
        if _FOLDER.fullmatch(path.parent.name) and path.name in ("vit_ops.so", "images.so")
    ]
    libraries.sort(key=lambda path: path.stat().st_mtime)
    for path in libraries[:-KEPT]:
        remove(path.parent)


if __name__ == "__main__":
    paddle.disable_signal_handler()
    stop_at_once()
    with reporting():
        print(f"compiled image operations: {build_images()}", flush=True)
        print(f"compiled operators: {build()}")
