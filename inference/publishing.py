"""Publishes a classifier: a folder that this toolkit, timm and transformers read.

The folder has the layout of a model on the Hugging Face Hub: model.safetensors by timm's names,
config.json, a model card, and the training's settings. timm reads it by ``local-dir:FOLDER``, and
transformers by its ``TimmWrapperForImageClassification``. The folder is written under another name,
loaded again, and compared with the weights that it was made of.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import yaml

from errors import InputError, RunError, install, printable, reading, remedy
from inference.conventions import TIMM, timm_config
from inference.model_card import CARD, WEIGHTS, Card, model_card
from inference.predictor import Predictor, config_of, trained_model
from inference.recipe import TRAINING, training_yaml
from inference.run_evaluation import Evaluation, Training
from inference.visualization.dataset_report import DatasetReport
from launch.files import making_folder, temporary_folder, writing_whole
from launch.startup import end_with_parent
from loading.transforms import Normalize, pixel_dtype
from models.timm_models import TimmModel, timm_model
from settings.configuration import Configuration
from settings.plain import parsed_json
from training.checkpoint import Description
from training.checkpoint.description import METADATA
from utils import sync_directory
from weights import file_arrays, find_weights
from weights.formats import read_metadata, write_weights
from weights.hub import HUB_PREFIXES, best_of_run
from weights.sums import sha256_of

# The largest difference of another toolkit's logits, over their range.
TOLERANCE = 1e-5
# The time that another toolkit has for it, in seconds.
_SECONDS = 600
# Images of a comparison.
_IMAGES = 4


class Source(NamedTuple):
    """The weights that are published.

    Attributes:
        file: the weights' file.
        predictor: of these weights.
        description: of the model, its classes and images.
        metadata: of the published file.
        arrays: by timm's names, in its layout.
        classifiers, first_conv: names of layers, which timm replaces for other classes and channels.
        features: the number of features that the classifier reads.
    """

    file: Path
    predictor: Predictor
    description: Description
    metadata: dict[str, str]
    arrays: dict[str, np.ndarray]
    classifiers: list[str]
    first_conv: str
    features: int


def read_source(path: str, cfg: str | None = None, options: list[str] | None = None) -> Source:
    """Reads the weights to publish.

    Args:
        path: what ``find_weights`` takes.
        cfg: the model's YAML file or name; None: the weights describe their model.
        options: words as after ``-o``.

    Raises:
        InputError: they can't be read, don't describe their model, or aren't a classifier's.
    """
    options = options or []
    predictor = Predictor(path, cfg, options, batch_size=_IMAGES)
    if predictor.model is None or predictor.weights is None:
        raise InputError(
            f"{printable(path)} is an export; use the weights that it was made from, or their run"
        )
    predictor.check_classifier()
    found = str(best_of_run(path))
    config, description = config_of(found, cfg, options)
    # The predictor's own model may be folded for inference (LeViT, MobileOne).
    model = trained_model(found, config, cfg)
    stored = {} if cfg or options else read_metadata(find_weights(found))
    text = stored.get(METADATA) or description.to_json()
    return Source(
        predictor.weights,
        predictor,
        description,
        # transformers refuses files that don't say whose tensors they hold.
        {"format": "pt", METADATA: text},
        file_arrays(model),
        list(model.classifier_names()),
        model.first_conv,
        model.num_features,
    )


def published_config(source: Source) -> tuple[dict[str, Any], str]:
    """Returns the content of config.json, and the reason why timm can't read the folder, or ""."""
    config = source.predictor.config
    content = timm_config(config, source.description, source.features)
    preparation = content["pretrained_cfg"]
    names = source.classifiers
    preparation["classifier"] = names[0] if len(names) == 1 else names
    preparation["first_conv"] = source.first_conv
    if source.predictor.has_several:
        # transformers takes sigmoids then.
        content["problem_type"] = "multi_label_classification"
    try:
        timm: TimmModel = timm_model(config)
    except InputError as error:
        # A name that timm doesn't know: it fails there, instead of computing something else.
        content["architecture"] = f"paddle_vit_toolkit_{config.MODEL.NAME}"
        return content, str(error)
    content["architecture"] = timm.architecture
    content["model_args"] = timm.arguments
    preparation["fixed_input_size"] = timm.takes_size
    return content, ""


def publish(
    source: Source,
    target: Path,
    name: str,
    license_name: str | None = None,
    evaluation: Evaluation | None = None,
    training: Training | None = None,
    checked: DatasetReport | None = None,
    peer: Sequence[str] = (),
) -> list[str]:
    """Writes the folder ``target``, whole or not at all; returns what was compared, in lines.

    Args:
        name: of the model, for its card.
        license_name: as the Hub names it; None: it isn't known.
        evaluation: of these weights; None: there is none.
        training: that made them; None: it isn't known.
        checked: a check of the images that they were trained on; None: there was none.
        peer: the command of a program that gets the folder and a file of images, and answers what
            other toolkits compute (tools/checks/published_peer.py); empty: that isn't tried.

    Raises:
        InputError: ``target`` is there, or can't be written.
        RunError: the folder gives other logits than the weights, here or in another toolkit.
    """
    if os.path.lexists(target):
        raise InputError(f"{target} exists; choose another folder, or remove it")
    content, why = published_config(source)
    recipe = training_yaml(training.config) if training else None
    with _naming_problems(target), making_folder(target) as folder:
        write_weights(folder / WEIGHTS, source.arrays, source.metadata)
        with writing_whole(folder / TIMM) as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        if recipe is not None:
            with writing_whole(folder / TRAINING) as file:
                file.write(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
        compared = [_compare_here(source, folder)]
        if peer and not why:
            compared += _compare_elsewhere(source, folder, peer)
        card = Card(
            name=name,
            config=source.predictor.config,
            description=source.description,
            parameters=sum(array.size for array in source.arrays.values()),
            sha256=sha256_of(folder / WEIGHTS),
            without_timm=why,
            compared=compared,
            evaluation=evaluation,
            training=training,
            checked=checked,
            license_name=license_name,
        )
        with writing_whole(folder / CARD) as file:
            file.write(model_card(card))
        sync_directory(folder)
    return compared


@contextlib.contextmanager
def _naming_problems(target: Path) -> Iterator[None]:
    """Turns an error of the disk into one line that names the folder."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{target} can't be written ({error.strerror or error}); {remedy(error)}"
        ) from None


def _images(config: Configuration) -> np.ndarray:
    """Returns random images as they are before they are normalised, [n, H, W, C]."""
    data = config.DATA
    side = data.IMAGE_SIZE
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    rng = np.random.default_rng(0)
    shape = (_IMAGES, height, width, data.IMAGE_CHANNELS)
    if pixel_dtype(config) is np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    return rng.random(shape, np.float32)


def _compare_here(source: Source, folder: Path) -> str:
    """Loads the folder, and compares its logits; returns a line about it."""
    images = _images(source.predictor.config)
    expected = source.predictor.logits(images)
    again = Predictor(folder, batch_size=_IMAGES)
    found = again.logits(images)
    if not np.array_equal(found, expected):
        difference = float(np.abs(found - expected).max())
        raise RunError(
            f"the folder's logits differ from those of {source.file} by {difference:.3g}, expected"
            " identical ones: please report this"
        )
    return f"paddle-vit-toolkit: logits of {_IMAGES} random images are identical"


def _compare_elsewhere(source: Source, folder: Path, peer: Sequence[str]) -> list[str]:
    """Loads the folder by timm and transformers, and compares their logits; returns lines."""
    data = source.predictor.config.DATA
    images = _images(source.predictor.config)
    normalize = Normalize(data.IMAGENET_MEAN, data.IMAGENET_STD)
    expected = source.predictor.logits(images)
    with temporary_folder() as scratch:
        with writing_whole(scratch / "images.npz", "wb") as file:
            np.savez(file, images=normalize(paddle.to_tensor(images)).numpy())
        answers = _answers([*peer, str(folder.absolute()), str(scratch / "images.npz")])
    lines = []
    for toolkit, answer in answers.items():
        if "logits" not in answer:
            why = printable(str(answer.get("error")), 400)
            raise RunError(
                f"{toolkit} can't read the folder ({why}); leave out -python to skip this check"
            )
        found = np.asarray(answer["logits"], np.float64)
        label = f"{toolkit} {answer['version']}"
        if found.shape != expected.shape:
            raise RunError(
                f"{label} gives logits {list(found.shape)} of the folder, expected {list(expected.shape)}"
            )
        difference = float(np.abs(found - expected).max() / np.ptp(expected))
        if not difference <= TOLERANCE:
            raise RunError(
                f"{label}'s logits of the folder differ by {difference:.1e} of their range, expected"
                f" {TOLERANCE:g} at most: please report this; leave out -python to skip this check"
            )
        lines.append(
            f"{label}: logits of {_IMAGES} random images differ by {difference:.1e} of their range"
        )
    return lines


def _answers(command: Sequence[str]) -> dict[str, Any]:
    """Returns the last line that a program prints: by toolkit, its version and its logits.

    Raises:
        InputError: it printed something else, or took too long.
    """
    line = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            preexec_fn=end_with_parent,
        )
        line = (done.stdout.splitlines() or [""])[-1]
    if not line.startswith("{"):
        raise InputError(
            f"-python {command[0]} returned no logits: it needs torch and timm"
            " (tools/check_parity.py -h)"
        )
    with reading(f"-python {command[0]}", "what timm computes"):
        return parsed_json(line.encode(), finite=False)


# ---------------------------------------------------------------- the Hub


def is_hub_name(name: str) -> bool:
    """Returns whether a target is ``hf-hub:org/name``."""
    return name.startswith(HUB_PREFIXES)


def repository(name: str) -> str:
    """Returns the repository of ``hf-hub:org/name``.

    Raises:
        InputError: the name is another one, or huggingface_hub isn't installed.
    """
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        raise InputError(f"{name}: needs huggingface_hub; {install('hub')}") from None
    found = name.partition(":")[2]
    try:
        validate_repo_id(found)
    except HFValidationError:
        found = ""
    if found.count("/") != 1:
        raise InputError(f"{printable(name)}: expected hf-hub:ORGANISATION/NAME")
    return found


def upload(folder: Path, repo_id: str, private: bool) -> str:
    """Uploads a published folder to the Hub, in one commit; returns its address.

    The token is the one that ``hf auth login`` stored, or HF_TOKEN. It is neither read nor printed
    here.

    Raises:
        RunError: the Hub refuses it, or can't be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            folder_path=folder, repo_id=repo_id, commit_message="Publish by paddle-vit-toolkit"
        )
    except Exception as error:
        # The class of the error depends on huggingface_hub's version, which uses httpx or requests.
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        # The text may quote the request, so only the class and the status are reported.
        why = type(error).__name__ if status is None else f"{type(error).__name__}, status {status}"
        advice = "log in by hf auth login with a token that has write access, and check the name"
        raise RunError(
            f"{repo_id} couldn't be uploaded ({why}); {advice}; or check the network"
        ) from None
    return str(address)
