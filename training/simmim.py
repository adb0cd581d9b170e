"""SimMIM (Xie et al. 2022, arXiv:2111.09886): an encoder learns to predict the pixels of masked
squares of an image.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from paddle import nn

from datasets import ImageDataset
from errors import InputError
from loading.transforms import Normalize
from models import build_model
from models.base import ImageModel
from models.pretraining.simmim import SimMIM
from settings.configuration import Configuration
from settings.keys import Size, between
from settings.registry import tasks
from training.reconstructions import draw_reconstructions, shown_columns
from training.task import Batch, Task

MASK_RATIO = 0.6


@tasks.register("simmim", columns="")
class MaskedImageModelling(Task):
    """The task of predicting masked pixels from a mask token in place of each masked patch.

    The labels of a dataset, if it has any, are ignored. In an evaluation the mask of an image is
    always the same.

    Args:
        mask_ratio: the share of patches that are masked. None: the method's default, which is 0.75
            for mae (0.6 with Hiera), 0.6 for simmim and fcmae, and 0.4 for beit.
        mask_patch: side in pixels of the squares that are masked as a whole: a multiple of
            PATCH_SIZE.
    """

    def __init__(
        self,
        config: Configuration,
        classes: Sequence[str] = (),
        *,
        mask_ratio: Annotated[float, between(0.01, 0.99)] | None = None,
        mask_patch: Size = 32,
    ) -> None:
        super().__init__(config, classes)
        self.mask_ratio = MASK_RATIO if mask_ratio is None else mask_ratio
        self.mask_patch = mask_patch
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)

    def build_network(self) -> nn.Layer:
        """Returns the model with its decoder.

        Raises:
            InputError: the architecture or its sizes don't fit, or the mask covers all of an image.
        """
        network = self.make_network(build_model(self.config))
        self.units = network.units
        squares = math.prod(self.units)
        if masked_count(squares, self.mask_ratio) == squares:
            raise InputError(
                f"METHOD.MASK_RATIO {self.mask_ratio:g} masks the whole image, which has {squares}"
                f" squares of {network.mask_patch} x {network.mask_patch} pixels; lower it, or"
                " use larger"
                " images"
            )
        return network

    def make_network(self, encoder: ImageModel) -> Any:
        """Returns the network of an encoder. It has ``units``, ``mask_patch``, ``reconstruct`` and
        ``mask_of_pixels`` as ``SimMIM``.
        """
        return SimMIM(encoder, self.mask_patch)

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        dataset.draws["masked"] = functools.partial(
            draw_mask, units=self.units, ratio=self.mask_ratio
        )

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        return {"loss": network(self.normalize(batch["pixels"]), batch["masked"])}

    def draw(self, model: nn.Layer, dataset: ImageDataset, folder: Path) -> None:
        """Draws images, the input of the encoder, and that with the predicted pixels."""
        pixels, masked = shown_columns(dataset, "pixels", "masked")
        images = self.normalize(pixels)
        predicted = model.reconstruct(images, masked).astype("float32")
        hidden = model.mask_of_pixels(masked)
        seen = images * (1 - hidden)
        rows = [images, seen, seen + predicted * hidden]
        draw_reconstructions(self.config, rows, folder / "reconstructions.png")


def masked_count(squares: int, ratio: float) -> int:
    """Returns how many of an image's squares are masked: their share, rounded up."""
    return math.ceil(squares * ratio)


def draw_mask(rng: np.random.Generator, units: tuple[int, int], ratio: float) -> np.ndarray:
    """Returns a mask of squares [rows, columns] uint8, 1 where a square is masked."""
    squares = math.prod(units)
    mask = np.zeros(squares, np.uint8)
    mask[rng.permutation(squares)[: masked_count(squares, ratio)]] = 1
    return mask.reshape(units)
