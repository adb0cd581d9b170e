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

PIECE = 1 << 16  # elements that are summed at a time: so few stay in a core's cache


def share_gradients(parameters: list[paddle.Tensor]) -> "SharedGradients | None":
    """Returns an object that averages the gradients of ``parameters``; None, on every rank, if that
    isn't possible.

    It isn't possible on a GPU, on several machines, with parameters that aren't float32, or if a
    rank can't open another's memory.
    """
    takes = paddle.get_device() == "cpu" and all(
        parameter.dtype == paddle.float32 for parameter in parameters
    )
    size = world_size() * sum(4 * parameter.size + 1 for parameter in parameters)
    memory = _shared_memory(size if takes else 0)
    return SharedGradients(parameters, memory) if memory else None


def _shared_memory(size: int) -> mmap.mmap | None:
    """Returns ``size`` bytes that all ranks share; None, on every rank, if any rank can't open
    them.

    The memory has no name, so other users' processes can't open it. It is freed when the last rank
    ends, however that happens.
    """
    machine = ""
    descriptor = -1
    memory = None
    with contextlib.suppress(OSError):  # this kernel, or a limit on files, doesn't allow it
        # Processes with the same two values see each other under the same process numbers.
        machine = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.stat('/proc/self/ns/pid').st_ino}"
        if rank() == 0:
            descriptor = os.memfd_create("gradients")
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, size)
    told = all_gather((size, machine, os.getpid(), descriptor))
    if {(size, machine)} == {each[:2] for each in told} and size and machine:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{told[0][2]}/fd/{told[0][3]}", "r+b") as file,
        ):
            memory = mmap.mmap(file.fileno(), size)
    everywhere = all(all_gather(memory is not None))
    if descriptor != -1:
        os.close(descriptor)
    return memory if everywhere else None


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
        self.parameters, ranks = parameters, world_size()
        ends = np.cumsum([0, *(parameter.size for parameter in parameters)]).tolist()
        self.rows = np.frombuffer(memory, np.float32, ranks * ends[-1]).reshape(ranks, -1)
        # who has a gradient
        self.found = np.frombuffer(memory, np.bool_, offset=self.rows.nbytes).reshape(ranks, -1)
        # (index of the parameter, its elements, their place in a row); the ranks share these out in
        # turn
        self.pieces = [
            (
                index,
                slice(first - begin, min(first + PIECE, end) - begin),
                slice(first, min(first + PIECE, end)),
            )
            for index, (begin, end) in enumerate(itertools.pairwise(ends))
            for first in range(begin, end, PIECE)
        ]
        self.token = paddle.zeros([1])

    @paddle.no_grad()
    def average(self) -> None:
        """Gives the parameters the mean of the ranks' gradients. A missing gradient counts as
        zeros. Every rank has to call it.
        """
        own = rank()
        ranks = len(self.rows)
        row = self.rows[own]
        others = [other for other in range(ranks) if other != own]
        gradients = [_elements(parameter) for parameter in self.parameters]
        self.found[own] = [parameter.grad is not None for parameter in self.parameters]
        for turn, (index, elements, place) in enumerate(self.pieces):
            if turn % ranks != own:
                row[place] = gradients[index][elements]
        all_reduce_sum(self.token)
        anywhere = [any(column) for column in self.found.T]
        for index, elements, place in self.pieces[own::ranks]:
            mean = gradients[index][elements]
            for other in others:
                mean += self.rows[other, place]
            mean /= ranks
            row[place] = mean
        all_reduce_sum(self.token)
        for turn, (index, elements, place) in enumerate(self.pieces):
            if turn % ranks != own:
                gradients[index][elements] = self.rows[turn % ranks, place]
        for parameter, mean, known in zip(self.parameters, gradients, anywhere, strict=True):
            if known and parameter.grad is None:
                parameter.grad = paddle.to_tensor(mean.reshape(parameter.shape))


def _elements(parameter: paddle.Tensor) -> np.ndarray:
    """Returns a parameter's gradient as a flat array on the same memory; new zeros if it has none."""
    gradient: Any = parameter.grad
    if gradient is None:
        return np.zeros(parameter.size, np.float32)
    if not gradient.is_contiguous():  # of a transposed weight, with Paddle's stride kernels
        gradient = parameter.grad = gradient.contiguous()
    return np.frombuffer(
        (ctypes.c_float * gradient.size).from_address(gradient.data_ptr()), np.float32
    )
