"""Batch norm as PyTorch's: its statistics are buffers, and the running variance takes in n / (n -
1) of the batch's.

Paddle's layers hold the statistics as parameters that want no gradient: they would be counted,
frozen and averaged as such. And they take in the batch's variance over n values as it is, a smaller
one than PyTorch's.
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
from utils import num_gpus, world_size

BATCH_NORMS = (nn.BatchNorm2D, nn.SyncBatchNorm, ClassifierNorm)
# what a compiled batch norm computes after itself
FUSED = {None: "", relu: "relu", gelu: "gelu", silu: "silu"}
Act = Callable[[paddle.Tensor], paddle.Tensor]


class _Statistics(_BatchNormBase):
    """What makes a batch norm of Paddle's PyTorch's."""

    weight: paddle.Tensor
    bias: paddle.Tensor

    def __init__(self, num_features: int, momentum: float = 0.9, epsilon: float = 1e-5) -> None:
        super().__init__(num_features, momentum, epsilon)
        for name in ("_mean", "_variance"):
            self.register_buffer(name, self._parameters.pop(name).detach())

    def forward(self, x: paddle.Tensor, act: Act | None = None) -> paddle.Tensor:
        """Returns ``act`` of x [B, C, H, W] normalised by channel; in training by its statistics,
        which are taken in.

        Raises:
            InputError: in training, when a channel has one value.
        """
        out = self._normalise_and_take_in(x)
        return out if act is None else act(out)

    def _normalise_and_take_in(self, x: paddle.Tensor) -> paddle.Tensor:
        if not self.training or self._momentum == 1.0:
            return self._normalise(x, self._variance)
        count = _values_of_a_channel(x, self._processes())
        # Paddle adds (1 - momentum) x the variance over n to momentum x v. With v (n - 1) / n in
        # v's place, n / (n - 1) of the sum is PyTorch's. The gradient keeps what was handed in, and
        # fails if that is changed: it gets a copy.
        with paddle.no_grad():
            scaled = self._variance * ((count - 1) / count)
        out = self._normalise(x, scaled)
        with paddle.no_grad():
            paddle.assign(scaled * (count / (count - 1)), self._variance)
        return out

    def _parameters_alike(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns weight and bias. Paddle gives neither a gradient unless both want one
        (TRAIN.ADAPTER.NAME bitfit: the bias alone does), so beside one that does, a copy of the
        other wants one, too.
        """
        if self.weight.stop_gradient == self.bias.stop_gradient:
            return self.weight, self.bias
        weight, bias = (
            each.detach() if each.stop_gradient else each for each in (self.weight, self.bias)
        )
        weight.stop_gradient = bias.stop_gradient = False
        return weight, bias

    def _processes(self) -> int:
        """Whose images the statistics are of."""
        raise NotImplementedError

    def _normalise(self, x: paddle.Tensor, variance: paddle.Tensor) -> paddle.Tensor:
        """Returns x normalised by its own statistics in training, else by the mean held and
        ``variance``.
        """
        raise NotImplementedError


class BatchNorm2D(_Statistics, nn.BatchNorm2D):
    """Batch norm over the images of one process, by the compiled operators (ops/) where there are
    any.
    """

    def forward(self, x: paddle.Tensor, act: Act | None = None) -> paddle.Tensor:
        if not ops.usable(x) or act not in FUSED:
            return _Statistics.forward(self, x, act)  # (Paddle 2.6 traces no super())
        takes_in = self.training and self._momentum < 1
        if takes_in:
            _values_of_a_channel(x, 1)
        statistics = self._mean, self._variance
        out, *taken_in = ops.batch_norm(
            x,
            self.weight,
            self.bias,
            *statistics,
            self.training,
            self._momentum,
            self._epsilon,
            FUSED[act],
        )
        if takes_in:
            with paddle.no_grad():
                for new, own in zip(taken_in, statistics, strict=True):
                    paddle.assign(new, own)
        return out

    def _processes(self) -> int:
        return 1

    def _normalise(self, x: paddle.Tensor, variance: paddle.Tensor) -> paddle.Tensor:
        weight, bias = self._parameters_alike()
        return F.batch_norm(
            x, self._mean, variance, weight, bias, self.training, self._momentum, self._epsilon
        )


class SyncBatchNorm(_Statistics, nn.SyncBatchNorm):
    """Batch norm over the images of all processes, of equally many each. For GPUs: not run on one."""

    def _processes(self) -> int:
        return world_size()

    def _normalise(self, x: paddle.Tensor, variance: paddle.Tensor) -> paddle.Tensor:
        shown = copy(self)  # the layer reads its own variance alone
        shown._buffers = {**self._buffers, "_variance": variance}
        weight, bias = self._parameters_alike()
        shown._parameters = {"weight": weight, "bias": bias}
        return nn.SyncBatchNorm.forward(shown, x)


@paddle.jit.not_to_static  # there shapes would become tensors
def _values_of_a_channel(x: paddle.Tensor, processes: int) -> int | paddle.Tensor:
    """Returns how many values x [B, C, ...] has by channel on all processes: a tensor in a graph
    for any size.
    """
    if -1 in x.shape:
        return paddle.numel(x).astype("float32") * (processes / x.shape[1])
    count = math.prod(x.shape) // x.shape[1] * processes
    if count == 1:
        raise InputError(
            "batch norm got one value of a channel in training (1 image of 1 x 1), expected two or more: take a larger"
            " DATA.BATCH_SIZE or DATA.IMAGE_SIZE; if an epoch's last batch is 1 image, DATA.DROP_LAST True"
        )
    return count


@contextmanager
def keeping_statistics(layer: nn.Layer) -> Iterator[None]:
    """While it lasts, the batch norms of ``layer`` normalise by their batch without taking it into
    their statistics.
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
    """Lets the batch norms of ``model`` whose parameters are frozen (TRAIN.FREEZE) normalise as in
    evaluation, by statistics that stay as they are. One without parameters is frozen with the
    layers beside it, the classifier.
    """
    for parent in model.sublayers(include_self=True):
        for layer in parent.children():
            parameters = layer.parameters() or parent.parameters()
            if isinstance(layer, BATCH_NORMS) and all(
                parameter.stop_gradient for parameter in parameters
            ):
                layer.eval()


def synchronise(model: nn.Layer) -> None:
    """Makes every batch norm of ``model`` a ``SyncBatchNorm``, whose statistics are of all
    processes' images, with the same parameters and names.

    Raises:
        InputError: there is no batch norm, or no GPU: Paddle's kernel runs on GPUs alone.
    """
    if not any(isinstance(layer, BatchNorm2D) for layer in model.sublayers()):
        raise InputError(
            f"TRAIN.SYNC_BN is True, but {type(model).__name__} has no batch norm of images; set it False"
        )
    if not num_gpus():
        raise InputError(
            "TRAIN.SYNC_BN is True, but no GPU is visible and Paddle's SyncBatchNorm runs on GPUs alone; set it False:"
            " each process then normalises by its own images, and their statistics are averaged at an epoch's end"
        )
    # Not convert_sync_batchnorm, which takes the statistics for parameters, as Paddle's own layers
    # hold them.
    for parent in model.sublayers(include_self=True):
        for name, norm in parent.named_children():
            if isinstance(norm, BatchNorm2D):
                ours = SyncBatchNorm(norm._num_features, norm._momentum, norm._epsilon)
                ours.weight = norm.weight
                ours.bias = norm.bias
                ours._mean = norm._mean
                ours._variance = norm._variance
                setattr(parent, name, ours)
