"""Tests that can't fail: changes a file at random places, one at a time, and runs the tests that
mirror it.

    .venv/bin/pip install cosmic-ray==8.7.0
    .venv/bin/python tests/support/mutants.py loading/samplers.py weights/fit.py
    .venv/bin/python tests/support/mutants.py loading/samplers.py -n 40 -seed 1

tests/mutants.yaml says which tests, at how many places, and what earlier runs left. cosmic-ray says
what may be changed, and how; a place is drawn once. Types aren't changed: nothing reads them.
Neither is ``==`` made ``is``, which is the same for small numbers. The tests run on a copy of the
working tree, each time in a fork of this process, which has imported what takes long. A test that
fails, or takes much longer than before, kills the mutant. Printed is each change that survived,
then a line: the file, how many were killed, by time alone among them, how long it took.
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

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as in conftest.py, before Paddle
import paddle
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
assert paddle.__version__  # imported for the forks
IDENTITY = ("_Is", "_IsNot")
MEMORY = 12 << 30  # bytes of addresses that a mutant may take


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The places, from and to, where types stand."""
    nodes = [
        node
        for top in ast.walk(ast.parse(source))
        for node in (getattr(top, "annotation", None), getattr(top, "returns", None))
    ]
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes if n]


def places(source: str) -> list[tuple[tuple[int, int], list[tuple[str, int]]]]:
    """Returns each place that can be changed, with its changes: cosmic-ray's operator, and which of
    its occurrences.
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
    """Returns up to ``count`` changed sources, each at another place: a pure function of the source
    and ``seed``.
    """
    generator = random.Random(seed)
    chosen = places(source)
    mutants = []
    generator.shuffle(chosen)
    for _, changes in chosen:
        name, occurrence = generator.choice(changes)
        # cosmic-ray finds no way to replace ``except module.Error``
        with contextlib.suppress(AttributeError):
            mutants.append(mutate_code(source, cosmic_ray.plugins.get_operator(name)(), occurrence))
    return mutants[:count]


def passes(copy: Path, tests: list[str], limit: float) -> bool | None:
    """Whether the tests pass in the copy; None: not within ``limit`` seconds. What they print goes
    to a file in it.
    """
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        output = os.open(copy / "mutants.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(copy)
        # this program's own
        sys.path[:] = [path for path in sys.path if path != str(ROOT / "tests")]
        os._exit(
            pytest.main(
                [
                    "-x",
                    "-p",
                    "no:cacheprovider",
                    "-p",
                    "no:xdist",
                    "--basetemp",
                    str(copy / "tmp"),
                    *tests,
                ]
            )
        )
    end = time.monotonic() + limit
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # whom it started, too
    if not done[0]:
        os.waitpid(child, 0)
    return done[1] == 0 if done[0] else None


def survivors(
    file: str, tests: list[str], count: int, seed: int, copy: Path
) -> tuple[list[str], int, int]:
    """Returns the changed sources that the tests let pass, of how many, and how many others took
    too long.
    """
    path = copy / file
    source = path.read_text(encoding="utf-8")
    start = time.monotonic()
    if not passes(copy, tests, 600):
        sys.exit(f"{(copy / 'mutants.txt').read_text()}\nerror: the tests fail without any change")
    limit = 10 + 4 * (time.monotonic() - start)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()  # Python goes by its seconds
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "mutants", True
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
