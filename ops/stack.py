"""A stack for signal handlers."""

import ctypes
import sys

_signal_stack = ctypes.create_string_buffer(1 << 16)


class _Stack(ctypes.Structure):
    """stack_t of sigaltstack(2)."""

    _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def give_signals_a_stack() -> None:
    """Gives this thread, the main one, a stack for its signal handlers; Python's run there where
    there is one.

    Some products of oneDNN (sgemm's, until uxlfoundation/oneDNN#4855) keep another pointer in the
    stack's register. A signal that comes meanwhile would overwrite what lies before it in the heap.
    """
    if sys.platform == "linux":
        stack = _Stack(ctypes.addressof(_signal_stack), 0, len(_signal_stack))
        ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None)
