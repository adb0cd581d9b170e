"""The names of tensors in files of Hiera's masked pre-training, with the decoder."""

import re
from collections.abc import Collection

from weights.names import hiera
from weights.names.rules import ENCODER_PREFIX, Arrays, rename

_OTHERS = re.compile(
    r"^(multi_scale_fusion_heads\.|decoder_(embed|pos_embed|blocks|norm|pred)\b|mask_token$)"
)
# What is left of transformers' names after ``weights.names.transformers``.
_RULES = (
    (r"^multiscale_fusion\.", ""),
    (r"^decoder\.decoder_block\.layers\.", "decoder_blocks."),
    (r"^decoder\.decoder_embeddings\.", "decoder_embed."),
    (r"^decoder\.decoder_position_embeddings$", "decoder_pos_embed"),
    (r"^decoder\.(decoder_|mask_token$)", r"\1"),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of ``MaskedAutoencoderHiera``.

    Sources: facebookresearch/hiera, whose ``mae_hiera_*.pth`` have no prefix before the encoder's
    names; transformers' ``HieraForPreTraining``; and this toolkit's files.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = rename(arrays, _RULES)
    others = {name: array for name, array in arrays.items() if _OTHERS.search(name)}
    of_encoder = {
        name.removeprefix(ENCODER_PREFIX): array
        for name, array in arrays.items()
        if name not in others
    }
    own = [name.removeprefix(ENCODER_PREFIX) for name in wanted if name.startswith(ENCODER_PREFIX)]
    renamed = hiera.timm_names(of_encoder, layout, own)
    return {f"{ENCODER_PREFIX}{name}": array for name, array in renamed.items()} | others
