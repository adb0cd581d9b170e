"""DATA.EVAL_SIZE: images are resized to it as if it were IMAGE_SIZE, and nothing is cropped."""

import numpy as np
import paddle
import pytest
from PIL import Image

from config import get_config
from errors import InputError
from inference.preparation import Preparation
from loading.transforms import EvalTransform

SEGMENTATION = ["TASK", "segmentation", "HEAD.NAME", "linear"]
PIXELS = np.random.default_rng(0).integers(0, 256, (70, 53, 3), np.uint8)


def configured(mode, *words):
    size = ["DATA.IMAGE_SIZE", "32", "DATA.CROP_PCT", "1.0"]
    if mode == "short":
        size = size[:2]
    return get_config(None, [*SEGMENTATION, "DATA.CROP_MODE", mode, *size, *words])


@pytest.mark.parametrize(
    ("mode", "size", "shape"),
    [
        ("short", "48", (63, 48)),
        ("short", "[40,48]", (63, 48)),
        ("short", "24", (31, 24)),
        ("squash", "48", (48, 48)),
        ("squash", "[64,40]", (64, 40)),
    ],
)
def test_it_replaces_the_images_size_in_an_evaluation(mode, size, shape):
    config = configured(mode, "DATA.EVAL_SIZE", size)
    found = EvalTransform(config)(Image.fromarray(PIXELS))
    assert found.shape == (*shape, 3)
    alone = configured(mode, "DATA.IMAGE_SIZE", size)
    np.testing.assert_array_equal(found, EvalTransform(alone)(Image.fromarray(PIXELS)))
    assert EvalTransform(configured(mode))(Image.fromarray(PIXELS)).shape != found.shape

    # An export prepares images alike.
    prepared = Preparation(config).crop_pixels(paddle.to_tensor(PIXELS[None])).numpy()
    assert prepared.shape == (1, 3, *shape)
    assert np.abs(prepared[0].transpose(1, 2, 0) - found).max() <= 1


def test_wrong_values_are_one_line():
    needs = "DATA.EVAL_SIZE has no effect without DATA.CROP_MODE short or squash"
    for words, line in (
        (["DATA.CROP_MODE", "own", "DATA.EVAL_SIZE", "48"], needs),
        (["DATA.EVAL_SIZE", "[48,32,16]"], "DATA.EVAL_SIZE is .*, expected a number of pixels, or"),
        (["DATA.EVAL_SIZE", "0"], "DATA.EVAL_SIZE is 0, expected"),
    ):
        with pytest.raises(InputError, match=line):
            get_config(None, [*SEGMENTATION, "DATA.CROP_MODE", "short", *words])
    with pytest.raises(InputError, match="DATA.EVAL_SIZE has no effect without TASK segmentation"):
        get_config(None, ["DATA.CROP_MODE", "squash", "DATA.EVAL_SIZE", "48"])
