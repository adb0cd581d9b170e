"""The page of a check, FILE.html, which needs no network, and its pictures as one, FILE.png."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from errors import RunError
from inference.visualization.draw import png
from loading.check.findings import Finding, Images, name_of, table
from loading.check.images import SIDE, Part, picture
from loading.class_names import class_name
from loading.label_sets import every_label
from loading.transforms.orientation import TURNS
from training.pages import page
from training.pages.figures import figure, figure_png, set_log_scale, shorten
from training.pages.page import text
from utils import writing_whole

_BARS = 40  # classes, above which their counts are drawn as a curve
# images that are shown, and pixels along a side of each
_GRID = 24
_TILE = 112
_ROWS = 500  # of the table of classes
_COLOURS = {"train": "#3465a4", "val": "#d9822b"}


class DatasetReport(NamedTuple):
    """All that a page tells.

    Attributes:
        title: what was checked.
        verdict: whether it can be used, in a line; ``usable``: so it is.
        alike: pairs of indices of ``images``.
        oriented, most: DATA.EXIF_ORIENTATION, DATA.MAX_PIXELS.
    """

    title: str
    verdict: str
    usable: bool
    parts: Mapping[str, Part]
    findings: Sequence[Finding]
    images: Images
    alike: Sequence[tuple[int, int]]
    oriented: bool
    most: int


def write_report(file: Path, checked: DatasetReport) -> Path:
    """Writes the page, and the picture beside it; returns the picture's path.

    Raises:
        OSError: they can't be written.
    """
    drawings: dict[str, Callable[[Any], None]] = {
        "Images per class": lambda axis: _draw_classes(axis, checked.parts),
        "Shorter side of the images (pixels)": lambda axis: _draw_sizes(axis, checked.parts),
        "Mean image": lambda axis: _draw_mean(axis, checked.parts),
        "Some of the images": lambda axis: _show(axis, _tiles(checked)),
    }
    pages = [(title, _figure({title: draw})) for title, draw in drawings.items()]
    if checked.alike:
        pages.append(("Images that look alike, side by side", png(_twins(checked))))
    together = file.with_suffix(".png")
    with writing_whole(together, "wb") as out:
        out.write(_figure(drawings))
    with writing_whole(file) as out:
        out.write(_page(checked, pages))
    return together


def _page(checked: DatasetReport, pages: Sequence[tuple[str, bytes]]) -> str:
    found = "".join(
        f'<li class="{"stops" if one.stops else ""}">{"stops a run: " if one.stops else ""}{text(one.text)}'
        + "".join(f"<br><small>{text(example)}</small>" for example in one.examples)
        + "</li>"
        for one in checked.findings
    )
    twins = "".join(
        "<br><small>{}</small>".format(
            text(" | ".join(name_of(checked.parts, checked.images, one) for one in pair))
        )
        for pair in checked.alike
    )
    rows = [(name, *values) for name, values in table(checked.parts)]
    return page.page(
        checked.title,
        page.paragraph(checked.verdict, "good" if checked.usable else "stops"),
        page.table(["", *checked.parts], rows, numbers=False),
        page.section("Findings", f"<ul>{found or '<li>none</li>'}</ul>"),
        *(page.section(title, page.picture(title, drawn)) for title, drawn in pages),
        twins,
        page.section("Classes", _classes(checked.parts)),
    )


def _classes(parts: Mapping[str, Part]) -> str:
    counts = _counts(parts)
    classes = next(iter(parts.values())).source.classes
    labels = range(min(_ROWS, counts.shape[1]))
    rows = [
        (class_name(classes, label), *(f"{count:,}" for count in counts[:, label]))
        for label in labels
    ]
    more = (
        page.paragraph(f"and {counts.shape[1] - _ROWS:,} more") if counts.shape[1] > _ROWS else ""
    )
    return page.scroll_box(page.table(["class", *parts], rows) + more)


def _counts(parts: Mapping[str, Part]) -> np.ndarray:
    """Images by part and label."""
    known = max(
        max(len(part.source.classes), every_label(part.source.labels).max(initial=-1) + 1)
        for part in parts.values()
    )
    return np.stack(
        [np.bincount(every_label(part.source.labels), minlength=known) for part in parts.values()]
    )


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


def _draw_classes(axis: Any, parts: Mapping[str, Part]) -> None:
    counts = _counts(parts)
    classes = next(iter(parts.values())).source.classes
    order = np.argsort(-counts[0], kind="stable")
    if len(order) > _BARS:
        for mode, own in zip(parts, counts, strict=True):
            axis.plot(np.sort(own)[::-1], label=mode, color=_COLOURS[mode])
        axis.set(
            xlabel="classes, from the largest to the smallest", ylabel="images", ylim=(0, None)
        )
    else:
        left = np.zeros(len(order))
        names = [shorten(class_name(classes, label)) for label in order.tolist()]
        for mode, own in zip(parts, counts, strict=True):
            axis.barh(
                np.arange(len(order)), own[order], left=left, label=mode, color=_COLOURS[mode]
            )
            left += own[order]
        axis.set_yticks(np.arange(len(order)), names, fontsize=8 if len(order) < 25 else 5)
        axis.invert_yaxis()
        axis.set(xlabel="images")
    axis.legend()


def _draw_sizes(axis: Any, parts: Mapping[str, Part]) -> None:
    sides = {
        mode: np.minimum(part.records["width"], part.records["height"])
        for mode, part in parts.items()
    }
    sides = {mode: own[own > 0] for mode, own in sides.items()}
    low, high = (
        choose([choose(own) for own in sides.values() if len(own)] or [1]) for choose in (min, max)
    )
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


def _draw_mean(axis: Any, parts: Mapping[str, Part]) -> None:
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
    """Some images, of each class in turn, in rows."""
    images = checked.images
    order = np.random.default_rng(0).permutation(len(images.labels))
    turn = np.argsort(images.labels[order], kind="stable")
    _, starts, counts = np.unique(images.labels[order][turn], return_index=True, return_counts=True)
    place = np.empty(len(order), int)
    place[turn] = np.arange(len(order)) - np.repeat(starts, counts)
    chosen = order[np.argsort(place, kind="stable")][:_GRID]
    tiles = [_tile(checked, index) for index in chosen.tolist()]
    tiles += [np.full((_TILE, _TILE, 3), 255, np.uint8)] * (-len(tiles) % 6 if tiles else 6)
    return np.concatenate(
        [np.concatenate(tiles[row : row + 6], 1) for row in range(0, len(tiles), 6)]
    )


def _twins(checked: DatasetReport) -> np.ndarray:
    gap = np.full((_TILE, _TILE // 4, 3), 255, np.uint8)
    found = [
        np.concatenate([*(_tile(checked, index) for index in pair), gap], 1)
        for pair in checked.alike
    ]
    found += [np.full_like(found[0], 255)] * (len(found) % 2)
    return np.concatenate(
        [np.concatenate(found[row : row + 2], 1) for row in range(0, len(found), 2)]
    )


def _tile(checked: DatasetReport, index: int) -> np.ndarray:
    part = checked.parts[checked.images.modes[checked.images.mode[index]]]
    place = int(checked.images.place[index])
    tile = np.full((_TILE, _TILE, 3), 255, np.uint8)
    try:
        image = picture(part.source, place, checked.most)[0]
    except RunError:  # it could be read a moment ago
        return tile
    image = TURNS[int(part.records[place]["turn"]) if checked.oriented else 1].image(
        image.convert("RGB")
    )
    image.thumbnail((_TILE - 4, _TILE - 4), Image.Resampling.BOX)
    left, top = ((_TILE - side) // 2 for side in image.size)
    tile[top : top + image.height, left : left + image.width] = np.asarray(image)
    return tile
