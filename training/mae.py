"""MAE (He et al. 2021, arXiv:2111.06377): an encoder sees a quarter of an image, and learns by the
reconstruction of the rest.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from paddle import nn

from datasets import ImageDataset
from loading.transforms import Normalize
from models import build_model
from models.hiera import Hiera
from models.pretraining.mae import MaskedAutoencoder, patch_order
from models.pretraining.mae_hiera import MaskedAutoencoderHiera
from settings.configuration import Configuration
from settings.keys import Depth, Size, between
from settings.registry import tasks
from training.reconstructions import draw_reconstructions, shown_columns
from training.task import Batch, Task

# The papers' values.
MASK_RATIO = 0.75
MASK_RATIO_OF_HIERA = 0.6
DECODER_WIDTH = 512
DECODER_DEPTH = 8
DECODER_HEADS = 16


@tasks.register("mae", columns="")
class MaskedAutoencoding(Task):
    """The task of reconstructing masked patches from the visible ones.

    The labels of a dataset, if it has any, are ignored. In an evaluation the mask of an image is
    always the same.

    Args:
        mask_ratio: the share of patches that are masked. None: the method's default, which is 0.75
            for mae (0.6 with Hiera), 0.6 for simmim and fcmae, and 0.4 for beit.
        decoder_width: number of channels of the decoder. None: 512 for mae and fcmae, 768 for
            tokenizer.
        decoder_depth: blocks of the decoder. None: 8 for mae, 1 for fcmae and tokenizer.
        decoder_heads: attention heads of each decoder block. None: 16 for mae, 12 for tokenizer.
        norm_target: whether the target pixels of each masked patch are normalised to mean 0 and
            variance 1.
    """

    def __init__(
        self,
        config: Configuration,
        classes: Sequence[str] = (),
        *,
        mask_ratio: Annotated[float, between(0.01, 0.99)] | None = None,
        decoder_width: Size | None = None,
        decoder_depth: Depth | None = None,
        decoder_heads: Size | None = None,
        norm_target: bool = True,
    ) -> None:
        super().__init__(config, classes)
        self.mask_ratio = mask_ratio
        self.decoder = (
            decoder_width or DECODER_WIDTH,
            decoder_depth or DECODER_DEPTH,
            decoder_heads or DECODER_HEADS,
        )
        self.norm_target = norm_target
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)

    def build_network(self) -> nn.Layer:
        """Returns the model with a decoder.

        Raises:
            InputError: the architecture can't leave out patches, the mask leaves none or all of
                them visible, or the sizes of the decoder don't fit together.
        """
        encoder: Any = build_model(self.config)
        is_hiera = isinstance(encoder, Hiera)
        ratio = self.mask_ratio
        if ratio is None:
            ratio = MASK_RATIO_OF_HIERA if is_hiera else MASK_RATIO
        kind = MaskedAutoencoderHiera if is_hiera else MaskedAutoencoder
        network = kind(encoder, ratio, *self.decoder, self.norm_target)
        self.count = math.prod(network.units)
        parts = "mask units" if is_hiera else "patches"
        self.note = f"{network.num_visible} of {self.count} {parts} are visible"
        return network

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        dataset.draws["order"] = lambda rng: patch_order(rng.random(self.count))

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        return {"loss": network(self.normalize(batch["pixels"]), batch["order"])}

    def draw(self, model: nn.Layer, dataset: ImageDataset, folder: Path) -> None:
        """Draws images, their visible patches, and these with the reconstructed ones."""
        pixels, order = shown_columns(dataset, "pixels", "order")
        images = self.normalize(pixels)
        network: Any = model
        rows = [images, *network.reconstruct(images, order)]
        draw_reconstructions(self.config, rows, folder / "reconstructions.png")
