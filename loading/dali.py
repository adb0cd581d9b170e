"""NVIDIA DALI as the loader of training images (DATA.LOADER dali): it decodes, crops, resizes and
flips.

On the GPU where there is one (documented API; not run there yet). Imported only where it is asked
for.
"""

import collections
import io
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import paddle
from PIL import Image

from errors import InputError, install
from loading.samplers import TrainBatchSampler
from loading.transforms import opened_image, readable
from loading.workers import Draw, Loader, with_draws
from settings.options import Configuration, pair
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


class DaliLoader(Loader):
    """The samples of ``ProcessLoader``, in its order, with the same crops and flips: they are drawn
    here, by the same generators; the pixels are DALI's. DATA.NUM_WORKERS threads read files, as
    many decode.

    Args:
        dataset: has ``data(index)``, ``labels`` and a ``TrainTransform`` that crops, resizes and
            flips, no more.
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

    def _decode_batches(self, keys: Iterator[list]) -> Iterator[list]:
        """Yields the columns of each batch: pixels on the device, the others as arrays."""
        # what DALI doesn't see of the batches that it holds
        waiting: collections.deque[tuple] = collections.deque()
        pipeline = self._pipeline(self._pipeline_inputs(keys, waiting))
        while True:
            try:
                (pixels,) = pipeline.run()
            except StopIteration:
                return
            except RuntimeError:
                for key in waiting[0][0]:
                    self.dataset[key]  # it names the file, if that is broken for Pillow, too
                raise
            _, columns = waiting.popleft()
            yield [_same_memory(pixels.as_tensor()), *columns]

    def _pipeline(self, source: Iterator[tuple]) -> Pipeline:
        gpu = int(paddle.device.get_device().partition(":")[2]) if num_gpus() else None
        pipeline = Pipeline(
            self.batch_sampler.batch_size, self.threads, gpu, prefetch_queue_depth=self.depth
        )
        with pipeline:
            files, start, shape, mirrored, turned = fn.external_source(
                source, num_outputs=5, batch=True
            )
            pixels = fn.decoders.image_slice(
                files,
                device="cpu" if gpu is None else "mixed",
                start=start,
                shape=shape,
                axis_names="WH",
                output_type=types.GRAY if self.channels == 1 else types.RGB,
                adjust_orientation=False,  # as Pillow's decoding
                jpeg_fancy_upsampling=True,  # on a GPU, too
            )
            kind = _INTERPOLATION[self.dataset.transform.resampling[0]]
            pixels = fn.resize(pixels, size=list(self.size), interp_type=kind, antialias=True)
            pipeline.set_outputs(fn.flip(pixels, horizontal=mirrored, vertical=turned))
        pipeline.build()
        return pipeline

    def _pipeline_inputs(
        self, keys: Iterator[list], waiting: collections.deque
    ) -> Iterator[tuple[list[np.ndarray], ...]]:
        """Yields what the pipeline takes of each batch; the next batch's files are read meanwhile."""
        reading: collections.deque[tuple[list, list[Future]]] = collections.deque()
        with ThreadPoolExecutor(self.threads) as pool:
            for batch in keys:
                reading.append((batch, [pool.submit(self._sample, key) for key in batch]))
                if len(reading) > 1:
                    yield _columns(*reading.popleft(), waiting)
            for batch, samples in reading:
                yield _columns(batch, samples, waiting)

    def _sample(self, key: tuple[int, int, int]) -> tuple[tuple, list]:
        """Returns (file, start and shape of the crop, whether it is mirrored, turned), and what
        else the sample has.
        """
        index = key[1]
        rng = self.dataset.generator(*key)
        with readable(self.dataset.name(index)):
            image, data = opened_image(self.dataset.data(index), self.dataset.most)
            box, *flips = self.dataset.transform.draw(*image.size, rng)
            # palettes, inks, 16 bits: DALI gets the pixels of Pillow's conversion
            if image.mode not in ("RGB", "L"):
                file = io.BytesIO()
                self.dataset.image(index).save(file, "PPM")
                data = file.getvalue()
        start, end = np.array(box, np.int32).reshape(2, 2)
        others = [self.dataset.labels[index]]
        if self.dataset.erasing is not None:
            others.append(self.dataset.erasing.draw(rng))
        return (np.frombuffer(data, np.uint8), start, end - start, *map(np.int32, flips)), others


def _columns(
    batch: list, samples: list[Future], waiting: collections.deque
) -> tuple[list[np.ndarray], ...]:
    inputs, others = zip(*(sample.result() for sample in samples), strict=True)
    waiting.append((batch, [np.stack(column) for column in zip(*others, strict=True)]))
    return tuple(map(list, zip(*inputs, strict=True)))


def _same_memory(tensor: Any) -> paddle.Tensor:
    """Returns a tensor on the same memory, which DALI then leaves alone."""
    current: Any = paddle.device.cuda.current_stream
    stream = {"stream": current().cuda_stream} if num_gpus() else {}
    return paddle.utils.dlpack.from_dlpack(tensor.__dlpack__(**stream))
