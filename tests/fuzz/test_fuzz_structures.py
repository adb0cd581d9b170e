"""Image files that are whole in each piece, and out of proportion together, as trainings and
evaluations load them.
"""

import functools

import numpy as np
import pytest
from hypothesis import given
from support.hostile_files import a_share, attempt
from support.structured_images import ALL

from config import get_config
from loading.transforms import (
    EvalTransform,
    TrainTransform,
    encoded_image,
    mask_image,
    readable,
)

_SMALL = ["DATA.IMAGE_SIZE", "16", "DATA.MAX_PIXELS", "1000000"]
_FLOATS = ["DATA.IMAGE_DTYPE", "float32", "DATA.IMAGE_CHANNELS", "1"]
_FLOATS += ["DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"]
_OF_COLOURS = get_config(None, _SMALL)
_OF_BANDS = get_config(None, _SMALL + _FLOATS)


class _File(bytes):
    """A file, which Hypothesis doesn't print: its blob writes it again."""

    def __repr__(self):
        return f"<{len(self)} bytes>"


@pytest.mark.parametrize("kind", ALL)
def test_what_is_built_as_its_format_is_costs_little(kind):
    @a_share(len(ALL))
    @given(ALL[kind].map(_File))
    def load(data):
        for config, mode in ((_OF_COLOURS, "RGB"), (_OF_BANDS, 1)):
            attempt(
                kind,
                len(data),
                functools.partial(_load, data, config, mode),
                pixels=config.DATA.MAX_PIXELS,
            )

    load()


def _load(data, config, mode):
    most = config.DATA.MAX_PIXELS
    with readable("file"):
        image = encoded_image(data, mode, "file", most)
        EvalTransform(config)(image if mode == 1 else image.decode())
        TrainTransform(config)(encoded_image(data, mode, "file", most), np.random.default_rng(0))


@a_share(4)
@given(ALL["PNG"].map(_File))
def test_a_mask_is_read_or_refused(data):
    for dtype in (np.uint8, np.int32):
        attempt(
            "mask",
            len(data),
            functools.partial(mask_image, data, "file", 1_000_000, np.dtype(dtype)),
            pixels=1_000_000,
        )
