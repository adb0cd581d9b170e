"""What ranks hold in common: where it comes from, who may read it, what is said where it can't be
had.
"""

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
    for name in (
        secret.SECRET_VARIABLE,
        secret.SECRET_FILE_VARIABLE,
        secret.RUN_KEY_VARIABLE,
        "PADDLE_LOG_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def refusal():
    with pytest.raises(InputError) as caught:
        secret.shared_secret()
    assert len(str(caught.value)) < 400
    return str(caught.value)


def test_the_first_of_many_makes_the_file_and_all_hold_the_same(home):
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(lambda _: secret.shared_secret(), range(64)))
    assert len(found) == 1
    file = home / secret.SECRET_FILE_NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert re.fullmatch("[0-9a-f]{64}\n", file.read_text())
    assert secret.shared_secret() == secret.shared_secret() != file.read_bytes()
    file.unlink()
    assert secret.shared_secret() not in found


def test_a_variable_and_a_named_file_come_first(home, monkeypatch):
    named = home / "named"
    named.write_text("a" * 32)  # without an end of line, as who writes it by hand may
    named.chmod(0o600)
    monkeypatch.setenv(secret.SECRET_FILE_VARIABLE, str(named))
    monkeypatch.setattr(secret, "TIMEOUT", 0.1)
    by_file = secret.shared_secret()
    monkeypatch.setenv(secret.SECRET_VARIABLE, "a" * 32)
    assert secret.shared_secret() == by_file
    monkeypatch.setenv(secret.SECRET_VARIABLE, "b" * 32)
    assert secret.shared_secret() != by_file
    assert not (home / secret.SECRET_FILE_NAME).exists()
    monkeypatch.setenv(secret.SECRET_VARIABLE, "short")
    assert refusal().startswith(
        f"{secret.SECRET_VARIABLE} holds a secret of 5 characters; expected at least 16 random ones"
    )


def test_what_others_may_read_or_have_written_is_refused(home, monkeypatch):
    monkeypatch.setattr(secret, "TIMEOUT", 0.1)
    file = home / secret.SECRET_FILE_NAME
    file.write_text("a" * 32 + "\n")
    file.chmod(0o640)
    assert (
        refusal()
        == f"{file}: others may read the secret (mode 640); chmod 600 it, or remove it so that a new one is created"
    )
    file.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert refusal().startswith(
        f"{file}: user 4711 expects a secret of their own, but this belongs to user {file.stat().st_uid}; remove it"
    )
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv(secret.SECRET_FILE_VARIABLE, raising=False)
    monkeypatch.setattr(secret, "TIMEOUT", 0.1)
    file.write_text("")
    assert refusal() == f"{file}: the file for the secret is empty; remove it"
    file.unlink()
    os.mkfifo(file)
    assert (
        "isn't a regular file; remove it, or set PADDLE_VIT_SECRET to the same 32 random characters"
        in refusal()
    )


def test_where_there_is_no_place_for_it_one_line_says_what_to_set(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setattr(secret, "SHARED_MEMORY", str(home / "file"))
    monkeypatch.setenv("HOME", "somewhere")
    where = f"{home}/file/{secret.SECRET_FILE_NAME}.{os.geteuid()}"
    assert refusal().startswith(
        f"{where}: the secret can't be read (Not a directory); set PADDLE_VIT_SECRET to the"
    )
    monkeypatch.setattr(secret, "SHARED_MEMORY", str(home / "none"))
    expected = f"{home}/none/{secret.SECRET_FILE_NAME}.{os.geteuid()}: the secret by which ranks recognise one another can't be "
    assert refusal().startswith(f"{expected}created (No such file")
    monkeypatch.setenv(secret.SECRET_FILE_VARIABLE, str(home / "gone"))
    assert (
        refusal()
        == f"{secret.SECRET_FILE_VARIABLE} names {home}/gone, which doesn't exist; write 32 random characters to it"
    )


@pytest.mark.parametrize("place", ["unset", "gone", "locked"])
def test_a_container_without_a_home_needs_nothing(home, monkeypatch, tmp_path, place):
    """HOME of a user that isn't in passwd, of another user, or on a read-only disk."""
    monkeypatch.setattr(secret, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setenv(
        "HOME", {"unset": "~", "gone": str(home / "none"), "locked": str(home / "locked")}[place]
    )
    (home / "locked").mkdir()
    real = os.access  # root may write everywhere
    monkeypatch.setattr(
        os, "access", lambda path, mode: "locked" not in str(path) and real(path, mode)
    )
    found = secret.shared_secret()
    file = tmp_path / f"{secret.SECRET_FILE_NAME}.{os.geteuid()}"
    assert secret.secret_file() == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret.shared_secret() == found
    if place == "locked":  # what is there counts, though the disk is read-only
        file.rename(home / "locked" / secret.SECRET_FILE_NAME)
        assert secret.secret_file() == home / "locked" / secret.SECRET_FILE_NAME
        assert secret.shared_secret() == found


def test_a_file_system_without_modes_is_told_and_nothing_stays_there(home, monkeypatch):
    real = os.fstat
    monkeypatch.setattr(
        os, "fstat", lambda file: os.stat_result((real(file).st_mode | 0o777, *real(file)[1:]))
    )
    expected = f"can't be stored: others may read all files in {home}, because its file system has no file modes; "
    assert f"{expected}set PADDLE_VIT" in refusal()
    assert not (home / secret.SECRET_FILE_NAME).exists()


def test_a_named_file_may_be_the_administrators(home, monkeypatch):
    """Kubernetes mounts secrets as root's files, which the group of a container may read."""
    named = home / "named"
    named.write_text("a" * 32 + "\n")
    named.chmod(0o440)
    real = os.fstat
    monkeypatch.setattr(
        os, "fstat", lambda file: os.stat_result((*real(file)[:4], 0, *real(file)[5:]))
    )
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setenv(secret.SECRET_FILE_VARIABLE, str(named))
    assert secret.shared_secret()
    named.chmod(0o444)
    assert refusal() == f"{named}: others may read the secret (mode 444); chmod 440 it"
    monkeypatch.delenv(secret.SECRET_FILE_VARIABLE)
    named.chmod(0o440)
    named.rename(home / secret.SECRET_FILE_NAME)
    assert refusal().startswith(
        f"{home}/{secret.SECRET_FILE_NAME}: user 4711 expects a secret of their own, but this belongs to user 0; remove it, or set"
    )


def test_paddles_launcher_would_write_the_variable_to_its_logs(home, monkeypatch):
    monkeypatch.setenv(secret.SECRET_VARIABLE, "a" * 32)
    secret.shared_secret()
    monkeypatch.setenv("PADDLE_LOG_DIR", "log")
    assert refusal().startswith(
        "PADDLE_VIT_SECRET is set, but Paddle's launcher writes its environment to envlog.*, w"
    )


def test_a_runs_key_is_its_own(home):
    common = secret.run_key()
    assert common == secret.shared_secret()
    keys = set()
    for key in (None, None, "ab"):
        secret.set_run_key(key)
        keys.add(secret.run_key())
    assert len(keys | {common}) == 4
    secret.set_run_key("ab")
    assert secret.run_key() in keys
    del os.environ[secret.RUN_KEY_VARIABLE]


def test_parts_are_told_apart():
    assert secret.mac(b"k", b"ab", b"c") != secret.mac(b"k", b"a", b"bc")
    assert secret.same(secret.mac(b"k", b"a"), secret.mac(b"k", b"a"))
    assert not secret.same(secret.mac(b"k", b"a"), secret.mac(b"l", b"a"))
