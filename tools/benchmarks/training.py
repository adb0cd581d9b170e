"""``train`` and ``scale``: whole runs of main_single_gpu.py or main_multi_gpu.py, measured by their
own metrics.jsonl.

``train``: images/s, tuned (TUNE_CPU) against Paddle's defaults, or against timm's training step. A
report is of STEPS steps. The first WARM_UP reports of each run are its warm-up, of timm's the first
one: ours gives memory back there. A run's figure is the median of the others. timm's step is timed
alike: uint8 images normalised, forward, cross entropy, backward, AdamW. With ``-amp`` either side
runs in bfloat16, too. A run's peak memory is that of its largest process.

``scale``: seconds per epoch and images/s on several numbers of processes at the same batch per
process. Efficiency is the rate over that of as many single processes (the first number given). The
first epoch is the warm-up. Images are the digits, random ones in MNIST's files where the
configuration asks for (Fashion-)MNIST, or synthetic.
"""

import argparse
import statistics
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from config import find_config, get_config, named_keys
from errors import InputError
from launch.files import temporary_folder
from settings.options import is_given, pair
from tools.benchmarks.measure import (
    MEMORY,
    ROOT,
    Benchmark,
    Ratio,
    Run,
    ask,
    each,
    measure,
    option_words,
    positive,
    run,
    timm_versions,
    train_records,
    words,
)
from tools.check_parity import reference

STEPS = 2  # per report
WARM_UP = 3  # reports
_RATE = "training"
_HALF = ("ours, bfloat16", "timm, bfloat16")
# What timm's step has not: the recipe, and what it asks of the model and the loader. Defaults are
# plain.
_RECIPE = [
    "TRAIN",
    "MODEL.DROPPATH",
    "MODEL.DROPPATH_SHAPE",
    "MODEL.DROPOUT",
    "DATA.MULTI_SCALE",
    "DATA.GLOBAL_BATCH",
]


def train(arguments: argparse.Namespace) -> None:
    """Measures training steps against Paddle's defaults or timm.

    Raises:
        InputError: timm isn't there, or keys aren't free here.
    """
    if arguments.amp and "timm" not in arguments.against:
        raise InputError(
            "-amp: Paddle's own settings have no bfloat16 on a CPU; give --against timm, or leave it out"
        )
    positive(arguments, "batch_size", "reports", "threads", "processes")
    batch = arguments.batch_size
    processes = arguments.processes
    title = f"{arguments.cfg}, batch {batch} per process, {_counts_text(processes, _threads(arguments))}, float32"
    title += " and bfloat16" if arguments.amp else ""
    with temporary_folder() as folder:
        if "timm" in arguments.against:
            peers = timm_versions(arguments.timm_python)
            kinds = training_sides(arguments, folder)
            title += f"; timm: eager, batch {batch}, {_counts_text(1, arguments.threads)}"
        else:
            options = option_words(arguments, _fixed_options(arguments))
            peers = {}
            kinds = {
                name: _ours(arguments, options, name == "tuned") for name in ("tuned", "default")
            }
            title += ", default: Paddle's own settings"
        compared = each(_RATE, list(kinds)[:1], list(kinds)[1:])
        if arguments.amp:
            compared = [
                Ratio(_RATE, *pair) for pair in (("ours", "timm"), (_HALF[0], "ours"), _HALF)
            ]
        measure(
            Benchmark(title, kinds, {_RATE: "images/s", MEMORY: "MB"}, compared, peers), arguments
        )


def training_sides(arguments: argparse.Namespace, folder: Path) -> dict[str, Run]:
    """Returns the runs of "ours" and "timm": the same model, batch and optimizer, neither with the
    model's recipe. With ``amp`` the same in bfloat16 follow.

    Args:
        folder: where a YAML file of the model without its recipe is written.
    """
    model = folder / f"{Path(arguments.cfg).stem}.yaml"
    model.write_text(
        yaml.safe_dump({"BASE": str(find_config(arguments.cfg).resolve()), "WITHOUT": _RECIPE})
    )
    arguments = argparse.Namespace(**vars(arguments) | {"cfg": str(model)})
    options = option_words(arguments, _fixed_options(arguments))
    request = timm_request(arguments.cfg, options) | {"measure": "train", "steps": STEPS}
    request |= {
        "batch_size": arguments.batch_size,
        "reports": arguments.reports,
        "threads": arguments.threads,
    }
    request |= {"weight_decay": get_config(arguments.cfg, options).TRAIN.WEIGHT_DECAY}

    def theirs(amp: bool) -> dict[str, list[float]]:
        found = ask(
            "timm_peer.py", request | {"amp": amp}, arguments.threads, arguments.timm_python
        )
        return {_RATE: [statistics.median(found["images_per_s"])], MEMORY: [found["peak_memory"]]}

    sides: dict[str, Run] = {"ours": _ours(arguments, options), "timm": lambda: theirs(False)}
    if arguments.amp:
        halved = [*options, *words({"AMP": True})]
        sides |= zip(_HALF, (_ours(arguments, halved), lambda: theirs(True)), strict=True)
    return sides


def _fixed_options(arguments: argparse.Namespace) -> dict[str, Any]:
    batch = arguments.batch_size
    steps = STEPS * (arguments.reports + WARM_UP)
    fixed: dict[str, Any] = {
        "DATA.DATASET": "synthetic",
        "DATA.BATCH_SIZE": batch,
        "REPORT_FREQ": STEPS,
    }
    fixed |= {
        "DATA.SYNTHETIC_SIZE": batch * arguments.processes * steps,
        "TUNE_CPU": True,
        "AMP": False,
    }
    return fixed | {"TRAIN.NUM_EPOCHS": 1, "TRAIN.WARMUP_EPOCHS": 0, "TRAIN.ACCUM_ITER": 1}


def _ours(arguments: argparse.Namespace, options: list[str], tuned: bool = True) -> Run:
    def one_run() -> dict[str, list[float]]:
        chosen = [*options, *words({"TUNE_CPU": tuned})]
        threads = _threads(arguments) if tuned else None
        with temporary_folder() as folder:
            records = _run(arguments.cfg, arguments.processes, threads, chosen, folder)[WARM_UP:]
        rate = statistics.median(record["images_per_s"] for record in records)
        return {_RATE: [rate], MEMORY: [records[-1]["peak_memory"]]}

    return one_run


def _threads(arguments: argparse.Namespace) -> int:
    return max(1, arguments.threads // arguments.processes)


def scale(arguments: argparse.Namespace) -> None:
    """Measures epochs on several numbers of processes.

    Raises:
        InputError: fewer than two different numbers, or keys that aren't free here.
    """
    positive(arguments, "batch_size", "epochs", "threads", "processes", "steps")
    numbers = list(dict.fromkeys(arguments.processes))
    if len(numbers) < 2:
        raise InputError(f"--processes {numbers[0]}: expected two numbers or more, such as 1 2")
    given = get_config(arguments.cfg, arguments.o)
    batch = arguments.batch_size or given.DATA.BATCH_SIZE
    images = batch * max(numbers) * arguments.steps
    defaults = {}
    small = given.DATA.DATASET in ("mnist", "fashion_mnist") and not is_given(
        given, "DATA.DATA_PATH"
    )
    if "DATA.DATASET" not in named_keys(arguments.o):
        defaults["DATA.DATASET"] = (
            given.DATA.DATASET if small or given.DATA.DATASET == "digits" else "synthetic"
        )
    if defaults.get("DATA.DATASET", given.DATA.DATASET) == "synthetic":
        defaults["DATA.SYNTHETIC_SIZE"] = images
    fixed = {
        "DATA.BATCH_SIZE": batch,
        "TRAIN.NUM_EPOCHS": arguments.epochs + 1,
        "TRAIN.WARMUP_EPOCHS": 0,
    }
    options = option_words(
        arguments, fixed | {"VALIDATE_FREQ": arguments.epochs + 1, "SAVE_FREQ": 0}, defaults
    )

    def epochs(processes: int) -> dict[str, list[float]]:
        with temporary_folder() as folder:
            data = words({"DATA.DATA_PATH": str(folder)}) if small else []
            if small:
                write_mnist(folder, images)
            records = _run(arguments.cfg, processes, arguments.threads, [*options, *data], folder)
        counts, seconds = epoch_sums(records)
        return {
            "an epoch": [statistics.median(seconds)],
            _RATE: [statistics.median(n / s for n, s in zip(counts, seconds, strict=True))],
        }

    names = {f"{n} process{'es' * (n > 1)}": n for n in numbers}
    kinds = {name: lambda n=n: epochs(n) for name, n in names.items()}
    title = f"{arguments.cfg}, batch {batch} per process, threads per process {arguments.threads}"
    title += f", {arguments.epochs} epochs a run after the first"
    first = next(iter(names))

    rates = [Ratio(_RATE, name, first) for name in list(names)[1:]]
    efficiency = [
        Ratio(_RATE, r.of, first, names[first] / names[r.of], "efficiency") for r in rates
    ]
    units = {"an epoch": "s", _RATE: "images/s"}
    measure(Benchmark(title, kinds, units, rates + efficiency), arguments)


def epoch_sums(records: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Returns (samples, seconds of training) of each epoch after the first, from training reports."""
    epochs = sorted({record["epoch"] for record in records})[1:]
    by_epoch = [[record for record in records if record["epoch"] == epoch] for epoch in epochs]
    counts = [sum(record["samples"] for record in own) for own in by_epoch]
    return counts, [
        sum(record["samples"] / record["images_per_s"] for record in own) for own in by_epoch
    ]


def write_mnist(folder: Path, images: int) -> None:
    """Writes random images of 28 x 28 in the files of MNIST and Fashion-MNIST, and ten to validate
    on.
    """
    rng = np.random.default_rng(0)
    for part, count in (("train", images), ("t10k", 10)):
        pixels = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            head = struct.pack(f">2xBB{array.ndim}I", 8, array.ndim, *array.shape)  # 8: bytes
            (folder / f"{part}-{name}-ubyte").write_bytes(head + array.tobytes())


def timm_request(cfg: str, options: list[str]) -> dict[str, Any]:
    """Returns what timm's side needs for the same model and images: ``model``, ``options``,
    ``image``, mean and std.
    """
    config = get_config(cfg, options)
    name, model_options = reference(config.MODEL.NAME)
    channels = config.DATA.IMAGE_CHANNELS
    size = pair(config.DATA.IMAGE_SIZE)
    model_options = model_options | {"num_classes": config.MODEL.NUM_CLASSES, "in_chans": channels}
    found = {"model": name, "options": model_options, "image": [channels, *size]}
    return found | {"mean": config.DATA.IMAGENET_MEAN, "std": config.DATA.IMAGENET_STD}


def _run(
    cfg: str, processes: int, threads: int | None, options: list[str], folder: Path
) -> list[dict[str, Any]]:
    script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
    flags = [
        f"-cfg={cfg}",
        f"-output={folder / 'run'}",
        *([] if processes == 1 else [f"-ngpus={processes}"]),
    ]
    run([sys.executable, ROOT / script, *flags, "-o", *options], threads, CUDA_VISIBLE_DEVICES="")
    return train_records(folder / "run")


def _counts_text(processes: int, threads: int) -> str:
    return f"{processes} process{'es' * (processes > 1)} of {threads} thread{'s' * (threads > 1)}"
