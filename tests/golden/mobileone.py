"""Reduced MobileOnes; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.mobileone
"""

from typing import Any

# What timm's list of blocks is made of: pairs of blocks and channels of each stage, branches, and
# pairs that squeeze.
CASES: dict[str, dict[str, Any]] = {
    "mobileone": {"d": (2, 1, 2, 1), "dims": (16, 16, 24, 32), "branches": 2, "se": ()},
    "mobileone_se": {
        "d": (1, 1, 3, 1),
        "dims": (16, 32, 128, 128),
        "branches": 1,
        "se": (0, 0, 1, 1),
    },
}
SIZES = {"mobileone": (64, 64), "mobileone_se": (37, 50)}  # the second is odd at each stage


def timms(name: str) -> Any:
    """Returns timm's model of a case."""
    from timm.models.byobnet import ByobNet, ByoModelCfg, _mobileone_bcfg

    case = CASES[name]
    widths = [dim / full for dim, full in zip(case["dims"], (64, 128, 256, 512), strict=True)]
    blocks = _mobileone_bcfg(case["d"], widths, case["se"], case["branches"])
    return ByobNet(ByoModelCfg(blocks, stem_type="one", stem_chs=case["dims"][0]), num_classes=5)


if __name__ == "__main__":
    from timm.utils.model import reparameterize_model

    from golden import trained
    from golden.convolutions import array
    from golden.record import record

    for name, size in SIZES.items():
        record(name, timms(name), size, gradients=name == "mobileone", array=array)
    record(
        "mobileone_folded",
        reparameterize_model(timms("mobileone")),
        SIZES["mobileone"],
        array=trained.array,
    )
