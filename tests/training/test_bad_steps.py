"""Steps whose loss is out of proportion, or isn't finite: how they are noticed and recorded."""

import json

import pytest

from errors import InputError
from training.bad_steps import FILE, LossHistory, read_bad_steps


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
