"""Pictures of many images: their pooled features in the plane, and a grid of their predictions."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from errors import InputError, RunError, printable
from inference.calibration.choice import BEST
from inference.pictures import Pictures
from inference.predictor import Predictor
from inference.visualization.predicted_image import model_of
from settings.suggestions import nearest
from training.pages.names import shorten
from training.pages.panels import Panel, enlarge
from training.pages.plotting import figure, figure_png, legend_name
from training.pages.sheets import sheet
from weights.layout import sublayer

# The fewest images that t-SNE can place.
FEWEST = 5
# Blue and vermilion, which are distinct for the colour-blind, too.
RIGHT = "#0072B2"
WRONG = "#D55E00"
# The palette of Okabe & Ito.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
# Six markers and seven colours make 42 different pairs.
_MARKERS = "osD^v*"
# The most classes in a legend.
_NAMED = 24


def pooled_features(
    predictor: Predictor, files: Sequence[str], workers: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the classifier's input for each image [n, channels], and the probabilities [n, K].

    Raises:
        RunError: an image can't be read.
    """
    model = model_of(predictor)
    features = []
    classifier = sublayer(model, model.classifier_names()[0])
    hook = classifier.register_forward_pre_hook(
        lambda _, x: features.append(x[0].astype("float32").numpy())
    )
    probabilities = []
    try:
        for batch in predictor.batches(Pictures(predictor.config, files), workers):
            if problem := next(filter(None, batch.problems), ""):
                raise RunError(problem)
            probabilities.append(predictor.probabilities(predictor.logits(batch.pixels)))
    finally:
        hook.remove()
    return np.concatenate(features), np.concatenate(probabilities)


def plane(features: np.ndarray, method: str = "tsne", seed: int = 0) -> np.ndarray:
    """Returns a place in the plane for each row of features: [n, channels] -> [n, 2].

    Neighbours stay neighbours. The result depends on the seed alone.

    Args:
        method: "tsne" (van der Maaten & Hinton 2008) or "umap" (McInnes et al. 2018), of
            umap-learn.

    Raises:
        InputError: too few images, or umap-learn isn't installed.
    """
    if len(features) < FEWEST:
        raise InputError(f"found {len(features)} images, expected at least {FEWEST}")
    if method == "umap":
        if not find_spec("umap"):
            raise InputError(
                "umap-learn isn't installed; pip install umap-learn, or use -method tsne"
            )
        from umap import UMAP  # pyright: ignore[reportMissingImports]: nothing installs it

        return UMAP(n_neighbors=min(15, len(features) - 1), random_state=seed).fit_transform(
            features
        )
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="random", random_state=seed)
    # The steps of t-SNE are short. Several threads, which wait for each other, took 10 s instead of
    # 1 s.
    with threadpool_limits(1):
        return tsne.fit_transform(features.astype(np.float64))


def embeddings(
    predictor: Predictor,
    files: Sequence[str],
    truth: Sequence[str | None],
    method: str = "tsne",
    seed: int = 0,
    workers: int = 0,
) -> bytes:
    """Returns a PNG with a point for each image's pooled features, coloured by its class.

    Args:
        truth: the class of each image, or None. If all are None, the predicted classes are used, if
            the model gives classes.
        method, seed: see ``plane``.
    """
    # Too few images and a missing package are errors before the features are computed.
    if method == "umap" or len(files) < FEWEST:
        plane(np.zeros((min(len(files), FEWEST), 2)), "umap" if len(files) >= FEWEST else "tsne")
    features, probabilities = pooled_features(predictor, files, workers)
    is_known = any(name is not None for name in truth)
    if is_known:
        names = [name if name is not None else "no class" for name in truth]
    elif not predictor.has_classes:
        names = ["no class"] * len(files)
    else:
        best = [predictor.prediction_of("", row, BEST) for row in probabilities]
        names = [prediction.classes[0] for prediction in best]
    places = plane(features, method, seed)
    classes = sorted(set(names))
    drawn = figure(8, 6)
    axis = drawn.subplots()
    for number, name in enumerate(classes):
        points = places[[other == name for other in names]]
        label = legend_name(name) if number < _NAMED else None
        marker = _MARKERS[number % len(_MARKERS)]
        colour = _COLOURS[number % len(_COLOURS)]
        axis.scatter(
            points[:, 0],
            points[:, 1],
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
        loc="upper left",
        bbox_to_anchor=(1, 1),
        fontsize=8,
        title="class" if is_known else "predicted",
    )
    axis.set(xticks=[], yticks=[])
    method_name = {"tsne": "t-SNE", "umap": "UMAP"}[method]
    channels = f"{features.shape[1]} pooled features"
    title = f"{predictor.config.MODEL.NAME}: {method_name} of {channels}, {len(files)} images"
    # A title of the figure, unlike one of the axis, is centred over the legend, too.
    drawn.suptitle(title, fontsize=10)
    return figure_png(drawn)


def predictions(
    predictor: Predictor,
    files: Sequence[str],
    truth: Sequence[str | None],
    mistakes: bool = False,
    most: int = 28,
    workers: int = 0,
) -> tuple[bytes, str]:
    """Returns a PNG of images with their predictions, and a line that sums them up.

    Args:
        truth: the name of each image's class, or None. Right predictions get a blue frame, wrong
            ones a vermilion one.
        mistakes: whether to draw wrong predictions alone, the most certain first.
        most: the most images that are drawn.

    Raises:
        InputError: the model gives no classes or doesn't know one, or there is no mistake to draw.
        RunError: an image can't be read.
    """
    predictor.check_classifier()
    _check_classes(predictor, truth, mistakes)
    _, probabilities = pooled_features(predictor, files, workers)
    predicted = [
        predictor.prediction_of(file, row, BEST)
        for file, row in zip(files, probabilities, strict=True)
    ]
    wrong = [
        index
        for index, prediction in enumerate(predicted)
        if truth[index] is not None and prediction.classes[0] != truth[index]
    ]
    known = sum(name is not None for name in truth)
    line = f"{len(predicted)} images without a class"
    if known:
        line = f"{known - len(wrong)} of {known} right"
    chosen = list(range(len(predicted)))
    kind = "predictions"
    if mistakes:
        chosen = sorted(wrong, key=lambda index: -predicted[index].probabilities[0])
        kind = "mistakes, most certain first"
    if not chosen:
        raise InputError(f"there are no mistakes to show: {line}")
    panels = []
    for index in chosen[:most]:
        prediction = predicted[index]
        title = f"{shorten(prediction.classes[0], 18)} ({prediction.probabilities[0]:.0%})"
        frame = ""
        if index in wrong:
            title += f"\nit is {shorten(truth[index] or '', 18)}"
            frame = WRONG
        else:
            title += f"\n{shorten(Path(prediction.name).name)}"
            if truth[index] is not None:
                frame = RIGHT
        panels.append(Panel(title, enlarge(predictor.pixels(files[index])), frame))
    shown = f", {len(panels)} of {len(chosen)} shown" if len(chosen) > most else ""
    return sheet([panels], f"{predictor.config.MODEL.NAME}: {kind} ({line}{shown})"), line


def _check_classes(predictor: Predictor, truth: Sequence[str | None], mistakes: bool) -> None:
    names = sorted({name for name in truth if name is not None})
    if mistakes and not names:
        raise InputError(
            "-mistakes needs the true classes; pass a folder with a subfolder for each class"
        )
    unknown = [name for name in names if name not in predictor.classes]
    if predictor.classes and unknown:
        suggestion = nearest(unknown[0], predictor.classes)
        advice = suggestion or "; pass the folder that contains the class folders"
        name = printable(unknown[0])
        raise InputError(f"the folder has the class '{name}', which the model doesn't know{advice}")
