"""BEiT (Bao et al. 2021, arXiv:2106.08254) and BEiT v2 (Peng et al. 2022, arXiv:2208.06366): an
encoder learns to predict the tokens of masked patches.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import paddle
from paddle import nn

from config import get_config, with_values
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
from training.checkpoint.description import task_of
from training.equal_ranks import load_equal
from training.losses import Teacher
from training.reconstructions import draw_reconstructions, shown_columns
from training.task import Batch, Task
from training.tokenizer import normalisation, other_config

# The paper's values.
MASK_RATIO = 0.4
MIN_BLOCK = 16


@tasks.register("beit", metrics="token_acc", columns="")
class BeitTraining(Task):
    """Trains an encoder to predict tokens. ``models.pretraining.beit`` has the networks.

    Args:
        tokenizer: the tokenizer (TASK tokenizer): a YAML file, a name, or a run's config.yaml.
        tokenizer_path: the file of the tokenizer's weights.
        mask_ratio: the share of patches that are masked. None: the method's default, which is 0.75
            for mae (0.6 with Hiera), 0.6 for simmim and fcmae, and 0.4 for beit.
        min_block: the smallest number of patches in a masked block. None: 16 for beit, 4 for dino.
        head_layers: number of additional blocks that predict the tokens from the class token and
            the patches of an earlier block (BEiT v2). 0: none.
        early_layers: the number of the block, counted from 1, whose patches the additional blocks
            of HEAD_LAYERS read.
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
        min_block: Size | None = None,
        head_layers: Blocks = 0,
        early_layers: Annotated[Blocks, above_zero("METHOD.HEAD_LAYERS")] = 0,
    ) -> None:
        super().__init__(config, classes)
        if tokenizer is None or tokenizer_path is None:
            raise InputError(
                f"METHOD.TOKENIZER is {tokenizer}, METHOD.TOKENIZER_PATH {tokenizer_path}: BEiT"
                " predicts the tokens of a tokenizer; set its YAML file and its weights (TASK"
                " tokenizer"
                " trains one)"
            )
        self.tokenizer_file = tokenizer
        self.tokenizer_path = tokenizer_path
        self.mask_ratio = MASK_RATIO if mask_ratio is None else mask_ratio
        self.min_block = MIN_BLOCK if min_block is None else min_block
        self.blocks = (early_layers, head_layers)
        self.normalize = Normalize(*normalisation(config))

    def build_network(self) -> BeitPretraining:
        """Returns the network, and loads the tokenizer.

        Raises:
            InputError: the encoder, the tokenizer or the masks don't fit.
        """
        encoder = build_model(self.config)
        config = self._tokenizer_config()
        tokenizer = tasks.choose(config)(config).make_network(build_model(config))
        # The network checks whether the encoder has such an embedding.
        grid = getattr(getattr(encoder, "patch_embed", None), "grid_size", tokenizer.grid)
        if tuple(grid) != tokenizer.grid:
            raise InputError(
                "METHOD.TOKENIZER has {} x {} tokens, but the model {} x {} patches; use models with"
                " patches of the same size".format(*tokenizer.grid, *grid)
            )
        patches = grid[0] * grid[1]
        count = round(self.mask_ratio * patches)
        check_blocks(tokenizer.grid, count, self.min_block)
        network = BeitPretraining(encoder, tokenizer.vocabulary, count, *self.blocks)
        key = "METHOD.TOKENIZER_PATH"
        report = load_equal(tokenizer, config, "tokenizer", key, self.tokenizer_path)
        self.note = (
            f"tokenizer {config.MODEL.NAME}: {report}; {count} of {patches} patches are masked"
        )
        self.tokenizer = tokenizer
        self.teacher = Teacher(
            _Tokens(tokenizer), *normalisation(self.config), *normalisation(config)
        )
        self.draw_mask = functools.partial(
            block_mask, grid=tokenizer.grid, count=count, min_block=self.min_block
        )
        return network

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        dataset.draws["masked"] = self.draw_mask

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        images = self.normalize(batch["pixels"])
        return network(images, batch["masked"], self.teacher(images))

    def draw(self, model: nn.Layer, dataset: ImageDataset, folder: Path) -> None:
        """Draws images, the input of the encoder, and its predictions.

        If the tokenizer decodes pixels, the third row shows what it makes of the images' own tokens,
        and the fourth what it makes of the predicted ones in the masked patches. A tokenizer with a
        teacher decodes none. Then a masked patch is white in the third row if its token is right,
        and black if it isn't.
        """
        pixels, masked = shown_columns(dataset, "pixels", "masked")
        images = self.normalize(pixels)
        network: Any = model
        tokens = self.teacher(images)
        predicted = network.predict(images, masked)
        hidden = network.values_of_pixels(masked)
        rows = [images, images * (1 - hidden)]
        if self.tokenizer.decodes_pixels:
            mixed = paddle.where(masked > 0, predicted, tokens)
            rows += [self._decoded(tokens), self._decoded(mixed)]
        else:
            mean, std = (
                paddle.to_tensor(values, "float32").reshape([1, -1, 1, 1])
                for values in normalisation(self.config)
            )
            white_or_black = (network.values_of_pixels(predicted == tokens) - mean) / std
            rows.append(images * (1 - hidden) + white_or_black * hidden)
        draw_reconstructions(self.config, rows, folder / "reconstructions.png")

    @paddle.no_grad()
    def _decoded(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Returns the images of tokens [B, tokens]: [B, C, H, W], normalised as the model's."""
        tokenizer = self.tokenizer
        images = tokenizer.pictures(tokenizer.decode(tokenizer.codes(tokens)))
        return (images - self.teacher.shift) / self.teacher.scale

    def _tokenizer_config(self) -> Configuration:
        """Returns the configuration of the tokenizer.

        Raises:
            InputError: its YAML file or its weights are another task's, or its images don't fit.
        """
        path = self.tokenizer_file
        task = get_config(path).TASK
        if task != "tokenizer":
            raise InputError(
                f"METHOD.TOKENIZER {path} has TASK {task}, expected tokenizer; use the YAML file"
                " of a"
                " tokenizer"
            )
        trained_for = task_of(self.tokenizer_path)
        if trained_for not in (None, "tokenizer"):
            raise InputError(
                f"METHOD.TOKENIZER_PATH {self.tokenizer_path} has weights of TASK {trained_for},"
                " expected tokenizer; use the weights of a tokenizer"
            )
        config = other_config(self.config, path, "METHOD.TOKENIZER")
        return with_values(config, "TASK tokenizer", MODEL__NUM_CLASSES=0)


class _Tokens(nn.Layer):
    """Maps normalised images to their tokens, [B, tokens] int64."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        return self.tokenizer.tokens(images)
