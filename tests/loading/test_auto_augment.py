"""Operations and policies against timm's and torchvision's."""

import json
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from golden.formula import LEVELS, TRIVIAL_STEPS, picture
from PIL import Image

from config import get_config
from errors import InputError
from loading.transforms.auto import AugMix, TrivialAugmentWide, build_auto_augment
from loading.transforms.ops import Augment
from settings.registry import operations

STORED = np.load(Path(__file__).parent.parent / "golden" / "augment.npz")
GOLDEN = dict(zip(STORED["names"].tolist(), STORED["pixels"], strict=True))
POLICIES = json.loads((Path(__file__).parent.parent / "golden" / "policies.json").read_text())
VALUES = POLICIES.pop("levels")
BICUBIC = (Image.Resampling.BICUBIC,)
FILL = (124, 116, 104)


class Fixed:
    """A generator whose draws are given, as those of tests/golden/make_augment.py."""

    def __init__(self, **values):
        self.values = values

    def random(self):
        return self.values["random"]

    def uniform(self, low, high):
        return low + (high - low) / 4

    def dirichlet(self, alphas):
        return np.array(self.values["dirichlet"])

    def beta(self, a, b):
        return self.values["beta"]

    def integers(self, *_, **__):
        return [next(self.values["integers"])]


def policy(text, *options):
    return build_auto_augment(
        get_config(None, ["TRAIN.AUTO_AUGMENT", text, "DATA.IMAGE_SIZE", "32", *options])
    )


@pytest.mark.parametrize("sign", ["+", "-"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sorted(operations.names()))
def test_each_operation_is_timms(name, level, sign):
    before = picture()
    rng = Fixed(random=0.0 if sign == "+" else 0.9)
    found = Augment(name, 1.0, level, 0.0, 10.0, BICUBIC, FILL, 0.45)(before, rng)
    assert (np.asarray(found) == GOLDEN[f"{name}/{level}/{sign}"]).all()
    assert (np.asarray(before) == np.asarray(picture())).all()


def test_every_operation_of_timm_is_here():
    names = {key.split("/")[0] for key in GOLDEN} - {"trivial", "augmix"}
    assert names == set(operations.names())


@pytest.mark.parametrize("name", sorted(operations.names()))
def test_each_level_means_timms_value(name):
    scale = operations.load(name)[1].get("scale")
    assert (scale is not None) == (name in VALUES or name == "GaussianBlurRand")
    for draw, values in zip((0.0, 0.9), VALUES.get(name, ()), strict=False):
        found = [scale(level / 10, Fixed(random=draw), 0.45) for level in range(11)]
        np.testing.assert_allclose(found, values, rtol=1e-12)


@pytest.mark.parametrize("name", sorted(operations.names()))
def test_a_grey_image_becomes_what_its_colours_would(name):
    grey = picture("L")
    rng = Fixed(random=0.0)
    found = Augment(name, 1.0, 6, 0.0, 10.0, BICUBIC, 120, 0.45)(grey, rng)
    coloured = Augment(name, 1.0, 6, 0.0, 10.0, BICUBIC, (120,) * 3, 0.45)(grey.convert("RGB"), rng)
    assert found.mode == "L"
    assert (np.asarray(found)[:, :, None] == np.asarray(coloured)).all()
    unchanged = (np.asarray(found) == np.asarray(grey)).all()
    assert unchanged == (name in ("Color", "ColorIncreasing", "Desaturate"))


@pytest.mark.parametrize("step", TRIVIAL_STEPS)
@pytest.mark.parametrize("name", TrivialAugmentWide._SPACE)
def test_trivial_augment_wide_is_torchvisions(name, step):
    for sign in (1, -1):
        found = TrivialAugmentWide().apply(picture(), name, step, sign)
        # torchvision's magnitudes are float32: an enhanced pixel may round to the next level
        np.testing.assert_allclose(
            np.asarray(found, int), GOLDEN[f"trivial/{name}/{step}/{sign}"], atol=1
        )
    assert (
        len([key for key in GOLDEN if key.startswith("trivial/")])
        == len(TrivialAugmentWide._SPACE) * 8
    )


def test_trivial_augment_wides_31_magnitudes_are_evenly_spaced():
    apply = TrivialAugmentWide().apply
    ramp = np.arange(256, dtype=np.uint8)[None]
    for step in range(31):
        solarized = np.asarray(apply(Image.fromarray(ramp), "Solarize", step, 1))
        assert (solarized == np.where(ramp < 255 - 8.5 * step, ramp, 255 - ramp)).all()
        moved = np.asarray(apply(Image.fromarray(ramp), "TranslateX", step, 1))[0]
        assert (moved[32 * step // 30 :] == ramp[0, : 256 - 32 * step // 30]).all()
        assert len(np.unique(apply(Image.fromarray(ramp), "Posterize", step, 1))) == 2 ** (
            8 - round(step / 5)
        )


@pytest.mark.parametrize("blended", [False, True])
def test_augmix_is_timms_for_the_same_draws(blended):
    names = ("AutoContrast", "Equalize", "PosterizeIncreasing")
    augments = [Augment(name, 1.0, 5, 0.0, 10.0, BICUBIC, FILL, 0.3) for name in names]
    rng = Fixed(dirichlet=[0.2, 0.5, 0.3], beta=0.6, integers=iter(range(3)))
    found = AugMix(augments, width=3, depth=1, alpha=1.0, blended=blended)(picture(), rng)
    # timm's shares are float32
    np.testing.assert_allclose(np.asarray(found, int), GOLDEN[f"augmix/{blended}"], atol=1)


def described(augments):
    return [[a.name, a.probability, a.level, a.level_std, a.level_max] for a in augments]


def expected(operations):
    return [
        [n, p, m, float(std), 10 if most is None else most] for n, p, m, std, most in operations
    ]


@pytest.mark.parametrize("text", sorted(POLICIES))
def test_each_policy_is_made_of_timms_operations(text):
    found = policy(text)
    golden = POLICIES[text]
    if text.startswith("rand"):
        operations, n, weights = golden
        assert (described(found.augments), found.n) == (expected(operations), n)
        assert (found.probabilities is None) == (weights is None)
        if weights is not None:
            np.testing.assert_allclose(found.probabilities, weights)
    elif text.startswith("augmix"):
        operations, width, depth, alpha, blended = golden
        assert sorted(described(found.augments)) == sorted(expected(operations))
        assert (found.width, found.depth, found.alpha, found.blended) == (
            width,
            max(0, depth),
            alpha,
            blended,
        )
    else:
        assert [described(line) for line in found.lines] == [expected(line) for line in golden]


@pytest.fixture
def applied(monkeypatch):
    """Returns a function: per image, what a policy would have applied, as (name, value,
    resampling).
    """
    seen = []
    recording = {
        name: (lambda image, *given, name=name: seen.append((name, *given[:2])) or image, given)
        for name, (_, given) in operations.registered.items()
    }
    monkeypatch.setattr(operations, "registered", recording)

    def run(text, *options, count=3000):
        augment = policy(text, *options)
        rng = np.random.default_rng(0)
        image = picture()
        images = []
        for _ in range(count):
            seen.clear()
            augment(image, rng)
            images.append(list(seen))
        return images

    return run


def values(images, name):
    return np.array([value for image in images for found, value, _ in image if found == name])


def test_levels_and_operations_are_drawn_as_they_should(applied):
    images = applied("rand-m9-mstd0.5-inc1", count=6000)
    names = Counter(name for image in images for name, *_ in image)
    assert abs(names.total() / len(images) - 1.0) < 0.04  # two operations, half of them applied
    assert len(names) == 15
    assert max(names.values()) / min(names.values()) < 1.5
    angles = values(images, "Rotate") / 3  # 30 degrees at level 10
    assert abs(np.abs(angles).mean() - 9) < 0.1
    assert np.abs(angles).max() <= 10
    assert 0.4 < (angles > 0).mean() < 0.6
    # 0.16 of a normal distribution is a deviation below its mean
    assert 0.1 < (np.abs(angles) < 8.5).mean() < 0.22


def test_a_large_deviation_draws_levels_evenly_from_nothing_up(applied):
    angles = np.abs(values(applied("rand-m8-mstd101-p1.0"), "Rotate"))
    np.testing.assert_allclose(
        np.quantile(angles, [0, 0.25, 0.5, 0.75, 1]), [0, 6, 12, 18, 24], atol=1.8
    )


def test_levels_keep_within_their_bounds(applied):
    assert set(np.abs(values(applied("rand-m12"), "Rotate"))) == {30}
    np.testing.assert_allclose(np.abs(values(applied("rand-m12-mmax15"), "Rotate")), 36)
    assert 0.4 < (values(applied("rand-m0-mstd1-p1.0"), "SolarizeAdd") == 0).mean() < 0.7


@pytest.mark.parametrize(
    ("text", "share"),
    [("rand-m10", 0.45), ("v0", 0.9 * 0.45), ("augmix-m10-mstd0", 0.3), ("augmix-m2-mstd0", 0.06)],
)
def test_a_shift_is_a_share_of_the_image(applied, text, share):
    np.testing.assert_allclose(np.abs(values(applied(text, count=500), "TranslateYRel")), share)


def test_operations_with_weights_are_taken_once_and_as_often_as_they_weigh(applied):
    assert all(
        len({name for name, *_ in image}) == 5
        for image in applied("rand-tweights-n5-p1.0", count=300)
    )
    names = Counter(name for ((name, *_),) in applied("rand-tweights-n1-p1.0"))
    found = (
        np.array([names[name] for name in ("Rotate", "ShearX", "TranslateXRel", "AutoContrast")])
        / names.total()
    )
    np.testing.assert_allclose(found, np.array([3, 2, 1, 0.25]) / 10.1, atol=0.025)
    repeated = [len({name for name, *_ in image}) == 1 for image in applied("rand-p1.0")]
    assert 0.05 < np.mean(repeated) < 0.085  # without weights: one in 15


def test_random_interpolation_draws_each_operations_resampling(applied):
    ways = Counter(
        how for image in applied("rand-p1.0", "TRAIN.INTERPOLATION", "random") for *_, how in image
    )
    assert set(ways) == {Image.Resampling.BILINEAR, Image.Resampling.BICUBIC}
    assert 0.45 < ways[Image.Resampling.BICUBIC] / ways.total() < 0.55


def test_augmix_draws_the_depth_of_a_chain_and_the_shares(applied):
    depths = Counter(len(image) for image in applied("augmix-w1"))
    assert set(depths) == {1, 2, 3}
    assert min(depths.values()) > 900
    assert {len(image) for image in applied("augmix-w3-d2", count=50)} == {6}
    rng = Mock(wraps=np.random.default_rng(0))
    policy("augmix-w4-a0.01")(picture(), rng)  # the least that there is
    rng.dirichlet.assert_called_once_with([0.01] * 4)
    rng.beta.assert_called_once_with(0.01, 0.01)


def test_trivial_augment_wide_draws_operation_step_and_sign_alike(monkeypatch):
    seen = []
    rng = np.random.default_rng(0)
    augment = policy("trivial")
    monkeypatch.setattr(
        TrivialAugmentWide, "apply", lambda self, image, *drawn: seen.append(drawn) or image
    )
    for _ in range(6000):
        augment(picture(), rng)
    for drawn, expected in zip(
        zip(*seen, strict=True), (TrivialAugmentWide._SPACE, range(31), (1, -1)), strict=True
    ):
        counts = Counter(drawn)
        assert set(counts) == set(expected)
        assert min(counts.values()) > 0.75 * 6000 / len(expected)
        assert max(counts.values()) < 1.25 * 6000 / len(expected)


NAMES = ["rand-m9-mstd0.5-inc1", "rand-m15-mmax20", "original", "v0", "3a", "trivial", "augmix-m5"]


@pytest.mark.smoke
@pytest.mark.parametrize("text", NAMES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_policy_follows_from_its_generator_alone(text, mode):
    grey = ["DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"]
    augment = policy(text, *(grey if mode == "L" else []))
    image = picture(mode)
    before = np.asarray(image).copy()
    results = set()
    for seed in range(30):
        first, second = (augment(image, np.random.default_rng(seed)) for _ in range(2))
        assert (first.mode, first.size) == (mode, image.size)
        assert (np.asarray(first) == np.asarray(second)).all()
        results.add(first.tobytes())
    assert len(results) > (2 if text == "3a" else 10)
    assert (np.asarray(image) == before).all()


def test_3_augment_takes_each_of_its_three_alike():
    augment = policy("3a")
    before = np.asarray(picture(), int)
    solarized = np.where(before >= 128, 255 - before, before)
    kinds = Counter()
    for seed in range(300):
        found = np.asarray(augment(picture(), np.random.default_rng(seed)), int)
        is_grey = (found.max(2) == found.min(2)).all()
        kinds["grey" if is_grey else "solarized" if (found == solarized).all() else "blurred"] += 1
    assert len(kinds) == 3
    assert min(kinds.values()) > 75


def test_colours_from_outside_and_resampling_follow_the_data():
    given = ["DATA.IMAGENET_MEAN", "[0.485,0.456,0.406]"]
    assert policy("rand-m9", *given).augments[0].fill == (124, 116, 104)
    assert policy("rand-m9", "TRAIN.INTERPOLATION", "random").augments[0].resampling == (
        Image.Resampling.BILINEAR,
        Image.Resampling.BICUBIC,
    )
    grey = ["DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"]
    assert policy("rand-m9", *grey).augments[0].fill == 128
    assert policy("rand-m9", "DATA.IMAGENET_MEAN", "0.5").augments[0].fill == (128, 128, 128)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rnd-m9", ""), ("rand-x9", "in which 'x9'"), ("rand-m", "in which 'm'"), ("rand-m9-m8", "in which 'm8'"),
        ("rand-n1.5", "in which 'n1.5'"), ("rand-tno", "in which 'tno'"), ("rand-n0", "in which 'n0'"),
        ("rand-p1.5", "in which 'p1.5'"), ("rand-n16-tweights", "in which 'n16'"), ("original-m9", "in which 'm9'"),
        ("trivial-m9", "in which 'm9'"), ("augmix-n3", "in which 'n3'"), ("augmix-w0", "in which 'w0'"),
        ("augmix-w999999999", "in which 'w999999999'"), ("rand-n101", "in which 'n101'"),
        ("augmix-a0.009", "in which 'a0.009'"), ("augmix-m3-w3-d-1-b1", "in which 'd'"),
    ],
)  # fmt: skip
def test_an_unknown_policy_is_named_with_those_that_there_are(text, part):
    with pytest.raises(InputError) as caught:
        policy(text)
    assert f"TRAIN.AUTO_AUGMENT is '{text}'" in str(caught.value)
    assert part in str(caught.value)
    assert (
        "expected rand-m9-n2-p0.5-mstd0.5-mmax10-inc1-tweights (or tRotate+Invert), original"
        in str(caught.value)
    )


def test_magnitude_0_is_no_weak_augmentation():
    """AugReg's light1, randaug(2,0): autoaugment.py:473-527 of big_vision gives each operation the
    same argument.
    """
    policy = build_auto_augment(get_config(None, ["TRAIN.AUTO_AUGMENT", "rand-m0-n2-p1.0"]))
    image = picture()
    before = np.asarray(image)
    after = {
        augment.name: np.asarray(augment(image, np.random.default_rng(0)))
        for augment in policy.augments
    }
    same = {name for name, pixels in after.items() if (pixels == before).all()}
    assert same >= {"Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel", "SolarizeAdd"}
    assert not same & {
        "Equalize",
        "Invert",
        "Posterize",
        "Solarize",
        "Color",
        "Contrast",
        "Brightness",
        "Sharpness",
    }
    assert (after["Invert"] == 255 - before).all()
    assert (after["Solarize"] == 255 - before).all()
    assert not after["Posterize"].any()
    np.testing.assert_allclose(after["Brightness"], before * 0.1, atol=1)
