"""Random erasing against timm's (golden/make_batch.py), and what it promises beyond it."""

import pickle
import random

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import array

from config import get_config
from loading.transforms import (
    RandomErasing,
)
from loading.transforms.erase import box_mask

GOLDEN = np.load(ROOT / "tests" / "golden" / "batch.npz")
RNG = np.random.default_rng


def configured(*options):
    return get_config(None, ["MODEL.NUM_CLASSES", "5", *map(str, options)])


class PythonsRandom:
    """Python's generator, as timm's random erasing uses it, behind the calls of NumPy's."""

    def __init__(self, seed):
        self.source = random.Random(seed)
        self.random = self.source.random
        self.uniform = self.source.uniform

    def integers(self, low, high=None):
        low, high = (0, low) if high is None else (low, high)
        # timm draws no count out of one
        return self.source.randint(low, high - 1) if (low, high) != (1, 2) else 1


def erasing(*options, size=16):
    return RandomErasing(
        configured("DATA.IMAGE_SIZE", size, "TRAIN.RANDOM_ERASE_PROB", 1.0, *options)
    )


@pytest.mark.smoke
@pytest.mark.parametrize("count", [1, 3])
def test_timms_boxes_are_erased(count):
    options = [
        "TRAIN.RANDOM_ERASE_PROB",
        0.8,
        "TRAIN.RANDOM_ERASE_MODE",
        "const",
        "TRAIN.RANDOM_ERASE_COUNT",
        count,
    ]
    erase = erasing(*options)
    drawn = np.stack([erase.draw(PythonsRandom(seed)) for seed in range(200)])
    assert drawn.shape == (200, count, 4)
    found = erase(paddle.ones([200, 3, 16, 16]), paddle.to_tensor(drawn)).numpy()
    expected = np.unpackbits(GOLDEN[f"erased/{count}"]).reshape(200, 1, 16, 16)
    assert (found == 1 - np.repeat(expected, 3, 1)).all()


def test_boxes_follow_their_distribution():
    erase = erasing(size=224)
    drawn = np.stack([erase.draw(RNG(seed)) for seed in range(3000)])[:, 0]
    (height, width) = (drawn[:, 2:4] - drawn[:, :2]).T
    assert drawn[:, :2].min() == 0
    assert drawn[:, 2:4].max() <= 224
    assert max(height.max(), width.max()) < 224
    share = height * width / 224**2
    assert 0.019 < share.min() < share.max() < 0.336
    assert abs(share.mean() - 0.177) < 0.005
    ratio = np.log(height / width)
    assert 1.1 < np.abs(ratio).max() < -np.log(0.29)
    assert abs(ratio.mean()) < 0.05
    counted = erasing("TRAIN.RANDOM_ERASE_COUNT", 3, size=224)
    boxes = np.stack([counted.draw(RNG(seed)) for seed in range(900)])[..., :4]
    area = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]) / 224**2
    for count in (1, 2, 3):
        has = (area > 0).sum(1) == count
        assert 0.28 < has.mean() < 0.39
        assert area[has].max() < 0.336 / count


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_erasing_fills_the_boxes_and_nothing_else(mode):
    erase = erasing("TRAIN.RANDOM_ERASE_MODE", mode, "TRAIN.RANDOM_ERASE_COUNT", 2, size=32)
    drawn = np.stack([erase.draw(RNG(seed)) for seed in range(40)])
    images = paddle.full([40, 3, 32, 32], 7.0)
    found = erase(images, paddle.to_tensor(drawn)).numpy()
    assert (images.numpy() == 7).all()
    inside = np.zeros((40, 32, 32), bool)
    for mask, boxes in zip(inside, drawn[..., :4].astype(int), strict=True):
        for top, left, bottom, right in boxes:
            mask[top:bottom, left:right] = True
    assert ((found != 7) == inside[:, None]).all()
    values = found.transpose(0, 2, 3, 1)[inside]
    if mode == "const":
        assert (values == 0).all()
    elif mode == "rand":
        for image, ((*_, r, g, b), second) in zip(found, drawn, strict=True):
            colours = {tuple(colour) for colour in image.reshape(3, -1).T.tolist()} - {
                (7.0, 7.0, 7.0)
            }
            assert colours <= {(r, g, b), tuple(second[4:])}
        assert abs(drawn[:, 0, 4:].std() - 1) < 0.15
    else:
        assert abs(values.mean()) < 0.03
        assert abs(values.std() - 1) < 0.03
        assert np.abs(np.corrcoef(values.T) - np.eye(3)).max() < 0.05
        assert len(np.unique(values)) > 0.9 * values.size


def test_noise_is_a_function_of_the_sample_not_of_its_batch():
    erase = erasing(size=16)
    alone = erasing(size=16)
    drawn = np.stack([erase.draw(RNG(seed)) for seed in range(6)])
    images = paddle.zeros([6, 3, 16, 16])
    found = erase(images, paddle.to_tensor(drawn)).numpy()
    paddle.seed(5)
    for i in (0, 3, 5):
        single = alone(images[i : i + 1], paddle.to_tensor(drawn[i : i + 1])).numpy()
        assert (single == found[i : i + 1]).all()
    assert (alone.draw(RNG(3)) == drawn[3]).all()
    drawn[:, :, :4] = [0, 0, 15, 15]
    noise = erase(images, paddle.to_tensor(drawn)).numpy()
    assert (noise[0] != noise[1]).any()
    other = erasing("SEED", 1, size=16)(images, paddle.to_tensor(drawn)).numpy()
    assert (noise[0] != other[0]).any()
    wrapped = drawn.copy()
    wrapped[..., 4] = erase.table_rows - 1  # the table's end is followed by its beginning
    first = drawn.copy()
    first[..., 4] = 0
    end, start = (erase(images, paddle.to_tensor(rows)).numpy()[0, 0] for rows in (wrapped, first))
    assert (end[1:15] == start[:14]).all()
    assert (end[0] != start[0])[:15].all()


def test_probability_0_erases_nothing_and_workers_get_no_tensors():
    images = paddle.to_tensor(array("images", (4, 3, 16, 16)))
    never = erasing("TRAIN.RANDOM_ERASE_PROB", 0.0)
    drawn = np.stack([never.draw(RNG(seed)) for seed in range(4)])
    assert drawn.dtype == np.float32
    assert not drawn.any()
    assert (never(images, paddle.to_tensor(drawn)).numpy() == images.numpy()).all()
    always = erasing()
    assert all(always.draw(RNG(seed)).any() for seed in range(200))
    assert len(pickle.dumps(always)) < 1000
    half = erasing("TRAIN.RANDOM_ERASE_PROB", 0.5)
    assert 0.45 < np.mean([half.draw(RNG(seed)).any() for seed in range(1000)]) < 0.55


def test_a_box_mask_is_true_inside():
    found = box_mask(paddle.to_tensor([[1.0, 0.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), (4, 3)).numpy()
    assert found.shape == (2, 1, 4, 3)
    expected = np.zeros((4, 3), bool)
    expected[1:3, 0:2] = True
    assert (found[0, 0] == expected).all()
    assert not found[1].any()
