"""The card of a published model: the README.md of a repository on the Hugging Face Hub.

Names of classes and whatever else comes from files is escaped (``training.pages.markdown``). Paths
of this machine and names of images aren't included.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from errors import counted
from inference.recipe import TRAINING, recipe
from inference.run_evaluation import Evaluation, Training
from inference.visualization.dataset_card import data_name, data_sections, license_entries
from inference.visualization.dataset_report import DatasetReport
from loading.class_names import class_name
from settings.configuration import Configuration, pair
from settings.parser import __version__
from settings.plain import value_text
from training.checkpoint import Description
from training.checkpoint.calibration import Calibration
from training.pages import markdown
from training.report.statistics import BINS, calibration, scores, wilson
from training.results import METRIC_TITLES

CARD = "README.md"
WEIGHTS = "model.safetensors"
# Metrics that are shares of the images, so that they have an interval.
_SHARES = ("acc1", "acc5")
# The Hub's names of metrics.
_TYPES = {"acc1": "accuracy", "mAP": "mean_average_precision", "f1_macro": "f1"}
# The most rows of a table of classes.
_ROWS = 1000


class Card(NamedTuple):
    """The content of a model card.

    Attributes:
        name: the model's.
        config: of the model and its images.
        description: of the weights.
        parameters: their number, buffers included.
        sha256: of the file of weights.
        without_timm: why timm can't read the folder; "": it can.
        compared: a line for each toolkit whose logits were compared.
        evaluation: of the weights; None: there is none.
        training: that made them, whose settings are in TRAINING; None: it isn't known.
        checked: a check of the data; None: there was none.
        license_name: None: it isn't known.
    """

    name: str
    config: Configuration
    description: Description
    parameters: int
    sha256: str
    without_timm: str
    compared: Sequence[str]
    evaluation: Evaluation | None
    training: Training | None
    checked: DatasetReport | None
    license_name: str | None

    @property
    def has_several(self) -> bool:
        """Returns whether an image may have several classes."""
        return self.description.task == "multilabel"


def model_card(card: Card) -> str:
    """Returns the card as Markdown, with the front matter that the Hub reads."""
    model = card.config.MODEL
    one = "any number of classes" if card.has_several else "one class"
    introduction = (
        f"{markdown.text(model.NAME)} ({markdown.text(model.TYPE)}) predicts {one} of"
        f" {model.NUM_CLASSES:,} for each image. It has {card.parameters / 1e6:,.2f} million parameters"
        f" and reads images of {_size(card.config)}. It was published by paddle-vit-toolkit"
        f" {__version__}."
    )
    sections = [
        markdown.section("Use", *_use(card)),
        markdown.section("Images", _images(card.config)),
        *_evaluation(card),
        markdown.section("Confidence", *_confidence(card.description.calibration)),
    ]
    if card.checked is not None and card.evaluation is not None:
        sections += data_sections(card.evaluation.run.config, card.checked)
    sections += [
        markdown.section("Training", *_training(card)),
        markdown.section("Classes", *_classes(card)),
        markdown.section("Limits", markdown.bullets(_limits(card))),
        markdown.section("Licence", _licence(card)),
        markdown.section("Files", *_files(card)),
    ]
    return markdown.page(_front_matter(card), card.name, introduction, *sections)


def _front_matter(card: Card) -> dict[str, Any]:
    tags = ["image-classification", "vision-transformer", "paddlepaddle"]
    if not card.without_timm:
        tags += ["timm", "transformers"]
    values: dict[str, Any] = {
        **license_entries(card.license_name),
        "library_name": "paddle-vit-toolkit" if card.without_timm else "timm",
        "pipeline_tag": "image-classification",
        "tags": tags,
    }
    if card.evaluation is None:
        return values
    config = card.evaluation.run.config
    metrics = [
        {"type": _TYPES.get(key, key), "value": round(float(value), 4), "name": title}
        for key, title, value in _metrics(card.evaluation)
    ]
    result = {
        "task": {"type": "image-classification", "name": "Image classification"},
        "dataset": {"type": config.DATA.DATASET, "name": data_name(config), "split": "validation"},
        "metrics": metrics,
    }
    return values | {"model-index": [{"name": card.name, "results": [result]}]}


def _metrics(evaluation: Evaluation) -> Iterator[tuple[str, str, float]]:
    """Yields (key, title, value) of each metric of an evaluation."""
    for key, title in METRIC_TITLES.items():
        value = evaluation.metrics.get(key)
        if value is not None:
            yield key, title, value


def _use(card: Card) -> Iterator[str]:
    yield "`FOLDER` is where this repository's files are."
    toolkit = "python tools/predict.py FOLDER IMAGES\npython tools/serve.py FOLDER"
    yield markdown.code(toolkit)
    if card.without_timm:
        yield f"timm and transformers can't read it: {markdown.text(card.without_timm)}."
        return
    function = "sigmoid" if card.has_several else "softmax"
    program = (
        "import timm\n"
        "from PIL import Image\n\n"
        'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or hf-hub:ORG/NAME\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
        'image = Image.open("image.jpg").convert("MODE")\n'
        "print(model(transform(image)[None]).FUNCTION)\n"
    )
    mode = "L" if card.config.DATA.IMAGE_CHANNELS == 1 else "RGB"
    call = "sigmoid()" if function == "sigmoid" else "softmax(-1)"
    yield markdown.code(program.replace("MODE", mode).replace("FUNCTION", call), "python")
    program = (
        "from transformers import AutoModelForImageClassification\n\n"
        'model = AutoModelForImageClassification.from_pretrained("FOLDER").eval()  # or ORG/NAME\n'
    )
    yield markdown.code(program, "python")
    yield "transformers reads it by its `TimmWrapperForImageClassification`, which needs timm."
    yield "The files were compared before they were published:"
    yield markdown.bullets(markdown.text(line) for line in card.compared)


def _size(config: Configuration) -> str:
    height, width = pair(config.DATA.IMAGE_SIZE)
    return f"{height} x {width} pixels with {counted(config.DATA.IMAGE_CHANNELS, 'channel', 'channels')}"


def _images(config: Configuration) -> str:
    data = config.DATA
    rows = [
        ("size (height x width)", _size(config)),
        ("crop", f"{data.CROP_MODE}, {data.CROP_PCT:g} of the resized image's side"),
        ("interpolation", data.INTERPOLATION),
        ("mean, of values from 0 to 1", ", ".join(f"{value:g}" for value in data.IMAGENET_MEAN)),
        ("standard deviation", ", ".join(f"{value:g}" for value in data.IMAGENET_STD)),
        ("EXIF orientation", "yes" if data.EXIF_ORIENTATION else "no"),
    ]
    return markdown.table(["preparation", "value"], rows, numbers=False)


# ---------------------------------------------------------------- evaluation


def _evaluation(card: Card) -> Iterator[str]:
    """Yields the sections of the evaluation: metrics, by class, calibration."""
    evaluation = card.evaluation
    if evaluation is None:
        yield markdown.section("Evaluation", "These weights weren't evaluated.")
        return
    count = evaluation.run.result["num_samples"]
    rows = []
    for key, title, value in _metrics(evaluation):
        interval = ""
        if key in _SHARES:
            interval = _interval(round(value / 100 * count), count)
        rows.append((title, f"{value:.4f}" if key == "loss" else f"{value:.2f}", interval))
    name = data_name(evaluation.run.config)
    told = f"On {count:,} images of {markdown.text(name)}, each counted once. Intervals are Wilson's of 95 %."
    chose = ""
    if evaluation.chose:
        chose = (
            "The best checkpoint was chosen on the same images, so these figures are optimistic."
        )
    heads = ["metric", "value", "95 % interval"]
    yield markdown.section("Evaluation", told, markdown.table(heads, rows), chose)
    if evaluation.predictions is None:
        return
    if card.has_several:
        yield _classes_of_several(card)
        return
    yield markdown.section("Evaluation by class", *_by_class(card, evaluation))
    result = calibration(evaluation.predictions.probability, evaluation.predictions.right)
    shown = (
        f"The expected calibration error is {100 * result.error:.2f} %, over {BINS} bins of equal width:"
        " the mean distance between the probability of a prediction and the share of such predictions"
        " that is right."
    )
    rows = [
        (
            f"{bound / BINS:.2f} to {(bound + 1) / BINS:.2f}",
            f"{images:,}",
            f"{100 * mean:.1f}",
            f"{100 * right:.1f}",
        )
        for bound, (images, mean, right) in enumerate(
            zip(
                result.images.tolist(),
                result.probability.tolist(),
                result.right.tolist(),
                strict=True,
            )
        )
        if images
    ]
    heads = ["probability", "images", "its mean (%)", "right (%)"]
    yield markdown.section("Calibration", shown, markdown.table(heads, rows))


def _interval(right: int, count: int) -> str:
    if not count:
        return ""
    low, high = wilson(right, count)
    return f"{100 * low:.2f} to {100 * high:.2f}"


def _by_class(card: Card, evaluation: Evaluation) -> Iterator[str]:
    """Yields the table of the classes, and a line about those that it leaves out."""
    table = evaluation.predictions
    assert table is not None
    highest = max(int(table.label.max()), int(table.predicted.max()))
    outputs = max(card.config.MODEL.NUM_CLASSES, highest + 1)
    by_class, _ = scores(table.label, table.predicted, outputs)
    right = np.bincount(table.label[table.right], minlength=outputs)
    rows = []
    for label in range(min(outputs, _ROWS)):
        images = int(by_class.images[label])
        cells = ["", "", "", ""]
        if images:
            cells = [
                f"{100 * by_class.recall[label]:.2f}",
                _interval(int(right[label]), images),
                f"{100 * by_class.precision[label]:.2f}",
                f"{100 * by_class.f1[label]:.2f}",
            ]
        rows.append((class_name(card.description.classes, label), label, f"{images:,}", *cells))
    heads = ["class", "output", "images", "right (%)", "95 % interval", "precision (%)", "F1 (%)"]
    yield markdown.table(heads, rows)
    if outputs > _ROWS:
        yield f"{outputs - _ROWS:,} more classes aren't listed."


def _classes_of_several(card: Card) -> str:
    """Returns the section of the classes of a model of several labels."""
    assert card.evaluation is not None
    f1 = card.evaluation.metrics.get("class_f1", {})
    thresholds = card.description.thresholds
    rows = []
    for place, (name, precision) in enumerate(card.evaluation.metrics.get("class_ap", {}).items()):
        threshold = f"{thresholds[place]:.3g}" if place < len(thresholds) else "0.5"
        cells = ["" if value is None else f"{value:.2f}" for value in (precision, f1.get(name))]
        rows.append((name, *cells, threshold))
    heads = ["class", "average precision (%)", "F1 (%)", "threshold"]
    return markdown.section("Evaluation by class", markdown.table(heads, rows[:_ROWS]))


def _confidence(calibrated: Calibration | None) -> Iterator[str]:
    """Yields the calibration of the weights by tools/calibrate.py."""
    if calibrated is None:
        return
    told = f"tools/calibrate.py determined the following on {calibrated.images:,} held-out images."
    if calibrated.scaling == "temperature":
        told += f" The logits were divided by a temperature of {1 / calibrated.scale[0]:.4g}."
    elif calibrated.scaling != "none":
        told += f" The logits were scaled ({calibrated.scaling}, a factor for each class)."
    if calibrated.scaling != "none":
        told += " This is part of the classifier, so that every toolkit computes the same probabilities."
    yield told
    if calibrated.sets:
        levels = ", ".join(f"{one.coverage:g}" for one in calibrated.sets)
        yield (
            "Sets of classes that contain the right one, by `python tools/predict.py FOLDER IMAGES"
            f" -coverage LEVEL`: {levels}."
        )
    if calibrated.rejections:
        # The features of training images, which the score "knn" needs, aren't published.
        by_logits = [one for one in calibrated.rejections if one.score != "knn"]
        levels = ", ".join(dict.fromkeys(f"{one.false_alarm:g}" for one in by_logits))
        yield (
            "Images of something else are detected, with these rates of false alarms, by `python"
            f" tools/predict.py FOLDER IMAGES -reject LEVEL`: {levels}."
        )


# ---------------------------------------------------------------- the rest


def _training(card: Card) -> Iterator[str]:
    if card.training is None:
        yield "How these weights were trained isn't known."
        return
    result = card.training.result
    rows = [
        (key, value_text(default), value_text(value))
        for key, (default, value) in recipe(card.training.config).items()
    ]
    versions = result.get("versions", {})
    known = ", ".join(f"{name} {value}" for name, value in versions.items())
    devices = result.get("environment", {}).get("devices")
    processes = ""
    if isinstance(devices, list) and devices:
        # The batch counts per process.
        processes = f" -ngpus={len(devices)}"
        known += f", on {len(devices)} x {devices[0]}"
    yield f"`{TRAINING}` has these settings. The images are given by `-data_path`:"
    yield markdown.code(f"python main_multi_gpu.py -cfg=FOLDER/{TRAINING}{processes}")
    yield markdown.table(["key", "default", "here"], rows, numbers=False)
    if known:
        yield f"It ran with {markdown.text(known)}."


def _classes(card: Card) -> Iterator[str]:
    names = card.description.classes
    if card.evaluation is not None and card.evaluation.predictions is not None:
        # The evaluation's table has them.
        return
    if not names:
        yield "The class names aren't known, so outputs are given by their numbers."
        return
    yield markdown.table(["output", "class"], list(enumerate(names))[:_ROWS], numbers=False)
    if len(names) > _ROWS:
        yield f"config.json has all {len(names):,}."


def _limits(card: Card) -> Iterator[str]:
    """Yields the limitations of the model."""
    evaluation = card.evaluation
    if evaluation is None:
        yield "It wasn't evaluated when this card was made."
    elif evaluation.predictions is None:
        yield (
            "Its metrics by class and its calibration aren't known: the run's last evaluation is of"
            " other weights."
        )
    if evaluation is not None:
        yield (
            "It was evaluated on images of one source. Its accuracy on images of other cameras,"
            " places or"
            " times wasn't measured."
        )
    calibrated = card.description.calibration
    if not card.has_several and (calibrated is None or not calibrated.rejections):
        yield "It assigns a class to every image, even if the image shows none of them."
    if calibrated is None:
        yield "Its probabilities aren't calibrated: no temperature was fitted."
    elif calibrated.neighbours:
        yield "The features of training images aren't published, so `-score knn` isn't available."
    if card.checked is None:
        yield "Its training images weren't checked for duplicates and leaks when this card was made."
    if not card.without_timm and len(card.compared) < 2:
        yield "It wasn't loaded by timm or transformers when this card was made."
    if not card.without_timm:
        yield "How timm and transformers prepare images wasn't compared: only the logits of prepared images were."
    if card.config.DATA.EXIF_ORIENTATION and not card.without_timm:
        yield "timm and transformers ignore the EXIF orientation of images."


def _licence(card: Card) -> str:
    if card.license_name is None:
        return "The licence isn't known, because none was given when this model was published."
    return f"The licence is {markdown.text(card.license_name)}."


def _files(card: Card) -> Iterator[str]:
    rows = [
        (WEIGHTS, "the weights with timm's names, and what this toolkit needs to build the model"),
        ("config.json", "the model, its classes and how images are prepared, as timm writes it"),
    ]
    if card.training is not None:
        rows.append((TRAINING, "the training's settings"))
    yield markdown.table(["file", "content"], rows, numbers=False)
    yield f"The SHA-256 of {markdown.text(WEIGHTS)} is `{card.sha256}`."
