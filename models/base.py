"""``ImageModel``, the base class of all architectures, and the registry of their names."""

import contextlib
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
from models.layers.cosine import CosineClassifier
from models.layers.graph_sizes import is_known
from models.layers.linear import Linear
from models.layers.recompute import recompute
from settings.architectures import add_file, architectures
from settings.configuration import pair, size_text
from settings.keys import InTraining
from weights.layout import sublayer

_Kind = TypeVar("_Kind", bound="type[ImageModel]")


class _Architectures(Mapping[str, "type[ImageModel]"]):
    """The architectures' classes by their registered names, in lower case.

    A class's file is imported at the first access to it.
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
    """Registers a class as an architecture.

    MODEL.TYPE takes ``names`` then, and MODEL takes the arguments of the class's constructor, in
    capitals. Each argument has a default and a type of ``settings.keys``, and the Args of the
    class's docstring describe it. The files of models/ are found without an import. A class in any
    other file has to be imported before it is used.
    """

    def registered(kind: _Kind) -> _Kind:
        ARCHITECTURES.registered.update(dict.fromkeys(names, kind))
        add_file(inspect.getfile(kind))
        return kind

    return registered


class ImageModel(nn.Layer):
    """A classifier of normalised images [B, C, H, W] into logits [B, num_classes].

    The constructor of an architecture adds its layers, then calls ``_finish``. An architecture
    defines ``num_features``, ``feature_info``, ``_embed``, ``forward_head`` and ``layer_groups``.
    It also defines ``_stages`` and ``_stage`` if its stages are something else than ``blocks``.

    Args:
        image_size: pixels, H = W, or (H, W).
        in_channels: C.
        num_classes: number of outputs; 0: there is no classifier, and the pooled features [B,
            num_features] are returned.
        head_init_scale: factor on the initial weight and bias of a new classifier.
        recompute: whether training computes each block's activations again in the backward pass,
            to save memory.

    Attributes:
        head_init_bias: number that is added to the initial bias of a new classifier.
        head_batch_norm: whether a batch norm without scale and shift precedes each classifier, as
            in the linear probe of MAE (arXiv:2111.06377). "head" is then made of "head.0", the
            norm, and "head.1", the Linear.
        head_cosine: the scale of classifiers whose logits are cosines (``CosineClassifier``); None:
            they are Linears.
        head_widths: input channels of the classifiers that don't read num_features, by name.
        weight_names: the module of ``weights.names`` that maps other toolkits' names of the
            tensors, if there is one.
        first_conv: name of the convolution that reads the image.
        beside_first_conv: names of other convolutions that read the image.
        window_side: None, or the side of the windows whose pixels ``first_conv``, a Linear, and the
            layers of ``beside_first_conv`` read as vectors, channel by channel.
        channels_last: whether they read them pixel by pixel, each with its channels, instead.
        min_image_size: least H and W, for an architecture that takes images of any size; None: it
            takes image_size only.
        resizable: whether ``take_other_sizes`` makes the model take images of other sizes than
            image_size, by its ``patch_embed``.
        feature_info: for each intermediate, as in timm: ``module``, the layer that outputs it;
            ``num_chs``, its channels; ``reduction``, how many pixels along a side make one place.
        layout: axes of a stage's output: "NCHW", "NHWC", or "NLC": tokens, row by row.
        pos_embed_layout: axes of ``pos_embed``, if there is one.
        pos_resize: how it is resized to another grid (``weights.resize.RESIZING``).
        num_prefix_tokens: number of tokens before those of the places.
        takes_masks: whether ``_stage`` takes a ``mask`` of the attention, and more tokens than the
            images have. The mask [B, N, N] is added to the scores of N tokens.
        num_features: channels of the pooled features.
        ends_in_map: whether the last intermediate is a map, whose places are squares of the image.

    Raises:
        InputError: images that are too small.
    """

    head_init_bias = 0.0
    head_batch_norm = False
    head_cosine: float | None = None
    head_widths: Mapping[str, int] = {}
    weight_names: ModuleType | None = None
    first_conv = "patch_embed.proj"
    beside_first_conv: tuple[str, ...] = ()
    window_side: int | None = None
    channels_last = False
    min_image_size: int | None = None
    resizable = False
    feature_info: Sequence[dict[str, Any]] = ()
    layout: Literal["NCHW", "NHWC", "NLC"] = "NCHW"
    pos_embed_layout: str = "NLC"
    pos_resize: str = "bicubic"
    num_prefix_tokens = 0
    takes_masks = False
    ends_in_map = True
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
            size = f"IMAGE_SIZE is {size_text(image_size)}"
            raise InputError(
                f"{size}, {type(self).__name__} takes {self.input_sizes}; choose a larger one"
            )

    @property
    def input_sizes(self) -> str:
        """The sizes of images that the model takes, in words."""
        if self.min_image_size:
            return f"images of at least {self.min_image_size} x {self.min_image_size}"
        if self.resizable:
            return self.patch_embed.input_sizes
        return "images of {} x {}".format(*self.image_size)

    def take_other_sizes(self) -> None:
        """Makes the model take images of other sizes than image_size, as timm's
        ``dynamic_img_size``; a model with ``min_image_size`` does so anyway.

        A position embedding is resized for each batch. ``input_sizes`` says which sizes are taken,
        and images of any other raise an InputError.

        Raises:
            InputError: the architecture takes images of one size alone.
        """
        if self.resizable:
            self.patch_embed.any_size = True
        elif not self.min_image_size:
            raise InputError(
                f"{type(self).__name__} needs images of one size; use another MODEL.TYPE, such as"
                " vit, deit, eva, swin, swinv2, xcit or convnext"
            )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the features: the last block's output, normalised if the architecture does so
        before the pooling.
        """
        x = self._embed(x)
        shared = self._shared()
        for stage in self._stages():
            x = self._stage(stage, x, shared)
        return self._head_input(self._whole(x, shared), last=True)

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
        """Returns the features and the intermediates that ``feature_info`` lists, as in timm.

        Args:
            images: [B, C, H, W], normalised.
            indices: which intermediates are returned; they come in the order of depth. A number:
                so many of the last ones; several numbers: these, negative ones counted from the
                end; None: all.
            norm: whether the last norm is applied to the intermediates that it fits: to all if
                they have one shape, else to the last one.
            stop_early: whether nothing is computed beyond the last of ``indices``. The features are
                then that intermediate's.
            output_format: "NCHW": maps [B, channels, rows, columns]; "NLC": [B, rows * columns,
                channels].
            intermediates_only: whether only the list of intermediates is returned.
            return_prefix_tokens: whether each intermediate is (map, prefix tokens [B,
                num_prefix_tokens, channels]), for models that have such tokens.
            output_dict: whether a dictionary is returned: ``image_features``,
                ``image_intermediates``, and with ``return_prefix_tokens``
                ``image_intermediates_prefix``.
            output_fmt: timm's name of ``output_format``.

        Raises:
            InputError: indices that aren't there, an unknown format, or tokens that make no map.
        """
        taken = self._places_of(indices)
        output_format = output_fmt or output_format
        if output_format not in ("NCHW", "NLC"):
            raise InputError(f"output_format is {output_format!r}, expected 'NCHW' or 'NLC'")
        features, outputs = self._collect(images, taken, norm, stop_early)
        # Names without types: Paddle 2.6 can't trace them where they are set in a branch, too.
        intermediates = [self._as_map(output, output_format) for output in outputs]
        prefixes = None
        if return_prefix_tokens and self.num_prefix_tokens:
            prefixes = [output[:, : self.num_prefix_tokens] for output in outputs]
        if output_dict:
            answer = {"image_intermediates": intermediates}
            if prefixes is not None:
                answer["image_intermediates_prefix"] = prefixes
            if not intermediates_only:
                answer["image_features"] = features
            return answer
        if prefixes is not None:
            # Paddle's tracing takes no keywords of zip.
            intermediates = [(x, prefixes[i]) for i, x in enumerate(intermediates)]
        return intermediates if intermediates_only else (features, intermediates)

    def _collect(
        self, images: paddle.Tensor, taken: Sequence[int], norm: bool, stop_early: bool
    ) -> Any:
        """Returns the features, and the outputs of the intermediates ``taken``
        (``forward_intermediates``).
        """
        stages = list(self._stages())
        last = len(self.feature_info) - 1
        x = self._embed(images)
        shared = self._shared()
        # 0 if the first intermediate is the input of the first stage, else -1.
        index = last - len(stages)
        outputs = [x] if index in taken else []
        for stage in stages[: taken[-1] - index if stop_early else None]:
            x = self._stage(stage, x, shared)
            index = index + 1
            if index in taken:
                normed = norm and self._fits_last_norm(index)
                whole = self._whole(x, shared)
                outputs.append(self._last_norm(whole) if normed else whole)
        whole = self._whole(x, shared)
        return self._head_input(whole, last=self._uniform() or index == last), outputs

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the input of the first stage for the images x."""
        raise NotImplementedError

    def _stages(self) -> Iterable[Any]:
        """Returns the stages, each of which outputs one intermediate, in order.

        If ``feature_info`` lists one intermediate more, the first is the output of ``_embed``.
        """
        return self.blocks

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        """Returns the output of one of ``_stages`` for the output x of the one before.

        Args:
            shared: the value that ``_shared`` returned.
        """
        return self._run(stage, x)

    def _shared(self) -> Any:
        """Returns a value that is computed once for all stages, if there is one."""
        return None

    def _whole(self, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        """Returns a stage's output x with a token for each place, where stages merge some.

        Args:
            shared: the value that ``_shared`` returned.
        """
        return x

    def _last_norm(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(x) if "norm" in self._sub_layers else x

    def _uniform(self) -> bool:
        """Returns whether all intermediates have one shape."""
        return len({(info["num_chs"], info["reduction"]) for info in self.feature_info}) == 1

    def _fits_last_norm(self, index: int) -> bool:
        """Returns whether the last norm fits the intermediate with this index in ``feature_info``."""
        return self._uniform() or index == len(self.feature_info) - 1

    def _head_input(self, x: paddle.Tensor, last: bool) -> paddle.Tensor:
        """Returns the input of ``forward_head`` for a stage's output x.

        Args:
            last: whether the last norm fits it.
        """
        return self._last_norm(x) if last else x

    def grid(self, places: int) -> tuple[int, int]:
        """Returns the rows and columns of so many tokens of the last images' places, if ``layout``
        is "NLC".
        """
        patch_embed = sublayer(self, self.first_conv.rpartition(".")[0])
        return patch_embed.last_grid if self.resizable else patch_embed.grid_size

    def _places_of(self, indices: int | Sequence[int] | None) -> list[int]:
        """Returns the indices into ``feature_info`` that ``indices`` stands for, in rising order."""
        name = type(self).__name__
        count = len(self.feature_info)
        if not count:
            raise InputError(f"{name} has no intermediates, because it doesn't define feature_info")
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
        """Returns the layer whose output is used for class activation maps.

        If the head reads a class token, it is the norm before the last attention: after it, places
        no longer reach that token. None: the maps use the input of ``forward_head``.
        """
        if getattr(self, "global_pool", None) == "token":
            return self.blocks[-1].norm1
        return None

    def _as_map(self, x: paddle.Tensor, output_format: str) -> paddle.Tensor:
        if self.layout == "NLC":
            x = x[:, self.num_prefix_tokens :]
            if output_format == "NLC":
                return x
            rows, columns = self.grid(x.shape[1])
            if is_known(rows, columns) and x.shape[1] != rows * columns:
                problem = f"{x.shape[1]} tokens don't form a map of {rows} x {columns}"
                raise InputError(
                    f"{problem}: PATCH_DROP drops some in training; call model.eval() first"
                )
            x = x.reshape([-1, rows, columns, x.shape[-1]])
        channels_last = self.layout != "NCHW"
        if output_format == "NLC":
            x = x if channels_last else x.transpose([0, 2, 3, 1])
            return x.flatten(1, 2)
        return x.transpose([0, 3, 1, 2]) if channels_last else x

    def inference_model(self) -> "ImageModel":
        """Returns an equivalent model for inference. It is a faster one if layers can be folded,
        else the model itself.
        """
        return self

    def classifier_names(self) -> tuple[str, ...]:
        """Returns the names of the layers that depend on the number of classes."""
        return ("head",)

    def head_names(self) -> tuple[str, ...]:
        """Returns the names of the parameters that TRAIN.HEAD_LR applies to, and that TRAIN.FREEZE
        backbone leaves out."""
        return self.classifier_names()

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns groups of prefixes of parameter names, from the input to the output. Layer-wise
        learning rate decay has one step per group.

        A name belongs to a prefix if it equals it, or starts with it and a dot. Every parameter
        belongs to exactly one group.
        """
        raise NotImplementedError

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups of timm's ``param_groups_layer_decay``, where ``layer_groups`` returns
        the authors'.

        In this base class they differ by the last norm, which belongs to the last block. Other
        architectures define their own.
        """
        *groups, last = self.layer_groups()
        if "norm" in last:
            groups[-1] += ("norm",)
        return [*groups, tuple(name for name in last if name != "norm")]

    def no_weight_decay(self) -> set[str]:
        """Returns the names of parameters without weight decay, besides biases and norms."""
        return set()

    def reset_classifier(self, num_classes: int) -> None:
        """Replaces every classifier by a fresh one with ``num_classes`` outputs (0: none)."""
        self.num_classes = num_classes
        self._add_classifiers()
        for name in self.classifier_names():
            sublayer(self, name).apply(self._init_weights)
        self._scale_classifiers()

    def _finish(self) -> None:
        """Adds the classifiers and initialises all layers; the last step of a constructor."""
        self._add_classifiers()
        self.apply(self._init_weights)
        self._scale_classifiers()

    def _init_weights(self, layer: nn.Layer) -> None:
        """Initialises one layer as the architecture's authors do. Here it keeps Paddle's defaults."""

    def _add_classifiers(self) -> None:
        for name in self.classifier_names():
            parent, _, last = name.rpartition(".")
            width = self.head_widths.get(name, self.num_features)
            if not self.num_classes:
                classifier = nn.Identity()
            elif self.head_cosine is not None:
                classifier = CosineClassifier(width, self.num_classes, self.head_cosine)
            else:
                classifier = Linear(width, self.num_classes)
            if self.num_classes and self.head_batch_norm:
                classifier = nn.Sequential(ClassifierNorm(width), classifier)
            setattr(sublayer(self, parent), last, classifier)

    @paddle.no_grad()
    def _scale_classifiers(self) -> None:
        # The parameters of a static graph have no values yet (tools/list_models.py).
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

    def _run(self, block: Any, x: paddle.Tensor, *others: Any) -> Any:
        """Returns ``block(x, ...)``. In training with RECOMPUTE its activations aren't kept.

        Args:
            block: a layer, or a method of one.
        """
        if not (self.recompute and self.training):
            return block(x, *others)
        layer = getattr(block, "__self__", block)
        return recompute(block, x, *others, again=lambda: keeping_statistics(layer))


@contextlib.contextmanager
def without_classifier(model: ImageModel) -> Iterator[None]:
    """Makes ``model.forward_head`` return the pooled features within the body, as after
    ``reset_classifier(0)``. Afterwards the model has its classifiers again.
    """
    num_classes = model.num_classes
    children = [(layer, dict(layer._sub_layers)) for layer in model.sublayers(include_self=True)]
    model.num_classes = 0
    model._add_classifiers()
    try:
        yield
    finally:
        model.num_classes = num_classes
        for layer, named in children:
            layer._sub_layers.clear()
            layer._sub_layers.update(named)
