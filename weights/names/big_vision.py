"""The names of tensors in files of google-research/big_vision: ViTs, also SigLIP's.

They become the names in the .npz files of Google's ViT.
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
    """Returns arrays by the names of Google's ViT. Other files' arrays stay as they are.

    Of a model for images and texts, only the images' tower is returned. Blocks that are stacked
    along a first axis are taken apart.
    """
    prefixes = [
        prefix
        for prefix in ("params/img/", "params/")
        if any(name.startswith(prefix) for name in arrays)
    ]
    if not prefixes:
        return arrays
    prefix = prefixes[0]
    tower = {}
    for name, array in arrays.items():
        if not name.startswith(prefix):
            continue
        name = name.removeprefix(prefix)
        if name.startswith("Transformer/encoderblock/"):
            # Read at once: a lazy stack would be read again for each of its blocks.
            for number, block in enumerate(np.asarray(array)):
                tower[name.replace("encoderblock/", f"encoderblock_{number}/")] = block
        else:
            tower[name] = array
    return rename(tower, _RULES)
