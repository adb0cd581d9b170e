"""What every architecture is: a classifier of images with exchangeable classifier layers."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeVar

import paddle
from paddle import nn

from errors import InputError
from models.layers.batch_norm import keeping_statistics
from models.layers.classifier_norm import ClassifierNorm
from models.layers.linear import Linear
from models.layers.recompute import recompute
from settings.architectures import add_file, architectures
from settings.keys import InTraining
from settings.options import pair, size_text
from weights.layout import sublayer

_Kind = TypeVar("_Kind", bound="type[ImageModel]")


class _Architectures(Mapping[str, "type[ImageModel]"]):
    """The classes by what ``register`` called them, in lower case; a file is imported when its
    class is asked for.
    """

    def __init__(self) -> None:
        self.registered: dict[str, type[ImageModel]] = {}

    def __getitem__(self, name: str) -> type["ImageModel"]:
        if name not in self.registered:
            importlib.import_module(f"{__package__}.{architectures()[name].module}")
        return self.registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(architectures())

    def __len__(self) -> int:
        return len(architectures())


ARCHITECTURES = _Architectures()


def register(*names: str) -> Callable[[_Kind], _Kind]:
    """Makes a class an architecture: MODEL.TYPE takes ``names``, MODEL the arguments of its
    constructor, in capitals.

    Each argument has a default, and a type of ``settings.architectures``; the docstring's Args
    describe it. A class of any file may be registered: files of models/ are found by themselves,
    another has to be imported first.
    """

    def registered(kind: _Kind) -> _Kind:
        ARCHITECTURES.registered.update(dict.fromkeys(names, kind))
        add_file(inspect.getfile(kind))
        return kind

    return registered


class ImageModel(nn.Layer):
    """A classifier of normalised images [B, C, H, W] into logits [B, num_classes].

    An architecture adds its layers, then calls ``_finish``; it defines ``num_features`` (channels
    that its classifiers read), ``feature_info``, ``_embed``, ``forward_head`` and ``layer_groups``,
    and ``_stages`` and ``_stage`` where it has more than ``blocks``.

    Args:
        image_size: pixels, H = W, or (H, W).
        in_channels: C.
        num_classes: outputs; 0: no classifier, the pooled features [B, num_features] are returned.
        head_init_scale: factor on a fresh classifier's weight and bias.
        recompute: training computes each block's activations again in the backward pass, to save
            memory.

    Attributes:
        head_init_bias: what a fresh classifier's bias starts at, besides its own initialisation.
        head_batch_norm: a batch norm without scale and shift before each classifier, and frozen as
            it is. "head" is then "head.0", the norm, and "head.1", the Linear (the linear probe of
            MAE, arXiv:2111.06377).
        head_widths: channels that a classifier of this name reads, where they aren't num_features.
        weight_names: the module of ``weights.names`` that knows other toolkits' names of its
            tensors, if there are any.
        first_conv: name of the convolution that reads the image.
        beside_first_conv: names of others that read it, too.
        min_image_size: least H and W of an architecture that takes images of any size; None: it
            takes image_size only.
        feature_info: of each intermediate: ``module`` (the layer that gives it), ``num_chs``
            (channels), ``reduction`` (pixels along a side that make one place), as timm's.
        layout: axes of what a stage gives: "NCHW", "NHWC", or "NLC": tokens, row by row.
        pos_embed_layout: axes of ``pos_embed``, where there is one.
        num_prefix_tokens: tokens before those of the places.

    Raises:
        InputError: images that are too small.
    """

    head_init_bias = 0.0
    head_batch_norm = False
    head_widths: Mapping[str, int] = {}
    weight_names: ModuleType | None = None
    first_conv = "patch_embed.proj"
    beside_first_conv: tuple[str, ...] = ()
    min_image_size: int | None = None
    feature_info: Sequence[dict[str, Any]] = ()
    layout: Literal["NCHW", "NHWC", "NLC"] = "NCHW"
    pos_embed_layout: str = "NLC"
    num_prefix_tokens = 0
    num_features: int

    def __init__(
        self,
        image_size: int | Sequence[int],
        in_channels: int,
        num_classes: int,
        head_init_scale: InTraining[float] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__()
        self.image_size = pair(image_size)
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.head_init_scale = head_init_scale
        self.recompute = recompute
        if self.min_image_size and min(self.image_size) < self.min_image_size:
            found = f"IMAGE_SIZE is {size_text(image_size)}"
            raise InputError(
                f"{found}, {type(self).__name__} takes {self.input_sizes}; choose a larger one"
            )

    @property
    def input_sizes(self) -> str:
        """Returns the images that the model takes, in words."""
        if self.min_image_size:
            return f"images of at least {self.min_image_size} x {self.min_image_size}"
        return "images of {} x {}".format(*self.image_size)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns what the last block makes of the images, normalised where the architecture does
        so before pooling.
        """
        x = self._embed(x)
        shared = self._shared()
        for stage in self._stages():
            x = self._stage(stage, x, shared)
        return self._features(x, last=True)

    def forward_intermediates(
        self,
        images: paddle.Tensor,
        indices: int | Sequence[int] | None = None,
        *,
        norm: bool = False,
        stop_early: bool = False,
        output_format: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
        return_prefix_tokens: bool = False,
        output_dict: bool = False,
        output_fmt: Literal["NCHW", "NLC"] | None = None,
    ) -> Any:
        """Returns what ``forward_features`` does, and the intermediates that ``feature_info``
        lists: timm's.

        Args:
            images: [B, C, H, W], normalised.
            indices: which intermediates, in the order of depth whatever theirs: a number: so many
                of the last; numbers: those, from the end if negative; None: all.
            norm: the last norm is applied to each that it fits: to all where all have one shape,
                else to the last one.
            stop_early: nothing is computed beyond the last of ``indices``; the features are of that
                one, then.
            output_format: "NCHW": maps [B, channels, rows, columns]; "NLC": [B, rows * columns,
                channels].
            intermediates_only: the list of intermediates alone is returned.
            return_prefix_tokens: where there are such tokens, each intermediate is (map, prefix
                tokens [B, num_prefix_tokens, channels]).
            output_dict: a dictionary is returned: ``image_features``, ``image_intermediates``, and
                with ``return_prefix_tokens`` ``image_intermediates_prefix``.
            output_fmt: timm's name of ``output_format``.

        Raises:
            InputError: indices that aren't there, an unknown format, or tokens that make no map.
        """
        taken = self._places_of(indices)
        output_format = output_fmt or output_format
        if output_format not in ("NCHW", "NLC"):
            raise InputError(f"output_format is {output_format!r}, expected 'NCHW' or 'NLC'")
        features, found = self._collect(images, taken, norm, stop_early)
        answer: dict[str, Any] = {
            "image_intermediates": [self._as_map(one, output_format) for one in found]
        }
        if return_prefix_tokens and self.num_prefix_tokens:
            answer["image_intermediates_prefix"] = [
                one[:, : self.num_prefix_tokens] for one in found
            ]
        if not intermediates_only:
            answer["image_features"] = features
        if output_dict:
            return answer
        maps, *prefixes = (answer[key] for key in answer if key != "image_features")
        given = list(zip(maps, *prefixes, strict=True)) if prefixes else maps
        return given if intermediates_only else (answer["image_features"], given)

    def _collect(
        self, images: paddle.Tensor, taken: Sequence[int], norm: bool, stop_early: bool
    ) -> Any:
        """Returns the features, and the intermediates ``taken``; see ``forward_intermediates``."""
        stages = list(self._stages())
        last = len(self.feature_info) - 1
        x = self._embed(images)
        shared = self._shared()
        # 0 where the first intermediate is what the first stage reads, else -1
        index = last - len(stages)
        found = [x] if index in taken else []
        for stage in stages[: taken[-1] - index if stop_early else None]:
            x = self._stage(stage, x, shared)
            index = index + 1
            if index in taken:
                found.append(self._last_norm(x) if norm and self._fits_last_norm(index) else x)
        return self._features(x, last=self._uniform() or index == last), found

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns what the first stage reads."""
        raise NotImplementedError

    def _stages(self) -> Iterable[Any]:
        """Returns what gives the intermediates, in order; a first one more in ``feature_info`` is
        ``_embed``'s.
        """
        return self.blocks

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        """Returns what one of ``_stages`` makes of the last one's output; ``shared``: what
        ``_shared`` returned.
        """
        return self._run(stage, x)

    def _shared(self) -> Any:
        """Returns what is computed once for all stages."""
        return None

    def _last_norm(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(x) if "norm" in self._sub_layers else x

    def _uniform(self) -> bool:
        """Whether all intermediates have one shape."""
        return len({(one["num_chs"], one["reduction"]) for one in self.feature_info}) == 1

    def _fits_last_norm(self, index: int) -> bool:
        """Whether the last norm is for this intermediate, of ``feature_info``, too."""
        return self._uniform() or index == len(self.feature_info) - 1

    def _features(self, x: paddle.Tensor, last: bool) -> paddle.Tensor:
        """Returns what ``forward_head`` reads of a stage's output; ``last``: the last norm fits it."""
        return self._last_norm(x) if last else x

    def grid(self, places: int) -> tuple[int, int]:
        """Returns the rows and columns of so many tokens of places, where ``layout`` is "NLC"."""
        return sublayer(self, self.first_conv.rpartition(".")[0]).grid_size

    def _places_of(self, indices: int | Sequence[int] | None) -> list[int]:
        """Returns the places in ``feature_info`` that ``indices`` mean, from the first to the last."""
        name = type(self).__name__
        count = len(self.feature_info)
        if not count:
            raise InputError(f"{name} has no intermediates; it defines no feature_info")
        if indices is None:
            return list(range(count))
        if isinstance(indices, int):
            if not 0 < indices <= count:
                raise InputError(
                    f"indices is {indices}, expected how many of the last: 1 to {count} of {name}"
                )
            return list(range(count - indices, count))
        chosen = list(indices)
        if not chosen:
            raise InputError(
                f"indices is empty, expected numbers of {-count} to {count - 1}, or None for all"
            )
        for index in chosen:
            if not isinstance(index, int) or not -count <= index < count:
                raise InputError(
                    f"indices has {index!r}, {name} has intermediates {-count} to {count - 1}"
                )
        return sorted({index % count for index in chosen})

    def cam_layer(self) -> Any:
        """Returns the layer whose output class maps are of, where a class token is read: the norm
        after which places matter for that token alone. None: they are of what ``forward_head``
        reads.
        """
        return self.blocks[-1].norm1 if getattr(self, "global_pool", None) == "token" else None

    def _as_map(self, x: paddle.Tensor, output_format: str) -> paddle.Tensor:
        if self.layout == "NLC":
            x = x[:, self.num_prefix_tokens :]
            if output_format == "NLC":
                return x
            rows, columns = self.grid(x.shape[1])
            if x.shape[1] != rows * columns:
                found = f"{x.shape[1]} tokens make no map of {rows} x {columns}"
                raise InputError(
                    f"{found}: PATCH_DROP leaves some out in training; call model.eval() before"
                )
            x = x.reshape([-1, rows, columns, x.shape[-1]])
        if output_format == "NLC":
            return (x.transpose([0, 2, 3, 1]) if self.layout == "NCHW" else x).flatten(1, 2)
        return x if self.layout == "NCHW" else x.transpose([0, 3, 1, 2])

    def inference_model(self) -> "ImageModel":
        """Returns an equal model for inference, faster where some layers can be folded; itself
        otherwise.
        """
        return self

    def classifier_names(self) -> tuple[str, ...]:
        """Names of the layers that depend on the number of classes."""
        return ("head",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Prefixes of parameter names, from the input to the output: one group per step of a
        layer-wise decay.

        A name belongs to a prefix that it equals, or starts with followed by a dot; every name
        belongs to one group.
        """
        raise NotImplementedError

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups that timm's ``param_groups_layer_decay`` makes, as ``layer_groups``
        tells the authors'.

        Here: the authors', but ``norm``, the last one, is in the last block's group. Others define
        their own.
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

    def _finish(self) -> None:
        """Adds the classifiers, and initialises all layers: a constructor's end."""
        self._add_classifiers()
        self.apply(self._init_weights)
        self._scale_classifiers()

    def _init_weights(self, layer: nn.Layer) -> None:
        """Initialises one layer as the architecture's authors do; Paddle's defaults otherwise."""

    def _add_classifiers(self) -> None:
        for name in self.classifier_names():
            parent, _, last = name.rpartition(".")
            width = self.head_widths.get(name, self.num_features)
            classifier = Linear(width, self.num_classes) if self.num_classes else nn.Identity()
            if self.num_classes and self.head_batch_norm:
                classifier = nn.Sequential(ClassifierNorm(width), classifier)
            setattr(sublayer(self, parent), last, classifier)

    @paddle.no_grad()
    def _scale_classifiers(self) -> None:
        # a graph's parameters have no values yet (tools/list_models.py)
        if not paddle.in_dynamic_mode():
            return
        for name in self.classifier_names():
            for parameter in sublayer(self, name).parameters():
                bias = self.head_init_bias if parameter.ndim == 1 else 0.0
                if (self.head_init_scale, bias) != (1, 0):
                    parameter.set_value(parameter * self.head_init_scale + bias)

    def _run_all(self, blocks: Iterable[nn.Layer], x: paddle.Tensor) -> paddle.Tensor:
        for block in blocks:
            x = self._run(block, x)
        return x

    def _run(self, block: nn.Layer, x: paddle.Tensor, *others: Any) -> Any:
        """Returns ``block(x, ...)``, in training with RECOMPUTE without keeping its activations."""
        if not (self.recompute and self.training):
            return block(x, *others)
        return recompute(block, x, *others, again=lambda: keeping_statistics(block))
