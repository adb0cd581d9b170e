"""MoCo v3 (Chen et al. 2021, arXiv:2104.02057): an encoder learns to distinguish an image's other view
from the views of other images.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from datasets import ImageDataset
from errors import InputError
from launch.progress import EVALUATING, beat
from loading.transforms import Normalize, multi_crop
from models import build_model
from models.layers.linear import float32_matmul
from models.pretraining.moco import MoCo
from settings.configuration import Configuration
from settings.keys import Factor, InTraining, Positive, Rate, Share, Size
from settings.registry import tasks
from training.classification import hits
from training.losses import CrossEntropy
from training.optim.schedule import cosine_between
from training.run import Run
from training.task import Batch, Metrics, Task, check_no_average, sum_of_each
from training.tokenizer import normalisation
from utils import all_gather, all_gather_tensor, all_reduce_sum, rank, world_size

MOMENTUM = 0.99
GLOBAL_SCALE = (0.08, 1.0)
# The similarities that an evaluation computes at once.
SIMILARITIES = 2**24


@tasks.register("moco", metrics="contrast_acc", columns="", views="pixels")
class MomentumContrast(Task):
    """The task of finding an image's key among the keys of all processes' images.

    The labels of a dataset, if it has any, are ignored. With TRAIN.ACCUM_ITER the keys are those of
    one step, not of the whole update. An evaluation compares the query of each image with the keys
    of all validation images. Their two views are always the same.

    Args:
        projector_width: hidden width of the projector and of the predictor.
        projector_outputs: number of channels of queries and keys.
        contrast_temperature: temperature by which the similarities of queries and keys are divided.
        momentum: the share of the teacher that each update keeps, at the start; it rises to 1 along
            a cosine. None: 0.996 for dino, 0.99 for moco.
        global_scale: the smallest and largest share of the image's area that a global view shows.
            None: [0.4, 1.0] for dino, [0.08, 1.0] for moco.
        color: factor on the strength of DINO's colour jitter (brightness, contrast, saturation and
            hue). 0: no jitter.
        grey: the probability that a view is converted to grey.
        blur: the probabilities of Gaussian blur in the first global view, in the second one and in
            local views (moco has no local views).
        solarize: the probability that the second global view is solarised, which inverts its bright
            pixels.
    """

    lines: ClassVar[dict[str, str]] = dict.fromkeys(
        ("train", "val", "best", "result"), "loss: {loss:.4f}, contrast_acc: {contrast_acc:.2f}"
    )
    curves: ClassVar[dict[str, str]] = {
        "loss": "loss",
        "contrast_acc": "keys found [%]",
        "lr": "learning rate",
    }

    def __init__(
        self,
        config: Configuration,
        classes: Sequence[str] = (),
        *,
        projector_width: Size = 4096,
        projector_outputs: Size = 256,
        contrast_temperature: Positive = 0.2,
        momentum: InTraining[Rate] | None = None,
        global_scale: tuple[Share, Share] | None = None,
        color: Factor = 1.0,
        grey: Share = 0.2,
        blur: tuple[Share, Share, Share] = (1.0, 0.1, 0.5),
        solarize: Share = 0.2,
    ) -> None:
        super().__init__(config, classes)
        self.widths = (projector_width, projector_outputs)
        self.temperature = contrast_temperature
        self.momentum = MOMENTUM if momentum is None else momentum
        self.views = multi_crop(
            config,
            global_scale=GLOBAL_SCALE if global_scale is None else global_scale,
            color=color,
            grey=grey,
            blur=blur,
            solarize=solarize,
        )
        self.normalize = Normalize(*normalisation(config))

    def build_network(self) -> MoCo:
        """Returns the model with its heads and the momentum encoder.

        Raises:
            InputError: TRAIN.MODEL_EMA is set, or the channels don't fit fixed positions.
        """
        check_no_average(self.config, "the momentum encoder")
        return MoCo(build_model(self.config), *self.widths)

    def prepare(self, model: nn.Layer, train: ImageDataset, run: Run) -> None:
        """Checks that no batch of an epoch is a single image, which the heads can't normalise.

        Raises:
            InputError: one is.
        """
        data = self.config.DATA
        images = -(-len(train) // world_size())
        last = images % data.BATCH_SIZE or data.BATCH_SIZE
        if data.DROP_LAST:
            last = data.BATCH_SIZE
        if last * world_size() == 1:
            raise InputError(
                f"TASK moco needs two images in each batch, but with {len(train)} images the"
                " last batch of"
                f" {data.BATCH_SIZE} has one; change -batch_size, or set DATA.DROP_LAST True"
            )

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        queries, keys = network(self._views(batch))
        images = queries.shape[1]
        all_keys = all_gather_tensor(keys.transpose([1, 0, 2])).transpose([1, 0, 2])
        return contrast(queries, all_keys, rank() * images, self.temperature)

    def after_update(self, model: nn.Layer, share: float) -> None:
        network: Any = model
        network.follow(cosine_between(self.momentum, 1.0, share))

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns ``loss`` and ``contrast_acc`` of the validation images, and ``num_samples``."""
        own_queries = []
        own_keys = []
        for batch in batches:
            queries, keys = forward(self._views(batch))
            own_queries.append(queries)
            own_keys.append(keys)
        # Ranks may have different numbers of images, and some none.
        by_rank = all_gather([keys.numpy() for keys in own_keys])
        counts = [sum(keys.shape[1] for keys in of_rank) for of_rank in by_rank]
        all_keys = paddle.to_tensor(
            np.concatenate([keys for of_rank in by_rank for keys in of_rank], axis=1)
        )
        first = sum(counts[: rank()])
        total = paddle.zeros([3], "float64")
        for queries in _split(own_queries, SIMILARITIES // sum(counts)):
            beat(EVALUATING)
            values = contrast(queries, all_keys, first, self.temperature)
            values["num_samples"] = paddle.ones_like(values["loss"])
            total += sum_of_each(values)
            first += queries.shape[1]
        sums: Any = all_reduce_sum(total).tolist()
        loss, accuracy, count = sums
        return {
            "loss": loss / count,
            "contrast_acc": accuracy / count,
            "num_samples": int(count),
        }

    def _views(self, batch: Batch) -> paddle.Tensor:
        """Returns the normalised views of a batch, [B, 2, C, H, W]."""
        pixels = batch["pixels"]
        images = self.normalize(pixels.flatten(0, 1))
        return images.reshape([*pixels.shape[:2], *images.shape[1:]])


def contrast(queries: paddle.Tensor, keys: paddle.Tensor, first: int, temperature: float) -> Batch:
    """Returns the loss of each image and how often it finds its key: "loss" and "contrast_acc" [B].

    The loss is 2 temperature times the cross-entropy of an image's key among all keys. It is summed
    over both views: the queries of one are compared with the keys of the other. "contrast_acc" is
    100 where the nearest key is the image's own, else 0, as the mean of both views.

    Args:
        queries: [2, B, C], of length 1.
        keys: [2, N, C], of length 1, those of other processes included.
        first: the place of the first of these B images among the N.
        temperature: divides the similarities.
    """
    own = paddle.arange(first, first + queries.shape[1])
    loss: Any = 0
    accuracy: Any = 0
    for view, other in ((0, 1), (1, 0)):
        logits = float32_matmul(queries[view], keys[other], transpose_y=True) / temperature
        loss = loss + CrossEntropy()(logits, own) * (2 * temperature)
        accuracy = accuracy + hits(logits.detach(), own)["acc1"] / 2
    return {"loss": loss, "contrast_acc": accuracy}


def _split(batches: Sequence[paddle.Tensor], rows: int) -> Iterator[paddle.Tensor]:
    """Yields the batches [2, B, C] in parts of at most so many images, but of one or more."""
    rows = max(1, rows)
    for batch in batches:
        for begin in range(0, batch.shape[1], rows):
            yield batch[:, begin : begin + rows]
