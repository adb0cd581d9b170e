"""Data sets that a stranger wrote: images, lists, archives, shards, their index, caches."""

import contextlib
import functools
import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile

import forged
import numpy as np
import pytest
from hostile import attempt, damaged
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config import get_config
from loading.archives import cifar10, mnist
from loading.cache import cached
from loading.files import contents
from loading.shards import shards
from loading.sources import Split, folder, imagenet2012
from loading.transforms import EncodedImage, EvalTransform, TrainTransform, readable

CONFIG = get_config(None, ["DATA.IMAGE_SIZE", "16", "DATA.MAX_PIXELS", "1000000"])
PIXELS = CONFIG.DATA.MAX_PIXELS
EVALUATED, TRAINED = EvalTransform(CONFIG), TrainTransform(CONFIG)
NUMBERS = forged.NUMBERS | st.sampled_from([1 << 40, (1 << 63) - 1, -1, -512])
few = settings(max_examples=max(5, settings.default.max_examples * 3 // 10))


def load(data):
    """As an evaluation and as a training load it."""
    with readable("file"):
        EVALUATED(EncodedImage(data, "RGB", "file", PIXELS).decoded())
        TRAINED(EncodedImage(data, "RGB", "file", PIXELS), np.random.default_rng(0))


FOUND = {  # what each took before it was mended
    "EXIF of tags that overlap: 12.7 GB, 49 s": lambda: forged.with_exif(forged.tags_that_overlap(400_000)),
    "TIFF of tags that overlap: 13.6 GB, 34 s": lambda: forged.tags_that_overlap(300_000),
    "texts of 68 kB: 263 MB": lambda: forged.text_bombs(64),
    "3,000 scans": lambda: forged.with_scans(990, 990, 3000),
    "a comment: 8 s": lambda: forged.with_comment(8 << 20),
    "177 bytes: 13.6 GB": lambda: forged.png(1, 50_000),
    "Ghostscript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n",
    "100,000 segments": lambda: b"\xff\xd8" + forged.segment(0xFE) * 100_000 + forged.saved("JPEG")[2:],
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_costs_little(what):
    data = FOUND[what]()
    attempt("image", len(data), lambda: load(data))


@given(forged.ANY)
def test_an_image_is_read_or_refused(data):
    attempt("image", len(data), lambda: load(data))


@st.composite
def lists(draw):
    paths = st.sampled_from(
        [b"a/1.jpg", b"a/x y.jpg", b"../../x", b"/etc/passwd", b"", b"a\0b", b"\xff\xfe", b"a/" * 90]
    )
    labels = st.sampled_from([b"0", b"1", b"-1", b"9" * 30, b"9" * 5000, b"", b"1.0", b"\xd9\xa1", b"0x1", b"1_0"])
    between, ends = st.sampled_from([b" ", b"\t", b"  ", b"", b"\x0b"]), st.sampled_from([b"\n", b"\r\n", b"\r", b""])
    lines = draw(st.lists(st.tuples(paths, between, labels, ends), max_size=6))
    start = draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\0"]))
    return start + b"".join(b"".join(line) for line in lines)


@given(lists() | st.binary(max_size=100))
def test_a_list_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "train_list.txt"
    path.write_bytes(data)
    attempt("list", len(data), lambda: imagenet2012(Split("train"), data_path=str(path.parent)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"a 1\n", "files are missing, the first is"),
        (b"%d/a 1\n", "at least 10000 of 200000 files are missing"),
        (b"a/" * 2000 + b" 1\n", "files are missing"),
        (b"a\n", "line 1: expected a path, then a label; found 'a'"),
    ],
)
def test_a_long_list_costs_little(tmp_path, line, message):
    lines = b"".join(line % number for number in range(200_000)) if b"%" in line else line * (4_000_000 // len(line))
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
    [b"77777777777\0", b"\x80" + bytes(6) + b"\x7f" * 5, b"\xff" * 12, b"00000001000\0", b"-0000000777\0"]
)
KINDS = st.sampled_from([b"0", b"1", b"2", b"3", b"6", b"5", b"L", b"K", b"x", b"g", b"S", b"V", b"\0", b"z"])
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
@given(tars(["a.jpg", "a.cls", "a.png", "b.jpg", "b.cls", "../c.jpg", "x" * 90]))
@example(member("a", b"x", [(156, b"L")]) * 30)
def test_a_shard_is_read_or_refused(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("shard")
    (root / "train-0.tar").write_bytes(data)
    attempt("shard", len(data), lambda: shards(Split("train"), data_path=str(root)))


INDEX = {
    "format": np.array(1), "classes": np.array(["a"]), "shards": np.array([b"train-0.tar"]), "sizes": np.array([4096]),
    "names": np.array([b"a.jpg", b"b.jpg"]), "shard": np.zeros(2, np.int32), "headers": np.zeros(2, np.uint32),
    "offsets": np.array([512, 1024]), "lengths": np.array([9, 9]), "labels": np.array([0, 0]),
}  # fmt: skip


@st.composite
def arrays(draw, like):
    dtype = draw(st.sampled_from([like.dtype, "i8", "f8", "u8", "S0", "U3", "O", "V8", "?", "M8[s]", ">i2"]))
    value = draw(NUMBERS | st.sampled_from(["../x", "a\0b", float("nan")]))
    shape = draw(st.sampled_from([like.shape, (), (0,), (1,), (3,), (2, 2)]))
    array = np.zeros(shape, dtype)
    with contextlib.suppress(ValueError, OverflowError, TypeError):
        array[...] = value
    return array


def npy(array, claims=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=True)
    if not claims:
        return file.getvalue()
    head = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": claims}
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, head)
    return file.getvalue() + array.tobytes()


@st.composite
def npzs(draw, whole):
    way = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))
    changed = draw(st.lists(st.sampled_from(sorted(whole)), max_size=2))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", way) as archive:
        for name, array in whole.items():
            kept = draw(arrays(array)) if name in changed else array
            claims = draw(st.none() | st.tuples(NUMBERS)) if name in changed else None
            if name not in changed or draw(st.booleans()):
                archive.writestr(f"{name}.npy", npy(kept, claims))
    return draw(st.just(file.getvalue()) | damaged(file.getvalue()))


def bomb(way):
    """An index whose number is 100 MiB of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", way) as archive, archive.open("format.npy", "w") as part:
        np.lib.format.write_array_header_1_0(part, {"descr": "<i8", "fortran_order": False, "shape": (100 << 17,)})
        for _ in range(100):
            part.write(bytes(1 << 20))
    return file.getvalue()


@few
@given(npzs(INDEX))
def test_an_index_is_read_or_refused(tmp_path_factory, data):
    try_index(tmp_path_factory.mktemp("index"), data)


@pytest.mark.parametrize("way", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_an_index_of_zeros_is_refused(tmp_path, way):
    try_index(tmp_path, bomb(way))


def try_index(root, data):
    (root / "train-0.tar").write_bytes(bytes(4096))
    (root / "train.index.npz").write_bytes(data)

    def read():
        found = shards(Split("train"), data_path=str(root))
        for index in range(len(found.labels)):
            with readable(found.name(index)):
                found.read(index, 1 << 20)

    attempt("index", len(data) + 4096, read)


@few
@given(st.data())
def test_a_cache_is_read_or_made_anew(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("cache")
    whole = {"crc": np.array(0), "labels": np.array([0, 1]), "classes": np.array(["a", "b"])}
    claims = data.draw(st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS))
    pixels = npy(data.draw(arrays(np.zeros((2, 4, 4), np.uint8))), claims)
    (root / "some.npz").write_bytes(data.draw(npzs(whole)))
    (root / "some.npy").write_bytes(pixels)
    made = [np.zeros((4, 4), np.uint8)] * 2, [0, 1], ["a", "b"]
    assert attempt("cache", len(pixels), lambda: cached(root, "some", lambda: made)) == ""


@st.composite
def idx(draw):
    dimensions = draw(st.sampled_from([3, 3, 1, 0, 255]))
    shape = [draw(NUMBERS) & 0xFFFFFFFF for _ in range(dimensions % 9)]
    body = bytes(draw(st.sampled_from([0, 1, 784, 1 << 20])))
    data = bytes([0, 0, draw(st.sampled_from([8, 9, 13])), dimensions]) + struct.pack(f">{len(shape)}I", *shape) + body
    packed = gzip.compress(data, 1)
    return draw(st.sampled_from([packed, packed + packed, data]) | damaged(packed))


@few
@given(idx())
def test_an_idx_file_is_read_or_refused(tmp_path_factory, data):
    try_idx(tmp_path_factory.mktemp("idx"), data)


@pytest.mark.parametrize("shape", [(1 << 14, 256, 256), (1, 1, 1), ((1 << 32) - 1,) * 3])
def test_zeros_of_an_idx_file_are_refused(tmp_path, shape):
    assert try_idx(tmp_path, gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", *shape) + bytes(1 << 28), 1))


def try_idx(root, data):
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"):
        (root / name).write_bytes(data)
    return attempt("idx", len(data), mnist(Split("train"), data_path=str(root)).read)


NAMES = ["cifar-10-batches-py/test_batch", "cifar-10-batches-py/batches.meta"]
BATCH = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}


@few
@given(st.data())
@example(None)
def test_cifars_archive_is_read_or_refused(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("cifar")
    whole = [pickle.dumps(BATCH, 2), pickle.dumps({b"label_names": [b"a", b"b"]}, 2)]
    if data is None:  # a name of 256 MB, which is none
        parts = member("a", bytes(1 << 28), [(156, b"L")])
    else:
        members = [data.draw(st.just(one) | damaged(one)) for one in whole]
        lies = [data.draw(LIES) for _ in members]
        parts = b"".join(map(member, NAMES, members, lies)) + data.draw(tars(NAMES))
    packed = gzip.compress(parts + bytes(1024), 1)
    (root / "cifar-10-python.tar.gz").write_bytes(packed)
    attempt("cifar", len(packed), cifar10(Split("val"), data_path=str(root)).read)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_blocks_nobody(tmp_path, make):
    for name in ("train_list.txt", "train-0.tar", "train-images-idx3-ubyte.gz", "x.jpg", "cifar-10-python.tar.gz"):
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
        assert "it is no regular file" in attempt("no file", 0, read)


def test_folders_with_any_names_are_read_or_refused(tmp_path):
    for number, name in enumerate((b"a\nb", b"a\x1bb", b"\xff\xfe", b"a\xe2\x80\xa8b")):
        root = tmp_path / str(number)
        os.makedirs(os.fsencode(root) + b"/train/" + name)
        line = attempt("folder", 0, lambda root=root: folder(Split("train"), data_path=str(root)))
        assert "can't be printed; rename it" in line
    for target in ("..", ".", "/"):
        root = tmp_path / f"link{len(target)}{target == '/'}"
        (root / "train").mkdir(parents=True)
        (root / "train/a").symlink_to(target)
        line = attempt("folder", 0, lambda root=root: folder(Split("train"), data_path=str(root)))
        assert "its class folder a is a link to a folder that holds it; remove it" in line
