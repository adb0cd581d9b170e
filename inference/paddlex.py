"""Exports for PaddleX 3 and for the deployment of PaddleClas 2.6: a graph that gives probabilities,
and its settings.

Neither client computes a softmax or a sigmoid, so the graph does. PaddleX reads a Paddle program
and inference.yml. It chooses its code by the model's name, which has to be one that it knows.
PaddleClas reads ONNX and paddleclas.yml. It can't run a Paddle program under Paddle 3.3: it asks
for a memory pass that new programs don't have.
"""

from pathlib import Path
from typing import Any

import paddle
import yaml
from paddle import nn
from paddle.nn import functional as F

from errors import InputError
from inference.preparation import crop_begin
from loading.transforms import pixel_mode
from loading.transforms.image import before_crop
from models.base import ImageModel
from settings.options import Configuration, pair
from training.checkpoint import Description

FORMATS = ("paddlex", "paddleclas")
PADDLEX = "inference.yml"
PADDLECLAS = "paddleclas.yml"
NAMES = "class_id_map.txt"
# PaddleX 3.7.2 has 84 names of classifiers and 8 of multi-label models. Each runs the same code;
# these two are ViTs.
MODEL_NAMES = {
    "classification": "CLIP_vit_base_patch16_224",
    "multilabel": "CLIP_vit_base_patch16_448_ML",
}
INPUTS = paddle.static.InputSpec([None, 3, None, None], "float32", "images")
_THRESHOLD = 0.5
_TOP = 5
# The clients round both sides of a resized image to whole pixels, where ours cuts off the long
# side's fraction. With this taken from the short side, the size is ours for 91 instead of 52 of 100
# pictures with sides of 1:1 to 1:2.
_ROUNDED = 0.3


def check_paddlex(config: Configuration, kind: str, task: str) -> None:
    """Raises InputError where PaddleX and PaddleClas can't prepare a model's images, or have no
    such task.
    """
    advice = "use -format paddle, onnx or openvino"
    if task not in MODEL_NAMES:
        raise InputError(
            f"-format {kind} is for classification and multilabel, the model's task is {task}; {advice}"
        )
    if pixel_mode(config) != "RGB":
        found = (
            f"{config.DATA.IMAGE_CHANNELS} channels (DATA.IMAGE_DTYPE {config.DATA.IMAGE_DTYPE})"
        )
        raise InputError(
            f"-format {kind}: its client reads 8-bit RGB, the model takes {found}; {advice}"
        )
    height, width = pair(config.DATA.IMAGE_SIZE)
    if height != width and config.DATA.CROP_MODE != "squash":
        found = (
            f"until they cover {height} x {width} pixels (DATA.CROP_MODE {config.DATA.CROP_MODE})"
        )
        raise InputError(f"-format {kind}: its client can't resize images {found}; {advice}")


class Probabilities(nn.Layer):
    """A model that crops its images and gives probabilities.

    It crops because the clients' CropImage begins up to a pixel earlier, and PaddleX's multi-label
    predictor ignores it. That predictor also compares the n-th image, not the n-th class, with the
    n-th threshold. So if thresholds differ, a class below its own threshold gets 0, and
    ``file_threshold`` is the one threshold for all.

    Shape: [B, 3, H, W] float32, at least as large as the model's images -> [B, K] float32.

    Args:
        model: images [B, 3, h, w] -> logits [B, K].
        task: "classification" (softmax) or "multilabel" (sigmoid).
        thresholds: of a multi-label model, by output; empty: 0.5 for each.
    """

    def __init__(self, model: ImageModel, task: str, thresholds: list[float]) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.size = model.image_size
        self.gated = len(set(thresholds)) > 1
        if self.gated:
            self.register_buffer(
                "thresholds", paddle.to_tensor(thresholds, "float32"), persistable=False
            )

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        logits = self.model(self._cropped(images))
        if self.task != "multilabel":
            return F.softmax(logits)
        shares = F.sigmoid(logits)
        if not self.gated:
            return shares
        return paddle.where(shares >= self.thresholds, shares, paddle.zeros_like(shares))

    def _cropped(self, images: paddle.Tensor) -> paddle.Tensor:
        height, width = self.size
        sides = paddle.shape(images).astype("int64")
        top = crop_begin(sides[2:3] - height)
        left = crop_begin(sides[3:4] - width)
        images = paddle.slice(images, [2, 3], [top, left], [top + height, left + width])
        return images.reshape([0, 3, height, width])  # 0: as many images as before


def file_threshold(thresholds: list[float]) -> float:
    """Returns the threshold that a multi-label model's settings name.

    If thresholds differ, it is half of the smallest: the graph gives 0 to a class below its own
    threshold.
    """
    if not thresholds:
        return _THRESHOLD
    if len(set(thresholds)) == 1:
        return float(thresholds[0])
    # It has to be above 0, which is the probability of classes that weren't found.
    return max(min(thresholds) / 2, 1e-9)


def write_settings(
    folder: Path, config: Configuration, description: Description, kind: str
) -> None:
    """Writes the settings that a client reads into ``folder``: inference.yml, or paddleclas.yml and
    the classes.
    """
    if kind == "paddlex":
        usage = f"create_model({MODEL_NAMES[description.task]!r}, model_dir=...) of PaddleX"
        file = folder / PADDLEX
        settings = paddlex_config(config, description)
    else:
        usage = f"in this folder: python -m paddleclas.deploy.python.predict_cls -c {PADDLECLAS}"
        file = folder / PADDLECLAS
        settings = paddleclas_config(config, description)
        lines = [f"{number} {label}\n" for number, label in enumerate(_names(config, description))]
        (folder / NAMES).write_text("".join(lines), encoding="utf-8")
    text = f"# {description.model}; {usage}\n{yaml.safe_dump(settings, sort_keys=False)}"
    file.write_text(text, encoding="utf-8")


def paddlex_config(config: Configuration, description: Description) -> dict[str, Any]:
    """Returns what PaddleX 3.7.2 reads: a name that it knows, operations with their arguments, the
    classes' names.
    """
    height, width = pair(config.DATA.IMAGE_SIZE)
    names = _names(config, description)
    if description.task == "multilabel":
        post = {
            "MultiLabelThreshOutput": {
                "threshold": file_threshold(description.thresholds),
                "label_list": names,
            }
        }
    else:
        post = {"Topk": {"topk": min(_TOP, len(names)), "label_list": names}}
    shapes = {"images": [[batch, 3, height, width] for batch in (1, 1, 8)]}  # least, usual, most
    return {
        "Global": {"model_name": MODEL_NAMES[description.task]},
        "Hpi": {"backend_configs": {"paddle_infer": {"trt_dynamic_shapes": shapes}}},
        "PreProcess": {"transform_ops": _operations(config)},
        "PostProcess": post,
    }


def paddleclas_config(config: Configuration, description: Description) -> dict[str, Any]:
    """Returns what ``paddleclas.deploy.python.predict_cls`` of PaddleClas 2.6.0 reads: every key
    that it asks for.
    """
    if description.task == "multilabel":
        indicator = "MultiLabelThreshOutput"
        given: dict[str, Any] = {"threshold": file_threshold(description.thresholds)}
    else:
        indicator = "Topk"
        given = {"topk": min(_TOP, config.MODEL.NUM_CLASSES)}
    return {
        "Global": {
            "infer_imgs": ".",
            "inference_model_dir": ".",
            "batch_size": 1,
            "use_onnx": True,
            "use_gpu": False,
            "use_fp16": False,
            "cpu_num_threads": 4,
            "ir_optim": True,
        },
        "PreProcess": {"transform_ops": _operations(config)},
        "PostProcess": {
            "main_indicator": indicator,
            indicator: {**given, "class_id_map_file": NAMES},
        },
    }


def _operations(config: Configuration) -> list[dict[str, Any]]:
    """Returns what both clients do before the graph, which crops. ``backend`` pil is Pillow, whose
    filters are ours.
    """
    data = config.DATA
    rows, columns = before_crop(pair(data.IMAGE_SIZE), data.CROP_PCT)
    resized: dict[str, Any] = {"resize_short": round(rows - _ROUNDED, 1)}
    if data.CROP_MODE == "squash":
        resized = {"size": [columns, rows]}
    # One value may stand for all three channels.
    mean = list(data.IMAGENET_MEAN) * (3 // len(data.IMAGENET_MEAN))
    std = list(data.IMAGENET_STD) * (3 // len(data.IMAGENET_STD))
    return [
        {"ResizeImage": {**resized, "interpolation": data.INTERPOLATION, "backend": "pil"}},
        {
            "NormalizeImage": {
                "mean": mean,
                "std": std,
                "scale": 1 / 255,
                "order": "",
                "channel_num": 3,
            }
        },
        {"ToCHWImage": None},
    ]


def _names(config: Configuration, description: Description) -> list[str]:
    """Returns the classes' names; if they aren't known, their numbers, as tools/predict.py prints
    them.
    """
    return list(description.classes) or [str(number) for number in range(config.MODEL.NUM_CLASSES)]
