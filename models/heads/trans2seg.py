"""The head of Trans2Seg (Xie et al. 2021, arXiv:2101.08461): a transformer in which each class looks
for its places.

The order of operations is that of PaddleViT's code, and so are the doubled sums: where the paper
adds a branch to its input, that code adds the input to itself.
"""

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.heads.base import Head, Maps, resized
from models.layers import LayerNorm, Linear, init_linear
from models.layers.activations import relu
from models.layers.attention import Attention
from models.layers.batch_norm import BatchNorm2D
from models.layers.block import Block
from models.layers.conv import Conv2D
from models.layers.conv_norm import ConvNorm
from models.layers.init import init_convolution
from models.layers.mlp import hidden_width, make_mlp
from settings.configuration import size_text
from settings.keys import Depth, Positive, Size
from settings.registry import heads

# Of all layer norms.
EPSILON = 1e-5


class Scores(nn.Layer):
    """The scores of each class for each place, and the places' values.

    Shape: classes [B, K, D], places [B, N, D] -> [B, heads, K, N], [B, heads, N, D / heads].
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.norm1 = LayerNorm(dim, epsilon=EPSILON)
        self.norm1_clsembed = LayerNorm(dim, epsilon=EPSILON)
        self.fc_q = Linear(dim, dim, bias_attr=False)
        self.fc_kv = Linear(dim, 2 * dim, bias_attr=False)

    def forward(
        self, classes: paddle.Tensor, places: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        # As in that code, the queries' channels aren't split by head, but cut into heads after heads.
        queries = self.fc_q(self.norm1_clsembed(classes))
        queries = queries.reshape([-1, self.num_heads, classes.shape[1], self.head_dim])
        kv = self.fc_kv(self.norm1(places))
        kv = kv.reshape([-1, places.shape[1], 2, self.num_heads, self.head_dim])
        keys, values = kv.transpose([2, 0, 3, 1, 4]).unbind(0)
        return paddle.matmul(queries, keys, transpose_y=True) * self.head_dim**-0.5, values


class DecoderBlock(nn.Layer):
    """Classes read the places; then both pass an MLP.

    Shape: classes [B, K, D], places [B, N, D] -> the same.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.scores = Scores(dim, num_heads)
        self.proj = Linear(dim, dim)
        hidden_dim = hidden_width(dim, mlp_ratio)
        self.norm2 = LayerNorm(dim, epsilon=EPSILON)
        self.mlp = make_mlp(dim, hidden_dim, 0.0, "gelu")
        self.norm3 = LayerNorm(dim, epsilon=EPSILON)
        self.mlp2 = make_mlp(dim, hidden_dim, 0.0, "gelu")

    def forward(
        self, classes: paddle.Tensor, places: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        scores, values = self.scores(classes, places)
        read = paddle.matmul(F.softmax(scores, axis=-1), values)
        classes = 2 * self.proj(read.reshape([-1, *classes.shape[1:]]))
        places = 2 * places
        return classes + self.mlp(self.norm2(classes)), places + self.mlp2(self.norm3(places))


class LastScores(nn.Layer):
    """The scores of each class for each place, changed by an MLP over all places.

    Shape: classes [B, K, D], places [B, N, D] -> [B, K, heads, N].
    """

    def __init__(self, dim: int, num_heads: int, places: int) -> None:
        super().__init__()
        self.scores = Scores(dim, num_heads)
        self.norm4 = LayerNorm(places, epsilon=EPSILON)
        self.mlp3 = make_mlp(places, 3 * places, 0.0, "gelu")

    def forward(self, classes: paddle.Tensor, places: paddle.Tensor) -> paddle.Tensor:
        scores, _ = self.scores(classes, places)
        scores = 2 * scores.transpose([0, 2, 1, 3])
        return scores + self.mlp3(self.norm4(scores))


class SeparableConv(nn.Layer):
    """Depthwise 3 x 3 convolution and 1 x 1 convolution, each with batch norm and ReLU.

    Shape: [B, in_dim, H, W] -> [B, dim, H, W].
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.depthwise = Conv2D(in_dim, in_dim, 3, padding=1, groups=in_dim, bias_attr=False)
        self.bn_depth = BatchNorm2D(in_dim)
        self.pointwise = Conv2D(in_dim, dim, 1, bias_attr=False)
        self.bn_point = BatchNorm2D(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.bn_depth(self.depthwise(x), relu)
        return self.bn_point(self.pointwise(x), relu)


@heads.register("trans2seg")
class Trans2SegHead(Head):
    """A transformer over the places of the last map, one over classes and places, and convolutions
    over the map of each class.

    It reads two maps: a fine one, and the last. An MLP over all places fixes the size of images.
    The convolutions take as much memory as an image for each class.

    Args:
        transformer_channels: channels of the pixel tokens and of the class tokens in the
            transformers.
        transformer_depth: number of blocks of each transformer.
        transformer_heads: number of attention heads.
        transformer_mlp_ratio: ratio of the MLPs' hidden width to their input width.
        class_channels: channels of each class's map.

    Raises:
        InputError: not two maps, or channels that aren't a multiple of the heads.
    """

    indices = (-4, -1)
    align_corners = True
    one_size = True

    def __init__(
        self,
        maps: Maps,
        num_classes: int,
        *,
        transformer_channels: Size = 256,
        transformer_depth: Depth = 4,
        transformer_heads: Size = 8,
        transformer_mlp_ratio: Positive = 3.0,
        class_channels: Size = 64,
    ) -> None:
        super().__init__()
        if len(maps.channels) != 2:
            raise InputError(
                f"HEAD.NAME trans2seg got {len(maps.channels)} maps, expected two: HEAD.INDICES"
                " [FINE, LAST]"
            )
        dim = transformer_channels
        if dim % transformer_heads:
            raise InputError(
                f"HEAD.TRANSFORMER_CHANNELS is {dim}, not a multiple of HEAD.TRANSFORMER_HEADS"
                f" {transformer_heads}"
            )
        self.image_size = maps.image_size
        self.grid = [-(-side // maps.reductions[-1]) for side in maps.image_size]
        places = self.grid[0] * self.grid[1]
        self.embed = Linear(maps.channels[-1], dim)
        self.cls_token = self.create_parameter([1, 1, dim])
        self.pos_embed = self.create_parameter([1, 1 + places, dim])
        self.blocks = nn.LayerList()
        for _ in range(transformer_depth):
            attn = Attention(dim, transformer_heads, qkv_bias=False)
            block = Block(
                dim,
                attn,
                mlp_ratio=transformer_mlp_ratio,
                init_values=None,
                drop=0.0,
                drop_path=0.0,
                epsilon=EPSILON,
            )
            self.blocks.append(block)
        self.norm = LayerNorm(dim, epsilon=EPSILON)
        self.cls_embed = self.create_parameter([1, num_classes, dim])
        self.decoder = nn.LayerList(
            DecoderBlock(dim, transformer_heads, transformer_mlp_ratio)
            for _ in range(transformer_depth - 1)
        )
        self.last = LastScores(dim, transformer_heads, places)
        self.fine = ConvNorm(maps.channels[0], class_channels, 1, relu)
        self.lay1 = SeparableConv(dim + transformer_heads, class_channels)
        self.lay2 = SeparableConv(class_channels, class_channels)
        self.lay3 = SeparableConv(class_channels, class_channels)
        self.pred = Conv2D(class_channels, 1, 1)
        self.apply(init_linear)
        self.apply(init_convolution)
        for parameter in (self.cls_token, self.pos_embed, self.cls_embed):
            Normal(std=0.02)(parameter)
        Constant(0.0)(self.pred.bias)

    def forward(self, features: list[paddle.Tensor]) -> paddle.Tensor:
        fine, coarse = features
        rows, columns = coarse.shape[2:]
        if [rows, columns] != self.grid:
            raise InputError(
                f"HEAD.NAME trans2seg got maps of {rows} x {columns}, expected {self.grid[0]} x"
                f" {self.grid[1]}, of images of {size_text(self.image_size)}; set HEAD.STRIDE to"
                " compute maps in windows of IMAGE_SIZE"
            )
        places = self._encode(coarse)
        count = self.cls_embed.shape[1]
        classes = self.cls_embed.expand([places.shape[0], -1, -1])
        found = places
        for block in self.decoder:
            classes, found = block(classes, found)
            classes = classes + self.cls_embed
        scores = self.last(classes, found)
        maps = places.transpose([0, 2, 1]).reshape([-1, places.shape[2], rows, columns])
        scores = scores.reshape([-1, scores.shape[2], rows, columns])
        x = self.lay2(self.lay1(paddle.concat([_of_each(maps, count), scores], axis=1)))
        size = fine.shape[2:]
        x = resized(x, size, align_corners=True) + _of_each(self.fine(fine), count)
        return self.pred(self.lay3(x)).reshape([-1, count, *size])

    def _encode(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the places after the first transformer: [B, C, H, W] -> [B, H * W, D]."""
        x = self.embed(x.flatten(2).transpose([0, 2, 1]))
        token = self.cls_token.expand([x.shape[0], -1, -1])
        x = paddle.concat([token, x], axis=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 1:]

    def classifier_names(self) -> tuple[str, ...]:
        return ("cls_embed",)

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "pos_embed", "cls_embed"}


def _of_each(maps: paddle.Tensor, classes: int) -> paddle.Tensor:
    """Returns each map once for each class: [B, D, H, W] -> [B * classes, D, H, W]."""
    return maps.unsqueeze(1).expand([-1, classes, -1, -1, -1]).flatten(0, 1)
