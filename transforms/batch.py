"""Transforms of a batch, on the device."""

import paddle


class Normalize:
    """Pixels [B, S, S, C] uint8 -> (pixels / 255 - mean) / std as [B, C, S, S] float32.

    Args:
        mean, std: one value per channel, or one for all, of pixels in 0..1.
    """

    def __init__(self, mean: list[float], std: list[float]) -> None:
        scale = [1 / (255 * s) for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        self.scale = paddle.to_tensor(scale, dtype="float32").reshape([1, -1, 1, 1])
        self.shift = paddle.to_tensor(shift, dtype="float32").reshape([1, -1, 1, 1])

    def __call__(self, pixels: paddle.Tensor) -> paddle.Tensor:
        return pixels.transpose([0, 3, 1, 2]).astype("float32") * self.scale + self.shift
