"""Finds a learning rate: a few hundred updates of a run, by rates that rise from one to the next.

    python tools/find_lr.py -output=DIR -cfg=NAME ... [-updates=N -low=RATE -high=RATE]

The flags besides are main_multi_gpu.py's, with -o. The model, its data, loss and optimizer are the
run's, and so is the effective batch, which this one process accumulates. DIR gets lr.csv (rate,
loss, smoothed loss) and lr.png, the curve. With -output=FILE.png, the curve is written to that
file, and the table to FILE.csv beside it. No checkpoint is written, and no run's folder changes. It
prints two rates: where the loss falls fastest, and a tenth of where it is lowest. The lower one of
both is suggested, as TRAIN.BASE_LR.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402
from settings.options import Parser  # noqa: E402


def arguments_of(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns this command's own flags, and the run's.

    Raises:
        InputError: a flag is out of range.
    """
    parser = Parser(__doc__, passes_on=True)
    parser.add_argument(
        "-updates", "--updates", type=int, default=400, metavar="N", help="default: 400"
    )
    parser.add_argument(
        "-low", "--low", type=float, default=1e-5, metavar="RATE", help="the first; default: 1e-5"
    )
    parser.add_argument(
        "-high", "--high", type=float, default=1.0, metavar="RATE", help="the last; default: 1"
    )
    arguments, rest = parser.parse_known_args(words)
    if not 20 <= arguments.updates <= 100_000:
        raise InputError(f"-updates is {arguments.updates}, expected 20 to 100000")
    if not 0 < arguments.low < arguments.high < 1e6:
        raise InputError(
            f"-low is {arguments.low:g} and -high {arguments.high:g}, expected 0 < low < high < 1000000"
        )
    return arguments, rest


def main() -> None:
    arguments, rest = arguments_of(sys.argv[1:])
    from config import with_values
    from training.command_line import config_from_arguments

    config = config_from_arguments("tools/find_lr.py", rest, vars(arguments))
    if config.EVAL or config.MODEL.RESUME:
        raise InputError(
            "a rate is found for a training from its beginning; leave out -eval and -resume"
        )
    if not config.OUTPUT:
        raise InputError("give -output=DIR, or -output=FILE.png")
    named = Path(config.OUTPUT)
    if named.suffix.lower() in (".csv", ".jpeg", ".jpg", ".pdf", ".svg"):
        raise InputError(f"-output is {named}; expected a folder, or a file that ends in .png")
    picture = named if named.suffix.lower() == ".png" else named / "lr.png"
    table = picture.with_suffix(".csv")
    for file in (picture, table):
        if os.path.lexists(file):
            raise InputError(f"{file} is there already; choose another -output")
    import utils
    from datasets import get_datasets
    from ops.device import set_device_flags
    from training.optim.schedule import rate_scale
    from training.rate_range import sweep, write
    from training.setup import share_batch

    ranks = utils.num_processes(config.NGPUS)
    config = share_batch(config, ranks)
    config = with_values(
        config, f"{ranks} processes' batch", TRAIN__ACCUM_ITER=config.TRAIN.ACCUM_ITER * ranks
    )
    set_device_flags(config, 1)
    config, train, _ = get_datasets(config)
    assert train is not None
    found = sweep(config, train, arguments.updates, arguments.low, arguments.high)
    write(found, table, picture)
    batch = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER
    rate = min(found.steepest, found.lowest / 10) / rate_scale(config, batch)
    print(
        f"the loss falls fastest at {found.steepest:.2g}, and is lowest at {found.lowest:.2g}, a tenth of which is"
        f" {found.lowest / 10:.2g}; suggested for the effective batch of {batch}: -o TRAIN.BASE_LR {rate:.2g} (now"
        f" {config.TRAIN.BASE_LR:.2g}); {picture}, {table.name}"
    )


if __name__ == "__main__":
    with reporting():
        main()
