"""The model in a network that is trained without labels, identified by the names of its tensors."""

import re
from collections import Counter
from collections.abc import Collection

from errors import printable
from weights.names.guess import guess_type
from weights.names.rules import Arrays, rename

# The prefixes of models in such networks. If a file has several of these, the first one is read.
_ENCODERS = (
    # This toolkit's self-distillation: the teacher is the average of the student.
    r"^teacher\.encoder\.",
    # This toolkit's networks, and SimMIM's
    r"^encoder\.",
    # DINO's, iBOT's and DINOv2's
    r"^teacher\.(module\.)?(backbone\.)?",
    r"^student\.(module\.)?(backbone\.)?",
    # MoCo v3: of its two encoders, the one that gradients train
    r"^base_encoder\.",
)
# What these networks have beside their models, with the prefix and without it.
_REST = re.compile(
    # Masked images: MAE, PaddleViT's MAE, FCMAE, Hiera, BEiT
    r"(^|\.)(mask_token|masked_embed)$|^decoder|^(linear_projection|reconstruction_layer|proj|pred)\."
    r"|^multi_?scale_fusion|^lm_head\.|^cls_pt_layers\."
    # The projections of DINO, iBOT, DINOv2 and MoCo v3
    r"|^head\.(mlp2?\.\d+|last_layer2?)\.|^(dino_head|ibot_head)\."
    r"|^(base_encoder\.head|momentum_encoder|predictor)\."
)


def encoder_arrays(arrays: Arrays, wanted: Collection[str] = ()) -> tuple[Arrays, str]:
    """Returns the arrays of a file's model, and a note of those that are left out; "" if none are.

    A model within a network for pre-training is taken out of it: ``encoder.blocks.0...`` becomes
    ``blocks.0...``. Decoders, mask tokens and projections are left out. Other files, such as those
    whose toolkit has an ``encoder.`` within the model, keep their arrays.

    Args:
        arrays: by the file's names.
        wanted: the names of the tensors to be loaded. They are never left out. If they have a
            decoder or the like, they are a network's, and nothing is left out.
    """
    # A network for pre-training reads such layers itself, under the names of several toolkits. So
    # does one for segmentation, whose head others call a decoder.
    if any(_REST.search(name) or name.startswith("decode_head.") for name in wanted):
        return arrays, ""
    kept = {
        name: array for name, array in arrays.items() if name in wanted or not _REST.search(name)
    }
    root = ""
    for prefix in _ENCODERS:
        inside = {name: array for name, array in kept.items() if re.match(prefix, name)}
        plain = [re.sub(prefix, "", name) for name in inside]
        if guess_type(plain) is None:
            continue
        root = next(iter(inside)).partition(".")[0]
        if not any(re.match(prefix, name) for name in wanted):
            heads = {name for name, own in zip(inside, plain, strict=True) if _REST.search(own)}
            kept = {name: array for name, array in inside.items() if name not in heads}
            left_out = [name for name in arrays if name not in kept]
            return rename(kept, [(prefix, "")]), _note(left_out, root)
        break
    return kept, _note([name for name in arrays if name not in kept], root)


def _note(left_out: Collection[str], root: str) -> str:
    """Returns a note such as "left out: 84 tensors of decoder, 1 of mask_token".

    Args:
        root: the first word in the names of the model that is read. What else is within it is named
            with it: "teacher.head".
    """
    if not left_out:
        return ""
    counts: Counter[str] = Counter()
    for name in left_out:
        owner = re.match(rf"decoder|({root}\.(module\.)?(backbone\.)?)?[^.]*", name)
        counts[owner[0] if owner else name] += 1
    (first, count), *others = counts.most_common()
    plural = "tensor" if count == 1 else "tensors"
    parts = [f"{count} {plural} of {printable(first, 60)}"]
    parts += [f"{count} of {printable(name, 60)}" for name, count in others[:5]]
    if others[5:]:
        parts.append(f"{sum(count for _, count in others[5:])} more")
    return f"left out: {', '.join(parts)}"
