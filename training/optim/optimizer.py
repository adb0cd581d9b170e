"""The optimizer of a configuration: always a ``paddle.optimizer.Optimizer``."""

import paddle
from paddle import nn
from paddle.regularizer import L2Decay
from yacs.config import CfgNode

from training.optim.adamw import AdamW
from training.optim.groups import decayed_parameters, layer_scales
from training.optim.lars import Lars
from training.optim.lion import Lion
from training.optim.muon import Muon


def build_optimizer(config: CfgNode, model: nn.Layer) -> paddle.optimizer.Optimizer:
    """Returns the optimizer over the model's parameters (frozen ones stay); ``set_lr`` gives each update its rate.

    Behaviour is that of torch.optim.AdamW, Adam, SGD and Muon (``adjust_lr_fn="match_rms_adamw"``; AdamW for what is no
    matrix), of timm.optim.Lamb and Lion, and of MAE's LARS. Weight decay, on ``decayed_parameters``, is an L2 term of
    the gradient for Adam, SGD and LARS, part of the update for LAMB, and decoupled for the others. timm's Lamb also
    clips the gradients' norm at 1; here ``clip_gradients`` is a step of its own for every optimizer.
    """
    train, options = config.TRAIN, config.TRAIN.OPTIMIZER
    coupled = options.NAME in ("Adam", "SGD", "LARS")
    decayed, scales = set(decayed_parameters(config, model)), layer_scales(config, model)
    # Paddle asks by its own names (linear_0.w_0), which say nothing of the layer: look them up by the structured ones.
    names = {parameter.name for name, parameter in model.named_parameters() if name in decayed}
    for name, parameter in model.named_parameters():
        parameter.optimize_attr["learning_rate"] = scales[name]
        parameter.regularizer = L2Decay(train.WEIGHT_DECAY) if coupled and name in decayed else None
    common = {"learning_rate": train.BASE_LR, "parameters": [p for p in model.parameters() if not p.stop_gradient]}
    betas = {"beta1": options.BETAS[0], "beta2": options.BETAS[1]}
    adam = {**common, **betas, "epsilon": options.EPS}
    decoupled = {"weight_decay": train.WEIGHT_DECAY, "apply_decay_param_fun": names.__contains__}
    match options.NAME:
        case "AdamW":
            return AdamW(**adam, **decoupled)
        case "Adam":
            return paddle.optimizer.Adam(**adam)
        case "SGD":
            return paddle.optimizer.Momentum(**common, momentum=options.MOMENTUM, use_nesterov=options.NESTEROV)
        case "LAMB":
            decay = {"lamb_weight_decay": train.WEIGHT_DECAY}
            return paddle.optimizer.Lamb(**adam, **decay, exclude_from_weight_decay_fn=lambda p: p.name not in names)
        case "LARS":
            return Lars(**common, momentum=options.MOMENTUM, trust_coefficient=options.TRUST_COEFFICIENT)
        case "Lion":
            return Lion(**common, **betas, **decoupled)
        case "Muon":
            return Muon(**adam, **decoupled, momentum=options.MOMENTUM, nesterov=options.NESTEROV)
    raise ValueError(f"no optimizer {options.NAME}")
