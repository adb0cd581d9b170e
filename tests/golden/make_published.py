"""Writes published.json: the accuracy of timm's weights on ImageNet-1k's validation images, by our
names.

    PYTHONPATH=. python tests/golden/make_published.py results/results-imagenet.csv

The file is huggingface/pytorch-image-models's, at aa4b5850 (8 August 2026). Of several weights of
one architecture the most accurate are kept, of the model's own image size if there are any; NAMES
may tell the tag. Each row: tag, side of the images in pixels, acc1 in percent.
"""

import csv
import json
import sys
from pathlib import Path

from config import get_config, model_files
from settings.names import names

if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8", newline="") as lines:
        rows = [
            (*row["model"].partition(".")[::2], int(row["img_size"]), float(row["top1"]))
            for row in csv.DictReader(lines)
        ]
    found = {}
    for file in sorted(model_files(), key=lambda file: file.stem):
        name, _, wanted = names(file).get("timm", "").partition(".")
        own_size = get_config(file.stem).DATA.IMAGE_SIZE
        fitting = [row[1:] for row in rows if row[0] == name and wanted in ("", row[1])]
        if fitting:
            found[file.stem] = max(fitting, key=lambda row: (row[1] == own_size, row[2]))
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    (Path(__file__).parent / "published.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
