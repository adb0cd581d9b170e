"""Multi-head self-attention, and the weights of every kind of attention, to be looked at."""

import contextlib
from collections.abc import Collection, Iterator, Sequence

import paddle
from paddle import nn
from paddle.nn import functional as F

import ops
from models.layers.linear import LayerNorm, Linear, in_float32
from models.layers.rotary import Table, rotate


def attend_heads(
    parts: Sequence[paddle.Tensor],
    heads: int,
    width: int,
    scale: float | paddle.Tensor,
    drop: nn.Layer | None = None,
    bias: paddle.Tensor | None = None,
    mask: paddle.Tensor | None = None,
    by_head: bool = False,
    turns: Table | None = None,
    halves: bool = False,
    flash: bool = False,
) -> paddle.Tensor:
    """Returns softmax(q k^T scale + bias + mask) v of each head, by one operator where there is
    one.

    Args:
        parts: [q, k, v in one], [q, k and v], or [q, k, v]: each [B, tokens, channels].
        heads, width: heads H; channels of a head's queries and keys.
        scale: a number; or [H, 1, 1], of the cosines of queries and keys.
        drop: dropout of the weights; where it drops some, or a hook reads them (``attention_weights``),
            it gets them.
        bias: [H, N, M]; or each item's own: [B, H, N, M].
        mask: [windows, N, M], for items that are the windows of one image after the other.
        by_head: a tensor has its parts head by head, instead of part by part all heads.
        turns, halves: what turns queries and keys, and how: see ``rotate``.
        flash: half types may go to flash attention, where there is one.

    Returns:
        [B, N, H * channels of a value].
    """
    if can_fuse(parts[0], drop):
        all_biases = bias if bias is None or bias.ndim == 4 else bias.unsqueeze(0)
        return ops.attention(
            parts, heads, width, scale, all_biases, mask, by_head, turns=turns, halves=halves
        )
    length = parts[0].shape[1]
    if flash and not _has_hooks(drop) and ops.flash_attention_takes(parts[-1], width):
        q, k, v = _rotate_parts(_heads(parts, heads, width, by_head, first=False), turns, halves)
        # layer norms give float32 under autocast, which it refuses
        q = q.astype(v.dtype)
        k = k.astype(v.dtype)
        dropped = _drop_rate(drop)  # 0 in evaluation: Paddle 2.6 forgets ``training``
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, training=bool(dropped))
        return x.reshape([-1, length, heads * x.shape[3]])
    if turns is None:
        q, k, v = _heads(parts, heads, width, by_head, first=True)
    else:
        tokens_first = _rotate_parts(
            _heads(parts, heads, width, by_head, first=False), turns, halves
        )
        q, k, v = [part.transpose([0, 2, 1, 3]) for part in tokens_first]
    weights = F.softmax(_scores(q, k, scale, bias, mask), axis=-1)
    if mask is not None:
        weights = weights.reshape([-1, *weights.shape[2:]])
    x = paddle.matmul(weights if drop is None else drop(weights), v)
    return x.transpose([0, 2, 1, 3]).reshape([-1, length, heads * x.shape[3]])


def can_fuse(x: paddle.Tensor, drop: nn.Layer | None) -> bool:
    """Returns whether one operator may compute with ``x``, and nothing asks for the weights: see
    ``attend_heads``.
    """
    return ops.usable(x) and not _has_hooks(drop) and not _drop_rate(drop)


def _has_hooks(drop: nn.Layer | None) -> bool:
    return drop is not None and bool(drop._forward_pre_hooks)


def _drop_rate(drop: nn.Layer | None) -> float:
    return drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0


def _heads(
    parts: Sequence[paddle.Tensor], heads: int, width: int, by_head: bool, first: bool
) -> Sequence[paddle.Tensor]:
    """Returns queries, keys and values, each [B, N, H, channels], or with ``first`` [B, H, N,
    channels].
    """
    found: list[paddle.Tensor] = []
    for i, part in enumerate(parts):
        length = part.shape[1]
        channels = part.shape[2] // heads
        # the last tensor has what the others haven't
        count = 4 - len(parts) if i == len(parts) - 1 else 1
        if count > 1 and not by_head:
            part = part.reshape([-1, length, count, heads, width])
            found += part.transpose([2, 0, 3, 1, 4]).unbind(0) if first else part.unbind(2)
            continue
        part = part.reshape([-1, length, heads, channels])
        part = part.transpose([0, 2, 1, 3]) if first else part
        sizes = [*[width] * (count - 1), channels - (count - 1) * width]
        found += part.split(sizes, axis=3) if count > 1 else [part]
    return found


def _rotate_parts(
    qkv: Sequence[paddle.Tensor], turns: Table | None, halves: bool
) -> Sequence[paddle.Tensor]:
    q, k, v = qkv
    return qkv if turns is None else (rotate(q, turns, halves), rotate(k, turns, halves), v)


def _scores(
    q: paddle.Tensor,
    k: paddle.Tensor,
    scale: float | paddle.Tensor,
    bias: paddle.Tensor | None,
    mask: paddle.Tensor | None,
) -> paddle.Tensor:
    """q, k [B, H, N, d] -> [B, H, N, M]; with a mask [images, windows, H, N, M]."""
    # Scaling q costs N * d products per head, scaling the scores N * M.
    if isinstance(scale, paddle.Tensor):
        q = l2_normalize(q)
        k = l2_normalize(k)
    scores = paddle.matmul(q * scale, k, transpose_y=True)
    if mask is not None:
        # One addition over all images, of what is the same for each.
        bias = mask.unsqueeze(1) if bias is None else bias + mask.unsqueeze(1)
        scores = scores.reshape([-1, mask.shape[0], *scores.shape[1:]])
    return scores if bias is None else scores + bias


class Heads(nn.Layer):
    """What heads make of their queries, keys and values: softmax(q k^T / sqrt(head_dim)) v.

    Args:
        num_heads: heads H.
        head_dim: channels d of a head.
        qk_norm: whether each head's queries and keys are normalised (Dehghani et al. 2023,
            arXiv:2302.05442).
        attn_drop: dropout of the attention weights.

    Attributes:
        maps: attention maps of a head; its queries and keys are cut into as many.
    """

    maps = 1

    def __init__(self, num_heads: int, head_dim: int, qk_norm: bool, attn_drop: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.qk_norm = qk_norm
        width = head_dim // self.maps
        self.scale = width**-0.5
        self.q_norm = LayerNorm(width, epsilon=1e-6) if qk_norm else nn.Identity()
        self.k_norm = LayerNorm(width, epsilon=1e-6) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)

    def attend(self, qkv: paddle.Tensor) -> paddle.Tensor:
        """[B, N, 3 H d], part by part -> [B, N, H d]."""
        parts = [qkv]
        if self.qk_norm:
            q, k, v = qkv.reshape([-1, qkv.shape[1], 3, self.num_heads, self.head_dim]).unbind(2)
            parts = [part.flatten(2) for part in (self.q_norm(q), self.k_norm(k), v)]
        return attend_heads(
            parts, self.num_heads, self.head_dim, self.scale, self.attn_drop, flash=True
        )


class Attention(Heads):
    """Multi-head self-attention (Vaswani et al. 2017) with one fused projection, as in timm's
    ``Attention``.

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
        return self.proj_drop(self.proj(self.attend(self.qkv(x))))


def l2_normalize(x: paddle.Tensor, axis: int = -1) -> paddle.Tensor:
    """Returns vectors along ``axis`` of length 1; zeros stay zeros.

    Keys of padding are zeros. Their gradient is 0 here. PyTorch's is 1e12 times the output's, which
    float16 can't hold; it meets zeros alone.
    """
    x = in_float32(x)
    square = (x * x).sum(axis=axis, keepdim=True)
    return x * (paddle.rsqrt(square.clip(min=1e-24)) * (square > 1e-24).astype(x.dtype))


def attention_layers(model: nn.Layer) -> dict[str, nn.Layer]:
    """Returns the layers that attend, by name, in the order of depth: those that have an
    ``attn_drop``.
    """
    return {
        name: layer for name, layer in model.named_sublayers() if "attn_drop" in layer._sub_layers
    }


@contextlib.contextmanager
def attention_weights(
    model: nn.Layer, names: Collection[str]
) -> Iterator[dict[str, paddle.Tensor]]:
    """Yields a dictionary that fills with the attention weights [B, H, queries, keys] of ``names``
    as the model runs.

    They are what weighs the values: the softmax's output before dropout; in CaiT mixed between
    heads. Swin's B counts the windows of each image, HaloNet's its heads and H its blocks; a class
    token by itself is one query. Every kind of attention hands them to its ``attn_drop``, where a
    hook reads them. Without this context nothing is kept.
    """
    kept: dict[str, paddle.Tensor] = {}
    layers = {name: layer for name, layer in attention_layers(model).items() if name in names}
    hooks = []
    try:
        for name, layer in layers.items():
            hooks.append(
                layer.attn_drop.register_forward_pre_hook(
                    lambda _, x, name=name: kept.update({name: x[0]})
                )
            )
        yield kept
    finally:
        for hook in hooks:
            hook.remove()
