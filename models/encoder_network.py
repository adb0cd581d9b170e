"""``EncoderNetwork``, the base class of networks that have a model as their encoder."""

from types import ModuleType

from paddle import nn

from models.base import ImageModel
from weights.names.rules import ENCODER_PREFIX


class EncoderNetwork(nn.Layer):
    """An encoder, and further layers around it.

    The encoder's parameters have the prefix ``encoder.``. The training loop uses the network like an
    ``ImageModel``, so it has the attributes and methods that the loop reads, with prefixed names.

    Args:
        encoder: a model without a classifier (NUM_CLASSES 0).
        encoders: names of the models in the network that start from a model's weights.

    Attributes:
        weight_names: the module of ``weights.names`` that maps other toolkits' names of this
            network's tensors, if there is one.
        input_tokens: names of the network's parameters that the encoder's first block reads, such
            as a mask token. Their learning rate decays as that of the encoder's embedding.
    """

    weight_names: ModuleType | None = None
    input_tokens: tuple[str, ...] = ()
    pos_embed_layout = "NLC"
    pos_resize = "bicubic"
    min_image_size: int | None

    def __init__(self, encoder: ImageModel, encoders: tuple[str, ...] = ("encoder",)) -> None:
        super().__init__()
        self.encoder = encoder
        self.encoders = encoders
        self.image_size = encoder.image_size
        self.in_channels = encoder.in_channels
        self.num_classes = encoder.num_classes
        self.first_conv, *others = [
            f"{name}.{convolution}"
            for name in encoders
            for convolution in (encoder.first_conv, *encoder.beside_first_conv)
        ]
        self.beside_first_conv = tuple(others)
        self.window_side = encoder.window_side

    def classifier_names(self) -> tuple[str, ...]:
        """Returns the names of the layers that depend on the number of classes."""
        return tuple(_prefixed(name) for name in self.encoder.classifier_names())

    def head_names(self) -> tuple[str, ...]:
        """Returns the names of the parameters that TRAIN.HEAD_LR applies to, and that TRAIN.FREEZE
        backbone leaves out."""
        return self.classifier_names()

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the encoder's groups (``ImageModel.layer_groups``), with ``input_tokens`` in the
        first one, and all other parameters in the last one.
        """
        return self._with_others(self.encoder.layer_groups())

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns timm's groups of the encoder; the others as in ``layer_groups``."""
        return self._with_others(self.encoder.timm_layer_groups())

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the encoder's parameters without weight decay. A network may add
        parameters of its own.
        """
        return {_prefixed(name) for name in self.encoder.no_weight_decay()}

    def _with_others(self, groups: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        first, *rest, last = [tuple(_prefixed(name) for name in group) for group in groups]
        placed = {"encoder", *self.input_tokens}
        others = [name for name in (*self._sub_layers, *self._parameters) if name not in placed]
        return [(*first, *self.input_tokens), *rest, (*last, *others)]


def _prefixed(name: str) -> str:
    return ENCODER_PREFIX + name
