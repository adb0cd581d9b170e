"""A program that the warm server runs behaves as under Python, to its last line. Programs that
can't are left to Python.
"""

import functools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import warm

# Prints what a program sees of its start. Of the environment, what packages set at their import is
# left out.
SEEN = """
import os, signal, sys, warnings
print([path for path in sys.path if not path.endswith("_vendor")])  # setuptools', which Paddle 2.6 imports
print(__name__, __file__, sys.argv, os.getcwd(), sys.flags, sys.warnoptions, os.umask(0o22))
print({name: value for name, value in os.environ.items() if name in ("GIVEN", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")})
print(sorted(os.listdir("/proc/self/fd"))[:3], sys.stdin.read(), signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
print([signal.getsignal(number).__class__.__name__ for number in (signal.SIGINT, signal.SIGTERM)])
print("told", file=sys.stderr)
"""


def both(folder, *words, **how):
    """Runs a program by Python and by the warm server. Returns (exit status, stdout, stderr) of
    each.
    """
    how |= {"env": warm.environment() | how.get("env", {}), "timeout": 120}
    runs = [
        subprocess.run([python, *words], cwd=folder, capture_output=True, text=True, **how)
        for python in (sys.executable, warm.python())
    ]
    return [(run.returncode, run.stdout, run.stderr) for run in runs]


@pytest.mark.smoke
def test_a_program_sees_the_start_that_it_was_given(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "seen.py").write_text(SEEN)
    (tmp_path / "link.py").symlink_to("below/seen.py")
    given = {"GIVEN": "a=b\nc", "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore:this"}
    for name in ("below/seen.py", "link.py"):
        ignore = lambda: (signal.signal(signal.SIGHUP, signal.SIG_IGN), os.umask(0o27))  # noqa: E731
        real, ours = both(
            tmp_path, name, "-x", "é ' \n", env=given, input="asked", preexec_fn=ignore
        )
        assert ours == real
        assert (real[0], real[2], "asked True\n" in real[1]) == (0, "told\n", True)
    (tmp_path / "module.py").write_text("import sys; print(sys.argv[1:], sys.path[0], __name__)")
    real, ours = both(tmp_path, "-m", "module", "word")
    assert ours == real == (0, f"['word'] {tmp_path} __main__\n", "")


@pytest.mark.parametrize(
    ("code", "status", "printed", "errors"),
    [
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('no')", 1, "", "no\n"),
        ("import sys; sys.exit(None)", 0, "", ""),
        ("import os; os._exit(7)", 7, "", ""),
        ("import os; os.kill(os.getpid(), 9)", -9, "", ""),
        ("import os; os.kill(os.getpid(), 15)", -15, "", ""),
        ("raise KeyboardInterrupt", -2, "", None),
        ("{}['absent']", 1, "", None),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        ("import threading, time; threading.Timer(0.2, print, ['late']).start()", 0, "late\n", ""),
    ],
)
def test_it_ends_as_python_ends_it(tmp_path, code, status, printed, errors):
    real, ours = both(tmp_path, "-c", code)
    assert ours[:2] == real[:2] == (status, printed)
    assert ours[2].splitlines()[-1:] == real[2].splitlines()[-1:]
    assert errors is None or ours[2] == errors


def test_its_ranks_are_warm_and_it_has_what_paddles_import_sets(tmp_path):
    (tmp_path / "spawn.py").write_text(
        "import multiprocessing, os, sys\nimported = 'paddle' in sys.modules\n"
        "def tell(queue):\n    parent = multiprocessing.parent_process().pid\n"
        "    queue.put((os.environ.get('OMP_NUM_THREADS'), imported, parent))\n"
        "if __name__ == '__main__':\n    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.SimpleQueue()\n    rank = context.Process(target=tell, args=(queue,))\n    rank.start()\n"
        "    threads, warm, parent = queue.get()\n    rank.join()\n"
        "    print(threads, warm, parent == os.getpid(), rank.exitcode)\n"
    )
    _, ours = both(tmp_path, "spawn.py", env={"PYTHONWARNINGS": ""})
    assert ours == (0, "1 True True 0\n", "")


def test_a_program_that_it_starts_is_warm(tmp_path):
    child = "import os, sys; print('paddle' in sys.modules, os.environ['OMP_NUM_THREADS'])"
    (tmp_path / "child.py").write_text(child)
    start = "import subprocess, sys; subprocess.run([sys.executable, *{}], check=True)"
    for words, there in ((["child.py"], True), (["-c", child], False)):
        (tmp_path / "parent.py").write_text(start.format(words))
        done = subprocess.run(
            [warm.python(), "parent.py"],
            cwd=tmp_path,
            env=warm.environment(),
            capture_output=True,
            text=True,
        )
        assert (done.stdout, done.stderr) == (f"{there} 1\n", "")


@pytest.mark.parametrize(
    "early", [{"FLAGS_check_nan_inf": "1"}, {"OMP_NUM_THREADS": "2"}, {"RANK": "0"}]
)
def test_what_is_read_before_a_programs_first_line_is_left_to_python(tmp_path, early):
    asked = ("-c", "import sys; print('paddle' in sys.modules)")
    assert both(tmp_path, *asked, env=early) == [(0, "False\n", "")] * 2
    assert [run[1] for run in both(tmp_path, *asked)] == ["False\n", "True\n"]
    limited = "ulimit -n 500; exec python -c \"import sys; print('paddle' in sys.modules)\""
    done = subprocess.run(
        ["sh", "-c", limited], env=warm.environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 5), (signal.SIGKILL, -9)])
def test_a_signal_to_it_is_the_programs(tmp_path, number, status):
    code = "import os, signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(5))\n"
    code += "print(os.getpid(), flush=True)\ntime.sleep(60)"
    words = [warm.python(), "-c", code]
    with subprocess.Popen(
        words, env=warm.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        program = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(30) == status
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{program}"):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_threads_that_ask_at_first_share_a_server(monkeypatch):
    started = []

    @functools.cache
    def start():
        time.sleep(0.1)
        started.append(f"/folder{len(started)}")
        return SimpleNamespace(name=started[-1])

    monkeypatch.setattr(warm, "_started", start)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: warm.python(), range(2))) == ["/folder0/python"] * 2
    assert started == ["/folder0"]
