"""What a sharded optimizer sends: in few pieces, in one order, from the device, whatever gradients
there are.
"""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
import stand_in
from support.optim_model import Small
from support.ranks import run_ranks
from support.sharding import ACCUMULATED, MIDDLE, RECIPE, STAGE_1, STAGE_2
from support.tensor_places import elsewhere
from support.training_runs import train

from config import get_config
from models import build_model
from training import parallel
from training.optim import build_optimizer
from utils import rank, to_device

# ToNCCLDataType
NCCL = {"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"}

# ------------------------------------------------------------------- places


def train_elsewhere(runs):
    """Trains; returns by run what was kept on the CPU, travelled, and was misplaced."""
    found = []
    for run in runs:
        with elsewhere() as recorded:
            train(*run)
        found.append((len(recorded.accumulators), recorded.travelled, recorded.misplaced))
    return found


@pytest.mark.smoke
@pytest.mark.skipif(
    not stand_in.why_not(),
    reason="tests/training/test_stand_in.py sees every place here, not these alone",
)
def test_every_collective_takes_its_tensors_from_the_device(tmp_path, tiny):
    """A fresh run's first checkpoint, and a resumed one's: Adam's beta powers are on the CPU,
    beside a GPU.
    """
    engines = {
        "sharded": [*STAGE_2, *ACCUMULATED],
        "resumed": [*STAGE_1, *ACCUMULATED, "MODEL.RESUME", str(tmp_path / "sharded" / MIDDLE)],
        "lamb": [*STAGE_1, "TRAIN.OPTIMIZER.NAME", "LAMB"],
        "muon": [*STAGE_1, "TRAIN.OPTIMIZER.NAME", "Muon"],
    }
    once = ["TRAIN.NUM_EPOCHS", "1", "SAVE_STEPS", "2"]
    runs = [
        ([*tiny, *RECIPE, *once, *words], tmp_path / name, 64) for name, words in engines.items()
    ]
    for own in run_ranks(train_elsewhere, runs):
        for name, (kept, travelled, misplaced) in zip(engines, own, strict=True):
            assert kept > 0, name
            assert misplaced == [], name
            assert {dtype for *_, dtype in travelled} <= NCCL, name
            assert {"all_gather", "all_reduce"} <= {name for name, *_ in travelled}
    for kept in ("last", "best"):
        assert (tmp_path / "sharded" / "checkpoints" / kept).exists()


def test_what_paddle_keeps_on_the_cpu_is_copied_to_the_device_and_stays():
    weight = paddle.create_parameter([2], "float32")
    optimizer = paddle.optimizer.AdamW(parameters=[weight])
    with elsewhere() as found:
        weight.sum().backward()
        optimizer.step()
        power = optimizer._accumulators["beta1_pow_acc"][weight.name]
        moment = optimizer._accumulators["moment1"][weight.name]
        assert found.accumulators == {
            power.name,
            optimizer._accumulators["beta2_pow_acc"][weight.name].name,
        }
        assert power.reshape([-1]) in found
        copy = to_device(power)
        assert copy not in found
        assert copy.item() == power.item()
        assert power in found  # where its kernel looks for it
        assert to_device(moment) is moment


# ------------------------------------------------------------------- buckets


def questions():
    """What is asked of one pair of ranks, for each takes seconds to start."""
    return {ask.__name__: ask() for ask in (count_collectives, all_uneven_updates, second_pass)}


@pytest.fixture(scope="module")
def found():
    """{question: (what rank 0 answers, what rank 1 answers)}"""
    one, other = run_ranks(questions)
    return {name: (one[name], other[name]) for name in one}


def count_collectives():
    """By stage, the collectives of two updates of ViT-Ti: (name, elements). Its buckets are a
    quarter as large as usual, as its weights are those of ViT-S.
    """
    found = {}
    for stage, engine in ((1, STAGE_1), (2, STAGE_2)):
        buckets = ["DIST.STRATEGY.fuse_grad_size_in_MB", "8"]
        config = get_config("configs/vit/vit_tiny_patch16_224.yaml", [*engine, *buckets])
        parallel.init(config)
        model = build_model(config)
        optimizer = parallel.wrap_optimizer(config, build_optimizer(config, model))
        with elsewhere() as recorded:
            for _ in range(2):
                sum((p * p).sum() for p in model.parameters()).backward()
                parallel.reduce_gradients(model, optimizer)
                optimizer.step()
                optimizer.clear_grad()
        found[stage] = [(name, size) for name, size, _ in recorded.travelled]
        found["parameters"] = len(optimizer.parameters), sum(p.size for p in optimizer.parameters)
    return found


def test_an_update_of_a_vit_takes_a_handful_of_collectives(found):
    one, other = found["count_collectives"]
    assert one == other
    count, elements = one.pop("parameters")
    assert (count, elements) == (152, 5_717_416)
    for travelled in one.values():
        reduced, sent = (
            [size for name, size in travelled if name == kind] for kind in ("reduce", "broadcast")
        )
        assert len(reduced) == len(sent) <= 2 * 2 * 3  # two updates, two owners
        assert len(reduced) + len(sent) == len(travelled)
        assert sum(sent) == 2 * elements
        assert sum(reduced) == 2 * (elements + count)


def uneven_updates(stage, megabytes):
    """Two updates of two passes each: ranks use parameters in another order, and leave out others;
    one is left out by both. Returns (arrays, what was reduced, most buckets under way).
    """
    model = Small()
    most = []
    parameters = dict(model.named_parameters())
    inner = paddle.optimizer.Momentum(0.1, parameters=list(parameters.values()), momentum=0.5)
    optimizer = parallel.ShardedOptimizer(inner, stage, megabytes)
    reduce = dist.reduce
    dist.reduce = lambda tensor, *args, **options: (
        most.append((tensor.size, sum(bucket.flat is not None for bucket in optimizer.buckets))),
        reduce(tensor, *args, **options),
    )[1]
    for update in range(2):
        for turn in range(2):
            loss = 0.0
            for name in _used(rank(), update):
                loss = loss + (parameters[name] * (1 + turn + rank())).sum()
            if turn:
                loss.backward()
            else:
                with parallel.without_sync(model, optimizer):
                    loss.backward()
        parallel.reduce_gradients(model, optimizer)
        optimizer.step()
        optimizer.clear_grad()
    dist.reduce = reduce
    return model.arrays(), [size for size, _ in most], max(under_way for _, under_way in most)


def _used(place, update):
    # never head.bias
    names = ["embed", "conv.weight", "conv.bias", "fc.weight", "fc.bias", "head.weight"]
    if place:
        names = names[::-1]
        names.remove("fc.weight")
        if update:
            names.remove("conv.bias")
    elif update:
        names.remove("embed")
        names.remove("conv.bias")
    return names


CASES = [(stage, megabytes) for stage in (1, 2) for megabytes in (1e-6, 2e-4, 32)]


def all_uneven_updates():
    parallel.init(get_config(None, STAGE_1))
    return [uneven_updates(*case) for case in CASES]


def test_ranks_may_use_other_parameters_in_another_order(found):
    names = _used(0, 0)
    expected = {name: (array, 0.0) for name, array in Small().arrays().items()}
    for update in range(2):
        for name in names:  # of which one without a gradient, but with one before, has zeros
            array, momentum = expected[name]
            gradients = [3 + 2 * place for place in (0, 1) if name in _used(place, update)]
            momentum = sum(gradients) / 2 + 0.5 * momentum
            expected[name] = array - 0.1 * momentum, momentum
    for case, one, other in zip(CASES, *found["all_uneven_updates"], strict=True):
        (arrays, reduced, most), (others, others_reduced, _) = one, other
        assert reduced == others_reduced, case
        assert most <= parallel.UNDER_WAY, case
        for name, (array, _) in expected.items():
            np.testing.assert_allclose(
                arrays[name], array, rtol=0, atol=1e-6, err_msg=f"{case} {name}"
            )
            np.testing.assert_array_equal(arrays[name], others[name], err_msg=f"{case} {name}")
        np.testing.assert_array_equal(arrays["head.bias"], Small().arrays()["head.bias"])


def test_buckets_are_of_one_owner_and_one_type_up_to_their_size():
    shapes = [
        ([256, 1024], "float32"),
        ([8], "float32"),
        ([8], "float16"),
        ([512, 1024], "float32"),
        ([9], "float32"),
    ]
    parameters = [paddle.create_parameter(shape, dtype) for shape, dtype in shapes]
    owners = {p.name: owner for p, owner in zip(parameters, (0, 1, 0, 0, 0), strict=True)}
    places = {p.name: place for place, p in enumerate(parameters)}
    alone = [[4], [3], [2], [1], [0]]
    for megabytes, expected in ((1, alone), (2, alone), (4, [[2], [1], [4, 3, 0]])):
        buckets = parallel._buckets(parameters, owners, megabytes)
        assert [[places[p.name] for p in bucket.parameters] for bucket in buckets] == expected


def second_pass():
    """What stage 2 says of two passes in a row."""
    parallel.init(get_config(None, STAGE_2))
    model = Small()
    optimizer = parallel.ShardedOptimizer(
        paddle.optimizer.SGD(parameters=[model.embed, model.conv.weight]), 2
    )
    for _ in range(2):
        (model.embed.sum() + model.conv.weight.sum()).backward()
    try:
        optimizer.reduce_gradients()
    except RuntimeError as error:
        return str(error)


def test_a_second_backward_pass_before_the_update_is_told(found):
    for told in found["second_pass"]:
        assert (
            " received two gradients before an update, but stage 2 of sharding allows one (except within acc"
            in told
        )
