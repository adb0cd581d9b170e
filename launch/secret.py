"""The secret that only the ranks of one user know.

It is in a variable, or in a file that belongs to the user and is made at first use. Ranks prove
that they know it by message authentication codes (HMAC), and never send it. When launched ranks
meet, they derive a key of this run from it. A process that spawns ranks makes a random key instead.
"""

import hmac
import os
import secrets
import stat
import time
from hashlib import sha256
from pathlib import Path

from errors import InputError

SECRET_VARIABLE = "PADDLE_VIT_SECRET"
SECRET_FILE_VARIABLE = "PADDLE_VIT_SECRET_FILE"
# The variable of the run's key, which a process that starts ranks sets for them.
RUN_KEY_VARIABLE = "PADDLE_VIT_RUN_KEY"
# the name of the file in the user's home
SECRET_FILE_NAME = ".paddle_vit_secret"
# The folder for the file if the home is missing or read-only, as in many containers.
SHARED_MEMORY = "/dev/shm"
# Characters of a secret, at least. A shorter one can be guessed from what is sent.
MIN_CHARACTERS = 16
# bytes of the file that are read, at most
MAX_BYTES = 4096
# seconds in which another process may finish writing the file
TIMEOUT = 2.0
# bytes of a MAC, and of a nonce
MAC_SIZE = 32


def mac(key: bytes, *parts: bytes) -> bytes:
    """Returns the HMAC-SHA256 of the parts. Each part follows its length, so that other parts with
    the same bytes together have another MAC.
    """
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(key, message, sha256)


def same(code: bytes, expected: bytes) -> bool:
    """Returns whether two MACs are equal, in a time that doesn't depend on where they differ."""
    return hmac.compare_digest(code, expected)


def run_key() -> bytes:
    """Returns this run's own key. Ranks that another program spawned have none, and use the user's
    secret instead.
    """
    if key := os.environ.get(RUN_KEY_VARIABLE):
        return mac(key.encode(), b"run")
    return shared_secret()


def set_run_key(key: str | None = None) -> None:
    """Sets the run's key, for this process and those that it starts.

    Args:
        key: None: a new random one.
    """
    os.environ[RUN_KEY_VARIABLE] = key or secrets.token_hex(MAC_SIZE)


def shared_secret() -> bytes:
    """Returns the secret of all processes of this user, from the variable or the file.

    Raises:
        InputError: it is too short, others may read it, or it can be neither read nor made.
    """
    if text := os.environ.get(SECRET_VARIABLE):
        if "PADDLE_LOG_DIR" in os.environ:
            keep_from_logs()
        return _long_enough(text, SECRET_VARIABLE)
    path = secret_file()
    try:
        return _long_enough(_read(path), str(path))
    except FileNotFoundError:
        if os.environ.get(SECRET_FILE_VARIABLE):
            raise InputError(
                f"{SECRET_FILE_VARIABLE} names {path}, which doesn't exist;"
                f" write {2 * MIN_CHARACTERS} random characters to it"
            ) from None
    except OSError as error:
        raise InputError(
            f"{path}: the secret can't be read ({error.strerror}); {_alternative()}"
        ) from None
    try:
        return _long_enough(_make(path), str(path))
    except OSError as error:
        raise InputError(
            f"{path}: the secret by which ranks recognise one another can't be created"
            f" ({error.strerror}); {_alternative()}"
        ) from None


def keep_from_logs() -> None:
    """Raises InputError if the secret is in the variable. Call it where Paddle's launcher starts
    ranks: it writes all variables to its logs, which others may read.
    """
    if os.environ.get(SECRET_VARIABLE):
        raise InputError(
            f"{SECRET_VARIABLE} is set, but Paddle's launcher writes its environment to envlog.*,"
            " which others may read; unset it, write a new secret to a file,"
            f" and set {SECRET_FILE_VARIABLE} to its path"
        )


def secret_file() -> Path:
    """Returns the path of the secret's file. It is in the user's home. If that isn't possible, it
    is in shared memory, and the secret only holds on this machine.
    """
    if named := os.environ.get(SECRET_FILE_VARIABLE):
        return Path(named)
    home = Path(os.path.expanduser("~"), SECRET_FILE_NAME)
    if home.is_absolute() and (os.path.lexists(home) or os.access(home.parent, os.W_OK | os.X_OK)):
        return home
    return Path(SHARED_MEMORY, f"{SECRET_FILE_NAME}.{os.geteuid()}")


def advice_if_different(where: str) -> str:
    """Returns the advice for a user whose secret differs from that of ``where``."""
    if os.environ.get(SECRET_VARIABLE):
        return f"set {SECRET_VARIABLE} to the same value on all machines"
    copy = f"copy {secret_file()} from {where}'s machine to this one (mode 600)"
    return f"{copy}, or set {SECRET_VARIABLE} to the same value on all machines"


def _alternative() -> str:
    """Returns the advice for a user whose file can't be used."""
    secret = f"the same {2 * MIN_CHARACTERS} random characters for all ranks"
    file = f"set {SECRET_FILE_VARIABLE} to the path of a file of mode 600 with them"
    return f"set {SECRET_VARIABLE} to {secret}, or {file}"


def _long_enough(text: str, where: str) -> bytes:
    if len(text) < MIN_CHARACTERS:
        raise InputError(
            f"{where} holds a secret of {len(text)} characters;"
            f" expected at least {MIN_CHARACTERS} random ones"
        )
    return mac(text.encode(errors="surrogateescape"), b"paddle-vit-toolkit")


def _read(path: Path) -> str:
    """Returns the file's text, and waits until it is complete.

    Raises:
        InputError: it isn't this user's, or others may read it.
        OSError: it can't be read.
    """
    until = time.monotonic() + TIMEOUT
    while True:
        # Without O_NONBLOCK, a FIFO would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_owner(path, os.fstat(descriptor))
            text = os.read(descriptor, MAX_BYTES).decode(errors="surrogateescape")
        finally:
            os.close(descriptor)
        # A file that was written by hand may lack the end of the line.
        if text.endswith("\n") or (text and time.monotonic() > until):
            return text.strip()
        if time.monotonic() > until:
            raise InputError(f"{path}: the file for the secret is empty; remove it")
        time.sleep(0.02)


def _check_owner(path: Path, state: os.stat_result) -> None:
    """Raises InputError if the file isn't this user's, or if others may read it."""
    user = os.geteuid()
    # A secret that Kubernetes mounts belongs to root, and the user's group may read it. It is
    # accepted only if the variable names it.
    is_named = bool(os.environ.get(SECRET_FILE_VARIABLE))
    is_mounted = is_named and state.st_uid == 0 and user != 0
    problem = ""
    if not stat.S_ISREG(state.st_mode):
        problem = "isn't a regular file"
    elif state.st_uid != user and not is_mounted:
        problem = f"belongs to user {state.st_uid}"
    if problem:
        raise InputError(
            f"{path}: user {user} expects a secret of their own, but this {problem};"
            f" remove it, or {_alternative()}"
        )
    if state.st_mode & (0o037 if is_mounted else 0o077):
        advice = "chmod 600 it, or remove it so that a new one is created"
        if is_mounted:
            advice = "chmod 440 it"
        raise InputError(
            f"{path}: others may read the secret (mode {state.st_mode & 0o777:o}); {advice}"
        )


def _make(path: Path) -> str:
    """Makes the file with a new secret, unless another process of the user has just made it.
    Returns its text.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read(path)
    try:
        # Some file systems have fixed modes: vfat, drives under WSL, some shares.
        if os.fstat(descriptor).st_mode & 0o077:
            os.unlink(path)
            raise InputError(
                "the secret by which ranks recognise one another can't be stored: others may read"
                f" all files in {path.parent}, because its file system has no file modes;"
                f" {_alternative()}"
            )
        os.write(descriptor, f"{secrets.token_hex(MAC_SIZE)}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return _read(path)
