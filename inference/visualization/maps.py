"""The panels of an image: its attention, its rollout, what speaks for a class, its features."""

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
from inference.visualization.draw import Panel, enlarge, heat, png, to_colours
from inference.visualization.predicted_image import (
    PredictedImage,
    class_index,
    model_of,
    predict_image,
)
from models.layers.attention import attention_layers
from training.pages.figures import shorten

STAGES = 4  # shown of a model that has more
_BRIGHTEST = "attention, from 0 to the most in its panel (at least twice the mean)"


class MapOptions(NamedTuple):
    """What somebody asked for: ``block`` of all that there are, ``method`` of a class's map,
    ``output``: its name.
    """

    block: int | None = None
    method: str = ""
    output: str | None = None
    original: bool = False


def overlay(predictor: Predictor, image: Picture, kind: str = "auto") -> bytes:
    """Returns a PNG: the image as the model sees it, in grey, and over it where the model looks.

    The model is looked into meanwhile: no other thread may use it.

    Args:
        kind: "attention" (the last block's, the mean of its heads), "rollout", "cam" (Grad-CAM of
            the predicted class), or "auto": attention where there is any, otherwise cam.

    Raises:
        InputError: the kind isn't defined for the architecture, or the model is an exported one.
        RunError: the image can't be read.
    """
    seen = predict_image(predictor, image)
    model = model_of(predictor)
    kind = ("attention" if has_attention(model) else "cam") if kind == "auto" else kind
    if kind not in ("attention", "rollout", "cam"):
        raise InputError(f"kind is {kind!r}, expected auto, attention, rollout or cam")
    if kind == "cam":
        return png(heat(seen.base, cam(model, seen.image)))
    values = (
        rollout(model, seen.image) if kind == "rollout" else attention(model, seen.image).mean(0)
    )
    return png(_attention_panel(seen, values))


def named_panel(seen: PredictedImage) -> Panel:
    """Returns the image itself, with its name and the most probable class."""
    said = (
        f"{shorten(seen.said.classes[0], 18)} ({seen.said.probabilities[0]:.0%})"
        if seen.said.classes
        else ""
    )
    return Panel(f"{shorten(Path(seen.name).name)}\n{said}", seen.base)


def attention_panels(predictor: Predictor, seen: PredictedImage, asked: MapOptions) -> list[Panel]:
    """Returns the mean of a block's heads, and each."""
    maps = attention(model_of(predictor), seen.image, -1 if asked.block is None else asked.block)
    mean = Panel("mean of the heads", _attention_panel(seen, maps.mean(0)))
    heads = [
        Panel(f"head {number}", _attention_panel(seen, one)) for number, one in enumerate(maps)
    ]
    return [named_panel(seen), mean, *(heads if len(heads) > 1 else ())]


def rollout_panels(predictor: Predictor, seen: PredictedImage, _: MapOptions) -> list[Panel]:
    return [
        named_panel(seen),
        Panel("rollout", _attention_panel(seen, rollout(model_of(predictor), seen.image))),
    ]


def _attention_panel(seen: PredictedImage, values: np.ndarray) -> np.ndarray:
    """A map of attention over an image: where all places get the same, none is bright."""
    return heat(seen.base, values, seen.box, 2 * float(values.mean()))


def cam_panels(predictor: Predictor, seen: PredictedImage, asked: MapOptions) -> list[Panel]:
    output = seen.said.outputs[0] if asked.output is None else class_index(predictor, asked.output)
    values = cam(model_of(predictor), seen.image, output, asked.method)
    name = shorten(predictor.classes[output] if predictor.classes else f"output {output}")
    title = f"for {name}" if values.any() else f"for {name}:\nnothing speaks for it"
    return [named_panel(seen), Panel(title, heat(seen.base, values, seen.box))]


def title_of(kind: str, predictor: Predictor, asked: MapOptions) -> tuple[str, str]:
    """Returns what a picture of that kind shows, and what its colours say."""
    model = model_of(predictor)
    name = predictor.config.MODEL.NAME or type(model).__name__
    if kind == "attention":
        count = len(attention_layers(model))
        block = (-1 if asked.block is None else asked.block) % count
        return (
            f"{name}: attention {describe_queries(model)}, block {block} ({count} blocks, from 0)",
            _BRIGHTEST,
        )
    if kind == "rollout":
        return (
            f"{name}: attention rollout {describe_queries(model)}",
            _BRIGHTEST,
        )
    if kind == "features":
        stages = ", ".join(
            model.feature_info[stage]["module"] for stage in _stages(len(model.feature_info), asked)
        )
        what = (
            "channels that vary most"
            if asked.method == "channels"
            else "principal components as colours"
        )
        return f"{name}: {what}, {stages}", ""
    words = {
        "gradcam": "Grad-CAM",
        "hirescam": "HiResCAM",
        "gradcam++": "Grad-CAM++",
        "layercam": "LayerCAM",
    }
    return (
        f"{name}: {words[asked.method]}",
        "how much speaks for the class, from 0 to the most in its panel",
    )


def feature_panels(
    predictor: Predictor, sights: Sequence[PredictedImage], asked: MapOptions
) -> list[list[Panel]]:
    """Returns each image and, stage by stage, the three principal components of its features as
    red, green and blue.

    The components are of all images together, as DINOv2's pictures (Oquab et al. 2023,
    arXiv:2304.07193): one colour means the same in each. Method "channels": the channels of one
    stage that vary most, each by itself.
    """
    model = model_of(predictor)
    count = len(model.feature_info)
    stages = _stages(count, asked)
    with paddle.no_grad():
        found = [
            model.forward_intermediates(seen.image, stages, intermediates_only=True)
            for seen in sights
        ]
    maps = [
        [one[0].transpose([1, 2, 0]).astype("float32").numpy() for one in image] for image in found
    ]
    rows = [[named_panel(seen)] for seen in sights]
    for place, stage in enumerate(stages):
        name = model.feature_info[stage]["module"]
        if asked.method == "channels":
            for row, panels in zip(rows, _channels([one[place] for one in maps]), strict=True):
                row.extend(panels)
            continue
        for row, colours in zip(rows, principal([one[place] for one in maps]), strict=True):
            height, width = colours.shape[:2]
            row.append(
                Panel(
                    f"{name}\n{height} x {width}", enlarge((255 * colours + 0.5).astype(np.uint8))
                )
            )
    return rows


def principal(maps: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the first three principal components of maps [h, w, C], each from 0 to 1: [h, w, 3].

    The largest weight of a component is positive; a hundredth of the values at either end is cut
    off.
    """
    flat = np.concatenate([one.reshape(-1, one.shape[-1]) for one in maps]).astype(np.float64)
    flat -= flat.mean(0)
    vectors = np.linalg.eigh(flat.T @ flat)[1][:, ::-1][:, :3]
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(0), range(vectors.shape[1])])
    values = np.pad(flat @ vectors, ((0, 0), (0, 3 - vectors.shape[1])))
    low, high = np.quantile(values, [0.01, 0.99], axis=0)
    shares = np.clip((values - low) / np.maximum(high - low, 1e-12), 0, 1)
    ends = np.cumsum([one.shape[0] * one.shape[1] for one in maps])[:-1]
    return [
        part.reshape(*one.shape[:2], 3)
        for part, one in zip(np.split(shares, ends), maps, strict=True)
    ]


def _channels(maps: Sequence[np.ndarray], most: int = 20) -> list[list[Panel]]:
    """The channels that vary most over all maps [h, w, C], each from its smallest value in them to
    its largest.
    """
    flat = np.concatenate([one.reshape(-1, one.shape[-1]) for one in maps])
    low = flat.min(0)
    span = np.maximum(np.ptp(flat, 0), 1e-12)
    chosen = sorted(np.argsort(-flat.std(0), kind="stable")[:most].tolist())
    return [
        [
            Panel(
                f"channel {c}",
                enlarge((255 * to_colours((one[:, :, c] - low[c]) / span[c])).astype(np.uint8)),
            )
            for c in chosen
        ]
        for one in maps
    ]


def _stages(count: int, asked: MapOptions) -> list[int]:
    if asked.block is not None:
        if not -count <= asked.block < count:
            raise InputError(
                f"-block is {asked.block}, the model has {count} intermediates: give 0 to {count - 1}"
            )
        return [asked.block % count]
    if asked.method == "channels":
        return [count - 1]
    shown = min(count, STAGES)
    return [(part + 1) * count // shown - 1 for part in range(shown)]
