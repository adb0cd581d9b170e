"""Principal components of the features of several images, as maps and colours."""

from collections.abc import Sequence

import numpy as np


def principal(maps: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the first three principal components of maps [h, w, C]: [h, w, 3], from 0 to 1.

    They are components of all maps together, as in DINOv2's figures (Oquab et al. 2023,
    arXiv:2304.07193). The largest weight of a component is positive, which fixes its sign. A
    hundredth of the values is cut off at either end.
    """
    values = _components(flattened(maps), 3)
    return _split(_scaled(values), maps)


def foreground(
    maps: Sequence[np.ndarray], threshold: float | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the first principal component of maps [h, w, C], and the next three as colours.

    In DINOv2's figures (Oquab et al. 2023, arXiv:2304.07193) the first component separates an object
    from its background. An object is rarely at the edge of an image, so the component's sign is
    the one that makes the mean at the edges the smaller one.

    Args:
        threshold: places with a smaller share of the first component are black, from 0 (none are)
            to 1. None: the one that separates two groups best (Otsu 1979).

    Returns:
        the first component of each map [h, w], and the colours [h, w, 3], all from 0 to 1. The
        colours are scaled by the places that aren't black, and a hundredth of the values is cut off
        at either end.
    """
    values = _components(flattened(maps), 4)
    edges = np.concatenate([_edges(*array.shape[:2]).ravel() for array in maps])
    # All places are edges where a map has one or two rows.
    if not edges.all() and values[edges, 0].mean() > values[~edges, 0].mean():
        values[:, 0] *= -1
    first = _scaled(values[:, :1])
    if threshold is None:
        threshold = otsu(first)
    is_shown = first[:, 0] >= threshold
    colours = np.zeros((len(values), 3))
    if is_shown.any():
        colours[is_shown] = _scaled(values[is_shown, 1:])
    return [each[:, :, 0] for each in _split(first, maps)], _split(colours, maps)


def otsu(values: np.ndarray) -> float:
    """Returns the smallest value of the upper one of two groups, whose means are as far apart as
    their sizes allow (Otsu 1979, "A threshold selection method from gray-level histograms").

    Args:
        values: of any shape. If all are equal, they are one group.
    """
    ordered = np.sort(values, axis=None)
    lower = np.arange(1, len(ordered))
    upper = len(ordered) - lower
    sums = np.cumsum(ordered)[:-1]
    distances = (ordered.sum() - sums) / upper - sums / lower
    # Equal values aren't parted.
    between = np.where(np.diff(ordered) > 0, lower * upper * distances**2, 0)
    if not between.any():
        return float(ordered[0])
    return float(ordered[between.argmax() + 1])


def flattened(maps: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the places of all maps [h, w, C], one after the other: [places, C]."""
    return np.concatenate([values.reshape(-1, values.shape[-1]) for values in maps])


def _components(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the first principal components of values [n, C]: [n, count].

    The largest weight of a component is positive. Where there are fewer channels, the other
    components are 0.
    """
    centred = values.astype(np.float64)
    centred -= centred.mean(0)
    vectors = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :count]
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(0), range(vectors.shape[1])])
    return np.pad(centred @ vectors, ((0, 0), (0, count - vectors.shape[1])))


def _scaled(values: np.ndarray) -> np.ndarray:
    """Returns values [n, k], each column from 0 to 1; a hundredth is cut off at either end."""
    low, high = np.quantile(values, [0.01, 0.99], axis=0)
    return np.clip((values - low) / np.maximum(high - low, 1e-12), 0, 1)


def _split(values: np.ndarray, maps: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns values [places, k] of all maps as one array for each of them: [h, w, k]."""
    sizes = [array.shape[:2] for array in maps]
    ends = np.cumsum([height * width for height, width in sizes])[:-1]
    return [
        part.reshape(height, width, -1)
        for part, (height, width) in zip(np.split(values, ends), sizes, strict=True)
    ]


def _edges(height: int, width: int) -> np.ndarray:
    """Returns which places of a map are in its first or last row or column: [height, width]."""
    inside = np.zeros((height, width), bool)
    inside[1:-1, 1:-1] = True
    return ~inside
