"""Finds the tensors that Paddle would keep on the CPU while a GPU computes, on a machine without a
GPU.

Paddle's optimizers fill some accumulators with ``device="cpu"``. Within ``elsewhere()``, these, and
tensors that are computed from them alone, have a place that isn't the process's device. A
collective that gets one is recorded, because NCCL's would fail. This works in all builds of Paddle.
tests/stand_in sees more, but needs a build that loads plugins.
"""

import contextlib
import functools
from types import SimpleNamespace

import paddle
import paddle.distributed as dist
from paddle.optimizer import Optimizer

Tensor = paddle.base.core.eager.Tensor
COLLECTIVES = (
    "broadcast",
    "reduce",
    "all_reduce",
    "scatter",
    "reduce_scatter",
    "alltoall",
    "send",
    "recv",
    "all_gather",
)
_ELSEWHERE = SimpleNamespace(
    _equals=lambda other: False, is_cpu_place=lambda: True, is_gpu_place=lambda: False
)


class Elsewhere:
    """The records of ``elsewhere``.

    Attributes:
        accumulators: the names of the accumulators that Paddle filled on the CPU.
        travelled: the tensors that collectives got: (the collective, number of elements, dtype).
        misplaced: those among them that aren't on the device: (the collective, the tensor's name).
    """

    def __init__(self):
        self.accumulators = set()
        self.travelled = []
        self.misplaced = []
        self.tensors = {}

    def add(self, tensor):
        # The tensor is kept, because its id would be used again.
        self.tensors[id(tensor)] = tensor

    def __contains__(self, tensor):
        return id(tensor) in self.tensors


def _tensors(values):
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextlib.contextmanager
def elsewhere():
    """Yields an ``Elsewhere`` that records what happens within."""
    found = Elsewhere()
    undo = []

    def patch(owner, name, value):
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def fill(original, self, *args, device=None, **options):
        tensor = original(self, *args, device=device, **options)
        if device == "cpu":
            found.add(tensor)
            found.accumulators.add(tensor.name)
        return tensor

    def compute(original, *args, **options):
        result = original(*args, **options)
        inputs = list(_tensors([*args, *options.values()]))
        if inputs and all(tensor in found for tensor in inputs):
            for tensor in _tensors([result]):
                found.add(tensor)
        return result

    def travel(name, original, *args, **options):
        for tensor in _tensors([*args, *options.values()]):
            found.travelled.append((name, tensor.size, str(tensor.dtype).rpartition(".")[2]))
            if tensor in found:
                found.misplaced.append((name, tensor.name))
        return original(*args, **options)

    place = Tensor.place
    patch(
        Tensor,
        "place",
        property(lambda tensor: _ELSEWHERE if tensor in found else place.__get__(tensor)),
    )
    add = Optimizer._add_accumulator
    patch(
        Optimizer,
        "_add_accumulator",
        lambda self, *args, **options: fill(add, self, *args, **options),
    )
    for name in dir(paddle._C_ops):
        operator = getattr(paddle._C_ops, name)
        if callable(operator) and not name.startswith("_"):
            patch(paddle._C_ops, name, functools.partial(compute, operator))
    for name in COLLECTIVES:
        patch(dist, name, functools.partial(travel, name, getattr(dist, name)))
    try:
        yield found
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)
