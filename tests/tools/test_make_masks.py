"""tools/make_masks.py: annotations of LabelMe, COCO, Pascal VOC and CVAT become images and masks."""

import json
import os
import shutil
import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw

from config import get_config
from datasets import get_datasets
from errors import InputError, RunError
from loading.mask_tables import class_colors
from loading.transforms.orientation import TAG, TURNS, orientation_of
from tools import make_masks
from tools.annotations.coco import runs_to_pixels

coco_masks = pytest.importorskip("pycocotools.mask")
SIZE = (60, 40)


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Returns a function that runs the tool in a folder, and returns the line that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*words, output="out"):
        words = ["make_masks.py", *map(str, words), f"-output={output}"]
        monkeypatch.setattr(sys, "argv", words)
        make_masks.main()
        return capsys.readouterr().out.strip()

    return run


def write_image(file, number=0, size=SIZE, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), np.uint8)
    Image.fromarray(pixels).save(file, **options)


def read(path):
    return np.asarray(Image.open(path))


def datasets_of(folder, *more):
    words = ["TASK", "segmentation", "DATA.DATASET", "masks", "DATA.DATA_PATH", str(folder)]
    words += ["MODEL.NUM_CLASSES", "auto", "DATA.IMAGE_SIZE", "32", "HEAD.NAME", "linear"]
    words += ["DATA.CROP_MODE", "own", "DATA.NUM_WORKERS", "0"]
    return get_datasets(get_config(None, [*words, *more]))


# --------------------------------------------------------------------- LabelMe

SHAPES = [
    {"label": "tree", "shape_type": "polygon", "points": [[5, 5], [30.5, 8], [20, 30]]},
    {"label": "car", "shape_type": "rectangle", "points": [[50, 30], [25, 10]]},
    {"label": "sun", "shape_type": "circle", "points": [[45, 12], [45, 20]]},
]


def write_labelme(file, shapes, image=None, size=SIZE):
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"version": "5.4.1", "flags": {}, "shapes": shapes, "imageData": None}
    content |= {"imagePath": image or f"{file.stem}.jpg"}
    content |= {"imageWidth": size[0], "imageHeight": size[1]}
    file.write_text(json.dumps(content))


def test_labelme_shapes_are_drawn_over_each_other(convert, tmp_path):
    write_image(tmp_path / "in/a.jpg")
    write_labelme(tmp_path / "in/a.json", SHAPES)
    write_image(tmp_path / "in/pictures/b.PNG", 1, (40, 30))
    write_labelme(tmp_path / "in/deep/b.json", SHAPES[:1], "..\\pictures\\b.PNG", (40, 30))
    line = convert("-format=labelme", "-data_path=in", "-val=0")
    assert line.startswith("out: 2 training and 0 validation images of 4 classes, ")
    assert (tmp_path / "out/classes.txt").read_text() == "background\ncar\nsun\ntree\n"
    # Images are copied as they are, and none is a link.
    for name, copied in (("a.jpg", "a.jpg"), ("pictures/b.PNG", "deep/b.png")):
        copy = tmp_path / "out/images/train" / copied
        assert copy.read_bytes() == (tmp_path / "in" / name).read_bytes()
        assert os.stat(copy).st_nlink == 1
    expected = Image.new("L", SIZE)
    draw = ImageDraw.Draw(expected)
    draw.polygon([(5, 5), (30.5, 8), (20, 30)], fill=3, outline=3)
    draw.rectangle((25, 10, 50, 30), fill=1, outline=1)
    draw.ellipse((37, 4, 53, 20), fill=2, outline=2)
    mask = read(tmp_path / "out/masks/train/a.png")
    np.testing.assert_array_equal(mask, expected)
    assert np.bincount(mask.ravel(), minlength=4).min() > 50
    assert mask[20, 40] == 1
    assert mask[12, 45] == 2
    assert mask[9, 10] == 3
    assert read(tmp_path / "out/masks/train/deep/b.png").shape == (30, 40)


def test_a_file_names_the_classes_and_their_order(convert, tmp_path):
    write_image(tmp_path / "in/a.jpg")
    write_labelme(tmp_path / "in/a.json", SHAPES)
    labels = tmp_path / "labels.txt"
    labels.write_text("__ignore__\n_background_\ntree\nsun\ncar\nboat\n")
    words = ["-format=labelme", "-data_path=in", "-val=0", "-classes=labels.txt"]
    line = convert(*words)
    assert "of 5 classes; 1 class has no pixel, such as boat, " in line
    mask = read(tmp_path / "out/masks/train/a.png")
    assert (mask[0, 0], mask[20, 40], mask[12, 45], mask[9, 10]) == (0, 3, 2, 1)
    # Without a background, what isn't drawn on is ignored; so is LabelMe's own label for it.
    labels.write_text("tree\nsun\n")
    write_labelme(tmp_path / "in/a.json", [*SHAPES[:1], SHAPES[1] | {"label": "__ignore__"}])
    line = convert(*words, output="other")
    assert "2 classes; without a class background, pixels without an annotation are ign" in line
    mask = read(tmp_path / "other/masks/train/a.png")
    assert (mask[0, 0], mask[20, 40], mask[9, 10]) == (255, 255, 0)
    write_labelme(tmp_path / "in/a.json", SHAPES)
    message = r"a.json: the label 'car' isn't in -classes; add it, or use __ignore__ instead"
    with pytest.raises(InputError, match=message):
        convert(*words, output="third")
    assert not (tmp_path / "third").exists()
    assert sorted(os.listdir(tmp_path)) == ["in", "labels.txt", "other", "out"]


def test_more_than_255_classes_are_16_bits(convert, tmp_path):
    write_image(tmp_path / "in/a.jpg")
    write_labelme(tmp_path / "in/a.json", [SHAPES[1] | {"label": "l299"}])
    (tmp_path / "labels.txt").write_text("".join(f"l{number:03}\n" for number in range(300)))
    convert("-format=labelme", "-data_path=in", "-val=0", "-classes=labels.txt")
    mask = read(tmp_path / "out/masks/train/a.png")
    assert (mask.dtype, mask[20, 40], mask[0, 0]) == (np.uint16, 299, 65535)
    shutil.copytree(tmp_path / "out/images/train", tmp_path / "out/images/val")
    shutil.copytree(tmp_path / "out/masks/train", tmp_path / "out/masks/val")
    val = datasets_of(tmp_path / "out")[2]
    np.testing.assert_array_equal(val.mask("mask", 0), mask)


def test_validation_images_are_a_function_of_names_and_seed(convert, tmp_path):
    for number in range(10):
        write_image(tmp_path / f"in/{number}.jpg", number)
        write_labelme(tmp_path / f"in/{number}.json", SHAPES)
    words = ["-format=labelme", "-data_path=in", "-val=0.3"]
    assert "7 training and 3 validation images" in convert(*words)
    chosen = sorted(os.listdir(tmp_path / "out/masks/val"))
    convert(*words, output="again")
    assert sorted(os.listdir(tmp_path / "again/masks/val")) == chosen
    convert(*words, "-seed=1", output="other")
    assert sorted(os.listdir(tmp_path / "other/masks/val")) != chosen
    config, train, val = datasets_of(tmp_path / "out")
    assert (config.MODEL.NUM_CLASSES, len(train), len(val)) == (4, 7, 3)
    with pytest.raises(InputError, match="^-output out already exists; choose another, or remove"):
        convert(*words)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            {"shape_type": "point", "points": [[1, 1]]},
            "a shape of the type 'point', expected polygon",
        ),
        ({"points": [[1, 1], [2, 2]]}, "an outline of fewer than 3 points"),
        ({"points": [[1, 1], [2, 2], [3]]}, "an outline whose points aren't pairs of numbers"),
        (
            {"points": [[1, 1], [2, 2], [3, True]]},
            "an outline whose points aren't pairs of numbers",
        ),
        (
            {"points": [[1, 1], [2, 2], [3, 90]]},
            "an outline at 90, outside the image of 60 x 40 p",
        ),
        ({"points": [[1, 1], [2, 2], ["3", 3]]}, "an outline whose points aren't pairs of numbers"),
        (
            {"shape_type": "circle", "points": [[1, 1]] * 3},
            "it has a circle of 3 points, expected 2",
        ),
        ({"label": ""}, "one of its shapes has no label"),
        ({"label": " "}, "its label is ' ', expected a class's name"),
        # Lines of classes.txt, each of which would name another class.
        ({"label": "a\nb"}, r"its label is 'a\\nb', expected a class's name"),
        ({"label": "a\rb"}, r"its label is 'a\\rb', expected a class's name"),
        ({"label": "a\u2028b"}, "its label is 'a.*b', expected a class's name"),
        ({"label": "a\ud800"}, "its label is 'a.*', expected a class's name"),
        ({"label": "a" * 1001}, "its label is 'a*.*', expected a class's name"),
    ],
)
def test_a_wrong_shape_is_named(convert, tmp_path, shape, message):
    write_image(tmp_path / "in/a.jpg")
    write_labelme(tmp_path / "in/a.json", [{"label": "tree", "shape_type": "polygon"} | shape])
    with pytest.raises(InputError, match=f"^in/a.json: .*{message}"):
        convert("-format=labelme", "-data_path=in", "-val=0")
    assert not (tmp_path / "out").exists()


def test_what_else_is_wrong_with_labelme_is_named(convert, tmp_path):
    words = ["-format=labelme", "-data_path=in", "-val=0"]
    with pytest.raises(
        InputError, match="-data_path is in, expected the folder of the annotations"
    ):
        convert(*words)
    write_image(tmp_path / "in/a.jpg")
    with pytest.raises(
        InputError, match="in: no JSON file of LabelMe's in it or below it; it contains"
    ):
        convert(*words)
    (tmp_path / "in/a.json").write_text("[]")
    with pytest.raises(InputError, match='a.json: it has no list of "shapes"; LabelMe writes such'):
        convert(*words)
    (tmp_path / "in/a.json").write_text("{")
    with pytest.raises(InputError, match="a.json: can't be read as an annotation of LabelMe's"):
        convert(*words)
    write_labelme(tmp_path / "in/a.json", SHAPES, size=(61, 40))
    with pytest.raises(
        InputError, match="it is for an image of 61 x 40 pixels, but the image has 60 x 40"
    ):
        convert(*words)
    os.rename(tmp_path / "in/a.jpg", tmp_path / "in/b.jpg")
    with pytest.raises(
        InputError, match="a.json: its image 'a.jpg' doesn't exist; put it next to the"
    ):
        convert(*words)
    os.rename(tmp_path / "in/b.jpg", tmp_path / "in/a.jpg")
    write_labelme(tmp_path / "in/a.json", [])
    with pytest.raises(
        InputError, match="the annotations: found 1 different classes in 1, expected"
    ):
        convert(*words)
    (tmp_path / "in/a.jpg").write_bytes(b"no image")
    write_labelme(tmp_path / "in/a.json", SHAPES)
    with pytest.raises(InputError, match="in/a.jpg: its format is unknown"):
        convert(*words)
    assert sorted(os.listdir(tmp_path)) == ["in"]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [SIZE, (50, 50)])
def test_masks_fit_pictures_that_exif_turns(orientation, size, convert, tmp_path):
    # LabelMe shows and annotates a picture as its EXIF turns it.
    corner = [{"label": "tree", "shape_type": "rectangle", "points": [[0, 0], [15, 9]]}]
    exif = Image.Exif()
    exif[TAG] = orientation
    picture = Image.new("RGB", size, "black")
    picture.paste("white", (0, 0, 16, 10))
    turn = TURNS[orientation]
    stored = turn.back(picture)
    (tmp_path / "in").mkdir()
    stored.save(tmp_path / "in/a.png", exif=exif.tobytes())
    write_labelme(tmp_path / "in/a.json", corner, size=size)
    assert "EXIF" not in convert("-format=labelme", "-data_path=in", "-val=0")
    shutil.copytree(tmp_path / "out/images/train", tmp_path / "out/images/val")
    shutil.copytree(tmp_path / "out/masks/train", tmp_path / "out/masks/val")
    for oriented in (False, True):
        data = datasets_of(tmp_path / "out", "DATA.EXIF_ORIENTATION", str(oriented))[2]
        shown = np.asarray(data.image(0))[..., 0] > 0
        mask = np.asarray(data.mask("mask", 0))
        np.testing.assert_array_equal(mask, shown.astype(np.uint8))


@pytest.mark.parametrize(
    ("orientation", "annotated", "stored", "is_clear"),
    [
        (6, SIZE, SIZE, True),
        (6, SIZE[::-1], SIZE, True),
        # Nothing tells a picture that stands on its head from one that doesn't.
        (3, SIZE, SIZE, False),
        (6, (50, 50), (50, 50), False),
    ],
)
def test_what_exif_leaves_open_is_said(orientation, annotated, stored, is_clear, convert, tmp_path):
    exif = Image.Exif()
    exif[TAG] = orientation
    write_image(tmp_path / "in/a.jpg", size=stored, exif=exif)
    image = {"id": 1, "file_name": "a.jpg", "width": annotated[0], "height": annotated[1]}
    outline = {"id": 1, "image_id": 1, "category_id": 1, "segmentation": [[0, 0, 9, 0, 9, 9]]}
    content = {"images": [image], "annotations": [outline]}
    content |= {"categories": [{"id": 1, "name": "tree"}]}
    (tmp_path / "in/a.json").write_text(json.dumps(content))
    said = convert("-format=coco", "-data_path=in/a.json", "-val=0")
    assert ("1 image has an EXIF rotation" in said) != is_clear
    mask = tmp_path / "out/masks/train/a.png"
    assert read(mask).shape == stored[::-1]
    # Without a note of its own, DATA.EXIF_ORIENTATION decides which way it is.
    assert orientation_of(mask.read_bytes()) == (orientation if is_clear else 1)


# ------------------------------------------------------------------------ COCO

OUTLINES = [
    [10.2, 5.1, 33.7, 8.4, 40.9, 30.2, 12.0, 25.5],
    [0.0, 0.0, 15.0, 0.0, 15.0, 12.0, 0.0, 12.0],
    [-4.0, 20.5, 20.0, 18.0, 22.5, 44.0, -2.0, 41.0],
    [50.0, 30.0, 75.5, 28.0, 64.0, 52.0],
    [58.6, 38.6, 59.9, 38.6, 59.9, 39.9],
]


def write_coco(root, annotations, images=2):
    """Writes an annotation file; annotations are (image, category, segmentation, area)."""
    for number in range(images):
        write_image(root / f"pictures/train/{number}.jpg", number)
    content = {
        "images": [
            {"id": 7 + n, "file_name": f"train/{n}.jpg", "width": SIZE[0], "height": SIZE[1]}
            for n in range(images)
        ],
        "categories": [{"id": 9, "name": "tree"}, {"id": 2, "name": "car"}],
        "annotations": [
            {
                "id": n,
                "image_id": 7 + image,
                "category_id": category,
                "segmentation": drawn,
                "area": area,
            }
            for n, (image, category, drawn, area) in enumerate(annotations)
        ],
    }
    (root / "coco.json").write_text(json.dumps(content))
    return content


WORDS = ["-format=coco", "-data_path=coco.json", "-images=pictures", "-val=0"]


@pytest.mark.parametrize("outline", OUTLINES)
def test_outlines_are_pycocotools(convert, tmp_path, outline):
    write_coco(tmp_path, [(0, 9, [outline], 5)])
    line = convert(*WORDS)
    assert "2 training and 0 validation images of 3 classes; " in line
    assert ("; 1 class has no pixel, such as car" in line) == (outline != OUTLINES[4])
    whole = coco_masks.decode(coco_masks.frPyObjects([outline], SIZE[1], SIZE[0]))[:, :, 0]
    np.testing.assert_array_equal(read(tmp_path / "out/masks/train/train/0.png"), 2 * whole)
    assert not read(tmp_path / "out/masks/train/train/1.png").any()
    assert (tmp_path / "out/classes.txt").read_text() == "background\ncar\ntree\n"


def test_smaller_areas_cover_larger_ones(convert, tmp_path):
    boxes = [[0, 0, w, 0, w, w, 0, w] for w in (30, 10, 20)]
    drawn = [(0, 9, [boxes[1]], 100), (0, 2, [boxes[0]], 900), (0, 9, [boxes[2]], 400)]
    write_coco(tmp_path, [*drawn[:2], (0, 2, [[12, 0, 18, 0, 18, 9, 12, 9], boxes[1]], 50)])
    convert(*WORDS)
    mask = read(tmp_path / "out/masks/train/train/0.png")
    assert (mask[5, 5], mask[5, 15], mask[25, 25], mask[35, 35]) == (1, 1, 1, 0)
    write_coco(tmp_path, drawn)
    convert(*WORDS, output="other")
    mask = read(tmp_path / "other/masks/train/train/0.png")
    assert (mask[5, 5], mask[15, 15], mask[25, 25]) == (2, 2, 1)


@pytest.mark.parametrize("seed", range(6))
def test_runs_are_pycocotools(seed):
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 90, 2).tolist()
    smooth = rng.random((height, width)).cumsum(0).cumsum(1) % 7 > rng.uniform(0, 7)
    for pixels in (smooth, smooth & False, smooth | True, rng.random((height, width)) > 0.5):
        encoded = coco_masks.encode(np.asfortranarray(pixels.astype(np.uint8)))
        found = runs_to_pixels(
            {"size": [height, width], "counts": encoded["counts"].decode()}, (height, width)
        )
        np.testing.assert_array_equal(found, pixels)
        # As a list of lengths, which begins outside.
        flat = np.concatenate([[False], pixels.T.ravel()])
        places = np.flatnonzero(np.diff(flat))
        lengths = np.diff(np.concatenate([[0], places, [height * width]])).tolist()
        found = runs_to_pixels({"size": [height, width], "counts": lengths}, (height, width))
        np.testing.assert_array_equal(found, pixels)


def test_runs_are_painted(convert, tmp_path):
    pixels = np.zeros(SIZE[::-1], np.uint8)
    pixels[3:20, 40:55] = 1
    encoded = coco_masks.encode(np.asfortranarray(pixels))
    runs = {"size": [40, 60], "counts": encoded["counts"].decode()}
    write_coco(tmp_path, [(1, 2, runs, 255)])
    convert(*WORDS)
    np.testing.assert_array_equal(read(tmp_path / "out/masks/train/train/1.png"), pixels)


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ([], "it has no segmentation, and boxes alone aren't enough for masks"),
        (None, "it has no segmentation"),
        ([[1, 2, 3, 4, 5]], "an outline that isn't a list of pairs"),
        ([[1, 2, 3, 4]], "an outline of fewer than 3 points"),
        ([[1, 2, 3, 4, 5, 1e12]], "an outline at 1000000000000.0, outside the image of 60 x 40"),
        ([[0, 0, 60, 40] * 9000], "an outline of more than 500000 pixels"),
        ({"size": [60, 40], "counts": [2400]}, "runs for an image of another size than 60 x 40"),
        ({"size": [40, 60], "counts": [2399]}, "runs of 2399 pixels, expected 2400"),
        ({"size": [40, 60], "counts": [-1, 2401]}, "runs whose counts are neither numbers nor t"),
        ({"size": [40, 60], "counts": [1 << 80]}, "runs whose counts are neither numbers nor t"),
        ({"size": [40, 60], "counts": "\u00ff" * 60}, "runs whose text isn't in COCO's format"),
        ({"size": [40, 60], "counts": "o" * 60}, "runs whose text isn't in COCO's format"),
        ({"size": [40, 60], "counts": "oooooooo0"}, "runs whose text isn't in COCO's format"),
        ({"size": [40, 60], "counts": ""}, "runs of 0 pixels, expected 2400"),
        ({"size": [40, 60], "counts": "1N3"}, "runs of .* pixels, expected 2400"),
        ({"size": [40, 60]}, "runs whose counts are neither"),
    ],
)
def test_a_wrong_segmentation_is_named(convert, tmp_path, segmentation, message):
    write_coco(tmp_path, [(0, 9, segmentation, 5)])
    with pytest.raises(
        InputError,
        match=f"coco.json: an annotation of train/0.jpg: it has {message}|"
        f"coco.json: an annotation of train/0.jpg: {message}",
    ):
        convert(*WORDS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": None}, 'it has no list of "images"'),
        ({"images": []}, "it has no images"),
        ({"categories": [{"id": 9, "name": "a"}] * 2}, "the category 9 occurs twice"),
        ({"categories": [{"id": 9, "name": 9}]}, "a category has no name"),
        (
            {"categories": [{"id": 9, "name": "\n"}]},
            "its category's name is '.*', expected a class's",
        ),
        (
            {"categories": [{"id": 9, "name": "a\nb"}]},
            "its category's name is '.*', expected a class's",
        ),
        ({"categories": [{"id": "9", "name": "a"}]}, 'its "id" is 9, expected a number'),
        ({"categories": [{"id": 1, "name": "a"}]}, "an annotation has the unknown category 9"),
        ({"annotations": [{"category_id": 9, "image_id": 1}]}, "has the unknown image 1"),
        (
            {"images": [{"file_name": "../../x.jpg", "id": 7}]},
            "the path '../../x.jpg' is outside t",
        ),
        (
            {"images": [{"file_name": "/etc/passwd", "id": 7}]},
            "the path '/etc/passwd' is outside t",
        ),
        ({"images": [{"file_name": "a\0", "id": 7}]}, "isn't a file name"),
        (
            {"images": [{"file_name": "a.jpg", "id": 7}] * 2},
            "the image a.jpg, or its id, occurs twice",
        ),
    ],
)
def test_a_wrong_file_of_coco_is_named(convert, tmp_path, change, message):
    content = write_coco(tmp_path, [(0, 9, [OUTLINES[0]], 5)])
    (tmp_path / "coco.json").write_text(json.dumps(content | change))
    with pytest.raises(
        InputError, match=f"coco.json: .*{message}.*; expected a file such as COCO's"
    ):
        convert(*WORDS)


def test_what_coco_needs_is_told(convert, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="-data_path is coco.json, expected COCO's JSON file"):
        convert(*WORDS)
    write_coco(tmp_path, [(0, 9, [OUTLINES[0]], 5)])
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    message = r"COCO's annotations need pycocotools; pip install pycocotools==[\d.]+$"
    with pytest.raises(InputError, match=message):
        convert(*WORDS)


# ------------------------------------------------------------------ VOC, CVAT


def write_voc(root, count=3, mode="P", colours=None):
    drawn = []
    for number in range(count):
        write_image(root / f"JPEGImages/2007_{number}.jpg", number)
        values = np.random.default_rng(number).integers(0, 21, SIZE[::-1]).astype(np.uint8)
        values[0] = 255
        drawn.append(values)
        picture = Image.fromarray(values)
        picture.putpalette(class_colors(256).tobytes())
        if colours is not None:
            picture = Image.fromarray(colours[values % len(colours)])
        file = root / f"SegmentationClass/2007_{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture.save(file)
    return drawn


def write_lists(root, **names):
    folder = root / "ImageSets/Segmentation"
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in names.items():
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))


def test_voc_keeps_its_parts_and_indices(convert, tmp_path):
    drawn = write_voc(tmp_path / "voc")
    write_lists(tmp_path / "voc", train=["2007_0", "2007_2"], val=["2007_1"])
    line = convert("-format=voc", "-data_path=voc")
    assert line.startswith("out: 2 training and 1 validation images of 21 classes, ")
    for number, part in ((0, "train"), (1, "val"), (2, "train")):
        mask = Image.open(tmp_path / f"out/masks/{part}/2007_{number}.png")
        assert mask.mode == "L"
        np.testing.assert_array_equal(mask, drawn[number])
    names = (tmp_path / "out/classes.txt").read_text().split("\n")
    assert (names[:2], names[20]) == (["background", "aeroplane"], "tvmonitor")
    assert len(datasets_of(tmp_path / "out")[1]) == 2
    (tmp_path / "few.txt").write_text("background\na\n")
    message = (
        r"2007_0.png: it contains the index .*; expected 0..1 or 255; name all classes in -classes"
    )
    with pytest.raises(InputError, match=message):
        convert("-format=voc", "-data_path=voc", "-classes=few.txt", output="other")


def test_cvats_colours_are_labels(convert, tmp_path):
    colours = np.array([[0, 0, 0], [250, 50, 83], [51, 221, 255]], np.uint8)
    drawn = write_voc(tmp_path / "cvat", 4, colours=colours)
    write_lists(tmp_path / "cvat", default=[f"2007_{number}" for number in range(4)])
    text = (
        "# label:color_rgb:parts:actions\nroad:250,50,83::\nbackground:0,0,0::\nsky:51,221,255::\n"
    )
    (tmp_path / "cvat/labelmap.txt").write_text(text)
    assert "3 training and 1 validation" in convert("-format=cvat", "-data_path=cvat", "-val=0.25")
    assert (tmp_path / "out/classes.txt").read_text() == "background\nroad\nsky\n"
    for part in ("train", "val"):
        for file in (tmp_path / f"out/masks/{part}").iterdir():
            np.testing.assert_array_equal(read(file), drawn[int(file.stem[-1])] % 3)
    (tmp_path / "cvat/labelmap.txt").write_text(text.replace("51,221,255", "51,221,254"))
    with pytest.raises(
        InputError, match="it contains the colour 51 221 255 at .*add it to cvat/labelm"
    ):
        convert("-format=cvat", "-data_path=cvat", output="other")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:1,2::\n", "line 1: 'a:1,2::' has no colour R,G,B"),
        ("a\n", "line 1: 'a' has no colour"),
        ("a:1,2,300::\n", "line 1: 'a:1,2,300::' has no colour"),
        ("a:1,2,3::\nb:1,2,3::\n", "line 2: its label or its colour occurs twice"),
        (":1,2,3::\n", "its line 1 is '', expected a class's name"),
        ("# label\n", "it has no label"),
    ],
)
def test_a_wrong_labelmap_is_named(convert, tmp_path, text, message):
    write_voc(tmp_path / "cvat", 1)
    (tmp_path / "cvat/labelmap.txt").write_text(text)
    with pytest.raises(InputError, match=f"labelmap.txt: {message}.*; each line is label:R,G,B::"):
        convert("-format=cvat", "-data_path=cvat")


def test_what_is_missing_of_voc_is_named(convert, tmp_path):
    words = ["-format=voc", "-data_path=voc"]
    write_voc(tmp_path / "voc")
    with pytest.raises(
        InputError, match="labelmap.txt: there is no such file; CVAT writes it with"
    ):
        convert("-format=cvat", "-data_path=voc")
    write_lists(tmp_path / "voc", train=["2007_0", "2007_9"], val=["2007_1"])
    with pytest.raises(
        InputError, match="2007_9: its image is missing; expected voc/JPEGImages/200"
    ):
        convert(*words)
    write_lists(tmp_path / "voc", train=["2007_0", "../../x"], val=["2007_1"])
    with pytest.raises(InputError, match="train.txt: the path '../../x' is outside the folder"):
        convert(*words)
    write_lists(tmp_path / "voc", train=["2007_0"], val=["2007_1"])
    Image.new("L", (5, 5)).save(tmp_path / "voc/SegmentationClass/2007_0.png")
    message = "2007_0.jpg: it has 60 x 40 pixels, but its annotation has 5 x 5; annotate this image"
    with pytest.raises(InputError, match=message):
        convert(*words)
    shutil.rmtree(tmp_path / "voc/SegmentationClass")
    with pytest.raises(
        InputError, match="SegmentationClass: there is no such folder; voc holds the"
    ):
        convert(*words)
    with pytest.raises(InputError, match="--val is 1.0, expected 0 <= value < 1"):
        convert(*words, "-val=1")
    with pytest.raises(InputError, match="--images has no effect with -format labelme"):
        convert("-format=labelme", "-data_path=voc", "-images=x")
    assert sorted(os.listdir(tmp_path)) == ["voc"]


def test_a_folder_that_cant_be_written_is_named(convert, tmp_path):
    write_image(tmp_path / "in/a.jpg")
    write_labelme(tmp_path / "in/a.json", SHAPES)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="^file/out can't be written"):
        convert("-format=labelme", "-data_path=in", "-val=0", output="file/out")
