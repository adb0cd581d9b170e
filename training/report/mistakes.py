"""The answers that a model was surest of, and which are wrong, with their pictures."""

import io

import numpy as np
from PIL import Image

from datasets import ImageDataset
from errors import RunError
from loading.transforms import Bands
from training.pages import page
from training.predictions import name_of
from training.report.run_files import FinishedRun, PredictionTable

MOST = 24
# pixels: a picture is made no larger than this; below this, it is shown as it is
_SIDE = 224
_SMALL = 64


def worst_mistakes(told: PredictionTable, several: bool) -> np.ndarray:
    """Returns the places of the mistakes, the most confident first, MOST at most; equal ones in the
    dataset's order.
    """
    wrong = np.flatnonzero(~told.right)
    sure = told.probability[wrong]
    sure = np.abs(sure - told.predicted[wrong]) if several else sure
    return wrong[np.argsort(-sure, kind="stable")][:MOST]


def tiles(run: FinishedRun, told: PredictionTable, dataset: ImageDataset | None) -> str:
    """Returns the mistakes side by side, each with its label and its prediction.

    Args:
        dataset: the images; None: they aren't at hand.
    """
    figures = []
    for place in worst_mistakes(told, run.several).tolist():
        drawn = (
            _picture(dataset, place)
            if dataset is not None and _same(run, told, dataset, place)
            else None
        )
        share = f"{100 * told.probability[place]:.1f} %"
        if run.several:
            first = f"{share} {run.name_of(int(told.label[place]))}"
            second = "is there" if told.predicted[place] else "isn't there"
        else:
            first = f"{share} {run.name_of(int(told.predicted[place]))}"
            second = f"is {run.name_of(int(told.label[place]))}"
        shown = page.picture("", *drawn) if drawn else "<small>no picture</small>"
        small = ' class="small"' if drawn and drawn[1] == "png" else ""
        words = f"<b>{page.text(first)}</b><br>{page.text(second)}<br><small>{page.text(told.images[place])}</small>"
        figures.append(f"<figure{small}>{shown}<figcaption>{words}</figcaption></figure>")
    return f'<div class="tiles">{"".join(figures)}</div>' if figures else ""


def _same(run: FinishedRun, told: PredictionTable, dataset: ImageDataset, place: int) -> bool:
    """Whether the image is the one that was evaluated: others may have come or gone since then."""
    same = len(dataset) == len(told.images)
    return same and name_of(dataset, place, run.config.DATA.DATA_PATH) == told.images[place]


def _picture(dataset: ImageDataset, place: int) -> tuple[bytes, str] | None:
    """An image as a file, and its kind; None where it can't be read."""
    try:
        image = dataset.image(place)
    except RunError:
        return None
    if isinstance(image, Bands):
        image = image.picture()
    assert isinstance(image, Image.Image)  # decoded
    image = image.convert("L" if dataset.mode == "L" else "RGB")
    small = max(image.size) <= _SMALL
    file = io.BytesIO()
    image.thumbnail((_SIDE, _SIDE))
    image.save(file, "PNG" if small else "JPEG", quality=85)
    return file.getvalue(), "png" if small else "jpeg"
