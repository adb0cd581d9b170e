"""FCMAE, the pre-training of ConvNeXt V2 (Woo et al. 2023, arXiv:2301.00808): a convolutional
encoder of the squares that are seen, and a decoder that predicts the others' pixels.
"""

from collections.abc import Sequence
from typing import Annotated

from models.base import ImageModel
from models.pretraining.fcmae import ConvolutionalMaskedAutoencoder
from settings.configuration import Configuration
from settings.keys import Depth, Size, between
from settings.registry import tasks
from training.simmim import MaskedImageModelling

# The paper's values.
DECODER_WIDTH = 512
DECODER_DEPTH = 1


@tasks.register("fcmae", columns="")
class ConvolutionalMaskedAutoencoding(MaskedImageModelling):
    """The task of predicting masked squares by a ConvNeXt, which sees nothing of them.

    Args:
        mask_ratio: the share of patches that are masked. None: the method's default, which is 0.75
            for mae (0.6 with Hiera), 0.6 for simmim and fcmae, and 0.4 for beit.
        decoder_width: number of channels of the decoder. None: 512 for mae and fcmae, 768 for
            tokenizer.
        decoder_depth: blocks of the decoder. None: 8 for mae, 1 for fcmae and tokenizer.
    """

    def __init__(
        self,
        config: Configuration,
        classes: Sequence[str] = (),
        *,
        mask_ratio: Annotated[float, between(0.01, 0.99)] | None = None,
        decoder_width: Size | None = None,
        decoder_depth: Depth | None = None,
    ) -> None:
        # SimMIM's share of masked squares is FCMAE's, too.
        super().__init__(config, classes, mask_ratio=mask_ratio)
        self.decoder = (decoder_width or DECODER_WIDTH, decoder_depth or DECODER_DEPTH)

    def make_network(self, encoder: ImageModel) -> ConvolutionalMaskedAutoencoder:
        return ConvolutionalMaskedAutoencoder(encoder, *self.decoder)
