"""Packs a dataset of image files, or of tables of images, into tar shards, in WebDataset's layout,
for DATASET shards.

    python tools/make_shards.py -dataset folder -data_path IN -output OUT [--resize 256] [--workers 8]
    cd OUT && sha256sum -c SHA256SUMS

OUT contains <mode>-000000.tar and so on, <mode>.index.npz, <mode>.txt (line i is the file of sample
i - 1) and SHA256SUMS. It is complete or isn't created at all. Training images are packed in a random
order, so each shard is a mixture of classes; rows of tables keep their order. The index keeps the
dataset's own order. So a run on the shards has the same bits as a run on the files, unless they were
resized. The same files and options make the same bytes, with any number of workers.
"""

import argparse
import functools
import hashlib
import io
import multiprocessing
import os
import re
import signal
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)

# First: it says what isn't installed.
from errors import (  # noqa: E402
    InputError,
    RunError,
    Unreadable,
    open_file,
    reading,
    remedy,
    reporting,
)

# isort: split
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402
from tqdm import tqdm  # noqa: E402

from launch.files import making_folder  # noqa: E402
from settings.parser import Parser  # noqa: E402
from settings.registry import datasets  # noqa: E402

_UNITS = {None: 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_ADVICE = "; repair or remove it"
# The bytes at the beginning of a file, which mostly hold an image's header.
_HEAD = 1 << 17


# The suffixes of images that have no names.
_SUFFIXES = {
    "JPEG": ".jpg",
    "PNG": ".png",
    "WEBP": ".webp",
    "BMP": ".bmp",
    "GIF": ".gif",
    "TIFF": ".tif",
}


def encode(
    path: Any, resize: int | None, quality: int, most: int, channels: int | None = None
) -> tuple[bytes, str]:
    """Returns the bytes to pack for an image, and the suffix of their format.

    Args:
        path: of the image; or a row of a table (``loading.rows.RowImage``).
        resize: pixels of the short side, to which a larger image is reduced (antialiased bicubic).
            A JPEG stays a JPEG, others become PNG, grey or RGB. Of EXIF only the orientation is
            kept. With None, or if the image is no larger, the file is packed as it is.
        quality: of JPEG.
        most: pixels that an image may have.
        channels: the channels of files for DATA.IMAGE_DTYPE float32, which are packed as they are.
            None: the image has colours or is grey.

    Raises:
        InputError: the file can't be read as an image.
    """
    from loading.transforms import convert, largest_file, opened_image

    with reading(_name(path), "an image", _ADVICE):
        data = _data(path, largest_file(most))
        suffix = os.path.splitext(_name(path))[1].lower().replace(".jpeg", ".jpg")
        if channels:
            return data, suffix
        image, _ = opened_image(data, most)
        if not isinstance(path, str):
            suffix = _SUFFIXES.get(image.format or "", suffix)
        size = reduced(image.size, resize)
        if size == image.size:
            return data, suffix
        kind = "JPEG" if image.format == "JPEG" else "PNG"
        pixels = convert(image, "L" if image.mode.startswith(("1", "L", "I")) else "RGB")
        pixels = pixels.resize(size, Image.Resampling.BICUBIC)
    return saved(pixels, kind, data, quality=quality), {"JPEG": ".jpg", "PNG": ".png"}[kind]


def _name(image: Any) -> str:
    """Returns the name of an image, which is its path or a row of a table."""
    return image if isinstance(image, str) else image.name


def _data(image: Any, most: int) -> bytes:
    """Returns the bytes of the file of an image, which is a path or a row of a table."""
    from loading.files import contents

    return contents(image, most) if isinstance(image, str) else image.read(most)


def encode_mask(path: str, kind: Any, resize: int | None, most: int) -> bytes:
    """Returns the bytes to pack for a mask. What its column's table maps is packed as class indices.

    Args:
        kind: of its column (``loading.sources.Masks``).
        resize, most: as of ``encode``. A larger mask is reduced as its image is, by its nearest
            pixels.

    Raises:
        InputError: the file can't be read as a mask.
    """
    from loading.files import contents
    from loading.transforms import largest_file, mask_image

    try:
        with reading(path, "an image", _ADVICE):
            data = contents(path, largest_file(most))
        mask = mask_image(data, path, most, np.dtype(kind.dtype), table=kind.table)
    except RunError as error:
        raise InputError(str(error)) from None
    size = reduced(mask.size, resize)
    if size == mask.size and (kind.table is None or kind.table.is_identity):
        return data
    values = np.asarray(mask.resize(size, Image.Resampling.NEAREST))
    if kind.dtype == "int32":
        values = values.astype(np.uint16)
    return saved(Image.fromarray(values), "PNG", data)


def reduced(size: tuple[int, int], resize: int | None) -> tuple[int, int]:
    """Returns the size of an image whose short side is reduced to ``resize``; None: as it is."""
    short = min(size)
    if resize is None or short <= resize:
        return size
    return resize * size[0] // short, resize * size[1] // short


def saved(image: Image.Image, kind: str, original: bytes, **options: Any) -> bytes:
    """Returns the file of an image, with the orientation of the ``original`` file."""
    from loading.transforms.orientation import TAG, orientation_of

    # A run decides whether the orientation counts.
    if (turn := orientation_of(original)) > 1:
        options["exif"] = Image.Exif()
        options["exif"][TAG] = turn
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_shard(
    file: Path,
    samples: Iterable[tuple[int, str, Any, dict[str, tuple[str, Any]]]],
    resize: int | None,
    quality: int,
    most: int,
    channels: int | None = None,
) -> tuple:
    """Writes a shard; returns its SHA-256 and what ``shards.scan_shard`` reads of it.

    Args:
        samples: (index in the dataset, path, label or array of labels or None, masks) of each image.
            A mask is (path, its column's ``Masks``) by the name of the column.
    """
    from loading.shards import scan_shard

    sha256 = hashlib.sha256()
    with open(file, "wb") as shard:

        def write(block: bytes) -> None:
            sha256.update(block)
            shard.write(block)

        def add(name: str, data: bytes) -> None:
            # Its user and time are 0, so that everybody gets the same bytes.
            member = tarfile.TarInfo(name)
            member.size = len(data)
            write(member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE))

        for index, path, label, masks in samples:
            data, suffix = encode(path, resize, quality, most, channels)
            add(f"{index:09d}{suffix}", data)
            for column, (mask, kind) in masks.items():
                add(f"{index:09d}.{column}.png", encode_mask(mask, kind, resize, most))
            if label is None:
                continue
            ending = "labels" if isinstance(label, np.ndarray) else "cls"
            add(f"{index:09d}.{ending}", ",".join(map(str, np.ravel(label))).encode())
        write(bytes(2 * tarfile.BLOCKSIZE))
        write(bytes(-shard.tell() % tarfile.RECORDSIZE))
        shard.flush()
        os.fsync(shard.fileno())
    return sha256.hexdigest(), scan_shard(file)


def inspect(path: Any, most: int, channels: int | None = None) -> int:
    """Returns the size of an image's file in bytes.

    The image is checked by its header; with ``channels``, the whole file is read.

    Args:
        path, most, channels: as of ``encode``.

    Raises:
        InputError: the image can't be read or packed.
    """
    from loading.layout import IMAGE_SUFFIXES
    from loading.transforms import bands_of, largest_file, opened_image

    with reading(_name(path), "an image", _ADVICE):
        is_row = not isinstance(path, str)
        if not is_row and not path.lower().endswith(IMAGE_SUFFIXES):
            raise Unreadable(f"its name doesn't end in {' '.join(IMAGE_SUFFIXES)}")
        if channels:
            data = _data(path, largest_file(most))
            try:
                bands_of(data, channels, _name(path), most)
            except RunError as error:
                raise InputError(str(error)) from None
            return len(data)
        if is_row:
            data = _data(path, largest_file(most))
            return _checked(path.name, opened_image(data, most)[0], len(data))
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(_HEAD)
            if size > largest_file(most):
                raise Unreadable(f"it has {size} bytes, at most {largest_file(most)} are allowed")
            try:
                image, _ = opened_image(data, most)
            except Exception:
                # The header is longer, or elsewhere in the file.
                image, _ = opened_image(data + file.read(largest_file(most)), most)
    return _checked(path, image, size)


def _checked(name: str, image: Image.Image, size: int) -> int:
    """Returns ``size``; raises InputError where a run couldn't resize the image."""
    from loading.transforms import scaling_problem

    if reason := scaling_problem(image):
        raise InputError(f"{name}: {reason}")
    return size


def plan(sizes: Sequence[int], order: Iterable[int], limit: int) -> list[list[int]]:
    """Returns the indices of each shard: ``order``, cut so that the ``sizes`` in a shard sum to
    ``limit`` at most.
    """
    shards = []
    filled = limit
    for index in order:
        if filled + sizes[index] > limit:
            shards.append([])
            filled = 0
        shards[-1].append(index)
        filled += sizes[index]
    return shards


def pack(
    mode: str, files: Any, output: Path, pool: Executor, options: argparse.Namespace, most: int
) -> list[str]:
    """Writes the shards, index and list of one mode to ``output``; returns their lines of
    SHA256SUMS.

    Args:
        files: the images (``loading.sources.Files`` or ``loading.rows.Rows``).
    """
    from loading.label_sets import LabelSets
    from loading.rows import Rows
    from loading.shards import make_index, write_index
    from loading.sources import Masks

    channels = options.channels
    labels = files.labels
    if isinstance(files, Rows):
        names = files.names.tolist()
        columns = files.columns()
        full: list[Any] = [files.image(index) for index in range(len(files))]
    else:
        names = list(map(os.fsencode, files.paths))
        columns = files.columns
        full = [os.path.join(files.root, path) for path in files.paths]
    masks = {name: column for name, column in columns.items() if isinstance(column, Masks)}
    check = functools.partial(inspect, most=most, channels=channels)
    sizes = list(_progress(f"{mode}: checking", pool.map(check, full, chunksize=64), len(full)))
    order = np.arange(len(full))
    # Rows of Parquet are packed as they come, because neighbours are unpacked together.
    if mode == "train" and not isinstance(files, Rows):
        order = np.random.default_rng(options.seed).permutation(len(full))
    limit, counts_images = options.shard_size
    if counts_images:
        sizes = [1] * len(full)
    planned = plan(sizes, order.tolist(), limit)
    shards = [output / f"{mode}-{number:06d}.tar" for number in range(len(planned))]

    def label_of(index: int) -> Any:
        if labels is None:
            return None
        return labels.of(index) if isinstance(labels, LabelSets) else labels[index]

    # What a column's masks have in common, without their paths, which each sample has.
    kinds = {name: column._replace(paths=()) for name, column in masks.items()}

    def masks_of(index: int) -> dict[str, tuple[str, Any]]:
        return {
            name: (os.path.join(files.root, column.paths[index]), kinds[name])
            for name, column in masks.items()
        }

    samples = [
        [(index, full[index], label_of(index), masks_of(index)) for index in shard]
        for shard in planned
    ]
    write = functools.partial(
        write_shard, resize=options.resize, quality=options.quality, most=most, channels=channels
    )
    done = list(_progress(f"{mode}: packing", pool.map(write, shards, samples), len(shards)))
    lines = [f"{digest}  {shard.name}\n" for shard, (digest, _) in zip(shards, done, strict=True)]
    index = output / f"{mode}.index.npz"
    listed = output / f"{mode}.txt"
    scanned = [part for _, part in done]
    write_index(index, make_index(shards, scanned, files.classes, columns))
    listed.write_bytes(b"".join(name + b"\n" for name in names))
    for file in (index, listed):
        lines.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n")
    return lines


def _progress(what: str, results: Iterable, total: int) -> Iterable:
    # With disable=None, there is no bar without a terminal.
    return tqdm(results, what, total, disable=None, dynamic_ncols=True)


def make_shards(options: argparse.Namespace) -> str:
    """Packs the dataset that the command line names. Returns a line for the user.

    Raises:
        InputError: the dataset or an image can't be read, or the output holds something already.
        RunError: a worker was killed, or the output can't be written.
    """
    output = Path(options.output)
    start = time.monotonic()
    # A link that the user made is followed.
    if output.is_symlink():
        output = output.resolve()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(
            f"-output {output} already exists and isn't an empty folder; choose another"
        )
    from config import get_config
    from loading.layout import skipped_text
    from loading.rows import Rows
    from loading.sources import Split
    from loading.subsets import read_split

    words = ["DATA.DATASET", options.dataset, "DATA.DATA_PATH", options.data_path]
    if options.max_pixels:
        words += ["DATA.MAX_PIXELS", str(options.max_pixels)]
    config = get_config(None, [*words, *options.o])
    skipped: list[str] = []
    alone = "val" not in options.modes
    splits = {mode: Split(mode, alone=alone, skipped=skipped) for mode in options.modes}
    reader = datasets.choose(config)
    files: dict[str, Any] = {
        mode: read_split(config.DATA, split, reader) for mode, split in splits.items()
    }
    if skipped:
        print(skipped_text(sorted(set(skipped))), file=sys.stderr)
    # A spawned process would import Paddle.
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        options.workers, fork, signal.signal, (signal.SIGINT, signal.SIG_IGN)
    )
    try:
        with making_folder(output) as temporary:
            lines = []
            for mode in files:
                lines += pack(mode, files[mode], temporary, pool, options, config.DATA.MAX_PIXELS)
            (temporary / "SHA256SUMS").write_text("".join(lines))
            size = sum(file.stat().st_size for file in temporary.iterdir())
    except BrokenProcessPool:
        raise RunError("a worker was killed; out of memory? use fewer --workers") from None
    except OSError as error:
        raise RunError(f"{output} can't be written ({error}); {remedy(error)}") from None
    finally:
        pool.shutdown(cancel_futures=True)
    images = " and ".join(
        f"{len(source if isinstance(source, Rows) else source.paths):,} {mode} images"
        for mode, source in files.items()
    )
    shards = sum(".tar\n" in line for line in lines)
    seconds = time.monotonic() - start
    return f"{output}: {images} in {shards} shards, {size / 1e6:,.1f} MB, {seconds:.1f} s"


def shard_size(text: str) -> tuple[int, bool]:
    """Returns the most that a shard holds, and whether it counts images (5000) or bytes (1000MB)."""
    match = re.fullmatch(r"(\d+)(KB|MB|GB)?", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of images nor a size such as 1000MB"
        )
    return int(match[1]) * _UNITS[match[2]], match[2] is None


def positive(text: str) -> int:
    """Returns a word of the command line as a whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number of at least 1")
    return int(text)


def main() -> None:
    parser = Parser(__doc__)

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option(
        "dataset",
        choices=datasets.names(returns=("Files", "Rows")),
        required=True,
        help="format of the dataset; docs/guides/prepare_data.md describes them",
    )
    option("data_path", required=True, metavar="IN", help="the dataset's folder")
    option("output", required=True, metavar="OUT", help="a new or an empty folder")
    option(
        "o",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY VALUE",
        help="set any keys, such as DATA.VAL_SPLIT 0.2",
    )
    option(
        "modes",
        nargs="+",
        choices=("train", "val"),
        default=["train", "val"],
        help="the parts to pack; default: both",
    )
    text = (
        "the size of a shard: a number of images (5000),"
        " or the bytes of their files before --resize; default: 256MB"
    )
    option("shard_size", type=shard_size, default="256MB", metavar="SIZE", help=text)
    option(
        "resize",
        type=positive,
        metavar="SIDE",
        help="reduce larger images to this many pixels on the short side",
    )
    option(
        "quality",
        type=positive,
        default=95,
        help="JPEG quality of resized images, 1 to 100; default: 95",
    )
    text = (
        "number of channels of files such as .npy (DATA.IMAGE_DTYPE float32),"
        " which are packed unchanged; default: colours or grey"
    )
    option("channels", type=positive, metavar="N", help=text)
    option(
        "max_pixels",
        type=positive,
        metavar="N",
        help="maximum number of pixels of an image; default: DATA.MAX_PIXELS",
    )
    option(
        "workers",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="number of processes; default: one per core",
    )
    option(
        "seed",
        type=int,
        default=0,
        help="seed of the order of training images; default: 0",
    )
    options = parser.parse_args()
    if options.channels and options.resize:
        parser.error(
            "--resize makes 8-bit colours, --channels keeps files unchanged; leave out one of them"
        )
    if options.quality > 100 or options.seed < 0:
        parser.error(
            f"--quality is {options.quality}, --seed {options.seed};"
            " expected 1 to 100, and 0 or more"
        )
    print(make_shards(options))


if __name__ == "__main__":
    with reporting():
        main()
