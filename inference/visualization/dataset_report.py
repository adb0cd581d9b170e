"""Writes the report of a dataset's check: FILE.html, which needs no network, and FILE.png."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from errors import RunError
from inference.visualization.draw import png
from loading.check.findings import Finding, ReadableImages, have_labels, image_name, table
from loading.check.images import SIDE, CheckedImages, picture
from loading.check.mask_findings import usable_masks
from loading.check.masks import read_mask
from loading.class_names import class_name
from loading.label_sets import every_label
from loading.mask_tables import class_colors
from loading.transforms.orientation import TURNS
from training.pages import page
from training.pages.names import shorten
from training.pages.page import text
from training.pages.plotting import figure, figure_png, set_log_scale
from utils import writing_whole

# With more classes than this, their counts are drawn as a curve instead of bars.
_BARS = 40
# The number of images that are shown, how many of them are in a row, and the pixels along the side
# of each.
_GRID = 24
_ACROSS = 6
_TILE = 112
# The images that are shown under their masks, the pixels along a side of each, and the classes whose
# colours are named.
_MASKED = 8
_MASKED_SIDE = 256
_LEGEND = 24
# The most rows of the table of classes.
_ROWS = 500
_COLOURS = {"train": "#3465a4", "val": "#d9822b"}


class DatasetReport(NamedTuple):
    """The contents of a report.

    Attributes:
        title: the name of what was checked.
        verdict: a line that says whether the dataset can be used.
        usable: whether it can be used.
        parts: the checked part of each mode, "train" and "val".
        findings: what the check found.
        images: the checked images.
        alike: pairs of images that look alike, as indices of ``images``.
        oriented: DATA.EXIF_ORIENTATION.
        most: DATA.MAX_PIXELS.
    """

    title: str
    verdict: str
    usable: bool
    parts: Mapping[str, CheckedImages]
    findings: Sequence[Finding]
    images: ReadableImages
    alike: Sequence[tuple[int, int]]
    oriented: bool
    most: int


def write_report(file: Path, checked: DatasetReport) -> Path:
    """Writes FILE.html and FILE.png next to it; returns the path of the latter.

    Raises:
        OSError: they can't be written.
    """
    drawings: dict[str, Callable[[Any], None]] = {}
    if have_labels(checked.parts):
        drawings["Images per class"] = lambda axis: _draw_classes(axis, checked.parts)
    drawings |= {
        "Shorter side of the images (pixels)": lambda axis: _draw_sizes(axis, checked.parts),
        "Mean image": lambda axis: _draw_mean(axis, checked.parts),
        "Some of the images": lambda axis: _show(axis, _tiles(checked)),
    }
    pages = [(title, _figure({title: draw})) for title, draw in drawings.items()]
    for column in next(iter(checked.parts.values())).masks:
        pages.append((f"Some of the images under their masks ({column})", _masks(checked, column)))
    if checked.alike:
        pages.append(("Images that look alike, side by side", png(_twins(checked))))
    picture_file = file.with_suffix(".png")
    with writing_whole(picture_file, "wb") as out:
        out.write(_figure(drawings))
    with writing_whole(file) as out:
        out.write(_page(checked, pages))
    return picture_file


def _page(checked: DatasetReport, pages: Sequence[tuple[str, bytes]]) -> str:
    findings = "".join(map(_finding, checked.findings))
    twins = ""
    for pair in checked.alike:
        names = [image_name(checked.parts, checked.images, index) for index in pair]
        twins += f"<br><small>{text(' | '.join(names))}</small>"
    rows = [(name, *values) for name, values in table(checked.parts)]
    return page.page(
        checked.title,
        page.paragraph(checked.verdict, "good" if checked.usable else "stops"),
        page.table(["", *checked.parts], rows, numbers=False),
        page.section("Findings", f"<ul>{findings or '<li>none</li>'}</ul>"),
        *(page.section(title, page.picture(title, drawn)) for title, drawn in pages),
        twins,
        page.section("Classes", _classes(checked.parts)) if have_labels(checked.parts) else "",
    )


def _finding(finding: Finding) -> str:
    """Returns a finding and its examples as an item of a list."""
    examples = "".join(f"<br><small>{text(example)}</small>" for example in finding.examples)
    if finding.is_error:
        return f'<li class="stops">stops a run: {text(finding.text)}{examples}</li>'
    return f'<li class="">{text(finding.text)}{examples}</li>'


def _classes(parts: Mapping[str, CheckedImages]) -> str:
    """Returns the table of classes with their number of images."""
    counts = _counts(parts)
    classes = next(iter(parts.values())).source.classes
    labels = range(min(_ROWS, counts.shape[1]))
    rows = [
        (class_name(classes, label), *(f"{count:,}" for count in counts[:, label]))
        for label in labels
    ]
    table_of_classes = page.table(["class", *parts], rows)
    if counts.shape[1] > _ROWS:
        table_of_classes += page.paragraph(f"and {counts.shape[1] - _ROWS:,} more")
    return page.scroll_box(table_of_classes)


def _counts(parts: Mapping[str, CheckedImages]) -> np.ndarray:
    """Returns the number of images by part and label."""
    labels = [every_label(part.source.labels) for part in parts.values()]
    known = max(
        max(len(part.source.classes), part_labels.max(initial=-1) + 1)
        for part, part_labels in zip(parts.values(), labels, strict=True)
    )
    return np.stack([np.bincount(part_labels, minlength=known) for part_labels in labels])


def _figure(drawings: Mapping[str, Callable[[Any], None]]) -> bytes:
    across = min(2, len(drawings))
    down = -(-len(drawings) // across)
    drawn = figure(7.5 * across, 4.6 * down)
    for number, (title, draw) in enumerate(drawings.items(), 1):
        axis = drawn.add_subplot(down, across, number)
        if len(drawings) > 1:
            axis.set_title(title)
        draw(axis)
    return figure_png(drawn)


def _draw_classes(axis: Any, parts: Mapping[str, CheckedImages]) -> None:
    counts = _counts(parts)
    classes = next(iter(parts.values())).source.classes
    order = np.argsort(-counts[0], kind="stable")
    if len(order) > _BARS:
        for mode, part_counts in zip(parts, counts, strict=True):
            axis.plot(np.sort(part_counts)[::-1], label=mode, color=_COLOURS[mode])
        axis.set(
            xlabel="classes, from the largest to the smallest", ylabel="images", ylim=(0, None)
        )
    else:
        rows = np.arange(len(order))
        left = np.zeros(len(order))
        for mode, part_counts in zip(parts, counts, strict=True):
            widths = part_counts[order]
            axis.barh(rows, widths, left=left, label=mode, color=_COLOURS[mode])
            left += widths
        names = [shorten(class_name(classes, label)) for label in order.tolist()]
        axis.set_yticks(rows, names, fontsize=8 if len(order) < 25 else 5)
        axis.invert_yaxis()
        axis.set(xlabel="images")
    axis.legend()


def _draw_sizes(axis: Any, parts: Mapping[str, CheckedImages]) -> None:
    sides = {
        mode: np.minimum(part.records["width"], part.records["height"])
        for mode, part in parts.items()
    }
    # The size of a broken image is 0.
    sides = {mode: pixels[pixels > 0] for mode, pixels in sides.items()}
    low = min([min(pixels) for pixels in sides.values() if len(pixels)] or [1])
    high = max([max(pixels) for pixels in sides.values() if len(pixels)] or [1])
    bins = np.geomspace(low, high + 1, 40)
    axis.hist(
        list(sides.values()),
        bins,
        stacked=True,
        label=list(sides),
        color=[_COLOURS[mode] for mode in sides],
    )
    axis.set(xlabel="pixels", ylabel="images")
    set_log_scale(axis)
    axis.minorticks_off()
    axis.set_xticks(sorted({int(low), round((low * high) ** 0.5), int(high)}))
    axis.legend()


def _draw_mean(axis: Any, parts: Mapping[str, CheckedImages]) -> None:
    gap = np.full((SIDE, 2, 3), 255, np.uint8)
    means = [side for part in parts.values() for side in (part.mean.round().astype(np.uint8), gap)]
    _show(axis, np.concatenate(means[:-1], 1))
    axis.set_xlabel(" | ".join(parts))


def _show(axis: Any, pixels: np.ndarray) -> None:
    axis.imshow(pixels, interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    for edge in axis.spines.values():
        edge.set_visible(False)


def _tiles(checked: DatasetReport) -> np.ndarray:
    """Returns a picture of some images in rows, taken from each class in turn."""
    images = checked.images
    order = np.random.default_rng(0).permutation(len(images.labels))
    by_class = np.argsort(images.labels[order], kind="stable")
    _, starts, counts = np.unique(
        images.labels[order][by_class], return_index=True, return_counts=True
    )
    # The number of each image within its class. The first ones of all classes come first.
    number = np.empty(len(order), int)
    number[by_class] = np.arange(len(order)) - np.repeat(starts, counts)
    chosen = order[np.argsort(number, kind="stable")][:_GRID]
    tiles = [_tile(checked, index) for index in chosen.tolist()]
    # White tiles fill the last row, or the only one.
    while not tiles or len(tiles) % _ACROSS:
        tiles.append(np.full((_TILE, _TILE, 3), 255, np.uint8))
    rows = [tiles[start : start + _ACROSS] for start in range(0, len(tiles), _ACROSS)]
    return np.concatenate([np.concatenate(row, 1) for row in rows])


def _masks(checked: DatasetReport, column: str) -> bytes:
    """Returns a PNG of some images, each beside the same under its mask, with the classes' colours."""
    part = next(iter(checked.parts.values()))
    masks = part.masks[column]
    usable = np.flatnonzero(part.records["readable"] & usable_masks(masks))
    chosen = np.sort(np.random.default_rng(0).permutation(usable)[:_MASKED])
    colors = class_colors(len(masks.pixels))
    colors[masks.kind.ignored] = 255
    pairs = [_masked(checked, part, column, place, colors) for place in chosen.tolist()]
    if len(pairs) % 2 or not pairs:
        pairs.append(np.full((_MASKED_SIDE, 2 * _MASKED_SIDE, 3), 255, np.uint8))
    rows = [np.concatenate(pairs[start : start + 2], 1) for start in range(0, len(pairs), 2)]
    drawn = figure(10, 2.6 * len(rows) + 1)
    axis = drawn.add_subplot(1, 1, 1)
    _show(axis, np.concatenate(rows))
    order = np.argsort(-masks.pixels, kind="stable")[:_LEGEND].tolist()
    classes = part.source.classes if masks.kind.classes else ()
    for index in order:
        if not masks.pixels[index]:
            continue
        name = class_name(classes, index) if classes else str(index)
        if index == masks.kind.ignored:
            name = "ignored"
        axis.plot([], [], "s", color=colors[index] / 255, label=shorten(name), mec="#888888")
    if masks.pixels.any():
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=6, fontsize=8, frameon=False)
    return figure_png(drawn)


def _masked(
    checked: DatasetReport, part: CheckedImages, column: str, place: int, colors: np.ndarray
) -> np.ndarray:
    """Returns two tiles beside each other: an image, and the same under its mask.

    They are white if a file was changed or removed since it was checked.

    Args:
        colors: of the indices, [indices, 3] uint8. What is ignored is left as it is.
    """
    tile = np.full((_MASKED_SIDE, _MASKED_SIDE, 3), 255, np.uint8)
    source = part.source.masks[column]
    image = _upright(part, place, checked)
    try:
        mask = read_mask(source, place, checked.most, checked.oriented)
    except RunError:
        mask = None
    if image is None or mask is None or mask.size != image.size:
        return np.concatenate([tile, tile], 1)
    image.thumbnail((_MASKED_SIDE - 4, _MASKED_SIDE - 4), Image.Resampling.BOX)
    indices = np.asarray(mask.resize(image.size, Image.Resampling.NEAREST))
    pixels = np.asarray(image)
    # Over grey, so that no colour of the picture is taken for one of a class.
    grey = np.asarray(image.convert("L"))[:, :, None]
    blended = (0.4 * grey + 0.6 * colors[indices]).astype(np.uint8)
    covered = np.where((indices == source.kind.ignored)[:, :, None], pixels, blended)
    return np.concatenate([_on_tile(each, _MASKED_SIDE) for each in (pixels, covered)], 1)


def _twins(checked: DatasetReport) -> np.ndarray:
    """Returns a picture of pairs of images that look alike, two pairs in a row."""
    gap = np.full((_TILE, _TILE // 4, 3), 255, np.uint8)
    pairs = [
        np.concatenate([*(_tile(checked, index) for index in pair), gap], 1)
        for pair in checked.alike
    ]
    if len(pairs) % 2:
        pairs.append(np.full_like(pairs[0], 255))
    rows = [np.concatenate(pairs[start : start + 2], 1) for start in range(0, len(pairs), 2)]
    return np.concatenate(rows)


def _tile(checked: DatasetReport, index: int) -> np.ndarray:
    """Returns an image on a white tile; the tile alone if the image can't be read any more."""
    part = checked.parts[checked.images.modes[checked.images.mode[index]]]
    image = _upright(part, int(checked.images.place[index]), checked)
    if image is None:
        return np.full((_TILE, _TILE, 3), 255, np.uint8)
    image.thumbnail((_TILE - 4, _TILE - 4), Image.Resampling.BOX)
    return _on_tile(np.asarray(image), _TILE)


def _upright(part: CheckedImages, place: int, checked: DatasetReport) -> Image.Image | None:
    """Returns an image as it is shown; None if its file was changed or removed since the check."""
    try:
        image = picture(part.source, place, checked.most)[0]
    except RunError:
        return None
    turn = int(part.records[place]["turn"]) if checked.oriented else 1
    return TURNS[turn].image(image.convert("RGB"))


def _on_tile(pixels: np.ndarray, side: int) -> np.ndarray:
    """Returns pixels [h, w, 3] in the middle of a white tile [side, side, 3]."""
    tile = np.full((side, side, 3), 255, np.uint8)
    height, width = pixels.shape[:2]
    top = (side - height) // 2
    left = (side - width) // 2
    tile[top : top + height, left : left + width] = pixels
    return tile
