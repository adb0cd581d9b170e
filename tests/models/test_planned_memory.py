"""The memory of a training, computed: against the bytes that two processes hold."""

import numpy as np
import pytest
from support.ranks import run_ranks
from support.sharding import STAGE_1, STAGE_2

from config import get_config
from models import build_model
from models.memory import TrainingMemory, largest_share
from training import parallel
from training.checkpoint.saver import optimizer_state
from training.optim import build_optimizer

MODELS = ("vit_digits", "resnet18")
ENGINES = {1: STAGE_1, 2: STAGE_2}


def num_bytes(tensors):
    return sum(tensor.size * tensor.element_size() for tensor in tensors)


def held():
    """By model and stage, the bytes of weights, gradients and moments that this process holds at an
    update.
    """
    found = {}
    for name in MODELS:
        for stage, engine in ENGINES.items():
            config = get_config(name, [*engine, "TRAIN.OPTIMIZER.NAME", "AdamW"])
            parallel.init(config)
            model = build_model(config)
            optimizer = parallel.wrap_optimizer(config, build_optimizer(config, model))
            trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
            sum(parameter.sum() for parameter in trained).backward()
            parallel.reduce_gradients(model, optimizer)
            gradients = num_bytes(
                parameter.grad for parameter in trained if parameter.grad is not None
            )
            optimizer.step()
            state = optimizer_state(model, optimizer)
            moments = num_bytes(tensor for key, tensor in state.items() if "pow_acc" not in key)
            found[name, stage] = num_bytes(trained), gradients, moments
    return found


def test_weights_gradients_and_moments_are_what_two_processes_hold():
    ranks = run_ranks(held)
    for name, stage in ranks[0]:
        planned = TrainingMemory(get_config(name)).per_process(stage, 2, 1)
        weights, gradients, moments = np.max([own[name, stage] for own in ranks], axis=0)
        assert weights == planned.weights
        assert moments == planned.moments
        # In the backward pass a rank has all gradients with stage 1. At the update it has its own,
        # with both.
        assert planned.gradients == (planned.weights if stage == 1 else gradients)


@pytest.mark.parametrize(("ranks", "share"), [(1, 20), (2, 10), (3, 8), (4, 8)])
def test_the_largest_share_is_that_of_parameters_given_to_who_has_least(ranks, share):
    assert largest_share([2, 3, 8, 2, 5], ranks) == share


def test_what_changes_a_part_changes_it_alone():
    name = "vit_digits"
    plain = TrainingMemory(get_config(name))
    half = TrainingMemory(get_config(name, ["AMP", "True"])).per_process(0, 1, 4)
    again = TrainingMemory(get_config(name, ["MODEL.RECOMPUTE", "True"])).per_process(0, 1, 4)
    whole = plain.per_process(0, 1, 4)
    assert whole[:4] == (4 * 136138, 0, 4 * 136138, 8 * 136138)
    assert plain.per_process(0, 1, 8).activations == 2 * whole.activations
    assert half == whole._replace(copies=2 * 136138, activations=half.activations)
    assert half.activations == pytest.approx(whole.activations / 2, abs=4)
    assert again == whole._replace(activations=again.activations)
    # The inputs of 4 blocks of 17 tokens, and what one block keeps.
    assert again.activations < whole.activations / 2
    assert plain.per_process(3, 8, 4) == plain.per_process(2, 8, 4)._replace(
        weights=plain.per_process(3, 8, 4).weights
    )
    assert plain.per_process(3, 8, 4).weights < 0.7 * whole.weights
