"""Batches of several sizes: each sample once, the same sizes on all ranks, resumed to the bit."""

import numpy as np
import paddle
import pytest
from conftest import without
from support.ranks import run_ranks
from support.training_runs import assert_same_run, records, train

from config import get_config
from datasets import get_dataloader, get_dataset
from errors import InputError
from loading.scales import batch_sizes, check_scales, size_shares, train_sampler
from loading.transforms import BatchTransform
from models import create_model

SIZES = ["DATA.IMAGE_SIZE", "8", "DATA.MULTI_SCALE", "[4, 6, 8, 10]"]


def sampler(length, ranks=1, rank=0, epoch=1, consumed=0, drop_last=False, options=()):
    settings = [*SIZES, "DATA.BATCH_SIZE", "4", "DATA.DROP_LAST", str(drop_last), *options]
    found = train_sampler(get_config(None, settings), range(length), rank, ranks)
    found.set_epoch(epoch, consumed)
    return found


def steps(length, ranks=1, **options):
    """The steps of what is left of an epoch: (size, the indices of all ranks in rank order)."""
    shares = [list(sampler(length, ranks, rank, **options)) for rank in range(ranks)]
    found = []
    for step in zip(*shares, strict=True):
        assert len({key[3] for batch in step for key in batch}) == 1  # one size on every rank
        assert len({len(batch) for batch in step}) == 1
        found.append((step[0][0][3], [key[1] for batch in step for key in batch]))
    return found


def test_a_batch_has_as_many_pixels_whatever_its_size():
    recipe = [
        "DATA.IMAGE_SIZE",
        "256",
        "DATA.BATCH_SIZE",
        "128",
        "DATA.MULTI_SCALE",
        "[160, 192, 256, 288, 320]",
    ]
    assert batch_sizes(get_config(None, recipe)) == {
        160: 327,
        192: 227,
        256: 128,
        288: 101,
        320: 81,
    }
    mixed = [*recipe, "TRAIN.MIXUP_ALPHA", "0.8"]
    assert batch_sizes(get_config(None, mixed)) == {160: 326, 192: 226, 256: 128, 288: 100, 320: 80}
    few = ["DATA.IMAGE_SIZE", "8", "DATA.BATCH_SIZE", "1", "DATA.MULTI_SCALE", "[8, 64]"]
    assert batch_sizes(get_config(None, few)) == {8: 1, 64: 1}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("length", [61, 96, 203])
def test_an_epoch_has_each_sample_once_and_each_size_equally_often(length, ranks):
    found = steps(length, ranks=ranks)
    own = sampler(length, ranks)
    assert len(found) == len(own) == len(own.sizes)
    seen = sum((indices for _, indices in found), [])
    assert len(seen) == -(-length // ranks) * ranks
    assert set(seen) == set(range(length))
    for size, indices in found[:-1]:
        assert len(indices) == {4: 16, 6: 7, 8: 4, 10: 2}[size] * ranks
    counts = [sum(size == one for size, _ in found) for one in (4, 6, 8, 10)]
    assert max(counts) - min(counts) <= 1
    dropped = steps(length, ranks=ranks, drop_last=True)
    seen = sum((indices for _, indices in dropped), [])
    assert len(set(seen)) == len(seen) > length - 16 * ranks
    assert all(
        len(indices) == {4: 16, 6: 7, 8: 4, 10: 2}[size] * ranks for size, indices in dropped
    )


def test_sizes_follow_from_seed_and_epoch_alone():
    one = steps(203)
    other = steps(203, epoch=2)
    seeded = steps(203, options=("SEED", "1"))
    assert [size for size, _ in one] != [size for size, _ in other]
    assert sorted(size for size, _ in one) == sorted(size for size, _ in other)
    assert one == steps(203)
    assert [size for size, _ in one] != [size for size, _ in seeded]
    own = sampler(203)
    assert [own.size(2, step) for step in range(1, len(own) + 1)] == [size for size, _ in other]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_left_after_a_resume_is_what_was_left(ranks, drop_last):
    whole = steps(203, ranks=ranks, drop_last=drop_last)
    for done in range(len(whole) + 1):
        own = sampler(203, ranks, drop_last=drop_last)
        consumed = own.samples_taken(done)
        assert consumed == sum(len(indices) for _, indices in whole[:done])
        assert steps(203, ranks=ranks, drop_last=drop_last, consumed=consumed) == whole[done:]
        assert sampler(203, ranks, consumed=consumed, drop_last=drop_last).first() == done


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (1, 3)])
def test_another_number_of_ranks_goes_on_with_the_samples_that_are_left(before, after):
    whole = steps(203, ranks=before)
    for done in range(len(whole)):
        seen = set(sum((indices for _, indices in whole[:done]), []))
        consumed = sampler(203, before).samples_taken(done)
        left = sum((indices for _, indices in steps(203, ranks=after, consumed=consumed)), [])
        assert seen | set(left) == set(range(203))
        assert len(left) == -(-(203 - consumed) // after) * after
        own = sampler(203, after, consumed=consumed)
        assert own.samples_taken(len(own)) == consumed + len(left)
        tail = sum((i for _, i in steps(203, ranks=after, consumed=consumed, drop_last=True)), [])
        assert not seen & set(tail)
        assert len(tail) == len(set(tail))


def batches(workers, *options):
    settings = [
        "DATA.DATASET",
        "digits",
        *SIZES,
        "DATA.BATCH_SIZE",
        "40",
        "DATA.NUM_WORKERS",
        str(workers),
        *options,
    ]
    settings += [
        "TRAIN.RANDOM_ERASE_PROB",
        "0.5",
        "TRAIN.MIXUP_ALPHA",
        "0.8",
        "TRAIN.CUTMIX_ALPHA",
        "1.0",
    ]
    config = get_config(None, [*settings, "MODEL.NUM_CLASSES", "10", "TRAIN.LOSS", "soft_target"])
    loader = get_dataloader(config, get_dataset(config, "train"), "train")
    loader.batch_sampler.set_epoch(1)
    found = [{key: column.numpy() for key, column in batch.items()} for batch in loader]
    loader.close()
    return config, loader.batch_sampler, found


def test_workers_load_each_size_as_the_process_itself_and_the_device_takes_it():
    config, own, here = batches(0)
    *_, there = batches(2)
    assert len(here) == len(own)
    for step, (one, two) in enumerate(zip(here, there, strict=True), 1):
        size = own.size(1, step)
        assert one["pixels"].shape[1:] == (size, size, 3)
        assert one["mixed"][:, 3:].max() <= size
        assert one["erased"][..., :4].max() <= size
        assert all((one[key] == two[key]).all() for key in one)
    transform = BatchTransform(config)
    for batch in here[:6]:
        images, targets = transform(
            {key: paddle.to_tensor(column) for key, column in batch.items()}, 1
        )
        assert images.shape == [len(batch["labels"]), 3, *batch["pixels"].shape[1:3]]
        np.testing.assert_allclose(targets.sum(1).numpy(), 1, atol=1e-6)


def test_evaluations_keep_their_size():
    config, *_ = batches(0)
    loader = get_dataloader(config, get_dataset(config, "val"), "val")
    assert {tuple(batch["pixels"].shape[1:]) for batch in loader} == {(8, 8, 3)}
    assert len(loader.dataset) == 364


# ----------------------------------------------------- progressive resizing

RISING = ["DATA.SCALE_SCHEDULE", "progressive"]
SIX = ["TRAIN.NUM_EPOCHS", "6", "TRAIN.WARMUP_EPOCHS", "0"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("spread", "random", "done", "expected"),
    # timm 1.0.31: ScheduledBatchSampler(..., schedule_epochs=6).choice_weights_for_epoch(0, 1, 3,
    # 5)
    [
        (
            0.65,
            0.1,
            0 / 5,
            [0.7093881168762416, 0.23457742183050512, 0.03101825510947606, 0.02501620618377728],
        ),
        (
            0.65,
            0.1,
            1 / 5,
            [0.397013602032773, 0.4963574902348942, 0.08100490599483784, 0.025624001737494795],
        ),
        (
            0.65,
            0.1,
            3 / 5,
            [0.03696315923745626, 0.2844995428255142, 0.5528510345948946, 0.12568626334213506],
        ),
        (
            2.0,
            0.0,
            5 / 5,
            [0.11538357735655191, 0.21556490195044622, 0.31364508163091365, 0.35540643906208824],
        ),
        (0.0, 0.1, 1 / 5, [0.025, 0.925, 0.025, 0.025]),
        (1e-9, 0.0, 0.2, [0, 1, 0, 0]),
    ],
)
def test_an_epochs_sizes_are_drawn_as_timm_draws_them(spread, random, done, expected):
    np.testing.assert_allclose(
        size_shares(4, done, spread, random), expected, rtol=1e-12, atol=1e-15
    )


def test_sizes_rise_from_the_first_to_the_last_and_batches_stay():
    options = [*SIX, *RISING]
    counts = []
    for epoch in range(1, 7):
        found = steps(8000, ranks=2, epoch=epoch, options=options)
        assert {len(indices) for _, indices in found} == {8}
        assert sorted(index for _, indices in found for index in indices) == list(range(8000))
        sizes = [size for size, _ in found]
        own = sampler(8000, 2, epoch=epoch, options=options)
        assert [own.size(epoch, step) for step in range(1, 1001)] == sizes
        counts.append([sizes.count(size) / 1000 for size in (4, 6, 8, 10)])
    for epoch, shares in enumerate(counts):
        np.testing.assert_allclose(shares, size_shares(4, epoch / 5, 0.65, 0.1), atol=0.05)
    one = [*options, "TRAIN.NUM_EPOCHS", "1", "DATA.SCALE_SPREAD", "0", "DATA.SCALE_RANDOM", "0"]
    assert {size for size, _ in steps(40, options=one)} == {10}  # as timm: the last epoch's


def test_sizes_are_the_same_after_a_resume():
    options = [*SIX, *RISING]
    whole = steps(203, ranks=2, epoch=3, options=options)
    for done in (0, 7, len(whole)):
        consumed = sampler(203, 2, epoch=3, options=options).samples_taken(done)
        assert steps(203, ranks=2, epoch=3, consumed=consumed, options=options) == whole[done:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["DATA.MULTI_SCALE", "[]"], r"MULTI_SCALE is \[\], expected 1 to 10000"),
        (
            ["DATA.MULTI_SCALE", "[4, 4]"],
            r"MULTI_SCALE is \[4, 4\], expected None, or different sizes",
        ),
        (["DATA.MULTI_SCALE", "[0]"], r"MULTI_SCALE is \[0\], expected 1 to 10000"),
        (["DATA.MULTI_SCALE", "[4]", "TRAIN.REPEATED_AUGMENT", "2"], "with REPEATED_AUGMENT 1"),
        (
            ["DATA.MULTI_SCALE", "[4]", "DATA.LOADER", "dali"],
            "MULTI_SCALE is .*, expected None with DATA.LOADER dali",
        ),
        (["DATA.MULTI_SCALE", "[4]", "EVAL", "True"], "MULTI_SCALE has no effect"),
        (
            ["DATA.SCALE_SCHEDULE", "progressive"],
            "SCALE_SCHEDULE has no effect without DATA.MULTI_SCALE",
        ),
        (
            ["DATA.MULTI_SCALE", "[4, 8]", "DATA.SCALE_SPREAD", "1"],
            "SCALE_SPREAD has no effect without DATA.SCALE_",
        ),
        (
            ["DATA.MULTI_SCALE", "[4]", *RISING],
            "MULTI_SCALE is .4., expected two sizes or more with SCALE_SCHEDULE",
        ),
        (
            ["DATA.MULTI_SCALE", "[4, 8]", *RISING, "TRAIN.MAX_MINUTES", "5"],
            "MAX_MINUTES is 5.0, expected None with",
        ),
    ],
)
def test_what_cannot_be_is_named(options, message):
    with pytest.raises(InputError, match=message):
        get_config(None, options)


def test_models_of_one_size_refuse_others():
    config = get_config(None, SIZES)
    with pytest.raises(
        InputError,
        match=r"MULTI_SCALE is \[4, 6, 8, 10\], but VisionTransformer takes images of 8 x 8",
    ):
        check_scales(config, create_model("vit_digits"))
    lenient = create_model("resnet18")
    check_scales(config, lenient)
    lenient.min_image_size = 5
    with pytest.raises(InputError, match="takes images of at least 5 x 5; set it to null"):
        check_scales(config, lenient)
    with pytest.raises(
        InputError, match="don't fill one global batch of 16 x 9 processes at 4 x 4 pixels"
    ):
        sampler(100, 9, drop_last=True)
    other = get_config(None, [*SIZES, "DATA.IMAGE_SIZE", "8x16"])
    with pytest.raises(
        InputError,
        match=r"\[4, 6, 8, 10\] makes square images, but IMAGE_SIZE is 8 x 16; set MULTI_SCALE to null",
    ):
        train_sampler(other, None, 0, 1)


def train_all(runs):
    """Trains several times in the same processes: [(options, output, length)]."""
    for run in runs:
        train(*run)


def test_two_processes_go_on_from_the_middle_of_an_epoch_in_the_same_bits(tmp_path, tiny):
    options = [
        *without(tiny, "MODEL.", "TRAIN.NUM_EPOCHS"),
        "DATA.BATCH_SIZE",
        "8",
        "DATA.DROP_LAST",
        "False",
    ]
    options += [
        "DATA.MULTI_SCALE",
        "[6, 8, 12]",
        "MODEL.TYPE",
        "ConvMixer",
        "MODEL.EMBED_DIM",
        "8",
        "MODEL.DEPTH",
        "1",
    ]
    options += [
        "MODEL.PATCH_SIZE",
        "2",
        "MODEL.KERNEL_SIZE",
        "3",
        "MODEL.NUM_CLASSES",
        "10",
        "TRAIN.NUM_EPOCHS",
        "2",
    ]
    options += [
        "TRAIN.BASE_LR",
        "0.01",
        "TRAIN.MIXUP_ALPHA",
        "0.8",
        "TRAIN.CUTMIX_ALPHA",
        "1.0",
        "KEEP_LAST",
        "1000",
    ]
    options += [
        "TRAIN.RANDOM_ERASE_PROB",
        "0.5",
        "TRAIN.ACCUM_ITER",
        "2",
        "REPORT_FREQ",
        "1",
        "SAVE_STEPS",
        "2",
    ]
    runs = []
    for schedule in ("mixed", "progressive"):
        words = [*options, "DATA.SCALE_SCHEDULE", schedule]
        own = train_sampler(get_config(None, words), range(80), 0, 2)
        own.set_epoch(2)
        whole = tmp_path / schedule
        resumed = tmp_path / f"{schedule} resumed"
        middle = whole / "checkpoints" / f"epoch_0002_sample_{own.samples_taken(2):09d}"
        runs += [(words, whole, 80), ([*words, "MODEL.RESUME", str(middle)], resumed, 80)]
    run_ranks(train_all, runs)
    for (_, whole, _), (_, resumed, _) in zip(runs[::2], runs[1::2], strict=True):
        assert_same_run(whole, resumed)
        steps = [record for record in records(whole) if record["split"] == "train"]
        assert sum(record["samples"] for record in steps) == 2 * 80
