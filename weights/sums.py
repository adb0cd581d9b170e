"""SHA-256 of files, and the list SHA256SUMS beside them, which ``sha256sum -c`` reads."""

import hashlib
import os
import re
from pathlib import Path

from errors import Unreadable, open_file
from settings.plain import whole_file

SUMS = "SHA256SUMS"
# The largest size in bytes. A checkpoint's list has a line for each file: ten, and those of shares.
LONGEST_SUMS = 1 << 20
LINE = re.compile(r"([0-9a-f]{64})  (\w[\w.-]*)\n?", re.ASCII)


def sha256_of(*files: Path) -> str:
    """Returns the SHA-256 of files, one after the other, in hexadecimal digits."""
    sha256 = hashlib.sha256()
    block = memoryview(bytearray(1 << 20))
    for file in files:
        with open_file(file) as stream:
            while count := stream.readinto(block):
                sha256.update(block[:count])
    return sha256.hexdigest()


def read_sums(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file that a folder's SHA256SUMS lists, by its name.

    Raises:
        Unreadable: a line is something else, or a name comes twice.
    """
    lines = whole_file(folder / SUMS, LONGEST_SUMS).decode("ascii").splitlines()
    sums = {}
    for number, line in enumerate(lines, 1):
        match = LINE.fullmatch(line)
        if match is None:
            raise Unreadable(f"its line {number} isn't a SHA-256 and the name of a file next to it")
        digest, name = match.groups()
        sums[name] = digest
    if len(sums) != len(lines):
        raise Unreadable("it lists a file twice")
    return sums


def check_sum(file: Path) -> None:
    """Checks a file by the SHA256SUMS of its folder, if that is there and lists it.

    Raises:
        Unreadable: the file has another SHA-256.
    """
    file = Path(os.path.realpath(file))
    try:
        sums = read_sums(file.parent)
    except (OSError, ValueError, Unreadable):
        # Another program's list, perhaps of other folders' files.
        return
    if file.name in sums and sha256_of(file) != sums[file.name]:
        raise Unreadable(
            f"its SHA-256 isn't the one in {SUMS} next to it: it was damaged or replaced; copy"
            " it again,"
            " or remove that list if the file is right"
        )
