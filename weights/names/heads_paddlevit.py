"""The names of tensors in the files of PaddleViT's models for segmentation."""

import re
from collections.abc import Collection, Mapping

import numpy as np
import paddle

from weights.names.rules import Arrays, Rules, dense_of, rename, same_shape

# A convolution with batch norm is a Sequential there.
_CONV_NORMS: Rules = (
    (r"(convs\.\d|bottleneck)\.0\.", r"\1.conv."),
    (r"(convs\.\d|bottleneck)\.1\.", r"\1.bn."),
)
_SETR_MLA: Rules = (
    # Its network has the norms and the convolutions before the sums in the encoder.
    (r"^encoder\.norm_(\d)\.", r"decode_head.norms.\1."),
    (r"^encoder\.mla\.mla_p(\d)_1x1\.", r"decode_head.lateral_convs.\1."),
    (r"^encoder\.mla\.mla_p(\d)\.", r"decode_head.sum_convs.\1."),
    (r"^decoder\.head(\d)\.([01])\.", r"decode_head.branches.\1.0.\2."),
    (r"^decoder\.head(\d)\.3\.", r"decode_head.branches.\1.1.0."),
    (r"^decoder\.head(\d)\.4\.", r"decode_head.branches.\1.1.1."),
    (r"(\.branches\.\d\.\d)\.0\.", r"\1.conv."),
    (r"(\.branches\.\d\.\d)\.1\.", r"\1.bn."),
    (r"^decoder\.cls\.", "decode_head.classifier."),
    (r"^aux_decoder(\d)\.aux\.", r"decode_head.auxiliary.\1."),
    # There, the maps are numbered from 2.
    *((rf"(_convs|branches|auxiliary)\.{i + 2}\.", rf"\1.{i}.") for i in range(4)),
    *_CONV_NORMS,
)
_SETR_UP: Rules = (
    (r"^decoder\.", "decode_head.main."),
    *((rf"^aux_decoder{i + 2}\.", f"decode_head.auxiliary.{i}.") for i in range(4)),
    (r"\.syncbn_fc_(\d)\.", r".convs.\1.bn."),
)
_UPERNET: Rules = (
    (r"^layer_norms\.", "decode_head.norms."),
    (r"^decoder\.psp_modules\.pool_branches\.(\d)\.1\.", r"decode_head.pooled.\1.conv.conv."),
    (r"^decoder\.psp_modules\.pool_branches\.(\d)\.2\.", r"decode_head.pooled.\1.conv.bn."),
    (r"^decoder\.conv_seg\.", "decode_head.classifier."),
    (r"^aux_decoder\.convs\.0\.0\.", "decode_head.auxiliary.conv.conv."),
    (r"^aux_decoder\.convs\.0\.1\.", "decode_head.auxiliary.conv.bn."),
    (r"^aux_decoder\.conv_seg\.", "decode_head.auxiliary.classifier."),
    *_CONV_NORMS,
    (r"^decoder\.", "decode_head."),
)
_SEGMENTER: Rules = (
    (r"^norm\.", "encoder.norm."),
    (r"^decoder\.mask_tokens$", "decode_head.cls_emb"),
    (r"^decoder\.proj_decoder\.", "decode_head.proj_dec."),
    (r"^decoder\.proj_patch\.weight$", "decode_head.proj_patch"),
    (r"^decoder\.proj_class\.weight$", "decode_head.proj_classes"),
    (r"^decoder\.layers\.(\d+)\.attn_norm\.", r"decode_head.blocks.\1.norm1."),
    (r"^decoder\.layers\.(\d+)\.mlp_norm\.", r"decode_head.blocks.\1.norm2."),
    (r"^decoder\.layers\.(\d+)\.attn\.out\.", r"decode_head.blocks.\1.attn.proj."),
    (r"^decoder\.layers\.", "decode_head.blocks."),
    (r"^decoder\.head\.", "decode_head.classifier."),
    (r"^decoder\.", "decode_head."),
)
_DPT: Rules = (
    # Nothing is added to the deepest map, so these layers are computed by nothing.
    (r"^head\.refine\.3\.resblock1\.", None),
    (r"^head\.readout_oper\.(\d)\.proj\.0\.", r"decode_head.reassemble.\1.token."),
    (r"^head\.process\.(\d)\.0\.", r"decode_head.reassemble.\1.project."),
    (r"^head\.process\.(\d)\.1\.", r"decode_head.reassemble.\1.resize."),
    (r"^head\.layers_rn\.", "decode_head.convs."),
    (r"^head\.refine\.(\d)\.out_conv\.", r"decode_head.fusion.\1.project."),
    (r"^head\.refine\.(\d)\.resblock([12])\.", r"decode_head.fusion.\1.residual\2."),
    (r"^head\.head\.0\.", "decode_head.main.conv.conv."),
    (r"^head\.head\.1\.", "decode_head.main.conv.bn."),
    (r"^head\.head\.4\.", "decode_head.main.classifier."),
    (r"^(?=transformer\.)", "encoder."),
)
# Its ResNet has a classifier, which nothing reads (weights.names.trans2seg renames the rest).
_TRANS2SEG: Rules = ((r"^cnn_encoder\.fc\.", None),)


def network_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns the arrays of PaddleViT's models by the names of a network here.

    The encoder's begin with ``encoder.``, behind which they have PaddleViT's names. Other files'
    arrays stay as they are.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    rules = _rules_of(arrays)
    if not rules:
        return arrays
    arrays = rename(arrays, rules)
    if rules is _SETR_UP:
        arrays = _numbered(arrays)
    classifier = "decode_head.classifier.weight"
    if rules is _SEGMENTER and classifier in arrays:
        arrays[classifier] = dense_of(arrays[classifier], layout, 4)
    return arrays if "encoder.cls_token" in wanted else _without_token(arrays)


def unstored_arrays(arrays: Collection[str], state: Mapping[str, paddle.Tensor]) -> Arrays:
    """Returns the last norm of Swin, which PaddleViT's encoder doesn't have and UPerNet doesn't
    read: weights of 1, and biases of 0.
    """
    if _rules_of(arrays) is not _UPERNET:
        return {}
    return {
        name: np.full(tensor.shape, float(name.endswith("weight")), np.float32)
        for name, tensor in state.items()
        if name.startswith("encoder.norm.")
    }


def _rules_of(arrays: Collection[str]) -> Rules:
    """Returns the rules of the model that a file holds, or none."""
    for name, rules in (
        ("encoder.mla.mla_p2.0.weight", _SETR_MLA),
        ("decoder.syncbn_fc_0.weight", _SETR_UP),
        ("decoder.psp_modules.pool_branches.0.1.weight", _UPERNET),
        ("decoder.mask_tokens", _SEGMENTER),
        ("decoder.head.weight", _SEGMENTER),
        ("head.refine.0.out_conv.weight", _DPT),
        ("cnn_encoder.fc.weight", _TRANS2SEG),
    ):
        if name in arrays:
            return rules
    return ()


def _numbered(arrays: Arrays) -> Arrays:
    """Returns SETR's arrays with names for its convolutions. The last one has no batch norm: it is
    the classifier.

    Convolutions before a batch norm have a bias there. Here, it is subtracted from the mean.
    """
    named = {}
    for name, array in arrays.items():
        match = re.fullmatch(r"(decode_head\..*)\.conv_(\d)\.(weight|bias)", name)
        if match is None:
            named.setdefault(name, array)
            continue
        head, number, leaf = match.groups()
        norm = f"{head}.convs.{number}.bn."
        if f"{norm}running_mean" not in arrays:
            named[f"{head}.classifier.{leaf}"] = array
        elif leaf == "weight":
            named[f"{head}.convs.{number}.conv.weight"] = array
        else:
            mean = f"{norm}running_mean"
            named[mean] = np.subtract(*same_shape(arrays[mean], array, f"{mean} and {name}"))
    return named


def _without_token(arrays: Arrays) -> Arrays:
    """Returns the arrays without the class token, and its position, that SETR's ViT doesn't read."""
    arrays = dict(arrays)
    embeddings = "encoder.transformer.embeddings."
    positions = arrays.get(f"{embeddings}position_embeddings")
    if arrays.pop(f"{embeddings}cls_token", None) is not None and positions is not None:
        _, arrays[f"{embeddings}position_embeddings"] = np.split(positions, [1], axis=1)
    return arrays
