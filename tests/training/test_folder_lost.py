"""A run whose folder is removed or moved, or whose files are replaced: one line, and nothing is
lost.
"""

import itertools
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
from conftest import without
from support.ranks import run_ranks
from support.sharding import STAGE_1
from support.training_runs import assert_same_run, records, train

from errors import RunError
from training import requests
from training.checkpoint import newest_whole
from utils import rank

OPTIONS = [
    "DATA.BATCH_SIZE",
    "8",
    "TRAIN.NUM_EPOCHS",
    "2",
    "REPORT_FREQ",
    "2",
    "DATA.BATCH_SIZE_EVAL",
    "91",
]
OPTIONS += ["SAVE_MINUTES", "none"]


def disturbed(fault, options, output, length, step):
    """Trains; ``fault`` happens to the run's folder on rank 0 after a step."""
    calls = itertools.count(1)
    after_step = requests.Checkpointing.after_step

    def disturbing(keeper, *args):
        if next(calls) == step and rank() == 0:
            fault(Path(output))
        return after_step(keeper, *args)

    # Ranks meet at every step.
    patched = mock.patch.object(requests.Checkpointing, "after_step", disturbing)
    with patched, mock.patch.object(requests.Requests, "MOST_STEPS", 1):
        return train(options, output, length, draws=fault is a_folder_in_place_of_each)


def failure(*args):
    """Returns the error that ends ``disturbed``."""
    with pytest.raises(RunError) as caught:
        disturbed(*args)
    return caught.value


def removed(run):
    shutil.rmtree(run)


def moved(run):
    run.rename(run.with_name("moved"))


def metrics_are_a_folder(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


def metrics_are_a_pipe(run):
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")


def metrics_are_a_dangling_link(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("nowhere")


def checkpoints_are_a_file(run):
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (run / "checkpoints").write_text("")


def checkpoints_are_a_dangling_link(run):
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (run / "checkpoints").symlink_to("nowhere")


def replaced_by_a_file(run):
    shutil.rmtree(run)
    run.write_text("")


def log_is_a_folder(run):
    (run / "log.txt").unlink()
    (run / "log.txt").mkdir()


FAULTS = {
    removed: r"{run}/metrics\.jsonl can't be written \(No such file or directory\): its folder was moved or removed",
    metrics_are_a_folder: r"{run}/metrics\.jsonl can't be written \(it is a folder, expected a file\): move it away",
    metrics_are_a_pipe: r"{run}/metrics\.jsonl can't be written \(it isn't a regular file\): move it away",
    metrics_are_a_dangling_link: r"{run}/metrics\.jsonl can't be written \(it is a link, .*\): move it away",
}


WAYS = {"one": (1, []), "two": (2, []), "sharded": (2, STAGE_1)}


@pytest.fixture(params=WAYS)
def way(request):
    """A number of ranks, and options."""
    return WAYS[request.param]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_can_not_report_saves_and_ends(tmp_path, tiny, fault, way):
    ranks, own = way
    options = [*tiny, *OPTIONS, *own]
    output = tmp_path / "run"
    for error in run_ranks(failure, fault, options, output, 64 * ranks, 3, ranks=ranks):
        assert type(error) is RunError
        assert error.exit_status == 1
        where = rf"stopped after step 4, saved in {output}/checkpoints/epoch_0001_sample_\d+"
        expected = (
            FAULTS[fault].format(run=output)
            + rf".*; {where}; -resume=auto -output={output} continues from there"
        )
        assert re.fullmatch(expected, str(error)), error
    assert newest_whole(output / "checkpoints").name.startswith("epoch_0001_sample_")
    if ranks == 1:
        if (output / "metrics.jsonl").is_dir():
            (output / "metrics.jsonl").rmdir()
        elif os.path.lexists(output / "metrics.jsonl"):
            (output / "metrics.jsonl").unlink()
        train([*options, "MODEL.RESUME", "auto"], output, 64)
        assert records(output)[-1]["step"] == 16


@pytest.mark.parametrize(
    "fault", [checkpoints_are_a_file, checkpoints_are_a_dangling_link, replaced_by_a_file]
)
def test_where_the_folder_takes_no_checkpoint_it_is_saved_beside(tmp_path, tiny, fault, way):
    ranks, own = way
    options = [*tiny, *OPTIONS, *own, "SAVE_STEPS", "5"]
    output = tmp_path / "run"
    for error in run_ranks(failure, fault, options, output, 64 * ranks, 5, ranks=ranks):
        assert type(error) is RunError
        assert "\n" not in str(error)
        saved = newest_whole(tmp_path / "run-saved" / "checkpoints")
        assert str(error).endswith(f"it is saved in {saved}; resume from there with a new -output")
    if ranks == 1:
        train([*options, "MODEL.RESUME", str(saved)], tmp_path / "next", 64)
        assert records(tmp_path / "next")[-1]["step"] == 16


def test_a_folder_that_is_moved_is_written_where_it_is(tmp_path, tiny, way):
    ranks, own = way
    options = [*tiny, *OPTIONS, *own, "SAVE_STEPS", "3"]
    run_ranks(train, options, tmp_path / "whole", 64 * ranks, ranks=ranks)
    run_ranks(disturbed, moved, options, tmp_path / "run", 64 * ranks, 4, ranks=ranks)
    assert not (tmp_path / "run").exists()
    assert_same_run(tmp_path / "whole", tmp_path / "moved")
    assert records(tmp_path / "whole") == records(tmp_path / "moved")
    assert (tmp_path / "moved" / "result.json").exists()
    log = (tmp_path / "moved" / "log.txt").read_text()
    assert log.count(f"the run's folder was moved; continuing in {tmp_path}/moved") == 1


def test_a_log_that_is_replaced_ends_no_run(tmp_path, tiny):
    disturbed(log_is_a_folder, [*tiny, *OPTIONS], tmp_path / "run", 64, 3)
    assert (tmp_path / "run" / "result.json").exists()


LEFT = ("curves.png", "predictions.csv", "report.html")  # what a run can do without


def a_folder_in_place_of_each(run):
    for name in LEFT:
        (run / name).mkdir()


@pytest.mark.parametrize("ranks", [1, 2])
def test_pictures_and_tables_that_can_not_be_written_end_no_run(tmp_path, tiny, ranks):
    options = [*without(tiny, "REPORT"), *OPTIONS]
    output = tmp_path / "run"
    found = run_ranks(
        disturbed, a_folder_in_place_of_each, options, output, 64 * ranks, 7, ranks=ranks
    )
    assert len(set(found)) == 1
    log = (output / "log.txt").read_text()
    for name in LEFT[:2]:
        why = "(it is a folder, expected a file: move it away)"
        assert (
            f"{name} can't be written {why}; -resume=auto -output={output} writes it again\n" in log
        )
    for name in LEFT:
        (output / name).rmdir()
    if ranks == 1:
        train([*options, "MODEL.RESUME", "auto"], output, 64, draws=True)
    assert (output / "result.json").exists()
    assert all((output / name).is_file() for name in LEFT[:2]) == (ranks == 1)
    assert ranks > 1 or (output / "curves.png").stat().st_size > 1000
