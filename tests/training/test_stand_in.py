"""The toolkit on a device that isn't the CPU (tests/stand_in): the bits of a run on the CPU, and in
no collective a tensor of another place, which NCCL doesn't take.
"""

import json
import re

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
import stand_in
from golden.optim_problem import gradients
from support.optim_model import OPTIMIZERS, Small
from support.ranks import run_ranks
from support.training_runs import assert_same_run, train

from config import get_config
from training.optim import build_optimizer
from utils import all_gather, rank

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(stand_in.why_not()), reason=stand_in.why_not()),
]

STAGE_1 = ["DIST.ENGINE", "fleet", "DIST.STRATEGY.sharding", "True"]
STAGE_2 = [*STAGE_1, "DIST.STRATEGY.sharding_configs.stage", "2"]
RECIPE = [
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "2", "TRAIN.BASE_LR", "0.01", "TRAIN.GRAD_CLIP", "0.5",
    "TRAIN.MODEL_EMA", "True", "TRAIN.MIXUP_ALPHA", "0.2", "SAVE_STEPS", "2", "KEEP_LAST", "1000",
    "DATA.BATCH_SIZE_EVAL", "180",
]  # fmt: skip
# Without recomputation, which asks the device for its generator's state: the stand-in draws from
# the CPU's.
DROPS = ["MODEL.DROPOUT", "0.1", "MODEL.DROPPATH", "0.2", "TRAIN.ACCUM_ITER", "2"]
MIDDLE = "checkpoints/epoch_0001_sample_000000032"


def collectives():
    """What each collective gives, and what a tensor of the CPU gets for an answer."""
    found = {"place": str(paddle.ones([1]).place)}
    for dtype in ("float32", "float64", "int32", "int64", "uint8"):
        found[dtype] = (paddle.arange(7).astype(dtype) * (rank() + 1)).astype(dtype)
        dist.all_reduce(found[dtype])
    large = paddle.arange(600_000, dtype="float32") * (rank() + 1)  # three pieces
    dist.all_reduce(large)
    found["large"] = large
    for name, call in (
        ("broadcast", lambda x: dist.broadcast(x, 1)),
        ("reduce", lambda x: dist.reduce(x, 1)),
    ):
        found[name] = paddle.full([3], rank() + 1.0)
        call(found[name])
    waiting = paddle.full([3], rank() + 1.0)
    dist.broadcast(waiting, 1, sync_op=False).wait()
    found["waiting"] = waiting
    gathered = []
    dist.all_gather(gathered, paddle.full([2], rank() + 1))
    found = {
        key: value if isinstance(value, str) else value.numpy().tolist()
        for key, value in found.items()
    }
    found |= {
        "gathered": [part.numpy().tolist() for part in gathered],
        "objects": all_gather("a" * (rank() + 1)),
    }
    for name in ("broadcast", "all_reduce", "reduce"):
        there = paddle.to_tensor([1.0], place=paddle.CPUPlace())
        with pytest.raises(RuntimeError, match="interface not found"):
            getattr(dist, name)(there, *([1] if name in ("broadcast", "reduce") else []))
    return found


def limits():
    """(copies of what moves a tensor, the error of memory that is spent); then ranks disagree on a
    length.
    """
    before = stand_in.copies()
    tensor = paddle.to_tensor(np.ones(5, "float32"))
    after = stand_in.copies()
    tensor.numpy()
    moved = [np.subtract(after, before).tolist(), np.subtract(stand_in.copies(), after).tolist()]
    with pytest.raises(MemoryError) as spent:
        paddle.ones([1 << 32])
    with pytest.raises(OSError, match="CustomDevice error"):  # where NCCL would hang
        dist.all_reduce(paddle.ones([3 + rank()]))
    return moved, str(spent.value)


def runs(options, output):
    """A run of two ranks, one that goes on from its middle, the evaluation of its weights."""
    train([*options, *RECIPE, *DROPS], output / "whole", 64)
    train(
        [*options, *RECIPE, *DROPS, "MODEL.RESUME", str(output / "whole" / MIDDLE)],
        output / "resumed",
        64,
    )
    weights = str(output / "whole" / "checkpoints" / "last")
    pairs = zip(options[::2], options[1::2], strict=True)
    kept = [word for pair in pairs if not pair[0].startswith("TRAIN.") for word in pair]
    train([*kept, "EVAL", "True", "MODEL.PRETRAINED", weights], output / "evaluated")


# Optimizers whose powers of beta Paddle keeps on the CPU.
ADAMS = ("AdamW", "Adam", "LAMB", "Muon")
SHARDED = {
    "stage 1": [*RECIPE, *STAGE_1, "MODEL.RECOMPUTE", "True"],
    # from the middle of the one before
    "on stage 2": [*RECIPE, *STAGE_2, "MODEL.RECOMPUTE", "True"],
    "Muon": [
        "DATA.BATCH_SIZE",
        "32",
        "DATA.BATCH_SIZE_EVAL",
        "180",
        *STAGE_1,
        "TRAIN.OPTIMIZER.NAME",
        "Muon",
    ],
}
OTHERS = {"stage 2": SHARDED["on stage 2"]}
OTHERS |= {
    name: [*SHARDED["Muon"][:-1], name] for name in OPTIMIZERS if name not in ("AdamW", "Muon")
}


def sharded_runs(options, output, runs):
    for name, words in runs.items():
        resumed = ["MODEL.RESUME", str(output / "stage 1" / MIDDLE)] if name == "on stage 2" else []
        train([*options, *words, *resumed], output / name, 64)


def on_cpu(name):
    """After an update: the kinds of an optimizer's accumulators that lie on the CPU."""
    model = Small()
    optimizer = build_optimizer(get_config(None, ["TRAIN.OPTIMIZER.NAME", name]), model)
    model.set_gradients(gradients(0))
    optimizer.step()
    tensors = {
        key: value
        for key, value in optimizer.state_dict().items()
        if isinstance(value, paddle.Tensor)
    }
    there = [key for key, value in tensors.items() if value.place.is_cpu_place()]
    return {re.sub(r"^.*[wb]_\d+_|(_acc)?_\d+$", "", key) for key in there}


def on_the_cpu(options, output):
    runs(options, output)
    sharded_runs(options, output, SHARDED)


def on_the_device(options, output):
    """All that is asked of the device, in one pair of ranks: each takes seconds to start."""
    on_the_cpu(options, output)
    return collectives(), {name: on_cpu(name) for name in OPTIMIZERS}, limits()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the folder of the runs on both places, what each rank of the device has found)"""
    from conftest import TINY  # not in the ranks: it loads the operators compiled for CPUs

    folder = tmp_path_factory.mktemp("runs")
    run_ranks(on_the_cpu, TINY, folder / "cpu", compiled=False)
    with pytest.MonkeyPatch.context() as patched:
        for key, value in stand_in.environment().items():
            patched.setenv(key, value)
        return folder, run_ranks(on_the_device, TINY, folder / "device", backend="xccl")


def test_the_device_is_no_cpu(made):
    first, second = (dict(found) for found, *_ in made[1])
    assert (first.pop("place"), second.pop("place")) == ("Place(stand_in:0)", "Place(stand_in:1)")
    assert (first.pop("reduce"), second.pop("reduce")) == ([1.0] * 3, [3.0] * 3)
    assert first == second
    for dtype in ("float32", "float64", "int32", "int64", "uint8"):
        assert first[dtype] == [0, 3, 6, 9, 12, 15, 18]
    np.testing.assert_array_equal(first["large"], np.arange(600_000) * 3)
    assert first["broadcast"] == first["waiting"] == [2.0] * 3
    assert first["gathered"] == [[1, 1], [2, 2]]
    assert first["objects"] == ["a", "aa"]
    for *_, (moved, spent) in made[1]:
        assert moved == [[1, 0, 0], [0, 1, 0]]
        assert "ResourceExhaustedError" in spent  # the type and the words of a GPU's
        assert "Out of memory error on stand_in:" in spent
        assert "Cannot allocate 16.000000GB memory" in spent


def test_a_run_on_the_device_has_the_bits_of_the_run_on_the_cpu(made):
    folder, _ = made
    for name in ("whole", "resumed"):
        assert_same_run(folder / "cpu" / name, folder / "device" / name)
    assert_same_run(folder / "device" / "whole", folder / "device" / "resumed")
    told = [
        json.loads((folder / place / "evaluated" / "result.json").read_text())
        for place in ("cpu", "device")
    ]
    for key in ("loss", "acc1", "acc5", "num_samples"):
        assert told[0][key] == told[1][key], key


def test_sharded_runs_on_the_device_have_the_bits_of_those_on_the_cpu(made):
    """Paddle fills Adam's powers of beta on the CPU, and its kernels for GPUs leave them there: for
    a checkpoint they have to come to the device before they travel.
    """
    folder, ranks = made
    for _, there, _ in ranks:
        assert there == {
            name: {"beta1_pow", "beta2_pow"} if name in ADAMS else set() for name in there
        }
    for name in SHARDED:
        assert_same_run(folder / "cpu" / name, folder / "device" / name)


@pytest.mark.slow
def test_every_sharded_optimizer_has_the_bits_of_the_cpu(tmp_path, tiny, monkeypatch):
    run_ranks(sharded_runs, tiny, tmp_path / "cpu", OTHERS, compiled=False)
    for key, value in stand_in.environment().items():
        monkeypatch.setenv(key, value)
    run_ranks(sharded_runs, tiny, tmp_path / "device", OTHERS, backend="xccl")
    for name in OTHERS:
        assert_same_run(tmp_path / "cpu" / name, tmp_path / "device" / name)


@pytest.mark.slow
def test_the_command_line_trains_and_evaluates_on_the_device(tmp_path, program):
    """Paddle takes a plugin's device for its default; a run needs nothing but the environment."""
    plain = ["TUNE_CPU", "False"]  # whose compiled operators are the CPU's
    short = ["MODEL.DEPTH", "1", "TRAIN.NUM_EPOCHS", "1", "TRAIN.WARMUP_EPOCHS", "0"]
    told = []
    for place, environment in (("cpu", {}), ("device", stand_in.environment())):
        flags = [
            "-cfg=vit_digits",
            f"-output={place}",
            "-o",
            *plain,
            *short,
            "TRAIN.MODEL_EMA",
            "True",
        ]
        status, _, errors = program("main_multi_gpu.py", *flags, **environment)
        assert status == 0, errors
        flags = [
            "-cfg=vit_digits",
            "-eval",
            f"-pretrained={place}/checkpoints/last",
            f"-output={place}-evaluated",
        ]
        status, _, errors = program(
            "main_multi_gpu.py", *flags, "-o", *plain, *short[:2], **environment
        )
        assert status == 0, errors
        result = json.loads((tmp_path / f"{place}-evaluated" / "result.json").read_text())
        told.append({key: result[key] for key in ("loss", "acc1", "acc5", "num_samples")})
    assert (
        "2 processes over XCCL on stand_in:0, stand_in:1"
        in (tmp_path / "device" / "log.txt").read_text()
    )
    assert_same_run(tmp_path / "cpu", tmp_path / "device")
    assert told[0] == told[1]
