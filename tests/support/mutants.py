"""Finds tests that can't fail: it changes a file at random places, one at a time, and runs the
file's tests.

    .venv/bin/pip install cosmic-ray==8.7.0
    .venv/bin/python tests/support/mutants.py loading/samplers.py weights/fit.py
    .venv/bin/python tests/support/mutants.py loading/samplers.py -n 40 -seed 1

tests/mutants.yaml names the tests of each file and the number of places, and says why the survivors
of earlier runs have no effect. cosmic-ray finds the possible changes. Each place is drawn once.
Types aren't changed, because nothing reads them, and ``==`` doesn't become ``is``, which is the
same for small numbers.

The tests run on a copy of the working tree, each time in a fork of this process, which has imported
the modules that take long. A change is killed if a test fails or takes much longer than before. The
output has each change that survived. Then comes a line with the file, the number of killed changes,
those that were killed by time alone, and the seconds.
"""

import argparse
import ast
import contextlib
import difflib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

# as in conftest.py, before Paddle is imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import paddle
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
# Paddle is imported for the forks.
assert paddle.__version__
IDENTITY = ("_Is", "_IsNot")
# bytes of address space that the tests of a mutant may take
MEMORY = 12 << 30


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns the places of annotations, each from its beginning to its end."""
    nodes = [
        node
        for top in ast.walk(ast.parse(source))
        for node in (getattr(top, "annotation", None), getattr(top, "returns", None))
    ]
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes if n]


def places(source: str) -> list[tuple[tuple[int, int], list[tuple[str, int]]]]:
    """Returns each place that can be changed, with its changes. A change is cosmic-ray's operator
    and the number of its occurrence.
    """
    types = annotations(source)
    found = {}
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(cosmic_ray.plugins.operator_names()):
        operator = cosmic_ray.plugins.get_operator(name)
        if operator.arguments() or name.endswith(IDENTITY):
            continue
        spans = [span for node in nodes for span in operator().mutation_positions(node)]
        for occurrence, (start, _) in enumerate(spans):
            if not any(first <= start < last for first, last in types):
                found.setdefault(start, []).append((name, occurrence))
    return sorted(found.items())


def drawn(source: str, count: int, seed: str) -> list[str]:
    """Returns up to ``count`` changed sources, each changed at another place. They depend on the
    source and ``seed`` alone.
    """
    generator = random.Random(seed)
    chosen = places(source)
    mutants = []
    generator.shuffle(chosen)
    for _, changes in chosen:
        name, occurrence = generator.choice(changes)
        # cosmic-ray can't replace ``except module.Error``.
        with contextlib.suppress(AttributeError):
            mutants.append(mutate_code(source, cosmic_ray.plugins.get_operator(name)(), occurrence))
    return mutants[:count]


def passes(copy: Path, tests: list[str], limit: float) -> bool | None:
    """Returns whether the tests pass in the copy; None if they take more than ``limit`` seconds.
    Their output goes to mutants.txt there.
    """
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        output = os.open(copy / "mutants.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(copy)
        # Without the folder of this program, so that modules come from the copy.
        sys.path[:] = [path for path in sys.path if path != str(ROOT / "tests")]
        flags = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={copy / 'tmp'}"]
        os._exit(pytest.main([*flags, *tests]))
    end = time.monotonic() + limit
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        # Processes that it started are killed, too.
        os.killpg(child, signal.SIGKILL)
    if not done[0]:
        os.waitpid(child, 0)
    return done[1] == 0 if done[0] else None


def survivors(
    file: str, tests: list[str], count: int, seed: int, copy: Path
) -> tuple[list[str], int, int]:
    """Returns the changed sources that survived, the number of all changed sources, and the number
    of those whose tests took too long.
    """
    path = copy / file
    source = path.read_text(encoding="utf-8")
    start = time.monotonic()
    if not passes(copy, tests, 600):
        sys.exit(f"{(copy / 'mutants.txt').read_text()}\nerror: the tests fail without any change")
    limit = 10 + 4 * (time.monotonic() - start)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        # Python compares the times of source and compiled file in whole seconds, which is too
        # coarse.
        compiled.unlink()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "mutants"
    sys.dont_write_bytecode = True
    mutants = drawn(source, count, f"{seed} {file}")
    outcomes = []
    for mutant in mutants:
        path.write_text(mutant, encoding="utf-8")
        outcomes.append(passes(copy, tests, limit))
    path.write_text(source, encoding="utf-8")
    left = [mutant for mutant, passed in zip(mutants, outcomes, strict=True) if passed]
    return left, len(mutants), outcomes.count(None)


def main() -> None:
    rows = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        choices=rows,
        help="what is changed: a row of mutants.yaml",
    )
    parser.add_argument("-n", type=int, help="at how many places, one at a time (the row's number)")
    parser.add_argument("-seed", type=int, default=0, help="which (0)")
    given = parser.parse_args()
    for file in given.files:
        start = time.monotonic()
        row = rows[file]
        tests = [f"tests/{name}" for name in row["tests"].split()]
        count = given.n or row["places"]
        with tempfile.TemporaryDirectory(prefix="mutants") as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(
                ROOT,
                copy,
                ignore=shutil.ignore_patterns(".*", "__pycache__", "output", "log", "logs"),
            )
            source = (copy / file).read_text(encoding="utf-8").splitlines()
            left, tested, late = survivors(file, tests, count, given.seed, copy)
        for mutant in left:
            print(
                *difflib.unified_diff(
                    source, mutant.splitlines(), file, "survived", n=0, lineterm=""
                ),
                sep="\n",
            )
        seconds = time.monotonic() - start
        print(
            f"{file}: {tested - len(left)} of {tested} killed ({late} by time) in {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
