"""How the processes of a run train one model: DIST.ENGINE, of which the other rooms see a network and an optimizer.

"data_parallel" is ``paddle.DataParallel``; "fleet" is ``paddle.distributed.fleet``, whose options are DIST.STRATEGY.
One process trains alike with both, wrapped in neither.
"""

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.utils.log_util import set_log_level
from yacs.config import CfgNode

from errors import InputError
from models.layers.batch_norm import synchronise
from utils import all_gather, rank, world_size


def init(config: CfgNode) -> None:
    """Joins this process to the run's others, which its launcher's environment names."""
    if world_size() == 1:
        return
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():  # Paddle's banner; groups of others
        warnings.simplefilter("ignore")
        dist.init_parallel_env()
        if config.DIST.ENGINE == "fleet":
            set_log_level("ERROR")
            with _groups_of_gloo() if dist.get_backend() == "GLOO" else contextlib.nullcontext():
                fleet.init(is_collective=True, strategy=_strategy(config), log_level="ERROR")


@contextlib.contextmanager
def _groups_of_gloo() -> Iterator[None]:
    """Lets fleet have the run's own group wherever it wants one of all ranks: of three or more, gloo often fails to
    connect in any further group ("Connection refused", in Paddle 2.6 and 3.3).
    """
    new_group, everyone = dist.new_group, list(range(world_size()))
    dist.new_group = lambda ranks, **options: (
        dist.get_group() if sorted(ranks) == everyone else new_group(ranks, **options)
    )
    try:
        yield
    finally:
        dist.new_group = new_group


def _strategy(config: CfgNode) -> fleet.DistributedStrategy:
    """What fleet itself carries out of DIST.STRATEGY; ``config_checks.carried_out`` has the rest."""
    options, strategy = config.DIST.STRATEGY, fleet.DistributedStrategy()
    for key in ("fuse_grad_size_in_MB", "last_comm_group_size_MB", "find_unused_parameters"):
        setattr(strategy, key, options[key])
    if options.sharding:
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": world_size()}
    return strategy


def wrap_model(config: CfgNode, model: nn.Layer) -> nn.Layer:
    """Returns the network to train: its parameters are rank 0's; what is frozen has to be so already.

    Raises:
        InputError: TRAIN.SYNC_BN can't be had.
    """
    if world_size() == 1:
        return model
    if config.TRAIN.SYNC_BN:
        synchronise(model)
    return fleet.distributed_model(model) if config.DIST.ENGINE == "fleet" else paddle.DataParallel(model)


def without_sync(network: nn.Layer) -> contextlib.AbstractContextManager:
    """The context of a backward pass that no update follows: ``paddle.DataParallel`` leaves the gradients local."""
    return network.no_sync() if isinstance(network, paddle.DataParallel) else contextlib.nullcontext()


def wrap_optimizer(config: CfgNode, optimizer: paddle.optimizer.Optimizer) -> Any:
    """Returns the optimizer to train with, which has a ``paddle.optimizer.Optimizer``'s methods.

    Raises:
        InputError: there are more processes than parameters to share out.
    """
    if world_size() == 1 or config.DIST.ENGINE != "fleet":
        return optimizer
    if config.DIST.STRATEGY.sharding:
        return ShardedOptimizer(optimizer, config.DIST.STRATEGY.sharding_configs.stage)
    return fleet.distributed_optimizer(optimizer)


class ShardedOptimizer:
    """An optimizer whose state is shared out over the ranks: ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).

    Each parameter has one rank that owns it, by the sizes, as fleet's ``DygraphShardingOptimizer`` shares them out.
    Gradients are averaged there and let go elsewhere, the owner alone updates, and sends the parameter to all. Stage 1
    brings gradients together before an update, stage 2 within the backward pass, each as soon as it is computed (as
    ``group_sharded_parallel`` does, which takes no CPU): no rank then holds all of them.

    fleet's own step reduces within it, where norms are known and clipping is done already, and takes no regularizers.

    Args:
        optimizer: over the parameters that train; every kind that updates a parameter by its own gradient.
        stage: 1 or 2.

    Raises:
        InputError: there are more processes than parameters.
    """

    def __init__(self, optimizer: paddle.optimizer.Optimizer, stage: int) -> None:
        self.parameters, self.stage = optimizer._parameter_list, stage
        if len(self.parameters) < world_size():
            raise InputError(
                f"DIST.STRATEGY.sharding: {world_size()} processes, but only {len(self.parameters)} parameters train;"
                " lower -ngpus, or leave sharding out"
            )
        with warnings.catch_warnings():  # of an option of NCCL's that isn't used
            warnings.simplefilter("ignore")
            shares = fleet.distributed_optimizer(optimizer)._rank2params
        self.inner, self.own = optimizer, shares[rank()]  # the optimizer has its share alone, now
        self.sizes = [sum(parameter.size for parameter in share) for share in shares.values()]
        self.owners = {parameter.name: owner for owner, share in shares.items() for parameter in share}
        if stage == 2:
            for parameter in self.parameters:
                parameter._register_backward_hook(functools.partial(self._collect, parameter))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @paddle.no_grad()
    def _collect(self, parameter: paddle.Tensor) -> None:
        owner = self.owners[parameter.name]
        dist.reduce(parameter.grad, owner)
        if owner != rank():
            parameter.clear_gradient(False)  # by position: Paddle ignores the keyword set_to_zero

    @paddle.no_grad()
    def reduce_gradients(self) -> None:
        """Leaves each rank the ranks' mean gradients of its own parameters, and no others."""
        if self.stage == 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    self._collect(parameter)
        for parameter in self.own:
            if parameter.grad is not None:
                parameter.grad.scale_(1 / world_size())

    @paddle.no_grad()
    def step(self) -> None:
        """Updates this rank's own parameters, and takes the others' from their owners."""
        self.inner.step()
        for task in [dist.broadcast(p, self.owners[p.name], sync_op=False) for p in self.parameters]:
            task.wait()


def reduce_gradients(optimizer: Any) -> None:
    """Brings together, before an update, what the backward pass hasn't: the gradients of a ``ShardedOptimizer``."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.reduce_gradients()


def whole_state(optimizer: Any, state: dict[str, paddle.Tensor]) -> dict[str, np.ndarray]:
    """Returns on rank 0 the state of all parameters, on other ranks nothing; every rank calls it with its own state.

    Shares travel one tensor at a time, to every rank: with more than two, gloo loses messages from one to another.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        return {key: tensor.numpy() for key, tensor in state.items()} if rank() == 0 else {}
    arrays = {}
    for owner, share in enumerate(all_gather({key: (tensor.shape, tensor.dtype) for key, tensor in state.items()})):
        for key, (shape, dtype) in share.items():
            tensor = state[key] if owner == rank() else paddle.empty(shape, dtype)
            if owner:
                dist.broadcast(tensor, owner)
            if rank() == 0:
                arrays[key] = tensor.numpy()
    return arrays
