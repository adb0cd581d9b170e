"""Multi-head self-attention, and the weights of every kind of attention, to be looked at."""

import contextlib
from collections.abc import Collection, Iterator

import paddle
from paddle import nn
from paddle.nn import functional as F

import ops
from models.layers.linear import LayerNorm, Linear, in_float32


class Heads(nn.Layer):
    """What heads make of their queries, keys and values: softmax(q k^T / sqrt(head_dim)) v.

    Args:
        num_heads: heads H.
        head_dim: channels d of a head.
        qk_norm: whether each head's queries and keys are normalised (Dehghani et al. 2023, arXiv:2302.05442).
        attn_drop: dropout of the attention weights.

    Attributes:
        fused: one operator may compute the weights and what they give; False: ``attn_drop`` sees the weights.
        maps: attention maps of a head; its queries and keys are cut into as many.
    """

    fused, maps = True, 1

    def __init__(self, num_heads: int, head_dim: int, qk_norm: bool, attn_drop: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.qk_norm, width = num_heads, head_dim, qk_norm, head_dim // self.maps
        self.scale = width**-0.5
        self.q_norm = LayerNorm(width, epsilon=1e-6) if qk_norm else nn.Identity()
        self.k_norm = LayerNorm(width, epsilon=1e-6) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)

    def attend(self, qkv: paddle.Tensor) -> paddle.Tensor:
        """[B, N, 3, H, d] -> [B, N, H d]."""
        batch, length, _, heads, width = qkv.shape
        if self.fused and ops.usable(qkv) and not self.qk_norm and not (self.training and self.attn_drop.p):
            x = ops.attention(qkv, self.scale)
        elif self.fused and ops.flash_attention_takes(qkv):
            q, k, v = qkv.unbind(2)
            if self.qk_norm:  # layer norms give float32 under autocast, which flash attention refuses
                q, k = self.q_norm(q).astype(v.dtype), self.k_norm(k).astype(v.dtype)
            dropout = self.attn_drop.p if self.training else 0.0  # Paddle 2.6 forgets ``training``
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, training=self.training)
        else:
            q, k, v = qkv.transpose([2, 0, 3, 1, 4]).unbind(0)  # each [B, H, N, d]
            x = paddle.matmul(self._weights(q, k), v).transpose([0, 2, 1, 3])
        return x.reshape([batch, length, heads * width])

    def _weights(self, q: paddle.Tensor, k: paddle.Tensor) -> paddle.Tensor:
        """q, k [B, H, N, d] -> [B, H, N, N]."""
        # Scaling q costs N * d products per head, scaling the scores N * N.
        scores = paddle.matmul(self.q_norm(q) * self.scale, self.k_norm(k), transpose_y=True)
        return self.attn_drop(F.softmax(scores, axis=-1))


class Attention(Heads):
    """Multi-head self-attention (Vaswani et al. 2017) with one fused projection, as in timm's ``Attention``.

    Args:
        dim: channels D of the tokens.
        num_heads, head_dim, qk_norm, attn_drop: as ``Heads`` has them; head_dim None: D / H.
        qkv_bias, proj_bias: whether the fused projection and the output's have a bias.
        proj_drop: dropout of the output.

    Shape: [B, N, D] -> [B, N, D].
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        proj_bias: bool = True,
    ) -> None:
        super().__init__(num_heads, head_dim or dim // num_heads, qk_norm, attn_drop)
        self.qkv = Linear(dim, 3 * num_heads * self.head_dim, bias_attr=None if qkv_bias else False)
        self.proj = Linear(num_heads * self.head_dim, dim, bias_attr=None if proj_bias else False)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape([batch, length, 3, self.num_heads, self.head_dim])
        return self.proj_drop(self.proj(self.attend(qkv)))


def unit(x: paddle.Tensor, axis: int = -1) -> paddle.Tensor:
    """Returns vectors along ``axis`` of length 1; zeros stay zeros.

    Keys of padding are zeros. Their gradient is 0 here. PyTorch's is 1e12 times the output's, which float16 can't hold;
    it meets zeros alone.
    """
    x = in_float32(x)
    square = (x * x).sum(axis=axis, keepdim=True)
    return x * (paddle.rsqrt(square.clip(min=1e-24)) * (square > 1e-24).astype(x.dtype))


def attention_layers(model: nn.Layer) -> dict[str, nn.Layer]:
    """Returns the layers that attend, by name, in the order of depth: those that have an ``attn_drop``."""
    return {name: layer for name, layer in model.named_sublayers() if "attn_drop" in layer._sub_layers}


@contextlib.contextmanager
def kept_weights(model: nn.Layer, names: Collection[str]) -> Iterator[dict[str, paddle.Tensor]]:
    """Yields a dictionary that fills with the attention weights [B, H, queries, keys] of ``names`` as the model runs.

    They are what weighs the values: the softmax's output before dropout; in CaiT mixed between heads. Swin's B counts
    the windows of each image, HaloNet's its heads and H its blocks; a class token by itself is one query. Every kind of
    attention hands them to its ``attn_drop``, where a hook reads them. Without this context nothing is kept.
    """
    kept: dict[str, paddle.Tensor] = {}
    layers = {name: layer for name, layer in attention_layers(model).items() if name in names}
    before, hooks = {name: getattr(layer, "fused", True) for name, layer in layers.items()}, []
    try:
        for name, layer in layers.items():
            layer.fused = False
            hooks.append(layer.attn_drop.register_forward_pre_hook(lambda _, x, name=name: kept.update({name: x[0]})))
        yield kept
    finally:
        for name, layer in layers.items():
            layer.fused = before[name]
        for hook in hooks:
            hook.remove()
