"""Pre-trained networks under the names of transformers and MAE's authors, for round trips."""

import re

import numpy as np

from weights.names.rules import rename

# Our names and transformers', with queries, keys and values apart. {inner} is the name of the
# attention within an attention, {model} the prefix of the encoder.
_RULES = (
    (r"\.attn\.(query|key|value)\.", r".attention.{inner}.\1."),
    (r"\.attn\.cpb_mlp\.", ".attention.{inner}.continuous_position_bias_mlp."),
    (r"\.attn\.logit_scale$", ".attention.{inner}.logit_scale"),
    (
        r"\.attn\.relative_position_bias_table$",
        ".attention.{inner}.{bias}relative_position_bias_table",
    ),
    (r"\.attn\.proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.gamma_([12])$", r".lambda_\1"),
    (r"^encoder\.blocks\.", "{model}encoder.layer."),
    (r"^encoder\.layers\.", "{model}encoder.layers."),
    (r"^encoder\.rel_pos_bias\.", "{model}encoder.relative_position_bias."),
    (r"^encoder\.patch_embed\.proj\.", "{model}embeddings.patch_embeddings.projection."),
    (r"^encoder\.patch_embed\.norm\.", "{model}embeddings.norm."),
    (r"^encoder\.cls_token$", "{model}embeddings.cls_token"),
    (r"^encoder\.pos_embed$", "{model}embeddings.position_embeddings"),
    (r"^encoder\.(fc_)?norm\.", "{norm}layernorm."),
)
# Hiera's names and those of transformers.
_HIERA = (
    (r"^encoder\.head\.norm\.", "encoder_norm."),
    (r"^encoder\.patch_embed\.proj\.", "hiera.embeddings.patch_embeddings.projection."),
    (r"^encoder\.pos_embed$", "hiera.embeddings.position_embeddings"),
    (r"^multi_scale_fusion_heads\.", "multiscale_fusion.multi_scale_fusion_heads."),
    (r"^decoder_blocks\.", "decoder.decoder_block.layers."),
    (r"^decoder_embed\.", "decoder.decoder_embeddings."),
    (r"^decoder_pos_embed$", "decoder.decoder_position_embeddings"),
    (r"^(decoder_(norm|pred)\.|mask_token$)", r"decoder.\1"),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
)


def transformers_names(arrays, kind):
    """Returns a network's arrays as transformers' file of a class ForMaskedImageModeling has them.

    Args:
        arrays: by our names, in torch's layout.
        kind: "vit", "beit", "swin" or "swinv2".
    """
    is_swin = kind.startswith("swin")
    words = {
        "inner": "self" if is_swin else "attention",
        "bias": "relative_position_bias." if kind == "beit" else "",
        "model": f"{kind}.",
        "norm": "" if kind == "beit" else f"{kind}.",
    }
    rules = [(ours, theirs.format(**words)) for ours, theirs in _RULES]
    others = [
        (r"^encoder\.layers\.(\d+)\.downsample\.", _merging),
        (r"^mask_token$", f"{kind}.embeddings.mask_token"),
    ]
    return rename(_split(arrays), [*others, *rules])


def _merging(match):
    """Numbers a Swin's merging of patches by the stage before it."""
    return f"encoder.layers.{int(match[1]) - 1}.downsample."


def mae_transformers_names(arrays, decoder_pos_embed):
    """Returns the arrays of a ``MaskedAutoencoder`` of a plain ViT as ``ViTMAEForPreTraining`` has
    them.

    Args:
        decoder_pos_embed: as for ``mae_authors_names``.
    """
    split = _split(arrays) | {"decoder_pos_embed": _with_class_token(decoder_pos_embed)}
    words = {"inner": "attention", "bias": "", "model": "vit.", "norm": "vit."}
    rules = [(ours, theirs.format(**words)) for ours, theirs in _RULES]
    decoder = (
        (r"^decoder_blocks\.", "decoder.decoder_layers."),
        (r"^(decoder_(embed|norm|pred|pos_embed)\b|mask_token$)", r"decoder.\1"),
    )
    return rename(split, [*rules, *decoder])


def mae_authors_names(arrays, decoder_pos_embed):
    """Returns the arrays of a ``MaskedAutoencoder`` of a plain ViT as the authors' files have them.

    Args:
        decoder_pos_embed: the network's, [1, patches, D]; the files have a row of zeros for the
            class token before it.
    """
    named = {
        re.sub(r"^fc_norm\.", "norm.", name.removeprefix("encoder.")): array
        for name, array in arrays.items()
    }
    return named | {"decoder_pos_embed": _with_class_token(decoder_pos_embed)}


def hiera_transformers_names(arrays, depths):
    """Returns the arrays of a ``MaskedAutoencoderHiera`` as ``HieraForPreTraining`` has them.

    Args:
        depths: the blocks of each stage.
    """
    places = [(stage, layer) for stage, depth in enumerate(depths) for layer in range(depth)]

    def by_stage(match):
        return "hiera.encoder.stages.{}.layers.{}.".format(*places[int(match[1])])

    return rename(dict(arrays), ((r"^encoder\.blocks\.(\d+)\.", by_stage), *_HIERA))


def hiera_authors_names(arrays):
    """Returns the arrays of a ``MaskedAutoencoderHiera`` as the authors' files have them."""
    rules = ((r"^encoder\.head\.norm\.", "encoder_norm."), (r"^encoder\.", ""))
    return rename(dict(arrays), rules)


def _split(arrays):
    """Splits queries, keys and values, and biases of queries and values alone."""
    split = {}
    for name, array in arrays.items():
        if ".attn.qkv." in name:
            parts = zip(("query", "key", "value"), np.split(array, 3), strict=True)
            split |= {name.replace(".qkv.", f".{part}."): values for part, values in parts}
        else:
            for short, part in (("q", "query"), ("v", "value")):
                name = name.replace(f".attn.{short}_bias", f".attn.{part}.bias")
            split[name] = array
    return split


def _with_class_token(positions):
    return np.concatenate([np.zeros_like(positions[:, :1]), positions], axis=1)
