"""``SegmentationModel``: an encoder with a head."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import paddle
from paddle.nn import functional as F

from errors import InputError
from models.base import ImageModel
from models.encoder_network import EncoderNetwork
from models.heads.base import Head, Maps, quarters, resized
from models.layers.graph_sizes import at_least, extended, is_known, rounded_up
from settings.configuration import Configuration, pair
from settings.registry import heads
from weights.names import segmentation

_HEAD = "decode_head."


class SegmentationModel(EncoderNetwork):
    """A model of normalised images [B, C, H, W] that gives logits of the classes for each pixel.

    In evaluation it returns [B, num_classes, H, W]. In training it returns what the head does: a
    list of logits [B, num_classes, rows, columns], the head's own first.

    Args:
        encoder: a model without a classifier.
        head: reads the encoder's intermediates.
        indices: which intermediates these are.
        num_classes: number of outputs.
        stride: see ``windows.Way``; None: an image is computed as a whole.
    """

    weight_names = segmentation

    def __init__(
        self,
        encoder: ImageModel,
        head: Head,
        indices: Sequence[int],
        num_classes: int,
        stride: tuple[int, int] | None,
    ) -> None:
        super().__init__(encoder)
        self.decode_head = head
        self.indices = list(indices)
        self.num_classes = num_classes
        self.stride = stride
        self.min_image_size = encoder.min_image_size
        # The least H and W that the encoder computes, and what they have to be multiples of. Images
        # are padded where they aren't.
        self.least = encoder.min_image_size or 1
        self.multiple = 1
        if stride is None and encoder.resizable:
            encoder.take_other_sizes()
        if encoder.resizable:
            self.min_image_size = 1
            self.multiple = encoder.patch_embed.patch_size

    @property
    def input_sizes(self) -> str:
        """The sizes of images that the model takes, in words."""
        return "images of any size" if self.encoder.resizable else self.encoder.input_sizes

    def forward(self, images: paddle.Tensor) -> Any:
        if self.training:
            features = self.decode_head.features(self.encoder, images, self.indices)
            outputs = self.decode_head(features)
            return outputs if isinstance(outputs, list) else [outputs]
        height, width = images.shape[2:]
        images = padded(images, self.least, self.multiple)
        features = self.decode_head.features(self.encoder, images, self.indices)
        logits = resized(
            self.decode_head(features), images.shape[2:], self.decode_head.align_corners
        )
        # A slice of all of them would be a copy.
        is_whole = is_known(height, width) and images.shape[2:] == [height, width]
        return logits if is_whole else logits[:, :, :height, :width]

    def classifier_names(self) -> tuple[str, ...]:
        return tuple(_HEAD + name for name in self.decode_head.classifier_names())

    def head_names(self) -> tuple[str, ...]:
        return (_HEAD.rstrip("."),)

    def no_weight_decay(self) -> set[str]:
        names = EncoderNetwork.no_weight_decay(self)
        return names | {_HEAD + name for name in self.decode_head.no_weight_decay()}

    def inference_model(self) -> "SegmentationModel":
        """Returns the model with the encoder for inference (``ImageModel.inference_model``)."""
        encoder = self.encoder.inference_model()
        if encoder is self.encoder:
            return self
        model = copy(self)
        model._sub_layers = {**self._sub_layers, "encoder": encoder}
        return model


def padded(images: paddle.Tensor, least: int, multiple: int) -> paddle.Tensor:
    """Returns images [B, C, H, W] with zeros below and to the right, where H or W is less than
    ``least``, or no multiple of a number. Normalised images have 0 where the colour is the mean.
    """
    height, width = images.shape[2:]
    if is_known(height, width):
        bottom = rounded_up(max(height, least), multiple) - height
        right = rounded_up(max(width, least), multiple) - width
        return F.pad(images, [0, right, 0, bottom]) if bottom or right else images
    if least == multiple == 1:
        return images
    images = extended(images, 2, rounded_up(at_least(height, least), multiple))
    return extended(images, 3, rounded_up(at_least(width, least), multiple))


def _check_sizes(config: Configuration, encoder: ImageModel, head: Head) -> None:
    """Checks that an evaluation's images have sizes that encoder and head take.

    Raises:
        InputError: they take images of IMAGE_SIZE alone, and there are others.
    """
    if config.HEAD.STRIDE is not None or _has_one_size(config):
        return
    limited = ""
    if head.one_size:
        limited = f"HEAD.NAME {config.HEAD.NAME}"
    elif not encoder.resizable and not encoder.min_image_size:
        limited = type(encoder).__name__
    if limited:
        height, width = pair(config.DATA.IMAGE_SIZE)
        raise InputError(
            f"{limited} only takes images of {height} x {width}; set HEAD.STRIDE to compute maps"
            " in windows of IMAGE_SIZE, or DATA.CROP_MODE squash"
        )


def _has_one_size(config: Configuration) -> bool:
    """Returns whether a model gets images of IMAGE_SIZE alone, in evaluations, too."""
    data = config.DATA
    size = data.IMAGE_SIZE if data.EVAL_SIZE is None else data.EVAL_SIZE
    return (
        data.CROP_MODE == "squash"
        and pair(size) == pair(data.IMAGE_SIZE)
        and list(config.METHOD.SCALES) == [1.0]
    )


def add_head(config: Configuration, encoder: ImageModel) -> SegmentationModel:
    """Returns a model of ``encoder`` and the head of the configuration, with fresh weights.

    Args:
        encoder: a model without a classifier.

    Raises:
        InputError: the encoder has no such intermediates, or the head can't read them.
    """
    kind, _ = heads.load(config.HEAD.NAME)
    chosen = config.HEAD.INDICES
    if kind.runs_encoder and chosen is not None:
        raise InputError(
            f"HEAD.INDICES is {chosen}, but HEAD.NAME {config.HEAD.NAME} runs the encoder's blocks"
            " itself; leave it out"
        )
    if chosen is None:
        chosen = kind.indices
    if chosen is None:
        chosen = quarters(len(encoder.feature_info))
    indices = _checked_indices(config, encoder, chosen)
    info = [encoder.feature_info[index] for index in indices]
    maps = Maps(
        channels=[each["num_chs"] for each in info],
        reductions=[each["reduction"] for each in info],
        image_size=encoder.image_size,
        prefix_tokens=encoder.num_prefix_tokens,
    )
    classes = config.MODEL.NUM_CLASSES
    head = heads.choose(config)(maps, classes)
    head.check_encoder(encoder)
    _check_sizes(config, encoder, head)
    stride = None if config.HEAD.STRIDE is None else pair(config.HEAD.STRIDE)
    return SegmentationModel(encoder, head, indices, classes, stride)


def _checked_indices(
    config: Configuration, encoder: ImageModel, chosen: Sequence[int]
) -> list[int]:
    """Returns the numbers of an encoder's intermediates, in rising order."""
    count = len(encoder.feature_info)
    name = type(encoder).__name__
    if not count:
        raise InputError(
            f"HEAD.NAME needs an encoder with intermediates, which {name} doesn't have"
        )
    for index in chosen:
        if -count <= index < count:
            continue
        has = f"{name} has intermediates {-count} to {count - 1}"
        if config.HEAD.INDICES is None:
            raise InputError(
                f"HEAD.NAME {config.HEAD.NAME} reads intermediate {index}, {has}; set HEAD.INDICES,"
                " or use another head"
            )
        raise InputError(f"HEAD.INDICES has {index}, {has}")
    return sorted({index % count for index in chosen})
