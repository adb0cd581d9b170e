"""What tools/benchmark.py measures with: figures, ratios and table by value, rates, a step's parts."""

import argparse
import json
import subprocess
import sys

import pytest

from errors import InputError, RunError
from tools.benchmarks import loading, measure, our_host, rates
from tools.benchmarks.measure import Benchmark, Ratio

# ------------------------------------------------------------ figures


def test_the_sides_take_turns_and_each_adds_to_its_lists():
    made = []

    def side(name, *values):
        rows = iter(values)

        def run():
            made.append(name)
            return next(rows)

        return run

    kinds = {
        "a": side("a", {"x": [1.0], "y": [5.0, 6.0]}, {"x": [2.0]}),
        "b": side("b", {"x": [3.0]}, {"x": [4.0]}),
    }
    assert measure.alternate(kinds, 2) == {
        "a": {"x": [1.0, 2.0], "y": [5.0, 6.0]},
        "b": {"x": [3.0, 4.0]},
    }
    assert made == ["a", "b", "a", "b"]


def test_ratios_are_taken_run_by_run_and_the_table_says_what_the_file_holds(tmp_path, capsys):
    runs = {"ours": iter([10.0, 30.0, 2000.0]), "theirs": iter([20.0, 20.0, 1000.0])}
    kinds = {kind: lambda values=values: {"speed": [next(values)]} for kind, values in runs.items()}
    compared = [
        Ratio("speed", "ours", "theirs"),
        Ratio("speed", "ours", "theirs", 0.5, "efficiency"),
    ]
    arguments = argparse.Namespace(what="train", repeats=3, json=tmp_path / "found.json")
    measure.measure(
        Benchmark("a title", kinds, {"speed": "images/s"}, compared, {"torch": "2"}), arguments
    )
    found = json.loads((tmp_path / "found.json").read_text())
    values = {"median": 30.0, "min": 10.0, "max": 2000.0, "values": [10.0, 30.0, 2000.0]}
    assert found["figures"]["ours"] == {"speed": {"unit": "images/s"} | values}
    pair = {"of": "ours", "over": "theirs"}
    assert found["ratios"] == [
        {"what": "speed", **pair, "median": 1.5, "min": 0.5, "max": 2.0, "values": [0.5, 1.5, 2.0]},
        {
            "what": "efficiency",
            **pair,
            "median": 0.75,
            "min": 0.25,
            "max": 1.0,
            "values": [0.25, 0.75, 1.0],
        },
    ]
    assert (found["benchmark"], found["title"], found["peer_versions"]) == (
        "train",
        "a title",
        {"torch": "2"},
    )
    assert found["machine"].keys() == {"cpu", "cores", "load"}
    assert {"python", "numpy", "pillow"} < found["versions"].keys()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "train: a title"
    assert printed[2].endswith(", their torch 2")
    assert printed[4:] == [
        "                                 median    min    max  of",
        "ours           speed (images/s)   30.00  10.00   2000   3",
        "theirs         speed (images/s)   20.00  20.00   1000   3",
        "ours / theirs  speed              1.500  0.500  2.000   3",
        "ours / theirs  efficiency         0.750  0.250  1.000   3",
    ]


def test_a_rate_counts_neither_the_warm_up_nor_what_comes_after(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(rates.time, "perf_counter", lambda: clock[0])

    def batches(count):
        for _ in range(count):
            clock[0] += 0.5
            yield 8

    # The clock starts with the second batch, at 1.0; 24 images are there with the fifth, at 2.5.
    assert rates.images_per_second(batches(9), 16, 20, lambda: 3 * clock[0]) == (24 / 1.5, 24 / 4.5)
    with pytest.raises(ValueError, match="end before 16 images to warm up and 20"):
        rates.images_per_second(batches(4), 16, 20, lambda: 0.0)


def test_workers_cpu_is_that_of_living_children():
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time(), flush=True); input()"
    before = rates.workers_cpu()
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **streams) as child:
        told = float(child.stdout.readline())
        assert rates.workers_cpu() - before == pytest.approx(told, abs=0.05)
        child.communicate("\n")
    assert rates.workers_cpu() == pytest.approx(before, abs=0.05)


def test_a_stopwatch_counts_a_step_from_a_batch_to_the_next():
    stopwatch = our_host.Stopwatch()
    busy = stopwatch.wrap("part", lambda: sum(range(20000)))
    for index, batch in enumerate(stopwatch.batches(iter("abc"))):
        assert batch == "abc"[index]
        busy()
        busy()
    assert len(stopwatch.steps) == 3
    for step in stopwatch.steps:
        assert list(step) == [our_host.WHOLE, our_host.WHOLE_WALL, "part", our_host.REST]
        assert step["part"] + step[our_host.REST] == pytest.approx(step[our_host.WHOLE])
        assert 0 < step["part"] < step[our_host.WHOLE]


def test_a_run_that_fails_is_told_by_its_last_line(capsys):
    fail = "import sys; print('a\\nerror: b', file=sys.stderr); sys.exit({})"
    with pytest.raises(InputError, match=r"^b$"):
        measure.run([sys.executable, "-c", fail.format(2)], None)
    with pytest.raises(RunError, match=r"^-c ended with status 1: error: b$"):
        measure.run([sys.executable, "-c", fail.format(1)], None)
    assert capsys.readouterr().err == "a\nerror: b\n\n"
    assert measure.environment(3)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in measure.environment(None)


def test_workers_have_images_to_load_until_the_clock_stops(monkeypatch, tmp_path):
    """What they load ahead isn't measured where it begins; where it ends nothing may stand in for
    it.
    """
    counts = []

    def stop(source, folder, count):
        counts.append(count)
        raise InputError("enough")

    monkeypatch.setattr(loading, "_list", stop)
    asked = {
        "workers": 2,
        "images": 100,
        "batch_size": 10,
        "data_path": str(tmp_path),
        "o": [],
        "against": [],
    }
    with pytest.raises(InputError, match="enough"):
        loading.loader(
            argparse.Namespace(**asked, auto_augment="", color_jitter=0.0, evaluation=False)
        )
    assert counts == [256 + 100 + 4 * 2 * 10]
