"""All ranks begin with rank 0's weights, whatever each of them has loaded."""

import numpy as np
import paddle
import pytest
from conftest import without
from safetensors.numpy import load_file
from support.ranks import run_ranks
from support.training_runs import RESNET_OPTIONS, assert_same_run, train

from config import get_config
from models import build_model
from training import engine, parallel, setup
from utils import rank
from weights import load_weights, save_weights


class Enough(Exception):
    """Carries the weights with which a rank would begin."""


def arrays_of(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def begun(options, folder):
    """This rank's weights before the first step, or before the evaluation, by model and name, where
    rank 1 has loaded the same file and computed other values of it.
    """

    def load(model, *args, **how):
        report = load_weights(model, *args, **how)
        for tensor in model.state_dict().values() if rank() else ():
            tensor.set_value(tensor + 1)
        return report

    def stop(training, *_):
        raise Enough(
            {split: arrays_of(model) for split, model in training.evaluated_models.items()}
        )

    def stop_evaluation(task, model, *_):
        raise Enough({"val": arrays_of(model)})

    setup.load_weights = load
    engine.train_one_epoch = stop
    engine.evaluate = stop_evaluation
    try:
        train(options, folder / "new")
    except Enough as enough:
        return enough.args[0]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    [[], ["DIST.ENGINE", "fleet"], ["TRAIN.MODEL_EMA", "True"], ["EVAL", "True"]],
    ids=["data_parallel", "fleet", "average", "evaluation"],
)
def test_all_ranks_begin_with_rank_0s_weights(tmp_path, tiny, options):
    save_weights(build_model(get_config(None, tiny)), tmp_path / "stored.safetensors")
    options = [
        *without(tiny, "TRAIN."),
        "MODEL.PRETRAINED",
        str(tmp_path / "stored.safetensors"),
        *options,
    ]
    first, second = run_ranks(begun, options, tmp_path)
    stored = load_file(tmp_path / "stored.safetensors")
    assert ("ema" in first) == ("TRAIN.MODEL_EMA" in options)
    for split, arrays in first.items():
        np.testing.assert_array_equal(arrays["norm.bias"], stored["norm.bias"])
        for name, array in arrays.items():
            np.testing.assert_array_equal(second[split][name], array, err_msg=f"{split} {name}")


def train_and_go_on(folder):
    options = [*RESNET_OPTIONS, "SAVE_STEPS", "1", "KEEP_LAST", "9"]
    train(options, folder / "whole", 32)
    middle = str(folder / "whole/checkpoints/epoch_0001_sample_000000016")
    train([*options, "MODEL.RESUME", middle], folder / "resumed", 32)


@pytest.mark.long
def test_within_an_epoch_ranks_go_on_with_their_own_statistics_of_batch_norm(tmp_path):
    run_ranks(train_and_go_on, tmp_path)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


class Odd(paddle.nn.Layer):
    """Values of several types, which differ from rank to rank."""

    def __init__(self):
        super().__init__()
        self.frozen = self.create_parameter([3, 2])
        self.frozen.stop_gradient = True
        self.norm = paddle.nn.BatchNorm1D(2)
        self.register_buffer("count", paddle.to_tensor([7, 8]) + rank())
        self.register_buffer(
            "unsaved", paddle.to_tensor([rank() == 0, rank() > 0]), persistable=False
        )
        for tensor in (self.frozen, self.norm.weight, self.norm._mean, self.norm._variance):
            tensor.set_value(paddle.full(tensor.shape, 5.0 + rank()))


def sent():
    model = Odd()
    parallel.broadcast_weights(model, without=["norm._mean"])
    return {
        name: tensor.tolist()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def test_parameters_and_buffers_of_every_type_are_rank_0s():
    for place, found in enumerate(run_ranks(sent, ranks=3)):
        assert found.pop("norm._mean") == [5.0 + place] * 2
        assert found.pop("norm.bias") == [0.0, 0.0]
        expected = {
            "frozen": [[5.0] * 2] * 3,
            "norm.weight": [5.0] * 2,
            "norm._variance": [5.0] * 2,
        }
        assert found == expected | {"count": [7, 8], "unsaved": [True, False]}
