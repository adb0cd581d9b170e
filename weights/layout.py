"""What weight files need to know of a model: no architecture is known here."""

from types import ModuleType
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import nn


class Target(Protocol):
    """A model that weights are loaded into; ``models.base.ImageModel`` describes each attribute."""

    weight_names: ModuleType | None
    num_classes: int
    first_conv: str
    pos_embed_layout: str
    beside_first_conv: tuple[str, ...]

    def classifier_names(self) -> tuple[str, ...]: ...

    def state_dict(self) -> dict[str, paddle.Tensor]: ...

    def __getattr__(self, name: str) -> Any: ...  # its layers


def sublayer(model: Any, name: str) -> Any:
    """Returns the layer of a dotted name; "" is the model."""
    for part in filter(None, name.split(".")):
        model = getattr(model, part)
    return model


def linear_weights(model: Any) -> set[str]:
    """Returns the structured names of the Linear weights: [in, out] here, [out, in] in PyTorch and
    in weight files.
    """
    return {
        f"{name}.weight" for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)
    }


def numpy_dtype(tensor: paddle.Tensor) -> np.dtype:
    """Returns the type of ``tensor.numpy()``, without that copy."""
    return paddle.empty([0], tensor.dtype).numpy().dtype


def file_name(name: str) -> str:
    """Returns the name that a tensor has in PyTorch and in weight files; it differs for batch
    norm's statistics.
    """
    return name.replace("._mean", ".running_mean").replace("._variance", ".running_var")
