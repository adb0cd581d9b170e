"""Pre-trainings that are killed at random moments, resumed until they end, and compared with one
left alone.
"""

import json
import os
import random
import re
import signal
import time

import pytest
from support.programs import (
    assert_none_left,
    ranks_of,
    start,
    wait_for,
    wait_for_first_step,
)
from support.training_runs import assert_same_run, records

# 22 steps an epoch, and four checkpoints within it.
RUN = [
    "-output=run", "-resume=auto", "-o", "TRAIN.NUM_EPOCHS", "3", "TRAIN.WARMUP_EPOCHS", "1",
    "MODEL.DROPPATH", "0.1", "DATA.GLOBAL_BATCH", "64", "DATA.NUM_WORKERS", "1", "REPORT_FREQ", "1", "VALIDATE_FREQ", "1",
    "PROBE.FREQ", "1", "BEST_METRIC", "knn", "SAVE_STEPS", "5", "SAVE_FREQ", "0", "SAVE_MINUTES", "none",
    "REPORT", "False",
]  # fmt: skip
STEPS = 22
SEED = 50
PICTURE = "reconstructions.png"
AVERAGE = ["TRAIN.MODEL_EMA", "True", "TRAIN.MODEL_EMA_DECAY", "0.9"]
MOMENTS = ("step", "save", "evaluation")
# By model: options, and the moments at which its run is killed. An update of DINO and MoCo is of two
# steps. The recipe of dino_digits has Sinkhorn-Knopp, KoLeo and batch norms in the heads.
CASES = {
    "mae_vit_digits": (AVERAGE, (*MOMENTS, "picture")),
    "simmim_digits": (AVERAGE, (*MOMENTS, "picture")),
    "dino_digits": (
        [
            "METHOD.PATCH_LOSS", "1.0", "METHOD.SEPARATE_HEAD", "True", "METHOD.FREEZE_LAST_LAYER", "2",
            "TRAIN.ACCUM_ITER", "2", "TRAIN.WEIGHT_DECAY_END", "0.4",
        ],
        MOMENTS,
    ),
    "moco_digits": (["TRAIN.ACCUM_ITER", "2"], MOMENTS),
}  # fmt: skip


def reports(run):
    """Returns the reports of steps, in this start and those before it."""
    return len(re.findall(r"epoch \d+/\d+ step ", (run / "log.txt").read_text()))


def is_evaluating(run):
    """Returns whether the last steps of an epoch are reported, and its evaluation isn't."""
    last = (run / "metrics.jsonl").read_text().rpartition("\n")[0].rpartition("\n")[2]
    record = json.loads(last or "{}")
    return record.get("split") == "train" and record["step"] % STEPS == 0


def drawn(run):
    """Returns when the last picture was drawn."""
    picture = run / PICTURE
    return picture.stat().st_mtime_ns if picture.exists() else 0


def saving(run):
    """Returns the names of checkpoints that aren't whole yet."""
    return {path.name for path in (run / "checkpoints").glob(".epoch_*")}


def wait_for_moment(aim, process, run, rng):
    """Waits for a random moment of a kind; returns whether the run still goes on."""
    if aim == "step":
        moment = reports(run) + rng.randint(0, 12)
        going_on = wait_for(lambda: reports(run) >= moment, process)
        time.sleep(rng.uniform(0, 0.02))
    elif aim == "save":
        going_on = wait_for(lambda: saving(run), process)
        time.sleep(rng.uniform(0, 0.01))
    elif aim == "evaluation":
        going_on = wait_for(lambda: is_evaluating(run), process)
        time.sleep(rng.uniform(0, 0.3))
    else:
        before = drawn(run)
        going_on = wait_for(lambda: drawn(run) > before, process)
    return going_on


def kill(place, flags, aim, rng):
    """Starts or resumes the run, and kills its parent, a rank or all processes at a moment.

    Returns:
        What the run was doing: "evaluation", "save", both or neither.
    """
    run = place / "run"
    process = start(place, *flags)
    pids = wait_for_first_step(process, run)
    assert pids, "the run ended before it was killed"
    going_on = wait_for_moment(aim, process, run, rng)
    assert going_on, "the run ended before it was killed"
    victim = rng.choice([-process.pid, process.pid, rng.choice([process.pid, *ranks_of(process)])])
    seen = {"evaluation"} if is_evaluating(run) else set()
    if saving(run):
        seen.add("save")
    (os.killpg if victim < 0 else os.kill)(abs(victim), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode, errors
    assert "Traceback" not in errors
    assert_none_left(pids)
    return seen


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("model", CASES)
def test_a_pre_training_that_is_killed_ends_in_the_same_bits(tmp_path, model, processes):
    options, moments = CASES[model]
    flags = [f"-cfg={model}", f"-ngpus={processes}", *RUN, *options]
    (tmp_path / "whole").mkdir()
    _, errors = start(tmp_path / "whole", *flags, disturbed=False).communicate(timeout=240)
    whole = tmp_path / "whole" / "run"
    assert (whole / "result.json").exists(), errors

    rng = random.Random(SEED + processes)
    aims = list(moments)
    rng.shuffle(aims)
    seen = set()
    for aim in aims:
        seen |= kill(tmp_path, flags, aim, rng)
    process = start(tmp_path, *flags, disturbed=False)
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")
    assert "evaluation" in seen

    run = tmp_path / "run"
    assert_same_run(whole, run)
    assert records(run) == records(whole)
    assert {file.name for file in run.iterdir()} == {file.name for file in whole.iterdir()}
    assert (whole / PICTURE).exists() == ("picture" in moments)
    if "picture" in moments:
        assert (run / PICTURE).read_bytes() == (whole / PICTURE).read_bytes()
    result, expected = (json.loads((path / "result.json").read_text()) for path in (run, whole))
    for entries in (result, expected):
        # They name folders, the time taken and the commit.
        for name in ("seconds", "config", "weights", "environment"):
            del entries[name]
    assert {"loss", "knn", "rankme", "feature_std", "best"} < result.keys()
    assert result == expected
    assert not list((run / "checkpoints").glob("[.]*"))
