"""Images that keep their ratio, as patches: timm's sizes and pixels, and each sample once."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import photograph
from golden.make_naflex_data import LENGTHS, PATCH, pictures, sizes
from support.photographs import write_photographs

from config import get_config
from datasets import get_dataloader, get_dataset
from errors import InputError, Unreadable
from loading.scales import train_sampler
from loading.transforms import EvalTransform, TrainTransform
from loading.transforms.naflex import (
    PackedEvalTransform,
    PackedTrainTransform,
    Packing,
    eval_transform,
    fitted_size,
    packing,
    train_transform,
)
from models.layers.naflex import packed_coordinates

GOLDEN = ROOT / "tests" / "golden" / "naflex_data.npz"
MODEL = ["MODEL.TYPE", "NaFlexViT", "MODEL.PATCH_SIZE", "8", "DATA.IMAGE_SIZE", "32"]


def config_of(*options, tokens=16):
    return get_config(None, [*MODEL, "DATA.NUM_TOKENS", str(tokens), *options])


@pytest.mark.smoke
def test_an_image_is_resized_to_timms_size():
    stored = np.load(GOLDEN)["sizes"].tolist()
    assert len(stored) == len(sizes()) > 300
    for height, width, patch, length, *expected in stored:
        assert list(fitted_size(height, width, Packing(patch, length))) == expected
        rows, columns = (side // patch for side in expected)
        assert 1 <= rows * columns <= length


def test_an_image_that_is_too_long_is_unreadable():
    with pytest.raises(Unreadable, match="1 x 90000000 pixels, which don't fit into 2 patches"):
        fitted_size(90_000_000, 1, Packing(16, 2))


@pytest.mark.smoke
@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_evaluated_patches_are_timms(number):
    stored = np.load(GOLDEN)
    config = config_of(tokens=LENGTHS[number])
    transform = eval_transform(config)
    assert isinstance(transform, PackedEvalTransform)
    grids = []
    for place, picture in enumerate(pictures()):
        patches, grid = packing(config).pack(transform(picture))
        assert patches.shape == (LENGTHS[number], PATCH**2, 3)
        assert patches.dtype == np.uint8
        expected = stored[f"patches_{number}"][place]
        difference = np.abs(patches.reshape(LENGTHS[number], -1).astype(int) - expected)
        # Pillow 13, which timm resized with, rounds one narrow picture otherwise than 12.
        assert difference.max() <= (2 if picture.size == (30, 150) else 0)
        grids.append(grid)
    coord, valid = packed_coordinates(paddle.to_tensor(np.stack(grids)), LENGTHS[number])
    assert (coord.numpy() == stored[f"coord_{number}"]).all()
    assert (valid.numpy() == stored[f"valid_{number}"]).all()


def test_without_num_tokens_the_transforms_are_the_usual_ones():
    config = get_config(None, [])
    assert type(train_transform(config)) is TrainTransform
    assert type(eval_transform(config)) is EvalTransform


@pytest.mark.parametrize("size", [(188, 250), (30, 240), (188, 8)])
def test_a_training_crop_keeps_the_ratio_within_its_range_and_fits(size):
    height, width = size
    picture = photograph().crop((0, 0, width, height))
    transform = train_transform(config_of("TRAIN.CROP_SCALE", "[0.3, 0.9]", tokens=40))
    assert isinstance(transform, PackedTrainTransform)
    areas = []
    ratios = []
    for seed in range(200):
        left, top, right, bottom = transform.draw(*picture.size, np.random.default_rng(seed)).box
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        areas.append((right - left) * (bottom - top) / (width * height))
        ratios.append((right - left) / (bottom - top) / (width / height))
        pixels = transform(picture, np.random.default_rng(seed))
        assert pixels.shape[:2] == fitted_size(bottom - top, right - left, Packing(8, 40))
    # Narrow boxes are whole pixels wide.
    rounding = 1 + 0.5 / min(size) * 4
    assert 0.3 / rounding < min(areas) < max(areas) < 0.9 * rounding
    assert 0.75 / rounding < min(ratios) < max(ratios) < 4 / 3 * rounding
    if min(size) > 100:
        assert np.mean(areas) == pytest.approx(0.6, abs=0.05)
        assert np.mean(np.log(ratios)) == pytest.approx(0, abs=0.05)


def test_a_whole_crop_is_the_evaluations_image():
    config = config_of(
        "TRAIN.CROP_SCALE", "[1.0, 1.0]", "TRAIN.CROP_RATIO", "[1.0, 1.0]", "TRAIN.HFLIP", "0"
    )
    for picture in pictures():
        trained = train_transform(config)(picture, np.random.default_rng(0))
        assert (trained == eval_transform(config)(picture)).all()


def test_a_step_may_have_another_number_of_patches():
    transform = train_transform(config_of("TRAIN.AUTO_AUGMENT", "rand-m9-mstd0.5"))
    for length in (4, 16, 100):
        for picture in pictures():
            height, width = transform(picture, np.random.default_rng(1), (length, length)).shape[:2]
            assert height % 8 == width % 8 == 0
            assert (height // 8) * (width // 8) <= length


# --------------------------------------------------------------------------- batches


def sampler(length, ranks=1, rank=0, epoch=1, consumed=0, options=()):
    settings = ["DATA.TOKEN_LENGTHS", "[8, 16, 32]", "DATA.BATCH_SIZE", "4", *options]
    found = train_sampler(config_of(*settings), range(length), rank, ranks)
    found.set_epoch(epoch, consumed)
    return found


def steps(length, ranks=1, **options):
    """The steps of an epoch: (patches, the indices of all ranks in rank order)."""
    shares = [list(sampler(length, ranks, rank, **options)) for rank in range(ranks)]
    found = []
    for step in zip(*shares, strict=True):
        assert len({key[3] for batch in step for key in batch}) == 1
        assert len({len(batch) for batch in step}) == 1
        found.append((step[0][0][3], [key[1] for batch in step for key in batch]))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("length", [14, 61, 203])
def test_an_epoch_has_each_sample_once_in_batches_of_as_many_patches(length, ranks):
    found = steps(length, ranks, options=("DATA.DROP_LAST", "False"))
    seen = sum((indices for _, indices in found), [])
    assert set(seen) == set(range(length))
    # The padding to a multiple of the ranks.
    assert len(seen) == -(-length // ranks) * ranks
    for patches, indices in found[:-1]:
        assert len(indices) == {8: 8, 16: 4, 32: 2}[patches] * ranks
    counts = [sum(patches == one for patches, _ in found) for one in (8, 16, 32)]
    assert max(counts) - min(counts) <= 1


def test_batches_are_the_same_for_any_number_of_ranks():
    whole = steps(203, options=("DATA.BATCH_SIZE", "12"))
    assert whole == steps(203, ranks=2, options=("DATA.BATCH_SIZE", "6"))
    assert whole == steps(203, ranks=3, options=("DATA.BATCH_SIZE", "4"))
    assert whole != steps(203, epoch=2, options=("DATA.BATCH_SIZE", "12"))


def test_what_is_left_after_a_resume_is_what_was_left():
    whole = steps(203, ranks=2)
    for done in (0, 1, 7, len(whole)):
        consumed = sampler(203, 2).samples_taken(done)
        assert steps(203, ranks=2, consumed=consumed) == whole[done:]


def test_too_few_images_for_a_batch_are_an_error():
    with pytest.raises(InputError, match="20 training images don.t fill one global batch of 4 x 9"):
        sampler(20, ranks=9)


def photograph_batches(root, workers, mode="train", packed=True, options=()):
    settings = ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(root), "MODEL.NUM_CLASSES", "2"]
    settings += ["DATA.NUM_WORKERS", str(workers), "DATA.BATCH_SIZE", "4", *options]
    config = config_of(*settings)
    dataset = get_dataset(config, mode)
    if packed:
        dataset.pack(packing(config))
    loader = get_dataloader(config, dataset, mode)
    if mode == "train":
        loader.batch_sampler.set_epoch(1)
    found = [{key: column.numpy() for key, column in batch.items()} for batch in loader]
    loader.close()
    return found


def test_workers_load_the_patches_that_the_process_itself_loads(tmp_path):
    root = write_photographs(tmp_path)
    lengths = ["DATA.TOKEN_LENGTHS", "[8, 16, 32]"]
    here = photograph_batches(root, 0, options=lengths)
    there = photograph_batches(root, 2, options=lengths)
    assert {batch["pixels"].shape[1] for batch in here} == {8, 16, 32}
    for one, two in zip(here, there, strict=True):
        assert one["pixels"].shape[2:] == (64, 3)
        assert one["pixels"].dtype == np.uint8
        assert all((one[key] == two[key]).all() for key in one)
        counts = one["grid"].prod(1)
        for patches, count in zip(one["pixels"], counts, strict=True):
            assert 1 <= count <= len(patches)
            assert not patches[count:].any()


def test_an_evaluation_has_each_image_once_whole_and_packed_alike(tmp_path):
    root = write_photographs(tmp_path)
    packed = photograph_batches(root, 2, "val", options=["DATA.BATCH_SIZE_EVAL", "5"])
    whole = photograph_batches(root, 0, "val", packed=False)
    assert [len(batch["labels"]) for batch in packed] == [5, 5, 5, 3]
    assert [len(batch["labels"]) for batch in whole] == [1] * 18
    patches = np.concatenate([batch["pixels"] for batch in packed])
    grids = np.concatenate([batch["grid"] for batch in packed])
    assert len({tuple(grid) for grid in grids.tolist()}) > 1
    for place, batch in enumerate(whole):
        again, grid = Packing(8, 16).pack(batch["pixels"][0])
        assert (again == patches[place]).all()
        assert (grid == grids[place]).all()
        assert batch["pixels"].shape[1:3] == tuple(8 * grid)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.TYPE", "ViT"], "NUM_TOKENS is 16, expected None with MODEL.TYPE ViT; NaFlexViT"),
        (["TASK", "mae"], "NUM_TOKENS is 16, expected None with TASK mae, which reads images of"),
        (["DATA.CROP_MODE", "squash"], "CROP_MODE is 'squash', expected center, its default"),
        (["TRAIN.CROP", "simple"], "TRAIN.CROP is 'simple', expected random_resized with"),
        (["TRAIN.RANDOM_ERASE_PROB", "0.2"], "RANDOM_ERASE_PROB is 0.2, expected 0.0 with"),
        (
            ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.LOSS", "soft_target"],
            "MIXUP_ALPHA is 0.8, expected 0.0 .* images of different shapes can't be mixed",
        ),
        (["DATA.MULTI_SCALE", "[8, 16]"], "MULTI_SCALE is .*; set TOKEN_LENGTHS instead"),
        (["DATA.LOADER", "dali"], "LOADER is 'dali', expected paddle with DATA.NUM_TOKENS"),
        (
            ["DATA.TOKEN_LENGTHS", "[8, 8]"],
            "TOKEN_LENGTHS is .*, expected None, or different numbers",
        ),
        (["DATA.TOKEN_LENGTHS", "[0]"], r"TOKEN_LENGTHS is \[0\], expected 1 to"),
        (["DATA.NUM_TOKENS", "0"], "NUM_TOKENS is 0, expected 1 to"),
        (["EVAL", "True", "DATA.TOKEN_LENGTHS", "[8]"], "TOKEN_LENGTHS has no effect under EVAL"),
        (["EVAL", "True", "DATA.CORRUPTION", "fog"], "CORRUPTION is 'fog', expected None with"),
        (
            ["EVAL", "True", "EVAL_ENGINE", "inference"],
            "EVAL_ENGINE is 'inference', expected eager",
        ),
    ],
)
def test_what_cannot_be_is_one_line(options, message):
    with pytest.raises(InputError, match=message) as caught:
        config_of(*options)
    assert "\n" not in str(caught.value)


def test_token_lengths_need_num_tokens():
    with pytest.raises(InputError, match="TOKEN_LENGTHS has no effect without DATA.NUM_TOKENS"):
        get_config(None, [*MODEL, "DATA.TOKEN_LENGTHS", "[8]"])
