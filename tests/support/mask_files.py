"""Small images with masks, in files."""

import numpy as np
from PIL import Image

CLASSES = ("background", "disc", "square")


def write_masks(folder, train=16, val=5, seed=0):
    """Writes images of 17 to 29 pixels a side with a disc and a square, and their masks, in the
    layout of -dataset=masks. A tenth of the pixels have no class (255).
    """
    rng = np.random.default_rng(seed)
    for part, count in (("train", train), ("val", val)):
        for kind in ("images", "masks"):
            (folder / kind / part).mkdir(parents=True)
        for index in range(count):
            height, width = rng.integers(17, 30, 2)
            mask = drawn(rng, height, width)
            picture = rng.integers(0, 60, (height, width, 3)) + 60 * mask[:, :, None]
            mask[rng.random(mask.shape) < 0.1] = 255
            name = f"{part}/{index}.png"
            Image.fromarray(picture.astype(np.uint8)).save(folder / "images" / name)
            Image.fromarray(mask.astype(np.uint8)).save(folder / "masks" / name)
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")


def drawn(rng, height, width):
    """Returns a mask [height, width] of a disc and a square over background."""
    mask = np.zeros((height, width), np.int64)
    y, x = np.mgrid[:height, :width]
    centre = rng.integers(3, [height - 3, width - 3])
    mask[(y - centre[0]) ** 2 + (x - centre[1]) ** 2 < rng.integers(9, 40)] = 1
    top, left = rng.integers(0, [height - 6, width - 6])
    mask[top : top + 6, left : left + 6] = 2
    return mask
