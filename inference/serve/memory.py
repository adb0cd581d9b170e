"""Memory that isn't needed any more goes back to the system."""

import ctypes
import platform


def give_back(least: int = 1 << 17) -> None:
    """Tells glibc to return buffers of ``least`` bytes at once. Left alone, it keeps ever larger ones for itself."""
    if platform.libc_ver()[0] == "glibc":
        mmap_threshold = -3
        ctypes.CDLL(None).mallopt(mmap_threshold, least)
