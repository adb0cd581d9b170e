"""The toolkit on a device that isn't the CPU (tests/stand_in): the bits of a run on the CPU, and in no collective a
tensor of another place, which NCCL doesn't take.
"""

import json

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
import stand_in
from golden.optim_problem import gradients
from ranks import run_ranks
from runs import assert_same_run, train
from small import Small

import parallel
from checkpoint.saver import optimizer_arrays
from config import get_config
from optim import build_optimizer
from utils import all_gather, rank

pytestmark = pytest.mark.skipif(bool(stand_in.why_not()), reason=stand_in.why_not())

STAGE_1 = ["DIST.ENGINE", "fleet", "DIST.STRATEGY.sharding", "True"]
STAGE_2 = [*STAGE_1, "DIST.STRATEGY.sharding_configs.stage", "2"]
RECIPE = [
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "2", "TRAIN.BASE_LR", "0.01", "TRAIN.GRAD_CLIP", "0.5",
    "TRAIN.MODEL_EMA", "True", "TRAIN.MIXUP_ALPHA", "0.2", "SAVE_STEPS", "2", "KEEP_LAST", "1000",
]  # fmt: skip
DROPS = ["MODEL.DROPOUT", "0.1", "MODEL.DROPPATH", "0.2", "TRAIN.ACCUM_ITER", "2", "MODEL.RECOMPUTE", "True"]
MIDDLE = "checkpoints/epoch_0001_sample_000000032"


@pytest.fixture
def device(monkeypatch):
    """Returns ``run_ranks`` for processes that have the stand-in; those of the CPU have to be done before."""

    def run(function, *args):
        for key, value in stand_in.environment().items():
            monkeypatch.setenv(key, value)
        return run_ranks(function, *args, backend="xccl")

    return run


# ----------------------------------------------------------------- the device


def collectives():
    """What each collective gives, and what a tensor of the CPU gets for an answer."""
    found = {"place": str(paddle.ones([1]).place)}
    for dtype in ("float32", "float64", "int32", "int64", "uint8"):
        found[dtype] = (paddle.arange(7).astype(dtype) * (rank() + 1)).astype(dtype)
        dist.all_reduce(found[dtype])
    large = paddle.arange(600_000, dtype="float32") * (rank() + 1)  # three pieces
    dist.all_reduce(large)
    found["large"] = large
    for name, call in (("broadcast", lambda x: dist.broadcast(x, 1)), ("reduce", lambda x: dist.reduce(x, 1))):
        found[name] = paddle.full([3], rank() + 1.0)
        call(found[name])
    waiting = paddle.full([3], rank() + 1.0)
    dist.broadcast(waiting, 1, sync_op=False).wait()
    found["waiting"] = waiting
    gathered = []
    dist.all_gather(gathered, paddle.full([2], rank() + 1))
    found = {key: value if isinstance(value, str) else value.numpy().tolist() for key, value in found.items()}
    found |= {"gathered": [part.numpy().tolist() for part in gathered], "objects": all_gather("a" * (rank() + 1))}
    for name in ("broadcast", "all_reduce", "reduce"):
        there = paddle.to_tensor([1.0], place=paddle.CPUPlace())
        with pytest.raises(RuntimeError, match="interface not found"):
            getattr(dist, name)(there, *([1] if name in ("broadcast", "reduce") else []))
    return found


def disagreement():
    """What ranks get that call a collective on tensors of different lengths: an answer, where NCCL would hang."""
    with pytest.raises(OSError, match="CustomDevice error") as error:
        dist.all_reduce(paddle.ones([3 + rank()]))
    return str(error.value)


def test_collectives_take_tensors_of_the_device_and_no_others(device):
    first, second = device(collectives)
    assert (first.pop("place"), second.pop("place")) == ("Place(stand_in:0)", "Place(stand_in:1)")
    assert (first.pop("reduce"), second.pop("reduce")) == ([1.0] * 3, [3.0] * 3)
    assert first == second
    for dtype in ("float32", "float64", "int32", "int64", "uint8"):
        assert first[dtype] == [0, 3, 6, 9, 12, 15, 18]
    np.testing.assert_array_equal(first["large"], np.arange(600_000) * 3)
    assert first["broadcast"] == first["waiting"] == [2.0] * 3
    assert first["gathered"] == [[1, 1], [2, 2]]
    assert first["objects"] == ["a", "aa"]
    assert all("CustomDevice error" in told for told in device(disagreement))


def limits():
    """(copies of what moves a tensor, the error of memory that is spent)"""
    before = stand_in.copies()
    tensor = paddle.to_tensor(np.ones(5, "float32"))
    after = stand_in.copies()
    tensor.numpy()
    moved = [np.subtract(after, before).tolist(), np.subtract(stand_in.copies(), after).tolist()]
    with pytest.raises(MemoryError) as error:
        paddle.ones([1 << 26])
    return moved, str(error.value)


def test_the_device_counts_its_copies_and_runs_out_of_memory_as_a_gpu_does(device, monkeypatch):
    monkeypatch.setenv("STAND_IN_MEMORY", str(64 << 20))
    for moved, error in device(limits):
        assert moved == [[1, 0, 0], [0, 1, 0]]
        assert "ResourceExhaustedError" in error
        assert "Out of memory error on stand_in:" in error
        assert "Cannot allocate 256.000000MB memory" in error


# ------------------------------------------------------------------ whole runs


def runs(options, output):
    """A run of two ranks, one that goes on from its middle, the evaluation of its weights; places of AdamW's state."""
    train([*options, *RECIPE, *DROPS], output / "whole", 64)
    train([*options, *RECIPE, *DROPS, "MODEL.RESUME", str(output / "whole" / MIDDLE)], output / "resumed", 64)
    pairs = zip(options[::2], options[1::2], strict=True)
    kept = [word for pair in pairs if not pair[0].startswith("TRAIN.") for word in pair]
    weights = str(output / "whole" / "checkpoints" / "last")
    train([*kept, "EVAL", "True", "MODEL.PRETRAINED", weights], output / "evaluated")
    return str(paddle.ones([1]).place)


@pytest.mark.smoke
def test_a_run_on_the_device_has_the_bits_of_the_run_on_the_cpu(tmp_path, tiny, device):
    assert run_ranks(runs, tiny, tmp_path / "cpu") == ["Place(cpu)"] * 2
    assert device(runs, tiny, tmp_path / "device") == ["Place(stand_in:0)", "Place(stand_in:1)"]
    for name in ("whole", "resumed"):
        assert_same_run(tmp_path / "cpu" / name, tmp_path / "device" / name)
    assert_same_run(tmp_path / "device" / "whole", tmp_path / "device" / "resumed")
    told = [json.loads((tmp_path / place / "evaluated" / "result.json").read_text()) for place in ("cpu", "device")]
    for key in ("loss", "acc1", "acc5", "num_samples"):
        assert told[0][key] == told[1][key], key


def sharded_runs(options, output):
    for name, stage in (("stage 1", STAGE_1), ("stage 2", STAGE_2)):
        train([*options, *RECIPE, *stage], output / name, 64)
    resumed = [*options, *RECIPE, *STAGE_2, "MODEL.RESUME", str(output / "stage 1" / MIDDLE)]
    train(resumed, output / "resumed", 64)


def test_sharded_runs_on_the_device_have_the_bits_of_those_on_the_cpu(tmp_path, tiny, device):
    run_ranks(sharded_runs, tiny, tmp_path / "cpu")
    device(sharded_runs, tiny, tmp_path / "device")
    for name in ("stage 1", "stage 2", "resumed"):
        assert_same_run(tmp_path / "cpu" / name, tmp_path / "device" / name)


# ---------------------------------------------------------- an optimizer's state


def states(names, stage):
    """By optimizer, after two updates: (the whole state, the kinds of accumulators that the CPU has)."""
    found = {}
    for name in names:
        config = get_config(None, ["TRAIN.OPTIMIZER.NAME", name, *stage])
        parallel.init(config)
        model = Small()
        optimizer = parallel.wrap_optimizer(config, build_optimizer(config, model))
        for step in range(2):
            model.set_gradients(gradients(step))
            parallel.reduce_gradients(optimizer)
            optimizer.step()
            optimizer.clear_grad()
        tensors = {key: value for key, value in optimizer.state_dict().items() if isinstance(value, paddle.Tensor)}
        there = {key.split("_0_", 1)[-1] for key, value in tensors.items() if value.place.is_cpu_place()}
        found[name] = optimizer_arrays(model, optimizer), there
    return found


OPTIMIZERS = ("AdamW", "Adam", "LAMB", "SGD", "LARS", "Lion", "Muon")


@pytest.mark.parametrize("stage", [[], STAGE_1], ids=["whole", "sharded"])
def test_every_optimizers_state_is_brought_together_from_the_device(device, stage):
    """Paddle fills Adam's powers of beta on the CPU, and its kernels for GPUs leave them there."""
    expected = run_ranks(states, OPTIMIZERS, stage)
    found = device(states, OPTIMIZERS, stage)
    for name in OPTIMIZERS:
        for own, wanted in zip(found, expected, strict=True):
            assert own[name][0].keys() == wanted[name][0].keys()
            for key, value in wanted[name][0].items():
                np.testing.assert_array_equal(own[name][0][key], value, err_msg=f"{name} {key}")
            print(name, own[name][1])
