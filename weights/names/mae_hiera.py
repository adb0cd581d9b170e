"""The names of tensors in files of Hiera's masked pre-training, with the decoder."""

import re
from collections.abc import Collection, Mapping

import numpy as np

from weights.names import hiera
from weights.names.rules import Arrays, rename

_ENCODER = "encoder."
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
# Our names of blocks, and those of transformers.
_BLOCK = (
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
)
_TRANSFORMERS = (
    (r"^encoder\.head\.norm\.", "encoder_norm."),
    (r"^encoder\.patch_embed\.proj\.", "hiera.embeddings.patch_embeddings.projection."),
    (r"^encoder\.pos_embed$", "hiera.embeddings.position_embeddings"),
    (r"^multi_scale_fusion_heads\.", "multiscale_fusion.multi_scale_fusion_heads."),
    (r"^decoder_blocks\.", "decoder.decoder_block.layers."),
    (r"^decoder_embed\.", "decoder.decoder_embeddings."),
    (r"^decoder_pos_embed$", "decoder.decoder_position_embeddings"),
    (r"^(decoder_(norm|pred)\.|mask_token$)", r"decoder.\1"),
    *_BLOCK,
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
        name.removeprefix(_ENCODER): array for name, array in arrays.items() if name not in others
    }
    own = [name.removeprefix(_ENCODER) for name in wanted if name.startswith(_ENCODER)]
    renamed = hiera.timm_names(of_encoder, layout, own)
    return {f"{_ENCODER}{name}": array for name, array in renamed.items()} | others


def authors_names(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Returns the arrays of a ``MaskedAutoencoderHiera`` as the authors' files have them.

    Args:
        arrays: by our names, in torch's layout.
    """
    rules = ((r"^encoder\.head\.norm\.", "encoder_norm."), (r"^encoder\.", ""))
    return rename(dict(arrays), rules)


def transformers_names(arrays: Mapping[str, np.ndarray], depths: Collection[int]) -> Arrays:
    """Returns the arrays of a ``MaskedAutoencoderHiera`` as transformers' ``HieraForPreTraining``
    loads them.

    Args:
        arrays: as for ``authors_names``.
        depths: the blocks of each stage, STAGE_DEPTHS.
    """
    places = [(stage, layer) for stage, depth in enumerate(depths) for layer in range(depth)]

    def by_stage(match: re.Match[str]) -> str:
        return "hiera.encoder.stages.{}.layers.{}.".format(*places[int(match[1])])

    return rename(dict(arrays), ((r"^encoder\.blocks\.(\d+)\.", by_stage), *_TRANSFORMERS))
