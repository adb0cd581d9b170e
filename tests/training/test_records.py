"""A run's folder that a stranger wrote: its metrics.jsonl."""

import os
import resource
from array import array
from types import SimpleNamespace

import pytest

from errors import InputError
from training.curves import plot_curves, points, records
from training.run import Run
from utils import get_loggers, open_logs


def test_records_that_no_run_writes_are_left_out_and_no_pipe_is_waited_for(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    whole = '{"split": "val", "epoch": 1, "step": 3, "loss": 0.5}'
    strange = [
        "[" * 100_000,
        whole.replace("3", "9" * 400),
        whole.replace("0.5", "9" * 400),
        "{}",
        "\0",
    ]
    metrics.write_text("\n".join([*strange, whole]))
    assert list(records(metrics)) == [
        (f"{whole}\n", {"split": "val", "epoch": 1, "step": 3, "loss": 0.5})
    ]
    plot_curves(metrics, tmp_path / "curves.png", {"loss": "loss"})
    metrics.write_text(
        metrics.read_text()
        + "\n"
        + whole.replace("0.5", "1e300")
        + "\n"
        + whole.replace("0.5", "NaN")
        + "\n"
    )
    assert points(metrics, ("val",), ("loss", "lr")) == {
        "val": {"loss": (array("d", [3]), array("d", [0.5]))}
    }
    metrics.unlink()
    os.mkfifo(metrics)
    with pytest.raises(InputError, match="metrics.jsonl: it isn't a regular file; move it away$"):
        list(records(metrics))


@pytest.mark.parametrize("name", ["log.txt", "log_0.txt"])
def test_a_log_that_is_a_pipe_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    get_loggers()
    with pytest.raises(InputError, match=f"{name}: it isn't a regular file; move it away$"):
        open_logs(tmp_path)


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_line_that_the_disk_has_no_room_for_is_lost_whole(tmp_path, on_error):
    """Half of it would make the run's own file one that a resume and a report refuse."""
    metrics = tmp_path / "metrics.jsonl"
    told = []
    before = b"{}\n" * (1 << 20)
    metrics.write_bytes(before)
    run = SimpleNamespace(directory=tmp_path, on_error=on_error, info=told.append, problem="")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write there writes five bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        Run._append(run, '{"split": "val", "epoch": 1}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert metrics.read_bytes() == before
    if on_error == "stop":  # once it has saved
        assert (
            run.problem
            == f"{metrics} can't be written (File too large): raise the limit on a file's size"
        )
    else:
        assert told == [
            f"{metrics}: a line couldn't be written (File too large); the run continues (SAVE_ON_ERROR)"
        ]
