"""Which parameters decay, which stay as they are, and each one's factor on the learning rate."""

from fnmatch import fnmatchcase

from paddle import nn

from errors import InputError
from settings.options import Configuration, nearest
from settings.registry import adapters
from weights.adapters import PROJECTION

BACKBONE = "backbone"


def decayed_parameters(config: Configuration, model: nn.Layer) -> list[str]:
    """Returns the structured names of the parameters that weight decay applies to: no biases, no
    norms, none of the model's own ``no_weight_decay()``; with DECAY_ALL every one.
    """
    kept = model.no_weight_decay()
    every = config.TRAIN.DECAY_ALL
    return [
        name
        for name, parameter in model.named_parameters()
        if every or (parameter.ndim > 1 and name not in kept)
    ]


def freeze(config: Configuration, model: nn.Layer) -> list[str]:
    """Freezes what TRAIN.ADAPTER leaves as it is, or the parameters that TRAIN.FREEZE names;
    returns their structured names.

    An adapter is added to the model here. A pattern is the shell's (``blocks.[0-5].*``); "backbone"
    is every parameter but the classifier's. It comes before ``paddle.DataParallel`` and
    ``build_optimizer``, which take the trainable parameters as they find them.

    Raises:
        InputError: an adapter has nothing to act on, a pattern matches no parameter, or nothing is
            left to train.
    """
    if name := config.TRAIN.ADAPTER.NAME:
        if not (config.MODEL.PRETRAINED or config.MODEL.RESUME):
            raise InputError(
                f"TRAIN.ADAPTER.NAME is {name}, but the weights that it freezes are random; give -pretrained=FILE"
            )
        trained = adapters.choose(config)(model)
        rest = {name for name, _ in model.named_parameters()} - trained
        frozen = {name for name in rest if not within(name, model.classifier_names())}
    else:
        frozen = _frozen_names(config, model)
    parameters = dict(model.named_parameters())
    for name in frozen:
        parameters[name].stop_gradient = True
    if all(parameter.stop_gradient for parameter in parameters.values()):
        raise InputError(
            f"TRAIN.FREEZE {config.TRAIN.FREEZE} leaves none of {len(parameters)} parameters to train"
        )
    return [name for name in parameters if name in frozen]


def _frozen_names(config: Configuration, model: nn.Layer) -> set[str]:
    """The parameters that TRAIN.FREEZE names."""
    parameters = dict(model.named_parameters())
    frozen: set[str] = set()
    for pattern in config.TRAIN.FREEZE or ():
        if pattern == BACKBONE:
            found = {name for name in parameters if not within(name, model.classifier_names())}
        else:
            found = {name for name in parameters if fnmatchcase(name, pattern)}
        if not found:
            first, *_, last = parameters
            folders = {
                f"{name[:dot]}.*"
                for name in parameters
                for dot, letter in enumerate(name)
                if letter == "."
            }
            raise InputError(
                f"TRAIN.FREEZE: {pattern!r} matches no parameter, expected a pattern of names from {first} to {last}"
                f"{nearest(pattern, [BACKBONE, *parameters, *sorted(folders)])}"
            )
        frozen |= found
    return frozen


def layer_scales(config: Configuration, model: nn.Layer) -> dict[str, float]:
    """Returns each parameter's factor on the learning rate, by structured name.

    LAYER_DECAY ** (layer groups after its own), as in BEiT (Bao et al. 2021, arXiv:2106.08254) and
    MAE, times HEAD_LR for the classifier. LAYER_DECAY_GROUPS says whose groups: the architecture's
    authors' or timm's.

    Raises:
        ValueError: the model's groups don't hold each parameter once.
    """
    decay = config.TRAIN.LAYER_DECAY
    head_rate = config.TRAIN.HEAD_LR
    scales = {name: 1.0 for name, _ in model.named_parameters()}
    if decay is not None:
        timm = config.TRAIN.LAYER_DECAY_GROUPS == "timm"
        groups = model.timm_layer_groups() if timm else model.layer_groups()
        for name in scales:
            if name.startswith(PROJECTION):  # no layer of the model's own
                continue
            holders = [index for index, prefixes in enumerate(groups) if within(name, prefixes)]
            if len(holders) != 1:
                raise ValueError(
                    f"{name} is in {len(holders)} of the model's layer groups, expected one"
                )
            scales[name] = decay ** (len(groups) - 1 - holders[0])
    if head_rate != 1:
        heads = model.classifier_names()
        scales = {
            name: scale * (head_rate if within(name, heads) else 1.0)
            for name, scale in scales.items()
        }
    return scales


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
