"""The names of tensors in files of MAE's pre-training, with the decoder."""

import re
from collections.abc import Collection

from weights.names import vit
from weights.names.rules import ENCODER_PREFIX, Arrays, rename

_DECODER = re.compile(r"^(decoder_(embed|blocks|norm|pred)\.|mask_token$)")
# What is left of transformers' names after ``weights.names.transformers``. Its release 5.24 writes
# ``decoder_encoder.layer``.
_RULES = (
    (r"^decoder\.decoder_(layers|encoder\.layer)\.", "decoder_blocks."),
    (r"^decoder\.(decoder_|mask_token$)", r"\1"),
    # It is computed here.
    (r"^decoder_pos_embed$", None),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of ``MaskedAutoencoder``.

    The encoder's have timm's names after ``encoder.``, the decoder's those of the authors.

    Sources: the authors' files, those of transformers' ``ViTMAEForPreTraining``, and this
    toolkit's.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = rename(arrays, _RULES)
    of_decoder = {name: array for name, array in arrays.items() if _DECODER.search(name)}
    of_encoder = {name: array for name, array in arrays.items() if name not in of_decoder}
    if not any(name.startswith(f"{ENCODER_PREFIX}patch_embed.") for name in of_encoder):
        own = [name.removeprefix(ENCODER_PREFIX) for name in wanted]
        named = vit.timm_names(of_encoder, layout, own)
        of_encoder = {f"{ENCODER_PREFIX}{name}": array for name, array in named.items()}
    return of_encoder | of_decoder
