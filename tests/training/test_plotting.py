"""Figures show the names that others gave as they are: no formula, none left out, long ones cut."""

from array import array

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.text import Text

from training.curves import draw, plot_curves
from training.pages import plotting
from training.rate_range import RateRange, write
from training.report import plots
from training.sweeps import results
from training.sweeps.points import Distribution, Sweep

# The second would raise as a formula, and a legend would leave out the third.
NAMES = ["$x_1$", r"$\frac{$", "_hidden", "__init__", "<b>&amp;", "9" * 4000, "a\nb"]
SHOWN = [
    "$x_1$",
    r"$\frac{$",
    " _hidden",
    " __init__",
    "<b>&amp;",
    "999999999999...999999999",
    "a\\nb",
]


@pytest.fixture
def texts(monkeypatch):
    """The texts that are drawn, none of them as a formula."""
    told = {}
    real = Text.draw

    def draw(text, *rest, **named):
        assert not text.get_parse_math()
        told[text.get_text()] = True
        return real(text, *rest, **named)

    monkeypatch.setattr(Text, "draw", draw)
    return told


def test_names_of_runs_are_shown_as_they_are(texts):
    points = (array("d", [1, 2]), array("d", [0.5, 0.25]))
    plots.curve({name: {"val": {"loss": points}} for name in NAMES}, "loss", "loss")
    assert [text for text in texts if text.endswith(" val")] == [f"{name} val" for name in SHOWN]


@pytest.mark.parametrize("steps", [[1], [1, 2], [3, 6, 9]])
def test_steps_are_whole_numbers(steps):
    points = (array("d", steps), array("d", [0.5 + step for step in steps]))
    drawn = plotting.figure(8, 3)
    axis = drawn.add_subplot()
    draw(axis, {"train": {"loss": points}}, "loss", "loss")
    plotting.figure_png(drawn)
    ticks = axis.get_xticks()
    assert ticks.tolist() == np.round(ticks).tolist()
    assert set(steps) & set(ticks.tolist())


def test_names_of_classes_are_shown_as_they_are(texts):
    plots.confusion(np.eye(len(NAMES), dtype=int), NAMES, True)
    told = [name.strip() if len(name) < 20 else "999999999...999999" for name in SHOWN]
    assert [text for text in texts if text in told] == told


def test_values_of_a_sweep_are_shown_as_they_are(texts, tmp_path):
    keys = {"TAG": Distribution(NAMES), "TRAIN.BASE_LR": Distribution([], 1e-5, 1e-1, log=True)}
    sweep = Sweep("main_single_gpu.py", [], keys, "random", 7, 0, [], "", None, 1, tmp_path)
    points = [{"TAG": name, "TRAIN.BASE_LR": f"1e-{place + 1}"} for place, name in enumerate(NAMES)]
    outcome = results.Outcome(50.0, 1)
    found = [
        results.Row(f"{place:04}", point, None, outcome, 0) for place, point in enumerate(points)
    ]
    results.write(found, sweep, "$acc1$")
    told = [plotting.shorten(name, 12) for name in NAMES]
    assert [text for text in texts if text in told] == told
    assert {"$acc1$", "TAG", "0.0001", "0.1"} <= texts.keys()
    assert max(map(len, results.table(found, sweep, "acc1").splitlines())) < 120


def test_an_axis_of_powers_has_plain_numbers(texts, tmp_path):
    rates = np.geomspace(2e-4, 8e-4, 20)  # between two powers of ten
    drawn = plotting.figure(4, 3)
    axis = drawn.add_subplot()
    axis.plot(rates, rates)
    plotting.set_log_scale(axis)
    plotting.figure_png(drawn)
    assert {"0.0002", "0.0006"} <= texts.keys()
    texts.clear()
    rates = np.geomspace(1e-6, 1, 20)
    write(
        RateRange(rates, rates, rates, 3e-4, 4e-4), tmp_path / "rates.csv", tmp_path / "rates.png"
    )
    assert {"0.0001", "0.001", "lowest: 0.0004"} <= texts.keys()
    assert not any("$" in text for text in texts)


def test_the_settings_of_others_stay():
    before = dict(matplotlib.rcParams)
    plotting.figure_png(plotting.figure(2, 2))
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("runs", [1, 2, 30])
def test_a_picture_of_many_runs_has_one_legend(runs, monkeypatch):
    made = []
    legend = Axes.legend
    monkeypatch.setattr(
        Axes, "legend", lambda axis, **how: made.append(len(axis.lines)) or legend(axis, **how)
    )
    points = array("d", [1, 2]), array("d", [1, 2])
    plots.curve(
        {f"run {n}": {"train": {"loss": points}, "val": {"loss": points}} for n in range(runs)},
        "loss",
        "",
    )
    assert made == [2 * runs]


def test_a_curve_that_nobody_has_leaves_its_axis_without_a_legend(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(Axes, "legend", lambda axis: made.append(axis.get_ylabel()))
    (tmp_path / "metrics.jsonl").write_text(
        '{"split": "train", "epoch": 1, "step": 1, "loss": 1.0}\n'
    )
    plot_curves(
        tmp_path / "metrics.jsonl",
        tmp_path / "curves.png",
        {"loss": "the loss", "acc1": "accuracy"},
    )
    assert made == ["the loss"]
