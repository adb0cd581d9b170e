"""Token merging (Bolya et al. 2022, arXiv:2210.09461): patches that resemble each other become one.

In each block, between the attention and the MLP, the patches at even places are compared with those
at odd places, by the cosine similarity of their keys, averaged over the heads. Each patch at an even
place has its most similar one at an odd place. The ``merged`` pairs that are most similar become one
token each, the mean of all patches that it stands for. Tokens before the patches stay.
"""

from typing import NamedTuple

import paddle

import ops
from models.layers.attention import l2_normalize
from models.layers.linear import float32_matmul


class Match(NamedTuple):
    """The assignment of tokens to merged tokens.

    Attributes:
        targets: place of each token among the merged ones, [B, N] int32.
        weights: share of each token in its merged one, [B, N].
        sizes: patches that each merged token stands for, [B, N - merged].
    """

    targets: paddle.Tensor
    weights: paddle.Tensor
    sizes: paddle.Tensor


def match_tokens(
    keys: paddle.Tensor,
    sizes: paddle.Tensor | None,
    offset: int,
    heads: int,
    width: int,
    prefix: int,
    merged: int,
) -> Match:
    """Returns which tokens become one. It has no gradient.

    Among equally similar pairs the first ones, in the order of patches, are merged. The merged
    tokens are in this order: the prefix, the patches of even places that stay, those of odd places.

    Args:
        keys: [B, N, channels]. The keys of all heads are heads * width channels from ``offset`` on.
        sizes: patches that each token stands for, [B, N]; None: one each.
        prefix: number of tokens before the patches.
        merged: number of pairs, at most half of the patches.
    """
    if ops.usable(keys):
        return Match(*ops.match_tokens(keys, sizes, offset, heads, width, prefix, merged))
    with paddle.no_grad():
        return _match(keys.detach(), sizes, offset, heads, width, prefix, merged)


def _match(
    keys: paddle.Tensor,
    sizes: paddle.Tensor | None,
    offset: int,
    heads: int,
    width: int,
    prefix: int,
    merged: int,
) -> Match:
    """``match_tokens`` by Paddle's operators, which can be traced."""
    tokens = keys.shape[1]
    patches = tokens - prefix
    count = tokens - merged
    of_patches = keys[:, prefix:, offset : offset + heads * width].astype("float32")
    of_patches = of_patches.reshape([-1, patches, heads, width]).mean(2)
    of_patches = l2_normalize(of_patches)
    even = of_patches[:, ::2]
    odd = of_patches[:, 1::2]
    similarities = float32_matmul(even, odd, transpose_y=True)
    best = similarities.max(2)
    choice = similarities.argmax(2)
    # How many pairs come before each: the more similar ones, and the first of equal ones.
    evens = even.shape[1]
    earlier = paddle.tril(paddle.ones([evens, evens]), -1)
    own = best.unsqueeze(2)
    other = best.unsqueeze(1)
    is_before = (other > own).astype("float32")
    is_before = is_before + (other == own).astype("float32") * earlier
    leaves = (is_before.sum(2) < merged).astype("int64")
    staying = prefix + paddle.cumsum(1 - leaves, axis=1) - 1
    first_odd = prefix + evens - merged
    of_even = leaves * (first_odd + choice) + (1 - leaves) * staying
    of_odd = paddle.zeros_like(choice[:, : patches - evens]) + paddle.arange(patches - evens)
    of_odd = of_odd + first_odd
    # Back to the order of patches: even and odd places in turn.
    if patches % 2:
        of_odd = paddle.concat([of_odd, of_odd[:, :1]], axis=1)
    targets = paddle.stack([of_even, of_odd], axis=2).reshape([-1, 2 * evens])[:, :patches]
    if prefix:
        of_prefix = paddle.zeros_like(keys[:, :prefix, 0]).astype("int64") + paddle.arange(prefix)
        targets = paddle.concat([of_prefix, targets], axis=1)
    if sizes is None:
        sizes = paddle.ones_like(keys[:, :, 0]).astype("float32")
    places = _one_hot(targets, count)
    sums = (sizes.unsqueeze(2) * places).sum(1)
    weights = sizes / (places * sums.unsqueeze(1)).sum(2)
    return Match(targets.astype("int32"), weights, sums)


def merge_tokens(x: paddle.Tensor, match: Match, count: int) -> paddle.Tensor:
    """Returns the merged tokens: [B, N, D] -> [B, count, D]."""
    if ops.usable(x):
        return ops.merge_tokens(x, match.targets, match.weights, count)
    places = _one_hot(match.targets, count) * match.weights.unsqueeze(2)
    return float32_matmul(places.transpose([0, 2, 1]).astype(x.dtype), x)


def _one_hot(places: paddle.Tensor, count: int) -> paddle.Tensor:
    """Returns 1 at each place, and 0 elsewhere: [B, N] -> [B, N, count] float32."""
    numbers = paddle.arange(count, dtype=places.dtype)
    return (places.unsqueeze(2) == numbers).astype("float32")


def log_sizes(sizes: paddle.Tensor) -> paddle.Tensor:
    """Returns what is added to the scores of each key, so that a token has the attention of all
    patches that it stands for: [B, N] -> [B, N].
    """
    # Of a copy: Paddle Inference 3.3.1 writes the logarithms over the sizes, which are read again.
    return paddle.log(sizes * 1.0)


class Merging:
    """The merged tokens of one forward pass.

    Args:
        prefix: number of tokens before the patches.
        merged: patches that each block merges, as long as there are twice as many.

    Attributes:
        sizes: patches that each token stands for, [B, N]; None: one each.
        source: the token that stands for each token of the first block, [B, N0] int32; None: its
            own.
    """

    def __init__(self, prefix: int, merged: int) -> None:
        self.prefix = prefix
        self.merged = merged
        self.sizes: paddle.Tensor | None = None
        self.source: paddle.Tensor | None = None

    def pairs_of(self, tokens: int) -> int:
        """Returns how many pairs a block merges of so many tokens."""
        return max(0, min(self.merged, (tokens - self.prefix) // 2))

    def mask(self) -> paddle.Tensor | None:
        """Returns what is added to the scores of each key, so that a token has the attention of all
        patches that it stands for: [B, N]; None: nothing.
        """
        return None if self.sizes is None else log_sizes(self.sizes)

    def record(self, match: Match) -> None:
        """Takes over the tokens that a block merged."""
        self.sizes = match.sizes
        if self.source is None:
            self.source = match.targets
        else:
            self.source = paddle.take_along_axis(match.targets, self.source.astype("int64"), axis=1)

    def spread(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns tokens in the places of the first block: each place has the token that stands for
        it: [B, N, D] -> [B, N0, D].
        """
        if self.source is None:
            return x
        places = _one_hot(self.source, x.shape[1])
        return float32_matmul(places.astype(x.dtype), x)
