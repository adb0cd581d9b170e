"""CSV tables: what a spreadsheet would compute is text there, and is read back as it was."""

import csv
import io

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from config import get_config
from datasets import FileDataset
from inference.feature_store import COLUMNS, StoredFeatures, _line
from inference.prediction_writers import Csv
from inference.predictor import Failure, Prediction
from loading.tables import csv_line, csv_rows
from training import predictions
from training.report.run_files import read_predictions

NAMES = [
    "=1+1",
    "+a",
    "-b",
    "@SUM(A1)",
    "\tx",
    "\rx",
    "\n=x",
    '"=1',
    " =1",
    "'=1",
    "''-b",
    "＝1",
    '=HYPERLINK("a","b")',
]
DANGEROUS = tuple("=+-@\t\r\n＝＋－＠")


@pytest.mark.parametrize("name", NAMES)
def test_a_formula_becomes_text(name):
    line = csv_line(name, 1)
    [[cell, one]] = csv.reader(io.StringIO(line, newline=""), strict=True)
    assert cell == f"'{name}"  # a spreadsheet's own mark of text
    assert one == "1"
    assert list(csv_rows(io.StringIO(line, newline=""))) == [[name, "1"]]


@pytest.mark.parametrize(
    "name",
    ["-1", "+2.5", "-.5e-3", "1e5", "0.25", "'tis", "it's =1", "a-b", "", "'", "no,;\n", "ä"],
)
def test_other_text_stays_as_it_is(name):
    [[cell]] = csv.reader(io.StringIO(csv_line(name), newline=""), strict=True)
    assert cell == name


@pytest.mark.parametrize("name", ["-1+1", "-1 ", "-", "+", "-inf", "-1e", "--1", "-1;x", "-١"])
def test_only_numbers_are_numbers(name):
    assert csv_line(name) == f'"\'{name}"\n'


def test_numbers_have_no_quotes_and_none_is_empty():
    assert (
        csv_line("a", -1, -0.5, np.float64(-2.5), None, 1e-9, True)
        == '"a",-1,-0.5,-2.5,,1e-09,True\n'
    )


@given(
    st.lists(
        st.lists(st.text("='\"-+@\t\r\n,; a1＝", max_size=6) | st.text(), min_size=1), min_size=1
    )
)
@example([["'" * 3 + "=", "'-1", "-1", "''-1"]])
def test_every_text_is_read_back(rows):
    written = "".join(csv_line(*row) for row in rows)
    assert list(csv_rows(io.StringIO(written, newline=""))) == rows
    for cell in (cell for row in csv.reader(io.StringIO(written, newline="")) for cell in row):
        if not cell.startswith("'") and cell.lstrip(" \"'").startswith(DANGEROUS):
            float(cell)  # a number


# ------------------------------------------------------------ what writes them


def test_an_evaluations_table_and_its_reader(tmp_path):
    config = get_config(None, ["DATA.IMAGE_SIZE", "8"])
    paths = ["=1/a.png", "-2.png", "@c.png"]
    dataset = FileDataset(config, "val", tmp_path, paths, [0, 1, 0], ["=cmd|' /C calc'!A0", "-3"])
    found = {
        "label": np.array([0, 1, 0]),
        "predicted": np.array([0, 0, 1]),
        "probability": np.array([0.5, 0.25, 1e-7]),
    }
    file = tmp_path / "predictions.csv"
    predictions.write(file, found, dataset, str(tmp_path))
    with open(file, newline="") as text:
        head, *rows = csv.reader(text)
    assert head == ["image", "label", "predicted", "probability", "class", "predicted_class"]
    assert [row[0] for row in rows] == ["'=1/a.png", "'-2.png", "'@c.png"]
    assert [row[4] for row in rows] == ["'=cmd|' /C calc'!A0", "-3", "'=cmd|' /C calc'!A0"]
    told = read_predictions(file)
    assert list(told.images) == paths
    assert told.probability.tolist() == [0.5, 0.25, 0.0]


def test_a_table_of_answers():
    file = io.StringIO(newline="")
    table = Csv(file)
    table.write(Prediction("-a.png", [1, 0], ["=b", "c"], [0.75, 0.25]))
    table.write(Failure("@x", "@x: =broken"))
    file.seek(0)
    rows = list(csv_rows(file))
    assert rows[1] == ["-a.png", "1", "1", "=b", "0.75", ""]
    assert rows[3] == ["@x", "", "", "", "", "=broken"]
    file.seek(0)
    assert [row[0] for row in csv.reader(file)] == ["name", "'-a.png", "'-a.png", "'@x"]


def test_an_index_of_features(tmp_path):
    index = tmp_path / "features.csv"
    names = ["=a.png", "'-b.png", "c.png"]
    rows = [COLUMNS, *((place, name, "") for place, name in enumerate(names))]
    index.write_bytes(b"".join(_line("csv", *row) for row in rows))
    stored = StoredFeatures(
        tmp_path / "features.npy", np.zeros((3, 2)), {"index": "csv", "folder": "/data"}, index
    )
    assert list(stored.files()) == names
    assert b'"\'=a.png"' in index.read_bytes()
    index.write_text('row,file,error\n0,=a.png,\n1,"\'-b.png",\n2,c.png,\n')  # an earlier release's
    assert list(stored.files()) == ["=a.png", "-b.png", "c.png"]
