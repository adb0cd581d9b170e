"""LeNet (LeCun et al. 1998).

Layers, parameter names and the initialisation are those of ``paddle.vision.models.LeNet``.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel, register
from models.layers.activations import ReLU
from models.layers.conv import Conv2D, MaxPool2D
from models.layers.stages import feature_info
from settings.keys import Factor, InTraining, OfClassifier


@register("lenet")
class LeNet(ImageModel):
    """LeNet: two convolutions, then three Linears without activations between them.

    It takes images of image_size only, because of the first Linear. Its features are the output of
    the convolutions: [B, 16, h, w], where 28 x 28 pixels make 5 x 5 places.

    Args:
        image_size: pixels, or (height, width), at least 12 each.

    Raises:
        InputError: images that are too small, or of another size than image_size.
    """

    first_conv = "features.0"

    def __init__(
        self,
        image_size: int | Sequence[int] = 28,
        in_channels: int = 1,
        num_classes: int = 10,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale)
        height, width = ((side // 2 - 4) // 2 for side in self.image_size)
        if min(height, width) < 1:
            raise InputError(
                f"IMAGE_SIZE is {image_size}, LeNet takes images of at least 12 x 12; choose a larger one"
            )
        self.num_features = 84
        self.feature_info = feature_info(["features.2", "features.5"], (6, 16), (2, 4))
        self.features = nn.Sequential(
            Conv2D(in_channels, 6, 3, padding=1),
            ReLU(),
            MaxPool2D(2, 2),
            Conv2D(6, 16, 5),
            ReLU(),
            MaxPool2D(2, 2),
        )
        self.fc = nn.Sequential(
            nn.Linear(16 * height * width, 120), nn.Linear(120, 84), nn.Identity()
        )
        self._add_classifiers()
        self._scale_classifiers()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            raise InputError(
                f"the model takes {self.input_sizes}, found {x.shape[2]} x {x.shape[3]}"
            )
        return x

    def _stages(self) -> Iterable[Any]:
        """Each convolution with the pooling after it."""
        layers = list(self.features)
        return (layers[:3], layers[3:])

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.fc(x.flatten(1))

    def classifier_names(self) -> tuple[str, ...]:
        return ("fc.2",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns each layer as a group."""
        return [("features.0",), ("features.3",), ("fc.0",), ("fc.1",), ("fc.2",)]
