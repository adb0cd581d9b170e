"""The cache of decoded images: made once, shared by name, and never of other sources or damaged in
silence.
"""

import errno
import multiprocessing
import os
import pickle
import shutil
import zlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from conftest import write_images
from PIL import Image
from support.dataset_files import CIFAR10, cifar_archive, dataset_config, write_idx

from datasets import get_dataloader, get_dataset, get_datasets
from errors import InputError, RunError
from loading import cache

NOTHING = cache.Sources(lambda: ())


@pytest.fixture
def folder(tmp_path):
    """Small images, as files."""
    write_images(tmp_path / "in/train", {"a": 5, "b": 4})
    write_images(tmp_path / "in/val", {"b": 2}, seed=1)
    return tmp_path / "in"


def with_cache(kind, root, *options):
    return dataset_config(kind, root, "DATA.CACHE", str(root / "cache"), *options)


def columns(config, dataset):
    config.DATA.defrost()
    config.DATA.BATCH_SIZE = 2
    return [
        c.numpy().tobytes()
        for batch in get_dataloader(config, dataset, "train")
        for c in batch.values()
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("workers", ["0", "2"])
def test_cached_files_give_the_same_samples_and_are_decoded_once(
    folder, capfd, monkeypatch, workers
):
    options = ("DATA.NUM_WORKERS", workers, "TRAIN.AUTO_AUGMENT", "rand-m9", "DATA.BATCH_SIZE", "2")
    plain = get_dataset(dataset_config("folder", folder, *options), "train")
    config, train, val = get_datasets(with_cache("folder", folder, *options))
    assert capfd.readouterr().out.count("doesn't exist yet: decoding") == 2
    assert (train.classes, train.labels.tolist(), val.labels.tolist()) == (
        ["a", "b"],
        [0] * 5 + [1] * 4,
        [1, 1],
    )
    expected = columns(config, plain)
    monkeypatch.setattr("PIL.Image.open", None)  # nothing is decoded any more
    hit = get_dataset(with_cache("folder", folder, *options), "train")
    sent = pickle.dumps(hit.images)
    assert len(sent) < 500  # to other processes goes the name
    assert isinstance(pickle.loads(sent).pixels, np.memmap)
    assert columns(config, train) == columns(config, hit) == expected
    assert capfd.readouterr().out == ""


def test_another_decoding_of_the_same_files_has_another_cache(folder, capfd, monkeypatch):
    get_dataset(with_cache("folder", folder), "val")
    monkeypatch.setattr("datasets._DECODING", "1")  # under which 16-bit grey was white
    get_dataset(with_cache("folder", folder), "val")
    assert capfd.readouterr().out.count("doesn't exist yet: decoding") == 2


@pytest.mark.parametrize("first", ["center", "squash"])
def test_a_cache_serves_both_ways_to_crop(tmp_path, capfd, first):
    """It holds whole images: what one mode wrote, the other reads, and crops as it does itself."""
    for mode in ("train", "val"):
        (tmp_path / mode / "a").mkdir(parents=True)
        pixels = np.random.default_rng(0).integers(0, 256, (12, 30, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / mode / "a" / "0.png")
    (tmp_path / "cache").mkdir()
    found = {}
    for crop in (first, "squash" if first == "center" else "center"):
        options = ("DATA.CROP_MODE", crop)
        cached = get_dataset(with_cache("folder", tmp_path, *options), "val")[0][0]
        assert (
            cached == get_dataset(dataset_config("folder", tmp_path, *options), "val")[0][0]
        ).all()
        found[crop] = cached
    assert (found["center"] != found["squash"]).any()
    assert (
        found["squash"]
        == np.asarray(Image.fromarray(pixels).resize((8, 8), Image.Resampling.BICUBIC))
    ).all()
    assert capfd.readouterr().out.count("doesn't exist yet: decoding") == 1


def test_cached_archives_keep_labels_and_class_names(tmp_path, capfd):
    cifar_archive(tmp_path, *CIFAR10, b"labels", ("batches.meta", b"label_names"))
    rng = np.random.default_rng(0)
    for part, count in (("train", 5), ("t10k", 2)):
        write_idx(
            tmp_path / f"{part}-images-idx3-ubyte",
            rng.integers(0, 256, (count, 28, 28), np.uint8),
            True,
        )
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.arange(count).astype(np.uint8), False)
    for kind in ("cifar10", "mnist", "digits"):
        for mode in ("train", "val"):
            plain = get_dataset(dataset_config(kind, tmp_path), mode)
            for _ in range(2):
                found = get_dataset(with_cache(kind, tmp_path), mode)
                assert (found.images.pixels == plain.images).all()
                assert (found.labels.tolist(), found.classes) == (
                    plain.labels.tolist(),
                    plain.classes,
                )
            assert capfd.readouterr().out.count(": decoding") == 1
    for kind, source in (("cifar10", CIFAR10[0]), ("mnist", "t10k-labels-idx1-ubyte")):
        os.utime(tmp_path / source, ns=(0, 1))
        get_dataset(with_cache(kind, tmp_path), "val")
        assert capfd.readouterr().out.count(": decoding") == 1


def test_processes_that_write_at_once_do_not_meet(folder):
    config = with_cache("folder", folder)
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(3)
    found = context.SimpleQueue()
    writers = [context.Process(target=write_at_once, args=(config, ready, found)) for _ in range(3)]
    for writer in writers:
        writer.start()
    expected = np.stack([image_of(folder, index) for index in range(9)]).tobytes()
    assert [found.get() for _ in writers] == [expected] * 3
    for writer in writers:
        writer.join(60)
    assert get_dataset(config, "train").images.pixels.tobytes() == expected
    assert len(list((folder / "cache").iterdir())) == 2


def write_at_once(config, ready, found):
    ready.wait(60)
    found.put(get_dataset(config, "train").images.pixels.tobytes())


def image_of(folder, index):
    return np.asarray(get_dataset(dataset_config("folder", folder), "train").image(index))


def test_other_or_changed_sources_have_another_cache(folder, capfd):
    def decoded(*options, mode="train"):
        get_dataset(with_cache("folder", folder, *options), mode)
        return "decoding" in capfd.readouterr().out

    assert decoded()
    assert not decoded()
    assert decoded(
        "DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"
    )
    write_images(folder / "train", {"a": 1}, seed=2)
    assert decoded()
    os.utime(folder / "train/a/0.png", ns=(0, 1))
    assert decoded()
    (folder / "train/b").rename(folder / "train/c")
    (folder / "val/b").rename(folder / "val/c")
    assert decoded()
    assert not decoded()
    assert decoded(mode="val")
    write_images(folder / "train", {"z": 1})
    assert decoded(mode="val")  # whose class names have become more


def test_the_fingerprint_depends_on_each_part(tmp_path):
    (tmp_path / "x").write_bytes(b"1")
    (tmp_path / "y").write_bytes(b"1")
    os.utime(tmp_path / "x", ns=(0, 5))
    os.utime(tmp_path / "y", ns=(0, 5))

    def name(*files, parts=()):
        return cache.Sources(lambda: [tmp_path / file for file in files], *parts).name

    found = [name("x"), name("y"), name(), name("x", parts=("L",)), name("x", parts=(b"labels",))]
    (tmp_path / "x").write_bytes(b"12")
    os.utime(tmp_path / "x", ns=(0, 5))
    found.append(name("x"))
    assert len(set(found)) == len(found)


def test_a_source_that_is_replaced_with_its_size_and_time_is_noticed(folder, capfd):
    """So is one that is changed in place; a copied data set isn't decoded again, and is compared
    only once.
    """
    config = with_cache("folder", folder)
    image = folder / "train/a/0.png"
    before = get_dataset(config, "train").images.pixels.copy()
    content = image.read_bytes()
    state = image.stat()
    other = (folder / "train/a/1.png").read_bytes()
    # A PNG may have more after its end, by which both have one size.
    both = [data.ljust(max(len(content), len(other)) + 1, b"\0") for data in (content, other)]

    def put(data, replace):
        if replace:
            image.unlink()
        image.write_bytes(data)
        os.utime(image, ns=(state.st_atime_ns, state.st_mtime_ns))
        capfd.readouterr()
        pixels = get_dataset(config, "train").images.pixels
        return pixels[0].tolist(), capfd.readouterr().out

    assert put(both[0], replace=True)[0] == before[0].tolist()
    for data, replace, expected in ((both[1], True, before[1]), (both[0], False, before[0])):
        pixels, said = put(data, replace)
        assert pixels == expected.tolist()
        assert "its source files have changed): decoding" in said
    whole = folder / "train"
    shutil.copytree(whole, folder / "copy")  # with all times of modification
    shutil.rmtree(whole)
    (folder / "copy").rename(whole)
    capfd.readouterr()
    with mock.patch.object(
        cache.Sources, "checksum", autospec=True, side_effect=cache.Sources.checksum
    ) as read:
        for _ in range(2):
            assert (get_dataset(config, "train").images.pixels == before).all()
    assert (read.call_count, capfd.readouterr().out) == (1, "")


@pytest.mark.parametrize("damage", ["pixel", "short", "gone", "labels"])
def test_a_damaged_cache_is_told_and_made_again(folder, capfd, damage):
    expected = get_dataset(with_cache("folder", folder), "train").images.pixels.tolist()
    capfd.readouterr()
    pixels = next((folder / "cache").glob("folder-train-*.npy"))
    if damage == "gone":
        pixels.unlink()
    else:
        file = pixels.with_suffix(".npz") if damage == "labels" else pixels
        content = bytearray(file.read_bytes())
        content[len(content) // 3 if damage == "labels" else -5] ^= 1
        file.write_bytes(content[:-40] if damage == "short" else content)
    again = get_dataset(with_cache("folder", folder), "train")
    printed = capfd.readouterr().out
    assert f"{pixels} can't be used (" in printed
    assert "decoding" in printed
    assert again.images.pixels.tolist() == expected
    get_dataset(with_cache("folder", folder), "train")
    assert capfd.readouterr().out == ""
    assert len(list((folder / "cache").iterdir())) == 2  # no temporary file is left


def test_a_cache_is_read_only_as_it_was_written(tmp_path, capfd):
    folder = tmp_path / "of" / "mine"
    labels = np.array([1, 0])
    made = []

    def decoded():
        made.append(True)
        return [np.full((2, 3, 3), value, np.uint8) for value in (7, 8)], labels, ["a", "b"]

    cache.cached_images(folder, "some", NOTHING, decoded)
    written = dict(np.load(folder / "some.npz"))
    assert written["crcs"].tolist() == [zlib.crc32(bytes([value] * 18)) for value in (7, 8)]
    touched = {"state": written["state"] - 1}
    crcs = written["crcs"]
    short = ({"labels": labels[:1]}, {"labels": np.append(labels, 1)}, {"crcs": crcs[:1]})
    for others in (touched | {"crcs": crcs - 1}, touched | {"crcs": crcs[::-1]}, *short):
        np.savez(folder / "some.npz", **written | others)
        images, found, _ = cache.cached_images(folder, "some", NOTHING, decoded)
        assert (images.pixels[:, 0, 0, 0].tolist(), found.tolist()) == ([7, 8], [1, 0])
        assert (
            f"{folder / 'some.npy'} can't be used ({folder / 'some.npz'}: its content has changed): decoding"
            in capfd.readouterr().out
        )
        written = dict(np.load(folder / "some.npz"))
    cache.cached_images(folder, "some", NOTHING, decoded)
    assert len(made) == 6
    with pytest.raises(InputError, match="found 4 x 2 after 3 x 2;"):
        cache.cached_images(
            folder,
            "other",
            NOTHING,
            lambda: ([np.zeros((2, side, 1), np.uint8) for side in (3, 4)], labels, []),
        )


@pytest.fixture
def compared(monkeypatch):
    """The sizes of what was compared with its CRC-32."""
    sizes = []
    real = zlib.crc32

    def crc32(data, *before):
        sizes.append(memoryview(data).nbytes)
        return real(data, *before)

    monkeypatch.setattr(cache, "zlib", SimpleNamespace(crc32=crc32))
    return sizes


def opened(folder):
    return get_dataset(with_cache("folder", folder), "train").images


def test_pixels_that_have_not_changed_are_not_read_at_a_start(folder, compared, capfd, monkeypatch):
    opened(folder)
    pixels = next((folder / "cache").glob("folder-train-*.npy"))
    compared.clear()
    images = opened(folder)
    assert compared == []
    expected = images.pixels.tobytes()
    changes = {
        "touched": lambda: os.utime(pixels, ns=(0, 1)),
        "copied": lambda: (
            shutil.copy2(pixels, folder / "copy"),
            (folder / "copy").replace(pixels),
        ),
        "of other rights": lambda: pixels.chmod(0o640),
    }
    for change in changes.values():
        change()
        assert opened(folder).pixels.tobytes() == expected
        assert compared == [12 * 12 * 3] * 9
        compared.clear()
        opened(folder)
        assert compared == []
    os.utime(pixels, ns=(0, 2))
    for _ in range(2):  # in a folder that can't be written
        with monkeypatch.context() as readonly:
            readonly.setattr(
                cache, "writing_whole", mock.Mock(side_effect=OSError(errno.EROFS, "Read-only"))
            )
            opened(folder)
        assert len(compared) == 9
        compared.clear()
    assert capfd.readouterr().out.count("decoding") == 1


def test_damage_that_leaves_no_trace_is_found_as_the_image_is_read(folder):
    """As of a disk that decays: no size and no time of change tells."""
    images = opened(folder)
    expected = [images[index].tolist() for index in range(9)]
    with open(images.file, "r+b") as file:
        file.seek(-13 * 12 * 12 * 3 // 4, os.SEEK_END)
        file.write(b"?")
    rest = images.file.with_suffix(".npz")
    np.savez(rest, **dict(np.load(rest)) | {"state": cache._state(images.file)})
    dataset = get_dataset(with_cache("folder", folder), "train")
    for index in range(9):
        if index == 5:
            advice = r"check the disk\); remove the file, so that the next start decodes the images again$"
            with pytest.raises(
                RunError, match=rf"^{images.file}: its image 5 has changed \({advice}"
            ):
                dataset[index]
        else:
            assert dataset.images[index].tolist() == expected[index]
    images.file.unlink()
    assert opened(folder)[5].tolist() == expected[5]


def test_what_cannot_be_cached_is_an_error(folder):
    write_images(folder / "val", {"a": 1}, size=13)
    with pytest.raises(
        InputError, match="DATA.CACHE needs images of one size, but found 12 x 12 after 13 x 13"
    ):
        get_dataset(with_cache("folder", folder), "val")
    assert not (folder / "cache").exists()
    (folder / "train/a/2.png").write_bytes(b"broken")
    with pytest.raises(
        InputError, match=r"train/a/2.png: its format is unknown; .* repair or remove it$"
    ):
        get_dataset(with_cache("folder", folder), "train")
    assert not (folder / "cache").exists()
    (folder / "file").touch()
    with pytest.raises(
        InputError,
        match=r"DATA.CACHE .*file: can't be written \(File exists\); choose another folder",
    ):
        get_dataset(dataset_config("folder", folder, "DATA.CACHE", str(folder / "file")), "val")
    with pytest.raises(InputError, match="DATA.CACHE is 'x', expected None with SKIP_BROKEN"):
        dataset_config("folder", "", "DATA.SKIP_BROKEN", "True", "DATA.CACHE", "x")
    with pytest.raises(
        InputError, match="DATA.CACHE has no effect with DATA.DATASET synthetic; leave it out"
    ):
        dataset_config("synthetic", "", "DATA.CACHE", "x")
