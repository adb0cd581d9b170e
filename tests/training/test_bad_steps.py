"""Steps whose loss is out of proportion, or isn't finite: how they are noticed and recorded."""

import json

import pytest
from conftest import TINY

from config import get_config
from errors import InputError
from training.bad_steps import FILE, LossHistory, read_bad_steps
from training.run import Run


def numbered(losses, first=1):
    return list(enumerate(losses, first))


def test_a_loss_above_ten_times_the_median_is_an_outlier_once_until_losses_are_calm():
    history = LossHistory()
    assert history.first_outlier(numbered([2.0] * 50)) == 0
    assert history.first_outlier([(51, 20.0)]) == 0  # not above
    assert history.first_outlier([(52, 20.1), (53, 90.0)]) == 52
    assert history.first_outlier([(54, 90.0), (55, 15.0)]) == 0
    # 15 is not yet below 5 times the median.
    assert history.first_outlier([(56, 30.0)]) == 0
    assert history.first_outlier([(57, 9.9), (58, 2.0), (59, 30.0)]) == 59


def test_the_first_losses_are_not_judged():
    history = LossHistory()
    assert history.first_outlier(numbered([1.0] * 49 + [1e9])) == 0
    assert history.first_outlier([(51, 1e9)]) == 51
    negative = LossHistory()
    assert negative.first_outlier(numbered([-1.0] * 99 + [1e9])) == 0
    assert LossHistory().first_outlier([]) == 0


def test_the_median_is_that_of_the_latest_hundred():
    history = LossHistory()
    history.first_outlier(numbered([100.0] * 100))
    assert history.first_outlier(numbered([1.0] * 51, 101)) == 0
    assert history.first_outlier([(152, 10.1)]) == 152


def test_the_record_of_a_run_is_read_as_it_was_written(tmp_path):
    assert read_bad_steps(tmp_path) == []
    records = [{"step": 3, "epoch": 1, "ranks": 2, "kind": "outlier"}]
    (tmp_path / FILE).write_text(json.dumps(records))
    assert read_bad_steps(tmp_path) == records


def test_a_run_logs_its_first_three_bad_steps_and_records_them(tmp_path):
    run = Run(get_config(None, [*TINY, "SEED", "5", "OUTPUT", str(tmp_path / "run")]), [])
    run.begin()
    for step in (7, 8, 9, 10):
        run.record_bad_step(step, 2, "outlier" if step < 9 else "not finite")
    recorded = read_bad_steps(tmp_path / "run")
    assert [record["step"] for record in recorded] == [7, 8, 9]
    assert recorded[2] == {"step": 9, "epoch": 2, "ranks": 1, "seed": 5, "kind": "not finite"}
    log = (tmp_path / "run" / "log.txt").read_text()
    assert (
        "warning: the loss of step 7 is more than 10 times the median of the steps before it;"
        f" python tools/replay.py {tmp_path / 'run'} -step=7 repeats it, layer by layer\n"
    ) in log
    assert "the loss of step 9 isn't finite; " in log
    assert "step 10" not in log


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[1]",
        '[{"step": 0, "epoch": 1, "ranks": 1, "kind": "outlier"}]',
        '[{"step": true, "epoch": 1, "ranks": 1, "kind": "outlier"}]',
        '[{"step": 1, "epoch": 1, "ranks": 1, "kind": []}]',
        "[" * 9000,
        "[" + " " * 10_000 + "]",
    ],
)
def test_a_record_that_no_run_writes_is_one_line(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(InputError, match=r"bad_steps.json.*; remove it"):
        read_bad_steps(tmp_path)
