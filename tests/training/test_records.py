"""A run's folder that a stranger wrote: its metrics.jsonl."""

import os
from array import array

import pytest

from errors import InputError
from training.curves import plot_curves, points, records
from utils import get_loggers, open_logs


def test_records_that_no_run_writes_are_left_out_and_no_pipe_is_waited_for(tmp_path):
    metrics, whole = tmp_path / "metrics.jsonl", '{"split": "val", "epoch": 1, "step": 3, "loss": 0.5}'
    strange = ["[" * 100_000, whole.replace("3", "9" * 400), whole.replace("0.5", "9" * 400), "{}", "\0"]
    metrics.write_text("\n".join([*strange, whole]))
    assert list(records(metrics)) == [(f"{whole}\n", {"split": "val", "epoch": 1, "step": 3, "loss": 0.5})]
    plot_curves(metrics, tmp_path / "curves.png", {"loss": "loss"})
    metrics.write_text(
        metrics.read_text() + "\n" + whole.replace("0.5", "1e300") + "\n" + whole.replace("0.5", "NaN") + "\n"
    )
    assert points(metrics, ("val",), ("loss", "lr")) == {"val": {"loss": (array("d", [3]), array("d", [0.5]))}}
    metrics.unlink()
    os.mkfifo(metrics)
    with pytest.raises(InputError, match="metrics.jsonl: it is no regular file; move it away$"):
        list(records(metrics))


@pytest.mark.parametrize("name", ["log.txt", "log_0.txt"])
def test_a_log_that_is_a_pipe_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    get_loggers()
    with pytest.raises(InputError, match=f"{name}: it is no regular file; move it away$"):
        open_logs(tmp_path)
