"""COCO's and Pascal VOC's annotations as several labels for each image."""

import json

import pytest
from PIL import Image
from support.dataset_files import dataset_config

from datasets import get_datasets
from errors import InputError
from loading.annotations import coco_multilabel, voc_multilabel
from loading.sources import Split
from settings.plain import json_entries

OUTLINE = [[10.5, 3, 4e1, -2.25, 7, 7]]
RUNS = {"counts": [3, 4, 5], "size": [4, 3]}


def coco(images, annotations, categories=((18, "dog"), (1, "person"), (17, "cat"))):
    """Returns COCO's content: names of images by their ids, and (image, category) of objects."""
    return {
        "info": {"year": 2017, "nested": [1, {"a": [2]}]},
        "licenses": [],
        "images": [{"id": i, "file_name": name, "width": 4} for i, name in images.items()],
        "annotations": [
            {
                "segmentation": RUNS if number % 2 else OUTLINE,
                "iscrowd": number % 2,
                "image_id": image,
                "bbox": [1.0, 2, 3, 4],
                "category_id": category,
                "id": number,
            }
            for number, (image, category) in enumerate(annotations)
        ],
        "categories": [{"supercategory": "x", "id": i, "name": name} for i, name in categories],
    }


def write_coco(root, mode, content, year=2017, indent=None):
    (root / "annotations").mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=indent)
    (root / "annotations" / f"instances_{mode}{year}.json").write_text(text)


def write_images(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (4, 4)).save(folder / name)


def sets(files):
    return [files.labels.of(index).tolist() for index in range(len(files.labels))]


IMAGES = {7: "a.jpg", 3: "b.jpg", 5: "c.jpg"}
OBJECTS = [(7, 18), (7, 1), (7, 18), (5, 17)]


@pytest.mark.smoke
@pytest.mark.parametrize("folder", ["train2017", "images/train2017", "images"])
@pytest.mark.parametrize("indent", [None, 1])
def test_coco_gives_each_image_its_categories_in_the_order_of_ids(folder, indent, tmp_path):
    write_coco(tmp_path, "train", coco(IMAGES, OBJECTS), indent=indent)
    write_images(tmp_path / folder, IMAGES.values())
    files = coco_multilabel(Split("train"), data_path=str(tmp_path))
    # The order of the file; an image without objects stays, and a crowd counts.
    assert list(files.paths) == [f"{folder}/{name}" for name in ("a.jpg", "b.jpg", "c.jpg")]
    assert files.classes == ["person", "cat", "dog"]
    assert sets(files) == [[0, 2], [], [1]]


def test_coco_is_trained_on(tmp_path):
    for mode in ("train", "val"):
        write_coco(tmp_path, mode, coco(IMAGES, OBJECTS), year=2014)
        write_images(tmp_path / f"{mode}2014", IMAGES.values())
    config, train, val = get_datasets(
        dataset_config("coco_multilabel", tmp_path, "TASK", "multilabel")
    )
    assert (len(train), len(val), config.MODEL.NUM_CLASSES) == (3, 3, 3)
    assert train.labels[0].tolist() == [1, 0, 1]
    with pytest.raises(InputError, match="instances_val2014.json exists, but DATA.VAL_SPLIT"):
        split = ("TASK", "multilabel", "DATA.VAL_SPLIT", "0.3")
        get_datasets(dataset_config("coco_multilabel", tmp_path, *split))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (coco(IMAGES, [(9, 1)]), "an annotation has the unknown image 9"),
        (coco(IMAGES, [(7, 2)]), "an annotation has the unknown category 2"),
        (coco({1: "a.jpg", 2: "a.jpg"}, [(1, 1)]), "the image a.jpg occurs twice"),
        (coco(IMAGES, [(7, 1)], [(1, "x"), (1, "y")]), "the category 1 occurs twice"),
        (coco(IMAGES, [(7, 1)], [(1, "x"), (2, "x")]), "it has the class 'x' twice"),
        (coco({1: "../a.jpg"}, [(1, 1)]), "the path '../a.jpg' is outside the folder"),
        (coco(IMAGES, []), "it has no annotations"),
        (coco({}, []), "it has no images"),
        ("{}", 'it has no list of "categories"'),
        ('{"categories": [1]}', "a category has no name"),
        ('{"categories": [{"id": 1, "name": "x"}], "images": [1]}', "entries that aren't objects"),
        ('{"categories": [{"id": 1, "name": "x"}], "images": [{', "it isn't JSON"),
        (json.dumps(coco(IMAGES, OBJECTS))[:-1], "it isn't JSON"),
        (
            '{"categories": [{"id": 1, "name": "x"}], "images": ' + "[" * 200_000,
            "it isn't JSON|Recur",
        ),
        ("", "can't be read as COCO's annotations"),
    ],
    ids=lambda each: each[:30] if isinstance(each, str) else "",
)
def test_wrong_annotations_of_coco_are_one_line(content, message, tmp_path):
    write_coco(tmp_path, "train", content)
    write_images(tmp_path / "train2017", IMAGES.values())
    with pytest.raises(InputError, match=message) as caught:
        coco_multilabel(Split("train"), data_path=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_missing_files_of_coco_are_named(tmp_path):
    def read(mode="train"):
        return coco_multilabel(Split(mode), data_path=str(tmp_path))

    with pytest.raises(InputError, match=r"no such file instances_train\*.json, expected one"):
        read()
    write_coco(tmp_path, "train", coco(IMAGES, OBJECTS))
    with pytest.raises(
        InputError, match="the first image of instances_train2017.json, a.jpg, isn't"
    ):
        read()
    write_images(tmp_path / "train2017", ["a.jpg"])
    with pytest.raises(InputError, match="2 of 3 images are missing, the first is .*b.jpg"):
        read()
    write_coco(tmp_path, "val", coco(IMAGES, [(7, 1)], [(1, "cat")]))
    with pytest.raises(InputError, match="its categories aren't those of instances_train2017.json"):
        read("val")
    write_coco(tmp_path, "train", coco(IMAGES, OBJECTS), year=2014)
    with pytest.raises(InputError, match="found 2 files instances_train"):
        read()


def test_entries_of_json_are_read_one_by_one():
    long = "x" * 5000
    content = {"a": 1, "b": [{"c": [1, "]"]}, {"d": long}], "e": {"f": [{}]}, "g": [], "h": [{}]}
    expected = [("b", {"c": [1, "]"]}), ("b", {"d": long}), ("h", {})]
    for indent in (None, 2):
        assert list(json_entries(f"\n {json.dumps(content, indent=indent)} ")) == expected


# ------------------------------------------------------------------- VOC


def voc_object(name, difficult=None):
    marked = "" if difficult is None else f"<difficult>{difficult}</difficult>"
    part = "<part><name>head</name><difficult>1</difficult></part>"
    return f"<object><name>{name}</name>{marked}{part}</object>"


def write_voc(root, mode, images):
    (root / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
    (root / "Annotations").mkdir(exist_ok=True)
    for name, objects in images.items():
        text = f"<annotation><folder>x</folder>{''.join(objects)}</annotation>"
        (root / "Annotations" / f"{name}.xml").write_text(text)
    write_images(root / "JPEGImages", [f"{name}.jpg" for name in images])
    (root / "ImageSets" / "Main" / f"{mode}.txt").write_text("\n".join(images) + "\n")


@pytest.mark.smoke
def test_voc_gives_each_image_its_classes_without_difficult_objects(tmp_path):
    write_voc(
        tmp_path,
        "train",
        {
            "2": [voc_object("dog", 0), voc_object("cat", 1), voc_object("dog", 1)],
            "1": [voc_object(" cat "), voc_object("aeroplane", 0)],
            "3": [],
        },
    )
    write_voc(tmp_path, "val", {"4": [voc_object("tvmonitor")]})
    train = voc_multilabel(Split("train"), data_path=str(tmp_path))
    assert list(train.paths) == [f"JPEGImages/{name}.jpg" for name in (2, 1, 3)]
    assert (len(train.classes), train.classes[0], train.classes[-1]) == (
        20,
        "aeroplane",
        "tvmonitor",
    )
    assert sets(train) == [[11], [0, 7], []]
    _, train, val = get_datasets(dataset_config("voc_multilabel", tmp_path, "TASK", "multilabel"))
    assert (train.labels.outputs, val.labels.of(0).tolist()) == (20, [19])


def test_other_classes_are_those_of_classes_txt(tmp_path):
    write_voc(tmp_path, "train", {"1": [voc_object("nut"), voc_object("bolt")]})
    with pytest.raises(InputError, match="1.xml: 'bolt' isn't one of the 20 classes; list your cl"):
        voc_multilabel(Split("train"), data_path=str(tmp_path))
    (tmp_path / "classes.txt").write_text("nut\nscrew\nbolt\n")
    files = voc_multilabel(Split("train"), data_path=str(tmp_path))
    assert (sets(files), files.classes) == ([[0, 2]], ["nut", "screw", "bolt"])


BOMB = '<!DOCTYPE a [<!ENTITY b "xxxxxxxxxx">]><annotation><object><name>&b;</name></object></annotation>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "it has a document type, which annotations don't need; repair it"),
        ("<annotation><object>", "can't be read as an annotation of VOC's"),
        ("<annotation>" + voc_object("") + "</annotation>", "its object's name is ''"),
        ("<annotation>" + " " * (1 << 22) + "</annotation>", "bytes, at most 4194304 are allowed"),
    ],
    ids=["entity", "cut", "nameless", "large"],
)
def test_a_wrong_annotation_of_voc_is_one_line(text, message, tmp_path):
    write_voc(tmp_path, "train", {"1": []})
    (tmp_path / "Annotations" / "1.xml").write_text(text)
    with pytest.raises(InputError, match=message):
        voc_multilabel(Split("train"), data_path=str(tmp_path))


def test_missing_files_of_voc_are_named(tmp_path):
    def read():
        return voc_multilabel(Split("train"), data_path=str(tmp_path))

    with pytest.raises(
        InputError, match="train.txt: there is no such file; DATASET voc_multilabel"
    ):
        read()
    write_voc(tmp_path, "train", {"1": []})
    with pytest.raises(InputError, match="none of its 1 images has an object"):
        read()
    (tmp_path / "JPEGImages" / "1.jpg").unlink()
    with pytest.raises(InputError, match="1.jpg: there is no such file"):
        read()
    (tmp_path / "Annotations" / "1.xml").unlink()
    with pytest.raises(InputError, match="1.xml: can't be read as an annotation of VOC's"):
        read()
    (tmp_path / "ImageSets" / "Main" / "train.txt").write_text("../../1\n")
    with pytest.raises(InputError, match="is outside the folder"):
        read()
