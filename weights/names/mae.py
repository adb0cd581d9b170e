"""The names of tensors in files of MAE's pre-training, with the decoder."""

import re
from collections.abc import Collection, Mapping

import numpy as np

from weights.names import vit
from weights.names.rules import Arrays, rename

ENCODER = "encoder."
_DECODER = re.compile(r"^(decoder_(embed|blocks|norm|pred)\.|mask_token$)")
# What is left of transformers' names after ``weights.names.transformers``. Its release 5.24 writes
# ``decoder_encoder.layer``.
_RULES = (
    (r"^decoder\.decoder_(layers|encoder\.layer)\.", "decoder_blocks."),
    (r"^decoder\.(decoder_|mask_token$)", r"\1"),
    # It is computed here.
    (r"^decoder_pos_embed$", None),
)
# Our names and those of transformers, with queries, keys and values apart.
_TRANSFORMERS = (
    (r"^encoder\.blocks\.", "vit.encoder.layer."),
    (r"^decoder_blocks\.", "decoder.decoder_layers."),
    (r"\.attn\.(query|key|value)\.", r".attention.attention.\1."),
    (r"\.attn\.proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"^encoder\.patch_embed\.proj\.", "vit.embeddings.patch_embeddings.projection."),
    (r"^encoder\.cls_token$", "vit.embeddings.cls_token"),
    (r"^encoder\.pos_embed$", "vit.embeddings.position_embeddings"),
    (r"^encoder\.(fc_)?norm\.", "vit.layernorm."),
    (r"^(decoder_(embed|norm|pred|pos_embed)\b|mask_token$)", r"decoder.\1"),
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
    if not any(name.startswith(f"{ENCODER}patch_embed.") for name in of_encoder):
        own = [name.removeprefix(ENCODER) for name in wanted]
        named = vit.timm_names(of_encoder, layout, own)
        of_encoder = {f"{ENCODER}{name}": array for name, array in named.items()}
    return of_encoder | of_decoder


def authors_names(arrays: Arrays, decoder_pos_embed: np.ndarray) -> Arrays:
    """Returns the arrays of a ``MaskedAutoencoder`` of a plain ViT as the authors' files have them.

    Args:
        arrays: by our names, in torch's layout.
        decoder_pos_embed: the network's, [1, patches, D]; the files have a row of zeros for the
            class token before it.
    """
    named = {
        re.sub(r"^fc_norm\.", "norm.", name.removeprefix(ENCODER)): array
        for name, array in arrays.items()
    }
    return named | {"decoder_pos_embed": _with_class_token(decoder_pos_embed)}


def transformers_names(arrays: Mapping[str, np.ndarray], decoder_pos_embed: np.ndarray) -> Arrays:
    """Returns the arrays of a ``MaskedAutoencoder`` of a plain ViT as transformers'
    ``ViTMAEForPreTraining`` loads them.

    Args:
        arrays, decoder_pos_embed: as for ``authors_names``.
    """
    split: Arrays = {"decoder_pos_embed": _with_class_token(decoder_pos_embed)}
    for name, array in arrays.items():
        if ".attn.qkv." in name:
            parts = zip(("query", "key", "value"), np.split(array, 3), strict=True)
            split |= {name.replace(".qkv.", f".{part}."): values for part, values in parts}
        else:
            split[name] = array
    return rename(split, _TRANSFORMERS)


def _with_class_token(positions: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(positions[:, :1]), positions], axis=1)
