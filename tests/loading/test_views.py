"""Views of an image against the authors' transform (tests/golden/make_views.py), and in the loader."""

import functools
import io
import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
from golden.formula import CHANGES, photograph, picture
from PIL import Image
from scipy.stats import ks_2samp
from support.task_columns import need

from config import get_config
from datasets import get_dataloader, get_dataset
from errors import InputError
from loading.samplers import TrainBatchSampler
from loading.sources import Masks
from loading.transforms import Bands, EncodedImage, TrainTransform, multi_crop
from loading.transforms.views import Colors, ViewTransform, draw_views, recolor
from loading.workers import ProcessLoader
from ops import images
from settings.registry import tasks
from tools import make_shards

STORED = np.load(Path(__file__).parent.parent / "golden" / "views.npz")
VIEWS = ("first", "second", "local")
SMALL = [
    "DATA.IMAGE_SIZE", "16", "DATA.NUM_WORKERS", "0", "DATA.BATCH_SIZE", "4", "DATA.BATCH_SIZE_EVAL", "4",
]  # fmt: skip
RNG = np.random.default_rng
LOUD = {"global_scale": (0.4, 1.0), "local_views": 3, "local_size": 8}
PLAIN = {"color": 0.0, "grey": 0.0, "blur": (0.0, 0.0, 0.0), "solarize": 0.0}


@pytest.fixture
def views_task(monkeypatch):
    """Makes "views" a task without labels that draws views."""
    given = {"columns": "", "views": "pixels local"}
    monkeypatch.setitem(tasks.components, "views", tasks.components["mae"]._replace(given=given))
    need(monkeypatch)
    return "views"


def configured(*options, task="classification"):
    config = get_config(None, [*SMALL, *options]).clone()
    config.defrost()
    config.TASK = task
    config.freeze()
    return config


# ----------------------------------------------------- against the authors' own


@pytest.fixture(params=[True, False], ids=["compiled", "pillow"])
def compiled(request, monkeypatch):
    if request.param and images.load() is None:
        pytest.skip("not compiled")
    if not request.param:
        monkeypatch.setattr(images, "load", lambda: None)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("number", range(len(CHANGES)))
@pytest.mark.usefixtures("compiled")
def test_colours_change_as_torchvisions(number, mode):
    before = np.asarray(picture(mode))
    found = recolor(before, Colors(*CHANGES[number]))
    np.testing.assert_array_equal(found, STORED[f"changed/{mode}/{number}"])
    assert (before == np.asarray(picture(mode))).all()


@functools.cache
def drawn(view, count=1500):
    """What our transform draws for a view, with the golden file's names."""
    config = get_config(None, [])
    views = multi_crop(config, global_scale=(0.4, 1.0), local_views=1)
    transform = dict(zip(VIEWS, [*views["pixels"], *views["local"]], strict=True))[view]
    rows = []
    for seed in range(count):
        rng = RNG([seed, VIEWS.index(view)])
        geometry = transform.draw(*photograph().size, rng)
        colors = transform.draw_colors(rng)
        left, top, right, bottom = geometry.box
        row = {"left": left, "top": top, "width": right - left, "height": bottom - top}
        row |= dict(colors.jitter)
        row |= {f"{name}_place": place for place, (name, _) in enumerate(colors.jitter)}
        changes = {"flip": geometry.hflip, "grey": colors.grey, "solarize": colors.solarize}
        row |= {name: 1.0 for name, changed in changes.items() if changed}
        if colors.radius is not None:
            row["radius"] = colors.radius
        rows.append(row)
    names = {name for row in rows for name in row}
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}


def likeness(ours, theirs):
    """The probability that two samples of one distribution differ so much."""
    return ks_2samp(ours, theirs, method="asymp").pvalue


def areas_and_ratios(values):
    return values["width"] * values["height"], values["width"] / values["height"]


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_drawn_as_often_and_as_far_as_the_authors(view):
    """Each number by a Kolmogorov-Smirnov test; what is drawn at times by its frequency, too."""
    theirs = {
        name.rpartition("/")[2]: STORED[name] for name in STORED if name.startswith(f"drawn/{view}")
    }
    ours = drawn(view)
    compared = 0
    for name, values in theirs.items():
        if name.startswith(("mean_", "std_")):
            continue
        mine = ours.get(name, np.full(1, np.nan))
        shares = [np.mean(~np.isnan(each)) for each in (values, mine)]
        share = shares[0]
        # Four standard errors of the difference.
        error = np.sqrt(share * (1 - share) * (1 / len(values) + 1 / 1500))
        assert abs(shares[0] - shares[1]) <= 4 * error, (name, shares)
        kept = [each[~np.isnan(each)] for each in (values, mine)]
        if len(kept[0]) and name not in ("flip", "grey", "solarize"):
            assert likeness(*kept) > 0.001, name
            compared += 1
    # A view without solarization has none in both.
    assert compared == 13
    for mine, other in zip(areas_and_ratios(ours), areas_and_ratios(theirs), strict=True):
        assert likeness(mine, other) > 0.001


@pytest.mark.parametrize("view", VIEWS)
def test_the_pixels_have_the_authors_means_and_deviations(view):
    views = multi_crop(get_config(None, []), global_scale=(0.4, 1.0), local_views=1)
    transform = dict(zip(VIEWS, [*views["pixels"], *views["local"]], strict=True))[view]
    image = photograph()
    pixels = [transform(image, RNG([seed, 5])).reshape(-1, 3) for seed in range(300)]
    for channel, colour in enumerate(("red", "green", "blue")):
        for name, measure in (("mean", np.mean), ("std", np.std)):
            ours = [measure(each[:, channel]) for each in pixels]
            assert likeness(ours, STORED[f"drawn/{view}/{name}_{colour}"]) > 0.001


# --------------------------------------------------------------- one transform


@pytest.mark.smoke
def test_a_view_without_colours_is_a_random_resized_crop():
    """What is switched off draws nothing: the generator stands where TrainTransform leaves it."""
    options = [
        "TRAIN.CROP_SCALE",
        "[0.3,0.9]",
        "TRAIN.AFFINE",
        "[9.0,0.1,0.1]",
        "TRAIN.VFLIP",
        "0.5",
    ]
    config = configured(*options)
    view = ViewTransform(config, (16, 16), (0.3, 0.9))
    for seed in range(20):
        mine, other = RNG(seed), RNG(seed)
        expected = TrainTransform(config)(photograph(), other)
        np.testing.assert_array_equal(view(photograph(), mine), expected)
        assert mine.bit_generator.state == other.bit_generator.state


def test_a_views_colours_follow_its_geometry():
    plain = ViewTransform(configured(), (16, 16), (0.3, 0.9))
    loud = ViewTransform(configured(), (16, 16), (0.3, 0.9), color=1.0, blur=1.0, solarize=0.5)
    for seed in range(20):
        replayed = RNG(seed)
        plain(photograph(), replayed)
        colors = loud.draw_colors(replayed)
        expected = recolor(plain(photograph(), RNG(seed)), colors)
        np.testing.assert_array_equal(loud(photograph(), RNG(seed)), expected)


def test_other_policies_of_the_configuration_have_no_effect():
    """Those that an earlier file set before TASK was: the keys are idle then."""
    options = ["TRAIN.CROP", "squash", "TRAIN.AUTO_AUGMENT", "trivial", "TRAIN.COLOR_JITTER", "0.4"]
    view, plain = (
        ViewTransform(configured(*chosen), (16, 16), (0.3, 0.9)) for chosen in (options, [])
    )
    for seed in range(5):
        assert (view(photograph(), RNG(seed)) == plain(photograph(), RNG(seed))).all()


def test_the_factor_scales_the_strengths():
    half = ViewTransform(configured(), (16, 16), (0.3, 0.9), color=0.5)
    assert half.strengths == {"brightness": 0.2, "contrast": 0.2, "saturation": 0.1, "hue": 0.05}
    found = [dict(half.draw_colors(RNG(seed)).jitter) for seed in range(2000)]
    jittered = [row for row in found if row]
    assert 0.77 < len(jittered) / 2000 < 0.83
    for name, (low, high) in {
        "brightness": (0.8, 1.2),
        "contrast": (0.8, 1.2),
        "saturation": (0.9, 1.1),
        "hue": (-0.05, 0.05),
    }.items():
        values = [row[name] for row in jittered]
        np.testing.assert_allclose([min(values), max(values)], [low, high], atol=0.002)
    strongest = ViewTransform(configured(), (16, 16), (0.3, 0.9), color=5.0)
    factors = [dict(strongest.draw_colors(RNG(seed)).jitter) for seed in range(300)]
    assert min(row["contrast"] for row in factors if row) >= 0


def test_grey_images_keep_what_has_no_meaning_for_them():
    config = configured(
        "DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"
    )
    views = multi_crop(config, **LOUD)
    for view in itertools.chain(*views.values()):
        drawn_colors = [view.draw_colors(RNG(seed)) for seed in range(50)]
        assert {name for one in drawn_colors for name, _ in one.jitter} == {
            "brightness",
            "contrast",
        }
        assert not any(one.grey for one in drawn_colors)
    found = draw_views(photograph().convert("L"), views, RNG)
    assert {name: each.shape for name, each in found.items()} == {
        "pixels": (2, 16, 16, 1),
        "local": (3, 8, 8, 1),
    }


BANDS = ["DATA.IMAGE_CHANNELS", "4", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"global_scale": (0.5, 0.4)},
            [],
            r"METHOD.GLOBAL_SCALE is [0.5, 0.4], expected 0 < low <= high <= 1, from 1e-6 on",
        ),
        (
            {"local_scale": (0.0, 0.4)},
            [],
            r"METHOD.LOCAL_SCALE is [0.0, 0.4], expected 0 < low <= high <= 1, from 1e-6 on",
        ),
        (
            {},
            BANDS,
            "METHOD.COLOR is 1.0, expected 0.0 with IMAGE_CHANNELS 4 of float32: it supports"
            " 8-bit colour and grey images only",
        ),
        (
            {"color": 0.0, "grey": 0.0},
            BANDS,
            "METHOD.BLUR is [1.0, 0.1, 0.5], expected [0.0, 0.0, 0.0] with IMAGE_CHANNELS 4 of"
            " float32: it supports 8-bit colour and grey images only",
        ),
    ],
)
def test_wrong_values_are_one_line(changes, options, message):
    with pytest.raises(InputError) as caught:
        multi_crop(configured(*options), **(LOUD | changes))
    assert str(caught.value) == message


def test_images_of_other_channels_have_views_without_colours():
    values = RNG(0).integers(0, 60000, (20, 30, 4), np.uint16)
    found = draw_views(Bands(values), multi_crop(configured(*BANDS), **LOUD, **PLAIN), RNG)
    assert found["pixels"].shape == (2, 16, 16, 4)
    assert found["local"].dtype == np.float32
    assert 0 < found["local"].std() < 1


def test_there_may_be_no_local_views():
    views = multi_crop(configured(), **(LOUD | {"local_views": 0}))
    assert list(views) == ["pixels"]
    assert [view.blur for view in views["pixels"]] == [1.0, 0.1]
    assert [view.solarize for view in views["pixels"]] == [0.0, 0.2]


# ------------------------------------------------------------ one decoding


def encoded(exact=False, image=None, kind="JPEG", **options):
    file = io.BytesIO()
    (image or photograph()).save(file, kind, **options)
    return EncodedImage(file.getvalue(), "RGB", "x", 10**6, exact=exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 90}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
    ],
)
def test_an_image_is_decoded_once_to_the_pixels_of_each_crop(monkeypatch, exact, kind, options):
    # At this size a crop alone is decoded in full, too, as far as it reaches.
    size = (125, 94)
    opened = encoded(exact, kind=kind, **options)
    opened.keep_pixels()
    decoded = []
    for name in ("loading.transforms.decode._decode", "loading.transforms.decode.convert"):
        module, _, function = name.rpartition(".")
        original = getattr(__import__(module, fromlist=["x"]), function)

        def watched(*arguments, original=original):
            decoded.append(arguments)
            return original(*arguments)

        monkeypatch.setattr(name, watched)
    for box in ((0, 0, 250, 188), (10, 20, 110, 90), (3, 100, 40, 188), (100, 0, 250, 60)):
        found = opened.resized_crop(box, size, Image.Resampling.BICUBIC)
        assert len(decoded) == 1
        count = len(decoded)
        alone = encoded(exact, kind=kind, **options)
        expected = alone.resized_crop(box, size, Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(found, expected)
        del decoded[count:]
    assert opened.decode().size == (250, 188)


def test_large_images_are_decoded_in_full():
    """At a fraction of its size, a photograph would be decoded anew for each fraction."""
    large = photograph().resize((1000, 752))
    opened = encoded(image=large, quality=95)
    opened.keep_pixels()
    found = opened.resized_crop((0, 0, 1000, 752), (50, 40), Image.Resampling.BICUBIC)
    whole = Image.open(io.BytesIO(opened._data)).resize((50, 40), Image.Resampling.BICUBIC)
    assert np.abs(found.astype(int) - np.asarray(whole)).mean() < 0.2


# ------------------------------------------------------------- in a dataset


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 5), ("val", 3)):
        for label in ("a", "b"):
            place = tmp_path / split / label
            place.mkdir(parents=True)
            for number in range(count):
                shift = 7 * number + (30 if label == "b" else 0)
                crop = photograph().crop((shift, shift, 120 + shift, 90 + shift))
                crop.save(place / f"{number}.jpg", quality=95)
    return tmp_path


def dataset_of(folder, task, *options, mode="train", chosen=LOUD):
    source = ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(folder)]
    config = configured(*source, *options, task=task)
    dataset = get_dataset(config, mode)
    dataset.views = multi_crop(config, **chosen)
    return config, dataset


def batches(config, dataset, mode="train", epoch=1, consumed=0, **ranks):
    loader = get_dataloader(config, dataset, mode, **ranks)
    if mode == "train":
        loader.batch_sampler.set_epoch(epoch, consumed)
    found = [{name: column.numpy() for name, column in batch.items()} for batch in loader]
    loader.close()
    return found


@pytest.mark.smoke
def test_a_sample_has_its_views_in_two_columns(folder, views_task):
    config, dataset = dataset_of(folder, views_task)
    assert dataset.columns == ("pixels", "local")
    assert dataset.shapes((16, 16)) == {
        "pixels": ((2, 16, 16, 3), np.uint8),
        "local": ((3, 8, 8, 3), np.uint8),
    }
    assert [item.shape for item in dataset[4]] == [(2, 16, 16, 3), (3, 8, 8, 3)]
    loader = get_dataloader(config, dataset)
    # Four samples, and columns that begin at multiples of 64 bytes.
    assert loader.room == 4 * (2 * 16 * 16 * 3 + 3 * 8 * 8 * 3)
    [first, *_] = batches(config, dataset)
    assert first["pixels"].shape == (4, 2, 16, 16, 3)
    assert first["local"].shape == (4, 3, 8, 8, 3)
    assert first["pixels"].dtype == first["local"].dtype == np.uint8
    # All views of a sample differ, and so do those of two samples.
    flat = [view.tobytes() for sample in first["pixels"] for view in sample]
    assert len(set(flat)) == 8


def test_a_view_is_a_function_of_seed_epoch_index_copy_and_number(folder, views_task):
    _, dataset = dataset_of(folder, views_task)
    view = dataset.views["local"][0]
    for epoch, index, copy in ((1, 0, 0), (1, 3, 0), (2, 3, 0), (2, 3, 1)):
        sample = dataset.sample((epoch, index, copy))
        seeds = [0, epoch, index, *([copy] if copy else [])]
        sequence = np.random.SeedSequence(seeds, spawn_key=(3,))
        picture = dataset.picture(index)
        picture.keep_pixels()
        expected = view(picture, np.random.default_rng(sequence))
        np.testing.assert_array_equal(sample["local"][1], expected)
    states = {
        str(dataset.generator(epoch, index, copy, view).bit_generator.state)
        for epoch, index, copy, view in itertools.product(
            range(3), range(3), range(3), (None, 0, 1, 2)
        )
    }
    assert len(states) == 3 * 3 * 3 * 4


def test_one_view_stays_if_there_are_more(folder, views_task):
    _, few = dataset_of(folder, views_task, chosen=LOUD | {"local_views": 1})
    _, many = dataset_of(folder, views_task, chosen=LOUD | {"local_views": 6})
    for key in ((1, 0, 0), (3, 7, 0), (3, 7, 2)):
        one, other = few.sample(key), many.sample(key)
        np.testing.assert_array_equal(one["pixels"], other["pixels"])
        np.testing.assert_array_equal(one["local"], other["local"][:1])
    few.views.pop("local")
    np.testing.assert_array_equal(few.sample((3, 7, 2))["pixels"], other["pixels"])


@pytest.mark.smoke
def test_workers_ranks_and_resumes_give_the_same_bits(folder, views_task):
    config, dataset = dataset_of(folder, views_task)
    expected = batches(config, dataset, epoch=2)
    assert len(expected) == 2
    config, dataset = dataset_of(folder, views_task, "DATA.NUM_WORKERS", "2")
    for found, batch in zip(batches(config, dataset, epoch=2), expected, strict=True):
        for name in ("pixels", "local"):
            np.testing.assert_array_equal(found[name], batch[name])
    resumed = batches(config, dataset, epoch=2, consumed=4)
    assert len(resumed) == 1
    np.testing.assert_array_equal(resumed[0]["local"], expected[1]["local"])
    config, dataset = dataset_of(folder, views_task, "DATA.BATCH_SIZE", "2")
    parts = [batches(config, dataset, epoch=2, rank=rank, ranks=2) for rank in (0, 1)]
    for number, batch in enumerate(expected):
        found = np.concatenate([part[number]["local"] for part in parts])
        np.testing.assert_array_equal(found, batch["local"])


def test_copies_of_an_image_have_views_of_their_own(folder, views_task):
    config, dataset = dataset_of(folder, views_task, "TRAIN.REPEATED_AUGMENT", "2")
    sampler = TrainBatchSampler(config, dataset, 0, 1)
    sampler.set_epoch(1)
    keys = next(iter(sampler))
    assert sorted(copy for _, _, copy in keys) == [0, 0, 1, 1]
    loader = ProcessLoader(config, dataset, sampler)
    sampler.set_epoch(1)
    batch = next(iter(loader))
    assert len({view.tobytes() for view in batch["local"].numpy().reshape([12, -1])}) == 12


def test_an_evaluation_draws_the_same_views_each_time(folder, views_task):
    config, dataset = dataset_of(folder, views_task, mode="val")
    first, second = (batches(config, dataset, "val") for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one["pixels"], other["pixels"])
        np.testing.assert_array_equal(one["local"], other["local"])
    dataset.epoch = 5
    np.testing.assert_array_equal(dataset.sample(0)["local"], first[0]["local"][0])
    assert (dataset.sample((3, 0, 2))["local"] == first[0]["local"][0]).all()


def test_an_evaluation_of_features_has_one_view(folder, views_task):
    config, dataset = dataset_of(folder, views_task)
    evaluated = dataset.as_evaluated(config)
    plain = get_dataset(config, "train").as_evaluated(config)
    assert evaluated.columns == ("pixels",)
    assert dataset.columns == ("pixels", "local")
    np.testing.assert_array_equal(evaluated[3][0], plain[3][0])
    assert evaluated.shapes((16, 16)) == {"pixels": ((16, 16, 3), np.uint8)}


def test_what_a_task_draws_beside_the_views_is_the_samples(folder, views_task):
    _, dataset = dataset_of(folder, views_task)
    dataset.draws["turn"] = lambda rng: rng.integers(1000, size=2)
    assert dataset.columns == ("pixels", "local", "turn")
    sample = dataset.sample((2, 5, 0))
    expected = dataset.generator(2, 5, 0).integers(1000, size=2)
    np.testing.assert_array_equal(sample["turn"], expected)
    dataset.draws["local"] = lambda rng: rng.random()
    with pytest.raises(Exception, match="column local has a name of a column of the data"):
        dataset.sample((2, 5, 0))


def test_an_unreadable_image_is_replaced_or_named(folder, views_task):
    broken = folder / "train" / "a" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    _, dataset = dataset_of(folder, views_task)
    with pytest.raises(Exception, match=r"train/a/2.jpg: .*; repair or remove it, or train with"):
        dataset.sample((1, 2, 0))
    _, dataset = dataset_of(folder, views_task, "DATA.SKIP_BROKEN", "True")
    sample = dataset.sample((1, 2, 0))
    assert sample["skipped"] == 2
    assert dataset.columns == ("pixels", "skipped", "local")
    picture = dataset.picture(3)
    picture.keep_pixels()
    view = dataset.views["pixels"][0]
    expected = view(picture, dataset.generator(1, 2, 0, 0))
    np.testing.assert_array_equal(sample["pixels"][0], expected)
    assert dataset.sample((1, 3, 0))["skipped"] == -1


def test_shards_and_a_cache_give_views(folder, views_task, tmp_path_factory, monkeypatch):
    config, dataset = dataset_of(folder, views_task)
    expected = dataset.sample((1, 6, 0))
    packed = tmp_path_factory.mktemp("packed")
    command = ["-dataset=folder", f"-data_path={folder}", f"-output={packed}"]
    monkeypatch.setattr("sys.argv", ["make_shards.py", *command])
    make_shards.main()
    config = configured("DATA.DATASET", "shards", "DATA.DATA_PATH", str(packed), task=views_task)
    of_shards = get_dataset(config, "train")
    of_shards.views = multi_crop(config, **LOUD)
    for name in ("pixels", "local"):
        np.testing.assert_array_equal(of_shards.sample((1, 6, 0))[name], expected[name])
    cache = tmp_path_factory.mktemp("cache")
    _, cached = dataset_of(folder, views_task, "DATA.CACHE", str(cache))
    found = cached.sample((1, 6, 0))
    for name in ("pixels", "local"):
        assert found[name].shape == expected[name].shape
        # A cache holds Pillow's pixels, which Pillow resizes.
        assert np.abs(found[name].astype(int) - expected[name]).mean() < 3


def test_a_dataset_with_views_travels_to_another_process(folder, views_task):
    _, dataset = dataset_of(folder, views_task)
    sent = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(sent[3][1], dataset[3][1])


def test_a_column_of_the_data_with_a_views_name_is_left_out(folder, views_task):
    _, dataset = dataset_of(folder, views_task)
    dataset.add_columns({"local": np.arange(10)})
    assert dataset.columns == ("pixels", "local")
    assert dataset[2][1].shape == (3, 8, 8, 3)


# ----------------------------------------------------------------- what is refused


def test_masks_are_refused(folder, views_task):
    config, dataset = dataset_of(folder, views_task)
    dataset.task_columns = ("mask",)
    dataset.add_columns({"mask": Masks([f"{number}.png" for number in range(10)])})
    with pytest.raises(
        InputError,
        match=r"^TASK views draws several views of an image, which can't be applied to the column 'mask';"
        r" remove one of the two$",
    ):
        get_dataloader(config, dataset)


def test_views_have_to_be_declared(folder, monkeypatch):
    need(monkeypatch, "labels")
    config, dataset = dataset_of(folder, "classification")
    with pytest.raises(
        InputError,
        match=r"^TASK classification draws views in the column 'pixels', which its registration"
        r" doesn't name; add it to the keyword views$",
    ):
        get_dataloader(config, dataset)
