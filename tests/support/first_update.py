"""Counts the code that a training enters until its first update.

    python tests/support/first_update.py
    python tests/support/first_update.py -cfg=configs/vit/vit_digits.yaml -dataset=digits -o TRAIN.MODEL_EMA True

It runs main_single_gpu.py with these flags in this process, and ends it where the optimizer begins
its first step. It prints the files of the repository of which any code ran, and the functions that
were entered with their lines, by package. What a module does when it is imported counts as its file
alone. Processes that the run starts, such as the loader's workers, aren't counted.
"""

import os
import runpy
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

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
    """Prints files, functions and lines of functions for each room, and for all of them."""
    files: dict[str, set[str]] = defaultdict(set)
    functions: dict[str, int] = defaultdict(int)
    lines: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for code in entered:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT) or ".venv" in path.parts or path == Path(__file__):
            continue
        name = str(path.relative_to(ROOT))
        room = name.split("/")[0]
        files[room].add(name)
        if code.co_flags & FUNCTION:
            functions[room] += 1
            last = max(line for _, _, line in code.co_lines() if line)
            # as a set: a function within another one shares its lines
            lines[room].update((name, line) for line in range(code.co_firstlineno, last + 1))
    print(f"{'room':24} files functions lines")
    for room in sorted(files, key=lambda room: -len(lines[room])):
        print(f"{room:24} {len(files[room]):5} {functions[room]:9} {len(lines[room]):5}")
    totals = (sum(map(len, files.values())), sum(functions.values()), sum(map(len, lines.values())))
    print(f"{'all':24} {totals[0]:5} {totals[1]:9} {totals[2]:5}")


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        output = f"-output={folder}/run"
        sys.argv = [str(PROGRAM), *(sys.argv[1:] or FLAGS), output]
        threading.setprofile(record)
        sys.setprofile(record)
        runpy.run_path(str(PROGRAM), run_name="__main__")
