"""The sum of several outputs with weights that depend on the image, of ViP and CycleMLP."""

import paddle
from paddle.nn import functional as F

from models.layers.mlp import Mlp
from models.layers.scale import weighted_sum


class Reweight(Mlp):
    """The sum of three outputs, with weights by an MLP of their sum's mean over places.

    The weights are a softmax over the three, for each image and each channel.

    Args:
        dim: channels D. The MLP has a quarter of them between its layers.

    Shape: three times [B, N, D] -> [B, N, D].
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim // 4, out_dim=3 * dim)

    def forward(self, h: paddle.Tensor, w: paddle.Tensor, c: paddle.Tensor) -> paddle.Tensor:
        means = (h + w + c).mean(axis=1)
        scores = Mlp.forward(self, means).reshape([-1, h.shape[2], 3])
        weights = F.softmax(scores, axis=2).transpose([2, 0, 1])
        return weighted_sum([h, w, c], weights)
