"""Converts weights: any file that -pretrained takes, to timm's .safetensors, Paddle's .pdparams or
Google's .npz.

    python tools/convert_weights.py IN OUT [-cfg MODEL] [-o KEY VALUE ...]

The suffix of OUT chooses the format. .safetensors has timm's names and layout, and timm loads it
directly. .pdparams is for ``paddle.load`` and this toolkit's ``model.set_state_dict``. .npz has Google's
names, for timm's ``checkpoint_path``; only ViT and MLP-Mixer have such files.

MODEL is the YAML file or the name of the model. It can be omitted if IN describes its model, has a
config.json of timm next to it, or is named as a model. The weights have to fit the model exactly. A
.safetensors file that is written describes its model, as that of a checkpoint does.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402
from settings.parser import Parser  # noqa: E402

ENDINGS = (".safetensors", ".pdparams", ".npz")


def convert(source: str, target: Path, cfg: str | None = None, options: Sequence[str] = ()) -> str:
    """Writes the weights ``source`` to ``target``. Returns a line for the user.

    Args:
        source: any weights that ``weights.find_weights`` finds.
        target: a file with one of ``ENDINGS``.
        cfg: the model's YAML file or name. None: the weights, a config.json beside them, or their
            name says which model it is.
        options: keys and values of the configuration, such as ``["MODEL.NUM_CLASSES", "21843"]``.

    Raises:
        InputError: the model isn't known, the weights don't fit it exactly, or there is no such
            format for it.
    """
    from config import get_config
    from models import build_model, with_switches
    from models.pretrained import build_described
    from training.checkpoint import (
        calibration_of,
        classes_of,
        describe,
        description_of,
        task_of,
        thresholds_of,
    )
    from training.checkpoint.description import METADATA
    from weights import file_arrays, load_weights
    from weights.formats import write_weights
    from weights.names import google_names

    if target.suffix not in ENDINGS:
        raise InputError(f"{target}: unknown file ending; expected {', '.join(ENDINGS)}")
    description = None if cfg else description_of(source, options)
    options = ["MODEL.PRETRAINED", source, *options]
    if description:
        config = with_switches(description.to_config(options), source)
        model = build_described(config, source)
    else:
        config = with_switches(get_config(cfg or _model_of(source), options), source)
        model = build_model(config)
    adapter = config.MODEL.PRETRAINED_ADAPTER
    report = load_weights(model, source, adapter=adapter)
    if report.changes:
        raise InputError(
            f"{report.file} is from another model ({'; '.join(report.changes)});"
            " set the model by -cfg or -o"
        )
    if target.suffix == ".pdparams":
        arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    else:
        arrays = file_arrays(model)
    if target.suffix == ".npz":
        arrays = google_names(model, arrays)
    if description:
        classes = description.classes
        task = description.task
        thresholds = description.thresholds
        calibration = description.calibration
    else:
        classes = classes_of(source, adapter) or []
        task = task_of(source, adapter) or config.TASK
        thresholds = thresholds_of(source, adapter)
        calibration = calibration_of(source, adapter)
    description = describe(config, classes, task, thresholds, calibration)
    metadata = {METADATA: description.to_json()}
    write_weights(target, arrays, metadata if target.suffix == ".safetensors" else None)
    written = f"{len(arrays)} tensors of {report.file} written to {target}"
    return "; ".join([written, *report.notes])


def _model_of(source: str) -> str:
    """Returns the shipped model that the weights' file or folder is named after."""
    from models import list_models
    from weights import find_weights

    file = find_weights(source)
    models = list_models()
    for name in (file.stem, file.parent.name):
        if name in models:
            return name
    raise InputError(f"{file}: cannot determine the model; pass -cfg MODEL")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("source", metavar="IN", help="weights: a file, a folder or hf-hub:org/name")
    parser.add_argument(
        "target", metavar="OUT", type=Path, help=f"a file that ends in {', '.join(ENDINGS)}"
    )
    parser.add_argument("-cfg", "--cfg", metavar="MODEL", help="the model's YAML file or name")
    parser.add_keys()
    arguments = parser.parse_args()
    print(convert(arguments.source, arguments.target, arguments.cfg, arguments.o))


if __name__ == "__main__":
    with reporting():
        main()
