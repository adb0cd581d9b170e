"""Decodes every image of a dataset for a check, in several processes.

The record of an image takes 60 bytes.
"""

import functools
import hashlib
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from errors import InputError, RunError, Unreadable
from launch.signals import die_with_parent
from loading.check.duplicates import perceptual_hashes
from loading.check.masks import (
    MESSAGES,
    CheckedMasks,
    MaskSource,
    check_masks,
    mask_sources,
    unchecked_masks,
)
from loading.files import contents
from loading.label_sets import LabelSets, labels_or_unknown
from loading.rows import Rows
from loading.shards import Shards
from loading.sources import Arrays, Files, Masks
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

# Pixels along a side of the small copies, from which the mean image and the hashes are computed.
SIDE = 64
# Images that a process gets at a time.
_CHUNK = 64
# An image is blank if the standard deviation of its small copy is less, in grey levels.
_BLANK = 1.0
# A decoder's warning about data that a camera appended, which no pixel depends on.
_HARMLESS = "extraneous bytes before marker 0xd9"
_RECORD = np.dtype([
    ("width", "i4"), ("height", "i4"), ("bytes", "i8"), ("format", "S5"), ("mode", "S8"),
    ("turn", "u1"), ("content", "u8"), ("hash", "u8"), ("blank", "?"), ("readable", "?"),
    ("flawed", "?"),
])  # fmt: skip


class Source(NamedTuple):
    """Where the images of a split come from.

    Attributes:
        name: place -> the image's name, for messages.
        data: place -> the bytes of the image's file; None for images that are in memory.
        labels: of the images, [n]; UNKNOWN where they have none.
        classes: names, in the order of the labels.
        pixels: [n, ...], of images that are in memory.
        mode: as of ``pixel_mode``; "RGB" for grey images, too.
        paths: relative to the data's folder; empty for images that aren't files.
        masks: of the images, by column.
    """

    name: Callable[[int], str]
    data: Callable[[int], bytes] | None
    labels: np.ndarray | LabelSets
    classes: Sequence[str]
    pixels: np.ndarray | None = None
    mode: str | int = "RGB"
    paths: Sequence[str] = ()
    masks: Mapping[str, MaskSource] = {}


class CheckedImages(NamedTuple):
    """The decoded images of a split.

    Attributes:
        source: the images.
        records: [n]. A record holds an image's size, bytes, format, mode and EXIF orientation, a
            hash of the file's bytes (``content``) and one of what it shows (``hash``). It says
            whether the image is blank, is readable, and was read with a decoder's warning
            (``flawed``).
        messages: what is wrong with single images, by their place; about the first MESSAGES.
        mean: [SIDE, SIDE, 3], the mean of the readable images, in grey levels.
        masks: of the images, by column.
    """

    source: Source
    records: np.ndarray
    messages: dict[int, str]
    mean: np.ndarray
    masks: dict[str, CheckedMasks]


def image_source(images: Any, most: int, mode: str | int = "RGB") -> Source:
    """Returns the source of what a dataset's reader returned.

    Args:
        most: pixels that an image may have (DATA.MAX_PIXELS).
        mode: as of ``Source``.

    Raises:
        InputError: the images are drawn at random, so there is nothing to check.
    """
    largest = largest_file(most)
    if isinstance(images, Files):
        root, paths, labels, classes, columns = images

        paths_of: dict[str | None, Sequence[str]] = {None: paths}
        for name, each in columns.items():
            if isinstance(each, Masks):
                paths_of[name] = each.paths

        def path(index: int, column: str | None = None) -> str:
            return os.path.join(root, paths_of[column][index])

        def file_data(index: int, column: str | None = None) -> bytes:
            return contents(path(index, column), largest)

        labels = labels_or_unknown(labels, len(paths))
        masks = mask_sources(columns, path, file_data)
        return Source(path, file_data, labels, classes, mode=mode, paths=paths, masks=masks)
    if isinstance(images, Shards | Rows):
        data = functools.partial(images.read, most=largest)
        labels = labels_or_unknown(images.labels, len(images.names))
        masks = mask_sources(images.columns(), images.name, data)
        return Source(images.name, data, labels, images.classes, mode=mode, masks=masks)
    if isinstance(images, Arrays):
        pixels, labels, classes = images.read()
        return Source(
            name=lambda index: f"image {index}",
            data=None,
            labels=np.asarray(labels),
            classes=classes,
            pixels=pixels,
            mode=mode,
        )
    raise InputError("DATASET synthetic: its images are random, so there is nothing to check")


def check_images(
    source: Source,
    most: int,
    oriented: bool,
    workers: int,
    progress: Callable[[int], Any] = lambda _: None,
) -> CheckedImages:
    """Decodes every image, and returns their properties.

    Args:
        most: pixels that an image may have.
        oriented: turn images as their EXIF says (DATA.EXIF_ORIENTATION).
        workers: number of processes.
        progress: is called with the number of images that were decoded since the last call.

    Raises:
        RunError: a process was killed.
    """
    count = len(source.labels)
    records = np.zeros(count, _RECORD)
    messages = {}
    total = np.zeros((SIDE, SIDE, 3))
    masks = {column: unchecked_masks(each, count) for column, each in source.masks.items()}
    starts = range(0, count, _CHUNK)
    chunks = [range(start, min(start + _CHUNK, count)) for start in starts]
    check = functools.partial(_check_chunk, most=most, oriented=oriented)
    # A spawned process would import Paddle, and get a copy of the paths and pixels.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _begin, (source,))
    try:
        results = pool.map(check, chunks)
        for chunk, part in zip(chunks, results, strict=True):
            chunk_records, chunk_messages, chunk_sum, chunk_masks = part
            records[chunk.start : chunk.stop] = chunk_records
            if len(messages) < MESSAGES:
                messages |= chunk_messages
            total += chunk_sum
            for column, checked in masks.items():
                checked.add(chunk, chunk_masks[column])
            progress(len(chunk))
    except BrokenProcessPool:
        raise RunError(
            "a process that decodes was killed; out of memory? use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
    mean = total / max(1, records["readable"].sum())
    return CheckedImages(source, records, messages, mean, masks)


# The images that this process decodes, as a list of one.
_source: list[Source] = []


def _begin(source: Source) -> None:
    die_with_parent()
    _source[:] = [source]


def _check_chunk(
    places: range, most: int, oriented: bool
) -> tuple[np.ndarray, dict[int, str], np.ndarray, dict[str, CheckedMasks]]:
    """Returns (records, messages by place, the sum of the small copies, masks) of some images."""
    records = np.zeros(len(places), _RECORD)
    messages = {}
    small = np.zeros((len(places), SIDE, SIDE, 3), np.uint8)
    sizes: list[tuple[str, tuple[int, int] | None]] = []
    for row, place in enumerate(places):
        try:
            image, warning = picture(_source[0], place, most, records[row])
            if image.mode != "RGB":
                image = image.convert("RGB")
            copy = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))
            turn = TURNS[int(records[row]["turn"]) if oriented else 1]
            small[row] = turn.pixels(copy)
            size = turn.size((int(records[row]["width"]), int(records[row]["height"])))
            records[row]["readable"] = True
            records[row]["flawed"] = bool(warning)
            message = warning
        except RunError as error:
            message = str(error)
            size = None
        if message:
            messages[place] = message
        sizes.append((_source[0].name(place), size))
    records["blank"] = small.reshape(len(places), -1).std(1) < _BLANK
    records["hash"] = perceptual_hashes(small)
    masks = {
        column: check_masks(source, places, sizes, most, oriented)
        for column, source in _source[0].masks.items()
    }
    return records, messages, small.sum(0, dtype=float), masks


def picture(source: Source, place: int, most: int, record: Any = None) -> tuple[Image.Image, str]:
    """Returns (an image, decoded in full and not turned; its decoder's warning or "").

    Args:
        place: of the image in its source.
        record: an entry of ``CheckedImages.records``, which is filled in.

    Raises:
        RunError: the image can't be read.
    """
    record = np.zeros(1, _RECORD)[0] if record is None else record
    name = source.name(place)
    if source.pixels is not None:
        pixels = source.pixels[place]
        record["height"], record["width"] = pixels.shape[:2]
        record["bytes"] = pixels.nbytes
        record["content"] = _content_hash(pixels.tobytes())
        record["turn"] = 1
        return _as_picture(pixels, source.mode, name), ""
    with readable(name, RunError):
        data = source.data(place) if source.data else b""
        record["bytes"] = len(data)
        record["content"] = _content_hash(data)
        record["turn"] = orientation_of(data)
        if isinstance(source.mode, int):
            bands = bands_of(data, source.mode, name, most)
            record["format"] = kind_of(data).encode()
            record["mode"] = str(bands.values.dtype).encode()
            record["width"], record["height"] = bands.size
            return bands.picture(), ""
        image, data = opened_image(data, most)
        record["format"] = (image.format or "").encode()
        record["mode"] = image.mode.encode()
        record["width"], record["height"] = image.size
        if reason := scaling_problem(image):
            raise Unreadable(reason)
        if image.format == "JPEG" and image.mode in ("RGB", "L"):
            try:
                return Image.fromarray(simplejpeg.decode_jpeg(data, "RGB")), ""
            except ValueError as error:
                # simplejpeg raises the warnings that Pillow ignores.
                warning = "" if str(error).endswith(_HARMLESS) else f"{name}: {error}"
                return convert(image, "RGB"), warning
        return convert(image, "RGB"), ""


def _as_picture(pixels: np.ndarray, mode: str | int, name: str) -> Image.Image:
    with readable(name):
        image = image_of(pixels, mode)
        return image.picture() if isinstance(image, Bands) else image


def _content_hash(data: bytes) -> int:
    # Of a million different files, two have the same 64 bits with a probability of 3e-8.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
