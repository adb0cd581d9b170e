"""Groups of parameters: which decay, which are frozen, and which learning rate each one has."""

from fnmatch import fnmatchcase
from typing import Any

from paddle import nn

from errors import InputError
from settings.configuration import Configuration
from settings.registry import adapters
from settings.suggestions import nearest
from weights.adapters import PROJECTION

BACKBONE = "backbone"


def decayed_parameters(config: Configuration, model: nn.Layer) -> list[str]:
    """Returns the structured names of the parameters that weight decay applies to.

    Biases, norms and those of the model's ``no_weight_decay()`` don't decay, unless TRAIN.DECAY_ALL
    is set.
    """
    decay_all = config.TRAIN.DECAY_ALL
    undecayed = model.no_weight_decay()
    return [
        name
        for name, parameter in model.named_parameters()
        if decay_all or (parameter.ndim > 1 and name not in undecayed)
    ]


def freeze(config: Configuration, model: nn.Layer) -> list[str]:
    """Freezes parameters as TRAIN.FREEZE or TRAIN.ADAPTER says; returns their structured names.

    A pattern of TRAIN.FREEZE is as a shell's (``blocks.[0-5].*``). "backbone" means every parameter
    but the classifier's. With TRAIN.ADAPTER, the adapter is added to the model here, and everything
    but the adapter and the classifier is frozen.

    Call it before ``paddle.DataParallel`` and ``build_optimizer``, which look at once for the
    parameters that are trained.

    Raises:
        InputError: an adapter has no layer to act on, a pattern matches no parameter that is
            trained, or nothing is left to train.
    """
    if name := config.TRAIN.ADAPTER.NAME:
        if not (config.MODEL.PRETRAINED or config.MODEL.RESUME):
            raise InputError(
                f"TRAIN.ADAPTER.NAME is {name}, but the weights to freeze are random;"
                " pass -pretrained=FILE"
            )
        trained = adapters.choose(config)(model)
        rest = own_parameters(model).keys() - trained
        frozen = {name for name in rest if not within(name, model.head_names())}
    else:
        frozen = _frozen_names(config, model)
    parameters = own_parameters(model)
    for name in frozen:
        parameters[name].stop_gradient = True
    if all(parameter.stop_gradient for parameter in parameters.values()):
        raise InputError(
            f"TRAIN.FREEZE {config.TRAIN.FREEZE} freezes all {len(parameters)} parameters;"
            " nothing would be trained"
        )
    return [name for name in parameters if name in frozen]


def own_parameters(model: nn.Layer) -> dict[str, Any]:
    """Returns a model's parameters by their structured names.

    The projection of a feature distillation isn't a layer of the model's own, and isn't among them.
    """
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.startswith(PROJECTION)
    }


def _frozen_names(config: Configuration, model: nn.Layer) -> set[str]:
    """Returns the names of the parameters that match TRAIN.FREEZE."""
    parameters = own_parameters(model)
    frozen: set[str] = set()
    for pattern in config.TRAIN.FREEZE or ():
        if pattern == BACKBONE:
            matching = {name for name in parameters if not within(name, model.head_names())}
        else:
            matching = {name for name in parameters if fnmatchcase(name, pattern)}
        if not matching:
            raise _unmatched(pattern, list(parameters))
        if all(parameters[name].stop_gradient for name in matching):
            raise InputError(
                f"TRAIN.FREEZE: {pattern!r} matches parameters that aren't trained anyway"
                f" ({min(matching)}); leave it out"
            )
        frozen |= matching
    return frozen


def _unmatched(pattern: str, names: list[str]) -> InputError:
    """Returns the error of a pattern that matches none of the names; it suggests the nearest."""
    layers = {
        f"{name[:index]}.*"
        for name in names
        for index, character in enumerate(name)
        if character == "."
    }
    return InputError(
        f"TRAIN.FREEZE: {pattern!r} matches no parameter, expected a pattern of names from"
        f" {names[0]} to {names[-1]}{nearest(pattern, [BACKBONE, *names, *sorted(layers)])}"
    )


def layer_scales(config: Configuration, model: nn.Layer) -> dict[str, float]:
    """Returns each parameter's factor on the learning rate, by structured name.

    The factor is LAYER_DECAY to the power of the number of layer groups after the parameter's own.
    This is as in BEiT (Bao et al. 2021, arXiv:2106.08254) and MAE. The classifier's factor is
    multiplied by HEAD_LR, and that of the layer that reads the image by PATCH_EMBED_LR, as in
    DINOv2 (Oquab et al. 2023, arXiv:2304.07193). LAYER_DECAY_GROUPS chooses the groups of the
    architecture's authors or timm's.

    Raises:
        ValueError: a parameter isn't in exactly one of the model's groups.
    """
    decay = config.TRAIN.LAYER_DECAY
    scales = {name: 1.0 for name, _ in model.named_parameters()}
    if decay is not None:
        timm = config.TRAIN.LAYER_DECAY_GROUPS == "timm"
        groups = model.timm_layer_groups() if timm else model.layer_groups()
        for name in own_parameters(model):
            holders = [index for index, prefixes in enumerate(groups) if within(name, prefixes)]
            if len(holders) != 1:
                raise ValueError(
                    f"{name} is in {len(holders)} of the model's layer groups, expected one"
                )
            scales[name] = decay ** (len(groups) - 1 - holders[0])
    if config.TRAIN.HEAD_LR != 1:
        _multiply(scales, model.head_names(), config.TRAIN.HEAD_LR)
    if config.TRAIN.PATCH_EMBED_LR != 1:
        _multiply(scales, _first_layers(model), config.TRAIN.PATCH_EMBED_LR)
    return scales


def _multiply(scales: dict[str, float], layers: tuple[str, ...], factor: float) -> None:
    """Multiplies the factors of the parameters within some layers."""
    for name in scales:
        if within(name, layers):
            scales[name] *= factor


def _first_layers(model: nn.Layer) -> tuple[str, ...]:
    """Returns the names of the layers that read the image, as the first layer group has them.

    They are a patch embedding or a stem with its norms, or a single convolution.
    """
    convolutions = (model.first_conv, *model.beside_first_conv)
    return tuple(
        prefix
        for prefix in model.layer_groups()[0]
        if any(within(name, (prefix,)) for name in convolutions)
    )


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Returns whether a name is one of the layers or parameters named, or lies within one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
