"""Every rank's share of every batch: the same order for every number of ranks, every sample as
often as it should.
"""

import numpy as np
import pytest

from config import get_config
from errors import InputError
from loading import samplers
from loading.samplers import EvalBatchSampler, TrainBatchSampler


class Labels(list):
    """What a sampler needs of a dataset."""

    labels = property(np.asarray)


def keys(dataset, batch_size, ranks, *options, epoch=1, seed=0, drop_last=False):
    """The steps of an epoch: for each step, the (epoch, index, copy) of all ranks, in rank order."""
    options = ["DATA.BATCH_SIZE", batch_size, "SEED", seed, "DATA.DROP_LAST", drop_last, *options]
    config = get_config(None, options)
    samplers = [TrainBatchSampler(config, dataset, rank, ranks) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    # every rank takes the same number of steps
    assert len({len(list(sampler)) for sampler in samplers}) == 1
    assert all(len(list(sampler)) == len(sampler) for sampler in samplers)
    assert all(sum(map(len, sampler)) == sampler.num_samples for sampler in samplers)
    assert all(key[0] == epoch for sampler in samplers for batch in sampler for key in batch)
    return [sum(step, []) for step in zip(*samplers, strict=True)]


def order(length, *args, **kwargs):
    return [[index for _, index, _ in step] for step in keys(range(length), *args, **kwargs)]


def test_the_order_depends_on_seed_and_epoch_and_not_on_the_number_of_ranks():
    one = order(48, 8, 1)
    two = order(48, 4, 2)
    four = order(48, 2, 4)
    assert one == two == four
    assert sorted(sum(one, [])) == list(range(48))
    assert one != order(48, 8, 1, epoch=2)
    assert one != order(48, 8, 1, seed=1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("length", [7, 16, 17])
def test_the_tail_is_dropped_or_padded_so_that_the_ranks_stay_together(length, ranks):
    padded = sum(order(length, 2, ranks), [])
    assert set(padded) == set(range(length))
    assert len(padded) == -(-length // ranks) * ranks
    assert {copy for step in keys(range(length), 2, ranks) for _, _, copy in step} == {0}
    dropped = order(length, 2, ranks, drop_last=True)
    assert all(len(step) == 2 * ranks for step in dropped)
    assert len(dropped) == length // (2 * ranks)
    assert len(set(sum(dropped, []))) == len(sum(dropped, []))


def left(dataset, batch_size, ranks, consumed, *options, epoch=1, drop_last=False):
    """What remains of an epoch after ``consumed`` samples: each step's (epoch, index, copy), in
    rank order.
    """
    config = get_config(
        None, ["DATA.BATCH_SIZE", batch_size, "DATA.DROP_LAST", drop_last, *options]
    )
    samplers = [TrainBatchSampler(config, dataset, rank, ranks) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch, consumed)
    shares = [list(sampler) for sampler in samplers]
    first = samplers[0].first()
    steps = len(samplers[0])
    assert {len(own) for own in shares} == {steps - first}
    taken = [samplers[0].samples_taken(step) for step in range(first, steps + 1)]
    assert taken[0] == consumed or first == steps
    sizes = np.diff(taken).tolist()
    for size, *step in zip(sizes, *shares, strict=True):
        assert {len(own) for own in step} == {size // ranks}  # what the engine divides by
        assert size >= ranks
    return [sum(step, []) for step in zip(*shares, strict=True)]


RECIPES = [
    [],
    ["TRAIN.REPEATED_AUGMENT", 3],
    ["DATA.SAMPLER", "balanced"],
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("batch", "ranks"), [(12, 1), (6, 2), (3, 4)])
def test_any_number_of_ranks_takes_the_steps_that_are_left(batch, ranks, drop_last, recipe):
    labels = Labels([0, 1, 2, 3] * 15)  # five global batches
    whole = keys(labels, 12, 1, *recipe, drop_last=drop_last)
    for step in range(6):
        assert left(labels, batch, ranks, 12 * step, *recipe, drop_last=drop_last) == whole[step:]


@pytest.mark.parametrize(
    ("batch", "ranks"), [(1, 1), (5, 1), (16, 1), (4, 2), (9, 2), (2, 3), (5, 3), (7, 3), (64, 1)]
)
@pytest.mark.parametrize("length", [48, 50, 53])
@pytest.mark.parametrize("consumed", [16, 24])
def test_other_batches_take_the_rest_of_the_epoch_once(length, consumed, batch, ranks):
    done = sum(keys(range(length), 4, 2)[: consumed // 8], [])
    rest = sum(left(range(length), batch, ranks, consumed), [])
    assert {index for _, index, _ in done + rest} == set(range(length))
    # padded so that the ranks stay together
    assert len(rest) == -(-(length - consumed) // ranks) * ranks
    dropped = (
        left(range(length), batch, ranks, consumed, drop_last=True)
        if batch * ranks <= length
        else []
    )
    assert all(len(step) == batch * ranks for step in dropped)
    fitting = max(0, length // (batch * ranks) * batch * ranks - consumed) // (batch * ranks)
    assert len(dropped) == fitting
    seen = [index for _, index, _ in done + sum(dropped, [])]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("padded", [16, 17, 18])
def test_an_epochs_padded_tail_goes_on_on_any_number_of_ranks(padded, ranks):
    whole = keys(range(padded), 2, 2)
    done = sum(whole[:4], [])
    rest = sum(left(range(padded), 2, ranks, 16), [])
    assert {index for _, index, _ in done + rest} == set(range(padded))
    assert len(rest) == -(-(padded - 16) // ranks) * ranks
    assert left(range(padded), 2, ranks, -(-padded // 2) * 2) == []


def test_passes_are_of_this_epoch_and_of_each_one_after_it():
    sampler = TrainBatchSampler(
        get_config(None, ["TRAIN.NUM_EPOCHS", 4, "TRAIN.WARMUP_EPOCHS", 0, "DATA.BATCH_SIZE", 2]),
        range(16),
        0,
        1,
    )
    sampler.set_epoch(2, consumed=6)
    assert [one.place for one in sampler.passes()] == [(2, 6), (3, 0), (4, 0)]
    assert sampler.place == (2, 6)


def test_a_training_set_smaller_than_a_global_batch_is_an_error():
    with pytest.raises(
        InputError, match="7 training images don't fill one global batch of 4 x 2 processes"
    ):
        order(7, 4, 2, drop_last=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_repeated_augmentation_holds_copies_apart_in_each_global_batch(ranks):
    steps = keys(range(50), 12 // ranks, ranks, "TRAIN.REPEATED_AUGMENT", 3, drop_last=True)
    assert len(steps) == 4  # as many steps as without copies
    assert steps == keys(range(50), 12, 1, "TRAIN.REPEATED_AUGMENT", 3, drop_last=True)
    seen = []
    for step in steps:
        found = [index for _, index, _ in step]
        assert sorted(copy for _, _, copy in step) == [0] * 4 + [1] * 4 + [2] * 4
        assert len(set(found)) == 4
        assert len({(index, copy) for _, index, copy in step}) == 12
        assert all(found[i] != found[i ^ 1] for i in range(12))  # mixup's partners
        seen += set(found)
    assert len(set(seen)) == len(seen) == 16


def test_repeated_augmentation_with_a_padded_tail_keeps_every_rank_going():
    steps = keys(range(10), 4, 2, "TRAIN.REPEATED_AUGMENT", 3)
    assert [len(step) for step in steps] == [8, 2]
    # of one image
    assert [(index == steps[1][0][1], copy) for _, index, copy in steps[1]] == [
        (True, 0),
        (True, 1),
    ]
    assert len(keys(range(11), 4, 2, "TRAIN.REPEATED_AUGMENT", 3)[1]) == 4
    two = keys(range(10), 4, 2, "TRAIN.REPEATED_AUGMENT", 2)
    assert [sorted(copy for _, _, copy in step) for step in two] == [
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 1],
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_balanced_sampler_draws_every_class_equally_often(ranks):
    labels = Labels([0] * 40 + [3] * 5 + [1] * 3)
    steps = keys(labels, 16 // ranks, ranks, "DATA.SAMPLER", "balanced", drop_last=True)
    assert steps == keys(labels, 16, 1, "DATA.SAMPLER", "balanced", drop_last=True)
    drawn = [(index, copy) for step in steps for _, index, copy in step]
    counts = {label: sum(labels[index] == label for index, _ in drawn) for label in (0, 1, 3)}
    assert counts == {0: 16, 1: 16, 3: 16}
    assert len(set(drawn)) == 48  # an image that comes again is augmented anew
    times = [sum(index == wanted for index, _ in drawn) for wanted in range(45, 48)]
    assert max(times) - min(times) <= 1  # the images of a class in turn
    assert drawn != [
        (i, c)
        for step in keys(labels, 16, 1, "DATA.SAMPLER", "balanced", epoch=2)
        for _, i, c in step
    ]
    uneven = Labels([0] * 40 + [3] * 5 + [1] * 5)
    for epoch in range(5):
        steps = keys(uneven, 10, 1, "DATA.SAMPLER", "balanced", epoch=epoch)
        drawn = [uneven[index] for step in steps for _, index, _ in step]
        assert sorted(map(drawn.count, (0, 1, 3))) == [16, 17, 17]


def drawn_class_by_class(labels, rng):
    """The order of the balanced sampler, as its first version drew it: it looked at all labels for
    each class.
    """
    present = rng.permutation(np.unique(labels))
    counts = len(labels) // len(present) + (np.arange(len(present)) < len(labels) % len(present))
    drawn = [
        np.resize(rng.permutation(np.flatnonzero(labels == label)), count)
        for label, count in zip(present, counts, strict=True)
    ]
    return rng.permutation(np.concatenate(drawn))


@pytest.mark.parametrize(
    ("images", "classes"), [(1, 1), (7, 3), (500, 7), (500, 490), (3000, 70_000)]
)
def test_the_balanced_sampler_draws_the_order_of_its_first_version(images, classes):
    labels = (np.random.default_rng(classes).random(images) ** 3 * classes).astype(np.int64)
    steps = keys(Labels(labels), 8, 1, "DATA.SAMPLER", "balanced", epoch=3, seed=5)
    found = sum(steps, [])
    expected = drawn_class_by_class(labels, np.random.default_rng([5, 3])).tolist()
    assert [index for _, index, _ in found] == expected
    times = {}
    for _, index, copy in found:
        assert copy == times.get(index, 0)
        times[index] = copy + 1


class Counted(np.ndarray):
    """Counts the elements that NumPy's element-wise functions take of it."""

    taken = 0

    def __array_ufunc__(self, function, method, *given, **options):
        plain = [np.asarray(each) for each in given]
        Counted.taken += max(map(np.size, plain))
        options["out"] = tuple(map(np.asarray, options["out"])) if "out" in options else None
        return getattr(function, method)(*plain, **options)


def test_the_balanced_samplers_work_does_not_grow_with_the_classes():
    taken = []
    for classes in (10, 1000):
        labels = np.resize(np.arange(classes), 4000).view(Counted)
        Counted.taken = 0
        samplers._balanced_order(labels, np.random.default_rng(0))
        taken.append(Counted.taken)
    assert taken[0] == taken[1] <= 3 * 4000


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("length", "drop_last"), [(24, True), (25, True), (24, False), (25, False), (10, False)]
)
def test_a_rank_shuffles_its_own_part_alone(length, drop_last, ranks):
    mode = ["DATA.SHUFFLE_MODE", "shard"]
    epochs = [
        order(length, 2, ranks, *mode, epoch=epoch, drop_last=drop_last) for epoch in (1, 2, 1)
    ]
    assert epochs[0] == epochs[2] != epochs[1]
    for steps in epochs:
        own = [[] for _ in range(ranks)]
        for step in steps:
            share = len(step) // ranks
            for rank in range(ranks):
                own[rank] += step[rank * share : (rank + 1) * share]
        for rank, part in enumerate(own):
            whole = set(range(rank, length, ranks))
            assert set(part) <= whole
            assert drop_last or set(part) == whole  # padded from its own
            assert len(part) == (length // (2 * ranks) * 2 if drop_last else -(-length // ranks))
            assert len(part) - len(set(part)) == (
                0 if drop_last else -(-length // ranks) - len(whole)
            )
    if drop_last and length == 25 and ranks == 1:
        left_out = [set(range(length)) - set(sum(steps, [])) for steps in epochs]
        assert left_out[0] != left_out[1]  # not the same samples in each epoch


def test_a_ranks_own_part_goes_on_where_it_was_with_another_batch():
    mode = ["DATA.SHUFFLE_MODE", "shard"]
    whole = keys(range(48), 4, 2, *mode)
    assert left(range(48), 4, 2, 16, *mode) == whole[2:]
    other = left(range(48), 2, 2, 16, *mode)
    for rank in (0, 1):
        parts = [
            [key for step in steps for key in step[rank * len(step) // 2 :][: len(step) // 2]]
            for steps in (whole[2:], other)
        ]
        assert parts[0] == parts[1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_evaluation_takes_every_sample_once(length, ranks):
    samplers = [EvalBatchSampler(range(length), 3, rank, ranks) for rank in range(ranks)]
    assert sorted(index for sampler in samplers for batch in sampler for index in batch) == list(
        range(length)
    )
    assert all(len(list(sampler)) == len(sampler) for sampler in samplers)


PER_CLASS = ["DATA.SAMPLER", "per_class", "DATA.PER_CLASS", "4"]


@pytest.mark.smoke
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_batch_has_as_many_images_of_each_of_its_classes(drop_last):
    # 5 classes that divide nothing, one of them of fewer images than a group has.
    images = [0] * 41 + [3] * 17 + [1] * 9 + [2] * 3 + [7] * 30
    labels = Labels(np.random.default_rng(0).permutation(images))
    for epoch in (1, 2):
        steps = keys(labels, 12, 1, *PER_CLASS, drop_last=drop_last, epoch=epoch)
        assert [len(step) for step in steps] == [12] * 8 + [4] * (not drop_last)
        counts = dict.fromkeys((0, 1, 2, 3, 7), 0)
        for step in steps:
            classes = [labels[index] for _, index, _ in step]
            present, images = np.unique(classes, return_counts=True)
            # Three classes in each batch, each once.
            assert len(present) == len(step) // 4
            assert set(images.tolist()) == {4}
            for place in range(0, len(step), 4):
                assert len(set(classes[place : place + 4])) == 1
                counts[classes[place]] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
        drawn = [key for step in steps for key in step]
        # An image that comes again is augmented anew, and those of a class take turns.
        assert len(set(drawn)) == len(drawn)
        first_class = [index for _, index, _ in drawn if labels[index] == 0]
        assert len(set(first_class)) == len(first_class) == counts[0] * 4


@pytest.mark.smoke
def test_no_image_comes_twice_among_those_of_its_class():
    labels = Labels([0] * 6 + [1] * 5)
    for epoch in range(1, 9):
        for step in keys(labels, 8, 1, *PER_CLASS, epoch=epoch, drop_last=True):
            indices = [index for _, index, _ in step]
            assert len(set(indices)) == 8


@pytest.mark.parametrize(("batch", "ranks"), [(6, 2), (4, 3), (3, 4)])
@pytest.mark.parametrize("drop_last", [True, False])
def test_any_number_of_ranks_draws_the_same_classes(batch, ranks, drop_last):
    labels = Labels([0, 1, 2, 3] * 15)
    whole = keys(labels, 12, 1, *PER_CLASS, drop_last=drop_last)
    for step in range(6):
        found = left(labels, batch, ranks, 12 * step, *PER_CLASS, drop_last=drop_last)
        assert found == whole[step:]


@pytest.mark.parametrize("length", [48, 50, 53])
def test_ranks_batches_have_one_size_the_last_ones_too(length):
    """Losses of the batch of all ranks rely on it."""
    labels = Labels(np.resize(np.arange(4), length))
    for recipe in ([], PER_CLASS):
        config = get_config(None, ["DATA.BATCH_SIZE=4", "DATA.DROP_LAST=False", *recipe])
        sizes = [
            [len(step) for step in TrainBatchSampler(config, labels, rank, 3)] for rank in range(3)
        ]
        assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (10, "DATA.PER_CLASS is 4, which doesn't divide the global batch of 10 images"),
        (20, "DATA.PER_CLASS 4 needs 5 classes, but the data has 4; raise DATA.PER_CLASS"),
    ],
)
def test_a_batch_that_has_no_room_for_the_classes_is_refused(batch, message):
    with pytest.raises(InputError, match=message):
        keys(Labels([0, 1, 2, 3] * 15), batch, 1, *PER_CLASS)
