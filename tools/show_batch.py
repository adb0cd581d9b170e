r"""Draws the images that a model is trained and evaluated on, after augmentation and mixing.

    python tools/show_batch.py -cfg=finetune_vit_small_patch16_224 -dataset=folder -data_path=/data/flowers \
        -output batch.png

The images are the first batch of an epoch, from the loader and transforms of the run, converted back
to colours. With -cfg=RUN/config.yaml, they are the images that the run was trained on. Mixed labels
are shown with their shares, without smoothing. For tasks that train on several views of an image
(dino), each line has the views of one image. All other flags, and -o, are those of main_multi_gpu.py.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import (  # noqa: E402  (first: it says what isn't installed)
    InputError,
    RunError,
    remedy,
    reporting,
)

# isort: split
from settings.configuration import Configuration  # noqa: E402
from settings.parser import Parser  # noqa: E402

# The most images of each kind, and the batch where its size is "auto".
_MOST = 64
_SIZES = ("BATCH_SIZE", "BATCH_SIZE_EVAL")
_COLUMNS = 8
# the colour of the frame around an evaluation image
_EVALUATION = "#2e7d32"


def draw(config: Configuration, epoch: int, count: int) -> bytes:
    """Returns a PNG. It shows ``count`` training images of an epoch's first batch, and as many
    evaluation images below them.

    Raises:
        InputError: the data can't be read, or don't fit the configuration.
        RunError: an image can't be read.
    """
    from config import with_values
    from datasets import get_datasets
    from inference.visualization.batches import evaluation_panels, training_panels, view_panels
    from loading.transforms.naflex import packing
    from models.pretrained import with_preprocessing
    from settings.registry import tasks
    from settings.tasks import answers_of, view_columns
    from training.pages.sheets import sheet

    config, train, val = get_datasets(with_preprocessing(config))
    if train is None:
        raise InputError("an evaluation has no training images; leave out -eval (EVAL)")
    most = _MOST
    if config.DATA.SAMPLER == "per_class":
        # A batch has no class twice.
        most = config.DATA.PER_CLASS * min(
            len(train.classes), max(1, most // config.DATA.PER_CLASS)
        )
    sizes = {f"DATA__{key}": most for key in _SIZES if config.DATA[key] == "auto"}
    config = with_values(config, "the pictures", **sizes)
    columns = _COLUMNS
    if config.DATA.NUM_TOKENS is not None:
        train.pack(packing(config))
    if answers_of(config.TASK) == "pixels":
        tasks.choose(config)(config, val.classes).prepare_data(val, "val")
    if view_columns(config.TASK):
        train.views = tasks.choose(config)(config, train.classes).views
        training = view_panels(config, train, epoch, count)
        columns = max(columns, *map(len, training))
    else:
        training = [training_panels(config, train, epoch, count)]
    evaluation = [
        panel._replace(frame=_EVALUATION) for panel in evaluation_panels(config, val, count)
    ]
    title = (
        f"{config.MODEL.NAME}, {config.DATA.DATASET}:"
        f" training images of epoch {epoch}; framed: evaluation"
    )
    return sheet([*training, evaluation], title, columns=columns)


def main() -> None:
    parser = Parser(__doc__, passes_on=True)

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option(
        "epoch",
        type=int,
        default=1,
        metavar="N",
        help="the epoch whose first batch is shown; default: 1",
    )
    option(
        "count",
        type=int,
        default=16,
        metavar="N",
        help=f"number of images of each kind, up to {_MOST}; default: 16",
    )
    option("output", type=Path, required=True, metavar="FILE.png", help="the picture")
    options, rest = parser.parse_known_args()
    if options.output.suffix.lower() != ".png" or not options.output.parent.is_dir():
        raise InputError(
            f"-output {options.output}: expected a file that ends in .png, in an existing folder"
        )
    if not 1 <= options.count <= _MOST or options.epoch < 1:
        raise InputError(
            f"--count is {options.count}, expected 1 to {_MOST}; --epoch is {options.epoch}, expected"
            " at least 1"
        )
    from training.command_line import config_from_arguments
    from utils import writing_whole

    config = config_from_arguments("tools/show_batch.py", rest, vars(options))
    picture = draw(config, options.epoch, options.count)
    try:
        with writing_whole(options.output, "wb") as file:
            file.write(picture)
    except OSError as error:
        raise RunError(
            f"-output {options.output} can't be written ({error.strerror}); {remedy(error)}"
        ) from None
    print(f"{options.output} is written")


if __name__ == "__main__":
    with reporting():
        main()
