"""What ends a run before its epochs do: the same end for every number of processes, and for a run
that goes on.
"""

import json
import math
import types

import pytest
from conftest import TINY, without
from support.ranks import run_ranks
from support.training_runs import assert_same_run, records, refused, train

from config import get_config
from errors import InputError, Unreadable
from settings.plain import check_form
from training import ending, engine
from training.checkpoint import Progress
from training.checkpoint.state import _FORM
from training.optim import build_schedule, set_weight_decay

EVERY = ["SAVE_FREQ", "1", "KEEP_LAST", "1000", "REPORT_FREQ", "1", "TRAIN.BASE_LR", "0.01"]


def result(output):
    return json.loads((output / "result.json").read_text())


# ------------------------------------------------------------- early stopping


def judged(options, *evaluations):
    """After how many evaluations a run is over, or None."""
    config = get_config(None, ["TRAIN.NUM_EPOCHS", "99", *options])
    end = ending.Ending(config, Progress(), types.SimpleNamespace(), steps=4, evaluation_cost=1)
    for epoch, scores in enumerate(evaluations, 1):
        end.progress.end_epoch(epoch)
        end.after_epoch(scores)
        if end.over:
            return epoch
    return None


@pytest.mark.smoke
def test_a_run_ends_after_so_many_evaluations_without_gain():
    stop = ["TRAIN.EARLY_STOP", "2"]
    assert judged(stop, *({"val": acc} for acc in (50, 60, 60, 59, 70))) == 4
    assert judged(stop, *({"val": acc} for acc in (50, 60, 60, 61, 60, 62))) is None
    # epochs without one don't count
    assert judged(stop, {"val": 50}, {}, {"val": 49}, {}, {}, {"val": 50}) == 6
    assert judged([], *({"val": 50} for _ in range(50))) is None
    least = [*stop, "TRAIN.EARLY_STOP_MIN", "1"]
    # a gain is more than 1 over 50
    assert judged(least, *({"val": acc} for acc in (50, 50.9, 51.0, 99))) == 3
    assert judged(least, *({"val": acc} for acc in (50, 50.9, 51.1, 51.2, 52.2, 52.2, 52.2))) == 7
    average = [(50, 40), (50, 45), (50, 50), (50, 50), (50, 50)]  # which still gains
    assert judged(stop, *({"val": acc, "ema": ema} for acc, ema in average)) == 5


def test_a_run_that_stops_early_is_whole_and_goes_on_counting(ranks):
    folder, *_ = ranks
    assert [
        record["epoch"] for record in records(folder / "whole") if record["split"] == "val"
    ] == [1, 2, 3, 4]
    assert (
        sorted(file.name for file in (folder / "whole" / "checkpoints").glob("epoch_*"))[-1]
        == "epoch_0004"
    )
    assert (folder / "whole" / "curves.png").exists()
    told = "TRAIN.EARLY_STOP: 3 evaluations without improvement, the last after epoch 4 of 9"
    assert result(folder / "whole")["ended"] == result(folder / "resumed")["ended"] == told
    assert told in (folder / "whole" / "log.txt").read_text()
    assert_same_run(folder / "whole", folder / "resumed")
    states = [
        json.loads((folder / run / "checkpoints/last/state.json").read_text())
        for run in ("whole", "resumed")
    ]
    assert [(state["stale"], state["marks"].keys()) for state in states] == [
        (3, {"val", "ema"})
    ] * 2
    assert states[0]["marks"] == states[1]["marks"]
    assert result(folder / "longer")["best"]["epoch"] <= 5
    assert [
        record["epoch"] for record in records(folder / "longer") if record["split"] == "val"
    ] == [5]


# --------------------------------------------------------------- time budget

BUDGET = [*EVERY, "DATA.GLOBAL_BATCH", "8", "TRAIN.NUM_EPOCHS", "100", "TRAIN.MAX_MINUTES", "1"]


def timed(runs, decays=None):
    """Trains; the clock of the budget goes on by a second at an update, and by two at an
    evaluation. Returns the seconds of each run.

    Args:
        decays: gets the weight decay of each update.
    """
    now = 0.0

    def set_decay(optimizer, value):
        decays.append(value)
        return set_weight_decay(optimizer, value)

    def slow(function, seconds):
        def slowed(*args, **named):
            nonlocal now
            now += seconds
            return function(*args, **named)

        return slowed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ending, "time", types.SimpleNamespace(monotonic=lambda: now))
        patch.setattr(engine, "_update", slow(engine._update, 1.0))
        patch.setattr(engine, "evaluate", slow(engine.evaluate, 2.0))
        patch.setattr(engine, "set_weight_decay", set_decay)
        ends = []
        for run in runs:
            now = 1000.0
            train(*run)
            ends.append(now - 1000)
        return ends


def rates(output):
    return {
        record["step"]: record["lr"] for record in records(output) if record["split"] == "train"
    }


LONG = [
    *without(TINY, "TRAIN.NUM_EPOCHS", "TRAIN.WARMUP_EPOCHS"),
    *BUDGET,
    "TRAIN.WARMUP_EPOCHS",
    "20",
    "TRAIN.WEIGHT_DECAY",
    "0.04",
    "TRAIN.WEIGHT_DECAY_END",
    "0.4",
]
MIDDLES = ("epoch_0003", "epoch_0009_sample_000000024")


def in_ranks(stopping, budgeted):
    """Trains all: to start processes takes longer."""
    for run in stopping:
        train(*run)
    decays = []
    return timed(budgeted, decays), decays


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Runs of two processes: their folder, the seconds of the first budget, and the weight decay
    of each update.
    """
    folder = tmp_path_factory.mktemp("ranks")
    options = [
        *without(TINY, "TRAIN.NUM_EPOCHS"),
        *EVERY,
        "DATA.GLOBAL_BATCH",
        "16",
        "TRAIN.MODEL_EMA",
        "True",
    ]
    # never a gain
    options += ["TRAIN.NUM_EPOCHS", "9", "TRAIN.EARLY_STOP", "3", "TRAIN.EARLY_STOP_MIN", "99"]
    resume = [*options, "MODEL.RESUME"]
    stopping = [
        (options, folder / "whole", 40),
        ([*resume, str(folder / "whole/checkpoints/epoch_0002")], folder / "resumed", 40),
        (
            [*resume, str(folder / "whole/checkpoints/epoch_0004")],
            folder / "longer",
            40,
            ["TRAIN.EARLY_STOP", "4"],
        ),
        ([*resume, "auto"], folder / "resumed", 40),
    ]
    budgeted = [([*LONG, "SAVE_STEPS", "5"], folder / "timed", 37)]
    for name in MIDDLES:
        path = str(folder / "timed" / "checkpoints" / name)
        budgeted.append(([*LONG, "MODEL.RESUME", path], folder / name, 37))
    ((seconds, *_), decays), _ = run_ranks(in_ranks, stopping, budgeted)
    return folder, seconds, decays


def test_the_schedule_ends_when_the_time_does(ranks):
    """An epoch of 4 updates and its evaluation take 6 seconds; of 60, 3 % stay free. After the
    first epoch 8 whole ones fit, and 2 updates with the last evaluation: 38 updates.
    """
    folder, seconds, _ = ranks
    assert seconds == 58
    found = rates(folder / "timed")
    assert list(found) == list(range(1, 39))
    schedule = build_schedule(get_config(None, LONG), 4, 8)
    expected = [schedule(update) for update in range(4)]
    expected += [schedule((1 + (update / 4 - 1) * 99 / 8.5) * 4) for update in range(4, 38)]
    assert list(found.values()) == pytest.approx(expected, rel=1e-9)
    assert 0.0099 < max(found.values()) <= 0.01
    assert found[38] < 1e-4 / 2
    for name in MIDDLES:
        assert_same_run(folder / "timed", folder / name)
    told = result(folder / "timed")
    assert told["ended"] == "TRAIN.MAX_MINUTES: 1 minutes were enough for 9.5 of the 100 epochs"
    assert (
        "an update takes 1 s, an evaluation takes 2 s; the run ends after 38 updates, 9.5 of 100"
        in (folder / "timed" / "log.txt").read_text()
    )
    assert json.loads((folder / "timed/checkpoints/last/state.json").read_text())["length"] == [
        1.0,
        9.5,
    ]
    assert (folder / "timed/checkpoints/last").resolve().name == "epoch_0010"


def test_the_weight_decay_ends_when_the_time_does(ranks):
    """It is a function of the same place in the plan as the rate, and of nothing else."""
    places = [update / 4 for update in range(4)]
    places += [1 + (update / 4 - 1) * 99 / 8.5 for update in range(4, 38)]
    expected = [0.4 - 0.18 * (1 + math.cos(math.pi * place / 100)) for place in places]
    # The first run, then those that went on after 12 and after 35 of its 38 updates.
    expected = expected + expected[12:] + expected[35:]
    folder, _, decays = ranks
    assert decays == pytest.approx(expected, rel=1e-9)
    assert decays[37] > 0.399
    assert (
        "AdamW, weight decay 0.04 to 0.4 on 10 tensors, off on"
        in (folder / "timed" / "log.txt").read_text()
    )


def test_time_that_was_used_before_a_stop_counts(tmp_path, tiny):
    options = [
        *without(tiny, "TRAIN.NUM_EPOCHS"),
        *BUDGET,
        "TRAIN.ACCUM_ITER",
        "2",
        "VALIDATE_FREQ",
        "50",
    ]
    timed([([*options, "SAVE_STEPS", "6"], tmp_path / "whole", 8 * 18)])
    middle = tmp_path / "whole" / "checkpoints" / "epoch_0001_sample_000000048"
    state = json.loads((middle / "state.json").read_text())
    assert (state["seconds"], state["length"]) == (3, [])
    [seconds] = timed([([*options, "MODEL.RESUME", str(middle)], tmp_path / "resumed", 8 * 18)])
    # Of 9 updates an epoch; an evaluation of 91 images is estimated as 1.90 updates.
    assert len(rates(tmp_path / "resumed")) == 2 * (seconds - 2)
    assert 3 + seconds - 2 + 91 / 16 / 3 == pytest.approx(58.2, abs=1)
    assert "an evaluation may take 1.9 s" in (tmp_path / "resumed" / "log.txt").read_text()
    going_on = [*options, "MODEL.RESUME", "auto"]
    for named, message in (
        (["TRAIN.MAX_MINUTES", "2"], "epochs; TRAIN.MAX_MINUTES is 2.0 and was 1.0; keep it"),
        (
            ["TRAIN.NUM_EPOCHS", "99"],
            "TRAIN.NUM_EPOCHS is 99 and was 100; keep it, or start from the weights with",
        ),
    ):
        refused(message, going_on, tmp_path / "resumed", 144, named)


def test_a_run_that_fits_is_the_run_without_a_budget(tmp_path, tiny):
    options = [*tiny, *EVERY, "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "3"]
    timed(
        [
            (options, tmp_path / "plain", 37),
            ([*options, "TRAIN.MAX_MINUTES", "1"], tmp_path / "fits", 37),
        ]
    )
    assert_same_run(tmp_path / "plain", tmp_path / "fits")
    assert "ended" not in result(tmp_path / "fits")


def test_a_budget_that_is_over_makes_one_more_update(tmp_path, tiny):
    [seconds] = timed([([*tiny, *BUDGET, "TRAIN.MAX_MINUTES", "0.05"], tmp_path, 37)])
    assert len(rates(tmp_path)) == 5  # it is seen after the first epoch
    assert seconds == 5 + 2 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["TRAIN.EARLY_STOP", "0"], "TRAIN.EARLY_STOP is 0, expected 1 to"),
        (
            ["TRAIN.EARLY_STOP_MIN", "0"],
            "TRAIN.EARLY_STOP_MIN has no effect without TRAIN.EARLY_STOP",
        ),
        (["TRAIN.MAX_MINUTES", "0"], "TRAIN.MAX_MINUTES is 0.0, expected above 0"),
        (["EVAL", "True", "TRAIN.MAX_MINUTES", "1"], "TRAIN.MAX_MINUTES has no effect under EVAL"),
    ],
)
def test_what_cannot_be_is_named(options, message):
    with pytest.raises(InputError, match=message):
        get_config(None, options)


@pytest.mark.parametrize(
    "values",
    [
        {"length": [2, 1]},
        {"length": [1]},
        {"length": "x"},
        {"stale": -1},
        {"marks": {"x": 1}},
        {"seconds": -1.0},
    ],
)
def test_a_strangers_state_is_held_to_its_form(values):
    good = {"length": [0.5, 2.0], "stale": 2, "marks": {"val": 1.0}, "seconds": 3.5}
    form = {name: _FORM[name] for name in good}
    check_form(good, form)
    check_form({"length": []}, form)
    with pytest.raises(Unreadable, match=f"its {next(iter(values))} is"):
        check_form(good | values, form)


def test_progress_begins_with_neither():
    progress = Progress()
    assert (progress.stale, progress.marks, progress.seconds, progress.length) == (0, {}, 0.0, [])
