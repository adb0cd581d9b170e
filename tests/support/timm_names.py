"""Writes the table of docs/models/index.md: for each family, the number of timm's names that are
available here, and those that aren't.

tests/golden/make_timm_tags.py stored timm's names in settings/timm_tags.json. This command writes
the table:

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
    "NaFlexViT": ("naflexvit", "*"),
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
    "BoTNet": ("byoanet", "botnet*"),
    "MLP-Mixer, gMLP, ResMLP": ("mlp_mixer", "*"),
    "ConvMixer": ("convmixer", "*"),
    "RegNet": ("regnet", "*"),
    "ResNet": ("resnet", "*"),
}


def table() -> str:
    """Returns the rows, and a row of their sums."""
    here = {names(file).get("timm", "").partition(".")[0] for file in model_files()}
    rows = []
    total = 0
    total_available = 0
    for family, (module, pattern) in CLAIMED.items():
        timm_names = [name for name in families()[module] if fnmatch.fnmatchcase(name, pattern)]
        missing = [name for name in timm_names if name not in here]
        available = len(timm_names) - len(missing)
        total += len(timm_names)
        total_available += available
        listed = ", ".join(f"`{name}`" for name in missing)
        rows.append(f"| {family} | `{module}` | {len(timm_names)} | {available} | {listed} |\n")
    return f"{HEAD}{''.join(rows)}| **all** | | {total} | {total_available} | |\n"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    PAGE.write_text(f"{before}{table()}\n{rest.partition(chr(10) * 2)[2]}", encoding="utf-8")
