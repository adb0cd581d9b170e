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
from models.pretraining.tokenizer import Quantizer, Tokenizer
from settings.configuration import Configuration
from settings.keys import (
    Depth,
    Factor,
    FilePath,
    InTraining,
    Positive,
    Rate,
    Size,
    between,
    is_,
    is_set,
)
from settings.registry import tasks
from training.equal_ranks import load_equal
from training.losses import Teacher
from training.reconstructions import draw_reconstructions, shown_columns
from training.run import Run
from training.task import Batch, Metrics, Task, sum_of_each
from utils import all_reduce_sum

# Seeds of ``gumbel_noise`` are below this number.
_SEEDS = 2**31 - 1
# The decoder's sizes in BEiT v2.
DECODER_WIDTH = 768
DECODER_DEPTH = 1
DECODER_HEADS = 12


@tasks.register("tokenizer", metrics="reconstruction perplexity usage", columns="")
class TokenizerTraining(Task):
    """Trains an encoder, a codebook and a decoder, which is a BEiT over the grid of codes.

    Args:
        vocabulary: number of different tokens.
        code_dim: number of channels of a code.
        quantizer: how features become codes. "gumbel": a discrete VAE. "nearest": the code with the
            smallest angle, as in BEiT v2.
        decoder_width: number of channels of the decoder. None: 512 for mae and fcmae, 768 for
            tokenizer.
        decoder_depth: blocks of the decoder. None: 8 for mae, 1 for fcmae and tokenizer.
        decoder_heads: attention heads of each decoder block. None: 16 for mae, 12 for tokenizer.
        temperature: temperature of the Gumbel softmax in the first epoch.
        temperature_end: temperature of the Gumbel softmax in the last epoch; it falls by the same
            factor each epoch.
        kl_weight: weight of the KL divergence from a uniform distribution of tokens ("gumbel").
        kmeans: whether k-means on the first batch initialises the codes of "nearest". Otherwise
            they are random.
        code_decay: decay of the moving averages that are the codes of "nearest": each step adds the
            mean of the features that were assigned to a code, with the weight 1 - code_decay.
        teacher: a model whose last features are reconstructed instead of pixels (BEiT v2): a YAML
            file or a name. None: pixels are reconstructed.
        teacher_path: the file of the teacher's weights.
        teacher_outputs: number of outputs of the teacher's final linear layer, such as CLIP's
            projection, which is applied to the features at each position. None: the features
            themselves are the targets.
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
        kmeans: Annotated[InTraining[bool], is_("METHOD.QUANTIZER", "nearest")] = True,
        code_decay: Annotated[InTraining[Rate], is_("METHOD.QUANTIZER", "nearest")] = 0.99,
        teacher: FilePath | None = None,
        teacher_path: Annotated[FilePath, is_set("METHOD.TEACHER")] | None = None,
        teacher_outputs: Annotated[Size, is_set("METHOD.TEACHER")] | None = None,
    ) -> None:
        super().__init__(config, classes)
        self.normalize = Normalize(*normalisation(config))
        self.vocabulary = vocabulary
        self.code_dim = code_dim
        self.quantizer: Quantizer = quantizer
        self.decoder = (
            decoder_width or DECODER_WIDTH,
            decoder_depth or DECODER_DEPTH,
            decoder_heads or DECODER_HEADS,
        )
        self.temperatures = (temperature, temperature_end)
        self.kl_weight = kl_weight
        self.kmeans = kmeans
        self.code_decay = code_decay
        self.teacher_file = teacher
        self.teacher_path = teacher_path
        self.teacher_outputs = teacher_outputs
        self.teacher: Teacher | None = None
        # Whether the codes of "nearest" are initialised.
        self.are_codes_set = False

    def build_network(self) -> Tokenizer:
        """Returns the tokenizer, and loads the teacher.

        Raises:
            InputError: the model, the sizes or the teacher don't fit.
        """
        network = self.make_network(build_model(self.config))
        if self.teacher_file is not None:
            self.teacher = self._build_teacher(network)
        return network

    def make_network(self, encoder: ImageModel) -> Tokenizer:
        """Returns the tokenizer of an encoder, with fresh weights. The teacher isn't needed."""
        outputs = self.teacher_outputs
        if self.teacher_file is not None and outputs is None:
            # The teacher isn't built for this.
            outputs = model_of(self._teacher_config()).feature_info[-1]["num_chs"]
        return Tokenizer(
            encoder,
            self.vocabulary,
            self.code_dim,
            self.quantizer,
            *self.decoder,
            outputs=outputs,
            kmeans=self.kmeans,
        )

    def prepare(self, model: nn.Layer, train: ImageDataset, run: Run) -> None:
        # The codes belong to the network that isn't wrapped.
        self.network = model

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        if mode == "train" and self.quantizer == "gumbel":
            dataset.draws["seed"] = _draw_seed

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        if self.quantizer == "gumbel":
            temperature = self._temperature(epoch)
            values = self._values(network, batch, seeds=batch["seed"], temperature=temperature)
            del values["tokens"]
            return values
        if not self.are_codes_set:
            # This waits for the device, but once.
            self.network.init_codes(self.normalize(batch["pixels"]), self.config.SEED)
            self.are_codes_set = True
        values = self._values(network, batch)
        self.network.update_codes(values.pop("features"), values.pop("tokens"), self.code_decay)
        return values

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns ``loss``, ``reconstruction``, ``usage``, ``perplexity`` and ``num_samples``.

        ``usage`` is the percentage of codes that are any patch's token. ``perplexity`` is the
        exponential of the entropy of the tokens' frequencies: the number of codes, if all are
        equally frequent.
        """
        totals = paddle.zeros([3], "float64")
        counts = paddle.zeros([self.vocabulary], "float64")
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
        """Draws images, and below each the reconstruction from its tokens."""
        # A teacher's features aren't a picture.
        if not model.decodes_pixels:
            return
        [pixels] = shown_columns(dataset, "pixels")
        images = self.normalize(pixels)
        decoded = model.pictures(model.decode(model.codes(model.tokens(images))))
        draw_reconstructions(self.config, [images, decoded], folder / "reconstructions.png")

    def _values(self, network: Callable[..., Any], batch: Batch, **options: Any) -> Batch:
        """Returns the outputs of the network, with the loss."""
        images = self.normalize(batch["pixels"])
        targets = None
        if self.teacher is not None:
            targets = self.teacher(images)
        values = network(images, targets, **options)
        if self.quantizer == "gumbel":
            added = self.kl_weight * values["kl"]
        else:
            added = values["quantisation"]
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
        path = self.teacher_path
        if path is None:
            raise InputError(
                f"METHOD.TEACHER is {self.teacher_file}, but METHOD.TEACHER_PATH is None; set it to the"
                " teacher's weights"
            )
        config = with_switches(self._teacher_config(), path)
        features = _Features(build_model(config))
        if self.teacher_outputs and not isinstance(
            getattr(features.model, "head", None), nn.Linear
        ):
            raise InputError(
                f"METHOD.TEACHER_OUTPUTS is {self.teacher_outputs}, but the classifier of"
                f" {config.MODEL.NAME} isn't a single Linear; leave it out"
            )
        report = load_equal(features.model, config, "teacher", "METHOD.TEACHER_PATH", path)
        self.note = f"teacher {config.MODEL.NAME}: {report}"
        features.eval()
        with paddle.no_grad():
            found = features(paddle.zeros([1, network.in_channels, *network.image_size])).shape[1]
        rows, columns = network.grid
        if found != rows * columns:
            raise InputError(
                f"METHOD.TEACHER {config.MODEL.NAME} has {found} positions, the tokenizer {rows} x"
                f" {columns} tokens; use models with patches of the same size"
            )
        return Teacher(features, *normalisation(self.config), *normalisation(config))

    def _teacher_config(self) -> Configuration:
        """Returns the teacher's configuration. Without ``teacher_outputs`` it has no classifier."""
        config = other_config(self.config, str(self.teacher_file), "METHOD.TEACHER")
        return with_values(config, MODEL__NUM_CLASSES=self.teacher_outputs or 0)


class _Features(nn.Layer):
    """Maps images to the targets of a tokenizer, [B, places, outputs]: the normalised features of a
    model's last map, each mapped by the model's classifier if it has one.
    """

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        [last] = self.model.forward_intermediates(
            images, 1, norm=True, output_format="NLC", intermediates_only=True
        )
        return self.model.head(last) if self.model.num_classes else last


def normalisation(config: Configuration) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the mean and the deviation by which a configuration normalises images."""
    return config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD


def other_config(config: Configuration, path: str, key: str) -> Configuration:
    """Returns the configuration of another network that reads the images of ``config``.

    Args:
        path: its YAML file or name.
        key: the key that names it.

    Raises:
        InputError: it can't be read, or takes images of another size or other channels.
    """
    try:
        other = get_config(path)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
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


def _draw_seed(rng: np.random.Generator) -> np.ndarray:
    return np.asarray(rng.integers(_SEEDS))
