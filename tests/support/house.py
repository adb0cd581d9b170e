"""Prints what can be counted of how the code reads: ``make house``.

    python tests/support/house.py             # every count
    python tests/support/house.py --rooms     # and the code of each room

Lines of code are lines that are neither blank nor a docstring's. What a training enters until its
first update is counted by tests/support/first_update.py.
"""

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A line of so many columns counts as long.
LONG = 100
NOT_SHIPPED = ("tests", "examples", "docs")
# Modules that declare or handle keys. Those that read PaddleViT's files or the command line don't
# count, and neither do suggestions.py and corruptions.py, which are mostly lists of names.
CONFIGURATION = (
    "config.py",
    *(
        f"settings/{name}.py"
        for name in (
            "architectures", "configuration", "conflicts", "documents", "explaining", "idle", "keys", "merging",
            "names", "needs", "plain", "registry", "signatures", "values",
        )
    ),
)  # fmt: skip
# The way from the command to the first update, in the order in which a reader meets it.
WAY = (
    "main_single_gpu.py", "main_multi_gpu.py", "training/command_line.py", "config.py",
    "datasets.py", "loading/workers.py", "loading/transforms/image.py",
    "loading/transforms/batch.py", "models/__init__.py", "models/vit.py", "models/base.py",
    "training/engine.py", "training/setup.py", "training/classification.py",
)  # fmt: skip


def tracked(pattern: str) -> list[str]:
    """Returns the names of the repository's files that match a pattern of git's."""
    command = ["git", "-C", str(ROOT), "ls-files", pattern]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def docstring_lines(tree: ast.Module) -> set[int]:
    """Returns the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def count_file(source: str) -> Counter[str]:
    """Counts the lines of code, and among them long ones, comments and parallel assignments."""
    tree = ast.parse(source)
    docstrings = docstring_lines(tree)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }
    counts: Counter[str] = Counter()
    for number, line in enumerate(source.splitlines(), 1):
        if not line.strip() or number in docstrings:
            continue
        counts["code"] += 1
        counts["long"] += len(line) >= LONG
        counts["comments"] += number in comments
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            counts["parallel"] += isinstance(node.value, ast.Tuple)
    return counts


def room(name: str) -> str:
    """Returns the first part of a file's path."""
    return name.partition("/")[0]


def lines_of(names: tuple[str, ...]) -> int:
    """Returns how many lines the files have."""
    return sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in names)


def subjects() -> list[int]:
    """Returns the lengths of the subjects of the last 100 commits."""
    command = ["git", "-C", str(ROOT), "log", "-100", "--no-merges", "--format=%s"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [len(line) for line in done.stdout.splitlines()]


def config_copies() -> int:
    """Returns how often the configuration is replaced between main() and the first step: calls of
    ``with_values`` in the modules that prepare a run.
    """
    modules = ["main_multi_gpu.py", "datasets.py", "training/setup.py", "models/__init__.py"]
    modules += ["models/pretrained.py", *tracked("loading/*.py")]
    return sum(
        len(re.findall(r"\bwith_values\(", (ROOT / name).read_text(encoding="utf-8")))
        for name in modules
    )


def main() -> None:
    rooms: dict[str, Counter[str]] = {}
    for name in tracked("*.py"):
        counts = count_file((ROOT / name).read_text(encoding="utf-8"))
        rooms.setdefault(room(name), Counter()).update(counts)
    shipped = sum((rooms[name] for name in rooms if name not in NOT_SHIPPED), Counter())
    if "--rooms" in sys.argv:
        rows = [*sorted(rooms.items()), ("without tests and examples", shipped)]
        for name, counts in rows:
            print(
                f"{name:27} {counts['code']:7,} lines"
                f"{1000 * counts['parallel'] / counts['code']:7.1f} parallel assignments per 1,000"
                f"{100 * counts['long'] / counts['code']:6.1f} % long"
                f"{100 * counts['comments'] / counts['code']:6.1f} % comments"
            )
    lengths = subjects()
    print(f"files and lines to the first update     {len(WAY)}, {lines_of(WAY):,}")
    print(f"Python of configuration                 {lines_of(CONFIGURATION):,} lines")
    print(f"copies of the configuration             {config_copies()}")
    print(
        "parallel assignments per 1,000 lines    "
        f"{1000 * shipped['parallel'] / shipped['code']:.1f}"
    )
    print(
        f"lines of {LONG} columns and more           {100 * shipped['long'] / shipped['code']:.1f} %"
    )
    print(
        "lines that are comments of their own    "
        f"{100 * shipped['comments'] / shipped['code']:.1f} %"
    )
    print(f"entries in the root                     {len(set(map(room, tracked('*'))))}")
    print(f"median of a commit's subject            {statistics.median(lengths):g} characters")
    sys.stdout.flush()
    subprocess.run([sys.executable, str(ROOT / "tests/support/first_update.py")], check=True)


if __name__ == "__main__":
    main()
