"""Data sets that a stranger wrote: lists, folders, archives, shards, their index, caches."""

import contextlib
import functools
import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import forged_images
from support.hostile_files import attempt, damaged

from loading.archives import cifar10, mnist
from loading.cache import Sources, cached_images
from loading.files import contents
from loading.shards import shards
from loading.sources import Split, class_folders, imagenet2012
from loading.transforms import readable
from loading.unlabelled import images_list

NUMBERS = forged_images.NUMBERS | st.sampled_from([1 << 40, (1 << 63) - 1, -1, -512])
few = settings(max_examples=max(5, settings.default.max_examples * 3 // 10))


@st.composite
def lists(draw):
    paths = st.sampled_from(
        [
            b"a/1.jpg",
            b"a/x y.jpg",
            b"../../x",
            b"/etc/passwd",
            b"",
            b"a\0b",
            b"\xff\xfe",
            b"a/" * 90,
        ]
    )
    labels = st.sampled_from(
        [b"0", b"1", b"-1", b"9" * 30, b"9" * 5000, b"", b"1.0", b"\xd9\xa1", b"0x1", b"1_0"]
    )
    between = st.sampled_from([b" ", b"\t", b"  ", b"", b"\x0b"])
    ends = st.sampled_from([b"\n", b"\r\n", b"\r", b""])
    lines = draw(st.lists(st.tuples(paths, between, labels, ends), max_size=6))
    start = draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\0"]))
    return start + b"".join(b"".join(line) for line in lines)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """A folder with the two images that some lines of the lists name."""
    root = tmp_path_factory.mktemp("listed")
    (root / "a").mkdir()
    for name in ("1.jpg", "x y.jpg"):
        (root / "a" / name).write_bytes(forged_images.WHOLE["JPEG"])
    return root


def try_list(root, data, reader=imagenet2012):
    (root / "train_list.txt").write_bytes(data)

    def read():
        found = reader(Split("train"), data_path=str(root))
        assert len(found.paths) > 0
        assert all((root / path).exists() for path in found.paths)
        if found.labels is not None:
            assert len(found.labels) == len(found.paths)
            assert all(0 <= label < 10**7 for label in found.labels)

    return attempt("list", len(data), read)


SOUND = st.sampled_from([b"a/1.jpg 0\n", b"a/x y.jpg 1\r\n", b"a/1.jpg\t5\n", b"\n"])


@given(lists() | st.lists(SOUND, max_size=4).map(b"".join) | st.binary(max_size=100))
def test_a_list_is_read_or_refused(listed, data):
    try_list(listed, data)


@given(lists() | st.binary(max_size=100))
def test_a_list_without_labels_is_read_or_refused(listed, data):
    try_list(listed, data, images_list)


def test_a_sound_list_is_read(listed):
    assert try_list(listed, b"\xef\xbb\xbfa/1.jpg\r\na/x y.jpg", images_list) == ""
    assert try_list(listed, b"\xef\xbb\xbfa/1.jpg 0\r\na/x y.jpg\t1") == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"a 1\n", "files are missing, the first is"),
        (b"%d/a 1\n", "at least 10000 of 200000 files are missing"),
        (b"a/" * 2000 + b" 1\n", "files are missing"),
        (b"a\n", "line 1: expected a path, then a label, which is a whole number; found 'a'"),
    ],
)
def test_a_long_list_costs_little(tmp_path, line, message):
    lines = (
        b"".join(line % number for number in range(200_000))
        if b"%" in line
        else line * (4_000_000 // len(line))
    )
    (tmp_path / "train_list.txt").write_bytes(lines)
    read = functools.partial(imagenet2012, Split("train"), data_path=str(tmp_path))
    assert message in attempt("list", len(lines), read)


def member(name, data, lies=()):
    """A tar member whose header says what ``lies`` tell of its fields, with a right sum over it."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    for place, lie in lies:
        header[place : place + len(lie)] = lie
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header) + data + bytes(-len(data) % 512)


SIZES = st.sampled_from(
    [
        b"77777777777\0",
        b"\x80" + bytes(6) + b"\x7f" * 5,
        b"\xff" * 12,
        b"00000001000\0",
        b"-0000000777\0",
    ]
)
KINDS = st.sampled_from(
    [b"0", b"1", b"2", b"3", b"6", b"5", b"L", b"K", b"x", b"g", b"S", b"V", b"\0", b"z"]
)
LIES = st.lists(st.tuples(st.just(124), SIZES) | st.tuples(st.just(156), KINDS), max_size=2)
TEXTS = st.sampled_from([
    b"1", b"9" * 30, b"", b"\xef\xbb\xbf3", b"cat", b"-1", b"30 GNU.sparse.size=99999999999\n",
    b"19 GNU.sparse.major=1\n19 GNU.sparse.minor=0\n", b"19 size=-1000000000\n", b"99999999 path=x\n",
    b"26 GNU.sparse.map=0,1,2,3\n", b"18 path=" + b"\xff" * 9 + b"\n",
])  # fmt: skip


@st.composite
def tars(draw, names):
    parts = draw(st.lists(st.builds(member, st.sampled_from(names), TEXTS, LIES), max_size=6))
    return b"".join(parts) + bytes(draw(st.sampled_from([0, 512, 1024, 10240])))


@few
@given(tars(["a.jpg", "a.cls", "a.png", "a.mask.png", "b.jpg", "b.cls", "../c.jpg", "x" * 90]))
@example(member("a", b"x", [(156, b"L")]) * 30)
def test_a_shard_is_read_or_refused(tmp_path_factory, data):
    try_shard(tmp_path_factory.mktemp("shard"), data)


def try_shard(root, data):
    """Reads a shard's headers, or the index beside it, and each image."""
    (root / "train-0.tar").write_bytes(data)

    def read():
        found = shards(Split("train"), data_path=str(root))
        assert found.labels is None or len(found.labels) == len(found.names)
        for index in range(len(found.names)):
            with readable(found.name(index)):
                assert len(found.read(index, 1 << 20)) == found.lengths[index]

    size = len(data) + sum(path.stat().st_size for path in root.glob("*.npz"))
    return attempt("index" if size > len(data) else "shard", size, read)


SHARD = b"".join(
    member(name, text)
    for name in ("a", "b")
    for name, text in ((f"{name}.jpg", b"x" * 9), (f"{name}.cls", b"0"))
)
SHARD += bytes(1024)
INDEX = {
    "format": np.array(1), "classes": np.array(["a"]), "shards": np.array([b"train-0.tar"]),
    "sizes": np.array([len(SHARD)]), "names": np.array([b"a.jpg", b"b.jpg"]), "shard": np.zeros(2, np.int32),
    "headers": np.array([zlib.crc32(SHARD[at : at + 512]) for at in (0, 2048)], np.uint32),
    "offsets": np.array([512, 2560]), "lengths": np.array([9, 9]), "labels": np.array([0, 0]),
}  # fmt: skip


WITHOUT_LABELS = {name: array for name, array in INDEX.items() if name != "labels"}
WITHOUT_LABELS["format"] = np.array(3)


def test_a_sound_shard_and_its_index_are_read(tmp_path):
    assert try_index(tmp_path, npz(WITHOUT_LABELS)) == ""
    (tmp_path / "train.index.npz").unlink()
    assert try_shard(tmp_path, SHARD) == ""  # by its headers; the index stays beside it
    assert try_index(tmp_path, npz(INDEX)) == ""


@st.composite
def arrays(draw, like):
    dtype = draw(
        st.sampled_from([like.dtype, "i8", "f8", "u8", "S0", "U3", "O", "V8", "?", "M8[s]", ">i2"])
    )
    value = draw(NUMBERS | st.sampled_from(["../x", "a\0b", float("nan")]))
    shape = draw(st.sampled_from([like.shape, (), (0,), (1,), (3,), (2, 2)]))
    array = np.zeros(shape, dtype)
    with contextlib.suppress(ValueError, OverflowError, TypeError):
        array[...] = value
    return array


def npy(array, claims=None):
    np.lib.format.write_array(file := io.BytesIO(), array, version=(1, 0), allow_pickle=True)
    if not claims:
        return file.getvalue()
    head = {
        "descr": np.lib.format.dtype_to_descr(array.dtype),
        "fortran_order": False,
        "shape": claims,
    }
    np.lib.format.write_array_header_1_0(file := io.BytesIO(), head)
    return file.getvalue() + array.tobytes()


@st.composite
def npzs(draw, whole):
    way = draw(
        st.sampled_from(
            [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
        )
    )
    changed = draw(st.lists(st.sampled_from(sorted(whole)), max_size=2))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", way) as archive:
        for name, array in whole.items():
            kept = draw(arrays(array)) if name in changed else array
            claims = draw(st.none() | st.tuples(NUMBERS)) if name in changed else None
            if name not in changed or draw(st.booleans()):
                archive.writestr(f"{name}.npy", npy(kept, claims))
    return draw(st.just(file.getvalue()) | damaged(file.getvalue()))


def npz(arrays):
    """The bytes of NumPy's own archive."""
    np.savez(file := io.BytesIO(), **arrays)
    return file.getvalue()


def bomb(way):
    """An index whose number is 100 MiB of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", way) as archive, archive.open("format.npy", "w") as part:
        np.lib.format.write_array_header_1_0(
            part, {"descr": "<i8", "fortran_order": False, "shape": (100 << 17,)}
        )
        for _ in range(100):
            part.write(bytes(1 << 20))
    return file.getvalue()


@few
@given(npzs(INDEX) | npzs(WITHOUT_LABELS))
def test_an_index_is_read_or_refused(tmp_path_factory, data):
    try_index(tmp_path_factory.mktemp("index"), data)


@pytest.mark.parametrize("way", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_an_index_of_zeros_is_refused(tmp_path, way):
    assert "train.index.npz: " in try_index(tmp_path, bomb(way))


def try_index(root, data):
    (root / "train.index.npz").write_bytes(data)
    return try_shard(root, SHARD)


@few
@given(st.data())
def test_a_cache_is_read_or_made_anew(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("cache")
    sources = Sources(lambda: ())
    whole = {"state": np.zeros(4, int), "sources": sources.state, "checksum": sources.checksum()}
    whole |= {
        "crcs": np.zeros(2, np.uint32),
        "labels": np.array([0, 1]),
        "classes": np.array(["a", "b"]),
    }
    claims = data.draw(st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS))
    pixels = npy(data.draw(arrays(np.zeros((2, 4, 4), np.uint8))), claims)
    (root / "some.npz").write_bytes(data.draw(npzs(whole)))
    (root / "some.npy").write_bytes(pixels)
    made = [np.zeros((4, 4), np.uint8)] * 2, [0, 1], ["a", "b"]
    assert (
        attempt("cache", len(pixels), lambda: cached_images(root, "some", sources, lambda: made))
        == ""
    )


def idx_file(*shape):
    return (
        bytes([0, 0, 8, len(shape)])
        + struct.pack(f">{len(shape)}I", *shape)
        + bytes(int(np.prod(shape)))
    )


IDX = [idx_file(2, 28, 28), idx_file(2)]  # images, labels


@st.composite
def idx(draw):
    dimensions = draw(st.sampled_from([3, 3, 1, 0, 255]))
    shape = [draw(NUMBERS) & 0xFFFFFFFF for _ in range(dimensions % 9)]
    body = bytes(draw(st.sampled_from([0, 1, 784, 1 << 20])))
    data = (
        bytes([0, 0, draw(st.sampled_from([8, 9, 13])), dimensions])
        + struct.pack(f">{len(shape)}I", *shape)
        + body
    )
    data = draw(st.just(data) | st.sampled_from(IDX) | damaged(IDX[0]))
    packed = gzip.compress(data, 1)
    return draw(st.sampled_from([packed, packed + packed, data]) | damaged(packed))


@few
@given(idx(), st.sampled_from([0, 1]))
def test_an_idx_file_is_read_or_refused(tmp_path_factory, data, place):
    files = [gzip.compress(whole) for whole in IDX]
    files[place] = data
    try_idx(tmp_path_factory.mktemp("idx"), *files)


def test_sound_idx_files_are_read(tmp_path):
    assert try_idx(tmp_path, *map(gzip.compress, IDX)) == ""


@pytest.mark.parametrize("shape", [(1 << 14, 256, 256), (1, 1, 1), ((1 << 32) - 1,) * 3])
def test_zeros_of_an_idx_file_are_refused(tmp_path, shape):
    zeros = gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", *shape) + bytes(1 << 28), 1)
    assert try_idx(tmp_path, zeros, gzip.compress(IDX[1])).startswith(
        str(tmp_path / "train-images")
    )


def try_idx(root, *files):
    for name, data in zip(
        ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"), files, strict=True
    ):
        (root / name).write_bytes(data)

    def read():
        images, labels, _ = mnist(Split("train"), data_path=str(root)).read()
        assert (images.dtype, images.ndim, len(images)) == (np.uint8, 3, len(labels))

    return attempt("idx", sum(map(len, files)), read)


NAMES = ["cifar-10-batches-py/test_batch", "cifar-10-batches-py/batches.meta"]
BATCH = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}


WHOLE = [pickle.dumps(BATCH, 2), pickle.dumps({b"label_names": [b"a", b"b"]}, 2)]


@few
@given(st.data())
def test_cifars_archive_is_read_or_refused(tmp_path_factory, data):
    members = [data.draw(st.just(one) | damaged(one)) for one in WHOLE]
    lies = [data.draw(LIES) for _ in members]
    try_cifar(
        tmp_path_factory.mktemp("cifar"),
        b"".join(map(member, NAMES, members, lies)) + data.draw(tars(NAMES)),
    )


def test_cifars_sound_archive_is_read_and_a_name_of_256_mb_is_refused(tmp_path):
    assert try_cifar(tmp_path, b"".join(map(member, NAMES, WHOLE))) == ""
    assert "it has a header of " in try_cifar(tmp_path, member("a", bytes(1 << 28), [(156, b"L")]))


def try_cifar(root, parts):
    packed = gzip.compress(parts + bytes(1024), 1)
    (root / "cifar-10-python.tar.gz").write_bytes(packed)

    def read():
        images, labels, _ = cifar10(Split("val"), data_path=str(root)).read()
        assert images.shape == (len(labels), 32, 32, 3)

    return attempt("cifar", len(packed), read)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_blocks_nobody(tmp_path, make):
    for name in (
        "train_list.txt",
        "train-0.tar",
        "train-images-idx3-ubyte.gz",
        "x.jpg",
        "cifar-10-python.tar.gz",
    ):
        make(tmp_path / name)

    def image():
        with readable("x.jpg"):
            contents(tmp_path / "x.jpg", 1 << 20)

    root = str(tmp_path)
    for read in (
        image,
        lambda: imagenet2012(Split("train"), data_path=root),
        lambda: shards(Split("train"), data_path=root),
        cifar10(Split("val"), data_path=root).read,
        mnist(Split("train"), data_path=root).read,
    ):
        assert "it isn't a regular file" in attempt("no file", 0, read)


def test_folders_with_any_names_are_read_or_refused(tmp_path):
    for number, name in enumerate((b"a\nb", b"a\x1bb", b"\xff\xfe", b"a\xe2\x80\xa8b")):
        root = tmp_path / str(number)
        os.makedirs(os.fsencode(root) + b"/train/" + name)
        line = attempt(
            "folder", 0, lambda root=root: class_folders(Split("train"), data_path=str(root))
        )
        assert "has unprintable characters; rename it" in line
    for target in ("..", ".", "/"):
        root = tmp_path / f"link{len(target)}{target == '/'}"
        (root / "train").mkdir(parents=True)
        (root / "train/a").symlink_to(target)
        line = attempt(
            "folder", 0, lambda root=root: class_folders(Split("train"), data_path=str(root))
        )
        assert "its class folder a is a link to a folder that holds it; remove it" in line
