"""What stands before a program's other imports, which take a second: a signal, or a package that isn't installed, ends
it with one line. It imports next to nothing.
"""

import os
import signal
import sys
from types import TracebackType

NOT_BEGUN = "stopped by {} before the first step: nothing to save"
# What make install installs, by the names under which it is imported.
NEEDED = ("numpy", "paddle", "yaml", "yacs", "PIL", "simplejpeg", "cykooz_resizer", "safetensors", "sklearn")
NEEDED += ("matplotlib", "threadpoolctl", "tqdm")
_HERE = os.path.dirname(os.path.realpath(__file__))
_FOLDER, _PROGRAM = os.path.split(os.path.realpath(getattr(sys, "argv", [""])[0]))
_SPEAKER = None if "--multiprocessing-fork" in getattr(sys, "orig_argv", []) else os.getpid()  # for what it starts, too


def end_at_once(number: int, _: object) -> None:
    """Ends this process, as a signal's handler: nothing has begun that could be saved."""
    if os.getpid() == _SPEAKER:
        os.write(2, f"{NOT_BEGUN.format(signal.Signals(number).name)}\n".encode())
    os._exit(128 + number)


def stop_at_once() -> None:
    """From now on SIGTERM and SIGINT end this process. SIGUSR1, which asks for a save, is ignored: it would kill."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_at_once)
    signal.signal(signal.SIGINT, end_at_once)


def missing(error: BaseException) -> str:
    """Returns the line that says what isn't installed, where that is why ``error`` was raised; otherwise nothing."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in NEEDED:
        return ""
    from importlib.util import find_spec

    names = [name for name in NEEDED if not find_spec(name)]
    lacks = ", ".join(names[:3]) + f" and {len(names) - 3} more packages" * (len(names) > 3)
    script = ", or sh run_train_multi.sh ..." if _PROGRAM == "main_multi_gpu.py" else ""
    how = f".venv/bin/python {os.path.relpath(sys.argv[0], _HERE)} ...{script}"
    return f"error: {sys.executable} lacks {lacks}; in {_HERE} run make install once, then {how}"


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if line := missing(error):
        print(line, file=sys.stderr, flush=True)
        os._exit(2)
    if isinstance(error, KeyboardInterrupt):  # a tool's imports take a second, too
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)
    sys.__excepthook__(kind, error, trace)


if _FOLDER == _HERE and _PROGRAM.startswith("main_"):
    stop_at_once()
if _FOLDER in (_HERE, os.path.join(_HERE, "tools"), os.path.join(_HERE, "examples")):
    sys.excepthook = _tell  # for what is imported outside of ``errors.reported``
