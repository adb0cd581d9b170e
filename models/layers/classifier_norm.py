"""The batch norm before a classifier."""

import paddle
from paddle import nn

from errors import InputError


class ClassifierNorm(nn.Layer):
    """Batch norm of what a classifier reads, [B, C], without scale and shift; each process's images
    by themselves.

    It is PyTorch's ``BatchNorm1d(C, affine=False, eps=1e-6)``, of plain operators: Paddle Inference
    crashes on a batch norm that has no scale.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self._momentum = 0.9
        self._epsilon = 1e-6
        self.register_buffer("_mean", paddle.zeros([num_features]))
        self.register_buffer("_variance", paddle.ones([num_features]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Normalises by channel; in training by the batch's own statistics, which are taken in.

        Raises:
            InputError: in training, when there is one image.
        """
        mean = self._mean
        variance = self._variance
        if self.training:
            x = x.astype(mean.dtype)
            mean = x.mean(axis=0)
            variance = x.var(axis=0, unbiased=False)
            self._take_in(mean, variance, x.shape[0])
        return (x - mean) * paddle.rsqrt(variance + self._epsilon)

    @paddle.no_grad()
    def _take_in(self, mean: paddle.Tensor, variance: paddle.Tensor, count: int) -> None:
        if count == 1:
            raise InputError(
                "HEAD_BATCH_NORM got a batch of 1 image in training, expected two or more: take a larger"
                " DATA.BATCH_SIZE; if it is an epoch's last batch, DATA.DROP_LAST True"
            )
        paddle.assign(self._mean.lerp(mean, 1 - self._momentum), self._mean)
        paddle.assign(
            self._variance.lerp(variance * (count / (count - 1)), 1 - self._momentum),
            self._variance,
        )
