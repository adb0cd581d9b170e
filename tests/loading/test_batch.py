"""Mixup and CutMix against timm's (golden/make_batch.py), and what they promise beyond it."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from golden.formula import array

import ops
from config import get_config, with_values
from loading.transforms import (
    BatchTransform,
    Mixup,
    Normalize,
    RandomErasing,
    gives_distributions,
    smooth_one_hot,
)
from loading.transforms.batch import areas, cutmix_boxes
from settings.tasks import mixes

GOLDEN = np.load(Path(__file__).parent.with_name("golden") / "batch.npz")
COUNT = 6
CHANNELS = 2
SIZE = 9
CLASSES = 5
MODES = ("batch", "pair", "elem")
KINDS = {
    "mixup": ["TRAIN.MIXUP_ALPHA", "0.8"],
    "cutmix": ["TRAIN.CUTMIX_ALPHA", "1.0"],
    "both": ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.CUTMIX_ALPHA", "1.0"],
    "minmax": ["TRAIN.CUTMIX_MINMAX", "[0.2,0.8]"],
}
RNG = np.random.default_rng


def configured(*options):
    return get_config(None, ["MODEL.NUM_CLASSES", str(CLASSES), *map(str, options)])


def mixed(config, images, labels, epoch, step, rank=0, ranks=1):
    """What the loader draws and the device does with it: images and targets."""
    config = with_values(config, DATA__IMAGE_SIZE=images.shape[-1])
    mixup = Mixup(config)
    targets = smooth_one_hot(labels, config.MODEL.NUM_CLASSES, config.TRAIN.SMOOTHING)
    return mixup(
        images, targets, paddle.to_tensor(mixup.draw(epoch, step, len(labels), rank, ranks))
    )


def batch(count=COUNT, channels=CHANNELS, size=SIZE):
    return paddle.to_tensor(array("images", (count, channels, size, size)) * 10), paddle.arange(
        count
    ) * 3 % CLASSES


# ------------------------------------------------------------ mixup, CutMix


class Drawn:
    """A generator that gives what timm drew; for pairs, in every other row: the rows between serve
    nobody.
    """

    def __init__(self, golden, mode):
        self.rows = {key: golden[key] for key in ("lam", "cut", "integers")}
        if mode == "pair":
            self.rows = {
                key: np.stack([rows, rows[::-1]], 1).reshape(-1, *rows.shape[1:])
                for key, rows in self.rows.items()
            }
        self.random_calls, self.integer_calls = (
            iter([self.rows["lam"] == 1, self.rows["cut"] == 0]),
            iter((0, 2)),
        )

    def random(self, count):
        assert count == len(self.rows["lam"])
        return next(self.random_calls) * 0.999  # 0: below the probability, so mixed, cut

    def beta(self, a, b):
        assert (a == b).all()
        return self.rows["lam"]

    def integers(self, *bounds, size=None):
        first = next(self.integer_calls)
        return self.rows["integers"][:, first : first + 2]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_mixing_is_timms(mode, kind, monkeypatch):
    golden = {
        key: GOLDEN[f"{kind}/{mode}/{key}"]
        for key in ("images", "targets", "lam", "cut", "integers")
    }
    options = [
        *KINDS[kind],
        "TRAIN.MIXUP_MODE",
        mode,
        "TRAIN.SMOOTHING",
        0.1,
        "TRAIN.MIXUP_PROB",
        0.8,
    ]
    (images, labels), (before, _) = batch(), batch()
    monkeypatch.setattr(np.random, "default_rng", lambda key: Drawn(golden, mode))
    found, targets = mixed(configured(*options), images, labels, 1, 1)
    assert found.dtype == targets.dtype == paddle.float32
    np.testing.assert_allclose(found.numpy(), golden["images"], atol=1e-6)
    np.testing.assert_allclose(targets.numpy(), golden["targets"], atol=1e-6)
    assert (images.numpy() == before.numpy()).all()
    assert labels.tolist() == batch()[1].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_hold_parts_of_one_processs_batch(mode, kind):
    config = configured(*KINDS[kind], "TRAIN.MIXUP_MODE", mode, "TRAIN.MIXUP_PROB", 0.8)
    images, labels = batch(8)
    for step in range(1, 5):
        whole, again = (mixed(config, images, labels, 2, step) for _ in range(2))
        for ranks in (2, 4):
            share = 8 // ranks
            own = [slice(r * share, (r + 1) * share) for r in range(ranks)]
            parts = [
                mixed(config, images[s], labels[s], 2, step, r, ranks) for r, s in enumerate(own)
            ]
            for which in (0, 1):
                joined = np.concatenate([part[which].numpy() for part in parts])
                assert (joined == whole[which].numpy()).all()
                assert (again[which].numpy() == whole[which].numpy()).all()


def test_seed_epoch_and_step_decide_the_draw():
    images, labels = batch()
    found = [
        mixed(configured(*KINDS["mixup"], "SEED", seed), images, labels, epoch, step)[0].numpy()
        for seed, epoch, step in [(0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 1, 2)]
    ]
    for i, first in enumerate(found):
        for second in found[:i]:
            assert np.abs(first - second).max() > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_the_last_of_an_odd_number_stays(mode):
    images, labels = batch(5)
    for kind in ("mixup", "minmax"):
        config = configured(*KINDS[kind], "TRAIN.MIXUP_MODE", mode)
        for rank in (0, 1):
            found, targets = mixed(config, images, labels, 1, 3, rank, 2)
            assert (found[4].numpy() == images[4].numpy()).all()
            assert (targets[4].numpy() == np.eye(CLASSES)[labels[4].item()]).all()
            assert all((found[i].numpy() != images[i].numpy()).any() for i in range(4))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_mixed_keeps_its_bits_and_a_smoothed_target(kind):
    images, labels = batch()
    expected = np.eye(CLASSES)[labels.numpy()] * 0.9 + 0.02
    options = [*KINDS[kind], "TRAIN.SMOOTHING", 0.1]
    never = configured(*options, "TRAIN.MIXUP_PROB", 0)
    off = configured(*options, "TRAIN.MIXUP_OFF_EPOCH", 3)
    for found, targets in (mixed(never, images, labels, 1, 1), mixed(off, images, labels, 4, 1)):
        assert (found.numpy() == images.numpy()).all()
        np.testing.assert_allclose(targets.numpy(), expected, atol=1e-7)
    assert (mixed(off, images, labels, 3, 1)[0].numpy() != images.numpy()).any()
    assert (Mixup(off).on(3), Mixup(off).on(4)) == (True, False)


def draws(count, *options):
    return Mixup(configured("DATA.IMAGE_SIZE", 32, *options))._draw(RNG(0), count)


def test_draws_follow_their_distributions():
    lam, boxes = draws(20000, "TRAIN.MIXUP_ALPHA", 0.4)
    assert not boxes.any()
    assert abs(lam.mean() - 0.5) < 0.01
    assert abs(lam.var() - 1 / (4 * 1.8)) < 0.003  # Beta(a, a): 1 / (4 (2 a + 1))
    lam, boxes = draws(
        20000, *KINDS["both"], "TRAIN.MIXUP_PROB", 0.6, "TRAIN.MIXUP_SWITCH_PROB", 0.3
    )
    cut = areas(boxes) > 0
    assert abs((lam < 1).mean() - 0.6) < 0.015
    assert 0.15 < cut.mean() < 0.18  # 0.6 * 0.3, less the boxes that are too small for a pixel
    np.testing.assert_array_equal(lam[cut], 1 - areas(boxes)[cut] / 1024)
    lam, boxes = draws(20000, "TRAIN.CUTMIX_ALPHA", 1.0)
    centres = (boxes[areas(boxes) > 0, :2] + boxes[areas(boxes) > 0, 2:]) / 2
    np.testing.assert_allclose(centres.mean(0), 16, atol=0.3)
    assert boxes.min() == 0
    assert boxes.max() == 32


def test_min_max_bounds_the_sides_of_the_box():
    lam, boxes = draws(5000, *KINDS["minmax"])
    sides = boxes[:, 2:] - boxes[:, :2]
    # int(32 * 0.2); int(32 * 0.8) is excluded, as in timm
    assert (sides.min(), sides.max()) == (6, 24)
    assert (boxes.min(), boxes.max()) == (0, 32)
    np.testing.assert_array_equal(lam, 1 - sides.prod(1) / 1024)
    fixed = draws(50, "TRAIN.CUTMIX_MINMAX", "[0.5,0.5]")[1]
    assert (fixed[:, 2:] - fixed[:, :2] == 16).all()


def test_cutmix_boxes_are_clipped():
    lam = np.array([0.75, 0.75, 0.75, 0.0, 1.0, 0.5])
    centres = np.array([[4, 4], [0, 8], [8, 1], [5, 5], [3, 3], [4, 4]])
    expected = [
        [2, 2, 7, 7],
        [0, 6, 3, 10],
        [6, 0, 10, 4],
        [0, 0, 10, 10],
        [3, 3, 3, 3],
        [1, 1, 8, 8],
    ]
    assert cutmix_boxes(lam, centres, (10, 10)).tolist() == expected  # sides 5, 5, 5, 10, 0, 7


# ---------------------------------------------------------- the whole batch


def test_normalize_takes_one_value_for_all_channels_on_either_side():
    pixels = RNG(0).integers(0, 256, (2, 4, 4, 3), np.uint8)
    for mean, std in (([0.5], [0.2, 0.3, 0.4]), ([0.4, 0.5, 0.6], [0.25]), ([0.5], [0.5])):
        expected = ((pixels / 255 - mean) / std).transpose(0, 3, 1, 2)
        np.testing.assert_allclose(
            Normalize(mean, std)(paddle.to_tensor(pixels)).numpy(), expected, atol=2e-6
        )


@pytest.mark.parametrize(
    ("channels", "mean", "std"),
    [(3, [0.4, 0.5, 0.6], [0.25]), (1, [0.1], [0.3]), (3, [0.4], [0.2])],
)
def test_the_compiled_operator_normalises_to_the_same_bits(
    compiled_operators, monkeypatch, channels, mean, std
):
    pixels = paddle.to_tensor(RNG(0).integers(0, 256, (2, 7, 5, channels), np.uint8))
    normalize = Normalize(mean, std)
    looked_up = []
    monkeypatch.setattr(
        ops,
        "look_up",
        lambda *given, known=ops.look_up: looked_up.append(known(*given)) or looked_up[0],
    )
    found = normalize(pixels).numpy()
    ops.enable(False)
    assert (found == normalize(pixels).numpy()).all()
    assert len(looked_up) == 1


def test_one_hot_is_smoothed():
    found = smooth_one_hot(paddle.to_tensor([2, 0]), 4, 0.2).numpy()
    np.testing.assert_allclose(
        found, [[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]], atol=1e-7
    )
    assert smooth_one_hot(paddle.to_tensor([20000]), 21841, 0.0).numpy().argmax() == 20000


@pytest.mark.parametrize(
    ("options", "mixing", "distributions"),
    [
        ([], False, False),
        (["TRAIN.LOSS", "bce"], False, False),
        (["TRAIN.LOSS", "soft_target"], False, True),
        *[(options, True, True) for options in KINDS.values()],
    ],
)
def test_targets_are_what_the_loss_takes(options, mixing, distributions):
    config = configured("DATA.IMAGE_SIZE", 8, "TRAIN.SMOOTHING", 0.1, *options)
    assert (mixes(config), gives_distributions(config)) == (mixing, distributions)
    pixels = paddle.to_tensor(RNG(0).integers(0, 256, (4, 8, 8, 3), np.uint8))
    labels = paddle.to_tensor([0, 4, 2, 1])
    columns = {"pixels": pixels, "labels": labels}
    columns |= {"mixed": paddle.to_tensor(Mixup(config).draw(1, 1, 4))} if mixing else {}
    images, targets = BatchTransform(config)(columns, 1)
    plain = Normalize([0.5] * 3, [0.5] * 3)(pixels)
    expected = mixed(config, plain, labels, 1, 1)[0] if mixing else plain
    assert (images.numpy() == expected.numpy()).all()
    if distributions:
        np.testing.assert_allclose(targets.numpy().sum(1), 1, atol=1e-6)
        assert targets.shape == [4, CLASSES]
    else:
        assert targets.dtype == paddle.int64
        assert targets.tolist() == [0, 4, 2, 1]
    if distributions and not mixing:
        np.testing.assert_allclose(
            targets.numpy(), np.eye(CLASSES)[[0, 4, 2, 1]] * 0.9 + 0.02, atol=1e-7
        )


@pytest.mark.smoke
def test_a_batch_is_normalised_then_erased_then_mixed():
    options = [
        "DATA.IMAGE_SIZE",
        8,
        "TRAIN.RANDOM_ERASE_PROB",
        1.0,
        *KINDS["both"],
        "TRAIN.MIXUP_MODE",
        "elem",
    ]
    config = configured(*options)
    pixels = RNG(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    labels = paddle.to_tensor([0, 4, 2, 1])
    given = paddle.to_tensor(pixels)
    erase = RandomErasing(config)
    assert erase.table_rows == (1 << 22) // 8  # as ever: the noise of a seed stays
    drawn = paddle.to_tensor(np.stack([erase.draw(RNG(seed)) for seed in range(4)]))
    columns = {"pixels": given, "labels": labels, "erased": drawn}
    columns["mixed"] = paddle.to_tensor(Mixup(config).draw(3, 7, 4, 1, 2))
    found, targets = BatchTransform(config)(columns, 3)
    erased = erase(Normalize([0.5] * 3, [0.5] * 3)(given), drawn)
    images, expected = mixed(config, erased, labels, 3, 7, 1, 2)
    assert (found.numpy() == images.numpy()).all()
    assert (targets.numpy() == expected.numpy()).all()
    assert (given.numpy() == pixels).all()
