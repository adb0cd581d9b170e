"""What every architecture is: a classifier of images with exchangeable classifier layers."""

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import paddle
from paddle import nn

from configs.architectures import add_file
from errors import InputError
from models.layers.batch_norm import statistics_kept
from models.layers.classifier_norm import ClassifierNorm
from models.layers.linear import Linear
from models.layers.recompute import recompute
from weights.layout import sublayer

ARCHITECTURES: dict[str, type["ImageModel"]] = {}  # what ``register`` called them, in lower case: MODEL.TYPE
_Kind = TypeVar("_Kind", bound="type[ImageModel]")


def register(*names: str) -> Callable[[_Kind], _Kind]:
    """Makes a class an architecture: MODEL.TYPE takes ``names``, MODEL the arguments of its constructor, in capitals.

    Each argument has a default, and a type of ``configs.architectures``; the docstring's Args describe it. A class of
    any file may be registered: files of models/ are found by themselves, another has to be imported first.
    """

    def registered(kind: _Kind) -> _Kind:
        ARCHITECTURES.update(dict.fromkeys(names, kind))
        add_file(inspect.getfile(kind))
        return kind

    return registered


class ImageModel(nn.Layer):
    """A classifier of normalised images [B, C, H, W] into logits [B, num_classes].

    An architecture adds its layers, then calls ``_add_classifiers``; it defines ``num_features`` (channels that its
    classifiers read), ``forward_features``, ``forward_head`` and ``layer_groups``.

    Args:
        image_size: pixels, H = W, or (H, W).
        in_channels: C.
        num_classes: outputs; 0: no classifier, the pooled features [B, num_features] are returned.
        head_init_scale: factor on a fresh classifier's weight and bias.
        recompute: training computes each block's activations again in the backward pass, to save memory.

    Attributes:
        head_init_bias: what a fresh classifier's bias starts at, besides its own initialisation.
        head_batch_norm: a batch norm without scale and shift before each classifier, and frozen as it is: "head" is
            then "head.0", the norm, and "head.1", the Linear (the linear probe of MAE, arXiv:2111.06377).
        weight_names: the module of ``weights.names`` that knows other toolkits' names of its tensors, if there are any.
        first_conv: name of the convolution that reads the image.
        min_image_size: least H and W of an architecture that takes images of any size; None: it takes image_size only.

    Raises:
        InputError: images that are too small.
    """

    head_init_bias = 0.0
    head_batch_norm = False
    weight_names: ModuleType | None = None
    first_conv = "patch_embed.proj"
    min_image_size: int | None = None
    num_features: int

    def __init__(
        self,
        image_size: int | Sequence[int],
        in_channels: int,
        num_classes: int,
        head_init_scale: float = 1.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.image_size, self.in_channels, self.num_classes = pair(image_size), in_channels, num_classes
        self.head_init_scale, self.recompute = head_init_scale, recompute
        if self.min_image_size and min(self.image_size) < self.min_image_size:
            raise InputError(
                f"IMAGE_SIZE is {image_size}, {type(self).__name__} takes {self.input_sizes}; choose a larger one"
            )

    @property
    def input_sizes(self) -> str:
        """The images that the model takes, in words."""
        if self.min_image_size:
            return f"images of at least {self.min_image_size} x {self.min_image_size}"
        return "images of {} x {}".format(*self.image_size)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns what the last block makes of the images, normalised where the architecture does so before pooling."""
        raise NotImplementedError

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        """Pools and classifies what ``forward_features`` returns."""
        raise NotImplementedError

    def classifier_names(self) -> tuple[str, ...]:
        """Names of the layers that depend on the number of classes."""
        return ("head",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Prefixes of parameter names, from the input to the output: one group per step of a layer-wise decay.

        A name belongs to a prefix that it equals, or starts with followed by a dot; every name belongs to one group.
        """
        raise NotImplementedError

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """The groups that timm's ``param_groups_layer_decay`` makes, as ``layer_groups`` tells the authors'.

        Here: the authors', but ``norm``, the last one, is in the last block's group. Others define their own.
        """
        *groups, last = self.layer_groups()
        if "norm" in last:
            groups[-1] += ("norm",)
        return [*groups, tuple(name for name in last if name != "norm")]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay leaves alone, besides biases and norms."""
        return set()

    def reset_classifier(self, num_classes: int) -> None:
        """Replaces every classifier by a fresh one of ``num_classes`` outputs (0: none)."""
        self.num_classes = num_classes
        self._add_classifiers()
        for name in self.classifier_names():
            sublayer(self, name).apply(self._init_weights)
        self._scale_classifiers()

    def _init_weights(self, layer: nn.Layer) -> None:
        """Initialises one layer as the architecture's authors do; Paddle's defaults otherwise."""

    def _add_classifiers(self) -> None:
        for name in self.classifier_names():
            parent, _, last = name.rpartition(".")
            classifier = Linear(self.num_features, self.num_classes) if self.num_classes else nn.Identity()
            if self.num_classes and self.head_batch_norm:
                classifier = nn.Sequential(ClassifierNorm(self.num_features), classifier)
            setattr(sublayer(self, parent), last, classifier)

    @paddle.no_grad()
    def _scale_classifiers(self) -> None:
        if not paddle.in_dynamic_mode():  # a graph's parameters have no values yet (tools/list_models.py)
            return
        for name in self.classifier_names():
            for parameter in sublayer(self, name).parameters():
                bias = self.head_init_bias if parameter.ndim == 1 else 0.0
                if (self.head_init_scale, bias) != (1, 0):
                    parameter.set_value(parameter * self.head_init_scale + bias)

    def _run(self, block: nn.Layer, x: paddle.Tensor, *others: Any) -> Any:
        """Returns ``block(x, ...)``, in training with RECOMPUTE without keeping its activations."""
        if not (self.recompute and self.training):
            return block(x, *others)
        return recompute(block, x, *others, again=lambda: statistics_kept(block))


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Returns (height, width) of a size given as one number or as two."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
