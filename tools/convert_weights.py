"""Converts weights: any file that -pretrained takes, into timm's .safetensors, Paddle's .pdparams
or Google's .npz.

    python tools/convert_weights.py IN OUT [-cfg MODEL] [-o KEY VALUE ...]

OUT's ending tells the kind. .safetensors has timm's names and layout; timm loads it as it is.
.pdparams is what ``paddle.load`` and this toolkit's ``model.set_state_dict`` take. .npz is for ViT
and MLP-Mixer only, in Google's names, which timm's ``checkpoint_path`` takes. MODEL (a YAML file or
a model's name) tells what the weights are of. It may be left out where IN itself, a config.json of
timm's beside it, or its name says that. The weights have to be exactly that model's. A .safetensors
file says what it is of, as a checkpoint's does.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402
from settings.options import Parser  # noqa: E402

ENDINGS = (".safetensors", ".pdparams", ".npz")


def convert(source: str, target: Path, cfg: str | None = None, options: Sequence[str] = ()) -> str:
    """Writes the weights ``source`` as ``target`` and returns one line that tells what was done.

    Args:
        source: what ``weights.find_weights`` takes.
        target: a file with one of ``ENDINGS``.
        cfg: the model's YAML file or name; None: what config.json beside the weights, or their
            name, tells.
        options: keys and values of the configuration, such as ``["MODEL.NUM_CLASSES", "21843"]``.

    Raises:
        InputError: the model isn't known, the weights aren't exactly its, or it has no file of that
            kind.
    """
    from config import get_config
    from models import build_model, with_switches
    from models.pretrained import build_described
    from training.checkpoint import classes_of, describe, description_of, task_of, thresholds_of
    from training.checkpoint.description import METADATA
    from weights import file_arrays, load_weights
    from weights.formats import write_weights
    from weights.names import google_names

    if target.suffix not in ENDINGS:
        raise InputError(f"{target}: the ending tells what to write; expected {', '.join(ENDINGS)}")
    told = None if cfg else description_of(source, options)
    options = ["MODEL.PRETRAINED", source, *options]
    config = told.to_config(options) if told else get_config(cfg or _model_of(source), options)
    config = with_switches(config, source)
    model = build_described(config, source) if told else build_model(config)
    adapter = config.MODEL.PRETRAINED_ADAPTER
    report = load_weights(model, source, adapter=adapter)
    if report.changes:
        raise InputError(
            f"{report.file} isn't this model's ({'; '.join(report.changes)}); give its own by -cfg or -o"
        )
    if target.suffix == ".pdparams":
        arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    else:
        arrays = file_arrays(model)
    if target.suffix == ".npz":
        arrays = google_names(model, arrays)
    classes = told.classes if told else classes_of(source, adapter) or []
    task = told.task if told else task_of(source, adapter) or config.TASK
    thresholds = told.thresholds if told else thresholds_of(source, adapter)
    metadata = {METADATA: describe(config, classes, task, thresholds).to_json()}
    write_weights(target, arrays, metadata if target.suffix == ".safetensors" else None)
    return f"{len(arrays)} tensors of {report.file} written to {target}"


def _model_of(source: str) -> str:
    from models import list_models
    from weights import find_weights

    file = find_weights(source)
    known = list_models()
    for name in (file.stem, file.parent.name):
        if name in known:
            return name
    raise InputError(
        f"{file}: neither itself, nor a config.json, nor its name tells its model; add -cfg MODEL"
    )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("source", metavar="IN", help="weights: a file, a folder or hf-hub:org/name")
    parser.add_argument(
        "target", metavar="OUT", type=Path, help=f"a file that ends in {', '.join(ENDINGS)}"
    )
    parser.add_argument("-cfg", "--cfg", metavar="MODEL", help="the model's YAML file or name")
    parser.add_argument(
        "-o", "--o", nargs="+", action="extend", default=[], metavar="KEY VALUE", help="any keys"
    )
    arguments = parser.parse_args()
    print(convert(arguments.source, arguments.target, arguments.cfg, arguments.o))


if __name__ == "__main__":
    with reporting():
        main()
