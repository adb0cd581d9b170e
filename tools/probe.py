"""Evaluates the frozen features of a model by classifiers that are cheap to fit.

    python tools/probe.py WEIGHTS -dataset=folder -data_path=FOLDER [-probes=knn,logistic,sgd,few_shot]
    python tools/probe.py WEIGHTS ... -ngpus 2 (or python -m paddle.distributed.launch ... tools/probe.py)

knn          weighted k nearest neighbours, as DINO evaluates: cosine similarity, temperature 0.07
logistic     scikit-learn's logistic regression; its penalty is chosen on held-out training images
sgd          linear classifiers at several learning rates, of which one is chosen likewise
few_shot     logistic regression with 1, 5 and 10 labels per class: mean and standard deviation of
             five draws

WEIGHTS is a run's folder (its best checkpoint is taken), a checkpoint, weights of timm, or an export
of features. Without -dataset and -data_path, the images are those of the run. All images are
prepared as for an evaluation. The table shows accuracies on the validation images in percent, and
two signs of collapsed features: RankMe and the standard deviation of the normalised features. A
warning is printed if they have collapsed.

-output (default: probe.json) stores these numbers with the command, counts and seeds. Exit status:
0; 1 if an image can't be read; 2 for a wrong command line or input.
"""

import argparse
import functools
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, printable, reporting, reporting_memory  # noqa: E402
from launch import launched, launchers, sharing, signals, spawned  # noqa: E402
from launch.files import writing_whole  # noqa: E402

# isort: split
from config import default_values, get_config  # noqa: E402
from inference.probes import PROBES, Probes  # noqa: E402
from main_multi_gpu import as_rank, import_paddle, spawn  # noqa: E402
from settings.configuration import Configuration  # noqa: E402
from settings.parser import Parser, pairs, whole_number  # noqa: E402

DEFAULTS = Probes()


def parsed_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "weights", metavar="WEIGHTS", help="weights that -eval takes, or a run's folder"
    )

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option(
        "dataset",
        metavar="NAME",
        help="kind of the dataset; default: the run's, or what the folder contains",
    )
    option("data_path", metavar="PATH", help="folder or file of the dataset; default: the run's")
    option(
        "cfg", metavar="MODEL", help="the model's YAML file or name, if the weights don't name it"
    )
    option(
        "layer",
        type=int,
        metavar="N",
        help="index of an intermediate layer; negative: from the end",
    )
    text = "pooling of a layer: the mean of its positions, its class token, or both; default: like the classifier"
    option("pool", choices=("avg", "token", "both"), help=text)
    text = "probes to run, separated by commas; default: all"
    option("probes", type=_listed(_probe), default=DEFAULTS.names, metavar="LIST", help=text)
    text = f"numbers of neighbours for knn; default: {','.join(map(str, DEFAULTS.ks))}"
    option("k", type=_listed(whole_number(1)), metavar="LIST", help=text)
    text = "labels per class; default: those of 1,5,10 that each class has"
    option("shots", type=_listed(whole_number(1)), metavar="LIST", help=text)
    text = f"random draws with few labels; default: {DEFAULTS.draws}"
    option("draws", type=whole_number(1), metavar="N", help=text)
    option(
        "seed",
        type=whole_number(0),
        default=DEFAULTS.seed,
        metavar="N",
        help="random seed; default: 0",
    )
    option(
        "batch_size",
        type=whole_number(1),
        default=32,
        metavar="N",
        help="images per batch; default: 32",
    )
    option(
        "workers",
        type=whole_number(0),
        default=2,
        metavar="N",
        help="data loader workers; default: 2",
    )
    text = "number of processes, one per device; -1: all devices; default: 1"
    option("ngpus", type=int, metavar="N", help=text)
    option(
        "output",
        type=Path,
        default=Path("probe.json"),
        metavar="FILE",
        help="the JSON file to create; default: probe.json",
    )
    parser.add_keys()
    arguments = parser.parse_args()
    for flag, probe in (("k", "knn"), ("shots", "few_shot"), ("draws", "few_shot")):
        if getattr(arguments, flag) is not None and probe not in arguments.probes:
            raise InputError(
                f"-{flag} has no effect without the probe {probe}; leave it out, or add {probe} to"
                " -probes"
            )
    if os.path.lexists(arguments.output):
        raise InputError(f"{arguments.output} exists; choose another -output, or remove it")
    folder = arguments.output.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            f"-output {arguments.output}: {folder} isn't a writable folder; choose another"
        )
    return arguments


def _probe(text: str) -> str:
    if text not in PROBES:
        raise argparse.ArgumentTypeError(f"{text!r} isn't one of {', '.join(PROBES)}")
    return text


def _listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: list(dict.fromkeys(kind(part) for part in text.split(",")))


def read(arguments: argparse.Namespace) -> tuple[Any, ...]:
    """Returns (model, probes, configuration, training set, validation set), all checked."""
    from inference.probing import Model, read_sets
    from inference.run_data import split_options
    from loading.label_sets import every_label

    data, options = split_options(
        pairs(arguments.o, default_values()), arguments.dataset, arguments.data_path, "a probe"
    )
    model = Model(
        arguments.weights,
        arguments.cfg,
        options,
        arguments.batch_size,
        arguments.layer,
        arguments.pool,
    )
    config, train, val = read_sets(model, data, arguments.workers)
    probes = Probes(
        names=arguments.probes,
        ks=arguments.k or DEFAULTS.ks,
        shots=arguments.shots or DEFAULTS.shots,
        draws=arguments.draws or DEFAULTS.draws,
        seed=arguments.seed,
    )
    checked = probes.checked(every_label(train.labels), train.classes)
    return model, checked, config, train, val


def answer(arguments: argparse.Namespace, config: Configuration, given: tuple[Any, ...]) -> None:
    """Measures the features, as one rank of all. Rank 0 prints the table and writes -output.

    Args:
        config: how the processes communicate.
        given: what ``read`` returned.
    """
    from tqdm import tqdm

    import utils
    from inference.probing import measure, table
    from training import parallel

    parallel.init(config)
    model, probes, data_config, train, val = given
    images = len(train) + len(val)
    is_first = utils.rank() == 0
    with (
        reporting_memory(lambda: f"lower -batch_size (now {arguments.batch_size})"),
        tqdm(total=images, unit=" images", disable=None if is_first else True) as bar,
    ):
        # The other ranks compute as many images in the same time.
        result = measure(
            model,
            data_config,
            train,
            val,
            probes,
            lambda count: bar.update(min(count * utils.world_size(), images - bar.n)),
        )
    if is_first:
        command = shlex.join(["python", "tools/probe.py", *sys.argv[1:]])
        with writing_whole(arguments.output) as file:
            json.dump({"command": command, **result}, file, indent=1)
        print(table(result))
        if result["warning"]:
            print(f"warning: {result['warning']}", file=sys.stderr)
        print(
            f"{printable(str(arguments.output))}: {len(train)} training images, {len(val)} others"
        )
    signals.end_workers()


def spawned_rank(failed: Any, beats: Any, handed: spawned.SharedObjects) -> None:
    """Runs a rank that this program started."""
    with as_rank(failed, beats):
        arguments, config, given = handed.open()
        answer(arguments, config, given)


def launched_rank(
    arguments: argparse.Namespace, failed: Any, beats: Any, config: Configuration
) -> None:
    """Runs a rank that a launcher started. One rank of each machine reads the data for all."""
    with as_rank(failed, beats):
        given = sharing.read_once(lambda: read(arguments), repr(vars(arguments)).encode())
        launched.wait_for_all()
        answer(arguments, config, given)


def main() -> None:
    arguments = parsed_arguments()
    options = []
    for key, value in pairs(arguments.o, default_values()):
        if key.startswith("DIST."):
            options += [key, value]
    config = get_config(None, ["EVAL", "True", *options])
    if launchers.is_launched():
        if arguments.ngpus is not None:
            raise InputError("-ngpus can't be used with a launcher; leave it out")
        launched.watch(functools.partial(launched_rank, arguments), config)
    import_paddle()
    import utils

    ranks = utils.num_processes(1 if arguments.ngpus is None else arguments.ngpus)
    given = read(arguments)
    if ranks == 1:
        answer(arguments, config, given)
        return
    spawned.prepare_spawn()

    def start(config: Configuration, count: int, failed: Any, beats: Any) -> Any:
        return spawn(spawned_rank, count, failed, beats, arguments, config, given)

    spawned.run(config, ranks, start)


if __name__ == "__main__":
    with reporting():
        main()
