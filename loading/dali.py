"""NVIDIA DALI as the loader of training images (DATA.LOADER dali).

DALI decodes, crops, resizes and flips, on the GPU if there is one (documented API; not run on a
GPU). The module is imported only where this loader is chosen, because DALI is an extra.
"""

import collections
import io
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import paddle
from PIL import Image

from errors import InputError, install
from loading.samplers import TrainBatchSampler
from loading.transforms import opened_image, readable
from loading.workers import Draw, Loader, with_draws
from settings.configuration import Configuration, pair
from utils import num_gpus

try:
    from nvidia.dali import Pipeline, fn, types  # pyright: ignore[reportMissingImports]: an extra
except ImportError as error:
    raise InputError(f"DATA.LOADER dali: {error}; {install('dali')}") from None

_INTERPOLATION = {
    Image.Resampling.BICUBIC: types.INTERP_CUBIC,
    Image.Resampling.BILINEAR: types.INTERP_TRIANGULAR,
    Image.Resampling.NEAREST: types.INTERP_NN,
}


class _Inputs(NamedTuple):
    """The pipeline's inputs of a sample.

    Attributes:
        file: bytes, [N] uint8.
        start: (left, top) of the crop, [2] int32.
        shape: (width, height) of the crop, [2] int32.
        hflip, vflip: int32: 1 to flip it horizontally or vertically, or 0.
    """

    file: np.ndarray
    start: np.ndarray
    shape: np.ndarray
    hflip: np.ndarray
    vflip: np.ndarray


class DaliLoader(Loader):
    """Loads the samples of ``ProcessLoader`` in its order, with its crops and flips.

    These are drawn here, by the same generators. DALI decodes and resizes, so its pixels
    differ a little. DATA.NUM_WORKERS threads read files, and as many decode.

    Args:
        dataset: has ``data(index)``, ``labels`` and a ``TrainTransform`` that only crops, resizes
            and flips.
    """

    def __init__(
        self,
        config: Configuration,
        dataset: Any,
        sampler: TrainBatchSampler,
        draw: Draw | None = None,
    ) -> None:
        super().__init__(config, dataset, sampler, draw)
        self.threads = max(1, config.DATA.NUM_WORKERS)
        self.depth = config.DATA.PREFETCH
        self.size = pair(config.DATA.IMAGE_SIZE)
        self.channels = config.DATA.IMAGE_CHANNELS

    def _open(self, keys: Iterator[list]) -> Iterator[list[paddle.Tensor]]:
        for pixels, *others in with_draws(self._decode_batches(keys), self._passes(), self.draw):
            yield [pixels, *map(paddle.to_tensor, others)]

    def _load_batch(self, keys: list) -> list[np.ndarray]:
        [pixels, *others] = next(self._decode_batches(iter([keys])))
        return [pixels.numpy(), *others]

    def _decode_batches(self, keys: Iterator[list]) -> Iterator[list]:
        """Yields the columns of each batch: pixels on the device, the others as arrays."""
        # The keys and the other columns of the batches that the pipeline holds.
        waiting: collections.deque[tuple[list, list[np.ndarray]]] = collections.deque()
        pipeline = self._pipeline(self._pipeline_inputs(keys, waiting))
        while True:
            try:
                (pixels,) = pipeline.run()
            except StopIteration:
                return
            except RuntimeError:
                # DALI doesn't name the file. If Pillow can't read it either, its error does.
                batch, _ = waiting[0]
                for key in batch:
                    self.dataset[key]
                raise
            _, columns = waiting.popleft()
            yield [_same_memory(pixels.as_tensor()), *columns]

    def _pipeline(self, source: Iterator[tuple]) -> Pipeline:
        """Returns the pipeline from ``source``, batches of ``_Inputs``, to pixels [B, H, W, C]."""
        gpu = int(paddle.device.get_device().partition(":")[2]) if num_gpus() else None
        pipeline = Pipeline(
            self.batch_sampler.batch_size, self.threads, gpu, prefetch_queue_depth=self.depth
        )
        with pipeline:
            inputs = _Inputs(
                *fn.external_source(source, num_outputs=len(_Inputs._fields), batch=True)
            )
            pixels = fn.decoders.image_slice(
                inputs.file,
                device="cpu" if gpu is None else "mixed",
                start=inputs.start,
                shape=inputs.shape,
                axis_names="WH",
                output_type=types.GRAY if self.channels == 1 else types.RGB,
                # As Pillow decodes.
                adjust_orientation=False,
                # So that a GPU computes what a CPU does.
                jpeg_fancy_upsampling=True,
            )
            interpolation = _INTERPOLATION[self.dataset.transform.resampling[0]]
            pixels = fn.resize(
                pixels, size=list(self.size), interp_type=interpolation, antialias=True
            )
            pixels = fn.flip(pixels, horizontal=inputs.hflip, vertical=inputs.vflip)
            pipeline.set_outputs(pixels)
        pipeline.build()
        return pipeline

    def _pipeline_inputs(
        self, keys: Iterator[list], waiting: collections.deque
    ) -> Iterator[tuple[list[np.ndarray], ...]]:
        """Yields the pipeline's inputs of each batch, while the next batch's files are read.

        Args:
            waiting: takes the keys and the other columns of each batch.
        """
        reading: collections.deque[tuple[list, list[Future]]] = collections.deque()
        with ThreadPoolExecutor(self.threads) as pool:
            for batch in keys:
                reading.append((batch, [pool.submit(self._sample, key) for key in batch]))
                if len(reading) > 1:
                    yield _columns(*reading.popleft(), waiting)
            for batch, samples in reading:
                yield _columns(batch, samples, waiting)

    def _sample(self, key: tuple[int, int, int]) -> tuple[_Inputs, list]:
        """Returns (the pipeline's inputs of a sample, its values of the other columns)."""
        index = key[1]
        rng = self.dataset.generator(*key)
        with readable(self.dataset.name(index)):
            image, data = opened_image(self.dataset.data(index), self.dataset.most)
            geometry = self.dataset.transform.draw(*image.size, rng)
            # Of palettes, inks and 16 bits, DALI gets the pixels as Pillow converts them.
            if image.mode not in ("RGB", "L"):
                file = io.BytesIO()
                self.dataset.image(index).save(file, "PPM")
                data = file.getvalue()
        left, top, right, bottom = geometry.box
        inputs = _Inputs(
            file=np.frombuffer(data, np.uint8),
            start=np.array([left, top], np.int32),
            shape=np.array([right - left, bottom - top], np.int32),
            hflip=np.array(geometry.hflip, np.int32),
            vflip=np.array(geometry.vflip, np.int32),
        )
        others = {"labels": self.dataset.labels[index]} | self.dataset.drawn(rng)
        # The first column is the pixels.
        return inputs, [others[name] for name in self.dataset.columns[1:]]


def _columns(
    batch: list, samples: list[Future], waiting: collections.deque
) -> tuple[list[np.ndarray], ...]:
    """Returns the inputs of a batch by column, and appends its other columns to ``waiting``."""
    inputs, others = zip(*(sample.result() for sample in samples), strict=True)
    waiting.append((batch, [np.stack(column) for column in zip(*others, strict=True)]))
    return tuple(list(column) for column in zip(*inputs, strict=True))


def _same_memory(tensor: Any) -> paddle.Tensor:
    """Returns a Paddle tensor that shares the memory of a DALI tensor.

    DALI doesn't reuse the memory as long as the tensor exists.
    """
    options = {}
    if num_gpus():
        current_stream: Any = paddle.device.cuda.current_stream
        options["stream"] = current_stream().cuda_stream
    return paddle.utils.dlpack.from_dlpack(tensor.__dlpack__(**options))
