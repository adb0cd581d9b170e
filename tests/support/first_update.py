"""Counts the code that a training enters until its first update.

    python tests/support/first_update.py
    python tests/support/first_update.py -cfg=configs/vit/vit_digits.yaml -dataset=digits -o TRAIN.MODEL_EMA True

It runs main_single_gpu.py with these flags in this process, and ends it where the optimizer begins
its first step. It prints the functions of the repository that were entered, with their files and
lines, by package. It also prints the number of files that were imported, even if none of their
functions was called. Processes that the run starts, such as the loader's workers, aren't counted.
"""

import os
import runpy
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from house import WAY

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "main_single_gpu.py"
FLAGS = ["-cfg=configs/vit/vit_digits.yaml", "-dataset=digits"]
# inspect.CO_OPTIMIZED, which functions have, and the bodies of modules and classes don't
FUNCTION = 1

entered: set[CodeType] = set()


def record(frame: FrameType, event: str, _: Any) -> None:
    """Records each entered code object; ends the process at the optimizer's first step."""
    if event != "call":
        return
    code = frame.f_code
    entered.add(code)
    if code.co_name == "step" and "/paddle/optimizer/" in code.co_filename:
        sys.setprofile(None)
        report()
        sys.stdout.flush()
        # without the end of a run, which would save and wait
        os._exit(0)


def report() -> None:
    """Prints files, functions and lines of functions for each room, for all of them, and for the
    files that a reader follows (``house.WAY``).
    """
    files: set[str] = set()
    functions: dict[str, int] = defaultdict(int)
    lines: dict[str, set[int]] = defaultdict(set)
    for code in entered:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT) or ".venv" in path.parts or path == Path(__file__):
            continue
        name = str(path.relative_to(ROOT))
        files.add(name)
        # comprehensions and lambdas are lines of the function around them
        if code.co_flags & FUNCTION and not code.co_name.startswith("<"):
            functions[name] += 1
            last = max(line for _, _, line in code.co_lines() if line)
            # as a set: a function within another one shares its lines
            lines[name].update(range(code.co_firstlineno, last + 1))
    rooms: dict[str, list[str]] = defaultdict(list)
    for name in functions:
        rooms[name.split("/")[0]].append(name)

    def print_row(title: str, names: Iterable[str]) -> None:
        names = [name for name in names if name in functions]
        total = sum(len(lines[name]) for name in names)
        print(f"{title:24} {len(names):5} {sum(functions[name] for name in names):9} {total:5}")

    print(f"{'entered':24} files functions lines")
    for room in sorted(rooms, key=lambda room: -sum(len(lines[name]) for name in rooms[room])):
        print_row(room, rooms[room])
    print_row("all", functions)
    print_row("the way (house.WAY)", WAY)
    print(f"files that are imported or entered: {len(files)}")


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        output = f"-output={folder}/run"
        sys.argv = [str(PROGRAM), *(sys.argv[1:] or FLAGS), output]
        threading.setprofile(record)
        sys.setprofile(record)
        runpy.run_path(str(PROGRAM), run_name="__main__")
