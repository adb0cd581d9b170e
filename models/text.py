"""The text towers of CLIP (arXiv:2103.00020), SigLIP (arXiv:2303.15343) and SigLIP 2
(arXiv:2502.14786).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from errors import InputError
from models.layers import Attention, LayerNorm
from models.layers.attention import l2_normalize
from models.layers.block import Block
from models.layers.linear import Linear, in_float32


@dataclass(frozen=True)
class TextArguments:
    """The arguments of a text tower.

    Attributes:
        vocab_size: number of tokens of the vocabulary.
        context_length: number of tokens of a text, with those of padding.
        embed_dim: number of channels of a token.
        depth: number of blocks.
        num_heads: number of attention heads in each block.
        hidden_dim: channels between the two layers of an MLP.
        out_dim: channels of a text's embedding, the same as of an image's.
        act: activation of the MLPs: "gelu", "gelu_tanh" or "quick_gelu".
        norm_eps: epsilon of the layer norms.
        causal: whether a token attends to itself and those before it alone (CLIP). If not, it
            attends to all tokens, those of padding included (SigLIP).
        pool: the token that stands for the text. "argmax": the first one with the largest number,
            CLIP's end of text; "eos": the first one that is ``eos``; "last": the last one.
        eos: number of the token that ends a text; None: no token does.
        head_bias: whether the projection has a bias.
    """

    vocab_size: int
    context_length: int
    embed_dim: int
    depth: int
    num_heads: int
    hidden_dim: int
    out_dim: int
    act: str
    norm_eps: float
    causal: bool
    pool: Literal["argmax", "eos", "last"]
    eos: int | None = None
    head_bias: bool = False


class TextTransformer(nn.Layer):
    """A transformer that embeds texts in the space of an image tower's outputs.

    Its blocks are those of ``VisionTransformer``, under the same names.

    Attributes:
        logit_scale: logarithm of the factor of the cosines, [].
        logit_bias: what is added to the scaled cosines, []; 0 for CLIP.

    Raises:
        InputError: embed_dim isn't a multiple of num_heads.
    """

    def __init__(self, arguments: TextArguments) -> None:
        super().__init__()
        width = arguments.embed_dim
        if width % arguments.num_heads:
            raise InputError(
                f"a text tower of {width} channels and {arguments.num_heads} heads: expected a"
                " multiple of the heads"
            )
        self.arguments = arguments
        self.token_embedding = nn.Embedding(arguments.vocab_size, width)
        self.pos_embed = self.create_parameter(
            [1, arguments.context_length, width], default_initializer=Normal(std=0.01)
        )
        self.blocks = nn.LayerList()
        for _ in range(arguments.depth):
            block = Block(
                width,
                Attention(width, arguments.num_heads),
                # A ratio whose product is rounded down to the hidden width.
                mlp_ratio=(arguments.hidden_dim + 0.5) / width,
                init_values=None,
                drop=0.0,
                drop_path=0.0,
                epsilon=arguments.norm_eps,
                act=arguments.act,
            )
            self.blocks.append(block)
        self.norm = LayerNorm(width, epsilon=arguments.norm_eps)
        self.head = Linear(
            width, arguments.out_dim, bias_attr=None if arguments.head_bias else False
        )
        self.register_buffer("logit_scale", paddle.to_tensor(np.float32(np.log(1 / 0.07))))
        self.register_buffer("logit_bias", paddle.to_tensor(np.float32(0.0)))

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Returns the embeddings of texts, not normalised.

        A causal tower may be given fewer tokens than ``context_length``, if each text ends within
        them: what follows a text's end doesn't change its embedding.

        Shape: [B, L] int64 -> [B, out_dim] float32.
        """
        length = tokens.shape[1]
        x = self.token_embedding(tokens) + self.pos_embed[:, :length]
        mask = None
        if self.arguments.causal:
            mask = paddle.triu(paddle.full([length, length], -1e9, "float32"), 1).unsqueeze(0)
        for block in self.blocks:
            x = block(x, None, mask)
        x = self._pooled(self.norm(x), tokens)
        return in_float32(self.head(x))

    def _pooled(self, x: paddle.Tensor, tokens: paddle.Tensor) -> paddle.Tensor:
        """Returns the token that stands for each text, [B, D]."""
        if self.arguments.pool == "last":
            return x[:, -1]
        if self.arguments.pool == "argmax":
            ends = tokens.argmax(axis=1)
        else:
            ends = (tokens == self.arguments.eos).astype("int32").argmax(axis=1)
        is_end = paddle.nn.functional.one_hot(ends, tokens.shape[1]).astype(x.dtype)
        return (x * is_end.unsqueeze(2)).sum(axis=1)

    def normalised(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Returns the embeddings of texts with length 1: [B, L] -> [B, out_dim]."""
        return l2_normalize(self(tokens))

    def similarity(self, images: paddle.Tensor, texts: paddle.Tensor) -> paddle.Tensor:
        """Returns the logits of images [B, D] and texts [T, D], which have length 1: [B, T]."""
        scale = paddle.exp(self.logit_scale)
        return scale * paddle.matmul(images, texts, transpose_y=True) + self.logit_bias
