"""The table of docs/architectures.md: how many of timm's names of each family are here, and which
aren't.

Write it anew (tests/golden/make_timm_tags.py stored timm's names in settings/timm_tags.json):

    PYTHONPATH=.:tests python tests/support/timm_names.py
"""

import fnmatch
from pathlib import Path

from config import model_files
from settings.names import families, names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
HEAD = "| Families | timm's file | Names | Here | Not here |\n|---|---|---|---|---|\n"
# The families that the page claims: timm's file, and which of its names are theirs.
CLAIMED = {
    "ViT, CLIP, SigLIP, DINOv2, FlexiViT, SBB": ("vision_transformer", "*"),
    "DeiT, DeiT-III": ("deit", "*"),
    "BEiT, BEiT v2": ("beit", "*"),
    "EVA-02, DINOv3, other ViTs with rotary positions": ("eva", "*"),
    "CaiT": ("cait", "*"),
    "XCiT": ("xcit", "*"),
    "CrossViT": ("crossvit", "*"),
    "Swin": ("swin_transformer", "*"),
    "Swin V2": ("swin_transformer_v2", "*"),
    "PVTv2": ("pvt_v2", "*"),
    "PiT": ("pit", "*"),
    "VOLO": ("volo", "*"),
    "CoaT": ("coat", "*"),
    "LeViT": ("levit", "*"),
    "TinyViT": ("tiny_vit", "*"),
    "Hiera": ("hiera", "*"),
    "ConvNeXt, ConvNeXt V2": ("convnext", "*"),
    "PoolFormer, CAFormer, ConvFormer": ("metaformer", "*"),
    "MobileOne": ("byobnet", "mobileone*"),
    "MobileViT": ("mobilevit", "*"),
    "HaloNet": ("byoanet", "*halo*"),
    "MLP-Mixer, gMLP, ResMLP": ("mlp_mixer", "*"),
    "ConvMixer": ("convmixer", "*"),
    "RegNet": ("regnet", "*"),
    "ResNet": ("resnet", "*"),
}


def table() -> str:
    """Returns the rows, and one of their sums."""
    here = {names(file).get("timm", "").partition(".")[0] for file in model_files()}
    rows = []
    sums = [0, 0]
    for family, (module, pattern) in CLAIMED.items():
        theirs = [name for name in families()[module] if fnmatch.fnmatchcase(name, pattern)]
        absent = [name for name in theirs if name not in here]
        sums[0] += len(theirs)
        sums[1] += len(theirs) - len(absent)
        listed = ", ".join(f"`{name}`" for name in absent)
        rows.append(
            f"| {family} | `{module}` | {len(theirs)} | {len(theirs) - len(absent)} | {listed} |\n"
        )
    return f"{HEAD}{''.join(rows)}| **all** | | {sums[0]} | {sums[1]} | |\n"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    PAGE.write_text(f"{before}{table()}\n{rest.partition(chr(10) * 2)[2]}", encoding="utf-8")
