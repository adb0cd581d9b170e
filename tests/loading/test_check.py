"""tools/check_dataset.py: what is found in images and labels, held to what was put there."""

import io
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import write_images
from PIL import Image
from scipy.fft import dctn
from sklearn.datasets import load_sample_image
from support import forged_images
from support.dataset_files import write_idx

from config import get_config
from datasets import get_datasets
from errors import InputError, RunError
from loading.check import duplicates
from loading.check.duplicates import count_bits, near_pairs, perceptual_hashes
from loading.check.findings import (
    ReadableImages,
    duplicate_pairs,
    exact_duplicates,
    near_duplicates,
)
from loading.check.images import Source, check_images, image_source
from loading.sources import Split, class_folders
from tools import check_dataset, make_shards

PHOTOGRAPHS = [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]

# ------------------------------------------------------------------ hashes


def small(image):
    return np.asarray(image.resize((64, 64), Image.Resampling.BOX))


@pytest.mark.smoke
def test_the_hash_is_of_the_lowest_frequencies():
    images = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), np.uint8)
    for image, found in zip(images, perceptual_hashes(images), strict=True):
        grey = (image @ [0.299, 0.587, 0.114]).reshape(32, 2, 32, 2).mean((1, 3))
        lowest = dctn(grey, type=2)[:8, :8].ravel()
        assert int(found) == int(
            "".join(str(int(value > np.median(lowest))) for value in lowest), 2
        )


def test_what_is_saved_again_looks_alike_and_another_picture_does_not():
    def again(image, quality, share):
        file = io.BytesIO()
        image.resize([round(share * side) for side in image.size]).save(
            file, "JPEG", quality=quality
        )
        return Image.open(file)

    for image in PHOTOGRAPHS:
        variants = [
            image,
            again(image, 30, 1),
            again(image, 90, 0.4),
            image.point(lambda value: value * 0.9),
        ]
        hashes = perceptual_hashes(np.stack([small(one) for one in variants]))
        assert count_bits(hashes ^ hashes[0]).max() <= duplicates.DISTANCE
    one, other = perceptual_hashes(np.stack([small(image) for image in PHOTOGRAPHS]))
    assert bin(int(one) ^ int(other)).count("1") > 20


@pytest.mark.parametrize("distance", [0, 3, 4])
def test_every_near_pair_is_found_as_by_brute_force(distance):
    rng = np.random.default_rng(distance)
    base = rng.integers(0, 2**63, 60, np.uint64)
    flips = np.array(
        [
            sum(1 << int(bit) for bit in rng.choice(64, rng.integers(7), replace=False))
            for _ in range(600)
        ],
        np.uint64,
    )
    hashes = np.unique(base[rng.integers(60, size=600)] ^ flips)
    met = set()
    assert (
        near_pairs(
            hashes,
            lambda i, j: met.update(map(frozenset, zip(i.tolist(), j.tolist(), strict=True))),
            distance,
        )
        == 0
    )
    apart = [[bin(int(a) ^ int(b)).count("1") for b in hashes] for a in hashes]
    assert count_bits(hashes[:1] ^ hashes).tolist() == apart[0]
    count = len(hashes)
    assert met == {
        frozenset((i, j)) for i in range(count) for j in range(i) if apart[i][j] <= distance
    }
    assert met or not distance


def test_the_search_is_bounded_and_tells_what_it_left_out(monkeypatch):
    monkeypatch.setattr(duplicates, "_MOST", 5)
    hashes = np.arange(100, dtype=np.uint64) << np.uint64(50)  # the other parts are all one value
    compared = []
    monkeypatch.setattr(
        duplicates,
        "count_bits",
        lambda values: compared.append(len(values)) or np.full(len(values), 64),
    )
    assert near_pairs(hashes, lambda *_: None) > 0
    assert sum(compared) <= 15 * 5 * 100


def test_many_hashes_that_are_unlike_are_hardly_compared(monkeypatch):
    hashes = np.random.default_rng(0).integers(0, 2**64, 100_000, np.uint64)
    compared = []
    monkeypatch.setattr(
        duplicates,
        "count_bits",
        lambda values: compared.append(len(values)) or np.full(len(values), 64),
    )
    assert near_pairs(hashes, lambda *_: None) == 0
    # Of n^2 / 2 pairs, 6 of the 15 pairs of parts keep one in 2^22, 8 one in 2^21, 1 one in 2^20.
    expected = 100_000**2 / 2 * (6 / 2**22 + 8 / 2**21 + 1 / 2**20)
    assert 0.9 * expected < sum(compared) < 1.1 * expected


def test_who_is_like_whom_by_hand():
    """Training: files 1 and 2, that look alike; 4, which is blank; 6. Validation: 1 again, 3 like
    2, 5 like none, 6.
    """
    parts = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    files = np.array([1, 2, 4, 6, 1, 3, 5, 6], np.uint64)
    looks = np.array([0, 1, 1, 2**40 - 1, 0, 3, 2**64 - 1, 2**40 - 1], np.uint64)
    images = ReadableImages(
        ["train", "val"],
        parts,
        np.arange(8),
        np.array([0, 0, 1, 2, 0, 1, 1, 1]),
        files,
        looks,
        files == 4,
    )
    same = exact_duplicates(images)
    like, missed = near_duplicates(images)
    assert missed == 0
    assert [np.flatnonzero(found).tolist() for found in same] == [[], [4, 7], [3, 7]]
    # Image 4 is told as a copy already. Image 5 has the label 1, what it is like has 0.
    assert [np.flatnonzero(found).tolist() for found in like] == [[0, 1, 4, 5], [5], [0, 1, 4, 5]]
    assert duplicate_pairs(images, like) == [(5, 1), (0, 5), (4, 5)]


# ------------------------------------------------------------------- images


@pytest.fixture
def spoilt(tmp_path):
    """A folder of two classes with everything that a check tells."""
    write_images(tmp_path / "train", {"cat": 5, "dog": 4}, size=40)
    write_images(tmp_path / "val", {"cat": 2, "dog": 2}, size=40, seed=1)
    train = tmp_path / "train"
    val = tmp_path / "val"
    shutil.copy(train / "cat/0.png", val / "cat/copy.png")  # leaked
    shutil.copy(train / "cat/1.png", train / "dog/copy.png")  # under two labels
    PHOTOGRAPHS[0].resize((320, 200)).save(train / "dog/photo.jpg", quality=95)
    PHOTOGRAPHS[0].resize((160, 100)).save(val / "dog/photo.jpg", quality=60)  # looks like it
    exif = Image.Exif()
    exif[274] = 6
    PHOTOGRAPHS[1].resize((100, 80)).convert("L").save(train / "cat/turned.jpg", exif=exif)
    Image.new("RGB", (50, 50), "white").save(train / "cat/white.png")
    whole = (train / "dog/photo.jpg").read_bytes()
    (train / "cat/cut.jpg").write_bytes(whole[: len(whole) // 2])
    (train / "cat/page.jpg").write_text("<html>404</html>")
    Image.new("RGB", (1, 2000)).save(val / "cat/narrow.png")
    (val / "dog/large.png").write_bytes(
        forged_images.png(65_500, 65_500, pixels=forged_images.black(1, 99))
    )
    place = whole.index(b"\xff\xda") + 400
    (train / "dog/flawed.jpg").write_bytes(whole[:place] + b"\xff\x00\xff\xd5" + whole[place + 4 :])
    return tmp_path


def result_of(path, *options, dataset="folder"):
    where = ["DATA.DATA_PATH", str(path)] if dataset != "digits" else []
    return check_dataset.check_images(
        get_config(None, ["DATA.DATASET", dataset, *where, *options]), 1
    )


def told(result):
    found = [
        (re.fullmatch(r"(.*): (\d+)(;.*)?", one.text), one.is_error) for one in result.findings
    ]
    return {text[1] + (text[3] or ""): (int(text[2]), stops) for text, stops in found}


def test_everything_that_was_put_in_is_found(spoilt):
    result = result_of(spoilt, "DATA.MAX_PIXELS", "100000000", "DATA.IMAGE_SIZE", "224")
    found = told(result)
    broken = {name for one in result.findings if "read" in one.text for name in one.examples}
    assert not result.usable
    assert result.verdict == "not usable: 3 of the findings stop a run"
    assert found.pop("training images that can't be read") == (2, True)
    assert found.pop("validation images that can't be read") == (1, True)
    assert {re.search(r"(\w+\.\w+): ", line)[1] for line in broken} == {
        "cut.jpg",
        "page.jpg",
        "large.png",
    }
    assert any("DATA.MAX_PIXELS is 100000000" in line for line in broken)
    assert any("its format is unknown" in line for line in broken)
    assert found.pop("training images that are damaged, but decoded") == (1, False)
    turned = "images with an EXIF rotation; with DATA.EXIF_ORIENTATION False they are read as they are stored"
    assert found.pop(turned) == (1, False)
    assert found.pop("validation images too narrow to be resized") == (1, True)
    assert found.pop("images of one colour") == (2, False)
    assert found.pop("validation images that are the same file as a training image") == (1, False)
    assert found.pop("validation images that look like a training image") == (1, False)
    assert found.pop("images that are the same file as one that has another label") == (2, False)
    assert found.pop("training images that are the same file as another training image") == (
        2,
        False,
    )
    # The flawed photograph, if not much of it is lost.
    found.pop("training images that look like another training image", None)
    assert found == {}
    train = result.parts["train"]
    assert (len(train.records), int(train.records["readable"].sum()), len(train.messages)) == (
        16,
        14,
        3,
    )
    read = map(train.source.name, np.flatnonzero(train.records["readable"]))
    copies = np.stack([small(Image.open(name).convert("RGB")) for name in read])
    # the flawed one's decoders differ below the flaw
    assert np.abs(train.mean - copies.mean(0)).max() < 25
    screen = check_dataset.screen(result)
    assert len(screen.splitlines()) < 40
    assert re.search(
        r"\n  images +16 +8\n  classes +2 +2\n  images per class +7 to 9 +4 to 4\n", screen
    )
    assert re.search(r"\n  formats +.*JPEG.* +PNG.*\n", screen)


def test_the_same_is_found_by_any_number_of_processes_and_in_shards(spoilt, tmp_path, monkeypatch):
    read = class_folders(Split("train"), data_path=str(spoilt))
    one, two = (
        check_images(image_source(read, 10**8), 10**8, False, workers) for workers in (1, 2)
    )
    assert (one.records == two.records).all()
    assert (one.mean == two.mean).all()
    assert one.messages == two.messages
    for name in ("cut.jpg", "page.jpg"):
        (spoilt / "train/cat" / name).unlink()
    monkeypatch.setattr(
        sys, "argv", ["x", "-dataset=folder", f"-data_path={spoilt}", f"-output={tmp_path / 'out'}"]
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv, "-modes=train", "--workers=1"])
    make_shards.main()
    packed = result_of(tmp_path / "out", dataset="shards")
    again = result_of(spoilt)
    assert (packed.parts["train"].records == again.parts["train"].records).all()
    assert any("no val-*.tar" in one.text and one.is_error for one in packed.findings)


def test_a_process_that_is_killed_is_told():
    source = Source(str, lambda _: os._exit(9), np.zeros(3, int), [])
    with pytest.raises(RunError, match="a process that decodes was killed; out of memory"):
        check_images(source, 10**8, False, 1)


def test_labels_and_lists_are_checked_without_giving_up(tmp_path):
    write_images(tmp_path, {"a": 4, "b": 4})
    (tmp_path / "train_list.txt").write_text(
        "a/0.png 0\nnonsense\na/1.png -1\nb/0.png 1\na/9.png 0\n"
    )
    (tmp_path / "val_list.txt").write_text("a/2.png 0\nb/1.png 2\n")
    result = result_of(tmp_path, dataset="imagenet2012")
    texts = [(one.text, one.is_error) for one in result.findings]
    assert ("training images that can't be read: 1", True) in texts
    assert ("classes with validation images only: 1", True) in texts
    assert ("classes without a validation image: 1", False) in texts
    [problem] = [one for one in result.findings if "line 2" in one.text]
    assert (
        "expected a path, then a label, which is a whole number; found 'nonsense' (and 1 more)"
        in problem.text
    )
    assert "line 3: label -1 is outside" in problem.examples[0]


def test_labels_that_no_class_has_are_refused(tmp_path):
    for part, labels in (("train", [0, 3]), ("t10k", [1, 12])):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", np.zeros((2, 28, 28), np.uint8), False)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.array(labels, np.uint8), False)
    with pytest.raises(InputError, match=r"the val labels are 1\.\.12, expected 0\.\.9"):
        result_of(tmp_path, dataset="mnist")


def test_classes_of_folders_are_checked_without_giving_up(tmp_path):
    write_images(tmp_path / "train", {"a": 3})
    write_images(tmp_path / "val", {"a": 1, "x": 1}, seed=2)
    (tmp_path / "train/empty").mkdir()
    texts = [one.text for one in result_of(tmp_path).findings if one.is_error]
    assert any(text.endswith("val: classes that the training images lack: 'x'") for text in texts)
    assert any("train/empty: no image files found (1 such class)" in text for text in texts)
    with pytest.raises(
        InputError, match="nowhere, but there is no such folder; .* holds the folders train, val"
    ):
        result_of(tmp_path / "nowhere")


def test_a_folder_of_classes_alone_says_how_to_split_it(tmp_path):
    write_images(tmp_path, {"a": 3, "b": 3})
    [one] = [one for one in result_of(tmp_path).findings if one.is_error]
    assert re.search("val: no class folders.*DATA.VAL_SPLIT splits the images", one.text)
    assert result_of(tmp_path, "DATA.VAL_SPLIT", "0.3").usable


def test_images_in_memory_are_checked():
    result = result_of("", dataset="digits")
    assert [len(part.records) for part in result.parts.values()] == [1433, 364]
    assert result.usable
    with pytest.raises(InputError, match="synthetic: its images are random"):
        check_dataset.check_images(get_config(None, ["DATA.DATASET", "synthetic"]), 1)


# ------------------------------------------------------------------ command


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["check_dataset.py", "--workers=1", *map(str, words)])
    try:
        check_dataset.main()
    except SystemExit as end:
        return end.code
    return 0


def test_the_lists_of_a_split_are_the_split_of_a_training(tmp_path, monkeypatch, capsys):
    write_images(tmp_path / "in" / "train", {"a": 8, "b c": 12})
    where = ("-dataset=folder", f"-data_path={tmp_path / 'in'}")
    assert run(monkeypatch, *where, "--split=0.25", "--seed=3", f"-output={tmp_path / 'out'}") == 0
    assert (
        f"train with -dataset=imagenet2012 -data_path={tmp_path / 'out'}" in capsys.readouterr().out
    )
    data = [
        "DATA.DATA_PATH",
        str(tmp_path / "in"),
        "DATA.VAL_SPLIT",
        "0.25",
        "DATA.SPLIT_SEED",
        "3",
    ]
    size = ["DATA.IMAGE_SIZE", "8", "MODEL.NUM_CLASSES", "auto"]
    expected = get_datasets(get_config(None, ["DATA.DATASET", "folder", *data, *size]))[1:]
    listed_config = get_config(
        None, ["DATA.DATASET", "imagenet2012", "DATA.DATA_PATH", str(tmp_path / "out"), *size]
    )
    listed = get_datasets(listed_config)[1:]
    for ours, theirs in zip(listed, expected, strict=True):
        names = [
            [str(p) for p in map(ours_or.path, range(len(ours_or)))] for ours_or in (ours, theirs)
        ]
        assert [n.replace("out/../", "") for n in names[0]] == names[1]
        assert (ours.labels == theirs.labels).all()
        assert ours.classes == theirs.classes == ["a", "b c"]
    (tmp_path / "out" / "classes.txt").write_text("a\n")
    with pytest.raises(InputError, match=r"train_list.txt, line \d+: label 1 is outside 0..0"):
        get_datasets(listed_config)
    with pytest.raises(InputError, match=r"train_list.txt already exists; choose another -output"):
        run(monkeypatch, *where, "--split=0.25", f"-output={tmp_path / 'out'}")


def test_data_alone_is_split_as_in_a_training(tmp_path, monkeypatch, capsys):
    write_images(tmp_path, {"a": 10, "b": 10}, size=40)
    data = f"-data_path={tmp_path}"
    assert run(monkeypatch, data) == 0
    screen = capsys.readouterr().out
    assert "validation: 20% of the images, because the data has no validation images" in screen
    assert re.search(r"\n  images +16 +4\n", screen)
    assert "\nusable, " in screen
    # A share that is named counts, and a named format is read as it is.
    run(monkeypatch, data, "-o", "DATA.VAL_SPLIT", "0.4")
    assert re.search(r"\n  images +12 +8\n", capsys.readouterr().out)
    assert run(monkeypatch, data, "-dataset=folder") == 1
    assert "without a val/, DATA.VAL_SPLIT splits the images" in capsys.readouterr().out
    # A card describes the data as it is stored.
    run(monkeypatch, data, f"--card={tmp_path / 'README.md'}")
    assert "validation: 20%" not in capsys.readouterr().out


def test_a_split_whose_lists_can_be_used_ends_well(tmp_path, monkeypatch, capsys):
    write_images(tmp_path / "in", {"a": 8, "b": 8, "c": 4}, size=40)
    where = ("-dataset=folder", f"-data_path={tmp_path / 'in'}", "--split=0.25", "-workers=1")
    (tmp_path / "in/a/broken.png").write_bytes(b"no image")
    (tmp_path / "in/empty").mkdir()
    assert run(monkeypatch, *where, f"-output={tmp_path / 'out'}") == 0
    screen = capsys.readouterr().out
    assert re.search(
        "remark: (training|validation) images that can't be read: 1, such as .*broken.png", screen
    )
    assert "remark: " + f"{tmp_path}/in/empty: no image files found (1 such class)" in screen
    assert "remark: classes without an image: 1, such as empty" in screen
    assert "\nusable, " in screen
    size = ["DATA.IMAGE_SIZE", "8", "MODEL.NUM_CLASSES", "auto"]
    listed = get_config(
        None, ["DATA.DATASET", "imagenet2012", "DATA.DATA_PATH", str(tmp_path / "out"), *size]
    )
    assert sum(len(part) for part in get_datasets(listed)[1:]) == 20
    # Without lists, a run with these data stops.
    assert run(monkeypatch, "-dataset=folder", f"-data_path={tmp_path / 'in'}", "-workers=1") == 1
    for name in "0123":
        (tmp_path / f"in/c/{name}.png").write_bytes(b"no image")
    assert run(monkeypatch, *where, f"-output={tmp_path / 'fewer'}") == 0
    assert "classes without an image: 2, such as c" in capsys.readouterr().out


def test_a_split_whose_lists_stop_a_run_says_so(tmp_path, monkeypatch, capsys):
    write_images(tmp_path / "in", {"a": 4, "b": 4}, size=40)
    where = ("-dataset=folder", f"-data_path={tmp_path / 'in'}", "--split=0.5", "-workers=1")
    assert run(monkeypatch, *where, f"-output={tmp_path / 'whole'}") == 0
    training = (tmp_path / "whole/train_list.txt").read_text().split()[::2]
    for path in training:
        if "/b/" in path:
            (tmp_path / "whole" / path).write_bytes(b"no image")
    capsys.readouterr()
    assert run(monkeypatch, *where, f"-output={tmp_path / 'val'}") == 1
    assert "error: classes with validation images only: 1, such as b" in capsys.readouterr().out
    for path in training:
        (tmp_path / "whole" / path).write_bytes(b"no image")
    assert run(monkeypatch, *where, f"-output={tmp_path / 'none'}") == 1
    assert "error: training images that can't be read: 4" in capsys.readouterr().out


def test_images_of_several_labels_are_checked_and_split(tmp_path, monkeypatch, capsys):
    root = tmp_path / "in"
    rng = np.random.default_rng(0)
    root.mkdir()
    for number in range(12):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(root / f"{number}.png")
    shutil.copy(root / "1.png", root / "12.png")  # of other labels
    rows = [f"{n}.png,{n % 2},{n % 3 == 0:d}" for n in range(13)]
    (root / "train.csv").write_text("\n".join(["image,odd,third", *rows]))
    words = [
        "-dataset=multilabel_csv",
        f"-data_path={root}",
        "-o",
        "TASK",
        "multilabel",
        "--split=0.25",
    ]
    assert (
        run(
            monkeypatch,
            *words,
            f"-output={tmp_path / 'out'}",
            f"--report={tmp_path / 'check.html'}",
        )
        == 0
    )
    screen = capsys.readouterr().out
    assert re.search(
        "images that are the same file as one that has another label: 2, such as", screen
    )
    assert re.search("images per class +4 to 4 +1 to 2", screen), screen
    assert f"train with -dataset=multilabel_list -data_path={tmp_path / 'out'}" in screen
    assert "<th>odd</th>" in (tmp_path / "check.html").read_text()
    size = ["TASK", "multilabel", "DATA.IMAGE_SIZE", "8", "MODEL.NUM_CLASSES", "auto"]
    own = ["DATA.VAL_SPLIT", "0.25", "DATA.DATA_PATH", str(root)]
    listed = ["DATA.DATA_PATH", str(tmp_path / "out")]
    expected = get_datasets(get_config(None, ["DATA.DATASET", "multilabel_csv", *own, *size]))[1:]
    found = get_datasets(get_config(None, ["DATA.DATASET", "multilabel_list", *listed, *size]))[1:]
    for ours, theirs in zip(found, expected, strict=True):
        assert [p.name for p in map(Path, ours.paths)] == [p.name for p in map(Path, theirs.paths)]
        assert ours.labels.tobytes() == theirs.labels.tobytes()
        assert ours.classes == theirs.classes == ["odd", "third"]


def test_the_page_stands_alone_and_tells_what_the_screen_tells(
    spoilt, tmp_path, monkeypatch, capsys
):
    (spoilt / "train" / "<b>&").mkdir()
    shutil.copy(spoilt / "train/cat/2.png", spoilt / "train/<b>&/0.png")
    page = tmp_path / "check.html"
    assert run(monkeypatch, "-dataset=folder", f"-data_path={spoilt}", "--report", page) == 1
    text = page.read_text()
    screen = capsys.readouterr().out
    assert not re.search('https?:|<script|<link|url[(]|src="[^d]', text)
    assert "&lt;b&gt;&amp;" in text
    assert "<b>&" not in text
    assert text.count("data:image/png;base64,") == 5
    verdict = "not usable: 3 of the findings stop a run"
    assert verdict in screen
    assert verdict in text
    assert re.search(r"<small>\S+/val/dog/photo\.jpg \| \S+/train/dog/photo\.jpg</small>", text)
    with Image.open(page.with_suffix(".png")) as image:
        assert image.width > 1000


def test_a_folder_of_which_nothing_can_be_read_is_told_as_such(tmp_path, monkeypatch, capsys):
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "0.png").write_text("no image")
    assert (
        run(
            monkeypatch,
            "-dataset=folder",
            f"-data_path={tmp_path / 'in'}",
            f"--report={tmp_path / 'c.html'}",
        )
        == 1
    )
    assert "error: training images that can't be read: 1, such as " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--split=0.2"],
            "--split SHARE and --apply FILE need -output DIR",
        ),
        (["--report=x.pdf"], "expected a file that ends in .html"),
        (["--report=no/x.html"], "its folder doesn't exist"),
        (["--groups=x"], "SPLIT_GROUPS has no effect without DATA.VAL_SPLIT or DATA.FOLDS"),
        (["--split=2", "-output=x"], "DATA.VAL_SPLIT is 2.0, expected 0 < value < 1"),
        (
            ["-dataset=digits", "--split=0.2", "-output=x"],
            "VAL_SPLIT has no effect with DATA.DATASET ",
        ),
    ],
)
def test_a_wrong_command_line_is_told_before_anything_is_read(
    words, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=re.escape(message)):
        run(
            monkeypatch,
            *([] if "digits" in words[0] else ["-dataset=folder", f"-data_path={tmp_path}"]),
            *words,
        )
    assert list(tmp_path.iterdir()) == []
