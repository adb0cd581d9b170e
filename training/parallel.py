"""Training one model on several processes, by the engine that DIST.ENGINE names.

"data_parallel" is ``paddle.DataParallel``. "fleet" is ``paddle.distributed.fleet``, with the
options DIST.STRATEGY. A run of one process uses neither. Other packages see only a network and an
optimizer.
"""

import contextlib
import functools
import io
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.utils.log_util import set_log_level

from errors import InputError
from models.layers.batch_norm import synchronise
from settings.configuration import Configuration
from training.profiling import ALL_REDUCE, span
from training.sharded_parameters import ShardedBlocks
from training.shared_gradients import share_gradients
from utils import all_gather, rank, world_size

# The most buckets that are sent at the same time, which bounds their memory.
UNDER_WAY = 2


def init(config: Configuration) -> None:
    """Connects this process to the run's other processes, which environment variables name."""
    if world_size() == 1:
        return
    from launch import store

    # Paddle's banner and its warnings about groups aren't shown.
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.wait_for_store()
        dist.init_parallel_env()
        if config.DIST.ENGINE == "fleet":
            set_log_level("ERROR")
            by_gloo = dist.get_backend() == "GLOO"
            with _groups_of_gloo() if by_gloo else contextlib.nullcontext():
                fleet.init(is_collective=True, strategy=_strategy(config), log_level="ERROR")
    # After this, every rank is connected, and the store takes no more connections.
    all_gather(None)
    store.shut_store()


@contextlib.contextmanager
def _groups_of_gloo() -> Iterator[None]:
    """Gives fleet the run's own group whenever it wants a new group of all ranks.

    With three or more, gloo often can't connect a further group ("Connection refused", in Paddle
    2.6 and 3.3).
    """
    new_group = dist.new_group
    everyone = list(range(world_size()))

    def existing_group(ranks: list[int], **options: Any) -> Any:
        if sorted(ranks) == everyone:
            return dist.get_group()
        return new_group(ranks, **options)

    dist.new_group = existing_group
    try:
        yield
    finally:
        dist.new_group = new_group


def _strategy(config: Configuration) -> fleet.DistributedStrategy:
    """Returns the options of DIST.STRATEGY that fleet itself implements."""
    options = config.DIST.STRATEGY
    strategy = fleet.DistributedStrategy()
    strategy.fuse_grad_size_in_MB = options.fuse_grad_size_in_MB
    strategy.find_unused_parameters = options.find_unused_parameters
    if options.sharding:
        strategy.hybrid_configs = {
            "dp_degree": 1,
            "mp_degree": 1,
            "pp_degree": 1,
            "sharding_degree": world_size(),
        }
    return strategy


def wrap_model(config: Configuration, model: nn.Layer) -> nn.Layer:
    """Returns the network to train. Freeze parameters before this call.

    Paddle sends rank 0's values to all ranks here. For values that are loaded later, call
    ``broadcast_weights`` after all loading.

    Raises:
        InputError: TRAIN.SYNC_BN isn't possible here.
    """
    if world_size() == 1:
        return model
    if config.TRAIN.SYNC_BN:
        synchronise(model)
    if config.DIST.ENGINE == "fleet":
        return fleet.distributed_model(model)
    network: Any = paddle.DataParallel(model)
    network.shared = share_gradients(
        [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    )
    network.grad_need_sync = network.shared is None
    return network


@paddle.no_grad()
def broadcast_weights(model: nn.Layer, without: Collection[str] = ()) -> None:
    """Sends rank 0's values of the model's parameters and buffers to all ranks, in place.

    Args:
        without: names of tensors that keep each rank's own values.
    """
    if world_size() == 1:
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in without:
            dist.broadcast(tensor.detach(), 0)


def without_sync(network: nn.Layer, optimizer: Any) -> contextlib.AbstractContextManager:
    """Returns a context for a backward pass without an update after it: its gradients stay local."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.accumulating()
    if isinstance(network, paddle.DataParallel):
        return network.no_sync()
    return contextlib.nullcontext()


def wrap_optimizer(
    config: Configuration, optimizer: paddle.optimizer.Optimizer, model: nn.Layer | None = None
) -> Any:
    """Returns the optimizer to train with, which has a ``paddle.optimizer.Optimizer``'s methods.

    Args:
        model: not wrapped; stage 3 of sharding needs it.

    Raises:
        InputError: there are more processes than parameters to share out, or stage 3 doesn't know
            the model's blocks.
    """
    if world_size() == 1 or config.DIST.ENGINE != "fleet":
        return optimizer
    options = config.DIST.STRATEGY
    if not options.sharding:
        return fleet.distributed_optimizer(optimizer)
    stage = options.sharding_configs.stage
    blocks = _blocks(model) if stage == 3 else ()
    return ShardedOptimizer(optimizer, stage, options.fuse_grad_size_in_MB, blocks)


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer that ``wrap_optimizer`` was given.

    A wrapper has its methods. Attributes have to be set on itself.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.inner
    return getattr(optimizer, "_inner_opt", optimizer)


def _blocks(model: Any) -> list[nn.Layer]:
    """Returns a model's blocks, which it calls one after the other.

    Raises:
        InputError: the model isn't one sequence of blocks.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.LayerList):
        raise InputError(
            f"DIST.STRATEGY.sharding_configs.stage is 3, but {type(model).__name__} isn't one"
            " sequence of blocks; set it to 2"
        )
    return list(blocks)


class _Bucket:
    """Parameters of one owner and one data type, which are sent as one tensor.

    First their gradients are sent, and later their values. Every rank makes the same buckets, and
    sends each of them in each step. A gradient that a rank lacks is sent as zeros. After the
    gradients follows, for each parameter, the number of ranks that have its gradient.

    Attributes:
        waiting: names of the parameters whose gradients the backward pass hasn't computed yet.
    """

    def __init__(self, owner: int, parameters: list[paddle.Tensor]) -> None:
        self.owner = owner
        self.parameters = parameters
        # Whether this rank is the owner.
        self.own = owner == rank()
        self.sizes = [parameter.size for parameter in parameters]
        self.dtype = parameters[0].dtype
        self.flat: Any = None
        self.task: Any = None
        self.expect()

    def expect(self) -> None:
        """Prepares for a backward pass: no gradient is there yet."""
        self.waiting = {parameter.name for parameter in self.parameters}

    def begin_reduce(self) -> None:
        """Sends the gradients to the owner; the other ranks then free theirs."""
        gradients = [parameter.grad for parameter in self.parameters]
        present = [gradient is not None for gradient in gradients]
        pieces = [
            paddle.zeros([size], self.dtype) if gradient is None else gradient.reshape([-1])
            for gradient, size in zip(gradients, self.sizes, strict=True)
        ]
        if all(present):
            # This is made on the device.
            counts = paddle.ones([len(present)], self.dtype)
        else:
            counts = paddle.to_tensor(present).astype(self.dtype)
        self.flat = paddle.concat([*pieces, counts])
        self.task = dist.reduce(self.flat, self.owner, sync_op=False)
        if not self.own:
            for parameter in self.parameters:
                # False means set_to_zero, which Paddle ignores as a keyword.
                parameter.clear_gradient(False)

    def end_reduce(self, scale: float) -> None:
        """Sets the gradients of the owner's parameters to the ranks' sum, times ``scale``.

        A parameter without a gradient on any rank gets none.
        """
        self.task.wait()
        if self.own:
            *pieces, counts = paddle.split(self.flat, [*self.sizes, len(self.sizes)])
            absent = [parameter.grad is None for parameter in self.parameters]
            # The counts are read, which waits for the device, only if a gradient is missing here.
            # Otherwise all are known to exist.
            exists = [True] * len(absent)
            if any(absent):
                exists = counts.astype("float32").numpy() > 0
            for parameter, piece, is_absent, is_known in zip(
                self.parameters, pieces, absent, exists, strict=True
            ):
                if not is_known:
                    continue
                mean = piece.reshape(parameter.shape).scale_(scale)
                if is_absent:
                    parameter.grad = mean
                else:
                    paddle.assign(mean, parameter.grad)
        self.flat = None
        self.task = None

    def begin_send(self) -> None:
        """Sends the owner's values to all ranks."""
        if self.own:
            self.flat = paddle.concat([parameter.reshape([-1]) for parameter in self.parameters])
        else:
            self.flat = paddle.empty([sum(self.sizes)], self.dtype)
        self.task = dist.broadcast(self.flat, self.owner, sync_op=False)

    def end_send(self) -> None:
        """Sets the other ranks' parameters to the owner's values."""
        self.task.wait()
        if not self.own:
            pieces = paddle.split(self.flat, self.sizes)
            for parameter, piece in zip(self.parameters, pieces, strict=True):
                paddle.assign(piece.reshape(parameter.shape), parameter)
        self.flat = None
        self.task = None


def _buckets(
    parameters: list[paddle.Tensor], owners: dict[str, int], megabytes: float
) -> list[_Bucket]:
    """Returns the buckets in the order in which a backward pass completes them.

    It computes gradients from the last parameter to the first.

    Args:
        owners: each parameter's owner, by Paddle's name of the parameter.
        megabytes: the largest size of a bucket, unless one parameter is larger.
    """
    # Buckets as lists of indices of their parameters: those that may get more, by owner and data
    # type, and those that are full.
    filling: dict[Any, list[int]] = {}
    full = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        members = filling.setdefault((owners[parameter.name], parameter.dtype), [])
        elements = sum(parameters[other].size for other in [*members, index])
        if members and elements * parameter.element_size() > megabytes * 2**20:
            full.append(members.copy())
            members.clear()
        members.append(index)
    # A bucket is complete with the gradient of its first parameter.
    ordered = sorted([*full, *filling.values()], key=min, reverse=True)
    return [
        _Bucket(owners[parameters[members[0]].name], [parameters[index] for index in members])
        for members in ordered
    ]


class ShardedOptimizer:
    """An optimizer whose state is distributed over the ranks: ZeRO (Rajbhandari et al. 2020,
    arXiv:1910.02054).

    Each parameter has an owner, one of the ranks. fleet's ``DygraphShardingOptimizer`` chooses
    owners by the sizes. The owner gets the mean gradient, and the other ranks free theirs. Only the
    owner updates the parameter, and then sends its value to all. Stage 1 sends gradients before an
    update. Stage 2 sends them during the backward pass, so that no rank holds all of them.
    ``group_sharded_parallel`` does so, too, but not on CPUs.

    Gradients and values are sent in buckets, during the computation, at most ``UNDER_WAY`` at a
    time. Their order is the same on all ranks, in whatever order gradients are computed: a bucket
    waits for those before it. Gradients that a backward pass didn't compute are sent after it.

    fleet's own step would average gradients too late, after norms and clipping. It also accepts no
    regularizers.

    Args:
        optimizer: of the trained parameters. It has to update each parameter by that parameter's
            gradient only.
        stage: 1, 2 or 3.
        megabytes: the largest size of a bucket, unless one parameter is larger.
        blocks: with stage 3, the layers whose weights are shared out, too, in the order in which
            they are called.

    Raises:
        InputError: there are more processes than parameters.
    """

    def __init__(
        self,
        optimizer: paddle.optimizer.Optimizer,
        stage: int,
        megabytes: float = 32,
        blocks: Sequence[nn.Layer] = (),
    ) -> None:
        self.parameters: Any = optimizer._parameter_list
        self.stage = stage
        if len(self.parameters) < world_size():
            raise InputError(
                f"DIST.STRATEGY.sharding: {world_size()} processes, but only"
                f" {len(self.parameters)} trained parameters;"
                " lower -ngpus, or set DIST.STRATEGY.sharding to False"
            )
        # Paddle warns about an option of NCCL that isn't used.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sharded: Any = fleet.distributed_optimizer(optimizer)
        parameters_by_rank = sharded._rank2params
        # It now has only this rank's share of the parameters.
        self.inner = optimizer
        self.sizes = [sum(p.size for p in share) for share in parameters_by_rank.values()]
        owners = {p.name: owner for owner, share in parameters_by_rank.items() for p in share}
        # The parameters of blocks have buckets of their own, the others are on every rank.
        everywhere = self.parameters
        blocks_and_buckets = []
        for block in blocks:
            names = {parameter.name for parameter in block.parameters()}
            of_block = [parameter for parameter in everywhere if parameter.name in names]
            everywhere = [parameter for parameter in everywhere if parameter.name not in names]
            blocks_and_buckets.append((block, _buckets(of_block, owners, megabytes)))
        self.blocks = ShardedBlocks(blocks_and_buckets)
        self.buckets = _buckets(everywhere, owners, megabytes)
        # How many buckets' reductions were begun and ended, in this backward pass.
        self.begun = 0
        self.ended = 0
        # The factor on the sum of the ranks' gradients.
        self.scale = 1 / world_size()
        # A parameter that got two gradients before an update; "": none did.
        self.twice = ""
        if stage == 2:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter._register_backward_hook(
                        functools.partial(self._collect, bucket, parameter.name)
                    )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @paddle.no_grad()
    def _collect(self, bucket: _Bucket, name: str) -> None:
        """Records that a gradient is there, and sends the buckets that are complete and next."""
        # Its bucket may have been sent already. An error here would become a SystemError of Paddle,
        # so it is raised later.
        if name not in bucket.waiting:
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
        """Leaves on each rank the mean gradients of its own parameters, and no other gradients."""
        if self.twice:
            raise RuntimeError(
                f"{self.twice} received two gradients before an update, but stage 2 of sharding"
                " allows"
                " one (except within accumulating()); use stage 1 if MODEL.RECOMPUTE is on and"
                " several blocks share a parameter"
            )
        self.blocks.reduce(self.scale)
        while self.begun < len(self.buckets):
            self._reduce_next()
        while self.ended < len(self.buckets):
            self._end_oldest()
        self.begun = 0
        self.ended = 0
        for bucket in self.buckets:
            bucket.expect()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Returns a context for a backward pass without an update after it.

        From stage 2 on, the owners get the sums of the ranks' gradients and keep them.
        """
        self.scale = self.blocks.scale = 1.0
        yield
        if self.stage >= 2:
            self.reduce_gradients()
        self.scale = self.blocks.scale = 1 / world_size()

    @paddle.no_grad()
    def step(self) -> None:
        """Updates this rank's own parameters, and receives the others from their owners.

        Weights of blocks (stage 3) aren't sent here, but when they are needed.
        """
        self.inner.step()
        for place, bucket in enumerate(self.buckets):
            if place >= UNDER_WAY:
                self.buckets[place - UNDER_WAY].end_send()
            bucket.begin_send()
        for bucket in self.buckets[-UNDER_WAY:]:
            bucket.end_send()


def free_unowned_weights(optimizer: Any) -> None:
    """Frees the weights that other ranks own, with stage 3 of sharding. Call it after all loading."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.blocks.free_unowned_weights()


def gathered_weights(optimizer: Any) -> contextlib.AbstractContextManager:
    """Returns a context in which every rank holds all weights."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.blocks.gathered_weights()
    return contextlib.nullcontext()


def block_weights(optimizer: Any, keep: bool) -> dict[str, np.ndarray]:
    """Returns the weights that stage 3 of sharding shares out, by Paddle's names.

    Every rank calls it.

    Args:
        keep: whether this rank wants them; otherwise it gets {}.
    """
    return optimizer.blocks.arrays(keep) if isinstance(optimizer, ShardedOptimizer) else {}


def reduce_gradients(network: nn.Layer, optimizer: Any) -> None:
    """Averages the gradients that the backward pass didn't average.

    These are a ``ShardedOptimizer``'s, or those that are averaged in shared memory.
    """
    if isinstance(optimizer, ShardedOptimizer):
        with span(ALL_REDUCE):
            optimizer.reduce_gradients()
    elif shared := getattr(network, "shared", None):
        with span(ALL_REDUCE):
            shared.average()
