"""The door for writing: nothing goes through a link, into a pipe, or into a file that has another
name.
"""

import errno
import os
import re
import subprocess
import sys

import pytest
from support.programs import ROOT

from launch import files
from launch.files import (
    leftovers,
    making_folder,
    obstacle,
    open_lock,
    open_to_append,
    refuse_links,
    writing_whole,
)


def names(folder):
    return sorted(os.listdir(folder))


def make_link(path, outside):
    path.symlink_to(outside)


def make_dangling(path, outside):
    path.symlink_to(outside.with_name("absent"))


def make_loop(path, _):
    path.symlink_to(path.name)


def make_folder(path, _):
    path.mkdir()


def make_pipe(path, _):
    os.mkfifo(path)


REFUSED = {make_link: errno.ELOOP, make_dangling: errno.ELOOP, make_loop: errno.ELOOP}
REFUSED |= {make_folder: errno.EISDIR, make_pipe: errno.ENXIO}


@pytest.mark.parametrize("make", REFUSED)
@pytest.mark.parametrize(
    "write", [writing_whole, open_to_append, lambda path: open_lock(path, b"x")]
)
def test_nothing_is_written_where_no_regular_file_lies(make, write, tmp_path):
    inside = tmp_path / "run"
    inside.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("before")
    path = inside / "log.txt"
    make(path, outside)
    with pytest.raises(OSError) as caught, write(path):  # noqa: PT011  (its number is looked at below)
        pass
    assert (caught.value.errno, caught.value.filename) == (REFUSED[make], str(path))
    assert obstacle(path).errno == REFUSED[make]
    assert outside.read_text() == "before"
    assert names(tmp_path) == ["outside", "run"]
    assert names(inside) == ["log.txt"]


def test_a_file_with_two_names_is_replaced_by_a_copy(tmp_path):
    one = tmp_path / "one"
    two = tmp_path / "two"
    one.write_text("before\n")
    os.link(one, two)
    with open_to_append(two) as file:
        file.write("after\n")
    assert (one.read_text(), two.read_text()) == ("before\n", "before\nafter\n")
    two.unlink()
    os.link(one, two)
    with writing_whole(two) as file:
        file.write("after\n")
    assert (one.read_text(), two.read_text()) == ("before\n", "after\n")
    assert names(tmp_path) == ["one", "two"]


def test_a_lock_is_a_file_that_a_process_signed(tmp_path):
    path = tmp_path / ".lock"
    for content in (None, b"", b"process 12", b"process 4711"):
        if content is not None:
            path.write_bytes(content)
        os.close(open_lock(path, b"process [0-9]+"))
        assert path.read_bytes() == (content or b"")
    for content in (b"mine", b"process", b"process 12\nmine", b"process 12 "):
        path.write_bytes(content)
        with pytest.raises(
            FileExistsError, match="it belongs to another program, and isn't a lock: '.*/.lock'"
        ):
            open_lock(path, b"process [0-9]+")
        assert path.read_bytes() == content
    path.write_bytes(b"")
    os.link(path, tmp_path / "empty")
    with pytest.raises(FileExistsError):
        open_lock(path, b"process [0-9]+")


def test_the_way_to_a_folder_may_have_links(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    with writing_whole(tmp_path / "run/a.txt") as file:
        file.write("whole")
    for line in ("1\n", "2\n"):
        with open_to_append(tmp_path / "run/log.txt") as file:
            file.write(line)
    assert (tmp_path / "disk/a.txt").read_text() == "whole"
    assert (tmp_path / "disk/log.txt").read_text() == "1\n2\n"
    assert names(tmp_path / "disk") == ["a.txt", "log.txt"]


def test_a_name_until_it_is_whole_cannot_be_guessed(tmp_path, monkeypatch):
    path = tmp_path / ("é" * 127)
    found = {files.unfinished_path(path).name for _ in range(20)}
    assert len(found) == 20
    assert all(re.fullmatch(rf"\.é{{100}}\.{os.getpid()}\.[0-9a-f]{{8}}", name) for name in found)
    (tmp_path / "outside").write_text("before")
    (tmp_path / ".a.txt.planted").symlink_to("outside")
    monkeypatch.setattr(files, "unfinished_path", lambda _: tmp_path / ".a.txt.planted")
    with pytest.raises(FileExistsError), writing_whole(tmp_path / "a.txt"):
        pass
    assert (tmp_path / "outside").read_text() == "before"


def test_a_folder_is_made_whole_or_not_at_all(tmp_path):
    with making_folder(tmp_path / "deep" / "new") as made:
        (made / "a").write_text("a")
        assert names(tmp_path / "deep") == [made.name]
    assert names(tmp_path / "deep" / "new") == ["a"]
    with pytest.raises(ZeroDivisionError), making_folder(tmp_path / "other") as made:
        (made / "a").write_text("a")
        raise ZeroDivisionError
    (tmp_path / "link").symlink_to("deep")
    with pytest.raises(NotADirectoryError), making_folder(tmp_path / "link") as made:
        (made / "a").write_text("a")
    assert names(tmp_path) == ["deep", "link"]
    assert names(tmp_path / "deep") == ["new"]


def test_leftovers_are_of_processes_that_are_gone(tmp_path):
    gone = subprocess.run(
        [sys.executable, "-S", "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
    )
    dead = int(gone.stdout)
    own = os.getpid()
    alive = os.getppid()
    other = [
        ".git",
        ".gitignore",
        ".bashrc.1x",
        "a.txt.1",
        f".a.txt.{dead}x",
        f".{dead}",
        f".a.{dead}.0123456g",
    ]
    other += [
        ".a.20240101",
        ".a.20240101.01234567",
        ".a.4194305.01234567",
        f".a.{alive}.01234567",
        f".a.{alive}",
    ]
    left = {f".b.{dead}.01234567": "b", f".c.{own}.89abcdef": "c"}
    earlier = {f".a.txt.{dead}": "a.txt"}
    for name in (*other, *left, *earlier):
        (tmp_path / name).touch()
    assert {path.name: name for path, name in leftovers(tmp_path)} == left
    assert {path.name: name for path, name in leftovers(tmp_path, earlier=True)} == left | earlier


def test_links_in_a_folder_are_named(tmp_path):
    (tmp_path / "run_2").symlink_to("nowhere")
    (tmp_path / "best").symlink_to("run_1")
    (tmp_path / "run_1").mkdir()
    with pytest.raises(OSError, match=r"it is a link, and links aren't written to: '.*/run_2'$"):
        refuse_links(tmp_path, "run_[0-9]")
    refuse_links(tmp_path, "run_1|sweep.csv")


STOPPED = """
import os, signal, sys
from pathlib import Path
from launch import startup
from launch.files import making_folder, writing_whole
startup.stop_at_once()
with writing_whole(Path("a.txt")) as file, making_folder(Path("b")) as folder:
    file.write("half")
    (folder / "c").write_text("half")
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_program_that_is_stopped_removes_what_it_began(tmp_path):
    (tmp_path / "a.txt").write_text("before")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STOPPED]
    stopped = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (stopped.returncode, stopped.stderr) == (143, "stopped by SIGTERM\n")
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "before"
