"""The interface between weight files and models: attributes, layers and layouts of tensors."""

from types import ModuleType
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import nn


class Target(Protocol):
    """A model that weights can be loaded into. ``models.base.ImageModel`` documents its attributes."""

    weight_names: ModuleType | None
    num_classes: int
    first_conv: str
    pos_embed_layout: str
    pos_resize: str
    beside_first_conv: tuple[str, ...]
    window_side: int | None

    def classifier_names(self) -> tuple[str, ...]: ...

    def head_names(self) -> tuple[str, ...]: ...

    def state_dict(self) -> dict[str, paddle.Tensor]: ...

    # Its layers.
    def __getattr__(self, name: str) -> Any: ...


def sublayer(model: Any, name: str) -> Any:
    """Returns the layer with a dotted name; "" is the model itself."""
    for part in filter(None, name.split(".")):
        model = getattr(model, part)
    return model


def encoders_of(model: Any) -> dict[str, Any]:
    """Returns the models within a network by their names; of a model: {}.

    They are ``EncoderNetwork.encoders``, such as a student's and its teacher's.
    """
    return {name: sublayer(model, name) for name in getattr(model, "encoders", ())}


def encoder_of(model: Any) -> Any:
    """Returns the model that a network for pre-training is trained for; of a model: None."""
    encoders = list(encoders_of(model).values())
    return encoders[-1] if encoders else None


def linear_weights(model: Any) -> set[str]:
    """Returns the structured names of the weights of Linear layers.

    They are [in, out] in Paddle, and [out, in] in PyTorch and in weight files.
    """
    return {
        f"{name}.weight" for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)
    }


def numpy_dtype(tensor: paddle.Tensor) -> np.dtype:
    """Returns the dtype of ``tensor.numpy()`` without making that copy."""
    return paddle.empty([0], tensor.dtype).numpy().dtype


def file_name(name: str) -> str:
    """Returns a tensor's name in PyTorch and in weight files.

    It differs from Paddle's for the statistics of batch norms.
    """
    return name.replace("._mean", ".running_mean").replace("._variance", ".running_var")
