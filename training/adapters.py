"""Training few parameters of a frozen model: the methods of TRAIN.ADAPTER.NAME.

An adapter is a function (model) -> the structured names of the parameters that train. The
classifier always trains besides.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from errors import InputError
from models.base import ImageModel
from models.layers.linear import Linear
from models.layers.lora import adapt, call_by_layer
from settings.keys import Positive, Rate, Size
from settings.registry import adapters
from settings.suggestions import nearest
from training.optim.groups import within


@adapters.register("lora")
def lora(
    model: ImageModel,
    *,
    rank: Size = 8,
    alpha: Positive = 16.0,
    targets: Sequence[str] = ("*.attn.qkv", "*.attn.proj"),
    dropout: Rate = 0.0,
) -> set[str]:
    """Trains low-rank products beside Linears: Hu et al. 2021, arXiv:2106.09685.

    Args:
        rank: rank of the two low-rank matrices that LoRA adds to a Linear layer.
        alpha: scale of LoRA: the product of its matrices is multiplied by alpha / rank.
        targets: name patterns of the Linear layers that get LoRA, such as ["*.qkv",
            "blocks.[6-9].mlp.fc?"].
        dropout: dropout rate of the input of LoRA's first matrix.

    Raises:
        InputError: a pattern matches no layer, or a rank is larger than a layer.
    """
    layers = {
        name: layer
        for name, layer in model.named_sublayers()
        if type(layer) is Linear and not within(name, model.head_names())
    }
    chosen: set[str] = set()
    for pattern in targets:
        matching = {name for name in layers if fnmatchcase(name, pattern)}
        if not matching:
            # Names without their block's number, as patterns are mostly written.
            ends = {f"*.{name.partition('.')[2].lstrip('0123456789.')}" for name in layers}
            raise InputError(
                f"TRAIN.ADAPTER.TARGETS: {pattern!r} matches none of the {len(layers)} Linear"
                " layers"
                f" other than the classifier{nearest(pattern, [*layers, *sorted(ends)])}"
            )
        chosen |= matching
    # In the model's order, so that the new matrices get the same random numbers each time.
    for name in layers:
        if name not in chosen:
            continue
        smaller_side = min(layers[name].weight.shape)
        if rank > smaller_side:
            raise InputError(
                f"TRAIN.ADAPTER.RANK is {rank}, expected 1 to {smaller_side} (the smaller side"
                f" of {name})"
            )
        adapt(layers[name], rank, alpha, dropout)
    if dropout:
        call_by_layer(model)
    return {f"{name}.{matrix}.weight" for name in chosen for matrix in ("lora_A", "lora_B")}


@adapters.register("prompt")
def prompt(model: ImageModel) -> set[str]:
    """Trains prompt tokens (MODEL.PROMPT_TOKENS): Jia et al. 2022, arXiv:2203.12119.

    Raises:
        InputError: the model has none.
    """
    names = {name for name, _ in model.named_parameters() if name == "prompt_tokens"}
    if not names:
        raise InputError(
            "TRAIN.ADAPTER.NAME is prompt, but the model has no prompt tokens;"
            " set MODEL.PROMPT_TOKENS 10"
        )
    return names


@adapters.register("bitfit")
def bitfit(model: ImageModel) -> set[str]:
    """Trains the biases: Ben Zaken et al. 2021, arXiv:2106.10199.

    Raises:
        InputError: the model has none.
    """
    names = {name for name, p in model.named_parameters() if p.ndim == 1 and name.endswith("bias")}
    if not any(not within(name, model.head_names()) for name in names):
        raise InputError(
            f"TRAIN.ADAPTER.NAME is bitfit, but {type(model).__name__} has no biases"
            " except in the classifier"
        )
    return names
