"""The loader that programs written for PaddleViT expect: pairs of images and labels."""

from collections.abc import Iterator
from typing import Any

import paddle

from errors import InputError
from loading.transforms import Normalize
from settings.configuration import Configuration


class PairLoader(paddle.io.DataLoader):
    """A ``paddle.io.DataLoader`` for programs that were written for PaddleViT's loader.

    It yields [images, labels]: [B, C, H, W] float32, normalised and erased, and [B] int64. As with
    PaddleViT's loader, several processes evaluate some images twice, and images are mixed by the
    program. (``Loader`` reads each image once.)

    Args:
        train: shuffle the samples, drop an incomplete last batch (DATA.DROP_LAST), and draw another
            augmentation at each pass.
        split: each process of the run takes its share of the samples.

    Raises:
        InputError: a key is set that this loader doesn't support, or TASK needs no labels.
    """

    def __init__(self, config: Configuration, dataset: Any, train: bool, split: bool) -> None:
        data = config.DATA
        is_used = {
            "DATA.LOADER": data.LOADER != "paddle",
            "DATA.MULTI_SCALE": data.MULTI_SCALE is not None,
            "DATA.SAMPLER": data.SAMPLER != "shuffle",
            "TRAIN.REPEATED_AUGMENT": config.TRAIN.REPEATED_AUGMENT > 1,
        }
        unknown = [key for key, used in is_used.items() if used]
        if train and unknown:
            raise InputError(
                f"PaddleViT's loader doesn't support {unknown[0]}; leave it out, or call"
                " get_dataloader with a mode only"
            )
        if "labels" not in dataset.columns:
            raise InputError(
                f"PaddleViT's loader yields images and labels, but TASK {config.TASK} has no"
                " labels;"
                " call get_dataloader with a mode only"
            )
        further = set(dataset.columns) - {"pixels", "labels", "erased", "skipped"}
        if further:
            raise InputError(
                f"PaddleViT's loader yields images and labels, but no column '{min(further)}';"
                " call get_dataloader with a mode only"
            )
        kind = paddle.io.DistributedBatchSampler if split else paddle.io.BatchSampler
        sampler = kind(
            dataset,
            batch_size=data.BATCH_SIZE if train else data.BATCH_SIZE_EVAL,
            shuffle=train,
            drop_last=train and data.DROP_LAST,
        )
        super().__init__(
            dataset, batch_sampler=sampler, num_workers=data.NUM_WORKERS, use_shared_memory=False
        )
        self.images = dataset
        self.train = train
        self.normalize = Normalize(data.IMAGENET_MEAN, data.IMAGENET_STD)

    def __iter__(self) -> Iterator[list[paddle.Tensor]]:
        for columns in super().__iter__():
            batch = dict(zip(self.images.columns, columns, strict=True))
            images = self.normalize(batch["pixels"])
            if self.images.erasing is not None:
                images = self.images.erasing(images, batch["erased"])
            yield [images, batch["labels"]]
        if self.train:
            self.images.epoch += 1
