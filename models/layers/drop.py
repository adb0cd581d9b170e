"""Stochastic depth, and dropout of channels and patches."""

import paddle
from paddle import nn

from models.layers.scale import add_branch, scale_planes, times_samples


class DropPath(nn.Layer):
    """Stochastic depth (Huang et al. 2016, arXiv:1603.09382).

    In training a residual branch is dropped for each sample with probability ``drop_prob``. The
    branches that stay are divided by 1 - drop_prob.
    """

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: paddle.Tensor, onto: paddle.Tensor | None = None) -> paddle.Tensor:
        """Returns the branch x [B, ...].

        Args:
            onto: a tensor of the same shape to which the branch is added. For a
                residual connection, this is faster than a separate sum.
        """
        factors = self._factors(x)
        if onto is not None:
            return add_branch(onto, x, factors)
        return x if factors is None else times_samples(x, factors)

    def _factors(self, x: paddle.Tensor) -> paddle.Tensor | None:
        """Returns the factor of each sample of x, [B], float32; None: no branch is dropped."""
        if self.drop_prob == 0.0 or not self.training:
            return None
        keep = 1.0 - self.drop_prob
        return paddle.bernoulli(paddle.full([x.shape[0]], keep, dtype="float32")) / keep


class ChannelDropout(nn.Layer):
    """Dropout of whole channels, as torch's ``Dropout2d``, in one pass on a CPU.

    In training each channel of each image becomes 0 with probability ``drop_prob``. The channels
    that stay are divided by 1 - drop_prob.

    Shape: [B, C, H, W] -> the same.
    """

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1.0 - self.drop_prob
        factors = paddle.bernoulli(paddle.full([*x.shape[:2], 1, 1], keep, dtype="float32")) / keep
        return scale_planes(x, factors.astype(x.dtype))


class PatchDropout(nn.Layer):
    """Leaves out a random share ``drop_prob`` of each sample's patch tokens in training (Liu et al.
    2022, arXiv:2208.07220).

    The first ``num_prefix_tokens`` tokens stay in front. As in timm's ``PatchDropout``, every
    sample keeps the same number of patches, at least one. They come in random order and aren't
    scaled.

    Shape: [B, prefix + patches, D] -> [B, prefix + kept, D].

    Args:
        drop_end: what ``drop_prob`` goes to in the course of a training, which sets it before each
            step (``training.step_settings``). None: it stays.

    Attributes:
        drop_prob: the share of the next step.
        drop_start: that of the first step.
    """

    def __init__(
        self, drop_prob: float, num_prefix_tokens: int, drop_end: float | None = None
    ) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self.drop_start = drop_prob
        self.drop_end = drop_end
        self.num_prefix_tokens = num_prefix_tokens

    def choose(self, batch: int, patches: int) -> paddle.Tensor | None:
        """Returns the places of the patches that each sample keeps, [B, kept] int64; None: all."""
        if self.drop_prob == 0.0 or not self.training:
            return None
        kept = max(1, int(patches * (1.0 - self.drop_prob)))
        return paddle.rand([batch, patches]).argsort(axis=1)[:, :kept]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        chosen = self.choose(x.shape[0], x.shape[1] - self.num_prefix_tokens)
        return x if chosen is None else self._take(x, chosen)

    def of_padded(
        self, x: paddle.Tensor, valid: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Leaves out patches of samples that are padded to one length. Each sample keeps the same
        share of its own patches, at least one.

        Args:
            x: [B, prefix + N, D].
            valid: which of the N tokens are patches, [B, N] bool.

        Returns:
            [B, prefix + kept, D], and which of the kept tokens are patches.
        """
        if self.drop_prob == 0.0 or not self.training:
            return x, valid
        batch, length = valid.shape
        share = 1.0 - self.drop_prob
        kept = max(1, int(length * share))
        # Padding comes last.
        padding = 1.0 - valid.astype("float32")
        order = (paddle.rand([batch, length]) + padding).argsort(axis=1)
        own = (valid.astype("float64").sum(1, keepdim=True) * share).astype("int64").clip(min=1)
        return self._take(x, order[:, :kept]), paddle.arange(kept).unsqueeze(0) < own

    def _take(self, x: paddle.Tensor, chosen: paddle.Tensor) -> paddle.Tensor:
        """Returns the tokens before the patches, and the chosen patches."""
        batch, length, dim = x.shape
        chosen = chosen + self.num_prefix_tokens
        prefix = paddle.arange(self.num_prefix_tokens).expand([batch, -1])
        # Gathers whole rows of [B * N, D] for all samples at once.
        rows = paddle.concat([prefix, chosen], axis=1) + length * paddle.arange(batch).unsqueeze(1)
        return paddle.gather(x.reshape([-1, dim]), rows.flatten()).reshape([batch, -1, dim])
