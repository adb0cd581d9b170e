"""Which images keep their labels, and samples of labelled and unlabelled images."""

import numpy as np
import pytest
from conftest import without, write_images

from config import get_config
from datasets import get_dataloader, get_dataset
from errors import InputError, RunError
from loading.few_labels import FewLabels, labelled_places
from loading.transforms import TrainTransform

SMALL = [
    "TASK", "fixmatch", "METHOD.LABELS_PER_CLASS", "2", "MODEL.NUM_CLASSES", "auto",
    "DATA.IMAGE_SIZE", "8", "DATA.NUM_WORKERS", "0", "DATA.BATCH_SIZE", "4", "TRAIN.AUTO_AUGMENT", "rand-m9-n2",
]  # fmt: skip
DIGITS = [
    *SMALL, "DATA.DATASET", "digits", "DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5",
]  # fmt: skip
DEFAULTS = {"ratio": 3, "reads_unlabelled": True, "strong": True, "strong_labelled": False}


def few(options, train=None, per_class=2, **given):
    """Returns the samples of a training set, of which some images have labels."""
    config = get_config(None, options)
    train = get_dataset(config, "train") if train is None else train
    places = labelled_places(train.labels, len(train.classes), per_class, 0)
    return config, FewLabels(config, train, places, **{**DEFAULTS, **given})


def same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


@pytest.mark.parametrize("per_class", [1, 3, 5])
def test_each_class_keeps_as_many_labels(per_class):
    labels = np.random.default_rng(1).permutation(np.repeat([0, 1, 2], [5, 40, 9]))
    places = labelled_places(labels, 3, per_class, seed=4)
    assert np.bincount(labels[places]).tolist() == [per_class] * 3
    assert (np.diff(places) > 0).all()
    np.testing.assert_array_equal(places, labelled_places(labels, 3, per_class, seed=4))
    if per_class < 5:
        # more labels are further ones
        assert set(places) < set(labelled_places(labels, 3, per_class + 1, seed=4))
        assert set(places) != set(labelled_places(labels, 3, per_class, seed=5))


def test_each_image_of_a_class_is_chosen_equally_often():
    labels = np.repeat([0, 1], [4, 8])
    counts = np.zeros(12)
    for seed in range(2000):
        counts[labelled_places(labels, 2, 1, seed)] += 1
    # within four deviations of a binomial
    assert np.abs(counts[:4] - 500).max() < 4 * np.sqrt(2000 * 1 / 4 * 3 / 4)
    assert np.abs(counts[4:] - 250).max() < 4 * np.sqrt(2000 * 1 / 8 * 7 / 8)


def test_a_class_with_too_few_images_is_named():
    labels = np.array([0, 0, 1, 2, 2])
    with pytest.raises(InputError, match="LABELS_PER_CLASS is 2, but class 'b' has 1 image; lower"):
        labelled_places(labels, 3, 2, 0, ["a", "b", "c"])
    with pytest.raises(InputError, match="LABELS_PER_CLASS is 1, but class 3 has 0 images; lower"):
        labelled_places(labels, 4, 1, 0)
    with pytest.raises(InputError, match="class 3 has no labelled image, expected at least one"):
        labelled_places(labels, 4, None, 0)
    assert labelled_places(labels, 3, None, 0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.smoke
def test_an_epoch_shows_each_unlabelled_image_once_and_labelled_ones_in_turn():
    _, data = few(DIGITS)
    assert data.unlabelled == 1433
    assert len(data) == 478  # 1,433 / 3, rounded up
    orders = []
    for epoch in (1, 2):
        samples = [data._orders(epoch)[0][index * 3 : index * 3 + 3] for index in range(len(data))]
        shown = np.concatenate(samples)
        assert np.bincount(shown).tolist().count(2) == 1  # the last group is filled up
        assert np.bincount(shown).sum() == 1434
        turns = np.bincount(data._orders(epoch)[1], minlength=20)
        assert set(turns.tolist()) == {23, 24}  # 478 / 20
        orders.append((shown, data._orders(epoch)[1]))
    for first, second in zip(*orders, strict=True):
        assert (first != second).mean() > 0.9
    # the order of reading doesn't matter
    again = few(DIGITS)[1]
    np.testing.assert_array_equal(again._orders(2)[0], orders[1][0])


@pytest.mark.smoke
def test_a_sample_has_its_images_in_their_views():
    config, data = few(DIGITS)
    train = data.sources[0]
    for key in ((1, 5, 0), (2, 477, 0)):
        sample = data.sample(key)
        unlabelled, labelled = data._orders(key[0])
        group = unlabelled[3 * key[1] : 3 * key[1] + 3]
        place = data.labelled[labelled[key[1]]]
        assert sample["labels"] == train.labels[place]
        assert sample["true_labels"].tolist() == train.labels[group].tolist()
        weak = TrainTransform(get_config(None, without(DIGITS, "TRAIN.AUTO_AUGMENT")))
        strong = TrainTransform(config)

        def drawn(transform, image, view, key=key):
            return transform(train.image(image), train.generator(*key, view))

        np.testing.assert_array_equal(sample["pixels"], drawn(weak, place, 0))
        for number, image in enumerate(group):
            np.testing.assert_array_equal(
                sample["weak"][number], drawn(weak, image, 1 + 2 * number)
            )
            np.testing.assert_array_equal(
                sample["strong"][number], drawn(strong, image, 2 + 2 * number)
            )
    copied = data.sample((1, 5, 1))
    assert (copied["weak"] != data.sample((1, 5, 0))["weak"]).any()
    np.testing.assert_array_equal(copied["true_labels"], data.sample((1, 5, 0))["true_labels"])


def test_labelled_images_stay_the_same_without_the_unlabelled_ones():
    _, whole = few(DIGITS)
    _, alone = few(DIGITS, reads_unlabelled=False)
    assert len(alone) == len(whole)
    assert alone.columns == ("pixels", "labels")
    assert alone.shapes((8, 8)).keys() == {"pixels"}
    for index in (0, 477):
        found = alone.sample((3, index, 0))
        expected = whole.sample((3, index, 0))
        same({k: found[k] for k in alone.columns}, {k: expected[k] for k in alone.columns})
    _, strong = few(DIGITS, reads_unlabelled=False, strong_labelled=True)
    assert (strong.sample((3, 0, 0))["pixels"] != alone.sample((3, 0, 0))["pixels"]).any()


@pytest.mark.parametrize(
    ("given", "views"),
    [
        ({}, 3),
        ({"strong_labelled": True}, 4),
        ({"strong": False}, 0),
        ({"strong": False, "strong_labelled": True}, 1),
        ({"reads_unlabelled": False, "strong_labelled": True}, 1),
    ],
)
def test_boxes_are_drawn_of_strong_views_alone(given, views):
    _, data = few([*DIGITS, "TRAIN.RANDOM_ERASE_PROB", "1.0"], **given)
    assert ("erased" in data.columns) == (views > 0)
    if views:
        drawn = data.sample((1, 0, 0))["erased"]
        assert drawn.shape == (views, 1, 5)
        assert len({tuple(row) for row in drawn[:, 0].tolist()}) == views


def batches(options, ranks=1, batch=4, workers=0):
    """Returns the global batches of two epochs as the ranks together have them."""
    options = [*options, "DATA.NUM_WORKERS", str(workers), "DATA.BATCH_SIZE", str(batch)]
    by_rank = []
    for rank in range(ranks):
        config, data = few(options, ratio=7)
        loader = get_dataloader(config, data, "train", rank=rank, ranks=ranks)
        found = []
        for epoch in (1, 2):
            loader.batch_sampler.set_epoch(epoch)
            found += [{k: v.numpy() for k, v in columns.items()} for columns in loader]
        loader.close()
        by_rank.append(found)
    return [
        {name: np.concatenate([of_rank[name] for of_rank in parts]) for name in parts[0]}
        for parts in zip(*by_rank, strict=True)
    ]


@pytest.mark.smoke
def test_batches_are_the_same_for_any_number_of_workers_and_ranks():
    options = [*DIGITS, "TRAIN.RANDOM_ERASE_PROB", "0.5"]
    one = batches(options, batch=32)
    assert len(one) == 2 * (205 // 32)
    assert one[0]["strong"].shape == (32, 7, 8, 8, 1)
    for other in (batches(options, batch=32, workers=2), batches(options, ranks=2, batch=16)):
        for first, second in zip(one, other, strict=True):
            same(first, second)


@pytest.fixture
def folders(tmp_path):
    """Training images of two classes, and a folder of others."""
    write_images(tmp_path / "data" / "train", {"a": 4, "b": 3})
    write_images(tmp_path / "more", {"": 5, "deep/er": 6}, seed=1)
    return tmp_path


def further(folders, *options):
    """Returns the samples of the images of both folders."""
    given = [*SMALL, "DATA.DATASET", "folder", "DATA.DATA_PATH", str(folders / "data"), *options]
    config = get_config(None, given)
    train = get_dataset(config, "train", alone=True)
    given = [*given, "DATA.DATASET", "images", "DATA.DATA_PATH", str(folders / "more")]
    more = get_dataset(get_config(None, given), "train", alone=True, pixels_alone=True)
    return few(given, train, per_class=None, further=more)[1]


def test_images_of_a_further_folder_have_no_labels(folders):
    data = further(folders)
    assert data.unlabelled == 7 + 11
    assert len(data) == 6
    known = []
    for index in range(6):
        sample = data.sample((1, index, 0))
        group = data._orders(1)[0][3 * index : 3 * index + 3]
        expected = [data.labels[place] if place < 7 else -1 for place in group]
        assert sample["true_labels"].tolist() == expected
        known += expected
        for number, place in enumerate(group):
            source, file = data._image(place)
            view = data.weak_view(source.image(file), data.generator(1, index, 0, 1 + 2 * number))
            np.testing.assert_array_equal(sample["weak"][number], view)
    assert sorted(known) == [-1] * 11 + [0] * 4 + [1] * 3
    assert data.name(6).endswith("train/a/0.png")
    assert data.name(6 + 7).endswith("more/0.png")
    assert data.name(5) == "sample 5, of labelled and unlabelled images"


def test_an_unreadable_image_is_named_or_replaced_with_its_label(folders):
    for file in ("data/train/a/3.png", "more/2.png"):
        (folders / file).write_bytes(b"no image")

    def readings(data):
        # the labelled images come in the order of their places
        return [data.sample((1, index, 0)) for index in range(len(data))]

    with pytest.raises(RunError, match="3.png: .*SKIP_BROKEN|2.png: .*SKIP_BROKEN"):
        readings(further(folders))
    data = further(folders, "DATA.SKIP_BROKEN", "True")
    assert data.columns[-1] == "skipped"
    whole = set()
    for index, sample in enumerate(readings(data)):
        unlabelled, labelled = data._orders(1)
        wanted = [labelled[index], *unlabelled[3 * index : 3 * index + 3]]
        for number, place in enumerate(wanted):
            broken = place in (3, 9)
            assert sample["skipped"][number] == (6 + place if broken else -1)
            if broken:
                whole.add(data.name(sample["skipped"][number])[-len("/3.png") :])
            if number:
                expected = place + 1 if broken else place
                label = data.labels[expected] if expected < 7 else -1
                assert sample["true_labels"][number - 1] == label
        # after the last image of class a comes the first one of b
        expected = wanted[0] + 1 if wanted[0] == 3 else wanted[0]
        assert sample["labels"] == data.labels[expected]
    assert whole == {"/3.png", "/2.png"}


def test_nothing_that_can_be_read_is_an_error(folders):
    for file in folders.glob("data/train/*/*.png"):
        file.write_bytes(b"no image")
    data = further(folders, "DATA.SKIP_BROKEN", "True")
    with pytest.raises(RunError, match="none of 7 training images can be read"):
        data.sample((1, 0, 0))


def test_images_have_the_size_that_the_sampler_asks_for():
    _, data = few([*DIGITS, "TRAIN.RANDOM_ERASE_PROB", "1.0"])
    sample = data.sample((1, 0, 0, 12))
    assert sample["pixels"].shape == (12, 12, 1)
    assert sample["strong"].shape == sample["weak"].shape == (3, 12, 12, 1)
    assert sample["erased"][:, 0, :4].max() > 8
    assert data.shapes((12, 12))["weak"] == ((3, 12, 12, 1), np.uint8)
