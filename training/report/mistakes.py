"""The most confident mistakes of a model, with their pictures."""

import io

import numpy as np
from PIL import Image

from datasets import ImageDataset
from errors import RunError
from loading.transforms import Bands
from training.pages import page
from training.predictions import name_of
from training.report.run_files import FinishedRun, PredictionTable

# Mistakes that a report shows.
MOST = 24
# Pixels of the longer side. Pictures are reduced to _SIDE. Those up to _SMALL are stored without
# loss, and shown with their pixels.
_SIDE = 224
_SMALL = 64


def worst_mistakes(predictions: PredictionTable, multilabel: bool) -> np.ndarray:
    """Returns the indices of the mistakes, the most confident first, MOST at most.

    Equally confident ones are in the dataset's order.
    """
    wrong = np.flatnonzero(~predictions.right)
    confidence = predictions.probability[wrong]
    if multilabel:
        # The distance between the probability of the worst class and its truth, 0 or 1.
        confidence = np.abs(confidence - predictions.predicted[wrong])
    return wrong[np.argsort(-confidence, kind="stable")][:MOST]


def tiles(run: FinishedRun, predictions: PredictionTable, dataset: ImageDataset | None) -> str:
    """Returns the mistakes side by side as HTML, each with its label and its prediction.

    Args:
        dataset: the dataset that was evaluated, for the pictures; None: without them.
    """
    figures = []
    for index in worst_mistakes(predictions, run.multilabel).tolist():
        probability = f"{100 * predictions.probability[index]:.1f} %"
        label = run.name_of(int(predictions.label[index]))
        if run.multilabel:
            first = f"{probability} {label}"
            second = "is there" if predictions.predicted[index] else "isn't there"
        else:
            first = f"{probability} {run.name_of(int(predictions.predicted[index]))}"
            second = f"is {label}"
        picture = None
        if dataset is not None and _is_same_image(run, predictions, dataset, index):
            picture = _picture(dataset, index)
        shown = page.picture("", *picture) if picture else "<small>no picture</small>"
        small = ' class="small"' if picture and picture[1] == "png" else ""
        caption = (
            f"<b>{page.text(first)}</b><br>{page.text(second)}<br>"
            f"<small>{page.text(predictions.images[index])}</small>"
        )
        figures.append(f"<figure{small}>{shown}<figcaption>{caption}</figcaption></figure>")
    return f'<div class="tiles">{"".join(figures)}</div>' if figures else ""


def _is_same_image(
    run: FinishedRun, predictions: PredictionTable, dataset: ImageDataset, index: int
) -> bool:
    """Returns whether the dataset still has the image that was evaluated at an index."""
    if len(dataset) != len(predictions.images):
        return False
    return name_of(dataset, index, run.config.DATA.DATA_PATH) == predictions.images[index]


def _picture(dataset: ImageDataset, index: int) -> tuple[bytes, str] | None:
    """Returns an image as the content of a file and its format, or None if it can't be read."""
    try:
        image = dataset.image(index)
    except RunError:
        return None
    if isinstance(image, Bands):
        image = image.picture()
    # A dataset's image is decoded.
    assert isinstance(image, Image.Image)
    image = image.convert("L" if dataset.mode == "L" else "RGB")
    small = max(image.size) <= _SMALL
    image.thumbnail((_SIDE, _SIDE))
    kind = "png" if small else "jpeg"
    file = io.BytesIO()
    image.save(file, kind.upper(), quality=85)
    return file.getvalue(), kind
