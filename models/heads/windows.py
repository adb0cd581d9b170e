"""The logits of each pixel of an image of any size: whole or in windows that slide over it, at one
size or averaged over several, handed on in strips of rows.

An evaluation, a prediction and the answer of an export are all computed by ``pixel_logits``, so they
are the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.nn import functional as F

from models.heads.base import resized
from settings.configuration import Configuration, pair
from settings.registry import heads

# Numbers in a strip of logits: 4 MB.
_STRIP = 1 << 20
# The smallest probability that a mean of several views may have: its logarithm stays finite.
_LEAST = 1e-30

Forward = Callable[[paddle.Tensor], paddle.Tensor]


class Way(NamedTuple):
    """How the maps of an image are computed.

    Attributes:
        window: (height, width) of the windows.
        stride: how many pixels the next window is further down and to the right; None: there is one
            window, the whole image.
        scales: factors on the image's sides. The probabilities of all of them are averaged.
        flip: whether the mirror image of each is computed, too.
        gives_log_scores: whether logits are logarithms of scores (``Head.gives_log_scores``).
    """

    window: tuple[int, int]
    stride: tuple[int, int] | None = None
    scales: Sequence[float] = (1.0,)
    flip: bool = False
    gives_log_scores: bool = False

    @property
    def has_one_view(self) -> bool:
        """Whether an image is computed once, at its own size."""
        return not self.flip and list(self.scales) == [1.0]


def way_of(config: Configuration, scales: Sequence[float], flip: bool) -> Way:
    """Returns how the maps of a configuration's model are computed.

    Args:
        scales, flip: see ``Way``.
    """
    head, _ = heads.load(config.HEAD.NAME)
    return Way(
        window=pair(config.DATA.IMAGE_SIZE),
        stride=None if config.HEAD.STRIDE is None else pair(config.HEAD.STRIDE),
        scales=scales,
        flip=flip,
        gives_log_scores=head.gives_log_scores,
    )


def pixel_logits(
    forward: Forward, images: paddle.Tensor, size: tuple[int, int], way: Way
) -> Iterator[paddle.Tensor]:
    """Yields the logits of ``size`` in strips of rows, the first rows first: each
    [B, rows, width, K] float32.

    Of several views they are the logarithms of the mean probability, as in PaddleViT and
    mmsegmentation. Each view's logits are resized to ``size`` before. The values don't depend on the
    height of the strips.

    Args:
        forward: a ``SegmentationModel`` in evaluation mode.
        images: [B, C, H, W], normalised.
        size: (height, width) of the maps, such as that of the image's file.
    """
    count = len(way.scales) * (2 if way.flip else 1)
    total: Any = None
    for scaled, is_mirrored in _views(images, way):
        logits = maps(forward, scaled, way)
        if count == 1:
            yield from _strips(logits, size, way)
            return
        if is_mirrored:
            logits = logits.flip([3])
        if total is None:
            total = paddle.zeros([len(logits), *size, logits.shape[1]])
        top = 0
        for strip in _strips(logits, size, way):
            bottom = top + strip.shape[1]
            total[:, top:bottom] += F.softmax(strip) / count
            top = bottom
    rows = _rows_of_strip(math.prod(total.shape) // size[0])
    for top in range(0, size[0], rows):
        yield total[:, top : top + rows].clip(min=_LEAST).log()


def _views(images: paddle.Tensor, way: Way) -> Iterator[tuple[paddle.Tensor, bool]]:
    """Yields the images at each scale, and whether they are mirrored."""
    height, width = images.shape[2:]
    for scale in way.scales:
        # Halves are rounded up, as in mmsegmentation and PaddleViT; round() would take the even one.
        size = max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))
        scaled = resized(images, size)
        yield scaled, False
        if way.flip:
            yield scaled.flip([3]), True


def maps(forward: Forward, images: paddle.Tensor, way: Way) -> paddle.Tensor:
    """Returns the logits of images of any size: [B, C, H, W] -> [B, K, H, W].

    The last window of a row or a column ends at the image's border. Where windows overlap, the mean
    of their logits is taken, or of their scores (``Way.gives_log_scores``). An image that is smaller
    than a window is padded with zeros, which the mean colour is after the normalisation.

    Args:
        forward: see ``pixel_logits``.
    """
    if way.stride is None:
        return forward(images)
    window = way.window
    height, width = images.shape[2:]
    bottom = max(window[0] - height, 0)
    right = max(window[1] - width, 0)
    if bottom or right:
        images = F.pad(images, [0, right, 0, bottom])
    size = images.shape[2:]
    tops = _starts(size[0], window[0], way.stride[0])
    lefts = _starts(size[1], window[1], way.stride[1])
    if len(tops) == len(lefts) == 1:
        return forward(images)[:, :, :height, :width]
    total: Any = None
    count = np.zeros(size, np.float32)
    for top in tops:
        for left in lefts:
            rows = slice(top, top + window[0])
            columns = slice(left, left + window[1])
            logits = forward(images[:, :, rows, columns]).astype("float32")
            if way.gives_log_scores:
                logits = logits.exp()
            if total is None:
                total = paddle.zeros([*logits.shape[:2], *size])
            total[:, :, rows, columns] += logits
            count[rows, columns] += 1
    # A class at a time: a quotient of the whole would be held as well.
    divisor = paddle.to_tensor(count).expand([len(total), *size])
    for number in range(total.shape[1]):
        mean = total[:, number] / divisor
        total[:, number] = mean.clip(min=_LEAST).log() if way.gives_log_scores else mean
    return total[:, :, :height, :width] if bottom or right else total


def _starts(length: int, window: int, stride: int) -> list[int]:
    """Returns where windows begin along a side of ``length`` pixels."""
    return [*range(0, length - window, stride), length - window]


# ------------------------------------------------------------------ strips


def _strips(logits: paddle.Tensor, size: tuple[int, int], way: Way) -> Iterator[paddle.Tensor]:
    """Yields ``strips``. Of logarithms of scores, the scores are resized."""
    if not way.gives_log_scores or tuple(logits.shape[2:]) == size:
        yield from strips(logits, size)
        return
    for strip in strips(logits.exp(), size):
        yield strip.clip(min=_LEAST).log()


def strips(logits: paddle.Tensor, size: tuple[int, int]) -> Iterator[paddle.Tensor]:
    """Yields logits [B, K, H, W], resized bilinearly to ``size``, in strips of rows.

    The whole of the resized logits is never held. Each strip is [B, rows, width, K] float32.
    """
    height, width = size
    count = _rows_of_strip(logits.shape[0] * logits.shape[1] * width)
    for top in range(0, height, count):
        bottom = min(height, top + count)
        rows = _resized(logits, 2, height, top, bottom)
        yield _resized(rows.transpose([0, 2, 3, 1]), 2, width, 0, width)


def _rows_of_strip(row: int) -> int:
    """Returns the number of rows in a strip, of ``row`` numbers each."""
    return max(1, _STRIP // row)


def _resized(x: paddle.Tensor, axis: int, to: int, first: int, end: int) -> paddle.Tensor:
    """Returns a part of a tensor that is resized linearly along an axis.

    Args:
        to: the length of the whole axis after it is resized.
        first, end: the part: places first to end - 1 of that.
    """
    length = x.shape[axis]
    if length == to:
        if end - first < to:
            x = x.slice([axis], [first], [end])
        return x.astype("float32")
    # The borders of the first and the last place coincide (align_corners False).
    places = (np.arange(first, end) + 0.5) * (length / to) - 0.5
    places = places.clip(0, length - 1)
    before = np.floor(places).astype(np.int64)
    low = _at(x, axis, before)
    high = _at(x, axis, np.minimum(before + 1, length - 1))
    shape = [1] * x.ndim
    shape[axis] = -1
    share = paddle.to_tensor((places - before).astype(np.float32)).reshape(shape)
    # Of two equal values the result is exactly that one, so that ties stay ties.
    return low + (high - low) * share.expand_as(low)


def _at(x: paddle.Tensor, axis: int, places: np.ndarray) -> paddle.Tensor:
    return paddle.gather(x, paddle.to_tensor(places), axis=axis).astype("float32")
