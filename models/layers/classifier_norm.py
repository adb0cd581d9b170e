"""The batch norm before a classifier."""

import paddle
from paddle import nn

from errors import InputError


class ClassifierNorm(nn.Layer):
    """Batch norm of a classifier's input, without scale and shift, over the images of one process.

    It is PyTorch's ``BatchNorm1d(C, affine=False, eps=1e-6)``. It consists of plain operators,
    because Paddle Inference crashes on a batch norm without a scale.

    Shape: [B, C] -> [B, C].
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self._momentum = 0.9
        self._epsilon = 1e-6
        self.register_buffer("_mean", paddle.zeros([num_features]))
        self.register_buffer("_variance", paddle.ones([num_features]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns x normalised by channel.

        In training x is normalised by its own statistics, which update the running ones.

        Raises:
            InputError: in training, if there is one image only.
        """
        mean = self._mean
        variance = self._variance
        if self.training:
            x = x.astype(mean.dtype)
            mean = x.mean(axis=0)
            variance = x.var(axis=0, unbiased=False)
            self._update(mean, variance, x.shape[0])
        return (x - mean) * paddle.rsqrt(variance + self._epsilon)

    @paddle.no_grad()
    def _update(self, mean: paddle.Tensor, variance: paddle.Tensor, count: int) -> None:
        if count == 1:
            raise InputError(
                "HEAD_BATCH_NORM got a batch of 1 image in training, expected two or more: use a"
                " larger"
                " DATA.BATCH_SIZE; if it is an epoch's last batch, DATA.DROP_LAST True"
            )
        paddle.assign(self._mean.lerp(mean, 1 - self._momentum), self._mean)
        # The variance over n - 1, as in PyTorch.
        unbiased = variance * (count / (count - 1))
        paddle.assign(self._variance.lerp(unbiased, 1 - self._momentum), self._variance)
