"""Every dataset type on small files, each validation error, the order of samples, the loader."""

import gzip
import pickle
import tarfile

import numpy as np
import pytest
from conftest import write_images
from PIL import Image
from sklearn.datasets import load_digits
from support.dataset_files import CIFAR10, CIFAR100, cifar_archive, dataset_config, write_idx

from config import _KEYS, get_config
from datasets import (
    ArrayDataset,
    FileDataset,
    get_dataloader,
    get_dataset,
    get_datasets,
)
from errors import InputError, RunError
from loading.transforms import BatchTransform
from settings import registry

# ------------------------------------------------------------- dataset types


@pytest.fixture
def listed(tmp_path):
    """An imagenet2012 folder: 4 training and 2 validation images, one path with a space."""
    write_images(tmp_path / "train", {"a": 2, "b b": 2})
    write_images(tmp_path / "val", {"v": 2}, seed=1)
    (tmp_path / "train_list.txt").write_text(
        "train/a/0.png 0\ntrain/a/1.png 0\ntrain/b b/0.png 1\n\ntrain/b b/1.png 1\n"
    )
    (tmp_path / "val_list.txt").write_text("val/v/0.png 1\nval/v/1.png 0\n")
    return tmp_path


def test_imagenet2012_reads_lists_with_spaces_in_paths(listed):
    config, train, val = get_datasets(dataset_config("imagenet2012", listed))
    assert config.MODEL.NUM_CLASSES == 2
    assert (len(train), train.labels.tolist()) == (4, [0, 0, 1, 1])
    assert train.name(2) == str(listed / "train/b b/0.png")
    pixels, label = val[0]
    expected = (
        Image.open(listed / "val/v/0.png").convert("RGB").resize((8, 8), Image.Resampling.BICUBIC)
    )
    assert (pixels == np.asarray(expected)).all()
    assert (pixels.dtype, label) == (np.uint8, 1)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("train_list.txt", "", r"train_list.txt: the list is empty"),
        (
            "train_list.txt",
            None,
            r"train_list.txt: there is no such file; .* holds the folders train, val .* pass -dataset=folder",
        ),
        (
            "train_list.txt",
            "train/a/0.png 0\ntrain/a/1.png\n",
            r"train_list.txt, line 2: expected a path, then a label",
        ),
        (
            "train_list.txt",
            "train/a/0.png 0\ntrain/a/1.png 5\n",
            r"train_list.txt, line 2: label 5 is outside 0\.\.1",
        ),
        (
            "train_list.txt",
            "train/a/0.png -1\n",
            r"train_list.txt, line 1: label -1 is outside 0\.\.1",
        ),
        (
            "val_list.txt",
            "val/v/0.png 0\nval/v/8.png 1\nx/9.png 0\n",
            r"2 of 3 files are missing, the first is .*v/8.png",
        ),
        (
            "train_list.txt",
            "train/a/0.png 0\n",
            r"validation has 1 classes without a training image: class 1",
        ),
    ],
)
def test_imagenet2012_names_what_is_wrong(listed, file, text, message):
    (listed / file).unlink() if text is None else (listed / file).write_text(text)
    with pytest.raises(InputError, match=message):
        get_datasets(dataset_config("imagenet2012", listed, classes=2))


def test_folder_sorts_classes_and_takes_images_at_any_depth(tmp_path):
    write_images(tmp_path / "train", {"dog": 2, "cat/deep": 1, "cat": 1})
    write_images(tmp_path / "val", {"dog": 1})
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    config, train, val = get_datasets(dataset_config("folder", tmp_path))
    assert train.classes == val.classes == ["cat", "dog"]
    assert train.labels.tolist() == [0, 0, 1, 1]
    # by the training set's classes, though val holds only this one
    assert val.labels.tolist() == [1]
    assert config.MODEL.NUM_CLASSES == 2


def test_folder_names_what_is_wrong(tmp_path):
    with pytest.raises(InputError, match="an empty folder; give the folder that holds the dataset"):
        get_datasets(dataset_config("folder", tmp_path))
    (tmp_path / "1.jpg").touch()
    with pytest.raises(
        InputError, match="train: no class folders; .* holds 1 image; pass the folder above it"
    ):
        get_datasets(dataset_config("folder", tmp_path))
    write_images(tmp_path / "train", {"cat": 1, "dog": 1})
    write_images(tmp_path / "val", {"cow": 1})
    with pytest.raises(InputError, match="classes that the training images lack: 'cow'"):
        get_datasets(dataset_config("folder", tmp_path))
    with pytest.raises(InputError, match=r"the data has 2 classes, but MODEL\.NUM_CLASSES is 1"):
        get_dataset(dataset_config("folder", tmp_path, classes=1), "train")
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(InputError, match="empty: no image files found"):
        get_dataset(dataset_config("folder", tmp_path), "train")


@pytest.mark.parametrize(
    ("kind", "layout", "label_key", "meta", "train_size"),
    [
        ("cifar10", CIFAR10, b"labels", ("batches.meta", b"label_names"), 15),
        ("cifar100", CIFAR100, b"fine_labels", ("meta", b"fine_label_names"), 3),
    ],
)
def test_cifar_reads_its_original_archive(tmp_path, kind, layout, label_key, meta, train_size):
    contents = cifar_archive(tmp_path, *layout, label_key, meta)
    _, train, val = get_datasets(dataset_config(kind, tmp_path, "DATA.IMAGE_SIZE", "32"))
    assert (len(train), len(val), train.classes) == (train_size, 3, ["zero", "one"])
    first = contents[layout[2][-1]][b"data"][0].reshape(3, 32, 32).transpose(1, 2, 0)
    assert (val[0][0] == first).all()
    with tarfile.open(tmp_path / layout[0]) as tar:
        tar.extractall(tmp_path, filter="data")
    (tmp_path / layout[0]).unlink()
    # the unpacked folder serves too
    assert len(get_dataset(dataset_config(kind, tmp_path), "train")) == train_size


def test_cifar_names_what_is_wrong(tmp_path):
    config = dataset_config("cifar10", tmp_path)
    (tmp_path / "cifar-100-python.tar.gz").touch()
    with pytest.raises(InputError, match=r"cifar-10-python.tar.gz: can't be read"):
        get_dataset(config, "train")
    (tmp_path / CIFAR10[0]).write_bytes(b"not an archive")
    with pytest.raises(InputError, match=r"cifar-10-python.tar.gz: can't be read"):
        get_dataset(config, "train")
    cifar_archive(tmp_path, *CIFAR10, b"labels", ("batches.meta", b"label_names"), evil=True)
    with pytest.raises(InputError, match=r"asks to load os\.system"):
        get_dataset(config, "train")
    cifar_archive(tmp_path, *CIFAR10, b"other", ("batches.meta", b"label_names"))
    with pytest.raises(
        InputError,
        match="(can't be read as cifar10's archive|it contains (3|15) images of uint8 and (2|4|10|20) labels)",
    ):
        get_dataset(config, "train")
    for labels in ((0, 1), (0, 1, 1, 0)):  # of three images
        cifar_archive(
            tmp_path, *CIFAR10, b"labels", ("batches.meta", b"label_names"), labels=labels
        )
        with pytest.raises(
            InputError,
            match="(can't be read as cifar10's archive|it contains (3|15) images of uint8 and (2|4|10|20) labels)",
        ):
            get_dataset(config, "train")


@pytest.mark.parametrize(("kind", "zipped"), [("mnist", True), ("fashion_mnist", False)])
def test_mnist_reads_its_original_files(tmp_path, kind, zipped):
    rng = np.random.default_rng(0)
    images, labels = (
        rng.integers(0, 256, (5, 28, 28), np.uint8),
        np.array([0, 9, 3, 9, 0], np.uint8),
    )
    for prefix, count in (("train", 5), ("t10k", 2)):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte", images[:count], zipped)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", labels[:count], zipped)
    grey = [
        "DATA.IMAGE_CHANNELS",
        "1",
        "DATA.IMAGENET_MEAN",
        "0.5",
        "DATA.IMAGENET_STD",
        "0.5",
        "DATA.IMAGE_SIZE",
        "28",
    ]
    config, train, val = get_datasets(dataset_config(kind, tmp_path, *grey))
    assert (len(train), len(val), config.MODEL.NUM_CLASSES) == (5, 2, 10)
    assert train.classes[9] == {"mnist": "9", "fashion_mnist": "Ankle boot"}[kind]
    assert (val[1][0] == images[1][:, :, None]).all()
    # grey serves three channels too
    assert get_dataset(dataset_config(kind, tmp_path), "val")[0][0].shape == (8, 8, 3)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", labels[:3], zipped)
    with pytest.raises(InputError, match=f"{tmp_path}: 2 val images, but 3 labels$"):
        get_dataset(config, "val")
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.array([3, 12], np.uint8), zipped)
    with pytest.raises(InputError, match=r"val labels of '.*' at .* are 3\.\.12, expected 0\.\.9"):
        get_dataset(config, "val")
    file = next(tmp_path.glob("train-labels*"))
    file.write_bytes(gzip.compress(b"\0\0\x08\x01") if zipped else b"\0\0\x08\x01")
    with pytest.raises(InputError, match="train-labels.*not an IDX file"):
        get_dataset(config, "train")
    file.unlink()
    with pytest.raises(InputError, match="train-labels.*can't be read"):
        get_dataset(config, "train")


@pytest.mark.smoke
def test_digits_split_is_fixed_and_stratified():
    _, train, val = get_datasets(dataset_config("digits"))
    assert (len(train), len(val)) == (1433, 364)
    for dataset in (train, val):
        share = np.bincount(dataset.labels) / len(dataset)
        assert np.abs(share - 0.1).max() < 0.01
    bunch = load_digits()
    assert val.labels[:10].tolist() == list(range(10))  # the first of each class
    assert (val.images[3] == np.round(bunch.images[3] * 255 / 16)).all()
    together = np.concatenate([train.images, val.images]).reshape(1797, -1)
    assert sorted(map(bytes, together)) == sorted(
        map(bytes, np.round(bunch.data * 255 / 16).astype(np.uint8))
    )


def test_synthetic_is_fixed():
    config = dataset_config("synthetic", "", "DATA.SYNTHETIC_SIZE", "5", classes=3)
    first = get_dataset(config, "val")
    second = get_dataset(config, "val")
    assert first.labels.tolist() == [0, 1, 2, 0, 1]
    assert (first[3][0] == second[3][0]).all()
    assert (first[3][0] != first[4][0]).any()


def test_a_dataset_of_imagenets_size_is_small_to_hand_over():
    count = 1_300_000
    paths = [f"train/n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG" for i in range(count)]
    dataset = FileDataset(get_config(), "train", "/dataset", paths, np.arange(count) % 1000, [])
    size = len(pickle.dumps(dataset, pickle.HIGHEST_PROTOCOL))
    # measured: 69 MB with these 36-byte paths, of which labels and offsets are 21
    assert size < 80e6
    assert pickle.loads(pickle.dumps(dataset)).name(1_234_567) == "/dataset/" + paths[1_234_567]


# ------------------------------------------------------------- broken images


def test_a_broken_image_is_named_or_skipped_and_listed(tmp_path):
    write_images(tmp_path / "train", {"a": 4})
    (tmp_path / "train/a/2.png").write_bytes(b"\x89PNG broken")
    dataset = get_dataset(dataset_config("folder", tmp_path), "train")
    with pytest.raises(
        RunError,
        match=r"train/a/2.png: its format is unknown; BMP.* are supported; repair or remove it, or train",
    ):
        dataset[2]
    tolerant = get_dataset(dataset_config("folder", tmp_path, "DATA.SKIP_BROKEN", "True"), "train")
    assert [tolerant[i][2] for i in range(4)] == [-1, -1, 2, -1]
    for file in (tmp_path / "train/a").iterdir():
        file.write_bytes(b"")
    with pytest.raises(RunError, match="none of the 4 training images"):
        tolerant[0]


@pytest.mark.parametrize(
    ("mode", "options", "advised"),
    [("train", [], True), ("val", [], False), ("val", ["DATA.SKIP_BROKEN", "True"], False),
     ("val", ["DATA.FAST_EVAL", "True"], False), ("train", ["DATA.CACHE", "cache"], False)],
)  # fmt: skip
def test_a_broken_images_error_advises_only_what_helps(
    tmp_path, monkeypatch, mode, options, advised
):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        write_images(tmp_path / split, {"a": 2})
    (tmp_path / mode / "a/1.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(RunError, match=r"; repair or remove it(.*)$") as caught:
        get_dataset(dataset_config("folder", tmp_path, *options), mode)[1]
    assert str(caught.value).endswith(", or train with DATA.SKIP_BROKEN True") == advised


@pytest.mark.parametrize("workers", ["0", "1"])
def test_errors_while_loading_reach_the_loop(workers):
    config = dataset_config("digits", "", "DATA.NUM_WORKERS", workers, "DATA.BATCH_SIZE_EVAL", "4")
    dataset = get_dataset(config, "val")
    dataset.transform = fail_with_a_bug
    with pytest.raises(
        RuntimeError, match=r"(?s)Traceback .*fail_with_a_bug.*ZeroDivisionError: division by zero"
    ):
        list(get_dataloader(config, dataset, "val"))
    dataset.transform = fail_as_expected
    with pytest.raises(RunError, match=r"^no such file$"):
        list(get_dataloader(config, dataset, "val"))


def fail_with_a_bug(image, rng):
    return 1 / 0


def fail_as_expected(image, rng):
    raise RunError("no such file")


# ---------------------------------------------------------------- augmentation

RECIPE = [
    "TRAIN.AFFINE", "[10.0,0.1,0.1]", "TRAIN.HFLIP", "0.5", "TRAIN.AUTO_AUGMENT", "rand-m9-mstd0.5-inc1",
    "TRAIN.RANDOM_ERASE_PROB", "0.5", "TRAIN.REPEATED_AUGMENT", "3", "TRAIN.MIXUP_ALPHA", "0.8",
    "TRAIN.CUTMIX_ALPHA", "1.0", "TRAIN.MIXUP_MODE", "elem", "TRAIN.SMOOTHING", "0.1",
]  # fmt: skip


def epoch_of(workers, ranks, epoch, *options):
    """What the model would be given in an epoch of global batches of 32: images and targets of each
    sample.
    """
    sizes = ["DATA.NUM_WORKERS", workers, "DATA.BATCH_SIZE", 32 // ranks]
    config = dataset_config("digits", "", *sizes, "MODEL.NUM_CLASSES", "10", *RECIPE, *options)
    whole = get_dataset(config, "train")
    dataset = ArrayDataset(config, "train", whole.images[:330], whole.labels[:330], whole.classes)
    loaders = [
        get_dataloader(config, dataset, "train", rank=rank, ranks=ranks) for rank in range(ranks)
    ]
    transform = BatchTransform(config)
    seen = []
    for wanted in range(1, epoch + 1):  # the loader's workers persist from epoch to epoch
        for loader in loaders:
            loader.batch_sampler.set_epoch(wanted)
        steps = list(zip(*loaders, strict=True))
        if wanted == epoch:
            for step in steps:
                mixed = [transform(batch, epoch) for batch in step]
                seen += [
                    (x.tobytes(), y.tobytes())
                    for m in mixed
                    for x, y in zip(*map(np.asarray, m), strict=True)
                ]
    return seen


@pytest.mark.smoke
def test_augmented_batches_follow_from_seed_and_epoch_whatever_loads_them():
    base = epoch_of(0, 1, 2)
    assert len(base) == 320
    assert len(set(base)) == 320  # copies of an image are augmented apart
    for workers, ranks in ((1, 1), (3, 1), (0, 2), (2, 2)):
        assert epoch_of(workers, ranks, 2) == base
    assert epoch_of(0, 1, 1) != base
    assert epoch_of(0, 1, 2, "SEED", "1") != base


def test_a_sample_is_a_function_of_seed_epoch_index_and_copy():
    sample = get_dataset(dataset_config("digits", "", "TRAIN.AFFINE", "[10.0,0.1,0.1]"), "train")
    assert (sample[1, 5, 0][0] == sample[1, 5, 0][0]).all()
    assert (sample[1, 5, 0][0] != sample[2, 5, 0][0]).any()
    assert (sample[1, 5, 0][0] != sample[1, 5, 1][0]).any()


# ----------------------------------------------------------------------- draws


def draw_noise(rng):
    return rng.random(4, np.float32)


def noise_of(workers, ranks, mode, epoch):
    """The column of a task's draws in a pass, by the label, which is the sample's index."""
    sizes = ["DATA.NUM_WORKERS", workers, "DATA.BATCH_SIZE", 32 // ranks]
    config = dataset_config("digits", "", *RECIPE[:8], *sizes)
    whole = get_dataset(config, "train")
    dataset = ArrayDataset(config, mode, whole.images[:64], np.arange(64), whole.classes)
    dataset.draws["noise"] = draw_noise
    dataset.epoch = epoch
    assert dataset.columns == ("pixels", "labels", *["erased"] * (mode == "train"), "noise")
    noise = {}
    for rank in range(ranks):
        loader = get_dataloader(config, dataset, mode, rank=rank, ranks=ranks)
        if mode == "train":
            loader.batch_sampler.set_epoch(epoch)
        for batch in loader:
            rows = batch["noise"].numpy().tolist()
            noise |= dict(zip(batch["labels"].tolist(), rows, strict=True))
        loader.close()
    return noise


@pytest.mark.parametrize("mode", ["train", "val"])
def test_a_drawn_column_is_a_function_of_the_sample(mode):
    base = noise_of(0, 1, mode, 2)
    assert len({tuple(row) for row in base.values()}) == len(base) == 64
    for workers, ranks in ((2, 1), (0, 2)):
        assert noise_of(workers, ranks, mode, 2) == base
    # An evaluation is the same at every epoch.
    assert (noise_of(0, 1, mode, 3) == base) == (mode == "val")


def test_draws_dont_change_the_other_columns():
    config = dataset_config("digits", "", *RECIPE[:8])
    dataset = get_dataset(config, "train")
    pixels, _, erased = dataset[1, 5, 0]
    dataset.draws["noise"] = draw_noise
    sample = dict(zip(dataset.columns, dataset[1, 5, 0], strict=True))
    np.testing.assert_array_equal(sample["pixels"], pixels)
    np.testing.assert_array_equal(sample["erased"], erased)
    rng = dataset.generator(1, 5, 0)
    dataset.transform(dataset.picture(5), rng)
    dataset.erasing.draw(rng)
    np.testing.assert_array_equal(sample["noise"], draw_noise(rng))


def test_an_evaluations_randomness_is_of_the_seed_and_the_index():
    dataset = get_dataset(dataset_config("digits", ""), "val")
    dataset.draws["noise"] = draw_noise
    expected = draw_noise(np.random.default_rng([0, 0, 7]))
    for epoch in (0, 1, 5):
        dataset.epoch = epoch
        assert (dataset[7][-1] == expected).all()
        # DATA.CORRUPTION draws from this generator, too.
        assert (draw_noise(dataset.generator(epoch, 7, 3)) == expected).all()
    assert (dataset[8][-1] != expected).all()


# ---------------------------------------------------------------- tasks


@pytest.fixture
def unlabelled_task(monkeypatch):
    """Registers the TASK "masked", which needs no labels, and returns options that choose it."""
    component = registry.tasks.components["classification"]
    declared = component._replace(given={"columns": "", "metrics": ""}, keys={})
    monkeypatch.setitem(registry.tasks.components, "masked", declared)
    choices = ("classification", "masked", "multilabel")
    chooser = _KEYS.shared["TASK"]._replace(choices=choices)
    monkeypatch.setitem(_KEYS.shared, "TASK", chooser)
    return [
        "TASK",
        "masked",
        "DATA.DATASET",
        "digits",
        "DATA.IMAGE_SIZE",
        "8",
    ]


def test_a_task_without_labels_gets_none_and_its_model_has_no_outputs(unlabelled_task):
    config, train, val = get_datasets(get_config(None, unlabelled_task))
    assert (config.MODEL.NUM_CLASSES, train.columns, val.columns) == (0, ("pixels",), ("pixels",))
    assert (train.classes, len(train.labels), len(val.labels)) == ([], 1433, 364)
    # They stay with the dataset, for what a probe measures.
    assert np.unique(train.labels).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"task": "segmentation"},
            "is for TASK segmentation, but TASK is classification; change one",
        ),
        ({"columns": ""}, "has no labels, which TASK classification needs; change one of the two"),
        ({"columns": "mask"}, "has no labels, which TASK classification needs; change one"),
        ({"task": "multilabel"}, "is for TASK multilabel, but TASK is classification; change one"),
    ],
)
def test_a_dataset_for_another_task_is_refused(monkeypatch, declared, message):
    component = registry.datasets.components["digits"]
    given = component.given | declared
    monkeypatch.setitem(registry.datasets.components, "digits", component._replace(given=given))
    with pytest.raises(InputError, match=f"^DATA.DATASET 'digits' {message}"):
        get_dataset(get_config(None, ["DATA.DATASET", "digits", "MODEL.NUM_CLASSES", "10"]))
