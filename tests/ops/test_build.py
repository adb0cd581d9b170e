"""The compilation of the operators: where the libraries are, which are loaded, and that they are
compiled once.
"""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from support.programs import assert_none_left, descendants, started, wait_for

import ops
from errors import RunError
from ops import build, images, paths


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, and a folder for temporary files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache" / "paddle-vit-toolkit" / "ops"


def with_compiler(folder, monkeypatch, script):
    """Puts a g++ in front of the real one."""
    (folder / "bin").mkdir()
    (folder / "bin" / "g++").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")


def write_library(target):
    target.write_bytes(b"compiled")


def test_libraries_are_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    below = ["paddle-vit-toolkit", "ops"]
    for variable, expected in (
        (str(tmp_path / "other"), tmp_path / "other"),
        ("relative", tmp_path / ".cache"),
        ("", tmp_path / ".cache"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        folder = paths.library_folder("name", [b"sources"])
        assert folder.parent == expected.joinpath(*below)
        assert re.fullmatch(r"name-[0-9a-f]{12}", folder.name)
        assert build._FOLDER.fullmatch(folder.name)
    assert build._FOLDER.fullmatch(paths.library().parent.name)
    assert build._FOLDER.fullmatch(images.library().parent.name)


def test_whatever_a_library_depends_on_changes_its_name(monkeypatch):
    before = {paths.library()}
    for owner, name, value in (
        (paths.paddle.version, "commit", "another"),
        (paths.sys, "version_info", (3, 99, 0)),
        (paths.platform, "machine", lambda: "aarch64"),
        (paths.platform, "libc_ver", lambda: ("glibc", "2.17")),
        (paths, "sources_and_headers", lambda: [Path(__file__)]),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            before.add(paths.library())
    assert len(before) == 6


def test_a_library_that_another_user_could_have_written_isnt_loaded(cache, monkeypatch):
    target = images.library()
    assert build._build(target, write_library, "{}") == target
    assert paths.is_built(target)
    for path in (target, target.parent, cache, cache.parent):
        mode = path.stat().st_mode
        for bit in (0o20, 0o2):
            path.chmod(mode | bit)
            assert paths.why_unsafe(target) == f"other users may write to {path}"
            assert not paths.is_built(target)
            assert images.load.__wrapped__() is None
        path.chmod(mode)
    assert paths.is_built(target)
    owned = {"": 0, "another user": os.geteuid() + 1}
    for owner, number in owned.items():
        status = SimpleNamespace(st_uid=number, st_mode=0o755)
        with monkeypatch.context() as changed:
            changed.setattr(os, "stat", lambda path, status=status: status)
            expected = f"{target} belongs to {owner}" if owner else ""
            assert paths.why_unsafe(target) == expected


def test_nothing_is_compiled_into_a_folder_that_others_may_write_to(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    line = (
        f"the operators can't be compiled (other users may write to {cache}; set XDG_CACHE_HOME to a"
        f" folder of your own); {build._WITHOUT}"
    )
    with pytest.raises(RunError, match=f"^{re.escape(line)}$"):
        build.build()
    assert not ops.paths.is_built(paths.library())


def test_a_user_without_a_home_has_none(tmp_path, monkeypatch):
    """Its path would be found in whatever folder a program starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.chdir(tmp_path)
    library = images.library()
    library.parent.mkdir(parents=True)
    library.write_text("")
    assert not paths.is_built(library)
    with pytest.raises(RunError, match=r"\(this user has no home; set XDG_CACHE_HOME to a folder"):
        build.build_images()


def test_a_cache_that_cant_be_written_to_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RunError) as caught:
        build.build_images()
    assert str(caught.value).startswith("the image operations can't be compiled ([Errno ")
    assert str(caught.value).endswith(
        "or set XDG_CACHE_HOME to another folder); Pillow computes them instead, which takes longer"
    )
    assert (tmp_path / "file").read_text() == ""


def test_two_builds_at_once_compile_once(cache, capsys):
    target = paths.library()
    compiled = []

    def compile_slowly(built):
        compiled.append(built)
        time.sleep(0.3)
        built.write_bytes(b"compiled")

    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda _: build._build(target, compile_slowly, "{}"), range(2))
        assert list(found) == [target] * 2
    assert len(compiled) == 1
    assert capsys.readouterr().out == "another process is compiling; waiting for it\n"
    assert target.read_bytes() == b"compiled"
    # Another installation finds it.
    build._build(target, compile_slowly, "{}")
    assert len(compiled) == 1


def test_a_compiler_that_fails_leaves_nothing_and_is_one_line(cache, tmp_path, monkeypatch):
    with_compiler(
        tmp_path, monkeypatch, "echo 'a.cc:1: note' >&2; echo 'a.cc:2: error: bad' >&2; exit 1"
    )
    line = f"the operators can't be compiled (a.cc:2: error: bad); {build._WITHOUT}"
    with pytest.raises(RunError, match=f"^{re.escape(line)}$"):
        build.build()
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert list((tmp_path / "temporary").iterdir()) == []
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        RunError, match=r"^the image operations can't be compiled \(g\+\+ wasn't found\)"
    ):
        build.build_images()


@pytest.mark.parametrize(
    ("cores", "free", "expected"),
    [
        (2, 2 * build.MEMORY, [2, 1]),
        (1, 2 * build.MEMORY, [1, 1, 1]),
        (64, 2 * build.MEMORY - 1, [1, 1, 1]),
    ],
)
def test_compilers_work_side_by_side_where_there_is_memory(
    tmp_path, monkeypatch, cores, free, expected
):
    """The last command links. The parts are the same on every machine."""
    monkeypatch.setattr(build, "num_cores", lambda: cores)
    monkeypatch.setattr(build, "free_memory", lambda: free)
    runs = []
    monkeypatch.setattr(build, "_run", runs.append)
    build.compile_operators(tmp_path / "vit_ops.so")
    assert [len(commands) for commands in runs] == expected
    parts = [file.read_text() for file in sorted(tmp_path.glob("part_*.cc"))]
    included = re.findall(r'#include "(\w+\.cc)"', "".join(parts))
    assert sorted(included) == sorted(
        path.name for path in (ROOT / "ops").glob("*.cc") if path.name != "images.cc"
    )
    assert len(parts) == build.PARTS


def test_the_libraries_that_were_used_last_are_kept(cache):
    for age in range(build.KEPT + 3):
        file = cache / f"3.3.1-{age:012x}" / "vit_ops.so"
        build._make_folders(file.parent)
        file.write_text("")
        os.utime(file, (1e9 - age, 1e9 - age))
    for name in ("notes", "3.3.1-0123456789ab"):
        (cache / name).mkdir()
        (cache / name / "mine.txt").write_text("")
    # It is the oldest, but was just used.
    paths.mark_as_used(file)
    build._build(images.library(), write_library, "{}")
    kept = sorted(path.parent.name for path in cache.glob("*/vit_ops.so"))
    expected = [*range(build.KEPT - 2), build.KEPT + 2]
    assert kept == [f"3.3.1-{age:012x}" for age in expected]
    assert len(list(cache.glob("*/mine.txt"))) == 2


def test_a_stopped_compilation_ends_its_compilers_and_leaves_nothing(cache, tmp_path, monkeypatch):
    with_compiler(tmp_path, monkeypatch, f"touch {tmp_path}/compiles; exec sleep 60")
    process = subprocess.Popen(
        [sys.executable, "-m", "ops.build"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    assert wait_for((tmp_path / "compiles").exists, process)
    compilers = list(descendants(process.pid))
    assert compilers
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "")
    assert err.splitlines()[-1] == "stopped by SIGTERM"
    assert_none_left(compilers)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_make_install_doesnt_wait_for_the_operators(tmp_path):
    """What starts them writes its process's number, and waits for a file."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\necho "$$ $*"\nfor _ in $(seq 600); do test -e {tmp_path}/end && exit; sleep 0.05; done\n'
    )
    python.chmod(0o755)
    (tmp_path / "paddle").write_text("\n")
    (tmp_path / "installed").write_text("")
    # A make inside `make test` says which folder it enters and leaves.
    done = subprocess.run(
        ["make", "--no-print-directory", "install", f"VENV={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "operators for CPUs: compiled in the background if g++ is there; make ops waits for them"
    )
    log = tmp_path / "ops.log"
    until = time.monotonic() + 20
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < until
        time.sleep(0.02)
    process, words = log.read_text().strip().split(" ", 1)
    assert words == "-m ops.build"
    assert os.path.exists(f"/proc/{process}")
    (tmp_path / "end").write_text("")
    assert_none_left([int(process)])


def test_ranks_compute_without_operators_that_are_compiled_after_their_start(cache, monkeypatch):
    monkeypatch.delenv(ops._WITHOUT, raising=False)
    monkeypatch.setattr(ops, "_loaded", False)
    built = paths.library()
    if not built.is_file():
        ops.decide()
        assert os.environ.pop(ops._WITHOUT) == "1"
    monkeypatch.setattr(ops, "is_built", lambda library: True)
    ops.decide()
    assert ops._WITHOUT not in os.environ
    monkeypatch.setenv(ops._WITHOUT, "1")
    assert not ops.load()
