"""A short run of two processes for tests that inject faults, and assertions about its end."""

from support.programs import assert_none_left, start
from support.training_runs import assert_same_run

RUN = [
    "-cfg=vit_digits", "-output=run", "-resume=auto", "-o", "TRAIN.NUM_EPOCHS", "3", "TRAIN.WARMUP_EPOCHS", "2",
    "VALIDATE_FREQ", "1", "REPORT_FREQ", "4", "SAVE_STEPS", "5", "SAVE_FREQ", "0", "SAVE_MINUTES", "none",
    "TRAIN.MODEL_EMA", "True",
]  # fmt: skip


def finish(folder, flags=RUN):
    """Starts or resumes the run and waits for its end. Returns its folder and its output."""
    process = start(folder, *flags, disturbed=False)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert not errors
    return folder / "run", printed


def assert_fails(process, status, message, pids=(), seconds=60):
    """Asserts that the program ends with ``status`` and leaves no process.

    Args:
        message: a regular expression of the whole stderr.
    """
    _, errors = process.communicate(timeout=seconds)
    assert process.returncode == status, errors
    assert message.fullmatch(errors), errors
    assert_none_left([process.pid, *pids])


def assert_ends_like(whole, folder, flags=RUN):
    run, _ = finish(folder, flags)
    assert_same_run(whole, run)
    assert (run / "result.json").exists()
    assert (run / "curves.png").exists()
