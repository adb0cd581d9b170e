"""Counts the parameters, multiply-adds and activations of a model for one image, layer by layer.

They are counted as by fvcore, and so as in timm's published GMACs and activations:

- Multiply-adds are those of convolutions, linear layers and products of activations: two in an
  attention, one in a mixer.
- A layer norm or group norm counts 5 per element, a batch norm 2.
- Softmax, activation functions, pooling, sums and biases aren't counted.
- Activations are the elements of the outputs of convolutions, linear layers and products.
- All of ``forward_features`` counts, though ``forward`` of a ViT leaves out what its head doesn't
  read.

The model is traced as a static graph, which computes nothing. So it takes a fraction of a second,
and no memory for the weights.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import paddle
from paddle import nn
from paddle.utils import unique_name

from models import build_model
from models.base import ImageModel
from models.resnet import BlurPool
from settings.configuration import Configuration

_BATCH_NORMS = nn.layer.norm._BatchNormBase
_NORMS = (nn.LayerNorm, nn.GroupNorm, _BATCH_NORMS)


class Layer(NamedTuple):
    """The cost of a layer itself, without that of its sublayers.

    Attributes:
        name: its name, as in the names of its parameters; "": the model itself.
        kind: the name of its class.
        output: shape of its output for one image; (): it returned no tensor.
        parameters: number of its parameters.
        macs: its multiply-adds.
        activations: elements of its output, if that counts.
    """

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    macs: int
    activations: int


class Cost(NamedTuple):
    """The cost of a model for one image.

    Attributes:
        images: (C, H, W).
        parameters: number of all parameters.
        macs: multiply-adds of all layers.
        activations: activations of all layers.
        layers: the layers that have parameters or multiply-adds, in the order of definition.
        sizes: elements of each parameter that is trained.
    """

    images: tuple[int, int, int]
    parameters: int
    macs: int
    activations: int
    layers: list[Layer]
    sizes: list[int]


def cost(config: Configuration, **arguments: Any) -> Cost:
    """Returns the cost of the model of a configuration for one image.

    Args:
        arguments: arguments of the constructor that replace those of the configuration:
            ``image_size=(224, 160)``.

    Raises:
        InputError: sizes that don't fit together.
    """
    with _tracing(), _Counter() as counter:
        model = build_model(config, **arguments)
        model.eval()
        images = (model.in_channels, *model.image_size)
        # The references count what the head doesn't read, too.
        model.forward = lambda x: model.forward_head(model.forward_features(x))
        model(paddle.static.data("images", [1, *images], "float32"))
        layers = list(counter.layers(model))
        sizes = [
            math.prod(parameter.shape)
            for parameter in model.parameters()
            if not parameter.stop_gradient
        ]
    return Cost(
        images=images,
        parameters=sum(layer.parameters for layer in layers),
        macs=sum(layer.macs for layer in layers),
        activations=sum(layer.activations for layer in layers),
        layers=layers,
        sizes=sizes,
    )


def model_of(config: Configuration) -> ImageModel:
    """Returns the model of a configuration without weights, to read its attributes. It takes no
    memory.
    """
    # Leaving a graph restarts the counters of names, so that later parameters would get names that
    # are taken.
    names = unique_name.switch()
    try:
        with _tracing():
            return build_model(config)
    finally:
        unique_name.switch(*names)


@dataclasses.dataclass
class _Count:
    """The counts of one layer."""

    output: tuple[int, ...] = ()
    macs: int = 0
    activations: int = 0


class _Counter(contextlib.ExitStack):
    """Counts the operations within this context, for the layers that call them."""

    def __init__(self) -> None:
        super().__init__()
        # The ids of the layers that are being called, the innermost last.
        self.stack: list[int] = []
        # By a layer's id.
        self.counts: dict[int, _Count] = {}

    def __enter__(self) -> "_Counter":
        call = nn.Layer.__call__
        linear = nn.functional.linear
        matmul = paddle.matmul

        def count_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
            self.stack.append(id(layer))
            count = self.counts.setdefault(id(layer), _Count())
            output = call(layer, *args, **kwargs)
            self.stack.pop()
            count.output = tuple(getattr(output, "shape", ()))
            if isinstance(layer, nn.Conv1D | nn.Conv2D | BlurPool):
                count.macs += math.prod(output.shape) * math.prod(layer.weight.shape[1:])
                count.activations += math.prod(output.shape)
            elif isinstance(layer, _NORMS):
                per_element = 2 if isinstance(layer, _BATCH_NORMS) else 5
                count.macs += math.prod(output.shape) * per_element
            return output

        def count_linear(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            return self._product(linear(x, weight, *args, **kwargs), weight.shape[0])

        def count_product(
            x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False
        ) -> Any:
            length = x.shape[-2 if transpose_x else -1]
            return self._product(matmul(x, y, transpose_x, transpose_y), length)

        self.enter_context(mock.patch.object(nn.Layer, "__call__", count_layer))
        self.enter_context(mock.patch("paddle.nn.functional.linear", count_linear))
        self.enter_context(mock.patch("paddle.matmul", count_product))
        return self

    def _product(self, output: Any, length: int) -> Any:
        """Counts a matrix product of rows of ``length`` for the innermost layer."""
        count = self.counts[self.stack[-1]]
        count.macs += math.prod(output.shape) * length
        count.activations += math.prod(output.shape)
        return output

    def layers(self, model: nn.Layer) -> Iterator[Layer]:
        """Yields the layers of ``Cost``. A parameter counts once, for the first layer that holds
        it.
        """
        counted: set[int] = set()
        for name, layer in model.named_sublayers(include_self=True):
            sizes = {
                id(parameter): math.prod(parameter.shape)
                for parameter in layer._parameters.values()
                if parameter is not None
            }
            parameters = sum(size for parameter, size in sizes.items() if parameter not in counted)
            counted |= sizes.keys()
            count = self.counts.get(id(layer), _Count())
            if parameters or count.macs:
                yield Layer(
                    name,
                    type(layer).__name__,
                    count.output,
                    parameters,
                    count.macs,
                    count.activations,
                )


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Within this context, models are built and called as a static graph, which computes nothing
    and has no weights.
    """
    to_tensor = paddle.to_tensor

    def keep_buffer(layer: Any, name: str, tensor: Any, persistable: bool = True) -> None:
        # Paddle refuses a graph's tensors as buffers.
        object.__setattr__(layer, name, tensor)

    def constant(data: Any, *args: Any, **kwargs: Any) -> Any:
        # Paddle 2.6 refuses more than 2 ** 20 values in a graph, and Swin's masks at 384 have more.
        # Zeros of the same shape are enough.
        array = np.asarray(data)
        if array.size > 1 << 20:
            return paddle.zeros(array.shape, array.dtype)
        return to_tensor(data, *args, **kwargs)

    paddle.enable_static()
    try:
        with (
            paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
            mock.patch("paddle.to_tensor", constant),
            # In a graph regions are pooled by products with matrices, which aren't the model's.
            mock.patch("models.layers.conv.means_of_regions", nn.functional.adaptive_avg_pool2d),
            mock.patch.object(paddle.nn.Layer, "register_buffer", keep_buffer),
            # Paddle 2.6 refuses to switch autocast off in a graph, which has none.
            mock.patch("paddle.amp.auto_cast", return_value=contextlib.nullcontext()),
            warnings.catch_warnings(),
        ):
            # Paddle warns that a graph's tensors have no place.
            warnings.simplefilter("ignore")
            yield
    finally:
        paddle.disable_static()
