"""Checkpoints are written while the run continues, one at a time; a failure is told once."""

import errno
import threading

import numpy as np
import pytest
from support.ranks import run_ranks
from support.small_training import SmallTraining
from support.training_runs import checkpoint_names

from config import get_config
from errors import RunError
from training import engine
from training.checkpoint import Progress, Saver, storage
from training.checkpoint.state import read_state
from training.classification import Classification
from training.optim import LossScaler


@pytest.fixture
def held_writing(monkeypatch):
    """Holds writing until it is set; ``begun`` lists the names of what was begun."""
    may = threading.Event()
    written = storage.write_checkpoint
    may.begun = []

    def writing(directory, name, *rest):
        may.begun.append(name)
        assert may.wait(60)
        return written(directory, name, *rest)

    monkeypatch.setattr(storage, "write_checkpoint", writing)
    yield may
    may.set()


@pytest.mark.smoke
def test_a_checkpoint_holds_the_state_at_its_step(tmp_path, tiny, held_writing):
    training = SmallTraining(tmp_path, tiny)
    training.update(0)
    expected = training.held()
    training.saver.save(Progress(samples=8, step=1))
    training.update(1)
    for file, now in training.held().items():
        assert any(not np.array_equal(now[key], value) for key, value in expected[file].items()), (
            file
        )
    held_writing.set()
    training.saver.wait()
    training.assert_saved("epoch_0001_sample_000000008", expected)
    state = read_state(tmp_path / "checkpoints" / "last")
    assert (state["epoch"], state["samples"], state["step"], state["ranks"], state["format"]) == (
        0,
        8,
        1,
        1,
        2,
    )
    assert (state["images"], state["classes"], state["lr"]) == (1433, training.train.classes, 0.003)
    assert state["config"]["MODEL"]["EMBED_DIM"] == 16


def test_one_checkpoint_is_written_at_a_time(tmp_path, tiny, held_writing):
    saver = SmallTraining(tmp_path, tiny).saver
    saver.save(Progress(epoch=1, step=8))
    second = threading.Thread(target=saver.save, args=[Progress(epoch=2, step=16)])
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert held_writing.begun == ["epoch_0001"]
    held_writing.set()
    second.join(60)
    saver.save(Progress(epoch=2, step=16))  # is there already
    saver.wait()
    assert held_writing.begun == ["epoch_0001", "epoch_0002"]
    assert checkpoint_names(tmp_path / "checkpoints") == {"epoch_0001", "epoch_0002", "last"}


def test_a_save_looks_at_as_few_checkpoints_however_many_are_kept(tmp_path, tiny, monkeypatch):
    listings = []
    looked_at = []
    listed = storage.find_checkpoints
    placed = storage.position
    monkeypatch.setattr(
        storage, "find_checkpoints", lambda *args: listings.append(1) or listed(*args)
    )
    saver = SmallTraining(tmp_path, [*tiny, "SAVE_FREQ", "2", "KEEP_LAST", "3"]).saver
    monkeypatch.setattr(storage, "position", lambda *args: looked_at.append(1) or placed(*args))
    counts = []
    for epoch in range(1, 25):
        looked_at.clear()
        saver.save(Progress(epoch=epoch, step=8 * epoch), improved=("val",) if epoch == 3 else ())
        saver.wait()
        counts.append(len(looked_at))
    assert len(listings) == 1
    # The last three, the best, and the one that is to go.
    assert max(counts[1:]) == 5
    kept = [*range(2, 24, 2), 3, 22, 23, 24]
    assert checkpoint_names(tmp_path / "checkpoints") - {"last", "best"} == {
        f"epoch_{epoch:04}" for epoch in kept
    }


def test_a_run_that_goes_on_removes_what_it_finds_superseded(tmp_path, tiny):
    first = SmallTraining(tmp_path, [*tiny, "SAVE_FREQ", "0", "KEEP_LAST", "2"])
    for epoch in (1, 2):
        first.saver.save(Progress(epoch=epoch, step=8 * epoch))
        first.saver.wait()
    again = Saver(
        first.config, first.run, first.saver.models, first.optimizer, LossScaler(False), first.train
    )
    for epoch in (3, 4, 5):
        again.save(Progress(epoch=epoch, step=8 * epoch))
        again.wait()
        if epoch == 3:  # somebody moves one away, which is nothing to tell
            assert checkpoint_names(tmp_path / "checkpoints") == {
                "epoch_0002",
                "epoch_0003",
                "last",
            }
            (tmp_path / "checkpoints" / "epoch_0002").rename(tmp_path / "moved")
    assert checkpoint_names(tmp_path / "checkpoints") == {"epoch_0004", "epoch_0005", "last"}
    assert "isn't removed" not in (tmp_path / "log.txt").read_text()


def fail_once(monkeypatch_target, error):
    """The next checkpoint fails; those after it don't."""
    written = monkeypatch_target.write_checkpoint

    def failing(*args):
        monkeypatch_target.write_checkpoint = written
        raise error

    monkeypatch_target.write_checkpoint = failing


def told_by(output, options, error):
    """What each rank is told of a failure: by ``wait`` twice, after a good save, and by the last
    ``wait``.
    """
    training = SmallTraining(output, options)
    told = []

    def wait(**last):
        try:
            told.append(training.saver.wait(**last))
        except RunError as raised:
            told.append(str(raised))

    training.saver.save(Progress(epoch=1, step=8))
    wait()
    for epoch in (2, 3):
        fail_once(storage, error)
        training.saver.save(Progress(epoch=epoch, step=8 * epoch))
        wait(last=epoch == 3)
        if "stop" in options:
            return told
        wait()
        training.saver.save(Progress(epoch=epoch + 2, step=8 * epoch + 16))
        wait()
    return told


def test_a_failure_is_told_once_or_ends_the_run_on_every_rank(tmp_path, tiny):
    full = OSError(errno.ENOSPC, "No space left on device")
    problem = "{} wasn't saved ([Errno 28] No space left on device): free some space; the last complete checkpoint is {}"
    runs = [
        (told_by, tmp_path / how, [*tiny, "SAVE_ON_ERROR", how], full)
        for how in ("stop", "continue")
    ]
    nan = RunError("epoch_0002 isn't saved: NaN")
    runs.append((told_by, tmp_path / "nan", [*tiny, "SAVE_ON_ERROR", "stop"], nan))
    for stopped, went_on, not_finite in run_ranks(each, runs):
        assert stopped == [
            None,
            problem.format("epoch_0002", f"{tmp_path}/stop/checkpoints/epoch_0001"),
        ]
        assert went_on[:4] == [None, None, None, None]
        assert went_on[4] == problem.format(
            "epoch_0003", f"{tmp_path}/continue/checkpoints/epoch_0004"
        )
        assert not_finite == [None, str(nan)]
    log = (tmp_path / "continue" / "log.txt").read_text()
    first = problem.format("epoch_0002", f"{tmp_path}/continue/checkpoints/epoch_0001")
    assert log.count(f"{first}; the run continues (SAVE_ON_ERROR)") == 1
    assert checkpoint_names(tmp_path / "continue" / "checkpoints") == {
        "epoch_0004",
        "epoch_0005",
        "last",
    }


def each(calls):
    return [function(*args) for function, *args in calls]


@pytest.mark.parametrize(
    ("every", "saved", "step", "due"),
    [(0, 0, 100, False), (5, 0, 4, False), (5, 0, 5, True), (5, 5, 9, False), (5, 4, 6, True)],
)
def test_save_steps_counts_multiples_passed(tmp_path, tiny, every, saved, step, due):
    saver = SmallTraining(tmp_path, [*tiny, "SAVE_STEPS", str(every)]).saver
    saver.saved_step = saved
    assert saver.due(Progress(step=step)) == due


@pytest.mark.parametrize(
    ("metric", "improved", "best"),
    [("acc1", [True, True, False, False], 2), ("loss", [True, True, False, True], 4)],
)
def test_the_best_is_by_the_metric_asked_for(metric, improved, best):
    task = Classification(get_config(None, ["BEST_METRIC", metric]))
    progress = Progress()
    found = []
    for epoch, (acc1, loss) in enumerate([(50.0, 2.0), (60.0, 1.5), (60.0, 1.5), (55.0, 1.0)], 1):
        progress.end_epoch(epoch)
        metrics = {"val": {"acc1": acc1, "loss": loss, "class_acc": {"a": acc1}}}
        scored = engine._scored(metrics, epoch)
        found.append(progress.keep_best(scored, task.score) == ("val",))
    assert found == improved
    assert (progress.best["val"]["epoch"], progress.best["val"]["checkpoint"]) == (
        best,
        f"epoch_000{best}",
    )
    assert "class_acc" not in progress.best["val"]
