"""Panels that explain a model's prediction of an image: its attention, attention rollout, class
activation maps, and the features of its stages.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle

from errors import InputError
from inference.pictures import Picture
from inference.predictor import Predictor
from inference.visualization.attention import attention, describe_queries, has_attention, rollout
from inference.visualization.cam import cam
from inference.visualization.components import flattened, foreground, principal
from inference.visualization.draw import heat, png, to_colours
from inference.visualization.predicted_image import (
    PredictedImage,
    class_index,
    model_of,
    predict_image,
)
from models.layers.attention import attention_layers
from training.pages.names import shorten
from training.pages.panels import Panel, enlarge

# The number of stages whose features are drawn, of a model that has more.
STAGES = 4
_ATTENTION_LABEL = "attention, from 0 to the highest value in its panel (at least twice the mean)"
_CAM_NAMES = {
    "gradcam": "Grad-CAM",
    "hirescam": "HiResCAM",
    "gradcam++": "Grad-CAM++",
    "layercam": "LayerCAM",
}


class MapOptions(NamedTuple):
    """The options of a map.

    Attributes:
        block: the index of the block, or of the stage whose features are drawn; None: the last
            block, or several stages.
        method: of class activation maps, one of ``cam.METHODS``; of features "pca", "foreground" or
            "channels".
        output: the class to explain, by its name or index; None: the predicted one.
        original: whether maps are drawn on the original image instead of the model's input.
        mass: of attention, the share that is drawn: that of the places that get the most.
        threshold: see ``components.foreground``.
    """

    block: int | None = None
    method: str = ""
    output: str | None = None
    original: bool = False
    mass: float = 1.0
    threshold: float | None = None


def overlay(predictor: Predictor, image: Picture, kind: str = "auto") -> bytes:
    """Returns a PNG of the model's input in grey, with a map of what the model attends to over it.

    Hooks are set in the model meanwhile, so no other thread may use it.

    Args:
        kind: "attention" (the last block's, averaged over its heads), "rollout", "cam" (Grad-CAM of
            the predicted class), or "auto": attention if the model has any, otherwise cam.

    Raises:
        InputError: the kind isn't defined for the architecture, or the predictor runs an export.
        RunError: the image can't be read.
    """
    predicted = predict_image(predictor, image)
    model = model_of(predictor)
    if kind == "auto":
        kind = "attention" if has_attention(model) else "cam"
    if kind == "attention":
        return png(_attention_picture(predicted, attention(model, predicted.image).mean(0)))
    if kind == "rollout":
        return png(_attention_picture(predicted, rollout(model, predicted.image)))
    if kind == "cam":
        return png(heat(predicted.base, cam(model, predicted.image)))
    raise InputError(f"kind is {kind!r}, expected auto, attention, rollout or cam")


def named_panel(predicted: PredictedImage) -> Panel:
    """Returns the image with its name and the most probable class, if the model gives classes."""
    classes = predicted.prediction.classes
    text = ""
    if classes:
        text = f"{shorten(classes[0], 18)} ({predicted.prediction.probabilities[0]:.0%})"
    return Panel(f"{shorten(Path(predicted.name).name)}\n{text}", predicted.base)


def attention_panels(
    predictor: Predictor, predicted: PredictedImage, options: MapOptions
) -> list[Panel]:
    """Returns the image, the attention averaged over a block's heads, and that of each head."""
    block = -1 if options.block is None else options.block
    maps = attention(model_of(predictor), predicted.image, block)
    if options.mass < 1:
        maps = np.stack([largest_part(values, options.mass) for values in maps])
    panels = [
        named_panel(predicted),
        Panel("mean of the heads", _attention_picture(predicted, maps.mean(0))),
    ]
    if len(maps) > 1:
        for number, values in enumerate(maps):
            panels.append(Panel(f"head {number}", _attention_picture(predicted, values)))
    return panels


def largest_part(values: np.ndarray, mass: float) -> np.ndarray:
    """Returns a map in which the places beside the largest ones are 0, as DINO's pictures have it
    (Caron et al. 2021, arXiv:2104.14294).

    Args:
        values: [rows, columns], not negative.
        mass: what is kept is the fewest places that have this share of the sum, from 0 to 1.
    """
    order = np.argsort(values, axis=None, kind="stable")
    shares = np.cumsum(values.ravel()[order]) / values.sum()
    kept = np.zeros(values.size, bool)
    kept[order[shares > 1 - mass]] = True
    return np.where(kept.reshape(values.shape), values, 0)


def rollout_panels(predictor: Predictor, predicted: PredictedImage, _: MapOptions) -> list[Panel]:
    """Returns the image and its attention rollout."""
    values = rollout(model_of(predictor), predicted.image)
    return [named_panel(predicted), Panel("rollout", _attention_picture(predicted, values))]


def _attention_picture(predicted: PredictedImage, values: np.ndarray) -> np.ndarray:
    """Draws attention over an image. The brightest colour stands for at least twice the mean, so
    nothing is bright if all places have the same attention.
    """
    return heat(predicted.base, values, predicted.box, 2 * float(values.mean()))


def cam_panels(predictor: Predictor, predicted: PredictedImage, options: MapOptions) -> list[Panel]:
    """Returns the image and the class activation map of a class.

    Raises:
        InputError: the model gives no classes, or not this one.
    """
    # ``cam`` refuses a model without outputs. Those of others may be features.
    if model_of(predictor).num_classes:
        predictor.check_classifier()
    output = next(iter(predicted.prediction.outputs), 0)
    if options.output is not None:
        output = class_index(predictor, options.output)
    values = cam(model_of(predictor), predicted.image, output, options.method)
    name = shorten(predictor.classes[output] if predictor.classes else f"output {output}")
    title = f"for {name}" if values.any() else f"for {name}:\nno evidence"
    return [named_panel(predicted), Panel(title, heat(predicted.base, values, predicted.box))]


def title_of(kind: str, predictor: Predictor, options: MapOptions) -> tuple[str, str]:
    """Returns the title of a picture, and the label of its colour scale; "" without a scale."""
    model = model_of(predictor)
    name = predictor.config.MODEL.NAME or type(model).__name__
    if kind == "attention":
        count = len(attention_layers(model))
        block = (-1 if options.block is None else options.block) % count
        title = f"attention {describe_queries(model)}, block {block} ({count} blocks, from 0)"
        if options.mass < 1:
            title += f", its largest {options.mass:.0%}"
        label = _ATTENTION_LABEL
    elif kind == "rollout":
        title = f"attention rollout {describe_queries(model)}"
        label = _ATTENTION_LABEL
    elif kind == "merging":
        depth = len(model.blocks)
        block = (-1 if options.block is None else options.block) % depth
        title = f"merged patches in their mean colour, after block {block} ({depth} blocks, from 0)"
        label = ""
    elif kind == "features":
        stages = [
            model.feature_info[stage]["module"]
            for stage in _stages(len(model.feature_info), options)
        ]
        drawn = "principal components as colours"
        if options.method == "foreground":
            drawn = "the first principal component, and the next three as colours"
        if options.method == "channels":
            drawn = "channels that vary most"
        title = f"{drawn}, {', '.join(stages)}"
        label = ""
    else:
        title = _CAM_NAMES[options.method]
        label = "evidence for the class, from 0 to the highest value in its panel"
    return f"{name}: {title}", label


def feature_panels(
    predictor: Predictor, images: Sequence[PredictedImage], options: MapOptions
) -> list[list[Panel]]:
    """Returns, for each image, the image and the features of several stages as colours.

    Red, green and blue are the first three principal components. They are computed over all images
    together, as in DINOv2's figures (Oquab et al. 2023, arXiv:2304.07193), so that a colour means
    the same in each. The method "foreground" draws components of one stage, after the last norm:
    the first one, and the next three as colours where the first one is large. The method "channels"
    draws the channels of one stage that vary most, each by itself.
    """
    model = model_of(predictor)
    stages = _stages(len(model.feature_info), options)
    maps = []
    with paddle.no_grad():
        for predicted in images:
            outputs = model.forward_intermediates(
                predicted.image,
                stages,
                norm=options.method == "foreground",
                intermediates_only=True,
            )
            maps.append([x[0].transpose([1, 2, 0]).astype("float32").numpy() for x in outputs])
    rows = [[named_panel(predicted)] for predicted in images]
    for place, stage in enumerate(stages):
        stage_maps = [image_maps[place] for image_maps in maps]
        if options.method == "channels":
            for row, panels in zip(rows, _channels(stage_maps), strict=True):
                row.extend(panels)
            continue
        if options.method == "foreground":
            firsts, colours = foreground(stage_maps, options.threshold)
            for row, first, drawn in zip(rows, firsts, colours, strict=True):
                row.append(Panel("first component", _picture(to_colours(first))))
                row.append(Panel("the next three", _picture(drawn)))
            continue
        for row, colours in zip(rows, principal(stage_maps), strict=True):
            height, width = colours.shape[:2]
            title = f"{model.feature_info[stage]['module']}\n{height} x {width}"
            row.append(Panel(title, _picture(colours)))
    return rows


def _picture(colours: np.ndarray) -> np.ndarray:
    """Returns colours [h, w, 3] from 0 to 1 as an enlarged image."""
    return enlarge((255 * colours + 0.5).astype(np.uint8))


def _channels(maps: Sequence[np.ndarray], most: int = 20) -> list[list[Panel]]:
    """Returns, for each map [h, w, C], the channels that vary most over all maps.

    The colours of a channel go from its smallest value in all maps to its largest.
    """
    flat = flattened(maps)
    low = flat.min(0)
    span = np.maximum(np.ptp(flat, 0), 1e-12)
    chosen = sorted(np.argsort(-flat.std(0), kind="stable")[:most].tolist())
    rows = []
    for values in maps:
        row = []
        for channel in chosen:
            colours = to_colours((values[:, :, channel] - low[channel]) / span[channel])
            row.append(Panel(f"channel {channel}", enlarge((255 * colours).astype(np.uint8))))
        rows.append(row)
    return rows


def _stages(count: int, options: MapOptions) -> list[int]:
    """Returns the indices of the stages to draw, of ``count``."""
    if options.block is not None:
        if not -count <= options.block < count:
            raise InputError(
                f"-block is {options.block}, but the model has {count} intermediates:"
                f" give 0 to {count - 1}"
            )
        return [options.block % count]
    if options.method != "pca":
        return [count - 1]
    # Evenly spread, the last one among them.
    shown = min(count, STAGES)
    return [number * count // shown - 1 for number in range(1, shown + 1)]
