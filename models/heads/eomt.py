"""EoMT (Kerssies et al. 2025, arXiv:2503.19108): a plain ViT segments by itself.

Queries are tokens of the encoder's last blocks. Each answers with a class and a mask. Parameter
names are the authors'.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal

from errors import InputError
from models.base import ImageModel
from models.heads.base import Head, Maps, resized
from models.heads.matching import POINTS, Answers, matching_loss
from models.layers import LayerNorm, Linear
from models.layers.activations import GELU
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.layers.layout import concat
from models.layers.linear import linear, matmul
from models.layers.rotary import with_unrotated
from settings.keys import Depth, Size
from settings.registry import heads

# Subtracted from a score, it leaves an attention weight of 0.
_NEVER = 1e9
# The annealing of the masks: shares of a training where those of the first and of the last block
# begin to vanish, how long this takes, and its power (the authors' configurations).
_FIRST_START = 1 / 6
_LAST_START = 4 / 6
_LENGTH = 1 / 6
_POWER = 0.9
# The least score whose logarithm is taken, about float32's smallest number.
_LEAST_SCORE = 1e-37


class Features(NamedTuple):
    """The parts of an encoder that the head reads.

    Attributes:
        answers: of the queries, before each of the last blocks and after the last one. In an
            evaluation they are missing before blocks without masks.
        size: (height, width) of the images.
    """

    answers: list[Answers]
    size: tuple[int, int]


@heads.register("eomt")
class EomtHead(Head):
    """Queries that pass the last blocks of a ViT, each with a class and a mask.

    In training, a query attends only to the places of the mask that it gave before the block. These
    masks vanish block by block in the course of a training, by ``after_update``. Where they haven't
    vanished in an evaluation, the same queries are masked at each image.

    In evaluation, the logits of a pixel are the logarithms of its classes' scores: the sum over the
    queries of the class's probability times the mask's. Their softmax is the scores over their sum.
    The probability of "no class" isn't in it. In training, ``forward`` returns ``Answers``, the
    last ones first.

    Args:
        num_queries: number of queries, and so of predicted masks.
        num_blocks: the number of last encoder blocks that also process the queries.
    """

    indices = (-1,)
    runs_encoder = True
    has_loss = True
    gives_log_scores = True
    # Of the loss.
    num_points = POINTS

    def __init__(
        self, maps: Maps, num_classes: int, *, num_queries: Size = 100, num_blocks: Depth = 4
    ) -> None:
        super().__init__()
        dim = maps.channels[-1]
        self.num_queries = num_queries
        self.num_blocks = num_blocks
        self.q = nn.Embedding(
            num_queries, dim, weight_attr=paddle.ParamAttr(initializer=Normal(std=1.0))
        )
        self.class_head = Linear(dim, num_classes + 1)
        self.mask_head = nn.Sequential(
            Linear(dim, dim), GELU(), Linear(dim, dim), GELU(), Linear(dim, dim)
        )
        # Masks have at most 4 pixels along a place's side, as the authors'.
        steps = max(1, int(math.log2(maps.reductions[-1])) - 2)
        self.upscale = nn.Sequential(*[ScaleBlock(dim) for _ in range(steps)])
        # The probability that a query is masked in each of the last blocks.
        self.register_buffer("attn_mask_probs", paddle.ones([num_blocks]))
        # Paddle's trace replaces buffers by variables without values, but doesn't see this one.
        self.untraced = (self.attn_mask_probs,)
        # The queries' places in the order in which an evaluation stops masking them: multiples of
        # the golden ratio, which are spread evenly.
        order = np.arange(num_queries) * (math.sqrt(5) / 2 - 0.5) % 1
        self.register_buffer("order", paddle.to_tensor(order.astype(np.float32)), persistable=False)
        self.apply(init_as_torch)

    def check_encoder(self, encoder: ImageModel) -> None:
        name = type(encoder).__name__
        if not encoder.takes_masks:
            raise InputError(
                f"HEAD.NAME eomt needs an encoder whose attention supports masks, unlike {name};"
                " use"
                " MODEL.TYPE vit, deit or eva, with MODEL.BLOCK serial and MODEL.ATTENTION softmax"
            )
        blocks = len(encoder.feature_info)
        if self.num_blocks > blocks:
            raise InputError(
                f"HEAD.NUM_BLOCKS is {self.num_blocks}, but the encoder has only {blocks} blocks"
            )
        encoder_: Any = encoder
        if isinstance(encoder_.norm, nn.Identity):
            raise InputError(
                "HEAD.NAME eomt reads normalised tokens, but the encoder has no last norm before the"
                " pooling; set MODEL.FC_NORM False, and MODEL.FINAL_NORM True"
            )
        if "patch_drop" in encoder_._sub_layers and encoder_.patch_drop.drop_prob:
            raise InputError(
                "MODEL.PATCH_DROP is above 0, but HEAD.NAME eomt needs all patches; set it to 0"
            )

    def features(self, encoder: ImageModel, images: paddle.Tensor, indices: Any) -> Features:
        stages = list(encoder._stages())
        first = len(stages) - self.num_blocks
        x = encoder._embed(images)
        shared = encoder._shared()
        for stage in stages[:first]:
            x = encoder._stage(stage, x, shared)

        queries = self.q.weight.astype(x.dtype).unsqueeze(0)
        x = concat([x, queries.expand([x.shape[0], -1, -1])], axis=1)
        if shared is not None:
            shared = with_unrotated(shared, self.num_queries)
        answers = []
        takes_masks: Any = encoder
        for block, stage in enumerate(stages[first:]):
            mask = None
            if self.training or self._masks(block):
                before = self._answers(encoder, x)
                mask = self._attention_mask(encoder, x, before.masks, block)
                # Not append, of which Paddle's trace makes an array of tensors.
                answers = [*answers, before]
            x = takes_masks._stage(stage, x, shared, mask=mask)
        height, width = images.shape[2:]
        return Features([*answers, self._answers(encoder, x)], (height, width))

    def forward(self, features: Features) -> Any:
        if self.training:
            return features.answers[::-1]
        return log_scores(features.answers[-1], features.size)

    def loss(self, outputs: list[Answers], mask: paddle.Tensor, ignored: int) -> paddle.Tensor:
        return matching_loss(outputs, mask, ignored, self.num_points)

    @paddle.no_grad()
    def after_update(self, share: float) -> None:
        starts = np.linspace(_FIRST_START, _LAST_START, self.num_blocks)
        progress = np.clip((share - starts) / _LENGTH, 0, 1)
        probabilities = (1 - progress) ** _POWER
        self.attn_mask_probs.set_value(probabilities.astype(np.float32))

    def classifier_names(self) -> tuple[str, ...]:
        return ("class_head",)

    def no_weight_decay(self) -> set[str]:
        return {"q.weight"}

    def _masks(self, block: int) -> bool:
        """Returns whether an evaluation masks queries in this one of the last blocks.

        A model that is built in a static graph has no numbers, and masks none.
        """
        return _numbers(self)[block] > 0

    def _answers(self, encoder: Any, x: paddle.Tensor) -> Answers:
        """Returns the answers of the queries, the last ones of the tokens x [B, N, D]."""
        x = encoder.norm(x)
        queries = x[:, -self.num_queries :]
        places = x[:, encoder.num_prefix_tokens : -self.num_queries]
        rows, columns = encoder.grid(places.shape[1])
        maps = self.upscale(places.reshape([-1, rows, columns, places.shape[2]]))
        height, width = maps.shape[1:3]
        masks = matmul(self.mask_head(queries), maps.flatten(1, 2), transpose_y=True)
        return Answers(
            masks=masks.reshape([-1, self.num_queries, height, width]),
            classes=self.class_head(queries),
        )

    def _attention_mask(
        self, encoder: ImageModel, x: paddle.Tensor, masks: paddle.Tensor, block: int
    ) -> paddle.Tensor:
        """Returns what is added to the scores of N tokens: [B, N, N] float32.

        Masked queries don't attend to places where their mask's logit isn't above 0.

        Args:
            x: [B, N, D], the block's input.
            masks: [B, Q, h, w], the queries' logits before the block.
        """
        batch, tokens, _ = x.shape
        prefix = encoder.num_prefix_tokens
        grid = encoder.grid(tokens - prefix - self.num_queries)
        logits = resized(masks.detach().astype("float32"), grid).flatten(2)
        outside = (logits <= 0).astype("float32")
        if self.training:
            numbers = paddle.rand([batch, self.num_queries, 1])
        else:
            numbers = self.order.reshape([1, -1, 1]).expand([batch, -1, -1])
        masked = (numbers < self.attn_mask_probs[block]).astype("float32")
        hidden = outside * masked.expand([-1, -1, outside.shape[2]])
        of_queries = paddle.concat(
            [
                paddle.zeros([batch, self.num_queries, prefix]),
                hidden,
                paddle.zeros([batch, self.num_queries, self.num_queries]),
            ],
            axis=2,
        )
        of_others = paddle.zeros([batch, tokens - self.num_queries, tokens])
        return paddle.concat([of_others, of_queries], axis=1) * -_NEVER


@paddle.jit.not_to_static
def _numbers(head: EomtHead) -> list[float]:
    """Returns the probabilities of masks in the last blocks; zeros where they have no values.

    A trace doesn't read this function, so it replaces no tensor in it.
    """
    tensor: Any = head.untraced[0]
    if not hasattr(tensor, "_is_initialized"):
        return [0.0] * head.num_blocks
    return tensor.numpy().tolist()


class ScaleBlock(nn.Layer):
    """Doubles rows and columns: a transposed convolution, GELU, a depthwise one and a norm.

    Shape: [B, H, W, D] -> [B, 2 H, 2 W, D].
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = DoublingConv2D(dim, dim)
        self.act = GELU()
        self.conv2 = Conv2D(dim, dim, 3, padding=1, groups=dim, bias_attr=False)
        self.norm = LayerNorm(dim, epsilon=1e-6)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(self.conv2(self.act(self.conv1(x)), last=True))


class DoublingConv2D(nn.Layer):
    """A transposed convolution of kernel 2 and stride 2, channels last.

    Each of two Linears makes every other row: its channels are two neighbouring places. Weights are
    PyTorch's: [in, out, 2, 2]. Shape: [B, H, W, in] -> [B, 2 H, 2 W, out].
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        # PyTorch counts the output's channels as the fan in.
        bound = (4 * out_channels) ** -0.5
        uniform = paddle.ParamAttr(initializer=nn.initializer.Uniform(-bound, bound))
        self.weight = self.create_parameter([in_channels, out_channels, 2, 2], attr=uniform)
        self.bias = self.create_parameter([out_channels], attr=uniform)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        rows, columns, channels = x.shape[1:]
        width = self.bias.shape[0]
        bias = self.bias.tile([2])
        outputs = []
        for weight in self.weight.transpose([2, 0, 3, 1]).unbind(0):
            row = linear(x, weight.reshape([channels, 2 * width]), bias)
            outputs.append(row.reshape([-1, rows, 1, 2 * columns, width]))
        return paddle.concat(outputs, axis=2).reshape([-1, 2 * rows, 2 * columns, width])


def log_scores(answers: Answers, size: tuple[int, int]) -> paddle.Tensor:
    """Returns the logarithms of the classes' scores at each pixel: [B, K, *size] float32.

    A score is the sum over the queries of the class's probability times the mask's.

    Args:
        answers: of the queries, with one class more: none.
        size: (height, width).
    """
    classes = F.softmax(answers.classes.astype("float32"), axis=-1)[:, :, :-1]
    masks = F.sigmoid(resized(answers.masks.astype("float32"), size))
    scores = matmul(classes, masks.flatten(2), transpose_x=True)
    return scores.clip(min=_LEAST_SCORE).log().reshape([-1, classes.shape[2], *size])
