"""Watches which of Paddle's functions are called, by patching them: attention kernels, copies to and from a device."""

import collections
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TO_TENSOR = "_to_tensor_non_static"  # what paddle.to_tensor does, under all of its names
# How a tensor's values come to the host, or a tensor to another place, and the operators that copy values from the host
# or ask the device for a number. tests/test_transfers.py counts the same on a CPU.
METHODS = ("numpy", "item", "tolist", "_getitem_from_offset", "__array__", "__float__", "__int__", "__index__")
METHODS += ("__bool__", "__nonzero__", "_copy_to", "cpu", "cuda", "pin_memory", "set_value")
OPERATORS = ("assign_value", "assign_value_", "nonzero", "masked_select", "unique", "unique_consecutive", "bincount")
OPERATORS += ("histogram", "repeat_interleave_with_tensor_index", "memcpy_d2h", "memcpy_h2d", "allclose", "equal_all")
INDEXED = ("__getitem__", "__setitem__")  # by a mask: the device is asked how many of its places are true


@contextlib.contextmanager
def watched(owner: Any, names: tuple[str, ...], note: Callable[..., None]) -> Iterator[None]:
    """Calls ``note(name, *args)`` before each call of the functions ``owner.name``."""
    kept = {name: getattr(owner, name) for name in names if hasattr(owner, name)}

    def noting(name: str, function: Callable) -> Callable:
        def noted(*args: Any, **keywords: Any) -> Any:
            note(name, *args)
            return function(*args, **keywords)

        return noted

    for name, function in kept.items():
        setattr(owner, name, noting(name, function))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(owner, name, function)


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter]:
    """Counts copies to the device and from it by who asks for them: "to_tensor transforms/batch.py:61".

    Of calls within each other the outermost counts, and only this thread's: another one copies batches to a GPU. Copies
    that Paddle makes in C++ for an operator aren't seen.
    """
    import paddle

    count, inside, thread = collections.Counter(), [False], threading.get_ident()

    def counting(name: str, function: Callable) -> Callable:
        def counts(*args: Any, **keywords: Any) -> Any:
            if inside[0] or not _copies(name, args) or threading.get_ident() != thread:
                return function(*args, **keywords)
            count[f"{'to_tensor' if name == TO_TENSOR else name} {_asked_by()}"] += 1
            inside[0] = True
            try:
                return function(*args, **keywords)
            finally:
                inside[0] = False

        return counts

    places = [(paddle.tensor.creation, TO_TENSOR)]
    places += [(paddle.Tensor, name) for name in METHODS + INDEXED] + [(paddle._C_ops, name) for name in OPERATORS]
    kept = [(owner, name, getattr(owner, name)) for owner, name in places if hasattr(owner, name)]
    for owner, name, function in kept:
        setattr(owner, name, counting(name, function))
    try:
        yield count
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def _copies(name: str, args: tuple) -> bool:
    import paddle

    if name == "set_value":
        return not isinstance(args[1], paddle.Tensor)
    if name in INDEXED:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, paddle.Tensor) and part.dtype == paddle.bool for part in parts)
    return True


def _asked_by() -> str:
    """file:line of the innermost of the toolkit's frames, but for this file's."""
    frame = sys._getframe(2)
    while frame and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}" if frame else "elsewhere"


def _is_ours(file: str) -> bool:
    return file.startswith(f"{ROOT}{os.sep}") and "site-packages" not in file and file != __file__
