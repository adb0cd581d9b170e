"""Each image of a dataset, decoded in full by several processes; what is kept of each takes 60
bytes.
"""

import functools
import hashlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from errors import InputError, RunError, Unreadable
from launch.signals import die_with_parent
from loading.check.duplicates import perceptual_hashes
from loading.files import contents
from loading.label_sets import LabelSets
from loading.shards import Shards
from loading.sources import Arrays, Decoded, Files
from loading.transforms import (
    Bands,
    bands_of,
    convert,
    image_of,
    largest_file,
    opened_image,
    readable,
    scaling_problem,
)
from loading.transforms.formats import kind_of
from loading.transforms.orientation import TURNS, orientation_of

SIDE = 64  # pixels of the small copies, of which the mean image and the hashes are made
MESSAGES = 1000  # of each part that are kept
_CHUNK = 64  # images that a process is given at a time
_BLANK = 1.0  # grey levels: a small copy whose standard deviation is less shows nothing
# A decoder's warning that leaves no mark: what a camera appended.
_HARMLESS = "extraneous bytes before marker 0xd9"
_RECORD = np.dtype([
    ("width", "i4"), ("height", "i4"), ("bytes", "i8"), ("format", "S5"), ("mode", "S8"), ("turn", "u1"),
    ("content", "u8"), ("hash", "u8"), ("blank", "?"), ("readable", "?"), ("flawed", "?"),
])  # fmt: skip


class Source(NamedTuple):
    """Where the images of a part come from: ``name`` and ``data`` (a file's bytes) by their place.

    Of images that are in memory, ``pixels`` are there and no data. ``mode``: as of ``pixel_mode``;
    of grey RGB serves. ``paths`` are relative to the data's folder; of images that aren't files
    there are none.
    """

    name: Callable[[int], str]
    data: Callable[[int], bytes] | None
    labels: np.ndarray | LabelSets
    classes: Sequence[str]
    pixels: np.ndarray | None = None
    mode: str | int = "RGB"
    paths: Sequence[str] = ()


class CheckedImages(NamedTuple):
    """What was found in the training or the validation images.

    Attributes:
        source: the images.
        records: [n]. A record holds size, bytes, format, mode and EXIF's orientation. It also holds
            hashes of the file's bytes (``content``) and of what it shows (``look``). And it says
            whether the image is blank, can be read, and was read with a decoder's warning.
        messages: what is wrong with single images, by their place; of the first MESSAGES, about.
        mean: [SIDE, SIDE, 3], of the images that can be read; grey levels.
    """

    source: Source
    records: np.ndarray
    messages: dict[int, str]
    mean: np.ndarray


def image_source(found: Any, most: int, mode: str | int = "RGB") -> Source:
    """Returns the images of what a dataset's reader gave.

    Args:
        most: pixels that an image may have (DATA.MAX_PIXELS).
        mode: as of ``Source``.

    Raises:
        InputError: they are drawn at random: there is nothing to check.
    """
    if isinstance(found, Files):
        root, paths, labels, classes = found

        def path(index: int) -> str:
            return os.path.join(root, paths[index])

        largest = largest_file(most)
        return Source(
            path,
            lambda index: contents(path(index), largest),
            labels,
            classes,
            mode=mode,
            paths=paths,
        )
    if isinstance(found, Shards):
        data = functools.partial(_of_shards, found, largest_file(most))
        return Source(found.name, data, found.labels, found.classes, mode=mode)
    if isinstance(found, Arrays):
        decoded: Decoded = found.read()
        return Source(
            lambda index: f"image {index}",
            None,
            np.asarray(decoded[1]),
            decoded[2],
            decoded[0],
            mode,
        )
    raise InputError("DATASET synthetic: its images are drawn at random; there is nothing to check")


def _of_shards(shards: Shards, most: int, index: int) -> bytes:
    return shards.read(index, most)


def check_images(
    source: Source,
    most: int,
    oriented: bool,
    workers: int,
    progress: Callable[[int], Any] = lambda _: None,
) -> CheckedImages:
    """Decodes every image.

    Args:
        most: pixels that an image may have.
        oriented: images are turned as their EXIF says (DATA.EXIF_ORIENTATION).
        workers: processes.
        progress: is called with the number of further images that were looked at.

    Raises:
        RunError: a process was killed.
    """
    count = len(source.labels)
    records = np.zeros(count, _RECORD)
    messages = {}
    total = np.zeros((SIDE, SIDE, 3))
    starts = range(0, count, _CHUNK)
    chunks = [range(start, min(start + _CHUNK, count)) for start in starts]
    look = functools.partial(_look_at_some, most=most, oriented=oriented)
    # Forked: a spawned process would import Paddle, and get the paths and pixels as a copy.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _begin, (source,))
    try:
        for chunk, (found, said, added) in zip(chunks, pool.map(look, chunks), strict=True):
            records[chunk.start : chunk.stop] = found
            messages |= said if len(messages) < MESSAGES else {}
            total += added
            progress(len(chunk))
    except BrokenProcessPool:
        raise RunError(
            "a process that decodes was killed; is memory short? Fewer --workers need less"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
    return CheckedImages(source, records, messages, total / max(1, records["readable"].sum()))


_own: list[Source] = []  # a process's


def _begin(source: Source) -> None:
    die_with_parent()
    _own[:] = [source]


def _look_at_some(
    places: range, most: int, oriented: bool
) -> tuple[np.ndarray, dict[int, str], np.ndarray]:
    """Returns (records, what is wrong, the sum of the small copies) of some images."""
    records = np.zeros(len(places), _RECORD)
    messages = {}
    small = np.zeros((len(places), SIDE, SIDE, 3), np.uint8)
    for row, place in enumerate(places):
        try:
            image, flaw = picture(_own[0], place, most, records[row])
            image = image if image.mode == "RGB" else image.convert("RGB")
            copy = image.resize((SIDE, SIDE), Image.Resampling.BOX)
            small[row] = TURNS[int(records[row]["turn"]) if oriented else 1].pixels(
                np.asarray(copy)
            )
            records[row]["readable"], records[row]["flawed"] = True, bool(flaw)
        except RunError as error:
            flaw = str(error)
        if flaw:
            messages[place] = flaw
    records["blank"] = small.reshape(len(places), -1).std(1) < _BLANK
    records["hash"] = perceptual_hashes(small)
    return records, messages, small.sum(0, dtype=float)


def picture(source: Source, place: int, most: int, record: Any = None) -> tuple[Image.Image, str]:
    """Returns an image, decoded in full, as it is stored, and what its decoder warned of ("": of
    nothing).

    Args:
        record: takes what is found.

    Raises:
        RunError: it can't be read.
    """
    record = np.zeros(1, _RECORD)[0] if record is None else record
    name = source.name(place)
    if source.pixels is not None:
        pixels = source.pixels[place]
        record["height"], record["width"] = pixels.shape[:2]
        record["bytes"], record["content"], record["turn"] = (
            pixels.nbytes,
            _content(pixels.tobytes()),
            1,
        )
        return _as_picture(pixels, source.mode, name), ""
    with readable(name, RunError):
        data = source.data(place) if source.data else b""
        record["bytes"], record["content"], record["turn"] = (
            len(data),
            _content(data),
            orientation_of(data),
        )
        if isinstance(source.mode, int):
            bands = bands_of(data, source.mode, name, most)
            record["format"], record["mode"] = (
                kind_of(data).encode(),
                f"{bands.values.dtype}".encode(),
            )
            record["width"], record["height"] = bands.size
            return bands.picture(), ""
        image, data = opened_image(data, most)
        record["format"], record["mode"] = (image.format or "").encode(), image.mode.encode()
        record["width"], record["height"] = image.size
        if reason := scaling_problem(image):
            raise Unreadable(reason)
        if image.format == "JPEG" and image.mode in ("RGB", "L"):
            try:
                return Image.fromarray(simplejpeg.decode_jpeg(data, "RGB")), ""
            except ValueError as error:  # what Pillow keeps to itself
                flaw = "" if str(error).endswith(_HARMLESS) else f"{name}: {error}"
                return convert(image, "RGB"), flaw
        return convert(image, "RGB"), ""


def _as_picture(pixels: np.ndarray, mode: str | int, name: str) -> Image.Image:
    with readable(name):
        image = image_of(pixels, mode)
        return image.picture() if isinstance(image, Bands) else image


def _content(data: bytes) -> int:
    # 64 bits: of a million files, two that differ have the same with a probability of 3e-8.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
