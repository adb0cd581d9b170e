"""The names of tensors in files of BEiT's pre-training."""

import re
from collections.abc import Collection

from weights.names import beit
from weights.names.rules import ENCODER_PREFIX, Arrays

# What the training alone needs: the authors' names, which the network has, too.
_HEADS = re.compile(r"(mask_token$|lm_head\.|cls_pt_layers\.)")


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of ``models.pretraining.beit.BeitPretraining``.

    Sources: beit/ and beit2/ of microsoft/unilm. Their encoder's names get a prefix; ``weights.names.beit`` says what
    becomes of these. A file that has the prefix stays as it is.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    if any(name.startswith(ENCODER_PREFIX) for name in arrays):
        return arrays
    heads = {name: array for name, array in arrays.items() if _HEADS.match(name)}
    encoder = {name: array for name, array in arrays.items() if name not in heads}
    of_encoder = [
        name.removeprefix(ENCODER_PREFIX) for name in wanted if name.startswith(ENCODER_PREFIX)
    ]
    renamed = beit.timm_names(encoder, layout, of_encoder)
    return {ENCODER_PREFIX + name: array for name, array in renamed.items()} | heads
