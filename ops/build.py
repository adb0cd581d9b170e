"""Compiles the operators for the Paddle at hand: ``python -m ops.build``, or ``make ops``. Needs
g++ and setuptools.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import paddle

from errors import RunError, reporting
from launch.files import temporary_folder
from ops import images
from ops.paths import library, sources_and_headers

# Without the last two, roundings and comparisons stay scalar.
FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
# Paddle's own oneDNN and OpenMP: with another OpenMP, each thread would start threads in a product.
LIBRARIES = ["-l:libdnnl.so.3", "-l:libiomp5.so"]


def build() -> Path:
    """Compiles the operators where ``ops.paths.library`` expects them, unless they are there;
    returns that place.

    Raises:
        RunError: there is no compiler, or it failed.
    """
    target = library()
    if target.is_file():
        return target
    without = (
        "without the compiled operators, CPUs train and evaluate at a third to a tenth of the speed"
    )
    if not shutil.which("g++"):
        raise RunError(f"g++ wasn't found; {without}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(target.parent) as folder:
        # Paddle talks much as it builds, in several ways, and so do setuptools and the compiler.
        command = [sys.executable, "-c", f"import ops.build; ops.build.compile_in({str(folder)!r})"]
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        built = folder / "vit_ops" / "vit_ops.so"
        if done.returncode or not built.is_file():
            lines = done.stderr.splitlines() or ["no output"]
            told = next((line for line in lines if "error:" in line), lines[-1])
            raise RunError(f"the operators can't be compiled ({told.strip()}); {without}")
        os.replace(built, target)
    return target


def compile_in(folder: str) -> None:
    """Leaves the library in ``folder``/vit_ops, by Paddle's custom operators."""
    here = Path(__file__).resolve().parent
    # All sources as one: to read Paddle's headers takes more than half of each one's time.
    all_sources = Path(folder) / "all_sources.cc"
    names = [path.name for path in sources_and_headers() if path.suffix == ".cc"]
    all_sources.write_text("".join(f'#include "{name}"\n' for name in names))
    paddle.utils.cpp_extension.load(
        name="vit_ops",
        sources=[str(all_sources)],
        extra_cxx_cflags=FLAGS,
        extra_ldflags=LIBRARIES,
        extra_include_paths=[str(here)],
        build_directory=folder,
        verbose=True,  # shows why a build failed
    )


def build_images() -> Path:
    """Compiles the operations on images, which need no Paddle, unless they are there; returns that
    place.

    Raises:
        RunError: there is no compiler, or it failed.
    """
    target = images.library()
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(target.parent) as folder:
        built = folder / target.name
        command = ["g++", "-shared", "-fPIC", *images.FLAGS, str(images.SOURCE), "-o", str(built)]
        told = "g++ wasn't found"
        if shutil.which("g++"):
            done = subprocess.run(command, capture_output=True, text=True)
            told = next((line for line in done.stderr.splitlines() if "error" in line), "")
        if not built.is_file():
            raise RunError(
                f"the image operations can't be compiled ({told}); Pillow computes them instead,"
                " which takes longer"
            )
        os.replace(built, target)
    return target


if __name__ == "__main__":
    with reporting():
        print(f"compiled image operations: {build_images()}")
        print(f"compiled operators: {build()}")
