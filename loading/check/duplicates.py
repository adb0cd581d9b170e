"""Images that look alike, by a hash of 64 bits of what they show."""

import itertools
from collections.abc import Callable

import numpy as np

DISTANCE = 4  # bits in which the hashes of two pictures may differ that count as alike
_MOST = 1000  # hashes with which one is compared, of those that share the same two parts with it
_SUMS = 0x0101010101010101
# pixels; frequencies along each side that are kept
_SIDE = 32
_KEPT = 8


def perceptual_hashes(images: np.ndarray) -> np.ndarray:
    """Returns what images look like: [n, S, S, 3] uint8 -> [n] uint64. S is a multiple of 32.

    The hash is pHash (Zauner 2010, "Implementation and benchmarking of perceptual image hash
    functions"). It takes the cosine transform of the grey image at 32 x 32. Each of the lowest 8 x
    8 frequencies gives a bit: whether it is above their median. Scaling, compression and brightness
    change few bits; crops, turns and mirrors change many.
    """
    count = len(images)
    side = images.shape[1] // _SIDE
    grey = images @ np.array([0.299, 0.587, 0.114], np.float32)
    grey = grey.reshape(count, _SIDE, side, _SIDE, side).mean((2, 4))
    rows, columns = np.arange(_KEPT)[:, None], np.arange(_SIDE)
    waves = np.cos(np.pi * rows * (2 * columns + 1) / (2 * _SIDE))
    found = (waves @ grey @ waves.T).reshape(count, -1)
    bits = found > np.median(found, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


def near_pairs(
    hashes: np.ndarray, meet: Callable[[np.ndarray, np.ndarray], None], distance: int = DISTANCE
) -> int:
    """Calls ``meet(i, j)`` with the places of hashes that differ in ``distance`` bits at most: all
    pairs, some twice.

    Cut into two parts more than ``distance``, two such hashes agree in at least two parts. So a
    hash is compared only with hashes that share two parts with it, up to _MOST for each two parts.
    A million random hashes are compared three million times; with one part in common, it would be
    370 million.

    Args:
        hashes: [n] uint64, each once.

    Returns:
        How often a hash had more to be compared with; those pairs may be missed.
    """
    missed = 0
    cut = np.array_split(np.uint64(1) << np.arange(64, dtype=np.uint64), distance + 2)
    for two in itertools.combinations(cut, 2):
        parts = hashes & np.bitwise_or.reduce(np.concatenate(two))
        order = np.lexsort((hashes, parts))
        ordered = hashes[order]
        parts = parts[order]
        ahead = np.arange(len(hashes))
        for step in itertools.count(1):
            ahead = ahead[ahead + step < len(hashes)]
            ahead = ahead[parts[ahead] == parts[ahead + step]]
            if step > _MOST or not len(ahead):
                break
            alike = ahead[count_bits(ordered[ahead] ^ ordered[ahead + step]) <= distance]
            meet(order[alike], order[alike + step])
        missed += len(ahead)
    return missed


def count_bits(values: np.ndarray) -> np.ndarray:
    """Returns how many bits are set: [n] uint64 -> [n] uint64 (NumPy 1 has no function for it)."""
    pairs, fours, eights, sums = map(
        np.uint64, (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F, _SUMS)
    )
    one, two, four, most = map(np.uint64, (1, 2, 4, 56))
    values = values - ((values >> one) & pairs)
    values = (values & fours) + ((values >> two) & fours)
    return (((values + (values >> four)) & eights) * sums) >> most
