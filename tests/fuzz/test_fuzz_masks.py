"""Annotations and tables of masks as a stranger wrote them: JSON, colours, lists of pairs."""

import copy
import functools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import forged_images
from support.hostile_files import a_share, attempt, damaged

from loading.mask_folders import masks_list, read_colors
from loading.sources import Split
from tools.annotations.coco import Coco
from tools.annotations.labelme import LabelMe
from tools.annotations.pictures import indices_of
from tools.annotations.voc import read_labelmap

pytest.importorskip("pycocotools.mask")
SIZE = forged_images.PICTURE.size
NUMBERS = st.sampled_from(
    [0, 1, -1, 7, 2**31, 2**63, 2**80, 0.5, -1e-300, 1e300, 1e12, 31.99, True]
)
TEXTS = st.sampled_from(
    [
        "",
        "a",
        "0.jpg",
        "../0.jpg",
        "/etc/passwd",
        "a\0",
        "\x1b",
        "polygon",
        "circle",
        "o" * 40,
        "PPYo0",
    ]
)
VALUES = st.one_of(
    NUMBERS,
    TEXTS,
    st.none(),
    st.lists(NUMBERS, max_size=8),
    st.lists(st.lists(NUMBERS, max_size=4), max_size=4),
    st.dictionaries(
        st.sampled_from(["size", "counts", "id", "label", "points"]), NUMBERS, max_size=3
    ),
)
POINTS = [[1, 1], [20.5, 3], [9, 20]]
LABELME = {
    "imagePath": "0.jpg",
    "imageWidth": SIZE[0],
    "imageHeight": SIZE[1],
    "shapes": [
        {"label": "tree", "shape_type": "polygon", "points": POINTS},
        {"label": "car", "shape_type": "rectangle", "points": POINTS[:2]},
        {"label": "sun", "shape_type": "circle", "points": POINTS[:2]},
    ],
}
COCO = {
    "images": [{"id": 1, "file_name": "0.jpg", "width": SIZE[0], "height": SIZE[1]}],
    "categories": [{"id": 1, "name": "tree"}, {"id": 2, "name": "car"}],
    "annotations": [
        {"image_id": 1, "category_id": 1, "area": 5, "segmentation": [[1, 1, 20.5, 3, 9, 20]]},
        {
            "image_id": 1,
            "category_id": 2,
            "area": 9.5,
            "segmentation": {"size": [SIZE[1], SIZE[0]], "counts": [5, SIZE[0] * SIZE[1] - 5]},
        },
        {
            "image_id": 1,
            "category_id": 2,
            "segmentation": {"size": [SIZE[1], SIZE[0]], "counts": "5c0n5"},
        },
    ],
}


def places(content, path=()):
    """Yields the paths of all values of JSON."""
    entries = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@st.composite
def changed(draw, content):
    """The text of JSON of which one to three values are replaced, removed or repeated."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(list(places(content)) or [("none",)]))
        parent = functools.reduce(lambda value, key: value[key], path, content)
        if last == "none":
            break
        match draw(st.sampled_from(["replace", "remove", "repeat"])):
            case "replace":
                parent[last] = draw(VALUES)
            case "remove":
                del parent[last]
            case "repeat":
                parent[last] = [parent[last]] * draw(st.sampled_from([2, 3, 100]))
    return json.dumps(content).encode()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with one image."""
    root = tmp_path_factory.mktemp("annotated")
    (root / "0.jpg").write_bytes(forged_images.WHOLE["JPEG"])
    return root


def try_json(root, kind, data):
    folder = root / kind
    folder.mkdir(exist_ok=True)
    (folder / "0.json").write_bytes(data)
    (folder / "0.jpg").write_bytes(forged_images.WHOLE["JPEG"])

    def read():
        source = LabelMe(folder) if kind == "labelme" else Coco(folder / "0.json", folder)
        _, indices = indices_of(source, None)
        for picture in source.pictures():
            mask = source.mask(picture, SIZE, indices)
            assert mask.shape in (SIZE, SIZE[::-1])
            assert set(np.unique(mask).tolist()) <= {*indices.of.values()}

    return attempt(kind, len(data), read, pixels=SIZE[0] * SIZE[1])


@pytest.mark.parametrize(("kind", "content"), [("labelme", LABELME), ("coco", COCO)])
def test_annotations_are_read_or_refused(root, kind, content):
    sound = json.dumps(content).encode()

    @a_share(2)
    @given(changed(content) | damaged(sound) | st.binary(max_size=60))
    def load(data):
        try_json(root, kind, data)

    load()


def test_sound_annotations_are_read(root):
    assert try_json(root, "labelme", json.dumps(LABELME).encode()) == ""
    content = copy.deepcopy(COCO)
    # The text of these runs isn't of so many pixels.
    content["annotations"].pop()
    assert try_json(root, "coco", json.dumps(content).encode()) == ""


def many(content, key, entry, count):
    content = copy.deepcopy(content)
    content[key] = [entry] * count
    return json.dumps(content).encode()


RECTANGLE = LABELME["shapes"][1] | {"points": [[0, 0], list(SIZE)]}
OUTLINE = COCO["annotations"][0] | {"segmentation": [[0, 0, *SIZE] * 50]}


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("labelme", b"[" * 100_000, "can't be read as an annotation of LabelMe's (RecursionError"),
        ("coco", b"[" * 4_000_000, "would take more than 64 MiB"),
        ("coco", b'{"images":[' + b"[]," * 1_500_000 + b"1]}", "would take more than 64 MiB"),
        ("coco", b'{"images":[' + b"1," * 150_000 + b"1]}", 'it has no list of "images"'),
        ("labelme", many(LABELME, "shapes", RECTANGLE, 20_000), ""),
        ("coco", many(COCO, "annotations", OUTLINE, 2_000), ""),
        ("labelme", many(LABELME, "shapes", {"label": "a", "points": POINTS * 50_000}, 1), ""),
    ],
    ids=map(str, range(7)),
)
def test_long_annotations_cost_little(root, kind, data, message):
    said = try_json(root, kind, data)
    assert message in said if message else said == ""


LINES = st.lists(
    st.tuples(
        st.sampled_from(
            [b"1 2 3", b"0 0 0", b"255 255 256", b"-1 2 3", b"1 2", b"", b"\xd9\xa1 1 1"]
        ),
        st.sampled_from([b" ", b"\t", b"", b",", b":"]),
        st.sampled_from([b"sky", b"an old road", b"", b"\x1b", b"\xff", b"a" * 2000, b"1,2,3"]),
        st.sampled_from([b"\n", b"\r\n", b"\r", b""]),
    ),
    max_size=6,
).map(lambda lines: b"".join(b"".join(line) for line in lines))
STARTS = st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\0"])


@a_share(6)
@given(st.builds(lambda start, lines: start + lines, STARTS, LINES) | st.binary(max_size=100))
def test_tables_of_colours_are_read_or_refused(root, data):
    for name, reader in (("colors.txt", read_colors), ("labelmap.txt", read_labelmap)):
        (root / name).write_bytes(data)
        attempt("colours", len(data), functools.partial(reader, root / name))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"".join(b"%d %d %d c\n" % (n, n, n) for n in range(100_000)), "line 257: expected three"),
        ((b"1 2 3 " + b"c" * 990 + b"\n") * 4000, ""),
        (b"1 2 3 c" * 100_000, "its line 1 has more than 524288 bytes"),
        (b"\n" * 4_000_000, "would take more than 64 MiB"),
    ],
    ids=map(str, range(4)),
)
def test_long_tables_of_colours_cost_little(tmp_path, data, message):
    (tmp_path / "colors.txt").write_bytes(data)
    said = attempt("colours", len(data), functools.partial(read_colors, tmp_path / "colors.txt"))
    assert message in said if message else said == ""


PAIRS = st.lists(
    st.tuples(
        st.sampled_from([b"0.jpg", b"none.jpg", b"../../x", b"", b"a\0b", b"\xff"]),
        st.sampled_from([b" ", b"\t", b"  ", b"", b"\t\t"]),
        st.sampled_from([b"0.png", b"", b"/etc/passwd", b"a b", b"\0"]),
        st.sampled_from([b"\n", b"\r\n", b""]),
    ),
    max_size=6,
).map(lambda lines: b"".join(b"".join(line) for line in lines))


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """A folder with the image that some lines name."""
    folder = tmp_path_factory.mktemp("listed")
    (folder / "0.jpg").write_bytes(forged_images.WHOLE["JPEG"])
    return folder


@a_share(4)
@given(st.builds(lambda start, lines: start + lines, STARTS, PAIRS) | st.binary(max_size=100))
def test_lists_of_pairs_are_read_or_refused(listed, data):
    (listed / "train_list.txt").write_bytes(data)

    def read():
        found = masks_list(Split("train", 5), data_path=str(listed))
        assert len(found.paths) == len(found.columns["mask"].paths) > 0

    attempt("list", len(data), read)


def test_a_long_list_of_pairs_costs_little(listed):
    for line, message in (
        (b"0.jpg 0.png\n" * 200_000, ""),
        (b"0.jpg a b\n", "line 1: expected the path of an image"),
        (b"%d/a b\n", "at least 10000 of 200000 files are missing"),
        (b"a b\n" * 1_000_000, "would take more than 64 MiB"),
    ):
        data = b"".join(line % n for n in range(200_000)) if b"%d" in line else line
        (listed / "train_list.txt").write_bytes(data)
        read = functools.partial(masks_list, Split("train", 5), data_path=str(listed))
        said = attempt("list", len(data), read, lines=data.count(b"\n"))
        assert message in said if message else said == ""
