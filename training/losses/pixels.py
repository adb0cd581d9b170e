"""Losses of a class for each pixel. Each is a mean over the pixels of an image that have a class."""

import paddle

from training.losses.softmax import log_softmax


def pixel_cross_entropy(
    logits: paddle.Tensor,
    mask: paddle.Tensor,
    ignored: int,
    weight: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Returns the cross-entropy of each image: [B] float32.

    It is the mean over the image's pixels that have a class, with ``weight`` the weighted mean; 0
    for an image without such pixels. So it doesn't depend on the other images of a batch.

    Args:
        logits: [B, K, H, W].
        mask: [B, H, W], the pixels' classes.
        ignored: the index of pixels without a class.
        weight: a factor per class, [K].
    """
    # Paddle chooses between tensors of int64, not of uint8.
    labels = mask.astype("int64")
    known = labels != ignored
    labels = paddle.where(known, labels, paddle.zeros_like(labels))
    logarithms = log_softmax(logits.transpose([0, 2, 3, 1]))
    losses = -paddle.take_along_axis(logarithms, labels.unsqueeze(-1), axis=-1).squeeze(-1)
    factors = known.astype("float32")
    if weight is not None:
        factors = factors * paddle.gather(weight, labels.flatten()).reshape(labels.shape)
    return (losses * factors).sum([1, 2]) / factors.sum([1, 2]).clip(min=1e-12)
