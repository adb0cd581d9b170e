"""What ranks hold in common: where it comes from, who may read it, what is said where it can't be had."""

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from errors import InputError
from launch import secret


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home without a secret, and none in the environment."""
    for name in (secret.VARIABLE, secret.FILE, secret.RUN, "PADDLE_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def refusal():
    with pytest.raises(InputError) as caught:
        secret.shared()
    assert len(str(caught.value)) < 400
    return str(caught.value)


def test_the_first_of_many_makes_the_file_and_all_hold_the_same(home):
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(lambda _: secret.shared(), range(64)))
    assert len(found) == 1
    file = home / secret.NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert re.fullmatch("[0-9a-f]{64}\n", file.read_text())
    assert secret.shared() == secret.shared() != file.read_bytes()
    file.unlink()
    assert secret.shared() not in found


def test_a_variable_and_a_named_file_come_first(home, monkeypatch):
    named = home / "named"
    named.write_text("a" * 32)  # without an end of line, as who writes it by hand may
    named.chmod(0o600)
    monkeypatch.setenv(secret.FILE, str(named))
    monkeypatch.setattr(secret, "WAIT", 0.1)
    by_file = secret.shared()
    monkeypatch.setenv(secret.VARIABLE, "a" * 32)
    assert secret.shared() == by_file
    monkeypatch.setenv(secret.VARIABLE, "b" * 32)
    assert secret.shared() != by_file
    assert not (home / secret.NAME).exists()
    monkeypatch.setenv(secret.VARIABLE, "short")
    assert refusal().startswith(f"{secret.VARIABLE} holds a secret of 5 characters; expected at least 16, random ones")


def test_what_others_may_read_or_have_written_is_refused(home, monkeypatch):
    monkeypatch.setattr(secret, "WAIT", 0.1)
    file = home / secret.NAME
    file.write_text("a" * 32 + "\n")
    file.chmod(0o640)
    assert refusal() == f"{file}: others may read the secret (mode 640); remove it for a new one, or chmod 600 it"
    file.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert refusal().startswith(
        f"{file}: the secret of user 4711 belongs to user {file.stat().st_uid}; remove it, or set"
    )
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv(secret.FILE, raising=False)
    monkeypatch.setattr(secret, "WAIT", 0.1)
    file.write_text("")
    assert refusal() == f"{file}: the secret's file is empty; remove it"
    file.unlink()
    os.mkfifo(file)
    assert "is no file; remove it, or set PADDLE_VIT_SECRET to the same 32 random characters" in refusal()


def test_where_there_is_no_place_for_it_one_line_says_what_to_set(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))
    assert refusal().startswith(
        f"{home}/file/{secret.NAME}: the secret can't be read (Not a directory); set PADDLE_VIT_S"
    )
    monkeypatch.setenv("HOME", str(home / "none"))
    expected = (
        f"{home}/none/{secret.NAME}: the secret that ranks prove to one another can't be made (No such file or dir"
    )
    assert refusal().startswith(expected)
    monkeypatch.setenv("HOME", "somewhere")
    assert "has no place: no HOME is set; set PADDLE_VIT_SECRET to the same 32 random characters for all" in refusal()
    monkeypatch.setenv(secret.FILE, str(home / "gone"))
    assert refusal() == f"{secret.FILE} names {home}/gone, which isn't there; write 32 random characters there"


def test_paddles_launcher_would_write_the_variable_to_its_logs(home, monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "a" * 32)
    secret.shared()
    monkeypatch.setenv("PADDLE_LOG_DIR", "log")
    assert refusal().startswith("PADDLE_VIT_SECRET is set, but Paddle's launcher writes its environment to envlog.*, w")


def test_a_runs_key_is_its_own(home):
    common = secret.of_run()
    assert common == secret.shared()
    keys = set()
    for key in (None, None, "ab"):
        secret.take_run(key)
        keys.add(secret.of_run())
    assert len(keys | {common}) == 4
    secret.take_run("ab")
    assert secret.of_run() in keys
    del os.environ[secret.RUN]


def test_parts_are_told_apart():
    assert secret.mac(b"k", b"ab", b"c") != secret.mac(b"k", b"a", b"bc")
    assert secret.same(secret.mac(b"k", b"a"), secret.mac(b"k", b"a"))
    assert not secret.same(secret.mac(b"k", b"a"), secret.mac(b"l", b"a"))
