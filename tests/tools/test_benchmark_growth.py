"""tools/benchmark.py growth: exponents of known costs, the table, what is marked, and each
subject's work.
"""

import importlib.util
import json
import math
import subprocess
import sys

import numpy as np
import pytest

import tools.benchmark
from errors import InputError
from tools.benchmarks import growth
from tools.benchmarks.growth import CPU, MEASURES, PEAK, RISE, SECONDS, exponent
from tools.benchmarks.growth_measure import Cost, Growth
from tools.benchmarks.our_growth import measured

SIZES = (100, 200, 400, 800, 1600)


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (lambda size: 7.0, 0),
        (lambda size: 3e-6 * size, 1),
        (lambda size: 2 * size**2, 2),
        (lambda size: size**1.5, 1.5),
        (lambda size: 1 / size, -1),
        # 400, 800 and 1600: the start's share, 100, bends the line.
        (lambda size: 100 + size, math.log(1700 / 500) / math.log(4)),
    ],
)
def test_the_exponent_is_the_slope_of_the_logarithms(cost, expected):
    assert exponent(SIZES, [cost(size) for size in SIZES]) == pytest.approx(expected, abs=1e-12)


def test_the_exponent_is_of_the_larger_half_and_by_least_squares():
    costs = [900.0, 1.0, 4.0, 9.0, 5.0]
    slope = np.polyfit(np.log(SIZES[2:]), np.log(costs[2:]), 1)[0]
    assert exponent(SIZES, costs) == pytest.approx(slope)
    # Three at least, and all of two.
    assert exponent(SIZES[:4], costs[:4]) == pytest.approx(
        np.polyfit(np.log(SIZES[1:4]), np.log(costs[1:4]), 1)[0]
    )
    assert exponent((10, 1000), (2.0, 20.0)) == pytest.approx(0.5)
    eight = tuple(2**power for power in range(8))
    assert exponent(eight, [5.0] * 4 + [16.0, 32.0, 64.0, 128.0]) == pytest.approx(1)


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Returns a function that runs the tool in this process: (the JSON that it wrote, the lines
    that it printed).
    """

    def called(*words):
        file = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", ["tools/benchmark.py", "growth", *words, f"--json={file}"])
        tools.benchmark.main()
        return json.loads(file.read_text()), capsys.readouterr().out.splitlines()

    return called


@pytest.fixture
def known(monkeypatch):
    """Two subjects of known costs, of which each first run is disturbed; returns the order of the
    runs.
    """
    asked = []

    def ask(script, request, threads):
        subject = request["subject"]
        size = request["size"]
        disturbed = 5.0 if request not in asked else 1.0
        asked.append(request)
        seconds = size**2 / 1e4 if subject == "square" else 0.02
        memory = 100.0 if subject == "square" else size / 10
        figures = {SECONDS: disturbed * seconds, CPU: seconds / 2, PEAK: 300 + memory, RISE: memory}
        return {what: [value] for what, value in figures.items()}

    monkeypatch.setattr(growth, "ask", ask)
    for name, expected, memory in (("square", 1, None), ("flat", 0, 1)):
        found = Growth("rows", SIZES, lambda size, folder: print, expected, (2, 4), memory)
        monkeypatch.setitem(MEASURES, name, found)
    return asked


def test_each_size_takes_its_turn_and_what_grows_faster_is_marked(call, known):
    report, printed = call("square", "flat", "-repeats=3", "--threads=1")
    one_turn = [{"subject": name, "size": size} for name in ("square", "flat") for size in SIZES]
    assert known == 3 * one_turn
    square = report["growth"]["square"]
    flat = report["growth"]["flat"]
    assert square["exponents"] == pytest.approx({SECONDS: 2, CPU: 2, RISE: 0})
    assert square["expected"] == {SECONDS: 1, CPU: 1, RISE: 1}
    assert square["faster"] == [SECONDS, CPU]
    assert flat["exponents"] == pytest.approx({SECONDS: 0, CPU: 0, RISE: 1})
    assert flat["expected"] == {SECONDS: 0, CPU: 0, RISE: 1}
    assert flat["faster"] == []
    assert report["figures"]["square, 200"][SECONDS]["values"] == [20.0, 4.0, 4.0]
    assert printed[4:] == [
        "square",
        "    rows  seconds    min    max  CPU seconds  peak MB  added MB",
        "     100    1.000  1.000  5.000        0.500    400.0     100.0",
        "     200    4.000  4.000  20.00        2.000    400.0     100.0",
        "     400    16.00  16.00  80.00        8.000    400.0     100.0",
        "     800    64.00  64.00  320.0        32.00    400.0     100.0",
        "   1,600    256.0  256.0   1280        128.0    400.0     100.0",
        "exponent     2.00                       2.00               0.00",
        "expected     1.00                       1.00               1.00",
        "grows faster than expected: time, CPU time",
        "",
        "flat",
        "    rows  seconds    min    max  CPU seconds  peak MB  added MB",
        "     100    0.020  0.020  0.100        0.010    310.0     10.00",
        "     200    0.020  0.020  0.100        0.010    320.0     20.00",
        "     400    0.020  0.020  0.100        0.010    340.0     40.00",
        "     800    0.020  0.020  0.100        0.010    380.0     80.00",
        "   1,600    0.020  0.020  0.100        0.010    460.0     160.0",
        "exponent     0.00                       0.00               1.00",
        "expected     0.00                       0.00               1.00",
    ]


def test_what_lies_below_the_noise_of_a_start_does_not_grow(call, known, monkeypatch):
    def ask(script, request, threads):
        return {
            SECONDS: [request["size"] / 1e6],
            CPU: [0.0],
            PEAK: [300.0],
            RISE: [request["size"] / 1e3],
        }

    monkeypatch.setattr(growth, "ask", ask)
    report, _ = call("square", "-repeats=1")
    assert report["growth"]["square"]["exponents"] == {SECONDS: 0, CPU: 0, RISE: 0}


def test_a_subject_that_is_not_there_is_named(call, known, monkeypatch):
    with pytest.raises(
        InputError, match=r"SUBJECT is 'duplicate', expected one of .*; did you mean duplicates\?"
    ):
        call("duplicate")
    with pytest.raises(InputError, match="-repeats 0: expected at least 1"):
        call("flat", "-repeats=0")
    monkeypatch.setitem(MEASURES, "flat", MEASURES["flat"]._replace(needs="absent_package"))
    with pytest.raises(
        InputError, match="flat needs absent_package, which isn't installed; leave it out"
    ):
        call("flat")
    report, _ = call("-quick", "-repeats=1")
    assert list(report["growth"]) == [
        name
        for name, one in MEASURES.items()
        if not one.needs or importlib.util.find_spec(one.needs)
    ]
    assert {"subject": "square", "size": 4} in known


@pytest.mark.smoke
def test_a_real_subject_is_measured_in_processes_of_its_own(call):
    report, printed = call("list_models", "-quick", "-repeats=1")
    assert report["growth"]["list_models"]["sizes"] == list(MEASURES["list_models"].quick)
    for size in MEASURES["list_models"].quick:
        found = {
            what: s["values"][0] for what, s in report["figures"][f"list_models, {size}"].items()
        }
        assert found.keys() == {SECONDS, CPU, PEAK, RISE}
        assert 0 < found[SECONDS] < 60
        assert 10 < found[PEAK] < 500
        assert 0 <= found[RISE] < 0.5 * found[PEAK]
    assert "list_models" in printed


# Written out, since it is run in a process of its own: a process's ended children count, and those
# of other tests may have been larger.
TAKES_64 = """
import mmap
from tools.benchmarks.our_growth import measured
before = mmap.mmap(-1, 256 << 20)
before.write(bytes(256 << 20))
before.close()

def take_64():
    with mmap.mmap(-1, 64 << 20) as memory:
        for place in range(0, len(memory), mmap.PAGESIZE):
            memory[place] = 1

found = measured(take_64)
print(found["%s"][0], found["%s"][0])
"""


def test_what_is_measured_is_the_work_alone():
    code = TAKES_64 % (RISE, PEAK)
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    rise, peak = map(float, printed.split())
    assert 60 < rise < 80
    assert peak > rise


def test_a_work_may_return_its_costs():
    told = measured(lambda: Cost(3.5, 20.0))
    assert (told[SECONDS], told[RISE]) == ([3.5], [20.0])
    assert measured(lambda: Cost(2.5))[SECONDS] == [2.5]
    assert measured(lambda: Cost(2.5, 20.0, 0.5))[CPU] == [0.5]


def test_the_processes_that_a_work_starts_count():
    busy = measured(lambda: subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True))
    assert busy[CPU][0] > 0.1


@pytest.mark.parametrize("name", [name for name in MEASURES if "sweep" not in name])
def test_each_subject_does_its_work(name, tmp_path):
    for size in MEASURES[name].quick[:2]:
        (tmp_path / f"{size}").mkdir()
        MEASURES[name].prepare(size, tmp_path / f"{size}")()
    sizes = MEASURES[name].sizes
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) >= 3
