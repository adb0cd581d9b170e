"""BEiT (Bao et al. 2021, arXiv:2106.08254) and BEiT v2 (Peng et al. 2022, arXiv:2208.06366): an
encoder learns to predict the tokens of masked patches.
"""

import functools
from collections.abc import Sequence
from typing import Annotated, ClassVar

import paddle
from paddle import nn

from config import with_values
from datasets import ImageDataset
from errors import InputError
from loading.block_masks import block_mask, check_blocks
from loading.transforms import Normalize
from models import build_model
from models.pretraining.beit import BeitPretraining
from models.pretraining.tokenizer import Tokenizer
from settings.configuration import Configuration
from settings.keys import Blocks, FilePath, Size, above_zero, between
from settings.registry import tasks
from training.equal_ranks import load_equal
from training.losses import Teacher
from training.task import Batch, Task
from training.tokenizer import build_tokenizer, check_patch_drop, fitting, scales

_MASK_RATIO = 0.4


@tasks.register("beit", metrics="token_acc", columns="")
class BeitTraining(Task):
    """Trains an encoder to predict tokens. ``models.pretraining.beit`` has the networks.

    Args:
        tokenizer: YAML file or name of the tokenizer (TASK tokenizer), or a run's config.yaml.
        tokenizer_path: the file of the tokenizer's weights.
        mask_ratio: the share of patches that are masked; None: the method's own.
        min_block: the least number of patches of a masked block.
        head_layers: further blocks, which predict the tokens from the class token and an earlier
            block's patches (BEiT v2). 0: none.
        early_layers: the block, counted from 1, whose patches the further blocks read.
    """

    lines: ClassVar[dict[str, str]] = dict.fromkeys(
        ("train", "val", "best", "result"), "loss: {loss:.4f}, token_acc: {token_acc:.2f}"
    )
    curves: ClassVar[dict[str, str]] = {
        "loss": "loss",
        "token_acc": "right tokens of masked patches (%)",
        "lr": "learning rate",
    }

    def __init__(
        self,
        config: Configuration,
        classes: Sequence[str] = (),
        *,
        tokenizer: FilePath | None = None,
        tokenizer_path: FilePath | None = None,
        mask_ratio: Annotated[float, between(0.01, 0.99)] | None = None,
        min_block: Size = 16,
        head_layers: Blocks = 0,
        early_layers: Annotated[Blocks, above_zero("METHOD.HEAD_LAYERS")] = 0,
    ) -> None:
        super().__init__(config, classes)
        if tokenizer is None or tokenizer_path is None:
            raise InputError(
                f"METHOD.TOKENIZER is {tokenizer}, METHOD.TOKENIZER_PATH {tokenizer_path}: BEiT"
                " predicts a tokenizer's tokens; give its YAML and its weights (TASK tokenizer"
                " trains one)"
            )
        check_patch_drop(config)
        self.mask_ratio = _MASK_RATIO if mask_ratio is None else mask_ratio
        self.min_block = min_block
        self.blocks = (early_layers, head_layers)
        self.normalize = Normalize(*scales(config))

    def build_network(self) -> BeitPretraining:
        """Returns the network, and loads the tokenizer.

        Raises:
            InputError: the encoder, the tokenizer or the masks don't fit.
        """
        encoder = build_model(self.config)
        tokenizer, config = self._build_tokenizer()
        # The network checks whether the encoder has such an embedding.
        grid = getattr(getattr(encoder, "patch_embed", None), "grid_size", tokenizer.grid)
        if tuple(grid) != tokenizer.grid:
            raise InputError(
                "METHOD.TOKENIZER has {} x {} tokens, the model {} x {} patches; take models with"
                " equal patches".format(*tokenizer.grid, *grid)
            )
        count = round(self.mask_ratio * grid[0] * grid[1])
        check_blocks(tokenizer.grid, count, self.min_block)
        network = BeitPretraining(encoder, tokenizer.vocabulary, count, *self.blocks)
        report = load_equal(
            tokenizer,
            config,
            "tokenizer",
            "METHOD.TOKENIZER_PATH",
            self.config.METHOD.TOKENIZER_PATH,
        )
        patches = grid[0] * grid[1]
        self.note = (
            f"tokenizer {config.MODEL.NAME}: {report}; {count} of {patches} patches are masked"
        )
        self.tokenizer = Teacher(_Tokens(tokenizer), *scales(self.config), *scales(config))
        self.draw_mask = functools.partial(
            block_mask, grid=tokenizer.grid, count=count, min_block=self.min_block
        )
        return network

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        dataset.draws["mask"] = self.draw_mask

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        images = self.normalize(batch["pixels"])
        return network(images, batch["mask"], self.tokenizer(images))

    def _build_tokenizer(self) -> tuple[Tokenizer, Configuration]:
        """Returns the tokenizer with fresh weights, and its configuration."""
        path = self.config.METHOD.TOKENIZER
        config = fitting(self.config, path, "METHOD.TOKENIZER")
        if config.TASK != "tokenizer":
            raise InputError(
                f"METHOD.TOKENIZER {path} has TASK {config.TASK}, expected tokenizer; give the YAML"
                " of a tokenizer"
            )
        config = with_values(config, "TASK tokenizer", MODEL__NUM_CLASSES=0)
        return build_tokenizer(config), config


class _Tokens(nn.Layer):
    """Maps normalised images to their tokens, [B, tokens] int64."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        return self.tokenizer.tokens(images)
