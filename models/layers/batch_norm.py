"""Batch norm whose running statistics are those of PyTorch.

Paddle's layers differ in two ways. They hold the running statistics as parameters without a
gradient, which would be counted, frozen and averaged as parameters; here they are buffers. And
they divide the sum of squares by n for the running variance, where PyTorch divides by n - 1.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.layer.norm import _BatchNormBase

import ops
from errors import InputError
from models.layers.activations import gelu, relu, silu
from models.layers.classifier_norm import ClassifierNorm
from models.layers.sync_batch_norm import SyncBatchNorm1D
from utils import num_gpus, world_size

BATCH_NORMS = (nn.BatchNorm2D, nn.SyncBatchNorm, ClassifierNorm, SyncBatchNorm1D)
# The activations that the compiled batch norm can apply to its output, and its names for them.
FUSED = {None: "", relu: "relu", gelu: "gelu", silu: "silu"}
Act = Callable[[paddle.Tensor], paddle.Tensor]


class _Statistics(_BatchNormBase):
    """Mixin that gives Paddle's batch norms the statistics of PyTorch's."""

    weight: paddle.Tensor
    bias: paddle.Tensor

    def __init__(self, num_features: int, momentum: float = 0.9, epsilon: float = 1e-5) -> None:
        super().__init__(num_features, momentum, epsilon)
        for name in ("_mean", "_variance"):
            self.register_buffer(name, self._parameters.pop(name).detach())

    def forward(self, x: paddle.Tensor, act: Act | None = None) -> paddle.Tensor:
        """Returns x [B, C, H, W] normalised by channel, with ``act`` applied to it.

        In training x is normalised by its own statistics, which update the running ones.

        Raises:
            InputError: in training, if a channel has a single value.
        """
        out = self._normalise_and_update(x)
        return out if act is None else act(out)

    def _normalise_and_update(self, x: paddle.Tensor) -> paddle.Tensor:
        if not self.training or self._momentum == 1.0:
            return self._normalise(x, self._variance)
        count = _values_of_a_channel(x, self._processes())
        # Paddle's new running variance is momentum * v + (1 - momentum) * (the variance over n).
        # With v (n - 1) / n in the place of v, n / (n - 1) times the result is PyTorch's. The
        # scaled v is a copy, since the backward pass fails if its input has been changed.
        with paddle.no_grad():
            scaled = self._variance * ((count - 1) / count)
        out = self._normalise(x, scaled)
        with paddle.no_grad():
            paddle.assign(scaled * (count / (count - 1)), self._variance)
        return out

    def _parameters_alike(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns weight and bias, both with or both without a gradient.

        Paddle computes neither's gradient unless both need one. If only one does (only the bias
        with TRAIN.ADAPTER.NAME bitfit), a copy that needs a gradient stands for the other.
        """
        weight = self.weight
        bias = self.bias
        if weight.stop_gradient == bias.stop_gradient:
            return weight, bias
        if weight.stop_gradient:
            weight = weight.detach()
            weight.stop_gradient = False
        else:
            bias = bias.detach()
            bias.stop_gradient = False
        return weight, bias

    def _processes(self) -> int:
        """Returns the number of processes whose images the statistics cover."""
        raise NotImplementedError

    def _normalise(self, x: paddle.Tensor, variance: paddle.Tensor) -> paddle.Tensor:
        """Returns x normalised by its own statistics in training, else by the running mean and
        ``variance``.
        """
        raise NotImplementedError


class BatchNorm2D(_Statistics, nn.BatchNorm2D):
    """Batch norm over the images of one process, by the compiled operators (ops/) if they can be
    used.
    """

    def forward(self, x: paddle.Tensor, act: Act | None = None) -> paddle.Tensor:
        if not ops.usable(x) or act not in FUSED:
            # Not super(), which Paddle 2.6 can't trace.
            return _Statistics.forward(self, x, act)
        updates = self.training and self._momentum < 1
        if updates:
            # Raises an error if a channel has a single value.
            _values_of_a_channel(x, 1)
        out, mean, variance = ops.batch_norm(
            x,
            self.weight,
            self.bias,
            self._mean,
            self._variance,
            self.training,
            self._momentum,
            self._epsilon,
            FUSED[act],
        )
        if updates:
            with paddle.no_grad():
                paddle.assign(mean, self._mean)
                paddle.assign(variance, self._variance)
        return out

    def _processes(self) -> int:
        return 1

    def _normalise(self, x: paddle.Tensor, variance: paddle.Tensor) -> paddle.Tensor:
        weight, bias = self._parameters_alike()
        return F.batch_norm(
            x, self._mean, variance, weight, bias, self.training, self._momentum, self._epsilon
        )


class SyncBatchNorm(_Statistics, nn.SyncBatchNorm):
    """Batch norm over the images of all processes, which have equally many each.

    It is for GPUs, and hasn't been run on one.
    """

    def _processes(self) -> int:
        return world_size()

    def _normalise(self, x: paddle.Tensor, variance: paddle.Tensor) -> paddle.Tensor:
        # Paddle's layer takes no variance: a shallow copy of this one holds it.
        layer = copy(self)
        layer._buffers = {**self._buffers, "_variance": variance}
        weight, bias = self._parameters_alike()
        layer._parameters = {"weight": weight, "bias": bias}
        return nn.SyncBatchNorm.forward(layer, x)


# Traced, its shapes would become tensors.
@paddle.jit.not_to_static
def _values_of_a_channel(x: paddle.Tensor, processes: int) -> int | paddle.Tensor:
    """Returns the number of values that x [B, C, ...] has of each channel on all processes. In a
    graph for any image size it is a tensor.
    """
    if -1 in x.shape:
        return paddle.numel(x).astype("float32") * (processes / x.shape[1])
    count = math.prod(x.shape) // x.shape[1] * processes
    if count == 1:
        raise InputError(
            "batch norm got one value of a channel in training (1 image of 1 x 1), expected two"
            " or more: use a larger"
            " DATA.BATCH_SIZE or DATA.IMAGE_SIZE; if an epoch's last batch is 1 image, DATA.DROP_LAST True"
        )
    return count


@contextmanager
def keeping_statistics(layer: nn.Layer) -> Iterator[None]:
    """Within this context the batch norms of ``layer`` normalise by their batch without updating
    their running statistics.
    """
    norms = [norm for norm in layer.sublayers(include_self=True) if isinstance(norm, BATCH_NORMS)]
    momenta = [norm._momentum for norm in norms]
    for norm in norms:
        norm._momentum = 1.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm._momentum = momentum


def hold_frozen_statistics(model: nn.Layer) -> None:
    """Puts the batch norms of ``model`` with frozen parameters (TRAIN.FREEZE) into evaluation mode,
    so that their statistics stay as they are.

    A batch norm without parameters is frozen if its neighbouring layers are, which are the classifier.
    Those of a moving average (``models.pretraining.momentum``) continue: their weights change, too.
    """
    for parent in model.sublayers(include_self=True):
        for layer in parent.children():
            if not isinstance(layer, BATCH_NORMS) or getattr(layer, "is_average", False):
                continue
            parameters = layer.parameters() or parent.parameters()
            if all(parameter.stop_gradient for parameter in parameters):
                layer.eval()


def synchronise(model: nn.Layer) -> None:
    """Replaces every batch norm of ``model`` by a ``SyncBatchNorm`` with the same parameters and
    names. Its statistics cover the images of all processes.

    Raises:
        InputError: there is no batch norm, or no GPU: Paddle's kernel runs on GPUs only.
    """
    if not any(isinstance(layer, BatchNorm2D) for layer in model.sublayers()):
        raise InputError(
            f"TRAIN.SYNC_BN is True, but {type(model).__name__} has no batch norm; set it to False"
        )
    if not num_gpus():
        raise InputError(
            "TRAIN.SYNC_BN is True, but no GPU is visible, and Paddle's SyncBatchNorm needs"
            " GPUs; set it to False:"
            " each process then normalises by its own images, and their statistics are averaged at an epoch's end"
        )
    # Paddle's convert_sync_batchnorm expects the statistics among the parameters, as its own layers
    # have them.
    for parent in model.sublayers(include_self=True):
        for name, norm in parent.named_children():
            if isinstance(norm, BatchNorm2D):
                sync = SyncBatchNorm(norm._num_features, norm._momentum, norm._epsilon)
                sync.weight = norm.weight
                sync.bias = norm.bias
                sync._mean = norm._mean
                sync._variance = norm._variance
                # Those of an average continue, though their parameters have no gradients.
                sync.is_average = getattr(norm, "is_average", False)
                setattr(parent, name, sync)
