"""CIFAR's archives: Python 2's pickles give the arrays that went in; hostile ones give one line."""

import io
import pickle
import tarfile

import numpy as np
import pytest
from support.dataset_files import CIFAR10
from support.weight_files import Call, LittleMemory, Raw, numpy_array, program, python2

from errors import InputError
from loading import archives, sources

ARCHIVE, FOLDER, MEMBERS = CIFAR10
WRITERS = {
    "Python 2": python2,
    **{
        f"protocol {number}": lambda value, number=number: pickle.dumps(value, number)
        for number in (2, 3, 4, 5)
    },
}


def write(folder, contents):
    with tarfile.open(folder / ARCHIVE, "w:gz") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(f"{FOLDER}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def read(folder, mode="val"):
    return archives.cifar10(sources.Split(mode), data_path=str(folder)).read()


def batch(images=40, seed=0):
    rng = np.random.default_rng(seed)
    return {
        b"batch_label": b"testing batch 1 of 1",
        b"labels": rng.integers(0, 10, images).tolist(),
        b"data": rng.integers(0, 256, (images, 3072), np.uint8),
        b"filenames": [b"domestic_cat_s_%06d.png" % number for number in range(images)],
    }


NAMES = {
    b"num_cases_per_batch": 10000,
    b"label_names": [b"airplane", b"automobile"],
    b"num_vis": 3072,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_writers_pickles_give_the_same_arrays(tmp_path, writer):
    contents = {name: batch(seed=place) for place, name in enumerate(MEMBERS)}
    pickled = {name: WRITERS[writer](content) for name, content in contents.items()}
    assert (
        pickle.loads(pickled["test_batch"], encoding="bytes")[b"labels"]
        == contents["test_batch"][b"labels"]
    )
    write(tmp_path, pickled | {"batches.meta": WRITERS[writer](NAMES)})
    for mode, members in (("train", MEMBERS[:5]), ("val", MEMBERS[5:])):
        images, labels, names = read(tmp_path, mode)
        expected = np.concatenate([contents[name][b"data"] for name in members]).reshape(
            -1, 3, 32, 32
        )
        np.testing.assert_array_equal(images, expected.transpose(0, 2, 3, 1))
        assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
        assert labels.tolist() == [label for name in members for label in contents[name][b"labels"]]
        assert names == ["airplane", "automobile"]


def test_the_few_bytes_of_a_small_array_are_read_too():
    for images, columns in (
        (1, 7),
        (2, 1000),
        (30, 3072),
    ):  # U, T, and one that stays in the file
        array = np.arange(images * columns).astype(np.uint8).reshape(images, columns)
        data = python2({b"data": array})
        read = archives.DataUnpickler(io.BytesIO(data), len(data)).load()["data"].read()
        np.testing.assert_array_equal(read, array)


def hostile(folder):
    """What a batch may say -> what the line says of it."""
    doubled = Raw(b"]q\x00" + b"0](h\x00h\x00eq\x00" * 40)
    few = [0, 1]
    images = numpy_array((2, 3072), bytes(2 * 3072), "u1")
    run = Call("os", "system", (f"touch {folder / 'ran'}",))
    return {
        r"asks to load os\.system": {"data": run, "labels": few},
        r"asks to load os\.system; only": {"data": images, "labels": run},
        "its labels aren't a list of whole numbers": {"data": images, "labels": doubled},
        r"its labels aren't a list of whole": {"data": images, "labels": [True, False]},
        "Python int too large": {"data": images, "labels": [0, 1 << 80]},
        "'list' object has no attribute 'read'": {"data": doubled, "labels": few},
        r"contains an array of shape \[1099511627776\]": {
            "data": numpy_array((2**40,), "12"),
            "labels": few,
        },
        "2 images of float32 and 2 labels": {
            "data": numpy_array((2, 3072), bytes(8 * 3072)),
            "labels": few,
        },
        "2 images of uint8 and 3 labels": {"data": images, "labels": [0, 1, 1]},
        "cannot reshape": {"data": numpy_array((2, 3), b"123456", "u1"), "labels": few},
        "KeyError: 'labels'": {"data": images},
        "indices must be integers": [few],
    }


@pytest.mark.parametrize("place", range(12))
def test_hostile_pickles_give_one_line_and_run_nothing(tmp_path, place):
    line, content = list(hostile(tmp_path).items())[place]
    write(tmp_path, {"test_batch": program(content), "batches.meta": python2(NAMES)})
    with LittleMemory(), pytest.raises(InputError, match=line) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / ARCHIVE}: ")
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
    assert not (tmp_path / "ran").exists()


def test_damaged_pickles_give_one_line(tmp_path):
    whole = python2(batch())
    for data in (
        b"",
        whole[:-5],
        whole[:1000],
        b"\x80\x02}." * 2,
        pickle.dumps(batch(), 0),
        b"\x93" + whole,
    ):
        write(tmp_path, {"test_batch": data, "batches.meta": python2(NAMES)})
        with pytest.raises(
            InputError,
            match=f"{ARCHIVE}: (it is truncated|its pickle uses|can't be read as cifar10's archive)",
        ):
            read(tmp_path)
    write(tmp_path, {"test_batch": whole, "batches.meta": python2({b"label_names": b"airplane"})})
    with pytest.raises(InputError, match="its label_names aren't a list of names"):
        read(tmp_path)


def test_a_member_is_read_only_where_it_has_cifars_size(tmp_path, monkeypatch):
    write(tmp_path, {"test_batch": bytes(3 << 23), "batches.meta": python2(NAMES)})
    line = "its test_batch isn't a file, or has 25165824 bytes \\(at most 1048576"
    with monkeypatch.context() as patch, LittleMemory(), pytest.raises(InputError, match=line):
        patch.setattr(archives, "_LARGEST_MEMBER", 1 << 20)
        read(tmp_path)
    (tmp_path / ARCHIVE).write_bytes((tmp_path / ARCHIVE).read_bytes()[:-1000])
    with LittleMemory(), pytest.raises(InputError, match="can't be read"):
        read(tmp_path)
