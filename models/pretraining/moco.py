"""The networks of MoCo v3 (Chen et al. 2021, arXiv:2104.02057).

An encoder, a projector and a predictor map a view of an image to a query. A copy of the encoder and
the projector follows them as a moving average, and maps the other view to a key. A query learns to
be near its own image's key, and far from those of other images.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from models.base import ImageModel
from models.layers import Linear
from models.layers.activations import ReLU
from models.layers.init import init_as_torch
from models.layers.sync_batch_norm import SyncBatchNorm1D
from models.pretraining.momentum import FrozenCopy
from models.pretraining.network import PretrainingNetwork, fix_positions
from weights.names import moco as names


class MoCo(PretrainingNetwork):
    """An encoder with a projector and a predictor, and its momentum encoder with a projector.

    The encoder's ``pos_embed``, if it is a ViT's parameter, becomes the fixed sine-cosine embedding
    of the paper. Batch norms within an encoder see both views of a batch at once.

    Args:
        encoder: any model with pooled features.
        hidden: hidden width of the projector and of the predictor.
        outputs: number of channels of queries and keys.

    Attributes:
        momentum: the momentum encoder with its projector, which have no gradients.
    """

    weight_names = names

    def __init__(self, encoder: ImageModel, hidden: int = 4096, outputs: int = 256) -> None:
        super().__init__(encoder, ("momentum.encoder", "encoder"))
        fix_positions(encoder, endpoint=True)
        width = encoder.head_widths.get("head", encoder.num_features)
        self.projector = _mlp([width, hidden, hidden, outputs])
        self.predictor = _mlp([outputs, hidden, outputs])
        self.momentum = FrozenCopy(self, ("encoder", "projector"))

    def forward(self, images: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns the queries and the keys of both views, [2, B, outputs] float32 each, of length 1.

        Keys have no gradient.

        Args:
            images: [B, 2, C, H, W], both views of each image, normalised.
        """
        images = images.flatten(0, 1)
        queries = self.predictor(self._projected(self, images))
        with paddle.no_grad():
            keys = self._projected(self.momentum, images)
        return F.normalize(queries, axis=-1), F.normalize(keys, axis=-1)

    def follow(self, momentum: float) -> None:
        """Moves the momentum encoder: momentum * itself + (1 - momentum) * the encoder."""
        self.momentum.follow(self, momentum)

    @staticmethod
    def _projected(owner: Any, images: paddle.Tensor) -> paddle.Tensor:
        """Returns the projections of the views by an encoder and a projector, [2, B, outputs].

        Args:
            owner: has both.
            images: [2 B, C, H, W]; the views of an image follow each other.
        """
        features = owner.encoder(images)
        views = features.reshape([-1, 2, features.shape[-1]]).transpose([1, 0, 2])
        return owner.projector(views)


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    """Returns Linears without biases, each followed by a batch norm, with ReLU between them. The
    last batch norm has no scale and no shift.

    Args:
        widths: channels of the input and of each Linear's output.
    """
    layers: list[nn.Layer] = []
    last = len(widths) - 2
    for index, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(Linear(inputs, outputs, bias_attr=False))
        layers.append(SyncBatchNorm1D(outputs, affine=index < last))
        if index < last:
            layers.append(ReLU())
    mlp = nn.Sequential(*layers)
    mlp.apply(init_as_torch)
    return mlp
