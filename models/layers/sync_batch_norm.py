"""Batch norm of features over the images of all processes, on GPUs and CPUs."""

from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from errors import InputError
from models.layers.linear import in_float32
from utils import all_gather_tensor, all_reduce_mean, world_size


class SyncBatchNorm1D(nn.Layer):
    """Batch norm of each channel, by the statistics of the images of all processes.

    It is PyTorch's ``SyncBatchNorm`` of features, or its ``BatchNorm1d`` of the whole batch. Paddle's
    ``SyncBatchNorm`` runs on GPUs alone. Every process has the same number of images. An input may
    have several views of the images: each has statistics of its own, as if the layer were called
    with one view after the other.

    Shape: [V, B, C], or [B, C], float32 or half precision -> the same, float32.

    Args:
        num_features: C.
        affine: whether there are a scale and a shift.

    Raises:
        InputError: in training, if all processes together have one image.
    """

    def __init__(self, num_features: int, affine: bool = True) -> None:
        super().__init__()
        self._momentum = 0.9
        self._epsilon = 1e-5
        self.weight = None
        self.bias = None
        if affine:
            ones = nn.initializer.Constant(1.0)
            self.weight = self.create_parameter([num_features], default_initializer=ones)
            self.bias = self.create_parameter([num_features], is_bias=True)
        self.register_buffer("_mean", paddle.zeros([num_features]))
        self.register_buffer("_variance", paddle.ones([num_features]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = in_float32(x)
        if self.training:
            mean, variance = self._statistics(x)
            normalised = _Normalised.apply(x, mean, paddle.rsqrt(variance + self._epsilon))
        else:
            normalised = (x - self._mean) * paddle.rsqrt(self._variance + self._epsilon)
        if self.weight is None:
            return normalised
        return normalised * self.weight + self.bias

    @paddle.no_grad()
    def _statistics(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns the mean and the variance (over n) of each view, [V, 1, C] or [1, C], and updates
        the running ones.
        """
        count = x.shape[-2] * world_size()
        if count == 1:
            raise InputError(
                "batch norm got 1 image in training, expected two or more: use a larger"
                " DATA.BATCH_SIZE; if it is an epoch's last batch, DATA.DROP_LAST True"
            )
        own_mean = x.mean(axis=-2, keepdim=True)
        own_variance = x.var(axis=-2, unbiased=False, keepdim=True)
        # A sum of squares over the ranks would lose the digits of a variance that is small beside
        # the mean. The variance of all is the mean of the ranks' variances, and the variance of
        # their means.
        means, variances = all_gather_tensor(paddle.stack([own_mean, own_variance])[None]).unbind(1)
        mean = means.mean(axis=0)
        variance = variances.mean(axis=0) + means.var(axis=0, unbiased=False)
        if self._momentum < 1:
            self._update(mean, variance * (count / (count - 1)))
        return mean, variance

    def _update(self, mean: paddle.Tensor, variance: paddle.Tensor) -> None:
        """Updates the running statistics by those of one view after the other."""
        for running, of_views in ((self._mean, mean), (self._variance, variance)):
            new = running
            for of_view in of_views.reshape([-1, running.shape[0]]):
                new = new.lerp(of_view, 1 - self._momentum)
            paddle.assign(new, running)


class _Normalised(PyLayer):
    """(x - mean) * scale, where the mean and the scale are those of x on all processes.

    The gradient of x takes into account that both depend on x, on other processes, too.
    """

    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, mean: paddle.Tensor, scale: paddle.Tensor
    ) -> paddle.Tensor:
        normalised = (x - mean) * scale
        ctx.save_for_backward(normalised, scale)
        return normalised

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> Any:
        normalised, scale = ctx.saved_tensor()
        own_means = [part.mean(axis=-2, keepdim=True) for part in (grad, grad * normalised)]
        means: Any = all_reduce_mean(paddle.stack(own_means))
        mean, along = means.unbind(0)
        return (grad - mean - normalised * along) * scale, None, None
