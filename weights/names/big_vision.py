"""ViTs of google-research/big_vision, SigLIP's among them: their names in the .npz files of
Google's ViT.
"""

import numpy as np

from weights.names.rules import Arrays, rename

_BLOCK = r"^(Transformer/encoderblock_\d+/)"
_RULES = (
    (r"^pos_embedding$", "Transformer/posembed_input/pos_embedding"),
    (_BLOCK + "MultiHeadDotProductAttention_0/", r"\1MultiHeadDotProductAttention_1/"),
    (_BLOCK + "MlpBlock_0/", r"\1MlpBlock_3/"),
    (_BLOCK + "LayerNorm_1/", r"\1LayerNorm_2/"),
)


def google_layers(arrays: Arrays) -> Arrays:
    """Returns arrays by the names of Google's ViT; where there is a tower for texts, those of the
    images' tower.

    Blocks that were stacked along a first axis are taken apart.
    """
    prefixes = ("params/img/", "params/")
    prefix = next((one for one in prefixes if any(name.startswith(one) for name in arrays)), None)
    if prefix is None:
        return arrays
    found = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            stacked = name.startswith("Transformer/encoderblock/")
            # A lazy stack would be read once for each of its blocks.
            for i, one in enumerate(np.asarray(array)) if stacked else ((0, array),):
                found[name.replace("encoderblock/", f"encoderblock_{i}/")] = one
    return rename(found, _RULES)
