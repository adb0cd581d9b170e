"""Multi-head self-attention, and access to the attention weights of any model."""

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence

import paddle
from paddle import nn
from paddle.nn import functional as F

import ops
from models.layers.linear import LayerNorm, Linear, in_float32
from models.layers.rotary import Table, rotate


def attend_heads(
    qkv: Sequence[paddle.Tensor],
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
    """Returns softmax(q k^T scale + bias + mask) v of each head, by one fused operator if possible.

    Args:
        qkv: one tensor of q, k and v; or q, and one tensor of k and v; or q, k and v: each [B,
            tokens, channels].
        heads: the number of heads H.
        width: number of channels of a head's queries and keys.
        scale: a number; or [H, 1, 1], in which case scores are cosines of queries and keys.
        drop: dropout of the attention weights. Where it drops some, or a hook reads them
            (``attention_weights``), it is called with them.
        bias: [H, N, M], or one for each item: [B, H, N, M].
        mask: [windows, N, M], if the items are the windows of one image after the other; or [B, M], of
            each item, the same for all queries, without a bias.
        by_head: how a tensor of several parts is ordered. True: all parts of the first head, then
            those of the second one, and so on. False: the queries of all heads, then all keys, then
            all values.
        turns: cosines and sines by which queries and keys are rotated (``rotate``).
        halves: which channels make a pair in ``rotate``.
        flash: whether tensors of half precision may go to flash attention, if there is one.

    Returns:
        [B, N, H * channels of a value].
    """
    if can_fuse(qkv[0], drop):
        if bias is not None and bias.ndim == 3:
            bias = bias.unsqueeze(0)
        if mask is not None and mask.ndim == 2:
            mask = mask.unsqueeze(1)
        return ops.attention(
            qkv, heads, width, scale, bias, mask, by_head, turns=turns, halves=halves
        )
    if mask is not None and mask.ndim == 2:
        bias = mask.unsqueeze([1, 2])
        mask = None
    length = qkv[0].shape[1]
    if flash and not _has_hooks(drop) and ops.flash_attention_takes(qkv[-1], width):
        q, k, v = _rotate_qk(_split_heads(qkv, heads, width, by_head), turns, halves)
        # Under autocast layer norms return float32, which flash attention refuses.
        q = q.astype(v.dtype)
        k = k.astype(v.dtype)
        # The rate is 0 in evaluation, since Paddle 2.6 ignores ``training``.
        rate = _drop_rate(drop)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, training=bool(rate))
        return x.reshape([-1, length, heads * x.shape[3]])
    if turns is None:
        q, k, v = _split_heads(qkv, heads, width, by_head, heads_first=True)
    else:
        rotated = _rotate_qk(_split_heads(qkv, heads, width, by_head), turns, halves)
        q, k, v = [tensor.transpose([0, 2, 1, 3]) for tensor in rotated]
    weights = F.softmax(_scores(q, k, scale, bias, mask), axis=-1)
    if mask is not None:
        weights = weights.reshape([-1, *weights.shape[2:]])
    x = paddle.matmul(weights if drop is None else drop(weights), v)
    return x.transpose([0, 2, 1, 3]).reshape([-1, length, heads * x.shape[3]])


def can_fuse(x: paddle.Tensor, drop: nn.Layer | None) -> bool:
    """Returns whether one compiled operator may compute the attention of x.

    It doesn't return the attention weights, so neither dropout nor a hook of ``drop`` may need
    them.
    """
    return ops.usable(x) and not _has_hooks(drop) and not _drop_rate(drop)


def _has_hooks(drop: nn.Layer | None) -> bool:
    return drop is not None and bool(drop._forward_pre_hooks)


def _drop_rate(drop: nn.Layer | None) -> float:
    return drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0


def _split_heads(
    qkv: Sequence[paddle.Tensor], heads: int, width: int, by_head: bool, heads_first: bool = False
) -> Sequence[paddle.Tensor]:
    """Returns queries, keys and values: each [B, N, H, channels], or with ``heads_first`` [B, H, N,
    channels].
    """
    split: list[paddle.Tensor] = []
    for i, tensor in enumerate(qkv):
        length = tensor.shape[1]
        channels = tensor.shape[2] // heads
        # The last tensor holds all parts that the others don't.
        count = 4 - len(qkv) if i == len(qkv) - 1 else 1
        if count > 1 and not by_head:
            tensor = tensor.reshape([-1, length, count, heads, width])
            if heads_first:
                split += tensor.transpose([2, 0, 3, 1, 4]).unbind(0)
            else:
                split += tensor.unbind(2)
            continue
        tensor = tensor.reshape([-1, length, heads, channels])
        if heads_first:
            tensor = tensor.transpose([0, 2, 1, 3])
        if count > 1:
            value_width = channels - (count - 1) * width
            split += tensor.split([*[width] * (count - 1), value_width], axis=3)
        else:
            split.append(tensor)
    return split


def _rotate_qk(
    qkv: Sequence[paddle.Tensor], turns: Table | None, halves: bool
) -> Sequence[paddle.Tensor]:
    """Rotates the queries and keys of [q, k, v], each [B, N, H, d]."""
    if turns is None:
        return qkv
    q, k, v = qkv
    return rotate(q, turns, halves), rotate(k, turns, halves), v


def _scores(
    q: paddle.Tensor,
    k: paddle.Tensor,
    scale: float | paddle.Tensor,
    bias: paddle.Tensor | None,
    mask: paddle.Tensor | None,
) -> paddle.Tensor:
    """Returns the scores of queries and keys, which the softmax turns into weights.

    Shape: q [B, H, N, d], k [B, H, M, d] -> [B, H, N, M]; with a mask [images, windows, H, N, M].
    """
    # A tensor of a traced graph isn't a paddle.Tensor.
    if not isinstance(scale, float):
        q = l2_normalize(q)
        k = l2_normalize(k)
    # Scaling q costs N * d products per head, scaling the scores N * M.
    scores = paddle.matmul(q * scale, k, transpose_y=True)
    if mask is not None:
        # One addition for all images: bias and mask are the same for each.
        bias = mask.unsqueeze(1) if bias is None else bias + mask.unsqueeze(1)
        scores = scores.reshape([-1, mask.shape[0], *scores.shape[1:]])
    return scores if bias is None else scores + bias


class Heads(nn.Layer):
    """Heads of attention without projections: softmax(q k^T / sqrt(head_dim)) v.

    Args:
        num_heads: heads H.
        head_dim: channels d of a head.
        qk_norm: whether each head's queries and keys are normalised (Dehghani et al. 2023,
            arXiv:2302.05442).
        attn_drop: dropout rate of the attention weights.

    Attributes:
        maps: number of attention maps of a head, among which its queries and keys are divided.
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

    def attend(self, qkv: paddle.Tensor, mask: paddle.Tensor | None = None) -> paddle.Tensor:
        """Returns the outputs of all heads, side by side.

        Shape: [B, N, 3 H d], all queries first, then all keys, then all values -> [B, N, H d].

        Args:
            mask: added to each item's scores, [B, N, N], or [B, N]: the same for all queries.
        """
        return self._attend(self._tensors(qkv), mask)

    def attend_with_keys(
        self, qkv: paddle.Tensor, mask: paddle.Tensor | None
    ) -> tuple[paddle.Tensor, paddle.Tensor, int]:
        """Returns the outputs of all heads as ``attend``, and the tensor that holds their keys, with
        the first channel of these.
        """
        tensors = self._tensors(qkv)
        if len(tensors) == 1:
            return self._attend(tensors, mask), qkv, self.num_heads * self.head_dim
        return self._attend(tensors, mask), tensors[1], 0

    def _tensors(self, qkv: paddle.Tensor) -> list[paddle.Tensor]:
        if not self.qk_norm:
            return [qkv]
        q, k, v = qkv.reshape([-1, qkv.shape[1], 3, self.num_heads, self.head_dim]).unbind(2)
        return [tensor.flatten(2) for tensor in (self.q_norm(q), self.k_norm(k), v)]

    def _attend(
        self, tensors: Sequence[paddle.Tensor], mask: paddle.Tensor | None
    ) -> paddle.Tensor:
        return attend_heads(
            tensors,
            self.num_heads,
            self.head_dim,
            self.scale,
            self.attn_drop,
            mask=mask,
            flash=mask is None,
        )


class Attention(Heads):
    """Multi-head self-attention (Vaswani et al. 2017, arXiv:1706.03762), as timm's ``Attention``.

    One Linear projects to queries, keys and values.

    Args:
        dim: channels D of the tokens.
        num_heads: heads H.
        head_dim: channels of a head; None: D / H.
        qkv_bias: whether the projection of queries, keys and values has a bias.
        qk_norm: whether queries and keys are normalised within each head.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout of the output.
        proj_bias: whether the projection of the output has a bias.

    Shape: [B, N, D] -> [B, N, D]. A ``mask`` [B, N, N], or [B, N] for all queries, is added to each
    item's scores.
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

    def forward(self, x: paddle.Tensor, mask: paddle.Tensor | None = None) -> paddle.Tensor:
        others = () if mask is None else (mask,)
        return self.proj_drop(self.proj(self.attend(self.qkv(x), *others)))


def l2_normalize(x: paddle.Tensor, axis: int = -1) -> paddle.Tensor:
    """Returns x with vectors of length 1 along ``axis``; zero vectors stay zeros.

    The keys of padding are such zero vectors. Their gradient is 0 here. In PyTorch it is 1e12 times
    that of the output, which float16 can't hold. It is multiplied by zeros only, so the results are
    the same.
    """
    x = in_float32(x)
    square = (x * x).sum(axis=axis, keepdim=True)
    not_zero = (square > 1e-24).astype(x.dtype)
    return x * (paddle.rsqrt(square.clip(min=1e-24)) * not_zero)


def attention_layers(model: nn.Layer) -> dict[str, nn.Layer]:
    """Returns the attention layers by name, in the order of depth.

    An attention layer is a layer that has an ``attn_drop``.
    """
    return {
        name: layer for name, layer in model.named_sublayers() if "attn_drop" in layer._sub_layers
    }


@contextlib.contextmanager
def attention_weights(
    model: nn.Layer, names: Collection[str]
) -> Iterator[dict[str, paddle.Tensor]]:
    """Yields a dictionary that receives the attention weights [B, H, queries, keys] of the layers
    ``names`` as the model runs.

    They are the weights by which the values are multiplied: the softmax's output before dropout, in
    CaiT after the heads are mixed. In Swin, B counts the windows of all images. In HaloNet, B
    counts the heads of all images and H the blocks. Class attention has a single query.

    Every kind of attention passes its weights to its ``attn_drop``, where a hook reads them.
    Outside of this context no weights are kept.
    """
    kept: dict[str, paddle.Tensor] = {}
    layers = {name: layer for name, layer in attention_layers(model).items() if name in names}
    hooks = []

    def keep(name: str, _: nn.Layer, inputs: tuple[paddle.Tensor, ...]) -> None:
        kept[name] = inputs[0]

    try:
        for name, layer in layers.items():
            hook = functools.partial(keep, name)
            hooks.append(layer.attn_drop.register_forward_pre_hook(hook))
        yield kept
    finally:
        for hook in hooks:
            hook.remove()
