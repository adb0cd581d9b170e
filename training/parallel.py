"""How the processes of a run train one model: DIST.ENGINE. Other packages see only a network and an optimizer.

"data_parallel" is ``paddle.DataParallel``; "fleet" is ``paddle.distributed.fleet``, whose options are DIST.STRATEGY.
One process trains alike with both, wrapped in neither.
"""

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.utils.log_util import set_log_level

from errors import InputError
from launch import fence
from models.layers.batch_norm import synchronise
from options import Configuration
from training.shared_gradients import share_gradients
from utils import all_gather, rank, to_device, world_size

UNDER_WAY = 2  # buckets that travel at a time: what they take of memory is bounded
PIECE = 8 << 20  # elements of a state's piece


def init(config: Configuration) -> None:
    """Joins this process to the run's others, which its launcher's environment names."""
    if world_size() == 1:
        return
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():  # Paddle's banner; groups of others
        warnings.simplefilter("ignore")
        fence.wait_for_store()
        dist.init_parallel_env()
        if config.DIST.ENGINE == "fleet":
            set_log_level("ERROR")
            with _groups_of_gloo() if dist.get_backend() == "GLOO" else contextlib.nullcontext():
                fleet.init(is_collective=True, strategy=_strategy(config), log_level="ERROR")
    all_gather(None)  # every rank is connected
    fence.shut_store()


@contextlib.contextmanager
def _groups_of_gloo() -> Iterator[None]:
    """Lets fleet have the run's own group wherever it wants one of all ranks.

    With three or more, gloo often can't connect a further group ("Connection refused", in Paddle 2.6 and 3.3).
    """
    new_group, everyone = dist.new_group, list(range(world_size()))
    dist.new_group = lambda ranks, **options: (
        dist.get_group() if sorted(ranks) == everyone else new_group(ranks, **options)
    )
    try:
        yield
    finally:
        dist.new_group = new_group


def _strategy(config: Configuration) -> fleet.DistributedStrategy:
    """What fleet itself carries out of DIST.STRATEGY."""
    options, strategy = config.DIST.STRATEGY, fleet.DistributedStrategy()
    strategy.fuse_grad_size_in_MB = options.fuse_grad_size_in_MB
    strategy.find_unused_parameters = options.find_unused_parameters
    if options.sharding:
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": world_size()}
    return strategy


def wrap_model(config: Configuration, model: nn.Layer) -> nn.Layer:
    """Returns the network to train: its parameters are rank 0's; what is frozen has to be so already.

    Raises:
        InputError: TRAIN.SYNC_BN can't be had.
    """
    if world_size() == 1:
        return model
    if config.TRAIN.SYNC_BN:
        synchronise(model)
    if config.DIST.ENGINE == "fleet":
        return fleet.distributed_model(model)
    network: Any = paddle.DataParallel(model)
    network.shared = share_gradients([parameter for parameter in model.parameters() if not parameter.stop_gradient])
    network.grad_need_sync = network.shared is None
    return network


def without_sync(network: nn.Layer, optimizer: Any) -> contextlib.AbstractContextManager:
    """Returns the context of a backward pass that no update follows: gradients stay local."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.accumulating()
    return network.no_sync() if isinstance(network, paddle.DataParallel) else contextlib.nullcontext()


def wrap_optimizer(config: Configuration, optimizer: paddle.optimizer.Optimizer) -> Any:
    """Returns the optimizer to train with, which has a ``paddle.optimizer.Optimizer``'s methods.

    Raises:
        InputError: there are more processes than parameters to share out.
    """
    if world_size() == 1 or config.DIST.ENGINE != "fleet":
        return optimizer
    if config.DIST.STRATEGY.sharding:
        options = config.DIST.STRATEGY
        return ShardedOptimizer(optimizer, options.sharding_configs.stage, options.fuse_grad_size_in_MB)
    return fleet.distributed_optimizer(optimizer)


class _Bucket:
    """Parameters of one owner and one type, whose gradients, and then values, travel as one flat tensor.

    Every rank makes the same buckets, and each travels at each turn: a gradient that a rank hasn't got counts as zeros.
    Behind the gradients travels, for each, on how many ranks there is one.

    Attributes:
        waiting: names of parameters whose gradients the backward pass hasn't given yet.
    """

    def __init__(self, owner: int, parameters: list[paddle.Tensor]) -> None:
        self.owner, self.parameters, self.own = owner, parameters, owner == rank()
        self.sizes, self.dtype = [parameter.size for parameter in parameters], parameters[0].dtype
        self.flat: Any = None
        self.task: Any = None
        self.expect()

    def expect(self) -> None:
        """Begins a backward pass."""
        self.waiting = {parameter.name for parameter in self.parameters}

    def begin_reduce(self) -> None:
        """Sends the gradients to the owner; elsewhere they are let go."""
        gradients = [parameter.grad for parameter in self.parameters]
        there = [gradient is not None for gradient in gradients]
        pieces = [
            paddle.zeros([size], self.dtype) if gradient is None else gradient.reshape([-1])
            for gradient, size in zip(gradients, self.sizes, strict=True)
        ]
        # Made on the device, but in the odd case.
        counts = paddle.ones([len(there)], self.dtype) if all(there) else paddle.to_tensor(there).astype(self.dtype)
        self.flat = paddle.concat([*pieces, counts])
        self.task = dist.reduce(self.flat, self.owner, sync_op=False)
        if not self.own:
            for parameter in self.parameters:
                parameter.clear_gradient(False)  # by position: Paddle ignores the keyword set_to_zero

    def end_reduce(self, scale: float) -> None:
        """Gives the owner's parameters the sum of the ranks' gradients, times ``scale``; none, if no rank has one."""
        self.task.wait()
        if self.own:
            *pieces, counts = paddle.split(self.flat, [*self.sizes, len(self.sizes)])
            absent = [parameter.grad is None for parameter in self.parameters]
            # Waited for in the odd case alone: a gradient that is here counts already.
            found = counts.astype("float32").numpy() > 0 if any(absent) else [True] * len(absent)
            for parameter, piece, new, known in zip(self.parameters, pieces, absent, found, strict=True):
                if known:
                    piece = piece.reshape(parameter.shape).scale_(scale)
                    if new:
                        parameter.grad = piece
                    else:
                        paddle.assign(piece, parameter.grad)
        self.flat = self.task = None

    def begin_send(self) -> None:
        """Sends the owner's values to all."""
        if self.own:
            self.flat = paddle.concat([parameter.reshape([-1]) for parameter in self.parameters])
        else:
            self.flat = paddle.empty([sum(self.sizes)], self.dtype)
        self.task = dist.broadcast(self.flat, self.owner, sync_op=False)

    def end_send(self) -> None:
        """Gives the others' parameters the owner's values."""
        self.task.wait()
        if not self.own:
            for parameter, piece in zip(self.parameters, paddle.split(self.flat, self.sizes), strict=True):
                paddle.assign(piece.reshape(parameter.shape), parameter)
        self.flat = self.task = None


def _buckets(parameters: list[paddle.Tensor], owners: dict[str, int], megabytes: float) -> list[_Bucket]:
    """Returns the buckets of up to ``megabytes`` (or one larger parameter) as a backward pass fills them: parameters
    from the last to the first, each bucket at the place of its last one to come.
    """
    filling: dict[Any, list[int]] = {}
    full = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        members = filling.setdefault((owners[parameter.name], parameter.dtype), [])
        held = sum(parameters[other].size for other in [*members, index]) * parameter.element_size()
        if members and held > megabytes * 2**20:
            full.append(members.copy())
            members.clear()
        members.append(index)
    ordered = sorted([*full, *filling.values()], key=min, reverse=True)
    return [_Bucket(owners[parameters[m[0]].name], [parameters[index] for index in m]) for m in ordered]


class ShardedOptimizer:
    """An optimizer whose state is shared out over the ranks: ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).

    Each parameter has one rank that owns it, by the sizes, as fleet's ``DygraphShardingOptimizer`` shares them out.
    Gradients are averaged there and let go elsewhere, the owner alone updates, and sends the parameter to all. Stage 1
    brings gradients together before an update. Stage 2 does within the backward pass (as ``group_sharded_parallel``
    does, which takes no CPU): no rank then holds all of them.

    Gradients and values travel in buckets, beside the computation: at most ``UNDER_WAY`` at a time. Their order is the
    same on all ranks, in whatever order gradients come: a bucket waits for those before it. What a backward pass has
    left out travels when it has ended.

    fleet's own step reduces within it, where norms are known and clipping is done already, and takes no regularizers.

    Args:
        optimizer: over the parameters that train; every kind that updates a parameter by its own gradient.
        stage: 1 or 2.
        megabytes: of a bucket, at most, unless one parameter is larger.

    Raises:
        InputError: there are more processes than parameters.
    """

    def __init__(self, optimizer: paddle.optimizer.Optimizer, stage: int, megabytes: float = 32) -> None:
        self.parameters: Any = optimizer._parameter_list
        self.stage = stage
        if len(self.parameters) < world_size():
            raise InputError(
                f"DIST.STRATEGY.sharding: {world_size()} processes, but only {len(self.parameters)} parameters train;"
                " lower -ngpus, or leave sharding out"
            )
        with warnings.catch_warnings():  # of an option of NCCL's that isn't used
            warnings.simplefilter("ignore")
            sharded: Any = fleet.distributed_optimizer(optimizer)
        shares = sharded._rank2params
        self.inner = optimizer  # it has this rank's share alone, now
        self.sizes = [sum(parameter.size for parameter in share) for share in shares.values()]
        owners = {parameter.name: owner for owner, share in shares.items() for parameter in share}
        self.buckets = _buckets(self.parameters, owners, megabytes)
        self.begun, self.ended, self.scale, self.twice = 0, 0, 1 / world_size(), ""
        if stage == 2:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter._register_backward_hook(functools.partial(self._collect, bucket, parameter.name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @paddle.no_grad()
    def _collect(self, bucket: _Bucket, name: str) -> None:
        """Takes note of a gradient, and sends the buckets whose turn has come."""
        if name not in bucket.waiting:  # its bucket may be gone; from a hook, Paddle would make a SystemError of it
            self.twice = name
        bucket.waiting.discard(name)
        while self.begun < len(self.buckets) and not self.buckets[self.begun].waiting:
            self._reduce_next()

    def _reduce_next(self) -> None:
        if self.begun - self.ended == UNDER_WAY:
            self._end_oldest()
        self.buckets[self.begun].begin_reduce()
        self.begun += 1

    def _end_oldest(self) -> None:
        self.buckets[self.ended].end_reduce(self.scale)
        self.ended += 1

    @paddle.no_grad()
    def reduce_gradients(self) -> None:
        """Leaves each rank the ranks' mean gradients of its own parameters, and no others."""
        if self.twice:
            raise RuntimeError(
                f"{self.twice} had two gradients before an update: stage 2 takes one, but for passes within"
                " accumulating(); with MODEL.RECOMPUTE, what several blocks share needs stage 1"
            )
        while self.begun < len(self.buckets):
            self._reduce_next()
        while self.ended < len(self.buckets):
            self._end_oldest()
        self.begun = self.ended = 0
        for bucket in self.buckets:
            bucket.expect()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Returns the context of a backward pass that no update follows: stage 2 leaves the owners the sums so far."""
        self.scale = 1.0
        yield
        if self.stage == 2:
            self.reduce_gradients()
        self.scale = 1 / world_size()

    @paddle.no_grad()
    def step(self) -> None:
        """Updates this rank's own parameters, and takes the others' from their owners."""
        self.inner.step()
        for place, bucket in enumerate(self.buckets):
            if place >= UNDER_WAY:
                self.buckets[place - UNDER_WAY].end_send()
            bucket.begin_send()
        for bucket in self.buckets[-UNDER_WAY:]:
            bucket.end_send()


def reduce_gradients(network: nn.Layer, optimizer: Any) -> None:
    """Reduces the gradients that the backward pass left local: a ``ShardedOptimizer``'s, or in shared memory."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.reduce_gradients()
    elif shared := getattr(network, "shared", None):
        shared.average()


def others_state(optimizer: Any, state: dict[str, paddle.Tensor]) -> dict[str, np.ndarray]:
    """Returns on rank 0 the other ranks' shares of the state, elsewhere nothing; every rank calls it with its own.

    Shares travel in flat pieces, to every rank: with more than two, gloo loses messages from one to another.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        return {}
    arrays = {}
    shares = all_gather({key: (tensor.shape, tensor.dtype) for key, tensor in state.items()})
    for owner, share in enumerate(shares[1:], start=1):
        for keys in _pieces(share):
            sizes = [math.prod(share[key][0]) for key in keys]
            if owner == rank():
                flat = paddle.concat([to_device(state[key]).reshape([-1]) for key in keys])
            else:
                flat = paddle.empty([sum(sizes)], share[keys[0]][1])
            dist.broadcast(flat, owner)
            if rank() == 0:
                for key, part in zip(keys, np.split(flat.numpy(), np.cumsum(sizes)[:-1]), strict=True):
                    arrays[key] = part.reshape(share[key][0])
    return arrays


def _pieces(share: dict[str, tuple[list[int], Any]]) -> Iterator[list[str]]:
    """Yields keys of one type, of up to ``PIECE`` elements together (or a larger tensor by itself)."""
    for dtype in dict.fromkeys(dtype for _, dtype in share.values()):
        keys, held = [], 0
        for key in [key for key in share if share[key][1] == dtype]:
            size = math.prod(share[key][0])
            if keys and held + size > PIECE:
                yield keys
                keys, held = [], 0
            keys.append(key)
            held += size
        yield keys
