"""What Vision Permutator refuses. golden/paddlevit_models.py has its parity."""

import paddle
import pytest
from support.small_models import small_vip

from errors import InputError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transitions": (True,)}, r"TRANSITIONS is \[True\], expected 3: one per stage"),
        ({"embed_dims": (16, 32, 32, 30)}, "EMBED_DIMS has 30 where maps have 4 positions along"),
        ({"mlp_ratio": (2, 3)}, r"MLP_RATIO is \[2, 3\], expected 4"),
        ({"image_size": 60}, "IMAGE_SIZE 60 is not a multiple of 14, .*: 56 or 70"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        small_vip(**options)


def test_images_of_another_size_are_refused():
    with pytest.raises(InputError, match="56 x 56, found 28 x 28"):
        small_vip()(paddle.zeros([1, 3, 28, 28]))
