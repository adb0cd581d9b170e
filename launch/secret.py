"""The secret that all ranks of a user know, and nobody else.

It is in a variable, or in a file that belongs to the user and is made at first use. Ranks prove by
HMACs that they know it; it is never sent. When launched ranks meet, they derive a key of this run
from it. A process that spawns ranks makes a random key instead.
"""

import hmac
import os
import secrets
import stat
import time
from hashlib import sha256
from pathlib import Path

from errors import InputError

VARIABLE = "PADDLE_VIT_SECRET"
FILE = "PADDLE_VIT_SECRET_FILE"
RUN = "PADDLE_VIT_RUN_KEY"  # the run's key: a process that starts ranks sets it for them
NAME = ".paddle_vit_secret"  # in the user's home
MEMORY = "/dev/shm"  # used if the home is missing or read-only, as in many containers
LEAST = 16  # characters, at least: a shorter one can be guessed from what is sent
MOST = 4096  # bytes that are read of the file
WAIT = 2.0  # seconds in which another process may finish writing the file
SIZE = 32  # bytes of a MAC, and of a nonce


def mac(key: bytes, *parts: bytes) -> bytes:
    """Returns the HMAC-SHA256 of the parts, each after its length, so that different parts give
    different texts.
    """
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), sha256)


def same(one: bytes, other: bytes) -> bool:
    """Returns whether two MACs are the same, in a time that doesn't depend on where they differ."""
    return hmac.compare_digest(one, other)


def of_run() -> bytes:
    """Returns this run's own key. Ranks that another program spawned have none: then it is the
    user's shared secret.
    """
    return mac(key.encode(), b"run") if (key := os.environ.get(RUN)) else shared_secret()


def take_run(key: str | None = None) -> None:
    """Sets the run's key, for this process and those that it starts; None: a new random one."""
    os.environ[RUN] = key or secrets.token_hex(SIZE)


def shared_secret() -> bytes:
    """Returns the secret of all processes of this user, from the variable or the file.

    Raises:
        InputError: it is too short, others may read it, or it can be neither read nor made.
    """
    if text := os.environ.get(VARIABLE):
        if "PADDLE_LOG_DIR" in os.environ:
            keep_from_logs()
        return _long_enough(text, VARIABLE)
    path = file()
    try:
        return _long_enough(_read(path), str(path))
    except FileNotFoundError:
        if os.environ.get(FILE):
            advice = f"write {2 * LEAST} random characters to it"
            raise InputError(f"{FILE} names {path}, which doesn't exist; {advice}") from None
    except OSError as error:
        raise InputError(
            f"{path}: the secret can't be read ({error.strerror}); {_otherwise()}"
        ) from None
    try:
        return _long_enough(_make(path), str(path))
    except OSError as error:
        found = f"{path}: the secret by which ranks recognise one another can't be created ({error.strerror})"
        raise InputError(f"{found}; {_otherwise()}") from None


def keep_from_logs() -> None:
    """Raises InputError where Paddle's launcher would write the variable to its logs, which others
    may read.
    """
    if os.environ.get(VARIABLE):
        found = f"{VARIABLE} is set, but Paddle's launcher writes its environment to envlog.*, which others may read"
        raise InputError(
            f"{found}; unset it, write a new secret to a file, and set {FILE} to its path"
        )


def file() -> Path:
    """Returns the secret's file: in the home, or if that isn't possible, in shared memory, for one
    machine only.
    """
    if named := os.environ.get(FILE):
        return Path(named)
    home = Path(os.path.expanduser("~"), NAME)
    if home.is_absolute() and (os.path.lexists(home) or os.access(home.parent, os.W_OK | os.X_OK)):
        return home
    return Path(MEMORY, f"{NAME}.{os.geteuid()}")


def differs(where: str) -> str:
    """Returns the advice for a user whose secret differs from that of ``where``."""
    if os.environ.get(VARIABLE):
        return f"set {VARIABLE} to the same value on all machines"
    copy = f"copy {file()} from {where}'s machine to this one (mode 600)"
    return f"{copy}, or set {VARIABLE} to the same value on all machines"


def _otherwise() -> str:
    one = f"the same {2 * LEAST} random characters for all ranks"
    return f"set {VARIABLE} to {one}, or set {FILE} to the path of a file of mode 600 with them"


def _long_enough(text: str, where: str) -> bytes:
    if len(text) < LEAST:
        raise InputError(
            f"{where} holds a secret of {len(text)} characters; expected at least {LEAST} random ones"
        )
    return mac(text.encode(errors="surrogateescape"), b"paddle-vit-toolkit")


def _read(path: Path) -> str:
    """Returns the file's text, once it is complete.

    Raises:
        InputError: it isn't this user's, or others may read it.
        OSError: it can't be read.
    """
    until = time.monotonic() + WAIT
    while True:
        # a FIFO would block without it
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            state = os.fstat(descriptor)
            # A file that a variable names may be root's, readable by the user's group (a secret of
            # Kubernetes).
            given = bool(os.environ.get(FILE)) and state.st_uid == 0 != os.geteuid()
            if not stat.S_ISREG(state.st_mode) or (state.st_uid != os.geteuid() and not given):
                what = (
                    f"belongs to user {state.st_uid}"
                    if stat.S_ISREG(state.st_mode)
                    else "is no regular file"
                )
                found = (
                    f"{path}: user {os.geteuid()} expects a secret of their own, but this {what}"
                )
                raise InputError(f"{found}; remove it, or {_otherwise()}")
            if state.st_mode & (0o037 if given else 0o077):
                what = f"others may read the secret (mode {state.st_mode & 0o777:o})"
                ways = (
                    "chmod 440 it" if given else "chmod 600 it, or remove it, and a new one is made"
                )
                raise InputError(f"{path}: {what}; {ways}")
            text = os.read(descriptor, MOST).decode(errors="surrogateescape")
        finally:
            os.close(descriptor)
        # a file written by hand may lack the line's end
        if text.endswith("\n") or (text and time.monotonic() > until):
            return text.strip()
        if time.monotonic() > until:
            raise InputError(f"{path}: the file for the secret is empty; remove it")
        time.sleep(0.02)


def _make(path: Path) -> str:
    """Makes the file, unless another process of the user makes it at this moment; returns its text."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read(path)
    try:
        # a file system with fixed modes (vfat, drives under WSL, some shares)
        if os.fstat(descriptor).st_mode & 0o077:
            os.unlink(path)
            what = f"others may read all files in {path.parent}, because its file system has no file modes"
            raise InputError(
                f"the secret by which ranks recognise one another can't be stored: {what}; {_otherwise()}"
            )
        os.write(descriptor, f"{secrets.token_hex(SIZE)}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return _read(path)
