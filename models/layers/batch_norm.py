"""Batch norm's statistics."""

from collections.abc import Iterator
from contextlib import contextmanager

from paddle import nn

from errors import InputError
from models.layers.classifier_norm import ClassifierNorm
from utils import num_gpus

BATCH_NORMS = (nn.BatchNorm2D, nn.SyncBatchNorm, ClassifierNorm)


def statistics_as_buffers(layer: nn.Layer) -> None:
    """Makes a batch norm's running mean and variance buffers, as PyTorch's are; leaves other layers alone.

    Paddle holds them as parameters that want no gradient: they would be counted, frozen and averaged as such.
    """
    if isinstance(layer, BATCH_NORMS):
        for name in ("_mean", "_variance"):
            layer.register_buffer(name, layer._parameters.pop(name).detach())


@contextmanager
def statistics_kept(layer: nn.Layer) -> Iterator[None]:
    """While it lasts, the batch norms of ``layer`` normalise by their batch without taking it into their statistics."""
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
    """Lets the batch norms of ``model`` whose parameters are frozen (TRAIN.FREEZE) normalise as in evaluation, by
    statistics that stay as they are. One without parameters is frozen with the layers beside it, the classifier.
    """
    for parent in model.sublayers(include_self=True):
        for layer in parent.children():
            parameters = layer.parameters() or parent.parameters()
            if isinstance(layer, BATCH_NORMS) and all(parameter.stop_gradient for parameter in parameters):
                layer.eval()


def synchronise(model: nn.Layer) -> None:
    """Makes every batch norm of ``model`` a ``paddle.nn.SyncBatchNorm``, whose statistics are of all processes' images,
    with the same parameters and names.

    Raises:
        InputError: there is no batch norm, or no GPU: Paddle's kernel runs on GPUs alone.
    """
    if not any(isinstance(layer, nn.BatchNorm2D) for layer in model.sublayers()):
        raise InputError(f"TRAIN.SYNC_BN is True, but {type(model).__name__} has no batch norm of images; set it False")
    if not num_gpus():
        raise InputError(
            "TRAIN.SYNC_BN is True, but no GPU is visible and Paddle's SyncBatchNorm runs on GPUs alone; set it False:"
            " each process then normalises by its own images, and their statistics are averaged at an epoch's end"
        )
    # Not convert_sync_batchnorm, which takes the statistics for parameters, as Paddle's own layers hold them.
    for parent in model.sublayers(include_self=True):
        for name, norm in parent.named_children():
            if isinstance(norm, nn.BatchNorm2D):
                ours = nn.SyncBatchNorm(norm._num_features, norm._momentum, norm._epsilon)
                statistics_as_buffers(ours)
                ours.weight, ours.bias, ours._mean, ours._variance = norm.weight, norm.bias, norm._mean, norm._variance
                setattr(parent, name, ours)
