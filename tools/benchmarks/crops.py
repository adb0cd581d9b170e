"""Cuts photographs into a small dataset for -dataset=folder: each photograph is a class.

    python tools/benchmarks/crops.py FOLDER OUTPUT [--side 64] [--train 60] [--val 20]

Training crops come from the left 62 % of a photograph, validation crops from its right 35 %, so
they share no pixels. A crop's side is 40 to 90 % of the largest that fits the validation part; its
place and side are drawn with seed 0. FOLDER holds the photographs, OUTPUT is made.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

_PARTS = {"train": (0.0, 0.62), "val": (0.65, 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--train", type=int, default=60)
    parser.add_argument("--val", type=int, default=20)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    for file in sorted(arguments.folder.iterdir()):
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        largest = min(image.height, (_PARTS["val"][1] - _PARTS["val"][0]) * image.width)
        for part, (left, right) in _PARTS.items():
            folder = arguments.output / part / file.stem
            folder.mkdir(parents=True)
            first = left * image.width
            width = (right - left) * image.width
            for index in range(getattr(arguments, part)):
                side = rng.uniform(0.4, 0.9) * largest
                x = first + rng.uniform(0, width - side)
                y = rng.uniform(0, image.height - side)
                size = (arguments.side, arguments.side)
                box = (x, y, x + side, y + side)
                crop = image.resize(size, Image.Resampling.LANCZOS, box)
                crop.save(folder / f"{index:03}.png")


if __name__ == "__main__":
    main()
