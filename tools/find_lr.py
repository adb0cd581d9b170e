"""Finds a learning rate by a range test: a few hundred updates at rising rates.

    python tools/find_lr.py -output=DIR -cfg=NAME ... [-updates=N -low=RATE -high=RATE]

All other flags, and -o, are those of main_multi_gpu.py. The model, data, loss, optimizer and effective
batch size are those of the run; the single process reaches that batch size by accumulation.

DIR contains lr.csv (rate, loss, smoothed loss) and the curve lr.png. With -output=FILE.png, the curve
is written to that file, and the table to FILE.csv next to it. No checkpoint is written, and no run is
changed. The tool prints two rates: where the loss falls fastest, and a tenth of the rate with the
lowest loss. It suggests the lower of the two as TRAIN.BASE_LR (before TRAIN.LINEAR_SCALED_LR, if it
is set, scales it). TASK dino is refused: its loss doesn't separate good rates from bad ones.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402
from settings.parser import Parser  # noqa: E402


def arguments_of(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns this command's own flags, and the run's.

    Raises:
        InputError: a flag is out of range.
    """
    parser = Parser(__doc__, passes_on=True)
    parser.add_argument(
        "-updates",
        "--updates",
        type=int,
        default=400,
        metavar="N",
        help="number of updates; default: 400",
    )
    parser.add_argument(
        "-low",
        "--low",
        type=float,
        default=1e-5,
        metavar="RATE",
        help="the first learning rate; default: 1e-5",
    )
    parser.add_argument(
        "-high",
        "--high",
        type=float,
        default=1.0,
        metavar="RATE",
        help="the last learning rate; default: 1",
    )
    arguments, rest = parser.parse_known_args(words)
    if not 20 <= arguments.updates <= 100_000:
        raise InputError(f"-updates is {arguments.updates}, expected 20 to 100000")
    if not 0 < arguments.low < arguments.high < 1e6:
        raise InputError(
            f"-low is {arguments.low:g} and -high {arguments.high:g},"
            " expected 0 < low < high < 1000000"
        )
    return arguments, rest


def main() -> None:
    arguments, rest = arguments_of(sys.argv[1:])
    from config import with_values
    from settings.tasks import loss_is_relative
    from training.command_line import config_from_arguments

    config = config_from_arguments("tools/find_lr.py", rest, vars(arguments))
    if config.EVAL or config.MODEL.RESUME:
        raise InputError("the test trains from the beginning; leave out -eval and -resume")
    if config.PROFILE:
        raise InputError("the test profiles no steps; leave out -profile (PROFILE)")
    if loss_is_relative(config.TASK):
        raise InputError(
            f"a lower loss of TASK {config.TASK} doesn't mean a better model, so it can't show a"
            " good learning rate; compare short runs by their PROBE, as tools/sweep.py does with"
            " metric: knn"
        )
    if not config.OUTPUT:
        raise InputError("-output is missing; pass -output=DIR, or -output=FILE.png")
    output = Path(config.OUTPUT)
    if output.suffix.lower() in (".csv", ".jpeg", ".jpg", ".pdf", ".svg"):
        raise InputError(f"-output is {output}; expected a folder, or a file that ends in .png")
    picture = output if output.suffix.lower() == ".png" else output / "lr.png"
    table = picture.with_suffix(".csv")
    for file in (picture, table):
        if os.path.lexists(file):
            raise InputError(f"{file} already exists; choose another -output")
    import utils
    from datasets import get_datasets
    from models.pretrained import with_preprocessing
    from ops.device import set_device_flags
    from training.batch_size import find_batch_sizes
    from training.optim.schedule import rate_scale
    from training.rate_range import range_test, write
    from training.setup import share_batch

    # The run would have this many processes. This one accumulates the batches of all of them.
    ranks = utils.num_processes(config.NGPUS)
    set_device_flags(config, 1)
    config, train, val = get_datasets(share_batch(with_preprocessing(config), ranks))
    assert train is not None
    config = find_batch_sizes(config, train, val, ranks)
    for note in config.notes:
        print(note, flush=True)
    config = with_values(
        config, f"{ranks} processes' batch", TRAIN__ACCUM_ITER=config.TRAIN.ACCUM_ITER * ranks
    )
    test = range_test(config, train, arguments.updates, arguments.low, arguments.high)
    write(test, table, picture)
    batch = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER
    tenth = test.lowest / 10
    # The rates of the test are those of the updates. BASE_LR is the one before it is scaled.
    rate = min(test.steepest, tenth)
    scaled = ""
    if config.TRAIN.LINEAR_SCALED_LR:
        scaled = f", which TRAIN.LINEAR_SCALED_LR scales to {rate:.2g}"
    base_lr = rate / rate_scale(config, batch)
    print(
        f"the loss falls fastest at {test.steepest:.2g}, and is lowest at {test.lowest:.2g},"
        f" a tenth of which is {tenth:.2g}; suggested for the effective batch of {batch}:"
        f" -o TRAIN.BASE_LR {base_lr:.2g} (now {config.TRAIN.BASE_LR:.2g}){scaled};"
        f" {picture}, {table.name}"
    )


if __name__ == "__main__":
    with reporting():
        main()
