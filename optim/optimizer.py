"""Optimizers."""

import paddle
from paddle import nn
from yacs.config import CfgNode


def decayed_parameters(model: nn.Layer) -> list[str]:
    """Returns the structured names of the parameters that weight decay applies to: no biases, no norms, none of the
    model's own ``no_weight_decay()``.
    """
    kept = model.no_weight_decay()
    return [name for name, parameter in model.named_parameters() if parameter.ndim > 1 and name not in kept]


def build_optimizer(config: CfgNode, model: nn.Layer) -> paddle.optimizer.Optimizer:
    """Returns the optimizer of a configuration over the model's trainable parameters; each update sets its rate."""
    decayed = set(decayed_parameters(model))
    # Paddle asks by its own names (linear_0.w_0), which say nothing of the layer: look them up by the structured ones.
    names = {parameter.name for name, parameter in model.named_parameters() if name in decayed}
    clip = config.TRAIN.GRAD_CLIP
    beta1, beta2 = config.TRAIN.OPTIMIZER.BETAS
    return paddle.optimizer.AdamW(
        learning_rate=config.TRAIN.BASE_LR,
        beta1=beta1,
        beta2=beta2,
        epsilon=config.TRAIN.OPTIMIZER.EPS,
        parameters=[p for p in model.parameters() if not p.stop_gradient],
        weight_decay=config.TRAIN.WEIGHT_DECAY,
        apply_decay_param_fun=names.__contains__,
        grad_clip=None if clip is None else nn.ClipGradByGlobalNorm(clip),
    )
