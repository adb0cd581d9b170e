"""The search for images that look alike, by a perceptual hash of 64 bits."""

import itertools
from collections.abc import Callable

import numpy as np

# The hashes of two images that look alike differ in so many bits at most.
DISTANCE = 4
# A hash is compared with so many of those that share two pieces with it.
_MOST = 1000
# Pixels along a side of the grey image, and frequencies along a side that the hash is made from.
_SIDE = 32
_FREQUENCIES = 8


def perceptual_hashes(images: np.ndarray) -> np.ndarray:
    """Returns a perceptual hash of each image, [n] uint64.

    The hash is pHash (Zauner 2010, "Implementation and benchmarking of perceptual image hash
    functions"). It takes the cosine transform of the grey image at 32 x 32. Each of the lowest 8 x
    8 frequencies gives a bit, which says whether it is above their median. Scaling, compression and
    brightness change few bits; crops, turns and mirrors change many.

    Args:
        images: [n, S, S, 3] uint8, with S a multiple of 32.
    """
    count = len(images)
    side = images.shape[1] // _SIDE
    grey = images @ np.array([0.299, 0.587, 0.114], np.float32)
    grey = grey.reshape(count, _SIDE, side, _SIDE, side).mean((2, 4))
    frequencies = np.arange(_FREQUENCIES)[:, None]
    pixels = np.arange(_SIDE)
    waves = np.cos(np.pi * frequencies * (2 * pixels + 1) / (2 * _SIDE))
    amplitudes = (waves @ grey @ waves.T).reshape(count, -1)
    bits = amplitudes > np.median(amplitudes, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


def near_pairs(
    hashes: np.ndarray, meet: Callable[[np.ndarray, np.ndarray], None], distance: int = DISTANCE
) -> int:
    """Calls ``meet`` with all pairs of hashes that differ in ``distance`` bits at most.

    Two such hashes agree in two pieces at least, if they are cut into ``distance`` + 2 pieces. So
    a hash is compared only with hashes that share two pieces with it, and with _MOST of these for
    each two pieces. A million random hashes are compared three million times. With one piece in
    common it would be 370 million times.

    Args:
        hashes: [n] uint64, each once.
        meet: takes the places of both hashes of each pair, [k] and [k]. Some pairs come twice.

    Returns:
        How often a hash had more to be compared with; pairs of these may be missed.
    """
    missed = 0
    bits = np.uint64(1) << np.arange(64, dtype=np.uint64)
    for two_pieces in itertools.combinations(np.array_split(bits, distance + 2), 2):
        keys = hashes & np.bitwise_or.reduce(np.concatenate(two_pieces))
        # Hashes with the same key stand beside each other in this order.
        order = np.lexsort((hashes, keys))
        ordered = hashes[order]
        keys = keys[order]
        ahead = np.arange(len(hashes))
        # Each is compared with the one that is ``step`` places behind it, as long as both have the
        # same key.
        for step in itertools.count(1):
            ahead = ahead[ahead + step < len(hashes)]
            ahead = ahead[keys[ahead] == keys[ahead + step]]
            if step > _MOST or not len(ahead):
                break
            alike = ahead[count_bits(ordered[ahead] ^ ordered[ahead + step]) <= distance]
            meet(order[alike], order[alike + step])
        missed += len(ahead)
    return missed


def count_bits(values: np.ndarray) -> np.ndarray:
    """Returns how many bits of each value are set: [n] uint64 -> [n] uint64.

    NumPy 1 has no function for this. Neighbouring sums of 1, 2 and 4 bits are added, and a
    multiplication then adds the sums of the eight bytes.
    """
    pairs = np.uint64(0x5555555555555555)
    fours = np.uint64(0x3333333333333333)
    bytes_ = np.uint64(0x0F0F0F0F0F0F0F0F)
    ones = np.uint64(0x0101010101010101)
    values = values - ((values >> np.uint64(1)) & pairs)
    values = (values & fours) + ((values >> np.uint64(2)) & fours)
    return (((values + (values >> np.uint64(4))) & bytes_) * ones) >> np.uint64(56)
