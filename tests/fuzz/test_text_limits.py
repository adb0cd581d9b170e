"""Lists and tables as large as a stranger makes them, each kind at the lines that cost it most:
read or refused, within SECURITY.md's limits.
"""

import functools

import pytest
from support.hostile_files import attempt

from inference.inputs import paths_of
from loading.class_names import names_beside, read_class_map
from loading.multilabel import multilabel_csv, multilabel_list
from loading.sources import Split, imagenet2012
from loading.splits import groups_of
from loading.unlabelled import images_list
from settings.documents import read_yaml
from training.report.pixels import read_confusion, read_pixel_table
from training.report.run_files import read_predictions

EMOJI = "\U0001f600"
TOO_MUCH = "would take more than 64 MiB and more than three times"
TOO_LONG = "its line 1 has more than 524288 bytes"


def listed(reader, root):
    found = reader(Split("train"), data_path=str(root))
    assert len(found.paths) > 0
    assert found.labels is None or len(found.labels) == len(found.paths)


READERS = {
    "classes.txt": names_beside,
    "map.txt": lambda root: read_class_map(root / "map.txt"),
    "train_list.txt": functools.partial(listed, imagenet2012),
    "plain/train_list.txt": lambda root: listed(images_list, root / "plain"),
    "multi/train_list.txt": lambda root: listed(multilabel_list, root / "multi"),
    "train.csv": functools.partial(listed, multilabel_csv),
    "groups.txt": lambda root: groups_of(["1"], str(root / "groups.txt")),
    "paths.txt": lambda root: paths_of([str(root / "paths.txt")]),
    "predictions.csv": lambda root: read_predictions(root / "predictions.csv"),
    "pixels.csv": lambda root: read_pixel_table(root / "pixels.csv"),
    "confusion.csv": lambda root: read_confusion(root / "confusion.csv"),
    "config.yaml": lambda root: read_yaml(root / "config.yaml"),
}
HEADERS = {
    "train.csv": b"image,c\n",
    "predictions.csv": b"image,label,predicted,probability\n",
    "pixels.csv": b"image,pixel_acc,mIoU,label,predicted,pixels\n",
    "confusion.csv": b"label,c\n",
}
# A file, a line of it (%d: its number), and what is said of 7 MB of such lines, and of 100 MB; "":
# they are read.
KINDS = [
    ("classes.txt", f"%d{EMOJI}{EMOJI}\n", "", "up to 1000000 are read"),
    ("classes.txt", "%d" + 90 * "x" + EMOJI + "\n", "", TOO_MUCH),
    ("classes.txt", "%d" + 400 * "x" + EMOJI + "\n", "", TOO_MUCH),
    ("classes.txt", "x", TOO_LONG, TOO_LONG),
    ("map.txt", f"%d\t{EMOJI}\n", TOO_MUCH, "up to 1000000 are read"),
    ("train_list.txt", "1 0\n", "", TOO_MUCH),
    ("train_list.txt", "%d/1 0\n", "files are missing", TOO_MUCH),
    (
        "train_list.txt",
        "train/n02099601/n02099601_1.JPEG 207\n",
        "files are missing",
        "files are missing",
    ),
    ("train_list.txt", "\n", TOO_MUCH, TOO_MUCH),
    ("train_list.txt", "x", TOO_LONG, TOO_LONG),
    ("plain/train_list.txt", "1\n", TOO_MUCH, TOO_MUCH),
    ("plain/train_list.txt", "%d/1\n", "files are missing", TOO_MUCH),
    ("plain/train_list.txt", "x", TOO_LONG, TOO_LONG),
    ("multi/train_list.txt", "1\t0\n", "", TOO_MUCH),
    ("multi/train_list.txt", "1\t\n", TOO_MUCH, TOO_MUCH),
    ("multi/train_list.txt", "1\t0,1,2,3,4,5,6,7,8,9\n", "", TOO_MUCH),
    ("multi/train_list.txt", "%d/1\t0\n", "files are missing", TOO_MUCH),
    ("multi/train_list.txt", "x", TOO_LONG, TOO_LONG),
    ("train.csv", "1,1\n", "", TOO_MUCH),
    ("train.csv", '"1","1"\n', "", TOO_MUCH),
    ("train.csv", "%d/1,1\n", "files are missing", TOO_MUCH),
    ("groups.txt", "%d\tg\n", TOO_MUCH, TOO_MUCH),
    ("groups.txt", "patients/of a hospital/%d/pictures/1.jpg\tg%d\n", "have no group", TOO_MUCH),
    ("groups.txt", "x", TOO_LONG, TOO_LONG),
    ("paths.txt", "x\n", "", TOO_MUCH),
    ("paths.txt", "train/n02099601/n02099601_%d.JPEG\n", "", ""),
    ("paths.txt", "x\0", "", TOO_MUCH),
    ("paths.txt", "x", TOO_LONG, TOO_LONG),
    ("predictions.csv", "%d,1,1,0.5\n", "", "takes too long"),
    ("pixels.csv", "%d,1,1,0,1,5\n", "", "takes too long"),
    (
        "pixels.csv",
        '"%d",1,1,0,1,' + 400 * "9" + "\n",
        "isn't a number of pixels",
        "isn't a number of",
    ),
    ("confusion.csv", "0,1\n", "expected 1 rows of 2 columns", "expected 1 rows of 2 columns"),
    ("confusion.csv", "1", "has a line of 1048576 bytes", "has a line of 1048576 bytes"),
    ("config.yaml", "K%d: 1\n", "has more than", "has more than"),
]


def write(file, line, size):
    """Writes about ``size`` bytes of a line; returns how many lines that are."""
    many = 10_000
    data = HEADERS.get(file.name, b"")
    count = 0
    with open(file, "wb") as out:
        while out.tell() < size:
            numbers = range(count, count + many)
            block = (
                [line % ((number,) * line.count("%d")) for number in numbers]
                if "%d" in line
                else [line * many]
            )
            out.write(data + "".join(block).encode())
            data = b""
            count = count + many
    return count if line[-1] in "\n\0" else 1


def measure(root, kind, size, message):
    name, line, *_ = kind
    for place in (root, root / "multi", root / "plain"):
        place.mkdir(exist_ok=True)
        (place / "1").touch()
    count = write(root / name, line, size)
    said = attempt(
        f"text: {name}", (root / name).stat().st_size, functools.partial(READERS[name], root), count
    )
    assert message in said if message else said == ""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[2]])
def test_a_list_that_is_too_much_is_refused_at_once(kind, tmp_path):
    measure(tmp_path, kind, 7_000_000, kind[2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind[2]])
def test_a_list_of_some_megabytes_costs_what_is_promised(kind, tmp_path):
    measure(tmp_path, kind, 7_000_000, "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_a_hundred_megabytes_costs_what_is_promised(kind, tmp_path):
    measure(tmp_path, kind, 100_000_000, kind[3])
