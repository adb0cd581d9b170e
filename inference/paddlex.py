"""Exports for PaddleX 3 and for the deployment of PaddleClas 2.6: a graph that returns
probabilities, and a file of settings.

Neither client computes a softmax or a sigmoid, so the graph does. PaddleX reads a Paddle program
and inference.yml. It chooses its code by the model's name, which has to be one that it knows.
PaddleClas reads ONNX and paddleclas.yml. Under Paddle 3.3 it can't run a Paddle program, because it
asks for a memory pass that new programs don't have.
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
from settings.configuration import Configuration, pair
from settings.tasks import answers_of
from training.checkpoint import Description

FORMATS = ("paddlex", "paddleclas")
# The settings that each client reads, and the file of classes that PaddleClas reads.
PADDLEX = "inference.yml"
PADDLECLAS = "paddleclas.yml"
NAMES = "class_id_map.txt"
# PaddleX 3.7.2 has 84 names of classifiers and 8 of multi-label models. Each runs the same code;
# these two are ViTs, by what the task's outputs give (``settings.tasks.answers_of``).
MODEL_NAMES = {
    "softmax": "CLIP_vit_base_patch16_224",
    "sigmoid": "CLIP_vit_base_patch16_448_ML",
}
INPUTS = paddle.static.InputSpec([None, 3, None, None], "float32", "images")
# The threshold of a multi-label model without one of its own.
_THRESHOLD = 0.5
# The number of classes that the clients print.
_TOP = 5
# When the clients resize an image, they round the longer side to whole pixels, and an evaluation
# here cuts off its fraction. If the shorter side is given as this much less, the size is the same
# for 91 of 100 pictures with sides of 1:1 to 1:2, instead of for 52.
_LESS_THAN_SHORT_SIDE = 0.3


def check_paddlex(config: Configuration, kind: str, task: str) -> None:
    """Checks that a client can run a model.

    Args:
        kind: one of FORMATS.

    Raises:
        InputError: the client can't prepare the model's images, or doesn't know its task.
    """
    advice = "use -format paddle, onnx or openvino"
    if answers_of(task) not in MODEL_NAMES:
        raise InputError(f"-format {kind} is for classifiers, not for TASK {task}; {advice}")
    data = config.DATA
    if pixel_mode(config) != "RGB":
        images = f"{data.IMAGE_CHANNELS} channels (DATA.IMAGE_DTYPE {data.IMAGE_DTYPE})"
        raise InputError(
            f"-format {kind}: its client reads 8-bit RGB, but the model takes {images}; {advice}"
        )
    height, width = pair(data.IMAGE_SIZE)
    if height != width and data.CROP_MODE != "squash":
        size = f"until they cover {height} x {width} pixels (DATA.CROP_MODE {data.CROP_MODE})"
        raise InputError(f"-format {kind}: its client can't resize images {size}; {advice}")
    if data.CROP_PCT > 1:
        raise InputError(
            f"-format {kind}: its client can't pad images (DATA.CROP_PCT {data.CROP_PCT}); {advice}"
        )


class Probabilities(nn.Layer):
    """A model that crops its images and returns probabilities.

    It crops the images itself, because the clients' CropImage begins up to a pixel earlier, and
    PaddleX's multi-label predictor ignores CropImage. That predictor also compares the n-th image,
    instead of the n-th class, with the n-th threshold. So if the thresholds differ, this model
    returns 0 for a class below its own threshold, and the client gets one threshold for all
    (``file_threshold``).

    Shape: [B, 3, H, W] float32, at least as large as the model's images -> [B, K] float32.

    Args:
        model: images [B, 3, h, w] -> logits [B, K].
        task: the model's TASK, which says whether probabilities are a softmax or sigmoids.
        thresholds: of a multi-label model, by output; empty: 0.5 for each.
    """

    def __init__(self, model: ImageModel, task: str, thresholds: list[float]) -> None:
        super().__init__()
        self.model = model
        self.is_softmax = answers_of(task) == "softmax"
        self.size = model.image_size
        self.applies_thresholds = len(set(thresholds)) > 1
        if self.applies_thresholds:
            self.register_buffer(
                "thresholds", paddle.to_tensor(thresholds, "float32"), persistable=False
            )

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        logits = self.model(self._crop(images))
        if self.is_softmax:
            return F.softmax(logits)
        probabilities = F.sigmoid(logits)
        if not self.applies_thresholds:
            return probabilities
        is_above = probabilities >= self.thresholds
        return paddle.where(is_above, probabilities, paddle.zeros_like(probabilities))

    def _crop(self, images: paddle.Tensor) -> paddle.Tensor:
        height, width = self.size
        sides = paddle.shape(images).astype("int64")
        top = crop_begin(sides[2:3] - height)
        left = crop_begin(sides[3:4] - width)
        images = paddle.slice(images, [2, 3], [top, left], [top + height, left + width])
        # 0 keeps the number of images.
        return images.reshape([0, 3, height, width])


def file_threshold(thresholds: list[float]) -> float:
    """Returns the threshold in the settings of a multi-label model.

    If the thresholds of the classes differ, it is half of the smallest one. The graph applies them
    itself, and returns 0 for a class below its own threshold.
    """
    if not thresholds:
        return _THRESHOLD
    if len(set(thresholds)) == 1:
        return float(thresholds[0])
    # It has to be above 0, the probability of classes below their own threshold.
    return max(min(thresholds) / 2, 1e-9)


def write_settings(
    folder: Path, config: Configuration, description: Description, kind: str
) -> None:
    """Writes the settings that a client reads into ``folder``: inference.yml, or paddleclas.yml and
    the file of classes.
    """
    if kind == "paddlex":
        file = folder / PADDLEX
        usage = f"create_model({_model_name(description)!r}, model_dir=...) of PaddleX"
        settings = paddlex_config(config, description)
    else:
        file = folder / PADDLECLAS
        usage = f"in this folder: python -m paddleclas.deploy.python.predict_cls -c {PADDLECLAS}"
        settings = paddleclas_config(config, description)
        names = enumerate(_names(config, description))
        lines = "".join(f"{number} {name}\n" for number, name in names)
        (folder / NAMES).write_text(lines, encoding="utf-8")
    text = f"# {description.model}; {usage}\n{yaml.safe_dump(settings, sort_keys=False)}"
    file.write_text(text, encoding="utf-8")


def paddlex_config(config: Configuration, description: Description) -> dict[str, Any]:
    """Returns the settings for PaddleX 3.7.2: a name that it knows, operations with their
    arguments, and the classes' names.
    """
    height, width = pair(config.DATA.IMAGE_SIZE)
    names = _names(config, description)
    if answers_of(description.task) == "sigmoid":
        indicator = "MultiLabelThreshOutput"
        arguments: dict[str, Any] = {"threshold": file_threshold(description.thresholds)}
    else:
        indicator = "Topk"
        arguments = {"topk": min(_TOP, len(names))}
    # The smallest, the usual and the largest shape.
    shapes = {"images": [[batch, 3, height, width] for batch in (1, 1, 8)]}
    return {
        "Global": {"model_name": _model_name(description)},
        "Hpi": {"backend_configs": {"paddle_infer": {"trt_dynamic_shapes": shapes}}},
        "PreProcess": {"transform_ops": _operations(config)},
        "PostProcess": {indicator: {**arguments, "label_list": names}},
    }


def paddleclas_config(config: Configuration, description: Description) -> dict[str, Any]:
    """Returns the settings for ``paddleclas.deploy.python.predict_cls`` of PaddleClas 2.6.0, with
    every key that it reads.
    """
    if answers_of(description.task) == "sigmoid":
        indicator = "MultiLabelThreshOutput"
        arguments: dict[str, Any] = {"threshold": file_threshold(description.thresholds)}
    else:
        indicator = "Topk"
        arguments = {"topk": min(_TOP, config.MODEL.NUM_CLASSES)}
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
            indicator: {**arguments, "class_id_map_file": NAMES},
        },
    }


def _model_name(description: Description) -> str:
    """Returns the name by which PaddleX chooses the code for a model."""
    return MODEL_NAMES[answers_of(description.task)]


def _operations(config: Configuration) -> list[dict[str, Any]]:
    """Returns the operations by which both clients prepare an image for the graph, which crops it.

    With the ``backend`` pil they resize by Pillow, as an evaluation does.
    """
    data = config.DATA
    rows, columns = before_crop(pair(data.IMAGE_SIZE), data.CROP_PCT)
    resize: dict[str, Any] = {"interpolation": data.INTERPOLATION, "backend": "pil"}
    if data.CROP_MODE == "squash":
        resize = {"size": [columns, rows], **resize}
    else:
        resize = {"resize_short": round(rows - _LESS_THAN_SHORT_SIDE, 1), **resize}
    normalize = {
        # One value may stand for all three channels.
        "mean": list(data.IMAGENET_MEAN) * (3 // len(data.IMAGENET_MEAN)),
        "std": list(data.IMAGENET_STD) * (3 // len(data.IMAGENET_STD)),
        "scale": 1 / 255,
        "order": "",
        "channel_num": 3,
    }
    return [{"ResizeImage": resize}, {"NormalizeImage": normalize}, {"ToCHWImage": None}]


def _names(config: Configuration, description: Description) -> list[str]:
    """Returns the classes' names. If they aren't known, these are the numbers that tools/predict.py
    prints.
    """
    return list(description.classes) or [str(number) for number in range(config.MODEL.NUM_CLASSES)]
