"""``Head``, the base class of what makes a class for each pixel from an encoder's intermediates.

    @heads.register("linear")
    class LinearHead(Head):
        def __init__(self, maps: Maps, num_classes: int, *, batch_norm: bool = True) -> None:

HEAD.NAME takes the name then. The keyword arguments of the constructor are keys in the section
HEAD.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal

import ops
from models.base import ImageModel
from models.heads.graph_resize import resized_in_graph
from models.layers.init import init_convolution
from models.layers.resize import interpolate
from weights.layout import sublayer


class Maps(NamedTuple):
    """The intermediates of an encoder that a head reads, the shallowest first.

    Attributes:
        channels: of each map.
        reductions: how many pixels along a side make one place of each map.
        image_size: (height, width) of the images that the model is trained on, or of its windows.
        prefix_tokens: how many tokens, such as a class token, come with each map.
    """

    channels: list[int]
    reductions: list[int]
    image_size: tuple[int, int]
    prefix_tokens: int = 0


class Head(nn.Layer):
    """Makes logits of the classes for each place from an encoder's intermediates.

    Attributes:
        indices: the encoder's intermediates that are read if HEAD.INDICES doesn't say which; None:
            ``quarters``.
        last_norm: whether the encoder's last norm is applied to them, where it fits.
        reads_prefix: whether each intermediate comes as (map, prefix tokens).
        align_corners: how the logits are resized to the images' size.
        runs_encoder: whether ``features`` runs the encoder itself, so that HEAD.INDICES would do
            nothing.
        one_size: whether the head takes maps of images of IMAGE_SIZE alone.
        has_loss: whether the head's training has a loss of its own, ``loss``.
    """

    indices: Sequence[int] | None = (-1,)
    last_norm = False
    reads_prefix = False
    align_corners = False
    runs_encoder = False
    one_size = False
    has_loss = False

    def check_encoder(self, encoder: ImageModel) -> None:
        """Checks that the head can read the encoder.

        Raises:
            InputError: it can't.
        """

    def features(self, encoder: ImageModel, images: paddle.Tensor, indices: Sequence[int]) -> Any:
        """Returns what ``forward`` reads of an encoder: its maps [B, channels, rows, columns], the
        shallowest first.

        Args:
            images: [B, C, H, W].
            indices: of the encoder's intermediates.
        """
        return encoder.forward_intermediates(
            images,
            indices,
            norm=self.last_norm,
            stop_early=True,
            intermediates_only=True,
            return_prefix_tokens=self.reads_prefix,
        )

    def forward(self, features: Any) -> Any:
        """Returns logits [B, num_classes, rows, columns].

        In training it may return a list: these logits, and then those of auxiliary heads.

        Args:
            features: what ``features`` returned.
        """
        raise NotImplementedError

    def loss(self, outputs: Any, mask: paddle.Tensor, ignored: int) -> paddle.Tensor:
        """Returns the loss of each image, [B] float32, of a head that has one (``has_loss``).

        Args:
            outputs: what ``forward`` returned in training.
            mask: [B, H, W], the pixels' classes.
            ignored: the index of pixels without a class.
        """
        raise NotImplementedError

    def after_update(self, share: float) -> None:
        """Updates what a schedule changes (``training.task.Task.after_update``).

        Args:
            share: of the run's updates, how many were made before, from 0 to below 1.
        """

    def classifier_names(self) -> tuple[str, ...]:
        """Returns the names of the layers and parameters that depend on the number of classes."""
        return ("classifier",)

    def no_weight_decay(self) -> set[str]:
        """Returns the names of parameters without weight decay, besides biases and norms."""
        return set()


def quarters(count: int) -> list[int]:
    """Returns the intermediates at the end of each quarter of an encoder.

    Of an encoder with stages they are its last four.

    Args:
        count: how many intermediates the encoder has.
    """
    if count < 8:
        return list(range(max(0, count - 4), count))
    return [count * quarter // 4 - 1 for quarter in (1, 2, 3, 4)]


def initialise(head: Head) -> None:
    """Draws the weights of a head's convolutions as mmsegmentation does: those of its classifiers
    from N(0, 0.01), all others for a ReLU (``init_convolution``).
    """
    head.apply(init_convolution)
    for name in head.classifier_names():
        Normal(std=0.01)(sublayer(head, name).weight)


def resized(maps: paddle.Tensor, size: Any, align_corners: bool = False) -> paddle.Tensor:
    """Returns maps resized bilinearly: [B, D, H, W] -> [B, D, *size].

    Args:
        size: rows and columns.
        align_corners: whether the middles of the corners' places coincide, instead of their corners.
    """
    if not paddle.in_dynamic_mode():
        return resized_in_graph(maps, size, align_corners)
    if list(maps.shape[2:]) == list(size):
        return maps
    if ops.usable(maps):
        return ops.resize(maps, size, align_corners)
    if 1 in size and not align_corners:
        # Paddle's own takes the first place of the side, not the middle.
        return interpolate(maps.astype("float32"), size).astype(maps.dtype)
    return F.interpolate(maps, size, mode="bilinear", align_corners=align_corners)
