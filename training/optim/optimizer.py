"""The optimizer of a configuration: always a ``paddle.optimizer.Optimizer``."""

from collections.abc import Sequence

import paddle
from paddle import nn

from settings.options import Configuration
from settings.registry import optimizers
from training.optim.groups import decayed_parameters, layer_scales
from training.optim.optimizer_base import Trained


def build_optimizer(config: Configuration, model: nn.Layer) -> paddle.optimizer.Optimizer:
    """Returns the optimizer over the model's parameters (frozen ones stay); ``set_lr`` gives each
    update its rate.

    Weight decay is on ``decayed_parameters``: an L2 term of the gradient (Adam, SGD, LARS), part of
    the update (LAMB), or decoupled. ``clip_gradients`` is a step of its own for every optimizer.
    """
    decayed = set(decayed_parameters(config, model))
    scales = layer_scales(config, model)
    # Paddle asks by its own names (linear_0.w_0), which say nothing of the layer: look them up by
    # the structured ones.
    names = {parameter.name for name, parameter in model.named_parameters() if name in decayed}
    for name, parameter in model.named_parameters():
        parameter.optimize_attr["learning_rate"] = scales[name]
        parameter.regularizer = None
    trainable = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    trained = Trained(
        config.TRAIN.BASE_LR, trainable, config.TRAIN.WEIGHT_DECAY, names.__contains__
    )
    return optimizers.choose(config)(trained)


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
