"""Words of a command line become paths; what stands for nothing is refused in a line."""

import io
import os

import pytest

from errors import InputError
from inference.inputs import class_names, paths_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """b/ with images at two depths, what isn't one, and a link to itself."""
    for name in ("b/2.png", "b/1.JPG", "b/c/0.jpeg", "b/note.md", "a.jpg", "b/.hidden.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for loop in ("loop", "loop2"):
        (tmp_path / "b" / loop).symlink_to(".")
    (tmp_path / "b" / "around.jpg").symlink_to("around.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*words, stdin=None):
    return list(paths_of(words, stdin and io.BytesIO(stdin)))


IN_B = ["b/1.JPG", "b/2.png", "b/around.jpg", "b/c/0.jpeg"]


def test_files_folders_and_patterns_in_the_order_of_the_words(folder):
    assert found("b", "a.jpg") == [*IN_B, "a.jpg"]
    assert found("a.jpg", "./b/", "a.jpg") == ["a.jpg", *(f"./{path}" for path in IN_B), "a.jpg"]
    assert found(str(folder / "b" / "c")) == [str(folder / "b/c/0.jpeg")]
    assert found("b/*.[pJ]*") == ["b/1.JPG", "b/2.png"]
    assert found("?.jpg", "b/c/*") == ["a.jpg", "b/c/0.jpeg"]
    # at once, for all that its links lead in circles
    assert found("**/*.jpg") == ["a.jpg", "b/around.jpg"]
    assert found("b/**/*.jp*g") == ["b/around.jpg", "b/c/0.jpeg"]
    assert found(f"{folder}/b/c/**") == [f"{folder}/b/c/0.jpeg"]
    assert found("b/note.md") == ["b/note.md"]  # a file that is named is asked for, whatever it is
    (folder / "b" / "empty").mkdir()
    assert found("b/[ec]*") == ["b/c/0.jpeg"]
    (folder / "[x].jpg").touch()
    assert found("[x].jpg") == ["[x].jpg"]


def test_a_list_has_a_path_on_each_line(folder):
    lines = b"\xef\xbb\xbfb/2.png\r\n\n a  b.jpg\nno \xff.jpg\n#1.jpg"
    expected = ["b/2.png", " a  b.jpg", os.fsdecode(b"no \xff.jpg"), "#1.jpg"]
    (folder / "some.TXT").write_bytes(lines)
    assert found("some.TXT", "a.jpg") == [*expected, "a.jpg"]
    assert found("-", stdin=lines) == expected
    assert found("-", stdin=b"line\nbreak.jpg\0b.jpg\0") == ["line\nbreak.jpg", "b.jpg"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.jpg"], "'none.jpg': there is no such file or folder"),
        (
            ["s3://a/b.jpg"],
            "'s3://a/b.jpg': expected an http or https address, or a file or folder",
        ),
        (["a.jpg", "n\x1b*"], r"'n\x1b*': no matching files"),
        (["**/*.gif"], "'**/*.gif': no matching files"),
        (["empty"], "empty: no image files found; images end in .jpg .jpeg"),
        (
            ["blank.txt"],
            "no image files found in the lists, or in the folders that the patterns match",
        ),
        (["wide.txt"], "wide.txt: it is UTF-16; save it as UTF-8"),
        (["pipe.txt"], "pipe.txt: it isn't a regular file"),
        (
            ["lines.txt"],
            "lines.txt: its content would take more than 64 MiB and more than three times its 4000000 bytes",
        ),
        (
            ["-"],
            "-: several processes can't share the standard input; write the paths to a list.txt",
        ),
        ([""], "'': there is no such file or folder"),
        (["a\0b"], r"there is no such file or folder"),
    ],
)
def test_what_stands_for_nothing_is_refused(folder, words, message):
    (folder / "empty").mkdir()
    (folder / "blank.txt").write_text("\n\n")
    (folder / "wide.txt").write_text("a.jpg", encoding="utf-16")
    (folder / "lines.txt").write_bytes(b"\n" * 4_000_000)
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(InputError) as caught:
        found(*words)
    assert message in str(caught.value)


def test_classes_are_a_name_a_line(folder):
    (folder / "names").write_bytes("\ufefftench, Tinca\r\ncafé noir\n\n".encode())
    assert class_names("names") == ["tench, Tinca", "café noir"]
    for data, message in (
        (b"a\n\nb", "its line 2 is '', expected a class's name"),
        (b"a\x1b[2J", r"its line 1 is 'a\x1b[2J', expected a class's name"),
        (b"\xff\xfe", "it is UTF-16; save it as UTF-8"),
        (
            "狗\n猫".encode("gbk"),
            "its line 1 isn't UTF-8; save it as UTF-8 (from GBK: iconv -f GB18030 -t UTF-8",
        ),
        (b"a" * 2000, "its line 1 is 'aaa"),
    ):
        (folder / "names").write_bytes(data)
        with pytest.raises(InputError) as caught:
            class_names("names")
        assert f"names: {message}" in str(caught.value)
