"""Writes docs/models/index.md: the costs of each shipped model beside fvcore's counts of timm's model
(golden/costs.json), and the accuracy of timm's weights (golden/published.json).

This command writes the page and settings/costs.json, or the rows of some models (a second each):

    PYTHONPATH=.:tests python tests/support/cost_table.py [NAME ...]
"""

import json
import sys
from pathlib import Path

from config import get_config, model_files
from models import list_models
from models.costs import Cost, cost
from tools.list_models import TABLE, cost_row

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "models.md"
PUBLISHED = json.loads((TESTS / "golden" / "published.json").read_text(encoding="utf-8"))
REFERENCE = json.loads((TESTS / "golden" / "costs.json").read_text(encoding="utf-8"))
HEAD = """# What the models cost, and what they reach

The table shows multiply-adds (MACs) and activations of one image. fvcore 0.1.5's counts are beside them, of timm
1.0.31's model of the same name and size. timm's published GMACs and MActs are fvcore's, too. This command shows one
model, with its memory and its layers:

```sh
python tools/model_info.py swin_tiny_patch4_window7_224 -layers
```

- *GMACs* are billions of multiply-adds of convolutions, linear layers and products of activations (attention's two).
  As in fvcore, an element of a layer norm or group norm adds 5 operations, and of a batch norm 2. They are 2 % of the
  sum in `vit_digits`, and less in all others.
- Neither counts softmax, GELU and other activation functions, sums, biases, and averages over windows. fvcore counts
  adaptive pooling, one per element that it reads. This, and the place of PoolFormer's pooling, cause the differences
  below.
- *Activations* (M) are the millions of elements that convolutions, linear layers and products return.
- NaFlexViT resizes positions by products, which are counted. timm interpolates them, which isn't.
- timm's attention was computed step by step (`set_fused_attn(False)`), because fvcore counts nothing in the fused
  operator.
- By default, fvcore ignores convolutions whose padding is "same", which are ConvMixer's depthwise ones. Its own
  function for convolutions was set for them. Without it, ConvMixer's figures would be 5 to 7 % lower.
- Models that timm lacks and PaddleViT has are counted in PaddleViT's own code, by `models/costs.py`
  (`tests/golden/make_paddlevit_costs.py`). ResT, CSwin-L and Mobile-Former have other figures in their papers
  ([PaddleViT](paddlevit.md)).
- `lenet` has no model in timm; the reference is the same layers in PyTorch. `vit_digits` is timm's ViT of these
  sizes.
- *acc1* is that of timm's most accurate weights of this size, on ImageNet-1k's validation images. These are published
  figures, not run here: `results/results-imagenet.csv` in huggingface/pytorch-image-models at aa4b5850 (8 August
  2026). The tag of the weights is in brackets; `-pretrained=hf-hub:timm/NAME.TAG` loads them. Models without one have
  no classifier there.

![Accuracy of timm's weights against parameters](accuracy.svg)

These commands write this page and its picture:

```sh
PYTHONPATH=.:tests python tests/support/cost_table.py     # tests/golden/make_costs.py made the reference
PYTHONPATH=.:tests python tests/support/accuracy_picture.py
```

| model | image | parameters | GMACs | fvcore's | difference | activations (M) | fvcore's | acc1 |
|---|---|---|---|---|---|---|---|---|
"""


def difference(found: Cost, name: str) -> float:
    """Returns how far our multiply-adds are from the reference's, as a share of these."""
    return found.macs / REFERENCE[name]["flops"] - 1


def row(name: str, found: Cost) -> str:
    theirs, (_, height, width) = REFERENCE[name], found.images
    gmacs = f"{found.macs / 1e9:,.3f} | {theirs['flops'] / 1e9:,.3f} | {100 * difference(found, name):+.2f} %"
    activations = f"{found.activations / 1e6:,.2f} | {theirs['activations'] / 1e6:,.2f}"
    cells = (
        name,
        f"{height} x {width}",
        f"{found.parameters:,}",
        gmacs,
        activations,
        published(name, height),
    )
    return f"| {' | '.join(cells)} |\n"


def published(name: str, side: int) -> str:
    if name not in PUBLISHED:
        return ""
    tag, of, accuracy = PUBLISHED[name]
    return f"{accuracy:.1f} ({tag}{'' if of == side else f', at {of}'})"


if __name__ == "__main__":
    rows = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in PAGE.read_text().splitlines(keepends=True)
    }
    rows |= {name: row(name, cost(get_config(name))) for name in sys.argv[1:] or list_models()}
    PAGE.write_text(HEAD + "".join(rows[name] for name in list_models()), encoding="utf-8")
    stored = json.loads(TABLE.read_text()) | {
        file.stem: cost_row(file)
        for file in model_files()
        if file.stem in (sys.argv[1:] or list_models())
    }
    lines = [f'"{name}": {json.dumps(stored[name])}' for name in list_models()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
