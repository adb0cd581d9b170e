"""Offers the shipped models to other programs through ``paddle.hub``. FOLDER is this folder:

    paddle.hub.list(FOLDER, source="local")
    print(paddle.hub.help(FOLDER, "vit_base_patch16_224", source="local"))
    model = paddle.hub.load(FOLDER, "vit_base_patch16_224", source="local", pretrained=WEIGHTS, num_classes=10)
    predictor = paddle.hub.load(FOLDER, "predictor", source="local", path=CHECKPOINT)

The models come from the package ``paddle_vit_toolkit`` (tools/package). The program may import it
from then on: ``from paddle_vit_toolkit.config import get_config``. The program's own modules
``config``, ``utils`` or ``models`` stay what they are. Each YAML file of a model is an entry, so
there is no list to edit.
"""

import hashlib
import importlib.util
import pathlib
import sys
import types
import typing

dependencies = ["paddle", "numpy", "yaml", "yacs", "tqdm", "scipy"]
_ROOT = pathlib.Path(__file__).resolve().parent
_NAME = "paddle_vit_toolkit"


def _part(name: str) -> types.ModuleType:
    """Returns a module of this repository. If a process uses two copies of the repository, the package
    of the second one has a longer name.
    """
    folder = _ROOT / "tools" / "package"
    if _NAME not in sys.modules and str(folder) not in sys.path:
        # The entry stays in sys.path. Spawned processes get the same path, and unpickle models.
        sys.path.append(str(folder))
    package = importlib.import_module(_NAME)
    if _ROOT != package.ROOT:
        longer = f"{_NAME}_{hashlib.sha256(str(_ROOT).encode()).hexdigest()[:8]}"
        if longer not in sys.modules:
            spec = importlib.util.spec_from_file_location(longer, folder / _NAME / "__init__.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules[longer] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[longer])
        package = sys.modules[longer]
    return importlib.import_module(f"{package.__name__}.{name}")


class _Model:
    """A function that builds a shipped model. Its docstring is only made when it is read."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, pretrained: str | bool | None = None, **overrides: typing.Any) -> typing.Any:
        return _part("models").create_model(self.__name__, pretrained, **overrides)

    def __getattribute__(self, name: str) -> typing.Any:
        if name == "__doc__":
            return _docstring(self.__name__)
        return object.__getattribute__(self, name)


def _docstring(name: str) -> str:
    """Returns the docstring of a model's entry."""
    config = _part("config").get_config(name)
    model_arguments = _part("settings.architectures").architecture(config.MODEL.TYPE).arguments
    # The first line of the YAML file is "# name: source".
    text = _part("config").find_config(name).read_text(encoding="utf-8")
    source = text.partition("\n")[0].partition(": ")[2]
    data = config.DATA
    classes = config.MODEL.NUM_CLASSES
    height, width = _part("settings.configuration").pair(data.IMAGE_SIZE)
    shape = f"[B, {data.IMAGE_CHANNELS}, {height}, {width}]"
    lines = [
        source,
        "",
        f"Returns a paddle.nn.Layer, in training mode: images {shape} float32 -> [B, {classes}].",
        f"Images are (pixels / 255 - {data.IMAGENET_MEAN}) / {data.IMAGENET_STD}, RGB.",
        "",
        "Args:",
        "    pretrained: weights: a file, a folder or hf-hub:org/name; True: timm's of this name; None: random",
        f"    num_classes: outputs; 0: features (default: {classes})",
        f"    image_size: pixels, or (height, width) (default: {data.IMAGE_SIZE})",
        f"    image_channels: of the images (default: {data.IMAGE_CHANNELS})",
    ]
    for key, argument in sorted(model_arguments.items()):
        word = key.removeprefix("MODEL.")
        lines.append(f"    {word.lower()}: {argument.text} (default: {config.MODEL[word]})")
    return "\n".join(lines)


def predictor(path: str, **arguments: typing.Any) -> typing.Any:
    """Returns a trained checkpoint that predicts as ``-eval`` does. ``predictor(images)`` returns a
    Prediction for each image.

    Args:
        path: a checkpoint's folder or file, or a run's folder (its best checkpoint)
        arguments: cfg, options, classes, batch_size of inference.Predictor
    """
    return _part("inference").Predictor(path, **arguments)


def __getattr__(name: str) -> typing.Any:
    """Returns a model by timm's or PaddleViT's name, which ``paddle.hub.list`` doesn't list as well."""
    shipped = None if name.startswith("_") else _part("settings.merging").shipped_model(name)
    if shipped is None:
        raise AttributeError(f"no model {name}")
    return _Model(shipped)


try:
    globals().update({_name: _Model(_name) for _name in _part("settings.merging").shipped_models()})
except ModuleNotFoundError as _error:
    # ``paddle.hub.load`` then raises an error for what is missing of ``dependencies``.
    print(
        f"{_ROOT}/hubconf.py: models are unavailable because {sys.executable} lacks {_error.name}",
        file=sys.stderr,
    )
