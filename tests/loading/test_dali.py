"""NVIDIA DALI as the loader: which samples it gives, how near its pixels are, and what it can't do."""

import sys
import tarfile

import numpy as np
import pytest
from PIL import Image
from support.task_columns import need

from config import get_config, with_values
from datasets import get_dataloader, get_dataset
from errors import InputError, RunError

SIDES = [(80, 60), (61, 97), (48, 48), (120, 75)]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of 11 smooth images, one of them a grey one, one a PNG."""
    root = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for number in range(11):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
        image = coarse.resize(SIDES[number % 4], Image.Resampling.BICUBIC).convert(
            "L" if number == 3 else "RGB"
        )
        place = root / "train" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{number:02}{'.png' if number == 4 else '.jpg'}")
    return root


def configured(root, kind, *options):
    words = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(root),
        "DATA.LOADER",
        kind,
        "MODEL.NUM_CLASSES",
        "auto",
    ]
    words += [
        "DATA.IMAGE_SIZE",
        "32",
        "DATA.BATCH_SIZE",
        "3",
        "DATA.NUM_WORKERS",
        "1",
        "DATA.DROP_LAST",
        "False",
    ]
    return get_config(None, [*words, "TRAIN.NUM_EPOCHS", "4", "TRAIN.WARMUP_EPOCHS", "0", *options])


def taken(config, epochs, ranks=2):
    """The columns of all ranks' batches of each epoch; looked at when all have been taken."""
    dataset = get_dataset(config, "train")
    loaders = [
        get_dataloader(config, dataset, "train", rank=rank, ranks=ranks) for rank in range(ranks)
    ]
    found = []
    for epoch in epochs:
        for loader in loaders:
            loader.batch_sampler.set_epoch(epoch)
        found.append([batch for loader in loaders for batch in loader])
    return [
        [np.concatenate([batch[name].numpy() for batch in batches]) for name in batches[0]]
        for batches in found
    ]


@pytest.mark.parametrize(
    "options", [[], ["DATA.INTERPOLATION", "bilinear", "DATA.IMAGE_CHANNELS", "1"]]
)
def test_its_samples_are_those_of_the_other_loader(photographs, options):
    pytest.importorskip("nvidia.dali")
    if options:
        options = [*options, "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"]
        options += ["TRAIN.CROP", "random_resized_once"]
    options = [
        *options,
        "TRAIN.VFLIP",
        "0.5",
        "TRAIN.RANDOM_ERASE_PROB",
        "0.5",
        "TRAIN.MIXUP_ALPHA",
        "0.8",
    ]
    options += ["TRAIN.MIXUP_MODE", "elem", "DATA.BATCH_SIZE", "4"]
    ours, theirs = (
        taken(configured(photographs, kind, *options), (1, 2, 4)) for kind in ("paddle", "dali")
    )
    for own, other in zip(ours, theirs, strict=True):
        (pixels, labels, erased, mixed), (dali_pixels, dali_labels, dali_erased, dali_mixed) = (
            own,
            other,
        )
        assert len(labels) == 12  # 11, and one to fill the ranks' last batches
        assert pixels.shape == dali_pixels.shape
        assert dali_pixels.dtype == np.uint8
        assert (labels == dali_labels).all()
        assert (erased == dali_erased).all()
        assert (mixed == dali_mixed).all()
        assert len(np.unique(mixed[:, 1])) > 8
        apart = np.abs(pixels.astype(int) - dali_pixels).mean((1, 2, 3))
        assert apart.max() < 1.5


def test_a_batch_is_loaded_once_more_to_the_bit(photographs):
    pytest.importorskip("nvidia.dali")
    config = configured(photographs, "dali", "TRAIN.MIXUP_ALPHA", "0.8", "DATA.BATCH_SIZE", "4")
    loader = get_dataloader(config, get_dataset(config, "train"), "train")
    loader.batch_sampler.set_epoch(2)
    batches = list(loader)
    assert len(batches) == 3
    for step, batch in enumerate(batches, 1):
        _, again = loader.load_again(step)
        assert list(again) == list(loader.columns)
        for name, column in batch.items():
            np.testing.assert_array_equal(again[name], column.numpy())


@pytest.mark.parametrize("draws", [[], ["noise", "turn"]])
@pytest.mark.parametrize("kind", ["images", "images_list", "shards"])
def test_it_loads_images_without_labels(photographs, tmp_path, monkeypatch, kind, draws):
    pytest.importorskip("nvidia.dali")
    need(monkeypatch)
    paths = sorted(str(path) for path in photographs.glob("train/*/*"))
    (tmp_path / "train_list.txt").write_text("\n".join(paths))
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for number, path in enumerate(paths):
            tar.add(path, f"{number:02}{path[-4:]}")
    root = photographs if kind == "images" else tmp_path

    def batches(loader):
        config = configured(root, loader, "DATA.DATASET", kind)
        dataset = get_dataset(config, "train", alone=True)
        for name in draws:
            dataset.draws[name] = lambda rng: rng.random(3, np.float32)
        loaded = get_dataloader(config, dataset, "train")
        loaded.batch_sampler.set_epoch(2)
        return [{name: column.numpy() for name, column in batch.items()} for batch in loaded]

    for own, other in zip(batches("paddle"), batches("dali"), strict=True):
        assert list(own) == list(other) == ["pixels", *draws]
        apart = np.abs(own["pixels"].astype(int) - other["pixels"]).mean((1, 2, 3))
        assert apart.max() < 1.5
        for name in draws:
            np.testing.assert_array_equal(own[name], other[name])


def test_it_names_a_broken_file(photographs, tmp_path):
    pytest.importorskip("nvidia.dali")
    place = tmp_path / "train" / "a"
    place.mkdir(parents=True)
    data = next(photographs.glob("train/a/*.jpg")).read_bytes()
    for number in range(4):
        (place / f"{number}.jpg").write_bytes(data)
    # found by DALI's decoder, or before it
    for broken in (data[: -len(data) // 3], b"", b"no image"):
        (place / "2.jpg").write_bytes(broken)
        with pytest.raises(RunError, match=r"train/a/2.jpg: (its? |can't be read as an image)"):
            taken(configured(tmp_path, "dali", "DATA.BATCH_SIZE", "2"), [1], ranks=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("TRAIN.CROP", "simple"),
        ("TRAIN.CROP", "short_side"),
        ("TRAIN.CROP", "squash"),
        ("TRAIN.AFFINE", "[10.0,0.1,0.1]"),
        ("TRAIN.AUTO_AUGMENT", "3a"),
        ("TRAIN.COLOR_JITTER", "0.4"),
        ("TRAIN.PHOTOMETRIC", "True"),
        ("TRAIN.CROP", "scale_jitter"),
        ("TRAIN.INTERPOLATION", "random"),
        ("DATA.SKIP_BROKEN", "True"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(key, value):
    with pytest.raises(InputError, match=rf"^{key} is .*, expected .* with DATA\.LOADER dali"):
        configured("", "dali", key, value)
    # it has no part in that
    with_values(configured("", "paddle", key, value), EVAL=True, DATA__LOADER="dali")
    configured("", "paddle", key, value)


def test_images_in_memory_and_a_missing_package_are_named(photographs, monkeypatch):
    config = with_values(configured("", "dali"), DATA__DATASET="digits")
    with pytest.raises(
        InputError, match=r"DATA\.LOADER is 'dali', which decodes files, but digits yields"
    ):
        get_dataloader(config, get_dataset(config, "train"), "train")
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.delitem(sys.modules, "loading.dali", raising=False)
    config = configured(photographs, "dali")
    with pytest.raises(
        InputError, match=r"^DATA\.LOADER dali: .*nvidia.*; pip install nvidia-dali\S+$"
    ):
        get_dataloader(config, get_dataset(config, "train"), "train")
