"""The names of tensors in transformers' models of an encoder with UPerNet or DPT."""

import re
from collections.abc import Collection, Mapping

import numpy as np
import paddle

from weights.names import transformers
from weights.names.rules import ENCODER_PREFIX, Arrays, rename

# Names that no other files have.
_OF_UPERNET = re.compile(r"^decode_head\.psp_modules\.\d\.1\.")
_OF_DPT = re.compile(r"^neck\.fusion_stage\.layers\.\d\.")
_RULES = (
    (r"^backbone\.", ""),
    (r"^auxiliary_head\.convs\.0\.", "decode_head.auxiliary.conv."),
    (r"^auxiliary_head\.classifier\.", "decode_head.auxiliary.classifier."),
    (r"^decode_head\.psp_modules\.(\d)\.1\.", r"decode_head.pooled.\1.conv."),
    (r"^(decode_head\..*)\.batch_norm\.", r"\1.bn."),
    # BEiT
    (r"^fpn1\.0\.", "decode_head.pyramid.enlarge4."),
    (r"^fpn1\.1\.", "decode_head.pyramid.norm."),
    (r"^fpn1\.3\.", "decode_head.pyramid.enlarge2."),
    (r"^fpn2\.0\.", "decode_head.pyramid.enlarge."),
    # DPT. Nothing reads the first residual layer of the deepest map.
    (r"^dpt\.", ""),
    (r"^neck\.fusion_stage\.layers\.0\.residual_layer1\.", None),
    (r"^neck\.reassemble_stage\.readout_projects\.(\d)\.0\.", r"decode_head.reassemble.\1.token."),
    (r"^neck\.reassemble_stage\.layers\.(\d)\.projection\.", r"decode_head.reassemble.\1.project."),
    (r"^neck\.reassemble_stage\.layers\.(\d)\.resize\.", r"decode_head.reassemble.\1.resize."),
    (r"^neck\.convs\.", "decode_head.convs."),
    # transformers counts from the deepest map.
    (
        r"^neck\.fusion_stage\.layers\.(\d)\.",
        lambda match: f"decode_head.fusion.{3 - int(match[1])}.",
    ),
    (r"\.residual_layer([12])\.convolution", r".residual\1.conv"),
    (r"\.residual_layer([12])\.batch_norm", r".residual\1.bn"),
    (r"^(decode_head\.fusion\.\d)\.projection\.", r"\1.project."),
    (r"^head\.head\.", "decode_head.main."),
    (r"^auxiliary_head\.head\.", "decode_head.auxiliary."),
    (r"^(decode_head\.(main|auxiliary))\.0\.", r"\1.conv.conv."),
    (r"^(decode_head\.(main|auxiliary))\.1\.", r"\1.conv.bn."),
    (r"^(decode_head\.(main|auxiliary))\.4\.", r"\1.classifier."),
)
_STORED_NORM = re.compile(r"^(backbone\.(\w+\.)?|beit\.|dpt\.)layernorm\.weight$")
_LAST_NORM = re.compile(r"^encoder\.(norm|fc_norm|head\.norm)\.(weight|bias)$")


def network_names(arrays: Arrays) -> Arrays:
    """Returns the arrays of transformers' models by the names of a network here.

    The encoder's begin with ``encoder.`` and have its family's names. Other files' arrays stay as
    they are.
    """
    if not _is_known(arrays):
        return arrays
    norms = sorted({match[1] for match in map(_norm_of, arrays) if match})
    head = {}
    encoder = {}
    for name, array in rename(arrays, _RULES).items():
        if match := _norm_of(name):
            name = f"decode_head.norms.{norms.index(match[1])}.{match[2]}"
        if name.startswith("decode_head."):
            head[name] = array
        else:
            encoder[name] = array
    encoder = transformers.timm_names(encoder)
    return head | {ENCODER_PREFIX + name: array for name, array in encoder.items()}


def _norm_of(name: str) -> re.Match[str] | None:
    """Returns (the stage, the rest of the name) of the norm of a backbone's map."""
    return re.match(r"(?:backbone\.)?hidden_states_norms\.stage(\d)\.(\w+)$", name)


def _is_known(names: Collection[str]) -> bool:
    return any(_OF_UPERNET.match(name) or _OF_DPT.match(name) for name in names)


def unstored_arrays(arrays: Arrays, state: Mapping[str, paddle.Tensor]) -> Arrays:
    """Returns the encoder's last norm, which transformers' backbones don't have, and which no head
    of theirs reads: weights of 1, and biases of 0.
    """
    if not _is_known(arrays) or any(map(_STORED_NORM.match, arrays)):
        return {}
    return {
        name: np.full(tensor.shape, float(name.endswith("weight")), np.float32)
        for name, tensor in state.items()
        if _LAST_NORM.match(name)
    }
