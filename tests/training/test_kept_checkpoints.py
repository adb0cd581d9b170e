"""The newest checkpoint before a recorded step is kept for its replay, without a copy."""

import json
import os
import shutil

import pytest
from conftest import TINY
from support.training_runs import train

from config import get_config
from training.bad_steps import FILE, read_bad_steps
from training.checkpoint import storage
from training.checkpoint.kept import keep_checkpoint, kept_checkpoints, remove_kept
from training.run import Run

STEPS = ["DATA.BATCH_SIZE", "8", "SAVE_STEPS", "2", "KEEP_LAST", "99"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 8 steps, with checkpoints after 2, 4 and 6 of them and at its end."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train([*TINY, *STEPS], folder, 64)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that run."""
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def name_after(step):
    return f"epoch_0001_sample_{8 * step:09d}"


def keep(run, step):
    keep_checkpoint(run, run / "checkpoints", step)


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.smoke
@pytest.mark.parametrize(("step", "newest"), [(3, 2), (4, 2), (5, 4), (8, 6)])
def test_the_newest_checkpoint_before_a_step_gets_a_second_name(run, step, newest):
    keep(run, step)
    [kept] = kept_checkpoints(run, [step])
    assert kept == run / "bad_steps" / f"step_{step}" / name_after(newest)
    original = run / "checkpoints" / kept.name
    assert sorted(os.listdir(kept)) == sorted(os.listdir(original))
    for name in os.listdir(kept):
        assert os.path.samefile(kept / name, original / name)
    # It is whole without the original.
    assert storage.remove_checkpoint(original)
    assert set(storage.verify(kept)) == set(os.listdir(kept))


def test_before_the_first_checkpoint_nothing_is_kept(run):
    keep(run, 2)
    keep_checkpoint(run, run / "nothing", 9)
    assert not (run / "bad_steps").exists()


def test_a_damaged_checkpoint_is_passed_over(run):
    (run / "checkpoints" / name_after(4) / "state.json").write_text("{")
    keep(run, 5)
    assert [kept.name for kept in kept_checkpoints(run, [5])] == [name_after(2)]


def test_a_checkpoint_that_is_removed_meanwhile_is_passed_over(run, monkeypatch):
    link = os.link

    def removed_first(source, target, **options):
        if name_after(4) in str(source):
            shutil.rmtree(source.parent, ignore_errors=True)
        link(source, target, **options)

    monkeypatch.setattr(os, "link", removed_first)
    keep(run, 5)
    assert [kept.name for kept in kept_checkpoints(run, [5])] == [name_after(2)]
    assert os.listdir(run / "bad_steps") == ["step_5"]


def test_the_only_checkpoint_may_be_replaced_meanwhile(run, monkeypatch):
    checkpoints = run / "checkpoints"
    later = (checkpoints / name_after(4)).rename(run / "later")
    shutil.rmtree(checkpoints / name_after(6))
    link = os.link

    def replaced_first(source, target, **options):
        if later.exists():
            later.rename(checkpoints / name_after(4))
            shutil.rmtree(checkpoints / name_after(2))
        link(source, target, **options)

    monkeypatch.setattr(os, "link", replaced_first)
    keep(run, 5)
    assert [kept.name for kept in kept_checkpoints(run, [5])] == [name_after(4)]


def test_without_hard_links_nothing_is_kept_and_the_run_continues(run, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    keep(run, 5)
    assert files_below(run / "bad_steps") == []


def test_nothing_is_written_through_a_link(run, tmp_path):
    (tmp_path / "home").mkdir()
    (run / "bad_steps").symlink_to(tmp_path / "home")
    keep(run, 5)
    (tmp_path / "home" / "step_5" / name_after(2)).mkdir(parents=True)
    remove_kept(run, [])
    assert files_below(tmp_path / "home") == ["step_5", f"step_5/{name_after(2)}"]
    (run / "bad_steps").unlink()
    (run / "bad_steps").mkdir()
    (run / "bad_steps" / "step_5").symlink_to(tmp_path / "home" / "step_5")
    keep(run, 5)
    remove_kept(run, [])
    assert files_below(tmp_path / "home") == ["step_5", f"step_5/{name_after(2)}"]


def test_what_was_kept_for_other_steps_is_removed_and_what_no_run_made_stays(run):
    for step in (3, 5, 7):
        keep(run, step)
    mine = run / "bad_steps" / "step_7" / "mine.txt"
    mine.write_text("mine")
    # What a killed run has left.
    shutil.copytree(run / "bad_steps" / "step_3", run / "bad_steps" / ".step_8.4194304.0123abcd")
    for name in (
        "step_3_rank0.npz",
        "step_3_rank1.npz",
        "step_7_rank1.npz",
        ".step_3_rank1.npz.4194304.0123abcd",
        "step_7_rank1.npz.bak",
    ):
        (run / "bad_steps" / name).write_text("")
    remove_kept(run, [3])
    assert sorted(os.listdir(run / "bad_steps")) == [
        "step_3",
        "step_3_rank0.npz",
        "step_3_rank1.npz",
        "step_7",
        "step_7_rank1.npz.bak",
    ]
    assert os.listdir(mine.parent) == ["mine.txt"]
    (run / "bad_steps" / "step_7_rank1.npz.bak").unlink()
    mine.unlink()
    remove_kept(run, [])
    assert not (run / "bad_steps").exists()
    assert len(storage.find_checkpoints(run / "checkpoints")) == 4


def test_a_resumed_run_keeps_the_steps_up_to_its_checkpoint(run):
    records = [{"step": step, "epoch": 1, "ranks": 1, "kind": "outlier"} for step in (3, 5, 7)]
    (run / FILE).write_text(json.dumps(records))
    for step in (3, 5, 7):
        keep(run, step)
    for later in (storage.find_checkpoints(run / "checkpoints"))[2:]:
        storage.remove_checkpoint(later)
    assert name_after(4) == storage.find_checkpoints(run / "checkpoints")[-1].name
    train([*TINY, *STEPS, "MODEL.RESUME", "auto"], run, 64)
    assert [record["step"] for record in read_bad_steps(run)] == [3]
    assert [kept.name for kept in kept_checkpoints(run, [3, 5, 7])] == [name_after(2)]
    assert os.listdir(run / "bad_steps") == ["step_3"]


def test_a_record_that_cannot_be_read_is_named_and_the_run_is_resumed(run):
    (run / FILE).write_text("{}")
    train(
        [*TINY, *STEPS, "MODEL.RESUME", "auto", "TRAIN.NUM_EPOCHS", "2"],
        run,
        64,
        named=["TRAIN.NUM_EPOCHS", "2"],
    )
    assert "not the list that a run writes" in (run / "log.txt").read_text()
    assert len(storage.find_checkpoints(run / "checkpoints")) == 8


def test_the_steps_of_a_failed_start_are_forgotten(tmp_path):
    config = get_config(None, [*TINY, "OUTPUT", str(tmp_path / "run")])
    failed = Run(config, [])
    failed.begin()
    assert failed.record_bad_step(1, 1, "not finite")
    assert len(read_bad_steps(tmp_path / "run")) == 1
    os.close(failed.folder.lock)
    Run(config, []).begin()
    assert read_bad_steps(tmp_path / "run") == []
