"""Draws what the model is fed: training images, augmented and mixed, with their labels, and
evaluation images.

    python tools/show_batch.py -cfg=finetune_vit_small_patch16_224 -dataset=folder -data_path=/data/flowers \
        -output batch.png

They come from the run's own loader and transforms: the first batch of an epoch, in one process,
turned back into colours. With -cfg=RUN/config.yaml it is what the run saw. Mixed labels are shown
with their shares, without smoothing. The flags besides are main_multi_gpu.py's, with -o.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import (  # noqa: E402  (first: it says what isn't installed)
    InputError,
    RunError,
    remedy,
    reporting,
)

# isort: split
from settings.options import Configuration, Parser  # noqa: E402

_MOST = 64
_EVALUATION = "#2e7d32"


def draw(config: Configuration, epoch: int, count: int) -> bytes:
    """Returns a PNG of ``count`` training images of an epoch's first batch, and of as many
    evaluation images.

    Raises:
        InputError: the data can't be read, or don't fit the configuration.
        RunError: an image can't be read.
    """
    from datasets import get_datasets
    from inference.visualization.batches import evaluation_panels, training_panels
    from inference.visualization.draw import sheet
    from models.pretrained import with_preprocessing

    config, train, val = get_datasets(with_preprocessing(config))
    if train is None:
        raise InputError(
            "the configuration is an evaluation's (EVAL); leave -eval out, there are no training images"
        )
    rows = [training_panels(config, train, epoch, count), evaluation_panels(config, val, count)]
    rows[1] = [panel._replace(frame=_EVALUATION) for panel in rows[1]]
    title = f"{config.MODEL.NAME}, {config.DATA.DATASET}: training images of epoch {epoch}; framed: evaluation"
    return sheet(rows, title, columns=8)


def main() -> None:
    parser = Parser(__doc__, passes_on=True)

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option(
        "epoch",
        type=int,
        default=1,
        metavar="N",
        help="whose first batch is shown, from 1; default: 1",
    )
    option(
        "count",
        type=int,
        default=16,
        metavar="N",
        help=f"images of each kind, up to {_MOST}; default: 16",
    )
    option("output", type=Path, required=True, metavar="FILE.png", help="the picture")
    options, rest = parser.parse_known_args()
    if options.output.suffix.lower() != ".png" or not options.output.parent.is_dir():
        raise InputError(
            f"-output {options.output}: expected a file that ends in .png, in a folder that is there"
        )
    if not 1 <= options.count <= _MOST or options.epoch < 1:
        found = f"--count is {options.count}, --epoch {options.epoch}"
        raise InputError(f"{found}; expected 1 to {_MOST}, and 1 or more")
    from training.command_line import config_from_arguments
    from utils import writing_whole

    config = config_from_arguments("tools/show_batch.py", rest, vars(options))
    picture = draw(config, options.epoch, options.count)
    try:
        with writing_whole(options.output, "wb") as file:
            file.write(picture)
    except OSError as error:
        raise RunError(
            f"-output {options.output} isn't written ({error.strerror}); {remedy(error)}"
        ) from None
    print(f"{options.output} is written")


if __name__ == "__main__":
    with reporting():
        main()
