"""The model of ``golden.optim_problem``: one parameter of each kind."""

import numpy as np
import paddle
from golden.formula import array
from golden.optim_problem import BETAS, EPS, MOMENTUM, SHAPES, WEIGHT_DECAY
from paddle import nn

from config import get_config, with_values
from settings.registry import optimizers
from training.checkpoint.saver import optimizer_state
from utils import all_gather, rank


def whole_state(model, optimizer):
    """Returns the whole optimizer state on rank 0, and {} on other ranks. Every rank has to call
    it.
    """
    shares = all_gather(
        {key: tensor.numpy() for key, tensor in optimizer_state(model, optimizer).items()}
    )
    if rank():
        return {}
    return {key: array for share in shares for key, array in share.items()}


class Small(nn.Layer):
    """Four layers with the parameters of golden/optim.npz. Arrays are in torch's layout."""

    first_conv = "conv"
    beside_first_conv = ()
    window_side = None

    def __init__(self):
        super().__init__()
        self.embed = self.create_parameter(list(SHAPES["embed"]))
        self.conv = nn.Conv2D(3, 4, 2)
        self.fc = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)
        for name, parameter in self.named_parameters():
            parameter.set_value(_turned(name, array(name, SHAPES[name])))

    def set_gradients(self, gradients):
        for name, parameter in self.named_parameters():
            if not parameter.stop_gradient:
                parameter.grad = paddle.to_tensor(_turned(name, gradients[name]))

    def arrays(self, of=lambda parameter: parameter):
        return {
            name: _turned(name, of(parameter).numpy())
            for name, parameter in self.named_parameters()
        }

    def layer_groups(self):
        return [("embed", "conv"), ("fc",), ("head",)]

    def timm_layer_groups(self):
        return [("embed",), ("conv", "fc"), ("head",)]

    def classifier_names(self):
        return ("head",)

    def head_names(self):
        return ("head",)

    def no_weight_decay(self):
        return {"embed"}


def _turned(name, value):
    return np.ascontiguousarray(value.T) if name in ("fc.weight", "head.weight") else value.copy()


OPTIMIZERS = optimizers.names()
# Each optimizer, and each that has a Nesterov momentum with it.
OPTIMIZER_CASES = [
    *OPTIMIZERS,
    *(
        f"{name} nesterov"
        for name, component in optimizers.components.items()
        if "nesterov" in component.keys
    ),
]
# Keys of all optimizers of the golden file: not each optimizer reads each of them.
PROBLEM = {
    "TRAIN.WEIGHT_DECAY": WEIGHT_DECAY, "TRAIN.OPTIMIZER.BETAS": list(BETAS), "TRAIN.OPTIMIZER.EPS": EPS,
    "TRAIN.OPTIMIZER.MOMENTUM": MOMENTUM, "TRAIN.LAYER_DECAY": 0.5, "TRAIN.HEAD_LR": 3,
}  # fmt: skip


def with_options(values):
    """Returns the default configuration with other values, by key."""
    return with_values(
        get_config(), **{key.replace(".", "__"): value for key, value in values.items()}
    )
