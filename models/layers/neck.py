"""The layer between a model's features and its classifier."""

import paddle
from paddle import nn

from models.layers.attention import l2_normalize
from models.layers.linear import Linear, in_float32


class Neck(nn.Layer):
    """Projects pooled features, and scales them to length 1.

    It is the projection into CLIP's space of images and texts (Radford et al. 2021,
    arXiv:2103.00020). Behind it, the logits of a Linear are cosines times the lengths of its
    weights.

    Args:
        dim: channels of the features.
        out_dim: channels of the projection, which has no bias; None: no projection.
        normalised: whether the output has length 1.

    Shape: [B, dim] -> [B, out_dim or dim].
    """

    def __init__(self, dim: int, out_dim: int | None, normalised: bool) -> None:
        super().__init__()
        self.proj = Linear(dim, out_dim, bias_attr=False) if out_dim else nn.Identity()
        self.normalised = normalised

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = in_float32(self.proj(x))
        return l2_normalize(x) if self.normalised else x
