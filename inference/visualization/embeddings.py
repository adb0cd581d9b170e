"""Many images at once: their pooled features in the plane, and a grid of what the model says of
them.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from errors import InputError, RunError, printable
from inference.pictures import Pictures
from inference.predictor import Predictor
from inference.visualization.draw import Panel, enlarge, sheet
from inference.visualization.predicted_image import model_of
from settings.options import nearest
from training.pages.figures import figure, figure_png, legend_name, shorten
from weights.layout import sublayer

FEWEST = 5  # images that t-SNE can tell apart
# blue and vermilion: distinct for the colour-blind
RIGHT = "#0072B2"
WRONG = "#D55E00"
# Okabe & Ito's palette
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
_MARKERS = "osD^v*"  # of another length than the colours: 42 pairs
_NAMED = 24  # classes of a legend, at most


def pooled_features(
    predictor: Predictor, files: Sequence[str], workers: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what the classifier reads of each image [n, channels], and the probabilities [n, K].

    Raises:
        RunError: an image can't be read.
    """
    model = model_of(predictor)
    kept = []
    classifier = sublayer(model, model.classifier_names()[0])
    hook = classifier.register_forward_pre_hook(
        lambda _, x: kept.append(x[0].astype("float32").numpy())
    )
    shares = []
    try:
        for batch in predictor.batches(Pictures(predictor.config, files), workers):
            if problem := next(filter(None, batch.problems), ""):
                raise RunError(problem)
            shares.append(predictor.probabilities(predictor.logits(batch.pixels)))
    finally:
        hook.remove()
    return np.concatenate(kept), np.concatenate(shares)


def plane(features: np.ndarray, method: str = "tsne", seed: int = 0) -> np.ndarray:
    """Returns a place in the plane for each of [n, channels]: [n, 2]; near ones were near. The seed
    decides alone.

    Args:
        method: "tsne" (van der Maaten & Hinton 2008) or "umap" (McInnes et al. 2018), of
            umap-learn.

    Raises:
        InputError: too few images, or umap-learn isn't installed.
    """
    if len(features) < FEWEST:
        raise InputError(f"found {len(features)} images, expected {FEWEST} or more to compare")
    if method == "umap":
        if not find_spec("umap"):
            raise InputError(
                "umap-learn isn't installed; pip install umap-learn, or take -method tsne"
            )
        from umap import UMAP  # pyright: ignore[reportMissingImports]: nothing installs it

        return UMAP(n_neighbors=min(15, len(features) - 1), random_state=seed).fit_transform(
            features
        )
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    found = TSNE(perplexity=perplexity, init="random", random_state=seed)
    # its steps are short: threads that wait for each other took 10 s instead of 1
    with threadpool_limits(1):
        return found.fit_transform(features.astype(np.float64))


def embeddings(
    predictor: Predictor,
    files: Sequence[str],
    truth: Sequence[str | None],
    method: str = "tsne",
    seed: int = 0,
    workers: int = 0,
) -> bytes:
    """Returns a PNG: each image's pooled features as a point, coloured by class: its folder's, or
    the predicted one.
    """
    if method == "umap" or len(files) < FEWEST:
        plane(np.zeros((min(len(files), FEWEST), 2)), "umap" if len(files) >= FEWEST else "tsne")
    features, shares = pooled_features(predictor, files, workers)
    known = [name for name in truth if name is not None]
    said = [predictor.prediction_of("", row, 1, threshold=0).classes[0] for row in shares]
    names = [name if name is not None else "no class" for name in truth] if known else said
    places = plane(features, method, seed)
    classes = sorted(set(names))
    drawn = figure(8, 6)
    axis = drawn.subplots()
    for number, name in enumerate(classes):
        own = places[[other == name for other in names]]
        label = legend_name(name) if number < _NAMED else None
        marker = _MARKERS[number % len(_MARKERS)]
        colour = _COLOURS[number % len(_COLOURS)]
        axis.scatter(
            own[:, 0],
            own[:, 1],
            s=32,
            alpha=0.8,
            linewidths=0,
            label=label,
            marker=marker,
            color=colour,
        )
    if len(classes) > _NAMED:
        axis.scatter([], [], s=0, label=f"... and {len(classes) - _NAMED} more")
    axis.legend(
        loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, title="class" if known else "predicted"
    )
    axis.set(xticks=[], yticks=[])
    what = {"tsne": "t-SNE", "umap": "UMAP"}[method]
    channels = f"{features.shape[1]} pooled features"
    title = f"{predictor.config.MODEL.NAME}: {what} of {channels}, {len(files)} images"
    drawn.suptitle(title, fontsize=10)  # over the legend, too
    return figure_png(drawn)


def predictions(
    predictor: Predictor,
    files: Sequence[str],
    truth: Sequence[str | None],
    mistakes: bool = False,
    most: int = 28,
    workers: int = 0,
) -> tuple[bytes, str]:
    """Returns a PNG of images with what the model says, and a line that sums up.

    Args:
        truth: the classes' names, where they are known: right ones get a blue frame, wrong ones one
            of vermilion.
        mistakes: wrong ones alone, those first of which the model was most certain.

    Raises:
        InputError: a class that the model doesn't know, or no mistake.
        RunError: an image can't be read.
    """
    _check_classes(predictor, truth, mistakes)
    _, shares = pooled_features(predictor, files, workers)
    said = [
        predictor.prediction_of(file, row, 1, threshold=0)
        for file, row in zip(files, shares, strict=True)
    ]
    wrong = [i for i, one in enumerate(said) if truth[i] is not None and one.classes[0] != truth[i]]
    chosen = (
        sorted(wrong, key=lambda i: -said[i].probabilities[0])
        if mistakes
        else list(range(len(said)))
    )
    known = sum(name is not None for name in truth)
    line = (
        f"{known - len(wrong)} of {known} right" if known else f"{len(said)} images without a class"
    )
    if not chosen:
        raise InputError(f"there is no mistake to show: {line}")
    panels = []
    for i in chosen[:most]:
        told = f"{shorten(said[i].classes[0], 18)} ({said[i].probabilities[0]:.0%})"
        under = (
            f"it is {shorten(truth[i] or '', 18)}"
            if i in wrong
            else shorten(Path(said[i].name).name)
        )
        colour = "" if truth[i] is None else (WRONG if i in wrong else RIGHT)
        panels.append(Panel(f"{told}\n{under}", enlarge(predictor.pixels(files[i])), colour))
    shown_of = f", {len(panels)} of {len(chosen)} shown" if len(chosen) > most else ""
    what = "mistakes, most certain first" if mistakes else "predictions"
    return sheet([panels], f"{predictor.config.MODEL.NAME}: {what} ({line}{shown_of})"), line


def _check_classes(predictor: Predictor, truth: Sequence[str | None], mistakes: bool) -> None:
    names = sorted({name for name in truth if name is not None})
    if mistakes and not names:
        raise InputError(
            "-mistakes needs the true classes; give a folder that has a subfolder for each class"
        )
    if predictor.classes and (strange := [name for name in names if name not in predictor.classes]):
        meant = nearest(strange[0], predictor.classes)
        found = f"the folder has the class '{printable(strange[0])}', which the model doesn't know{meant}"
        raise InputError(
            found if meant else f"{found}; give the folder that holds the classes' folders"
        )
