"""What is written is read back: names of any characters, numbers to the last bit; a table is
aligned.
"""

import io
import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.hostile_files import a_share

from config import get_config
from errors import RunError
from inference import Failure, Prediction, captions
from inference.pictures import Pictures
from inference.prediction_writers import (
    COLUMNS,
    Csv,
    JsonLines,
    Out,
    cells,
    fitting,
    text_file,
    text_writer,
    writing,
)
from loading.files import Paths
from loading.tables import csv_rows

NAMES = st.binary(min_size=1, max_size=40).map(
    lambda name: os.fsdecode(name.replace(b"\0", b"x"))
) | st.text("a,\n\r\"'", min_size=1)
SHARES = st.lists(st.floats(0, 1), max_size=3)


def answer(name, classes=("a",), shares=(0.5,)):
    return Prediction(name, list(range(len(shares))), list(classes)[: len(shares)], list(shares))


def written(kind, answers):
    file = io.BytesIO()
    writer = kind(Out(file, "it"))
    for each in answers:
        writer.write(each)
    return file.getvalue()


@a_share(2)
@given(NAMES, NAMES.filter(str.isprintable), SHARES)
def test_csv_is_read_back(name, kind, shares):
    data = written(Csv, [answer(name, [kind] * 3, shares), Failure(name, "/: why")])
    head, *lines = csv_rows(io.StringIO(data.decode(), newline=""))
    rows = [dict(zip(head, cells, strict=True)) for cells in lines]
    told = name.encode(errors="backslashreplace").decode()
    assert [row["name"] for row in rows] == [told] * (max(1, len(shares)) + 1)
    assert [
        (row["rank"], row["output"], row["class"], row["error"]) for row in rows[: len(shares)]
    ] == [(str(n + 1), str(n), kind, "") for n in range(len(shares))]
    assert [float(row["probability"]) for row in rows[: len(shares)]] == shares
    assert [rows[-1][column] for column in COLUMNS[1:]] == ["", "", "", "", "/: why"]


@a_share(2)
@given(NAMES, SHARES)
def test_json_lines_are_read_back(name, shares):
    data = written(JsonLines, [answer(name, ["é"] * 3, shares), Failure(name, "/: why")])
    first, second = map(
        json.loads,
        data.decode().splitlines() if "\x85" not in name else data.decode().split("\n")[:2],
    )
    assert os.fsencode(first["name"]) == os.fsencode(second["name"]) == os.fsencode(name)
    assert [each["probability"] for each in first["predictions"]] == shares
    assert second["error"] == "/: why"


def test_a_failures_name_isnt_told_twice():
    assert (
        json.loads(written(JsonLines, [Failure("a \n b\x1b.jpg", r"a b\x1b.jpg: it is empty")]))[
            "error"
        ]
        == "it is empty"
    )


def table(answers, names, classes=("cat", "dog"), columns="60"):
    file = io.BytesIO()
    os.environ["COLUMNS"] = columns
    try:
        writer = text_writer("table", Out(file, "it"), names, classes)
    finally:
        del os.environ["COLUMNS"]
    for each in answers:
        writer.write(each)
    return file.getvalue().decode()


def test_a_table_is_aligned_and_cut_to_the_terminal():
    long = f"folder/{'x' * 60}/photo.jpg"
    answers = [
        answer("数.jpg", ("cat", "dog"), (0.9721, 0.0279)),
        answer(long, ("cat",), (1.0,)),
        answer("none", (), ()),
    ]
    assert table([*answers, Failure("b\n", "b: it is empty")], ["数.jpg", long, "none", "b\n"]) == (
        "image                                       probability  class\n"
        "数.jpg                                          97.21 %  cat\n"
        "                                                 2.79 %  dog\n"
        "...xxxxxxxxxxxxxxxxxxxxxxxxxxxxx/photo.jpg     100.00 %  cat\n"
        "none                                                  -  none is above the threshold\n"
        "b\\n                                               error  it is empty\n"
    ).replace("                                       probability", " " * 39 + "probability")


@a_share(2)
@given(st.text(max_size=30), st.integers(4, 20))
def test_what_is_cut_fits(text, room):
    assert cells(fitting(text, room)) <= room or cells(text) <= room
    assert fitting(text, 100) == text


def test_a_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "out.csv"
    temporary = tmp_path / ".out"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), text_file(path, temporary) as file:
        file.write("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    temporary.unlink()
    with text_file(path, temporary) as file:
        file.write("new é\udcff")
    assert path.read_bytes() == b"new \xc3\xa9\\udcff"
    assert list(tmp_path.iterdir()) == [path]
    with (
        pytest.raises(
            RunError, match=r"it can't be written \(No space left on device\); free some space"
        ),
        writing("it"),
    ):
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")


def test_pictures_have_their_captions(tmp_path):
    colours = np.zeros((40, 80, 3), np.uint8) + np.array([200, 30, 60], np.uint8)
    for name in ("a.png", "b.png"):
        Image.fromarray(colours).save(tmp_path / name)
    paths = Paths([str(tmp_path / "a.png"), str(tmp_path / "cut.png"), str(tmp_path / "b.png")])
    config = get_config(None, [])
    answers = [
        answer(paths[0], ["cat", "dog"], [0.9, 0.1]),
        Failure(paths[1], "it is empty"),
        answer(paths[2]),
    ]
    folder = captions.Folder(config, paths, tmp_path / "out", tmp_path / "out", 2)
    sheet = captions.Sheet(config, paths, 2)
    for each in answers:
        folder.write(each)
        sheet.write(each)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "1-a.jpg",
        "2-cut.jpg",
        "3-b.jpg",
    ]
    sheet.save(tmp_path / "temporary", tmp_path / "sheet.png")
    with Image.open(tmp_path / "temporary") as image:
        pixels = np.asarray(image)
    assert pixels.shape == (2 * (224 + 3 * 19 + 8 + 8) + 8, 2 * 232 + 8, 3)
    assert (pixels[8 + 223, 8 + 112] == [200, 30, 60]).all()  # the photograph stands on its caption
    assert (pixels[8 + 224 :, 8 : 8 + 224] < 128).any()  # whose letters are dark
    assert (pixels[8 + 200, 240 + 112] == 0xEE).all()  # what can't be read is grey
    with Image.open(tmp_path / "out" / "1-a.jpg") as one:
        assert one.size == (384, 384 + 3 * 19 + 8)


@pytest.mark.parametrize(
    ("size", "drawn"), [((8, 8), (224, 224)), ((100, 30), (200, 60)), ((896, 448), (224, 112))]
)
def test_a_tile_shows_small_images_enlarged_and_large_ones_reduced(size, drawn):
    Image.new("RGB", size, "red").save(file := io.BytesIO(), "PNG")
    pictures = Pictures(get_config(None, ["DATA.IMAGE_CHANNELS", "3"]), [file.getvalue()])
    paper = np.asarray(captions.tile(captions.small(pictures, 0, 224), 224, "red", [], 0))
    red = (paper == (255, 0, 0)).all(2)
    assert (red.any(0).sum(), red.any(1).sum()) == drawn


def test_a_file_that_was_closed_is_flushed_without_an_error():
    """As Python's finalizer does, whose errors Python 3.13 prints."""
    file = io.BytesIO()
    out = Out(file, "it")
    out.write("text\n")
    assert file.getvalue() == b"text\n"
    file.close()
    out.flush()
    out.close()
