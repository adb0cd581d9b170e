"""Images of two sides: prepared, augmented and mixed as timm does; timm's weights of squares in
models of others.
"""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden import convolutions, formula
from golden.make_nonsquare import PHOTOGRAPHS, PREPARED, RESIZED, TARGETS, name
from PIL import Image
from support.parity import load_formula
from support.small_models import small_beit, small_eva, small_swin, small_vit

from config import get_config
from datasets import get_dataloader, get_dataset
from errors import Unreadable
from inference.preparation import Preparation, _rounded
from inference.tta import FiveCrops
from loading.check.findings import too_narrow
from loading.transforms import EvalTransform, Mixup, RandomErasing, TrainTransform
from loading.transforms.image import covering
from weights import load_weights, save_weights

GOLDEN = np.load(ROOT / "tests" / "golden" / "nonsquare.npz")
RNG = np.random.default_rng


def configured(size, *options):
    return get_config(None, ["DATA.IMAGE_SIZE", "x".join(map(str, size)), *map(str, options)])


def picture(width, height):
    return Image.fromarray(RNG(0).integers(0, 256, (height, width, 3), np.uint8))


# -------------------------------------------------------------- evaluation


@pytest.mark.parametrize("target", TARGETS)
def test_a_resized_image_covers_the_crop_as_timms(target):
    found = [covering(*size, target)[::-1] for size in PHOTOGRAPHS]
    np.testing.assert_array_equal(found, GOLDEN[name("sizes", target)])


@pytest.mark.smoke
@pytest.mark.parametrize("case", PREPARED)
def test_evaluations_pixels_are_timms(case):
    size, target, mode, share, kernel = case
    config = configured(
        target, "DATA.CROP_MODE", mode, "DATA.CROP_PCT", share, "DATA.INTERPOLATION", kernel
    )
    image = formula.picture().resize(size)
    np.testing.assert_array_equal(EvalTransform(config)(image), GOLDEN[name(*case)])
    if mode == "center":
        crops = FiveCrops(config)(image)
        resized = np.asarray(
            image.resize(
                covering(*size, tuple(int(side / share) for side in target)),
                getattr(Image.Resampling, kernel.upper()),
            )
        )
        expected = [
            GOLDEN[name(*case)],
            resized[: target[0], : target[1]],
            resized[-target[0] :, -target[1] :],
        ]
        np.testing.assert_array_equal(crops[[0, 1, 4]], expected)


@pytest.mark.parametrize("mode", ["center", "squash"])
def test_the_exported_preparation_has_the_same_pixels(mode):
    for target in TARGETS[:5]:
        config = configured(target, "DATA.CROP_MODE", mode)
        graph = Preparation(config)
        transform = EvalTransform(config)
        for size in PHOTOGRAPHS[:6]:
            image = formula.picture().resize(size)
            found = (
                graph.crop_pixels(paddle.to_tensor(np.asarray(image)[None]))
                .numpy()[0]
                .transpose(1, 2, 0)
            )
            differs = np.abs(found - transform(image))
            assert (differs.max() <= 2, differs.mean() < 0.05) == (True, True), (size, target)
    for width, height in PHOTOGRAPHS:
        found = graph._resized_size(paddle.to_tensor([height]), paddle.to_tensor([width]))
        expected = (
            covering(width, height, graph.resized_to)[::-1]
            if mode == "center"
            else graph.resized_to
        )
        assert [int(side) for side in found] == list(expected)


def test_the_graph_rounds_as_python():
    values = [
        0.5,
        1.5,
        2.5,
        52.5,
        162.5,
        163.5,
        127.49999999999999,
        127.50000000000001,
        3.2,
        3.7,
        8.0,
    ]
    assert _rounded(paddle.to_tensor(values, "float64")).tolist() == [
        round(value) for value in values
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [False, False, True, True, False, True, True]),
        (
            ["TASK", "segmentation", "HEAD.NAME", "linear", "DATA.CROP_MODE", "short"],
            [False, False, True, True, False, True, False],
        ),
        (["TASK", "segmentation", "HEAD.NAME", "linear", "DATA.CROP_MODE", "own"], [False] * 7),
    ],
)
def test_too_narrow_is_what_evaluation_refuses(options, expected):
    config = configured((96, 64), "DATA.MAX_PIXELS", 20_000, *options)
    sizes = [(600, 400), (400, 600), (2000, 400), (10, 100), (64, 96), (1000, 1), (200, 100)]
    records = np.array(
        [(*size, True) for size in sizes], [("width", int), ("height", int), ("readable", bool)]
    )
    transform = EvalTransform(config)
    refused = []
    for size in sizes:
        try:
            transform(Image.new("RGB", size))
            refused.append(False)
        except Unreadable:
            refused.append(True)
    assert too_narrow(config, records).tolist() == refused == expected


# ---------------------------------------------------------------- training


def test_a_random_crop_is_resized_to_both_sides():
    image = picture(60, 40)
    config = configured((12, 8), "TRAIN.HFLIP", 0)
    transform = TrainTransform(config)
    square = TrainTransform(get_config(None, ["DATA.IMAGE_SIZE", "12", "TRAIN.HFLIP", "0"]))
    for seed in range(5):  # of the same boxes: timm's ratio doesn't depend on the size
        box = transform.draw(*image.size, RNG(seed)).box
        assert box == square.draw(*image.size, RNG(seed)).box
        expected = image.crop(box).resize((8, 12), Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(transform(image, RNG(seed)), np.asarray(expected))


@pytest.mark.parametrize(
    ("crop", "resized", "border"),
    [("simple", (18, 12), 4), ("short_side", (22, 15), 0), ("squash", (10, 15), 0)],
)
def test_the_other_crops_are_cut_at_random_from_what_covers_them(crop, resized, border):
    image = picture(60, 40)
    share = [] if crop == "simple" else ["TRAIN.CROP_PCT", 0.8]
    transform = TrainTransform(configured((12, 8), "TRAIN.CROP", crop, "TRAIN.HFLIP", 0, *share))
    whole = np.asarray(image.resize(resized, Image.Resampling.BICUBIC))
    whole = np.pad(whole, ((border, border), (border, border), (0, 0)), "reflect")
    rows, columns = whole.shape[0] - 11, whole.shape[1] - 7
    places = {
        whole[y : y + 12, x : x + 8].tobytes(): (y, x) for y in range(rows) for x in range(columns)
    }
    found = {places[transform(image, RNG(seed)).tobytes()] for seed in range(400)}
    assert {y for y, _ in found} == set(range(rows))
    assert {x for _, x in found} == set(range(columns))


def test_affine_jitter_moves_by_shares_of_both_sides():
    image = Image.fromarray(np.full((40, 80, 3), 255, np.uint8))
    transform = TrainTransform(
        configured(
            (40, 80), "TRAIN.CROP", "squash", "TRAIN.CROP_PCT", 1.0, "TRAIN.AFFINE", "[0,0.25,0]"
        )
    )
    seen = [transform(image, RNG(seed))[:, :, 0] > 0 for seed in range(300)]
    assert max(40 - one.any(1).sum() for one in seen) in (9, 10)
    assert max(80 - one.any(0).sum() for one in seen) in (18, 19, 20)


def test_erased_boxes_and_noise_fill_the_image():
    erasing = RandomErasing(configured((24, 8), "TRAIN.RANDOM_ERASE_PROB", 1))
    drawn = np.concatenate([erasing.draw(RNG(seed)) for seed in range(2000)])
    top, left, bottom, right = drawn[:, :4].T
    assert (bottom.max(), right.max()) == (24, 8)
    height, width = (bottom - top)[bottom > 0], (right - left)[bottom > 0]
    assert (height.max() < 24, width.max()) == (True, 7)
    areas = height * width / (24 * 8)
    assert (areas.min() < 0.03, areas.max() < 0.37, areas.max() > 0.3) == (True, True, True)
    images = paddle.zeros([4, 3, 24, 8])
    found = erasing(images, paddle.to_tensor(drawn[:4, None])).numpy()
    for image, (y, x, v, u) in zip(found, drawn[:4, :4].astype(int), strict=True):
        inside = np.zeros((24, 8), bool)
        inside[y:v, x:u] = True
        assert ((image != 0).all(0) == inside).all()


def test_cutmix_boxes_have_the_images_shape():
    mixup = Mixup(
        configured(
            (64, 32),
            "TRAIN.CUTMIX_ALPHA",
            1,
            "TRAIN.MIXUP_MODE",
            "elem",
            "TRAIN.LOSS",
            "soft_target",
        )
    )
    rows = mixup.draw(1, 1, 2000)
    top, left, bottom, right = rows[:, 3:].T
    inner = (top > 0) & (left > 0) & (bottom < 64) & (right < 32)
    sides = np.stack([bottom - top, right - left])[:, inner]
    assert (abs(sides[0] - 2 * sides[1]) <= 2).all()
    assert len(sides[0]) > 100
    np.testing.assert_allclose(
        rows[:, 1], 1 - (bottom - top) * (right - left) / (64 * 32), atol=1e-6
    )
    images = np.arange(2 * 3 * 64 * 32, dtype=np.float32).reshape(2, 3, 64, 32)
    mixed, _ = mixup(paddle.to_tensor(images), paddle.eye(2), paddle.to_tensor(rows[:2]))
    for number, (y, x, v, u) in enumerate(rows[:2, 3:].astype(int)):
        expected = images[number].copy()
        expected[:, y:v, x:u] = images[1 - number][:, y:v, x:u]
        np.testing.assert_array_equal(mixed.numpy()[number], expected)


def test_workers_load_what_the_process_itself_does():
    words = [
        "DATA.DATASET",
        "synthetic",
        "DATA.SYNTHETIC_SIZE",
        6,
        "DATA.BATCH_SIZE",
        3,
        "MODEL.NUM_CLASSES",
        2,
    ]
    found = []
    for workers in (0, 1):
        config = configured(
            (12, 4), *words, "DATA.NUM_WORKERS", workers, "TRAIN.RANDOM_ERASE_PROB", 0.5
        )
        loader = get_dataloader(config, get_dataset(config, "train"), "train")
        loader.batch_sampler.set_epoch(1)
        found.append([{name: column.numpy() for name, column in batch.items()} for batch in loader])
        loader.close()
    assert found[0][0]["pixels"].shape == (3, 12, 4, 3)
    for own, other in zip(*found, strict=True):
        assert all((own[name] == other[name]).all() for name in own)


# ----------------------------------------------------------------- weights

MODELS = {
    "vit": lambda size: small_vit("vit", image_size=size),
    "swin": lambda size: small_swin("swin", image_size=size),
    "beit": lambda size: small_beit("beit", image_size=size),
    "eva_subln": lambda size: small_eva("eva_subln", image_size=size),
}


@pytest.mark.parametrize("case", RESIZED)
def test_weights_of_squares_give_timms_logits_on_other_images(case, tmp_path):
    side, size = RESIZED[case]
    array = convolutions.array if case == "eva_subln" else formula.array
    save_weights(load_formula(MODELS[case](side), tmp_path, array), tmp_path / "square.safetensors")
    model = MODELS[case](size)
    assert load_weights(model, tmp_path / "square.safetensors").resized
    model.eval()
    found = model(paddle.to_tensor(array("images", (2, 3, *size)))).numpy()
    np.testing.assert_allclose(found, GOLDEN[case], atol=1e-5 * np.ptp(GOLDEN[case]), rtol=0)
