"""Sweeps of many points: what is read and written once for each, what Optuna knows, and what is
told meanwhile.
"""

import importlib.util
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.sweep_sessions import DRAWN, session_of, sweep_of

from config import default_values, get_config
from errors import InputError
from settings.configuration import leaves
from settings.documents import read_yaml
from tools.sweep import Progress
from training.command_line import config_from_arguments
from training.sweeps import points as sweep_points
from training.sweeps import results
from training.sweeps.points import Suggestions, check, plan_points


def test_the_commands_file_is_read_once_for_all_points(tmp_path, monkeypatch):
    sweep = sweep_of(tmp_path, keys=DRAWN, method="random", runs=30)
    read = []
    monkeypatch.setattr(
        "settings.merging.read_yaml", lambda path: [read.append(path), read_yaml(path)][1]
    )
    told = []
    assert check(sweep, plan_points(sweep), lambda: told.append(1)) == "acc1"
    assert [path.name for path in read] == ["vit_digits.yaml"]
    assert len(told) == 30
    # What one command line asks for leaves nothing behind for the next.
    kept = {}
    first, second, third = (
        config_from_arguments(sweep.program, sweep.arguments("0", point, None), read=kept)
        for point in (
            {"TRAIN.BASE_LR": "0.5"},
            {"TRAIN.OPTIMIZER.BETAS": "[0.5, 0.6]"},
            {"TRAIN.BASE_LR": "0.5"},
        )
    )
    assert (first.TRAIN.BASE_LR, second.TRAIN.OPTIMIZER.BETAS) == (0.5, [0.5, 0.6])
    assert second.TRAIN.BASE_LR == get_config("vit_digits").TRAIN.BASE_LR
    assert (first, first.origins) == (third, third.origins)
    assert second.TRAIN.OPTIMIZER.BETAS != third.TRAIN.OPTIMIZER.BETAS


def sections(tree):
    return 1 + sum(sections(value) for value in tree.values() if isinstance(value, dict))


def test_the_check_of_a_point_repeats_nothing_that_all_points_share(tmp_path):
    sweep = sweep_of(tmp_path, keys=DRAWN, method="random", runs=21)
    called = Counter()
    points = plan_points(sweep)
    check(sweep, points[:1])

    def count(frame, event, _):
        if event == "call":
            called[frame.f_code] += 1

    sys.setprofile(count)
    check(sweep, points[1:])
    sys.setprofile(None)
    assert called[Path.open.__code__] == 0
    # The whole tree, and TRAIN's keys, which tell whether images are mixed; and the file, once.
    walk = sections(get_config("vit_digits")) + sections(get_config().TRAIN)
    assert 20 * walk <= called[leaves.__code__] < 21 * walk + 10
    # Less than five calls for each key of each point.
    assert sum(called.values()) < 20 * 5 * len(default_values())


class Drawing:
    """Stands for Optuna: random points, and how many results each call was told."""

    def __init__(self, sweep):
        self.points = plan_points(sweep._replace(method="random"))
        self.scores = []

    def next(self, points, scores, count):
        self.scores.append(list(scores))
        return self.points[len(points) : len(points) + count]


def test_each_result_is_read_once_and_each_point_written_once(tmp_path, monkeypatch):
    sweep = sweep_of(tmp_path, keys=DRAWN, method="random", runs=40, seeds=[0, 1])._replace(
        method="optuna"
    )
    monkeypatch.setattr("tools.sweep.Suggestions", Drawing)
    looked = []
    written = []
    read = []
    monkeypatch.setattr(
        "settings.merging.read_yaml", lambda path: [read.append(path), read_yaml(path)][1]
    )
    outcome = results.outcome
    writing_whole = results.writing_whole
    monkeypatch.setattr(
        results, "outcome", lambda *words: [looked.append(words[1]), outcome(*words)][1]
    )
    monkeypatch.setattr(
        results, "writing_whole", lambda file: [written.append(file.name), writing_whole(file)][1]
    )
    lock = results.lock(sweep.output)
    session, ran = session_of(sweep, monkeypatch, fails=["0007_seed1"])
    session.run(lock)
    assert len(ran) == 80
    assert [path.name for path in read] == ["vit_digits.yaml"]
    # Before a run starts, and when it has ended.
    assert sorted(looked) == sorted(2 * ran)
    assert written == ["sweep.json"]
    lines = (sweep.output / "points.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == session.points
    assert len(lines) == 40
    scores = session.suggestions.scores
    assert [len(told) for told in scores] == list(range(0, 41, 2))
    assert scores[-1][:3] == [
        results.mean(session.rows[2 * point : 2 * point + 2]) for point in range(3)
    ]
    # The same again: what failed, and nothing else.
    looked.clear()
    again, ran = session_of(sweep, monkeypatch)
    assert again.points == session.points
    assert len(looked) == 80
    again.run(lock)
    assert ran == ["0007_seed1"]
    os.close(lock)


def test_half_a_point_is_left_out_and_written_over(tmp_path):
    sweep = sweep_of(tmp_path, keys=DRAWN, method="random", runs=5)
    points = plan_points(sweep)
    sweep = sweep._replace(method="optuna")
    sweep.output.mkdir()
    results.record(sweep, points[:1])  # as earlier releases kept them
    results.add(sweep, points[1:3])
    with open(sweep.output / "points.jsonl", "a") as file:
        file.write('{"TRAIN.BASE_LR": "0.0')
    assert results.read_points(sweep, []) == points[:3]
    results.add(sweep, points[3:])
    assert results.read_points(sweep, []) == points
    assert (sweep.output / "points.jsonl").read_text().count("\n") == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]\n", "points.jsonl: its points.0. is .., expected a dictionary"),
        ("{\n", r"points.jsonl: can't be read as a sweep's points \(JSONDecodeError"),
        (
            '{"TRAIN.BASE_LR": "0.001"}\n',
            r"points.jsonl: its points\[0\].TRAIN.WEIGHT_DECAY is missing",
        ),
        (
            '{"TRAIN.BASE_LR": "1", "TRAIN.WEIGHT_DECAY": "0"}\n',
            "TRAIN.BASE_LR is '1', expected a value from",
        ),
        (
            "{}\n" * 10_001,
            "it has 10001 points, and sweep.json 0: a sweep has at most 10000",
        ),
    ],
)
def test_added_points_that_no_sweep_wrote_are_refused(text, message, tmp_path):
    sweep = sweep_of(tmp_path, keys=DRAWN, method="random", runs=5)._replace(method="optuna")
    sweep.output.mkdir()
    results.record(sweep, [])
    (sweep.output / "points.jsonl").write_text(text)
    with pytest.raises(InputError, match=f"{message}.*; remove it to start over"):
        results.read_points(sweep, [])


def test_what_takes_seconds_tells_how_far_it_is(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    told = Progress(4000, "results are read")
    for _ in range(1, 3001):
        clock[0] += 0.002
        told()
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split()[0].replace(",", "")) // 1000 for line in lines] == [1, 2]
    assert lines[0].endswith(" of 4,000 results are read")


def test_a_picture_of_many_words_labels_some_of_them(tmp_path, monkeypatch):
    labels = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.set_xticks", lambda self, *words: labels.append(words)
    )
    sweep = sweep_of(tmp_path, keys={"TAG": [f"t{place}" for place in range(1000)]})
    rows = [
        results.Row(f"{index:04}", point, None, results.Outcome(1.0, 1), 0)
        for index, point in enumerate(plan_points(sweep))
    ]
    sweep.output.mkdir()
    results.write(rows, sweep, "acc1")
    assert labels == [(list(range(0, 1000, 25)), [f"t{place}" for place in range(0, 1000, 25)])]


# ------------------------------------------------------------------- Optuna


def test_optuna_knows_the_newest_points_and_the_best_of_the_others(tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="the extra sweep isn't installed")
    for name, value in (("_NEWEST", 20), ("_NEWEST_STEP", 10), ("_BEST", 3)):
        monkeypatch.setattr(sweep_points, name, value)
    sweep = sweep_of(tmp_path, keys=DRAWN, method="random", runs=60)._replace(method="optuna")
    points = plan_points(sweep._replace(method="random"))
    scores = [None if index % 7 == 0 else float(index * 37 % 59) for index in range(60)]

    def known(suggestions):
        trials = suggestions.study.get_trials(
            states=(suggestions.optuna.trial.TrialState.COMPLETE,)
        )
        return [scores.index(trial.value) for trial in trials]

    suggestions = Suggestions(sweep)
    for count in range(0, 60, 2):
        new = suggestions.next(points[:count], scores[:count], 2)
        first = max(0, count - 20) // 10 * 10
        best = sorted(
            sorted((i for i in range(first) if scores[i] is not None), key=lambda i: -scores[i])[:3]
        )
        assert known(suggestions) == [
            *best,
            *(i for i in range(first, count) if scores[i] is not None),
        ]
        # One that begins here draws the same.
        assert Suggestions(sweep).next(points[:count], scores[:count], 2) == new


def test_optunas_points_are_the_same_whenever_it_is_killed(tmp_path, monkeypatch):
    if not importlib.util.find_spec("optuna"):
        pytest.skip("optuna isn't installed (the extra sweep)")
    keys = DRAWN | {"TRAIN.SMOOTHING": [0, 0.1]}
    whole = {"keys": keys, "method": "optuna", "runs": 30}
    found = []
    for deaths in ((), (1, 4, 0, 7)):
        sweep = sweep_of(tmp_path, **whole, output=str(tmp_path / f"swept{len(deaths)}"))
        lock = results.lock(sweep.output)
        for death in deaths:
            session, _ = session_of(sweep, monkeypatch, dies_after=death)
            with pytest.raises(KeyboardInterrupt):
                session.run(lock)
        session, _ = session_of(sweep, monkeypatch)
        session.run(lock)
        os.close(lock)
        found.append(session.points)
    assert found[0] == found[1]
    rates = [math.log10(float(point["TRAIN.BASE_LR"])) for point in found[0]]
    assert len(rates) == 30
    # it learns
    assert np.abs(np.array(rates[-10:]) + 3).mean() < 0.7 * np.abs(np.array(rates[:10]) + 3).mean()
    # where nothing is known, it draws
    failed = Suggestions(sweep).next(found[0][:12], [None] * 12, 2)
    assert len(failed) == 2
