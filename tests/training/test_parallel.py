"""Fleet and its sharding train to the very bits of ``paddle.DataParallel``, and keep a share of the
state each.
"""

import functools
import re

import numpy as np
import paddle
import pytest
import yaml
from golden.optim_problem import gradients
from safetensors.numpy import load_file
from support.optim_model import OPTIMIZERS, Small, whole_state
from support.programs import start, wait_for_first_step
from support.ranks import run_ranks
from support.sharding import ACCUMULATED, FLEET, MIDDLE, RECIPE, STAGE_1, STAGE_2
from support.training_runs import assert_close, assert_same_run, optimizer_state, train, weights

from config import get_config, resolved_yaml
from errors import InputError
from models import build_model
from settings import merging
from settings.configuration import plain
from training import parallel
from training.checkpoint.restore import load_checkpoint
from training.optim import build_optimizer, clip_gradients, freeze
from utils import rank

# -------------------------------------------------------------- configuration


REMOVED = {
    "gradient_merge": (True, "did you mean TRAIN.ACCUM_ITER?"),
    "gradient_merge_configs.k_steps": (4, "did you mean TRAIN.ACCUM_ITER?"),
    "recompute": (True, "did you mean MODEL.RECOMPUTE?"),
    "amp": (True, "did you mean AMP?"),
    "last_comm_group_size_MB": (2.0, "did you mean DIST.STRATEGY.fuse_grad_size_in_MB?"),
}


@pytest.mark.parametrize("name", REMOVED)
def test_what_fleet_ignores_is_no_key_and_the_line_says_which_does_it(tmp_path, name):
    key, (value, line) = f"DIST.STRATEGY.{name}", REMOVED[name]
    was = merging.REMOVED[key]
    file = tmp_path / "some.yaml"
    for given in (value, was):
        with pytest.raises(InputError, match=re.escape(f"command line: unknown key {key}; {line}")):
            get_config(None, [*FLEET, key, str(given)])
        tree = functools.reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), given)
        file.write_text(yaml.safe_dump(tree))
        with pytest.raises(InputError, match=re.escape(f"{file}: unknown key {key}; {line}")):
            get_config(file)


def test_what_an_earlier_run_wrote_out_is_read_unless_it_did_something(tmp_path):
    file = tmp_path / "config.yaml"
    config = get_config(None, [*STAGE_1, "SEED", "3"])
    # before GIVEN was written, and since
    for generation in (plain(config), yaml.safe_load(resolved_yaml(config))):
        generation["DIST"]["STRATEGY"] |= {
            "gradient_merge": False,
            "gradient_merge_configs": {"k_steps": 1},
        }
        generation["DIST"]["STRATEGY"] |= {
            "recompute": False,
            "amp": False,
            "last_comm_group_size_MB": 1.0,
        }
        file.write_text(yaml.safe_dump(generation))
        assert get_config(file) == config
    generation["DIST"]["STRATEGY"]["amp"] = True
    file.write_text(yaml.safe_dump(generation))
    with pytest.raises(
        InputError, match=r"config.yaml: unknown key DIST\.STRATEGY\.amp; did you mean AMP\?"
    ):
        get_config(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [*FLEET, "DIST.STRATEGY.sharding", "1"],
            "DIST.STRATEGY.sharding takes bool, found 1 (int)",
        ),
        (STAGE_1[2:], "DIST.STRATEGY.sharding has no effect without DIST.ENGINE fleet"),
        (
            ["DIST.STRATEGY.fuse_grad_size_in_MB", "8"],
            "fuse_grad_size_in_MB has no effect without DIST.ENGINE",
        ),
        (
            [*FLEET, "DIST.STRATEGY.sharding_configs.stage", "2"],
            "stage has no effect without DIST.STRATEGY.sharding True",
        ),
        (
            [*STAGE_1, "DIST.STRATEGY.sharding_configs.stage", "4"],
            "stage is 4, expected one of 1, 2, 3",
        ),
        (
            [*STAGE_1, "DIST.STRATEGY.find_unused_parameters", "True"],
            "find_unused_parameters has no effect with DIST.STRATEGY.sharding",
        ),
        ([*FLEET, "DIST.STRATEGY.localsgd", "True"], "unknown key DIST.STRATEGY.localsgd"),
        ([*FLEET, "DIST.STRATEGY.SHARDING", "True"], "unknown key DIST.STRATEGY.SHARDING"),
        (
            ["DIST.ENGINE", "horovod"],
            "DIST.ENGINE is 'horovod', expected one of data_parallel, fleet",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(options, message):
    with pytest.raises(InputError) as caught:
        get_config(None, options)
    assert message in str(caught.value)


def test_what_fleet_carries_out_reaches_its_strategy():
    keys = {"fuse_grad_size_in_MB": 8, "find_unused_parameters": True}
    options = [word for key, value in keys.items() for word in (f"DIST.STRATEGY.{key}", str(value))]
    strategy = parallel._strategy(get_config(None, [*FLEET, *options]))
    assert {key: getattr(strategy, key) for key in keys} == keys


# ---------------------------------------------------------------- whole runs


def train_all(runs):
    """Trains; returns how many elements of state this rank has then read from the last run's
    checkpoint.
    """
    for run in runs:
        train(*run)
    options, output, _ = runs[-1]
    config = get_config(None, options)
    model = build_model(config)
    freeze(config, model)
    optimizer = parallel.wrap_optimizer(config, build_optimizer(config, model))
    load_checkpoint(output / "checkpoints" / "last", model, optimizer)
    return sum(value.size for value in optimizer._accumulators_holder.values())


@pytest.mark.smoke
def test_fleet_and_sharding_train_to_the_bits_of_data_parallel_and_go_on_from_each_other(
    tmp_path, tiny
):
    options = [*tiny, *RECIPE]
    drops = ["MODEL.DROPOUT", "0.1", "MODEL.DROPPATH", "0.2"]
    engines = {
        "parallel": ACCUMULATED,
        "fleet": [*FLEET, *ACCUMULATED],
        "stage 1": [*STAGE_1, *ACCUMULATED],
        "stage 2": [*STAGE_2, *ACCUMULATED],
        "on stage 1": [*STAGE_1, *ACCUMULATED, "MODEL.RESUME", str(tmp_path / "parallel" / MIDDLE)],
        "off stage 1": [*ACCUMULATED, "MODEL.RESUME", str(tmp_path / "stage 1" / MIDDLE)],
    }
    runs = [([*options, *drops, *words], tmp_path / name, 64) for name, words in engines.items()]
    plain = [([*options, *STAGE_2], tmp_path / "shared", 64)]
    read = run_ranks(train_all, [*runs, *plain])
    for name in ("fleet", "stage 1", "on stage 1", "off stage 1"):
        assert_same_run(tmp_path / "parallel", tmp_path / name)
    # The owner adds a step's gradients to those of the step before one after the other: the last
    # bits may differ.
    assert_close(weights(tmp_path / "parallel"), weights(tmp_path / "stage 2"), atol=1e-6)
    alone = [*options, "DATA.BATCH_SIZE", "16", "MODEL.RESUME", str(tmp_path / "shared" / MIDDLE)]
    train(alone, tmp_path / "alone", 64)
    assert_close(weights(tmp_path / "shared"), weights(tmp_path / "alone"), atol=1e-5)
    shared, alone = (
        optimizer_state(tmp_path / name / "checkpoints" / "last") for name in ("shared", "alone")
    )
    assert_close(shared, alone, atol=1e-5)
    assert sum(read) == sum(value.size for value in shared.values())
    assert max(read) < 0.6 * sum(read)


@pytest.mark.slow
def test_three_ranks_share_out_the_state_and_bring_it_together(tmp_path, tiny):
    runs = [
        ([*tiny, *RECIPE, *words], tmp_path / name, 96)
        for name, words in (("parallel", []), ("shared", STAGE_1))
    ]
    run_ranks(train_all, runs, ranks=3)
    ends = [tmp_path / run / "checkpoints" / "last" for run in ("parallel", "shared")]
    for name in ("model", "ema"):
        assert_close(*(load_file(end / f"{name}.safetensors") for end in ends), atol=1e-5)
    assert_close(*map(optimizer_state, ends), atol=1e-5)


@pytest.mark.slow
def test_a_sharded_run_that_is_stopped_goes_on_without_sharding_to_the_bits_of_a_whole_one(
    tmp_path, program
):
    options = ["-o", "TRAIN.NUM_EPOCHS", "3", "TRAIN.WARMUP_EPOCHS", "2", "REPORT_FREQ", "1"]
    with start(tmp_path, "-output=stopped", *options, *STAGE_2) as process:
        wait_for_first_step(process, tmp_path / "stopped")
        process.terminate()
        assert process.wait(120) == 143
    for name, flags in (("stopped", ["-resume=auto"]), ("whole", [])):
        status, _, errors = program(
            "main_multi_gpu.py", "-cfg=vit_digits", f"-output={name}", *flags, *options
        )
        assert status == 0, errors
    assert (
        "fleet, sharding stage 2: parameters per rank in the optimizer's state: 68,096, 68,042 parameters"
        in (tmp_path / "stopped" / "log.txt").read_text()
    )
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


# ------------------------------------------------------------------- updates


def updates(optimizer, scale, engine=(), mode="norm"):
    """Three updates of a small model whose gradients are the formula's times ``scale`` (None: rank
    + 1).

    Returns (parameters, norms, the whole state, elements of it here, gradients held after the
    backward pass, and left for the update).
    """
    options = [
        "TRAIN.OPTIMIZER.NAME",
        optimizer,
        "TRAIN.WEIGHT_DECAY",
        "0.1",
        "TRAIN.LAYER_DECAY",
        "0.5",
    ]
    config = get_config(
        None, [*options, "TRAIN.GRAD_CLIP", "0.3", "TRAIN.GRAD_CLIP_MODE", mode, *engine]
    )
    model = Small()
    norms = []
    parameters = dict(model.named_parameters())
    wrapped = parallel.wrap_optimizer(config, build_optimizer(config, model))
    for step in range(3):
        model.set_gradients(gradients(step))
        factors = {name: parameter.grad.clone() for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.clear_gradient(False)
        loss = sum((parameter * factors[name]).sum() for name, parameter in parameters.items())
        (loss * (scale or rank() + 1)).backward()
        held = [name for name, parameter in parameters.items() if parameter.grad is not None]
        parallel.reduce_gradients(model, wrapped)
        left = [name for name, parameter in parameters.items() if parameter.grad is not None]
        norms.append(clip_gradients(config, model).item())
        wrapped.step()
        wrapped.clear_grad()
    here = sum(
        int(np.prod(value.shape))
        for value in wrapped.state_dict().values()
        if hasattr(value, "shape")
    )
    return model.arrays(), norms, whole_state(model, wrapped), here, held, left


def all_updates():
    """What ``updates`` returns, by optimizer and stage; the refusal of more ranks than parameters;
    a rank's strays.
    """
    parallel.init(get_config(None, STAGE_1))
    found = {
        (name, stage): updates(name, None, engine)
        for name in OPTIMIZERS
        for stage, engine in STAGES.items()
    }
    found |= {(mode, 1): updates("SGD", None, STAGE_1, mode) for mode in ("value", "agc")}
    only = paddle.optimizer.SGD(parameters=[Small().embed])
    try:
        parallel.ShardedOptimizer(only, 1)
    except InputError as error:
        found["refused"] = str(error)
    return found


STAGES = {1: STAGE_1, 2: STAGE_2}


@pytest.mark.smoke
def test_every_optimizer_updates_its_share_by_the_ranks_mean_gradient():
    found = run_ranks(all_updates)
    refused = [own.pop("refused") for own in found]
    message = "DIST.STRATEGY.sharding: 2 processes, but only 1 trained parameters; lower -ngpus, or set DIST.STRATEGY"
    assert refused == [f"{message}.sharding to False"] * 2
    for name, stage in found[0]:
        mode = name if name in ("value", "agc") else "norm"
        expected, norms, state, whole, names, _ = updates(
            "SGD" if mode == name else name, 1.5, mode=mode
        )
        first, second = (own[name, stage] for own in found)
        for arrays, own_norms, *_ in (first, second):
            assert own_norms == norms
            for key, value in expected.items():
                np.testing.assert_array_equal(arrays[key], value, err_msg=f"{name} {stage} {key}")
        assert second[2] == {}
        assert first[2].keys() == state.keys()
        for key, value in state.items():
            np.testing.assert_array_equal(first[2][key], value, err_msg=f"{name} {stage} {key}")
        assert first[3] + second[3] == whole
        assert max(first[3], second[3]) < 0.7 * whole
        assert sorted(first[5] + second[5]) == sorted(names)  # each gradient is left with one rank
        assert (first[4] == names) if stage == 1 else (first[4] == first[5])
