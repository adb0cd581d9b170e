"""Writes block_masks.npz beside this file: statistics of the masks that BEiT's own code draws.

The code is beit/masking_generator.py of microsoft/unilm (MIT), at the commit in sources/beit.yaml:

    git -C unilm show COMMIT:beit/masking_generator.py > /tmp/masking_generator.py
    PYTHONPATH=tests:/tmp python tests/golden/make_block_masks.py
"""

import random
from pathlib import Path

import numpy as np

# rows, columns, masked patches, least block
CASES = {"beit": (14, 14, 75, 16), "wide": (8, 16, 50, 8), "digits": (4, 4, 6, 1)}
MASKS = 20_000


def statistics(draw, first_block, cells: tuple[int, int]) -> dict[str, np.ndarray]:
    """Returns histograms over many masks.

    Args:
        draw: returns a mask, [rows, columns] of 0 and 1.
        first_block: returns a mask of one block alone; it may be empty.

    Returns:
        "counts": [patches + 1], of the number of masked patches; "places": [rows, columns], how
        often each patch is masked; "shapes": [rows, columns], of height - 1 and width - 1 of the
        first block.
    """
    rows, columns = cells
    counts = np.zeros(rows * columns + 1, np.int64)
    places = np.zeros(cells, np.int64)
    shapes = np.zeros(cells, np.int64)
    for _ in range(MASKS):
        mask = draw()
        counts[mask.sum()] += 1
        places += mask
        block = first_block()
        if block.any():
            shapes[block.any(1).sum() - 1, block.any(0).sum() - 1] += 1
    return {"counts": counts, "places": places, "shapes": shapes}


def main() -> None:
    # NumPy 1.24 dropped this name, which the authors' code has.
    np.int = int
    from masking_generator import MaskingGenerator

    random.seed(0)
    stored = {}
    for name, (rows, columns, count, least) in CASES.items():
        generator = MaskingGenerator((rows, columns), count, min_num_patches=least)

        def first_block(generator=generator, count=count):
            mask = np.zeros(generator.get_shape(), int)
            generator._mask(mask, count)
            return mask

        found = statistics(generator, first_block, (rows, columns))
        stored |= {f"{name}/{key}": value for key, value in found.items()}
    np.savez_compressed(Path(__file__).with_name("block_masks.npz"), **stored)


if __name__ == "__main__":
    main()
