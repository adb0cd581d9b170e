"""A training with -amp on a CPU that has bfloat16: resumed in the same bits, the same on two
processes.
"""

import shutil

import numpy as np
import pytest
from support.ranks import run_ranks
from support.training_runs import assert_same_run, records, train, weights

import ops
from ops.build import build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


def train_all(runs):
    build()
    assert ops.load()
    if ops.why_no_bfloat16():
        pytest.skip("this CPU has no bfloat16")
    for run in runs:
        train(*run)


@pytest.mark.smoke
def test_a_run_is_resumed_in_the_same_bits_and_is_the_same_on_two_processes(tmp_path, tiny):
    options = [
        *tiny,
        "TRAIN.OPTIMIZER.NAME",
        "SGD",
        "TRAIN.BASE_LR",
        "0.1",
        "DATA.GLOBAL_BATCH",
        "16",
        "SAVE_STEPS",
        "1",
    ]
    options += ["KEEP_LAST", "9", "REPORT", "False"]
    middle = str(tmp_path / "one" / "checkpoints" / "epoch_0001_sample_000000016")
    half = [*options, "AMP", "True"]
    train_all(
        [
            (options, tmp_path / "float32", 48),
            (half, tmp_path / "one", 48),
            ([*half, "MODEL.RESUME", middle], tmp_path / "resumed", 48),
            ([*half, "AMP_EVAL", "True"], tmp_path / "evaluated", 48),
        ]
    )
    assert_same_run(tmp_path / "one", tmp_path / "resumed")
    run_ranks(train_all, [(half, tmp_path / "two", 48)])
    found = {name: weights(tmp_path / name) for name in ("float32", "one", "two", "evaluated")}
    far = {n: max(np.abs(w[k] - found["one"][k]).max() for k in w) for n, w in found.items()}
    assert 1e-5 < far["float32"] < 1e-2
    assert far["two"] < 1e-5
    assert far["evaluated"] == 0
    losses = [records(tmp_path / name)[-1]["loss"] for name in ("one", "evaluated")]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=1e-2)
    told = "bfloat16 products in linear, MLP and attention layers, the rest in float32, evaluations in float32 (-amp"
    assert told in (tmp_path / "one" / "log.txt").read_text()
    assert found["one"]["head.weight"].dtype == np.float32
