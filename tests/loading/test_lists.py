"""What any format that is a text list is read with: its lines, and errors that name the line."""

from array import array

import pytest

from errors import InputError
from loading.files import Paths
from loading.lists import csv_fields, open_list


def tab_list(root):
    """The example of ``loading.lists``: paths and labels."""
    labels = array("q")

    def paths(lines):
        for number, line in lines:
            path, tab, label = line.partition(b"\t")
            if not (path and tab and label.isdigit()):
                raise InputError(lines.unexpected(number, "a path, a TAB and a label", line))
            if int(label) >= 10:
                raise InputError(lines.label_outside(number, label, 10))
            labels.append(int(label))
            yield lines.add_path(number, path)

    with open_list(root / "train.tsv", "tab_list") as lines:
        found = Paths(paths(lines))
        lines.check_files(found)
        return list(found), labels.tolist()


def test_lines_have_their_numbers_and_no_ends(tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "1.png").touch()
    (tmp_path / "2.png").touch()
    (tmp_path / "train.tsv").write_bytes(b"\xef\xbb\xbfa b/1.png\t3\r\n\n\r\n2.png\t0")
    assert tab_list(tmp_path) == (["a b/1.png", "2.png"], [3, 0])
    with open_list(tmp_path / "train.tsv", "tab_list") as lines:
        assert list(lines) == [(1, b"a b/1.png\t3"), (4, b"2.png\t0")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n1.png 3\n", ", line 2: expected a path, a TAB and a label; found '1.png 3'"),
        (b"1.png\t3\x1b\n", r", line 1: expected a path, a TAB and a label; found '1.png\t3\x1b'"),
        (b"1.png\t12\n", ", line 1: label 12 is outside 0..9"),
        (b"1\0.png\t1\n", ", line 1: its path contains a NUL character"),
        (b"1.png\t1\na/2.png\t1\n", ": 1 of 2 files are missing, the first is {root}/a/2.png"),
        (b"1.png\t1\n" + b"x" * (1 << 19), ": its line 2 has more than 524288 bytes; {needs}"),
        (None, ": there is no such file; {needs}, which holds 1 image"),
    ],
)
def test_an_error_names_file_and_line(content, message, tmp_path):
    (tmp_path / "1.png").touch()
    file = tmp_path / "train.tsv"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        tab_list(tmp_path)
    needs = "DATASET tab_list needs it under -data_path"
    assert str(caught.value) == f"{file}{message.format(root=tmp_path, needs=needs)}"


def test_fields_are_those_of_a_table():
    assert csv_fields('a,"b,""c""",,1') == ["a", 'b,"c"', "", "1"]
    assert csv_fields("") == [""]
