"""Averages gradients in shared memory, for ranks that compute on the CPU of one machine.

``paddle.DataParallel`` sends gradients by gloo. That takes six times as long, because gloo copies
them through the network stack.
"""

import contextlib
import ctypes
import itertools
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from utils import all_gather, all_reduce_sum, rank, world_size

# The number of elements that are summed at a time, so that they stay in a core's cache.
PIECE = 1 << 16


def share_gradients(parameters: list[paddle.Tensor]) -> "SharedGradients | None":
    """Returns an object that averages the gradients of ``parameters``, or None on every rank.

    It is None on a GPU, on several machines, with parameters that aren't float32, or if a rank
    can't open another's memory.
    """
    on_cpu = paddle.get_device() == "cpu"
    possible = on_cpu and all(parameter.dtype == paddle.float32 for parameter in parameters)
    # By rank, four bytes for each element, and one for whether each parameter has a gradient.
    size = world_size() * sum(4 * parameter.size + 1 for parameter in parameters)
    memory = _shared_memory(size if possible else 0)
    return SharedGradients(parameters, memory) if memory else None


def _shared_memory(size: int) -> mmap.mmap | None:
    """Returns ``size`` bytes that all ranks share; None, on every rank, if any can't open them.

    The memory has no name, so other users' processes can't open it. It is freed when the last rank
    ends, however that happens.
    """
    machine = ""
    descriptor = -1
    memory = None
    # The kernel, or a limit on open files, may not allow it.
    with contextlib.suppress(OSError):
        # Processes with the same two values see each other under the same process numbers.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        machine = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        if rank() == 0:
            descriptor = os.memfd_create("gradients")
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, size)
    by_rank = all_gather((size, machine, os.getpid(), descriptor))
    if {(size, machine)} == {each[:2] for each in by_rank} and size and machine:
        _, _, owner, owners_descriptor = by_rank[0]
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{owner}/fd/{owners_descriptor}", "r+b") as file,
        ):
            memory = mmap.mmap(file.fileno(), size)
    all_opened = all(all_gather(memory is not None))
    if descriptor != -1:
        os.close(descriptor)
    return memory if all_opened else None


class SharedGradients:
    """Averages the ranks' gradients of ``parameters`` after a backward pass.

    Each rank has a row of the memory. It first writes there the gradients that other ranks will add
    up, and then the means of its own share of the elements. Each mean is computed by one rank, so
    all have the same bits. Between these phases the ranks wait for each other in an operation of
    gloo, which notices a rank that has ended or hangs.

    Args:
        parameters: float32, on the CPU.
        memory: bytes that all ranks share. Each rank has four for each element and one for each
            parameter.
    """

    def __init__(self, parameters: list[paddle.Tensor], memory: Any) -> None:
        self.parameters = parameters
        ranks = world_size()
        ends = np.cumsum([0, *(parameter.size for parameter in parameters)]).tolist()
        self.rows = np.frombuffer(memory, np.float32, ranks * ends[-1]).reshape(ranks, -1)
        # By rank, which parameters have a gradient.
        flags = np.frombuffer(memory, np.bool_, offset=self.rows.nbytes)
        self.present = flags.reshape(ranks, -1)
        # Each piece is (index of the parameter, its elements, their place in a row). The ranks take
        # turns: piece n belongs to rank n % ranks.
        self.pieces = []
        for index, (begin, end) in enumerate(itertools.pairwise(ends)):
            for first in range(begin, end, PIECE):
                last = min(first + PIECE, end)
                self.pieces.append((index, slice(first - begin, last - begin), slice(first, last)))
        self.token = paddle.zeros([1])

    @paddle.no_grad()
    def average(self) -> None:
        """Sets the parameters' gradients to the mean over the ranks.

        A missing gradient counts as zeros. Every rank has to call it.
        """
        this_rank = rank()
        ranks = len(self.rows)
        row = self.rows[this_rank]
        others = [other for other in range(ranks) if other != this_rank]
        gradients = [_elements(parameter) for parameter in self.parameters]
        self.present[this_rank] = [parameter.grad is not None for parameter in self.parameters]

        # Write what other ranks will add up.
        for turn, (index, elements, place) in enumerate(self.pieces):
            if turn % ranks != this_rank:
                row[place] = gradients[index][elements]
        all_reduce_sum(self.token)

        # Compute the means of this rank's pieces.
        anywhere = [any(column) for column in self.present.T]
        for index, elements, place in self.pieces[this_rank::ranks]:
            mean = gradients[index][elements]
            for other in others:
                mean += self.rows[other, place]
            mean /= ranks
            row[place] = mean
        all_reduce_sum(self.token)

        # Read the means of the others.
        for turn, (index, elements, place) in enumerate(self.pieces):
            if turn % ranks != this_rank:
                gradients[index][elements] = self.rows[turn % ranks, place]
        for parameter, mean, exists in zip(self.parameters, gradients, anywhere, strict=True):
            if exists and parameter.grad is None:
                parameter.grad = paddle.to_tensor(mean.reshape(parameter.shape))


def _elements(parameter: paddle.Tensor) -> np.ndarray:
    """Returns a parameter's gradient as a flat array on the same memory; new zeros if it has none."""
    gradient: Any = parameter.grad
    if gradient is None:
        return np.zeros(parameter.size, np.float32)
    # With Paddle's stride kernels the gradient of a transposed weight isn't contiguous.
    if not gradient.is_contiguous():
        gradient = parameter.grad = gradient.contiguous()
    floats = (ctypes.c_float * gradient.size).from_address(gradient.data_ptr())
    return np.frombuffer(floats, np.float32)
