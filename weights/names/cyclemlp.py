"""The names of tensors in files of CycleMLP."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

# The offsets of the deformable convolutions, which are the same in all files.
_RULES = ((r"\.sfc_[hw]\.offset$", None),)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of the authors' ``CycleNet``, which the others have.

    Sources: the files of ShoufaChen/CycleMLP and of PaddleViT.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
