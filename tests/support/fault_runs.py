"""A short run of two processes, which faults are injected into, and what holds after each fault."""

from support.programs import assert_none_left, start
from support.training_runs import assert_same_run

RUN = [
    "-cfg=vit_digits", "-output=run", "-resume=auto", "-o", "TRAIN.NUM_EPOCHS", "3", "TRAIN.WARMUP_EPOCHS", "2",
    "VALIDATE_FREQ", "1", "REPORT_FREQ", "4", "SAVE_STEPS", "5", "SAVE_FREQ", "0", "SAVE_MINUTES", "none",
    "TRAIN.MODEL_EMA", "True",
]  # fmt: skip


def finish(folder, flags=RUN):
    """Starts or resumes the run and lets it end; returns its folder and what it printed."""
    process = start(folder, *flags, disturbed=False)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert not errors
    return folder / "run", printed


def assert_fails(process, status, message, pids=(), seconds=60):
    """The program ends with ``status`` and leaves no process.

    ``message`` is a regular expression of the whole stderr.
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
