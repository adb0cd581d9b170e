"""BEiT's masks of blocks (Bao et al. 2021, arXiv:2106.08254, algorithm 1)."""

import math

import numpy as np

from errors import InputError

# So many places are tried for one block.
_ATTEMPTS = 10


def block_mask(
    rng: np.random.Generator,
    grid: tuple[int, int],
    count: int,
    min_block: int = 16,
    min_aspect: float = 0.3,
) -> np.ndarray:
    """Returns which patches of an image are masked: rectangles that may overlap.

    A block's area is uniform between ``min_block`` and the number of patches that are still to be
    masked, the logarithm of its aspect ratio between those of ``min_aspect`` and its inverse.
    Blocks are added until ``count`` patches are masked, or until none of ten blocks fits. So a mask
    may have fewer patches, but never more, and at least one.

    Args:
        rng: the sample's generator.
        grid: rows and columns of patches.
        count: the number of patches to mask; ``check_blocks`` says which are possible.
        min_block: the least area of a block, in patches. Less may be left for the last blocks.
        min_aspect: the least height over width of a block.

    Returns:
        [rows * columns] uint8, row by row: 1 where a patch is masked.
    """
    mask = np.zeros(grid, np.uint8)
    masked = 0
    while masked < count:
        if _add_block(rng, mask, count - masked, min_block, min_aspect):
            masked = int(mask.sum())
        elif masked:
            break
    return mask.reshape(-1)


def _add_block(
    rng: np.random.Generator, mask: np.ndarray, most: int, min_block: int, min_aspect: float
) -> bool:
    """Masks one more block, in place. Returns whether one was found.

    Args:
        most: the largest number of patches that it may add. It adds at least one.
    """
    rows, columns = mask.shape
    widest = -math.log(min_aspect)
    for _ in range(_ATTEMPTS):
        area = rng.uniform(min(min_block, most), max(min_block, most))
        aspect = math.exp(rng.uniform(-widest, widest))
        height = round(math.sqrt(area * aspect))
        width = round(math.sqrt(area / aspect))
        if height >= rows or width >= columns:
            continue
        top = int(rng.integers(rows - height + 1))
        left = int(rng.integers(columns - width + 1))
        block = mask[top : top + height, left : left + width]
        if 0 < block.size - int(block.sum()) <= most:
            block[:] = 1
            return True
    return False


def check_blocks(
    grid: tuple[int, int], count: int, min_block: int, key: str = "METHOD.MASK_RATIO"
) -> None:
    """Checks that ``block_mask`` can draw a block.

    Args:
        key: the key that says how many patches are masked.

    Raises:
        InputError: nothing or everything would be masked, or no block fits.
    """
    rows, columns = grid
    patches = rows * columns
    where = f"of {rows} x {columns} patches"
    if patches == 1:
        raise InputError(
            "an image has 1 patch, but masking needs several; use smaller patches or larger images"
        )
    if not 0 < count < patches:
        raise InputError(
            f"{key} masks {count} {where}, expected 1 to {patches - 1}; change it, or use"
            " smaller patches or larger images"
        )
    # A square block: those of other aspect ratios are longer.
    side = round(math.sqrt(min_block))
    if side * side > count or side >= min(grid):
        raise InputError(
            f"METHOD.MIN_BLOCK is {min_block}, but no block of this size fits into the {count}"
            f" masked {where};"
            " lower it"
        )
