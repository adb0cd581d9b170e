"""DINO (Caron et al. 2021, arXiv:2104.14294), with the options of iBOT (Zhou et al. 2021,
arXiv:2111.07832) and DINOv2 (Oquab et al. 2023, arXiv:2304.07193): an encoder learns without labels
what its moving average makes of other views of an image.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import paddle
from paddle import nn

from datasets import ImageDataset
from errors import InputError
from loading.block_masks import block_mask, check_blocks
from loading.transforms import Normalize, multi_crop
from models import build_model
from models.base import ImageModel
from models.pretraining.dino import Dino, check_patches
from settings.configuration import Configuration
from settings.keys import (
    Count,
    Factor,
    FilePath,
    InTraining,
    Positive,
    Rate,
    Share,
    Side,
    Size,
    WholeEpochs,
    above_zero,
    is_set,
    is_unset,
)
from settings.registry import tasks
from training.large_teacher import load_large_teacher
from training.losses.self_distillation import (
    TINY,
    centred,
    koleo,
    patch_loss,
    sinkhorn_knopp,
    view_loss,
)
from training.optim.schedule import cosine_between
from training.task import Batch, Metrics, Task, check_no_average
from training.tokenizer import normalisation
from utils import all_reduce_sum

# The papers' values.
MOMENTUM = 0.996
GLOBAL_SCALE = (0.4, 1.0)
MIN_BLOCK = 4
# With less information about an image (in nats), the teacher's distributions have collapsed.
LEAST_INFORMATION = 0.05


@tasks.register("dino", columns="", views="pixels local", loss="relative")
class SelfDistillation(Task):
    """The task of a student that predicts its teacher's outputs for other views of an image.

    Labels are ignored. ``models.pretraining.dino`` has the networks. An evaluation measures the
    loss on views of the validation images, which are always the same, and warns of a collapse. The
    teacher changes between two evaluations, so the loss doesn't show which weights are better: the
    newest count as the best, unless BEST_METRIC is knn, or a large teacher stays as it is.

    Args:
        prototypes: number of outputs of the projection heads.
        head_width: hidden width of the projection heads.
        head_outputs: bottleneck width of the projection heads, before their last layer.
        norm_last_layer: whether the weights of the projection heads' last layer have a fixed
            length.
        head_batch_norm: whether the hidden layers of the projection heads have batch norm, which
            helps with few images.
        freeze_last_layer: number of epochs at the start in which the last layer of the projection
            heads isn't trained.
        momentum: the share of the teacher that each update keeps, at the start; it rises to 1 along
            a cosine. None: 0.996 for dino, 0.99 for moco.
        teacher_temp: temperature of the teacher's softmax after its warm-up.
        warmup_teacher_temp: temperature of the teacher's softmax in the first epoch.
        warmup_teacher_temp_epochs: number of epochs in which the temperature changes from
            warmup_teacher_temp to teacher_temp. 0: it is constant.
        centering: how collapse is prevented. "centering": the mean of the teacher's outputs is
            subtracted from them. "sinkhorn_knopp": the prototypes are balanced within a batch;
            evaluations, which treat each image alone, subtract the mean.
        center_momentum: the share of the teacher's mean output that each update keeps.
        koleo: weight of the KoLeo loss, which spreads the features of the global views (DINOv2:
            0.1).
        patch_loss: weight of the loss of masked patches (iBOT and DINOv2: 1). 0: no patches are
            masked.
        separate_head: whether patches have a separate projection head (DINOv2).
        mask_ratios: the smallest and largest share of patches that are masked in one of an image's
            two global views.
        min_block: the smallest number of patches in a masked block. None: 16 for beit, 4 for dino.
        large_teacher: YAML file of a larger network that was trained with TASK dino. It is the
            teacher and stays fixed, as when DINOv2 trains its small models. None: the teacher is
            the average of the student.
        large_teacher_path: the file of the large teacher's weights.
        global_scale: the smallest and largest share of the image's area that a global view shows.
            None: [0.4, 1.0] for dino, [0.08, 1.0] for moco.
        local_views: number of local views, which only the student sees.
        local_size: side of the local views, in pixels.
        local_scale: the smallest and largest share of the image's area that a local view shows.
        color: factor on the strength of DINO's colour jitter (brightness, contrast, saturation and
            hue). 0: no jitter.
        grey: the probability that a view is converted to grey.
        blur: the probabilities of Gaussian blur in the first global view, in the second one and in
            local views (moco has no local views).
        solarize: the probability that the second global view is solarised, which inverts its bright
            pixels.
    """

    lines: ClassVar[dict[str, str]] = {
        "train": "loss: {loss:.4f}",
        **dict.fromkeys(
            ("val", "best", "result"), "loss: {loss:.4f}, information: {information:.3f}"
        ),
    }

    def __init__(
        self,
        config: Configuration,
        classes: Sequence[str] = (),
        *,
        prototypes: Size = 65536,
        head_width: Size = 2048,
        head_outputs: Size = 256,
        norm_last_layer: bool = True,
        head_batch_norm: bool = False,
        freeze_last_layer: InTraining[WholeEpochs] = 1,
        momentum: InTraining[Rate] | None = None,
        teacher_temp: Positive = 0.04,
        warmup_teacher_temp: Annotated[
            InTraining[Positive], above_zero("METHOD.WARMUP_TEACHER_TEMP_EPOCHS")
        ] = 0.04,
        warmup_teacher_temp_epochs: InTraining[WholeEpochs] = 0,
        centering: Literal["centering", "sinkhorn_knopp"] = "centering",
        center_momentum: InTraining[Share] = 0.9,
        koleo: InTraining[Factor] = 0.0,
        patch_loss: Factor = 0.0,
        separate_head: Annotated[bool, above_zero("METHOD.PATCH_LOSS")] = False,
        mask_ratios: Annotated[
            tuple[Share, Share], above_zero("METHOD.PATCH_LOSS"), is_unset("METHOD.LARGE_TEACHER")
        ] = (0.1, 0.5),
        min_block: Size | None = None,
        large_teacher: FilePath | None = None,
        large_teacher_path: Annotated[FilePath, is_set("METHOD.LARGE_TEACHER")] | None = None,
        global_scale: tuple[Share, Share] | None = None,
        local_views: Count = 8,
        local_size: Annotated[Side, above_zero("METHOD.LOCAL_VIEWS")] = 96,
        local_scale: Annotated[tuple[Share, Share], above_zero("METHOD.LOCAL_VIEWS")] = (0.05, 0.4),
        color: Factor = 1.0,
        grey: Share = 0.2,
        blur: tuple[Share, Share, Share] = (1.0, 0.1, 0.5),
        solarize: Share = 0.2,
    ) -> None:
        super().__init__(config, classes)
        if prototypes < 2:
            raise InputError(
                "METHOD.PROTOTYPES is 1, expected 2 or more: with one, all images have the same"
                " distribution"
            )
        self.head = {
            "prototypes": prototypes,
            "head_width": head_width,
            "head_outputs": head_outputs,
            "norm_last_layer": norm_last_layer,
            "batch_norm": head_batch_norm,
        }
        self.frozen_epochs = freeze_last_layer
        self.momentum = MOMENTUM if momentum is None else momentum
        self.teacher_temp = teacher_temp
        self.warmup_temps = np.linspace(
            warmup_teacher_temp, teacher_temp, warmup_teacher_temp_epochs
        )
        self.sinkhorn = centering == "sinkhorn_knopp"
        self.center_momentum = center_momentum
        self.koleo_weight = koleo
        self.patch_weight = patch_loss
        self.separate_head = separate_head
        self.mask_ratios = mask_ratios
        if min_block is not None and not (patch_loss and large_teacher is None):
            raise InputError(
                f"METHOD.MIN_BLOCK is {min_block}, but no patches are masked (METHOD.PATCH_LOSS,"
                " METHOD.LARGE_TEACHER); leave it out"
            )
        self.min_block = MIN_BLOCK if min_block is None else min_block
        self.teacher_file = large_teacher
        self.teacher_path = large_teacher_path
        self.large_teacher: Dino | None = None
        self.views = multi_crop(
            config,
            global_scale=GLOBAL_SCALE if global_scale is None else global_scale,
            local_views=local_views,
            local_size=local_size,
            local_scale=local_scale,
            color=color,
            grey=grey,
            blur=blur,
            solarize=solarize,
        )
        self.local_size = local_size if local_views else None
        self.normalize = Normalize(*normalisation(config))
        # Of the steps since the last update: the sum of the teacher's logits [K] and their number
        # [1], by the name of the centre that follows them.
        self._logit_sums: dict[str, list[tuple[paddle.Tensor, paddle.Tensor]]] = {}
        # Of an evaluation: the sum of the teacher's distributions [K], and of their entropies.
        self._distributions = paddle.zeros([prototypes], "float64")
        self._entropies = paddle.zeros([1], "float64")

    def build_network(self) -> Dino:
        """Returns the student with its teacher, and loads a large one.

        Raises:
            InputError: the encoder can't take the local views or has no patches to mask, the masks
                don't fit, or the large teacher doesn't.
        """
        if self.teacher_file is None:
            check_no_average(self.config, "the teacher")
        train = self.config.TRAIN
        if train.EARLY_STOP and not self.config.EVAL and self._newest_is_best:
            raise InputError(
                f"TRAIN.EARLY_STOP is {train.EARLY_STOP}, but the loss of TASK dino doesn't show"
                " which"
                " weights are better; set BEST_METRIC knn, or leave it out"
            )
        network = self.make_network(build_model(self.config))
        if self.teacher_file is not None:
            self.large_teacher, self.note = load_large_teacher(
                self.config, self.teacher_file, self.teacher_path, network
            )
        return network

    def make_network(self, encoder: ImageModel) -> Dino:
        """Returns the network of an encoder, with fresh weights. A large teacher isn't needed."""
        if self.local_size is not None:
            _take_local_size(encoder, self.local_size)
        options: dict[str, Any] = {}
        if self.patch_weight:
            options = {"separate_head": self.separate_head, "max_masked": self._max_masked(encoder)}
        return Dino(encoder, **self.head, has_teacher=self.teacher_file is None, **options)

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        super().prepare_data(dataset, mode)
        if self.patch_weight and self.teacher_file is None:
            dataset.draws["masked"] = functools.partial(
                draw_masks, grid=self.grid, ratios=self.mask_ratios, min_block=self.min_block
            )

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        images = self._images(batch["pixels"])
        local = batch.get("local")
        if local is not None:
            local = self._images(local)
        chosen = None
        if self.patch_weight:
            chosen = self._chosen_patches(batch)
        outputs = network(images, local, chosen)
        if self.large_teacher is not None:
            outputs |= self.large_teacher.teacher_outputs(images, outputs.get("places"))
        # The losses are in float32, under autocast, too.
        with paddle.amp.auto_cast(enable=False):
            return self._losses(outputs, epoch)

    def before_update(self, model: nn.Layer, epoch: int) -> None:
        if epoch > self.frozen_epochs:
            return
        for name, parameter in model.named_parameters():
            if ".last_layer." in name and parameter.grad is not None:
                # False frees the gradient. One of zeros would still let the weights decay.
                parameter.clear_gradient(False)

    def after_update(self, model: nn.Layer, share: float) -> None:
        network: Any = model
        network.follow(cosine_between(self.momentum, 1.0, share))
        for name, sums in self._logit_sums.items():
            totals, counts = zip(*sums, strict=True)
            sums_and_counts: Any = [sum(totals), sum(counts)]
            total = all_reduce_sum(paddle.concat(sums_and_counts))
            mean = total[:-1] / total[-1:].clip(min=1)
            center = getattr(network, name)
            momentum = self.center_momentum
            paddle.assign(center * momentum + mean * (1 - momentum), center)
        self._logit_sums.clear()

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns the means of the losses, ``information`` and ``num_samples``.

        ``information`` is the mutual information of an image and its prototype, in nats: the
        entropy of the teacher's mean distribution, less the mean of its entropies. It is 0 if all
        images have the same distribution, whatever that is, and at most log(prototypes).
        """
        self._distributions.zero_()
        self._entropies.zero_()
        metrics = super().evaluate(forward, batches)
        total = all_reduce_sum(paddle.concat([self._distributions, self._entropies])).numpy()
        views = 2 * metrics["num_samples"]
        mean = total[:-1] / views
        entropy = -(mean * np.log(np.maximum(mean, np.finfo(mean.dtype).tiny))).sum()
        metrics["information"] = float(entropy - total[-1] / views)
        return metrics

    def warning(self, metrics: Metrics) -> str:
        information = metrics["information"]
        if information >= LEAST_INFORMATION:
            return ""
        return (
            "collapse, or too early to judge: the teacher gives all images nearly the same"
            f" distribution over the prototypes: information is {information:.1e} nats, of at most"
            f" {math.log(self.head['prototypes']):.1f}; if it stays so, lower TRAIN.BASE_LR or"
            " METHOD.TEACHER_TEMP, or set METHOD.KOLEO 0.1"
        )

    def score(self, metrics: dict[str, Any]) -> float:
        return metrics["epoch"] if self._newest_is_best else super().score(metrics)

    @property
    def _newest_is_best(self) -> bool:
        """Whether it is unknown which weights are better: the teacher, and so the loss, changes."""
        return self.config.BEST_METRIC == "auto" and self.teacher_file is None

    def _images(self, pixels: paddle.Tensor) -> paddle.Tensor:
        """Returns views [B, V, H, W, C] as normalised images [B * V, C, H, W]."""
        return self.normalize(pixels.flatten(0, 1))

    def _chosen_patches(self, batch: Batch) -> paddle.Tensor:
        """Returns the patches to predict, [B, 2 N] of 0 and 1: the masked ones, or all of them with
        a large teacher, where none are masked.
        """
        if "masked" in batch:
            return batch["masked"].flatten(1)
        rows, columns = self.grid
        return paddle.ones([len(batch["pixels"]), 2 * rows * columns], "uint8")

    def _losses(self, outputs: dict[str, paddle.Tensor], epoch: int) -> Batch:
        """Returns the losses of each image, [B]; "loss" is their weighted sum."""
        teacher = outputs["teacher"]
        counted = paddle.ones(teacher.shape[:2])
        targets = self._targets("center", outputs["center"], teacher, counted, epoch)
        values = {"view_loss": view_loss(outputs["student"], targets)}
        loss = values["view_loss"]
        if self.patch_weight:
            counted = outputs["counted"]
            center = outputs["patch_center"]
            teacher = outputs["teacher_patches"]
            targets = self._targets("patch_center", center, teacher, counted, epoch)
            # The authors take the mean over both views. In one of them, no patches are masked.
            share = 0.5 if self.large_teacher is None else 1.0
            values["patch_loss"] = share * patch_loss(outputs["student_patches"], targets, counted)
            loss = loss + self.patch_weight * values["patch_loss"]
        # An evaluation compares no images of a batch.
        if self.koleo_weight and epoch:
            features = outputs["features"]
            values["koleo"] = koleo(features[:, 0]) + koleo(features[:, 1])
            loss = loss + self.koleo_weight * values["koleo"]
        if len(values) == 1:
            return {"loss": loss}
        return {"loss": loss, **values}

    def _targets(
        self,
        name: str,
        center: paddle.Tensor,
        logits: paddle.Tensor,
        counted: paddle.Tensor,
        epoch: int,
    ) -> paddle.Tensor:
        """Returns the distributions [B, N, K] that the teacher's logits stand for.

        Args:
            name: of the parameter that is the centre.
            center: its values [K].
            logits: [B, N, K].
            counted: [B, N], 1 for logits that count, else 0.
            epoch: as of ``step``. An evaluation, which is epoch 0, doesn't move the centre.
        """
        temperature = self._temperature(epoch)
        flat = logits.flatten(0, 1)
        weights = counted.flatten()
        if epoch:
            total = paddle.matmul(weights.unsqueeze(0), flat).flatten()
            self._logit_sums.setdefault(name, []).append((total, weights.sum().reshape([1])))
        if epoch and self.sinkhorn:
            return sinkhorn_knopp(flat, temperature, weights).reshape(logits.shape)
        targets = centred(logits, center, temperature)
        if not epoch and name == "center":
            self._distributions += targets.astype("float64").sum([0, 1])
            logarithms = targets.clip(min=TINY).log()
            self._entropies -= (targets * logarithms).sum().astype("float64")
        return targets

    def _temperature(self, epoch: int) -> float:
        """Returns the teacher's temperature in an epoch, from 1; in an evaluation the last one."""
        if 0 < epoch <= len(self.warmup_temps):
            return float(self.warmup_temps[epoch - 1])
        return self.teacher_temp

    def _max_masked(self, encoder: Any) -> int:
        """Returns how many patches of an image are predicted at most, in both views together.

        Raises:
            InputError: the encoder has no patches to mask, or the masks don't fit.
        """
        check_patches(encoder)
        self.grid = encoder.patch_embed.grid_size
        patches = self.grid[0] * self.grid[1]
        if self.teacher_file is not None:
            return 2 * patches
        low, high = self.mask_ratios
        if low > high:
            raise InputError(
                f"METHOD.MASK_RATIOS is [{low:g}, {high:g}], expected the smaller value first"
            )
        check_blocks(
            self.grid, masked_count(patches, high), self.min_block, key="METHOD.MASK_RATIOS"
        )
        return masked_count(patches, high)


def draw_masks(
    rng: np.random.Generator, grid: tuple[int, int], ratios: tuple[float, float], min_block: int
) -> np.ndarray:
    """Returns which patches of an image's two global views are masked: [2, rows * columns] uint8.

    One of the views has blocks of masked patches, the other one has none. The share of masked
    patches is uniform between the two ``ratios``. The authors mask half of a batch's views, too.
    """
    patches = grid[0] * grid[1]
    masks = np.zeros((2, patches), np.uint8)
    view = rng.integers(2)
    count = masked_count(patches, rng.uniform(*ratios))
    masks[view] = block_mask(rng, grid, count, min_block)
    return masks


def masked_count(patches: int, ratio: float) -> int:
    """Returns how many patches a share of them is, rounded down, but at least one."""
    return max(1, int(patches * ratio))


def _take_local_size(encoder: Any, size: int) -> None:
    """Makes the encoder take images of ``size`` x ``size``, too.

    Raises:
        InputError: it can't.
    """
    try:
        encoder.take_other_sizes()
    except InputError as error:
        raise InputError(
            f"METHOD.LOCAL_SIZE is {size}: {error}; or set METHOD.LOCAL_VIEWS 0"
        ) from None
    if encoder.resizable:
        embed = encoder.patch_embed
        fits = size >= embed.patch_size and (embed.may_cut or size % embed.patch_size == 0)
    else:
        fits = size >= encoder.min_image_size
    if not fits:
        raise InputError(
            f"METHOD.LOCAL_SIZE is {size}, but {type(encoder).__name__} takes {encoder.input_sizes};"
            " choose another size"
        )
