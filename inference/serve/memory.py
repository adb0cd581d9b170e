"""Returns unused memory to the system, because glibc would keep more and more of it."""

import ctypes
import platform

_GLIBC = platform.libc_ver()[0] == "glibc"


def hold_little() -> None:
    """Makes the process return large buffers as soon as they are freed, from now on.

    This is too slow for a process that computes.
    """
    if _GLIBC:
        # M_MMAP_THRESHOLD, see mallopt(3).
        mmap_threshold = -3
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 17)


def give_back() -> None:
    """Gives free memory back to the operating system."""
    if _GLIBC:
        ctypes.CDLL(None).malloc_trim(0)
