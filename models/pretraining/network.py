"""``PretrainingNetwork``, the base class of the networks that train an encoder without labels."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel
from models.beit import Beit
from models.encoder_network import EncoderNetwork
from models.layers.positions import sincos_2d
from models.vit import VisionTransformer


class PretrainingNetwork(EncoderNetwork):
    """An encoder, and the layers that only its training needs (a decoder, heads, mask tokens).

    Args:
        encoder: a model without a classifier (NUM_CLASSES 0).
        encoders: names of the models in the network that start from a model's weights: ``encoder``,
            and a teacher's or a moving average's. The last one is what the network is trained for:
            it is probed, and becomes the model of other tasks.
    """

    # Masks and views are made for images of one size.
    min_image_size: int | None = None

    def __init__(self, encoder: ImageModel, encoders: tuple[str, ...] = ("encoder",)) -> None:
        _check_options(encoder)
        super().__init__(encoder, encoders)

    @property
    def input_sizes(self) -> str:
        """The sizes of images that the network takes, in words."""
        return "images of {} x {}".format(*self.image_size)


def _check_options(encoder: ImageModel) -> None:
    """Refuses options of the encoder that no pre-training can use.

    Raises:
        InputError: PATCH_DROP, or GLOBAL_POOL map, whose weights would stay as they are.
    """
    rate = getattr(getattr(encoder, "patch_drop", None), "drop_prob", 0.0)
    if rate:
        raise InputError(
            f"MODEL.PATCH_DROP is {rate:g}, expected 0, because the model needs each patch that"
            " isn't"
            " masked"
        )
    if getattr(encoder, "attn_pool", None) is not None:
        raise InputError(
            "MODEL.GLOBAL_POOL is map, expected token or avg, because the weights of the pooling"
            " wouldn't be"
            " trained"
        )


@paddle.no_grad()
def fix_positions(encoder: Any, endpoint: bool) -> None:
    """Sets the ``pos_embed`` of a ViT or a BEiT to the fixed sine-cosine embedding, which isn't
    trained. Tokens before the patches have the position 0.

    An encoder without such a parameter stays as it is.

    Args:
        endpoint: as of ``sincos_2d``.

    Raises:
        InputError: the channels aren't a multiple of 4.
    """
    if not isinstance(encoder, VisionTransformer | Beit) or "pos_embed" not in encoder._parameters:
        return
    positions: Any = encoder.pos_embed
    rows, columns = encoder.patch_embed.grid_size
    table = sincos_2d(rows, columns, encoder.num_features, endpoint=endpoint)
    prefix = np.zeros([1, encoder.pos_embed_prefix, encoder.num_features], np.float32)
    # The parameters of a static graph have no values yet (tools/list_models.py).
    if paddle.in_dynamic_mode():
        positions.set_value(np.concatenate([prefix, table], axis=1))
    positions.stop_gradient = True


def check_heads(width: int, heads: int) -> None:
    """Raises InputError if a decoder's channels aren't a multiple of its attention heads."""
    if width % heads:
        raise InputError(
            f"METHOD.DECODER_WIDTH {width} is not a multiple of METHOD.DECODER_HEADS {heads};"
            " choose one that is"
        )


@contextlib.contextmanager
def masked_patches(
    layer: nn.Layer, masked: paddle.Tensor, mask_token: paddle.Tensor
) -> Iterator[None]:
    """Replaces masked patches by the mask token in the outputs of a layer within the body.

    Args:
        layer: returns the patches [B, N, D].
        masked: [B, N], 1 where a patch is masked, else 0.
        mask_token: [1, 1, D].
    """

    def replace(_: Any, __: Any, patches: paddle.Tensor) -> paddle.Tensor:
        return replace_masked(patches, masked.unsqueeze(-1), mask_token)

    hook = layer.register_forward_post_hook(replace)
    try:
        yield
    finally:
        hook.remove()


def replace_masked(
    features: paddle.Tensor, masked: paddle.Tensor, mask_token: paddle.Tensor
) -> paddle.Tensor:
    """Returns the features with the mask token in place of the masked ones.

    Args:
        masked: 1 where a feature is masked, else 0; of a shape that is broadcast to the features',
            as that of ``mask_token``.
    """
    masked = masked.astype(features.dtype)
    return features * (1 - masked) + mask_token.astype(features.dtype) * masked


def masked_places(masked: paddle.Tensor, count: int) -> paddle.Tensor:
    """Returns ``count`` places of each sample, the masked ones first: [B, count] int64.

    Args:
        masked: [B, patches] of 0 and 1.
    """
    patches = masked.shape[1]
    # No two keys are equal, so that the order is defined.
    keys = masked.astype("int64") * patches - paddle.arange(patches)
    return paddle.topk(keys, count, axis=1)[1]


def at_places(features: paddle.Tensor, places: paddle.Tensor) -> paddle.Tensor:
    """Returns the features [B, N, D] at places [B, K]: [B, K, D]."""
    batch = paddle.arange(places.shape[0]).unsqueeze(1).expand_as(places)
    return paddle.gather_nd(features, paddle.stack([batch, places], axis=-1))


def enlarged(values: paddle.Tensor, side: int) -> paddle.Tensor:
    """Repeats each value along both sides: [B, rows, columns] -> [B, side * rows, side * columns]."""
    batch, rows, columns = values.shape
    values = values.reshape([batch, rows, 1, columns, 1]).expand([-1, -1, side, -1, side])
    return values.reshape([batch, rows * side, columns * side])


def patch_statistics(patches: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns the mean of each patch's pixels and their deviation, by which targets are normalised:
    [B, N, pixels] -> two of [B, N, 1].

    The variance is unbiased, as torch's.
    """
    mean = patches.mean(axis=-1, keepdim=True)
    centred = patches - mean
    variance = (centred * centred).sum(axis=-1, keepdim=True) / (patches.shape[-1] - 1)
    return mean, (variance + 1e-6).sqrt()
