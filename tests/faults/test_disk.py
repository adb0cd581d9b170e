"""A disk that is full, or becomes read-only: one line, the checkpoint before whole, and the run
goes on from it.

A limit on a file's size (``ulimit -f``) makes a write fail at a chosen file, in a chosen process,
at any moment; the small file systems need root.
"""

import re
import resource
import shutil
import subprocess

import pytest
from support.fault_runs import RUN, assert_ends_like, assert_fails, finish
from support.programs import descendants, ranks_of, start, wait_for

from training.checkpoint.storage import find_checkpoints, verify

LOGS_ALONE = 200_000  # bytes: a log fits, model.safetensors (549 kB) doesn't
NOT_SAVED = r"epoch_\w+ wasn't saved \(\[Errno {}\] {}\): {}; the last complete checkpoint is {}"
FULL = (27, "File too large", "raise the limit on a file's size")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was left alone."""
    return finish(tmp_path_factory.mktemp("whole"))[0]


@pytest.fixture
def disk(tmp_path):
    """A file system of 6 MB: room for two checkpoints of the short run, not for three."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-R", "-l", folder], check=True)


def limit_files(process, size):
    for pid in ranks_of(process):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def saving(folder, *options):
    """Starts the run and waits for its first checkpoint; returns it and the pids of its processes."""
    process = start(folder, *RUN, *options)
    last = folder / "run" / "checkpoints" / "last"
    assert wait_for(last.exists, process), process.stderr.read()
    return process, list(descendants(process.pid))


def assert_whole(run):
    """What is left of the checkpoints is complete, and ``last`` the newest."""
    checkpoints = run / "checkpoints"
    found = find_checkpoints(checkpoints)
    assert not list(checkpoints.glob(".epoch_*"))
    for folder in found:
        verify(folder)
    assert (checkpoints / "last").resolve() == found[-1].resolve()


@pytest.mark.long
@pytest.mark.smoke
def test_a_checkpoint_that_does_not_fit_ends_the_run(tmp_path, whole):
    process, pids = saving(tmp_path)
    limit_files(process, LOGS_ALONE)
    expected = NOT_SAVED.format(*FULL, rf"{tmp_path}/run/checkpoints/epoch_\w+")
    assert_fails(process, 1, re.compile(f"error: {expected}\n"), pids)
    assert_whole(tmp_path / "run")
    assert_ends_like(whole, tmp_path)


@pytest.mark.slow
def test_the_first_checkpoint_does_not_fit(tmp_path, whole):
    process = start(tmp_path, *RUN)
    # its ranks inherit it
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LOGS_ALONE, resource.RLIM_INFINITY))
    none = NOT_SAVED.format(*FULL, "").replace(
        "the last complete checkpoint is ", "there is no earlier checkpoint"
    )
    assert_fails(process, 1, re.compile(f"error: {none}\n"))
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert_ends_like(whole, tmp_path)


@pytest.mark.slow
def test_save_on_error_continue_goes_on_until_there_is_room(tmp_path, whole):
    process, _ = saving(tmp_path, "SAVE_ON_ERROR", "continue")
    limit_files(process, LOGS_ALONE)
    log = tmp_path / "run" / "log.txt"
    told = re.compile(
        NOT_SAVED.format(*FULL, rf"{tmp_path}/run/checkpoints/epoch_\w+") + "; the run continues"
    )
    assert wait_for(lambda: told.search(log.read_text()), process)
    assert_whole(tmp_path / "run")
    limit_files(process, resource.RLIM_INFINITY)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert_ends_like(whole, tmp_path)  # evaluates once more


@pytest.mark.slow
def test_save_on_error_continue_fails_at_the_end_if_the_last_is_not_saved(tmp_path, whole):
    process, pids = saving(tmp_path, "SAVE_ON_ERROR", "continue")
    limit_files(process, LOGS_ALONE)
    expected = NOT_SAVED.format(*FULL, rf"{tmp_path}/run/checkpoints/epoch_\w+")
    assert_fails(process, 1, re.compile(f"error: {expected}\n"), pids)
    assert "step 66:" in (tmp_path / "run" / "log.txt").read_text()
    assert_ends_like(whole, tmp_path)


@pytest.mark.slow
def test_a_line_of_metrics_that_does_not_fit_ends_the_run(tmp_path, whole):
    process, pids = saving(tmp_path)
    limit_files(process, 1)
    checkpoint = f"error: {NOT_SAVED.format(*FULL, '.*')}\n"
    log = rf"({tmp_path}/)?run/log(_0)?\.txt: not written \(File too large\); the run continues\n"
    assert_fails(process, 1, re.compile(f"({log})*{checkpoint}"), pids)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().endswith("}\n")  # no half line
    assert_whole(tmp_path / "run")
    assert_ends_like(whole, tmp_path)


@pytest.mark.slow
def test_logs_and_metrics_that_do_not_fit_are_told_and_the_run_goes_on(tmp_path):
    process, _ = saving(tmp_path, "SAVE_ON_ERROR", "continue", "TRAIN.NUM_EPOCHS", "5")
    log = tmp_path / "run" / "log.txt"
    metrics = tmp_path / "run" / "metrics.jsonl"
    limit_files(process, 1)
    written = metrics.stat().st_size
    while (
        "run/metrics.jsonl: a line couldn't be written (File too large); the run continues"
        not in process.stdout.readline()
    ):
        assert process.poll() is None
    assert metrics.stat().st_size == written
    limit_files(process, resource.RLIM_INFINITY)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert re.fullmatch(
        r"(\S+run/log(_0)?\.txt: not written \(File too large\); the run continues\n){1,2}", errors
    )
    assert "summary: acc1: " in log.read_text()


@pytest.mark.slow
def test_curves_that_do_not_fit_are_drawn_by_the_next_start(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    for name in ("curves.png", "result.json"):
        (tmp_path / "run" / name).unlink()
    process = start(tmp_path, *RUN)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert (
        "curves.png can't be written (File too large: raise the limit on a file's size); -resume=auto "
        in printed
    )
    assert not [name for name in (tmp_path / "run").iterdir() if "curves" in name.name]
    assert_ends_like(whole, tmp_path)


@pytest.mark.slow
def test_a_small_file_system_fills_up(disk, whole):
    expected = NOT_SAVED.format(
        28, "No space left on device", "free some space", rf"{disk}/run/checkpoints/epoch_\w+"
    )
    assert_fails(start(disk, *RUN), 1, re.compile(f"error: {expected}\n"))
    assert_whole(disk / "run")
    subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
    assert_ends_like(whole, disk)


@pytest.mark.slow
def test_a_file_system_that_is_full_from_the_start(disk):
    with pytest.raises(OSError, match="No space"), open(disk / "filler", "wb") as filler:
        while True:
            filler.write(bytes(4096))
    expected = r"error: run: can't lock the run's folder \(No space left on device\); free some space, or choose .*\n"
    assert_fails(start(disk, *RUN), 2, re.compile(expected))


@pytest.mark.slow
def test_a_read_only_file_system_is_refused(disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    expected = r"error: run: can't create the run's folder \(Read-only file system\); choose another with -output\n"
    assert_fails(start(disk, *RUN), 2, re.compile(expected))
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    (disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    expected = "error: run: not writable; choose another folder with -output\n"
    assert_fails(start(disk, *RUN), 2, re.compile(expected))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["run", "run/checkpoints"])
def test_a_file_system_becomes_read_only(disk, whole, part):
    subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
    process, pids = saving(disk)
    # Over the folder, since the logs are open for writing: a file system in use isn't made
    # read-only by request.
    subprocess.run(["mount", "--bind", disk / part, disk / part], check=True)
    while subprocess.run(
        ["mount", "-o", "remount,ro,bind", disk / part], capture_output=True
    ).returncode:
        assert process.poll() is None  # a checkpoint was being written
    saved = r"it is saved in run-saved/checkpoints/epoch_\w+; resume from there with a new -output"
    message = rf"epoch_\w+ wasn't saved \(\[Errno 30\] Read-only file system: '\S+'\): make it writable; {saved}"
    assert_fails(process, 1, re.compile(f"error: {message}\n"), pids)
    subprocess.run(["umount", "-l", disk / part], check=True)
    assert_whole(disk / "run")
    assert_ends_like(whole, disk)
