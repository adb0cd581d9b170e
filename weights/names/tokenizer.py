"""The names of tensors in files of BEiT's tokenizers."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^quantize\.embedding\.weight$", "codebook"),
    # The counts of features, and whether the codes are initialised.
    (r"^quantize\.", None),
    # The teacher of its training.
    (r"^(teacher_model|scaling_layer)\.", None),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of ``models.pretraining.tokenizer.Tokenizer``.

    Sources: beit2/ of microsoft/unilm, such as ``vqkd_encoder_base_decoder_3x768x12_clip``. The
    network has their names of the encoder, the decoder and the task layers.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
