"""The task of tokenizers, whose tokens BEiT predicts: a discrete VAE (Ramesh et al. 2021,
arXiv:2102.12092), or the vector quantisation of BEiT v2 (Peng et al. 2022, arXiv:2208.06366).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import paddle
from paddle import nn

from config import get_config, with_values
from datasets import ImageDataset
from errors import InputError
from loading.transforms import Normalize
from models import architecture, build_model, with_switches
from models.base import ImageModel
from models.costs import model_of
from models.pretraining.tokenizer import Tokenizer
from settings.configuration import Configuration
from settings.keys import Depth, Factor, FilePath, InTraining, Positive, Size, between, is_
from settings.registry import tasks
from training.equal_ranks import load_equal
from training.losses import Teacher
from training.reconstructions import draw_reconstructions, shown_columns
from training.task import Batch, Metrics, Task, sum_of_each
from utils import all_reduce_sum

# Seeds of ``gumbel_noise`` are below this number.
_SEEDS = 2**31 - 1
# Of the decoder, unless METHOD says otherwise.
DECODER_WIDTH = 768
DECODER_DEPTH = 1
DECODER_HEADS = 12


@tasks.register("tokenizer", metrics="reconstruction perplexity usage", columns="")
class TokenizerTraining(Task):
    """Trains an encoder, a codebook and a decoder, which is a BEiT over the grid of codes.

    Args:
        vocabulary: the number of different tokens.
        code_dim: the width of a token's code.
        quantizer: how an image's features become codes. "gumbel": a discrete VAE. "nearest": the
            codes with the smallest angle, as in BEiT v2.
        decoder_width: channels of the decoder; None: the method's own.
        decoder_depth: blocks of the decoder; None: the method's own.
        decoder_heads: attention heads of each of these blocks; None: the method's own.
        temperature: of the softmax with Gumbel noise in the first epoch.
        temperature_end: of the softmax with Gumbel noise in the last epoch; between them it falls
            by the same factor each epoch.
        kl_weight: gumbel: the weight of the divergence from equally frequent tokens.
        teacher: YAML file or name of a model whose last features are reconstructed instead of
            pixels (BEiT v2). None: pixels.
        teacher_path: the file of the teacher's weights.
    """

    best = "reconstruction"
    lines: ClassVar[dict[str, str]] = {
        "train": "loss: {loss:.4f}, reconstruction: {reconstruction:.4f}",
        "val": "reconstruction: {reconstruction:.4f}, codes in use: {usage:.1f} %, perplexity: {perplexity:.1f}",
        "best": "reconstruction: {reconstruction:.4f}",
        "result": "reconstruction: {reconstruction:.4f}, codes in use: {usage:.1f} %, perplexity:"
        " {perplexity:.1f}, loss: {loss:.4f}",
    }
    curves: ClassVar[dict[str, str]] = {
        "loss": "loss",
        "reconstruction": "error of the reconstruction",
        "lr": "learning rate",
    }

    def __init__(
        self,
        config: Configuration,
        classes: Sequence[str] = (),
        *,
        vocabulary: Annotated[int, between(2, 1_000_000)] = 8192,
        code_dim: Size = 32,
        quantizer: Literal["gumbel", "nearest"] = "gumbel",
        decoder_width: Size | None = None,
        decoder_depth: Depth | None = None,
        decoder_heads: Size | None = None,
        temperature: Annotated[InTraining[Positive], is_("METHOD.QUANTIZER", "gumbel")] = 1.0,
        temperature_end: Annotated[
            InTraining[Positive], is_("METHOD.QUANTIZER", "gumbel")
        ] = 0.0625,
        kl_weight: Annotated[Factor, is_("METHOD.QUANTIZER", "gumbel")] = 0.0,
        teacher: FilePath | None = None,
        teacher_path: FilePath | None = None,
    ) -> None:
        super().__init__(config, classes)
        check_patch_drop(config)
        width, _, heads = _decoder(config)
        if width % heads:
            raise InputError(
                f"METHOD.DECODER_WIDTH {width} is not a multiple of METHOD.DECODER_HEADS {heads};"
                " choose one that is"
            )
        if (teacher is None) != (teacher_path is None):
            raise InputError(
                f"METHOD.TEACHER is {teacher}, METHOD.TEACHER_PATH is {teacher_path}; give both or"
                " neither"
            )
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        self.kl_weight = kl_weight
        self.noisy = quantizer == "gumbel"
        self.temperatures = (temperature, temperature_end)
        self.teacher: Teacher | None = None

    def build_network(self) -> Tokenizer:
        network = build_tokenizer(self.config)
        if self.config.METHOD.TEACHER is not None:
            self.teacher = self._build_teacher(network)
        return network

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        if mode == "train" and self.noisy:
            dataset.draws["seed"] = _draw_seed

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        seeds = batch["seed"] if self.noisy else None
        values = self._values(network, batch, seeds=seeds, temperature=self._temperature(epoch))
        del values["tokens"]
        return values

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns ``loss``, ``reconstruction``, ``usage``, ``perplexity`` and ``num_samples``.

        ``usage`` is the percentage of codes that are any patch's token. ``perplexity`` is the
        exponential of the entropy of the tokens' frequencies: the number of codes, if all are
        equally frequent.
        """
        totals = paddle.zeros([3], "float64")
        counts = paddle.zeros([self.config.METHOD.VOCABULARY], "float64")
        for batch in batches:
            values = self._values(forward, batch)
            tokens = values.pop("tokens").flatten()
            counts += paddle.bincount(tokens, minlength=len(counts)).astype("float64")
            kept = {name: values[name] for name in ("loss", "reconstruction")}
            kept["count"] = paddle.ones_like(values["loss"])
            totals += sum_of_each(kept)
        sums = all_reduce_sum(paddle.concat([totals, counts])).numpy()
        loss, reconstruction, count = sums[:3].tolist()
        shares = sums[3:] / sums[3:].sum()
        used = shares[shares > 0]
        return {
            "loss": loss / count,
            "reconstruction": reconstruction / count,
            "usage": 100 * len(used) / len(shares),
            "perplexity": float(np.exp(-(used * np.log(used)).sum())),
            "num_samples": int(count),
        }

    def score(self, metrics: Metrics) -> float:
        score = super().score(metrics)
        chosen = self.best if self.config.BEST_METRIC == "auto" else self.config.BEST_METRIC
        return -score if chosen == "reconstruction" else score

    def draw(self, model: nn.Layer, dataset: ImageDataset, folder: Path) -> None:
        """Draws images, and below each what its tokens become."""
        # A teacher's features are no picture.
        if self.teacher is not None:
            return
        [pixels] = shown_columns(dataset, "pixels")
        images = self.normalize(pixels)
        decoded = model.pictures(model.decode(model.codes(model.tokens(images))))
        draw_reconstructions(self.config, [images, decoded], folder / "reconstructions.png")

    def _values(self, network: Callable[..., Any], batch: Batch, **options: Any) -> Batch:
        """Returns what the network does, with the loss."""
        images = self.normalize(batch["pixels"])
        targets = None
        if self.teacher is not None:
            targets = self.teacher(images)
        values = network(images, targets, **options)
        added = self.kl_weight * values["kl"] if self.noisy else values["quantisation"]
        return {"loss": values["reconstruction"] + added, **values}

    def _temperature(self, epoch: int) -> float:
        first, last = self.temperatures
        share = (epoch - 1) / max(1, math.ceil(self.config.TRAIN.NUM_EPOCHS) - 1)
        return first * (last / first) ** min(1, share)

    def _build_teacher(self, network: Tokenizer) -> Teacher:
        """Returns the teacher with its weights.

        Raises:
            InputError: its weights or its images don't fit, or its map has other places.
        """
        path = self.config.METHOD.TEACHER_PATH
        config = with_switches(_teacher_config(self.config), path)
        features = _Features(build_model(config))
        report = load_equal(features.model, config, "teacher", "METHOD.TEACHER_PATH", path)
        self.note = f"teacher {config.MODEL.NAME}: {report}"
        features.eval()
        with paddle.no_grad():
            found = features(paddle.zeros([1, network.in_channels, *network.image_size])).shape[1]
        rows, columns = network.grid
        if found != rows * columns:
            raise InputError(
                f"METHOD.TEACHER {config.MODEL.NAME} has {found} places, the tokenizer {rows} x"
                f" {columns} tokens; take models with equal patches"
            )
        return Teacher(features, *scales(self.config), *scales(config))


class _Features(nn.Layer):
    """Maps images to the normalised features of a model's last map, [B, places, C]."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        [last] = self.model.forward_intermediates(
            images, 1, norm=True, output_format="NLC", intermediates_only=True
        )
        return last


def build_tokenizer(config: Configuration) -> Tokenizer:
    """Returns the tokenizer of a configuration whose TASK is tokenizer, with fresh weights.

    Raises:
        InputError: sizes that don't fit together.
    """
    method = config.METHOD
    outputs = None
    if method.TEACHER is not None:
        # The teacher isn't built for this.
        outputs = model_of(_teacher_config(config)).feature_info[-1]["num_chs"]
    return Tokenizer(
        build_model(with_values(config, "TASK tokenizer", MODEL__NUM_CLASSES=0)),
        method.VOCABULARY,
        method.CODE_DIM,
        method.QUANTIZER,
        *_decoder(config),
        outputs,
    )


def _decoder(config: Configuration) -> tuple[int, int, int]:
    """Returns the channels, the blocks and the attention heads of the decoder."""
    method = config.METHOD
    return (
        method.DECODER_WIDTH or DECODER_WIDTH,
        method.DECODER_DEPTH or DECODER_DEPTH,
        method.DECODER_HEADS or DECODER_HEADS,
    )


def scales(config: Configuration) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the mean and the deviation by which a configuration normalises images."""
    return config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD


def fitting(config: Configuration, path: str, key: str) -> Configuration:
    """Returns the configuration of a YAML file or name, for images of ``config``'s size.

    Args:
        key: the key that names it.

    Raises:
        InputError: it takes images of another size or other channels.
    """
    other = get_config(path)
    # An architecture that takes images of any size takes these.
    if architecture(other).min_image_size:
        other = with_values(other, DATA__IMAGE_SIZE=config.DATA.IMAGE_SIZE)
    for name in ("IMAGE_SIZE", "IMAGE_CHANNELS"):
        if other.DATA[name] != config.DATA[name]:
            raise InputError(
                f"{key} {path} has DATA.{name} {other.DATA[name]}, the model {config.DATA[name]};"
                " make them equal"
            )
    return other


def check_patch_drop(config: Configuration) -> None:
    """Raises InputError if patches are left out: each has to have a token."""
    share = config.MODEL.get("PATCH_DROP")
    if share:
        raise InputError(
            f"MODEL.PATCH_DROP is {share}, but TASK {config.TASK} needs all patches; set it to 0"
        )


def _teacher_config(config: Configuration) -> Configuration:
    teacher = fitting(config, config.METHOD.TEACHER, "METHOD.TEACHER")
    # Features are compared, not classes.
    return with_values(teacher, MODEL__NUM_CLASSES=0)


def _draw_seed(rng: np.random.Generator) -> np.ndarray:
    return np.asarray(rng.integers(_SEEDS))
