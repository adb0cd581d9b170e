"""Memory that isn't needed any more goes back to the system: of its own, glibc keeps ever more of
it.
"""

import ctypes
import platform

_GLIBC = platform.libc_ver()[0] == "glibc"


def hold_little() -> None:
    """Gives large buffers back at once from now on, which is too slow for a process that computes."""
    if _GLIBC:
        mmap_threshold = -3
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 17)


def give_back() -> None:
    """Gives back what is free now."""
    if _GLIBC:
        ctypes.CDLL(None).malloc_trim(0)
