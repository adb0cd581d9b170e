"""The optimizer of a configuration, and the optimizers that Paddle has."""

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.base.layer_helper import LayerHelper

from errors import InputError
from settings.configuration import Configuration
from settings.registry import optimizers
from training.optim.groups import decayed_parameters, layer_scales
from training.optim.optimizer_base import Trained
from training.optim.schedule import cosine_between


def build_optimizer(config: Configuration, model: nn.Layer) -> paddle.optimizer.Optimizer:
    """Returns the optimizer of the model's parameters, except frozen ones.

    The caller gives each update its learning rate by ``set_lr``, and clips gradients by
    ``clip_gradients``. Weight decay applies to ``decayed_parameters``. It is an L2 term of the
    gradient (Adam, SGD, LARS), part of the update (LAMB), or decoupled (all others). Where it
    changes (TRAIN.WEIGHT_DECAY_END), the caller sets it by ``set_weight_decay``.

    Raises:
        InputError: TRAIN.WEIGHT_DECAY_END can't change this optimizer's weight decay.
    """
    decayed = set(decayed_parameters(config, model))
    scales = layer_scales(config, model)
    # Paddle's optimizers ask by Paddle's names (linear_0.w_0), which don't name the layer.
    decayed_names = {
        parameter.name for name, parameter in model.named_parameters() if name in decayed
    }
    # Set for each parameter, because an optimizer that was built before may have left other values.
    for name, parameter in model.named_parameters():
        parameter.optimize_attr["learning_rate"] = scales[name]
        parameter.regularizer = None
    trainable = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    trained = Trained(
        rate=config.TRAIN.BASE_LR,
        parameters=trainable,
        weight_decay=config.TRAIN.WEIGHT_DECAY,
        decays=decayed_names.__contains__,
    )
    optimizer = optimizers.choose(config)(trained)
    if config.TRAIN.WEIGHT_DECAY_END is not None and not set_weight_decay(
        optimizer, config.TRAIN.WEIGHT_DECAY
    ):
        raise InputError(
            f"TRAIN.WEIGHT_DECAY_END is {config.TRAIN.WEIGHT_DECAY_END:g}, but the weight decay of"
            f" {config.TRAIN.OPTIMIZER.NAME} can't be changed during training; leave it out"
        )
    return optimizer


def weight_decay_at(config: Configuration, share: float) -> float:
    """Returns the weight decay at a share of the run's updates that have passed, from 0 to 1.

    It goes from WEIGHT_DECAY to WEIGHT_DECAY_END along a cosine, as DINO's
    (Caron et al. 2021, arXiv:2104.14294).
    """
    begin = config.TRAIN.WEIGHT_DECAY
    end = config.TRAIN.WEIGHT_DECAY_END
    if end is None:
        return begin
    return cosine_between(begin, end, share)


def set_weight_decay(optimizer: Any, value: float) -> bool:
    """Changes the weight decay of the parameters that decay.

    A decoupled decay is in ``_weight_decay``, as Paddle's AdamW has it, LAMB's in
    ``_lamb_weight_decay``. An L2 term is in the parameters' regularizers.

    Args:
        optimizer: not wrapped.

    Returns:
        Whether there is a weight decay.
    """
    found = False
    for attribute in ("_weight_decay", "_lamb_weight_decay"):
        if hasattr(optimizer, attribute):
            setattr(optimizer, attribute, value)
            found = True
    for parameter in optimizer._parameter_list:
        if parameter.regularizer is not None:
            parameter.regularizer._coeff = value
            found = True
    return found


@paddle.no_grad()
def create_state(optimizer: Any) -> None:
    """Gives each parameter the state that Paddle makes at its first update, or what was restored.

    A parameter may have no gradient in the first updates. Its state is then saved and restored
    like that of the others. It counts its updates from its first gradient on, as torch does.

    Args:
        optimizer: not wrapped.
    """
    # Paddle 2.6 sets it in the first step.
    optimizer.helper = LayerHelper(type(optimizer).__name__)
    trained = [parameter for parameter in optimizer._parameter_list if not parameter.stop_gradient]
    block = paddle.static.default_main_program().global_block()
    optimizer._create_accumulators(block, trained)


@optimizers.register("Adam")
def adam(trained: Trained, *, betas: Sequence[float], eps: float) -> paddle.optimizer.Optimizer:
    """Updates as torch.optim.Adam."""
    return paddle.optimizer.Adam(
        **trained.with_coupled_decay(), beta1=betas[0], beta2=betas[1], epsilon=eps
    )


@optimizers.register("SGD")
def sgd(trained: Trained, *, momentum: float, nesterov: bool) -> paddle.optimizer.Optimizer:
    """Updates as torch.optim.SGD."""
    return paddle.optimizer.Momentum(
        **trained.with_coupled_decay(), momentum=momentum, use_nesterov=nesterov
    )


@optimizers.register("LAMB")
def lamb(trained: Trained, *, betas: Sequence[float], eps: float) -> paddle.optimizer.Optimizer:
    """Updates as timm.optim.Lamb, but without its clipping of the gradients' norm at 1."""
    return paddle.optimizer.Lamb(
        **trained.without_decay(),
        beta1=betas[0],
        beta2=betas[1],
        epsilon=eps,
        lamb_weight_decay=trained.weight_decay,
        exclude_from_weight_decay_fn=lambda parameter: not trained.decays(parameter.name),
    )
