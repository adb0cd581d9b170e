"""The names of the tensors of PaddleViT's Trans2Seg."""

import re
from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    # The classifier of the ResNet.
    (r"^cnn_encoder\.fc\.", None),
    (r"^cnn_encoder\.", "encoder."),
    (r"^hybrid_embed\.proj\.", "decode_head.embed."),
    (r"^transformer_encoder\.blocks_encoder\.", "decode_head.blocks."),
    (r"^transformer_(en|de)coder\.", "decode_head."),
    (r"^cnn_head\.conv_c1\.", "decode_head.fine."),
    (r"^cnn_head\.", "decode_head."),
    (r"\.block\.", "."),
    # The layers that make the scores.
    (
        r"(\.(decoder\.\d+|last))\.(norm1|norm1_clsembed|fc_q|fc_kv)\.",
        r"\1.scores.\3.",
    ),
)


def head_names(arrays: Arrays, wanted: Collection[str]) -> Arrays:
    """Returns the arrays under the names of ``models.heads.trans2seg``.

    Left out is what no output reads: what the last block of the decoder makes of classes and
    places, and what the others make of the scores. Other arrays stay as they are.

    Args:
        wanted: see ``weights.names.timm_names``.
    """
    if "transformer_decoder.cls_embed" not in arrays:
        return arrays
    block = r"^transformer_decoder\.blocks_decoder\.(\d+)\.(attn\.)?"
    numbers = [int(match[1]) for name in arrays if (match := re.match(block, name))]
    last = max(numbers, default=0)

    def decoder(match: re.Match[str]) -> str:
        return "decode_head.last." if int(match[1]) == last else f"decode_head.decoder.{match[1]}."

    unread = (
        (rf"\.blocks_decoder\.{last}\.(attn\.proj|norm2|norm3|mlp|mlp2)\.", None),
        (rf"\.blocks_decoder\.(?!{last}\.)\d+\.(norm4|mlp3)\.", None),
    )
    return rename(arrays, [*unread, (block, decoder), *_RULES])
