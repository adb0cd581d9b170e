"""DINO (Caron et al. 2021, arXiv:2104.14294): a student learns what its own moving average makes of
other views of an image.

iBOT (Zhou et al. 2021, arXiv:2111.07832) adds the same for patches that are masked in the student's
image alone. DINOv2 (Oquab et al. 2023, arXiv:2304.07193) brings both to large models.
"""

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Uniform

from errors import InputError
from models.base import ImageModel
from models.beit import Beit
from models.eva import Eva
from models.layers import Linear, init_linear
from models.layers.activations import GELU
from models.layers.linear import matmul, row_lengths
from models.layers.scale import scale_channels
from models.layers.sync_batch_norm import SyncBatchNorm1D
from models.pretraining.momentum import FrozenCopy
from models.pretraining.network import (
    PretrainingNetwork,
    at_places,
    masked_patches,
    masked_places,
)
from models.vit import VisionTransformer
from weights.names import dino as names


class Dino(PretrainingNetwork):
    """A student and its teacher, each an encoder with a projection head.

    ``encoder``, ``head`` and ``patch_head`` are the student's, the layers of ``teacher`` have the
    same names. The teacher has no gradients: ``follow`` makes it a moving average of the student.
    ``center`` and ``patch_center`` are means of the teacher's outputs, which a training updates.

    Args:
        encoder: a model without a classifier. Its pooled features are the image's.
        prototypes: outputs of the heads.
        head_width: channels between a head's layers.
        head_outputs: channels before a head's last layer.
        norm_last_layer: whether the weights of the last layer have a fixed length.
        batch_norm: whether the hidden layers of a head have a batch norm.
        max_masked: the most patches of an image, counted over both views, that are predicted. 0:
            patches aren't predicted.
        separate_head: whether patches have a head of their own.
        has_teacher: whether the teacher is the student's average. Otherwise another network
            teaches, and no patches are masked.

    Raises:
        InputError: ``max_masked`` with an encoder whose patches can't be masked.
    """

    weight_names = names
    input_tokens = ("mask_token",)

    def __init__(
        self,
        encoder: ImageModel,
        prototypes: int,
        head_width: int = 2048,
        head_outputs: int = 256,
        norm_last_layer: bool = True,
        batch_norm: bool = False,
        *,
        max_masked: int = 0,
        separate_head: bool = False,
        has_teacher: bool = True,
    ) -> None:
        super().__init__(encoder, ("encoder", "teacher.encoder") if has_teacher else ("encoder",))
        width = encoder.num_features
        pooled_width = encoder.head_widths.get("head", width)
        sizes = (prototypes, head_width, head_outputs, norm_last_layer, batch_norm)
        self.max_masked = max_masked
        self.patches = max_masked > 0
        self.head = ProjectionHead(pooled_width, *sizes)
        self.center = _zeros(self, prototypes)
        self.patch_head = None
        self.mask_token = None
        if self.patches:
            check_patches(encoder)
            self.patch_center = _zeros(self, prototypes)
            if separate_head:
                self.patch_head = ProjectionHead(width, *sizes)
            elif pooled_width != width:
                raise InputError(
                    "METHOD.PATCH_LOSS is set without METHOD.SEPARATE_HEAD, but with MODEL.GLOBAL_POOL"
                    " token_avg images have twice as many features as patches; set"
                    " METHOD.SEPARATE_HEAD True"
                )
            if has_teacher:
                self.mask_token = self.create_parameter(
                    [1, 1, width], default_initializer=Constant(0.0)
                )
        self.teacher = None
        if has_teacher:
            self.teacher = FrozenCopy(self, ("encoder", "head", "patch_head"))

    def no_weight_decay(self) -> set[str]:
        """Returns no names: the authors' positions and tokens decay, too."""
        return set()

    def forward(
        self,
        images: paddle.Tensor,
        local: paddle.Tensor | None = None,
        chosen: paddle.Tensor | None = None,
    ) -> dict[str, paddle.Tensor]:
        """Returns the outputs of student and teacher for a batch.

        Args:
            images: the global views, [2 B, C, H, W], normalised, those of an image one after the
                other.
            local: the local views, [L B, C, h, w], alike.
            chosen: the patches to predict, which the student sees masked: [B, 2 N] of 0 and 1.

        Returns:
            "student" [B, 2 + L, K] and "teacher" [B, 2, K], their logits. "features" [B, 2, D], the
            student's of the global views. "center" [K], what is subtracted from the teacher's.
            With patches also "student_patches" and "teacher_patches" [B, M, K]; "counted" [B, M]:
            1 for a chosen patch, 0 for padding; "places" [B, M]: the index of each patch among the
            2 N; and "patch_center" [K]. Without a teacher, the keys that begin with "teacher" are
            missing.
        """
        if chosen is not None:
            # Paddle 2.6 takes no uint8 in a graph.
            chosen = chosen.astype("float32")
        features, tokens = self._student_features(images, chosen)
        pooled = [_by_image(features, len(images) // 2)]
        if local is not None:
            pooled.append(_by_image(self.encoder(local), len(images) // 2))
        outputs = {"features": pooled[0], "student": self.head(paddle.concat(pooled, axis=1))}
        outputs["center"] = self.center
        places = None
        if chosen is not None:
            places = masked_places(chosen, self.max_masked)
            outputs["places"] = places
            outputs["student_patches"] = _patch_logits(self, tokens, places)
            outputs["counted"] = paddle.take_along_axis(chosen, places, 1)
            outputs["patch_center"] = self.patch_center
        if self.teacher is not None:
            outputs |= self.teacher_outputs(images, places)
        return outputs

    @paddle.no_grad()
    def teacher_outputs(
        self, images: paddle.Tensor, places: paddle.Tensor | None = None
    ) -> dict[str, paddle.Tensor]:
        """Returns "teacher" and "teacher_patches" of ``forward``. The teacher sees all patches.

        Args:
            images: as in ``forward``.
            places: what ``forward`` returned.
        """
        # A network that a larger one taught teaches by its own layers.
        teacher: Any = self if self.teacher is None else self.teacher
        features, tokens = _encode(teacher.encoder, images, with_tokens=places is not None)
        outputs = {"teacher": teacher.head(_by_image(features, len(images) // 2))}
        if places is not None:
            outputs["teacher_patches"] = _patch_logits(teacher, tokens, places)
        return outputs

    def follow(self, momentum: float) -> None:
        """Moves the teacher, if there is one, towards the student: momentum * teacher + (1 -
        momentum) * student.
        """
        if self.teacher is not None:
            self.teacher.follow(self, momentum)

    def _student_features(self, images: paddle.Tensor, chosen: paddle.Tensor | None) -> Any:
        if chosen is None or self.mask_token is None:
            return _encode(self.encoder, images, with_tokens=chosen is not None)
        of_views = chosen.reshape([len(images), -1])
        with masked_patches(self.encoder.patch_embed, of_views, self.mask_token):
            return _encode(self.encoder, images, with_tokens=True)


class ProjectionHead(nn.Layer):
    """DINO's head: an MLP of three layers, and similarities to prototypes.

    The MLP's output has the length 1. The last layer is a Linear without bias whose weights are
    split into lengths ``weight_g`` and directions ``weight_v`` (Salimans & Kingma 2016,
    arXiv:1602.07868). Names are the authors'.

    Args:
        width: channels of the input.
        prototypes: K, the number of outputs.
        hidden: channels between the layers.
        outputs: channels of the MLP's output.
        norm_last_layer: whether the lengths stay 1.
        batch_norm: whether each hidden layer has a batch norm over the views of all processes.

    Shape: [..., width] -> [..., K] float32.
    """

    def __init__(
        self,
        width: int,
        prototypes: int,
        hidden: int = 2048,
        outputs: int = 256,
        norm_last_layer: bool = True,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Layer] = []
        for inputs in (width, hidden):
            layers.append(Linear(inputs, hidden))
            if batch_norm:
                layers.append(SyncBatchNorm1D(hidden))
            layers.append(GELU())
        self.mlp = nn.Sequential(*layers, Linear(hidden, outputs))
        self.mlp.apply(init_linear)
        self.last_layer = _Prototypes(outputs, prototypes, norm_last_layer)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        outputs = self.mlp(x.flatten(0, -2)).astype("float32")
        logits = self.last_layer(F.normalize(outputs, axis=-1))
        return logits.reshape([*x.shape[:-1], -1])


class _Prototypes(nn.Layer):
    def __init__(self, width: int, count: int, norm_last_layer: bool) -> None:
        super().__init__()
        self.weight_g = self.create_parameter([count, 1], default_initializer=Constant(1.0))
        self.weight_g.stop_gradient = norm_last_layer
        # PyTorch's initialisation of a Linear.
        bound = width**-0.5
        self.weight_v = self.create_parameter(
            [count, width], default_initializer=Uniform(-bound, bound)
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        # The logits are scaled instead of the weights, of which there are more.
        scale = self.weight_g.flatten() / row_lengths(self.weight_v)
        logits = matmul(x, self.weight_v, transpose_y=True)
        return scale_channels(logits.astype("float32"), scale)


def _encode(encoder: ImageModel, images: paddle.Tensor, with_tokens: bool) -> Any:
    """Returns the images' pooled features and all tokens: (features, tokens).

    Without tokens (None), a model may leave out what its pooled features don't need.
    """
    if not with_tokens:
        return encoder(images), None
    tokens = encoder.forward_features(images)
    return encoder.forward_head(tokens), tokens


def _by_image(features: paddle.Tensor, count: int) -> paddle.Tensor:
    """Returns the features of views [count * V, D] by image: [count, V, D]."""
    return features.reshape([count, -1, features.shape[-1]])


def _patch_logits(branch: Any, tokens: paddle.Tensor, places: paddle.Tensor) -> paddle.Tensor:
    """Returns a student's or a teacher's logits for patches, [B, M, K].

    Args:
        tokens: of the global views, [2 B, prefix + N, D].
        places: of the patches among the 2 N of an image, [B, M].
    """
    patches = tokens[:, branch.encoder.num_prefix_tokens :]
    patches = patches.reshape([len(places), -1, patches.shape[-1]])
    head = branch.head if branch.patch_head is None else branch.patch_head
    return head(at_places(patches, places))


def _zeros(layer: nn.Layer, size: int) -> paddle.Tensor:
    """Returns a frozen parameter [size] of zeros."""
    zeros = layer.create_parameter([size], default_initializer=Constant(0.0))
    zeros.stop_gradient = True
    return zeros


def check_patches(encoder: ImageModel) -> None:
    """Raises InputError if the encoder has no patches that can be masked and predicted."""
    if not isinstance(encoder, VisionTransformer | Eva | Beit):
        name = type(encoder).__name__
        raise InputError(
            f"METHOD.PATCH_LOSS is set, but {name} isn't a transformer with one token per"
            " patch; use a ViT, a BEiT or an EVA, or set it to 0"
        )
    if isinstance(getattr(encoder, "norm", None), nn.Identity):
        raise InputError(
            "METHOD.PATCH_LOSS is set, but the last norm comes after the pooling and doesn't"
            " apply to"
            " patches; set MODEL.GLOBAL_POOL token"
        )
