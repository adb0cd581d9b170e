"""``train`` and ``scale`` measure whole runs of main_single_gpu.py or main_multi_gpu.py, by their
metrics.jsonl.

``train`` compares the images/s of tuned training (TUNE_CPU) with Paddle's defaults, or with timm's
training step. Each report covers STEPS steps. The first WARM_UP reports of a run don't count,
because ours returns memory to the system meanwhile. The first report of timm doesn't count, either.
A run's figure is the median of the other reports. timm's step has the same parts: it normalises
uint8 images, computes the forward pass, cross entropy and the backward pass, and updates by AdamW.
With ``-amp`` both sides also run in bfloat16. A run's peak memory is that of its largest process.
timm doesn't pre-train: beside a configuration of TASK mae the step is that of ``ViTMAEForPreTraining``
of the library transformers.

``scale`` measures seconds per epoch and images/s on several numbers of processes, with the same
batch per process. The efficiency is the rate over that of the first number of processes, scaled up
to as many processes. The first epoch doesn't count. The images are the digits, or random ones in
MNIST's files if the configuration names MNIST or Fashion-MNIST, or else synthetic.
"""

import argparse
import functools
import statistics
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from config import find_config, get_config, named_keys
from errors import InputError, counted
from launch.files import temporary_folder
from settings.configuration import Configuration, is_given, pair
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

# steps of a report
STEPS = 2
# reports that don't count
WARM_UP = 3
RATE = "training"
_HALF = ("ours, bfloat16", "timm, bfloat16")
# Keys of the recipe, which get their plain defaults: timm's step has nothing of the kind.
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
            "-amp: Paddle's own settings have no bfloat16 on a CPU;"
            " give --against timm, or leave it out"
        )
    positive(arguments, "batch_size", "reports", "threads", "processes")
    batch = arguments.batch_size
    processes = arguments.processes
    counts = _counts_text(processes, _threads(arguments))
    title = f"{arguments.cfg}, batch {batch} per process, {counts}, float32"
    if arguments.amp:
        title += " and bfloat16"
    with temporary_folder() as folder:
        if "timm" in arguments.against:
            peers = timm_versions(arguments.timm_python)
            kinds = training_sides(arguments, folder)
            title += f"; timm: eager, batch {batch}, {_counts_text(1, arguments.threads)}"
        else:
            options = option_words(arguments, fixed_options(arguments))
            peers = {}
            kinds = {
                name: our_training(arguments, options, name == "tuned")
                for name in ("tuned", "default")
            }
            title += ", default: Paddle's own settings"
        first, *others = kinds
        compared = each(RATE, [first], others)
        if arguments.amp:
            ours_in_half, theirs_in_half = _HALF
            compared = [
                Ratio(RATE, "ours", "timm"),
                Ratio(RATE, ours_in_half, "ours"),
                Ratio(RATE, ours_in_half, theirs_in_half),
            ]
        units = {RATE: "images/s", MEMORY: "MB"}
        measure(Benchmark(title, kinds, units, compared, peers), arguments)


def training_sides(arguments: argparse.Namespace, folder: Path) -> dict[str, Run]:
    """Returns the runs of "ours" and "timm", with the same model, batch and optimizer, and without
    the model's recipe. With ``amp``, the same runs in bfloat16 follow.

    Args:
        folder: where a YAML file of the model without its recipe is written.
    """
    plain = without_recipe(arguments.cfg, folder)
    arguments = argparse.Namespace(**vars(arguments) | {"cfg": plain})
    options = option_words(arguments, fixed_options(arguments))
    request = timm_request(arguments.cfg, options) | {
        "measure": "train",
        "steps": STEPS,
        "batch_size": arguments.batch_size,
        "reports": arguments.reports,
        "threads": arguments.threads,
        "weight_decay": get_config(arguments.cfg, options).TRAIN.WEIGHT_DECAY,
    }

    def theirs(amp: bool) -> dict[str, list[float]]:
        answer = ask(
            "timm_peer.py", request | {"amp": amp}, arguments.threads, arguments.timm_python
        )
        rate = statistics.median(answer["images_per_s"])
        return {RATE: [rate], MEMORY: [answer["peak_memory"]]}

    sides: dict[str, Run] = {
        "ours": our_training(arguments, options),
        "timm": lambda: theirs(False),
    }
    if arguments.amp:
        ours_in_half, theirs_in_half = _HALF
        sides[ours_in_half] = our_training(arguments, [*options, *words({"AMP": True})])
        sides[theirs_in_half] = lambda: theirs(True)
    return sides


def without_recipe(cfg: str, folder: Path) -> str:
    """Writes a YAML file of a model without its recipe into a folder, and returns its path."""
    file = folder / f"{Path(cfg).stem}.yaml"
    file.write_text(yaml.safe_dump({"BASE": str(find_config(cfg).resolve()), "WITHOUT": _RECIPE}))
    return str(file)


def fixed_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the keys that the benchmark sets: a run of as many steps as the reports need."""
    batch = arguments.batch_size
    steps = STEPS * (arguments.reports + WARM_UP)
    return {
        "DATA.DATASET": "synthetic",
        "DATA.BATCH_SIZE": batch,
        "DATA.SYNTHETIC_SIZE": batch * arguments.processes * steps,
        "REPORT_FREQ": STEPS,
        "TUNE_CPU": True,
        "AMP": False,
        "TRAIN.NUM_EPOCHS": 1,
        "TRAIN.WARMUP_EPOCHS": 0,
        "TRAIN.ACCUM_ITER": 1,
    }


def our_training(arguments: argparse.Namespace, options: list[str], tuned: bool = True) -> Run:
    """Returns the function that makes one of our runs.

    Args:
        options: the words of ``-o``.
        tuned: whether TUNE_CPU is set. Otherwise Paddle chooses the number of threads.
    """

    def one_run() -> dict[str, list[float]]:
        chosen = [*options, *words({"TUNE_CPU": tuned})]
        threads = _threads(arguments) if tuned else None
        with temporary_folder() as folder:
            records = _run(arguments.cfg, arguments.processes, threads, chosen, folder)[WARM_UP:]
        rate = statistics.median(record["images_per_s"] for record in records)
        return {RATE: [rate], MEMORY: [records[-1]["peak_memory"]]}

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
    dataset = given.DATA.DATASET
    batch = arguments.batch_size or given.DATA.BATCH_SIZE
    images = batch * max(numbers) * arguments.steps
    has_no_path = not is_given(given, "DATA.DATA_PATH")
    makes_mnist = dataset in ("mnist", "fashion_mnist") and has_no_path
    defaults = {}
    if "DATA.DATASET" not in named_keys(arguments.o):
        if not makes_mnist and dataset != "digits":
            dataset = "synthetic"
        defaults["DATA.DATASET"] = dataset
    if dataset == "synthetic":
        defaults["DATA.SYNTHETIC_SIZE"] = images
    fixed = {
        "DATA.BATCH_SIZE": batch,
        "TRAIN.NUM_EPOCHS": arguments.epochs + 1,
        "TRAIN.WARMUP_EPOCHS": 0,
        "VALIDATE_FREQ": arguments.epochs + 1,
        "SAVE_FREQ": 0,
    }
    options = option_words(arguments, fixed, defaults)

    def epochs(processes: int) -> dict[str, list[float]]:
        with temporary_folder() as folder:
            run_options = list(options)
            if makes_mnist:
                write_mnist(folder, images)
                run_options += words({"DATA.DATA_PATH": str(folder)})
            records = _run(arguments.cfg, processes, arguments.threads, run_options, folder)
        counts, seconds = epoch_sums(records)
        rates = [n / s for n, s in zip(counts, seconds, strict=True)]
        return {"an epoch": [statistics.median(seconds)], RATE: [statistics.median(rates)]}

    names = {counted(number, "process", "processes"): number for number in numbers}
    kinds: dict[str, Run] = {
        name: functools.partial(epochs, number) for name, number in names.items()
    }
    title = (
        f"{arguments.cfg}, batch {batch} per process, threads per process {arguments.threads},"
        f" {arguments.epochs} epochs a run after the first"
    )
    first, *others = names
    rates = [Ratio(RATE, name, first) for name in others]
    efficiency = [
        Ratio(RATE, name, first, factor=names[first] / names[name], name="efficiency")
        for name in others
    ]
    units = {"an epoch": "s", RATE: "images/s"}
    measure(Benchmark(title, kinds, units, rates + efficiency), arguments)


def epoch_sums(records: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Returns (samples, seconds of training) for each epoch but the first."""
    counts = []
    seconds = []
    for epoch in sorted({record["epoch"] for record in records})[1:]:
        reports = [record for record in records if record["epoch"] == epoch]
        counts.append(sum(report["samples"] for report in reports))
        seconds.append(sum(report["samples"] / report["images_per_s"] for report in reports))
    return counts, seconds


def write_mnist(folder: Path, images: int) -> None:
    """Writes random images of 28 x 28 in the files of MNIST and Fashion-MNIST, and ten images for
    the validation.
    """
    rng = np.random.default_rng(0)
    for part, count in (("train", images), ("t10k", 10)):
        pixels = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            # 8 is IDX's code for unsigned bytes.
            head = struct.pack(f">2xBB{array.ndim}I", 8, array.ndim, *array.shape)
            (folder / f"{part}-{name}-ubyte").write_bytes(head + array.tobytes())


def timm_request(cfg: str, options: list[str]) -> dict[str, Any]:
    """Returns the request to timm's side for the same model and images: ``model``, ``options``,
    ``image``, ``mean`` and ``std``. For TASK mae the options are those of ``ViTMAEConfig``.
    """
    config = get_config(cfg, options)
    if config.TASK == "mae":
        name, model_options = "mae", _mae_options(config)
    else:
        name, model_options = reference(config.MODEL.NAME)
    channels = config.DATA.IMAGE_CHANNELS
    size = pair(config.DATA.IMAGE_SIZE)
    if name != "mae":
        outputs = {"num_classes": config.MODEL.NUM_CLASSES, "in_chans": channels}
        model_options = model_options | outputs
    return {
        "model": name,
        "options": model_options,
        "image": [channels, *size],
        "mean": config.DATA.IMAGENET_MEAN,
        "std": config.DATA.IMAGENET_STD,
    }


def _mae_options(config: Configuration) -> dict[str, Any]:
    """Returns the keys of a configuration of TASK mae as those of transformers' ``ViTMAEConfig``."""
    from training.mae import DECODER_DEPTH, DECODER_HEADS, DECODER_WIDTH, MASK_RATIO

    model = config.MODEL
    method = config.METHOD
    width = method.DECODER_WIDTH or DECODER_WIDTH
    return {
        "hidden_size": model.EMBED_DIM,
        "num_hidden_layers": model.DEPTH,
        "num_attention_heads": model.NUM_HEADS,
        "intermediate_size": int(model.EMBED_DIM * model.MLP_RATIO),
        "image_size": list(pair(config.DATA.IMAGE_SIZE)),
        "patch_size": model.PATCH_SIZE,
        "num_channels": config.DATA.IMAGE_CHANNELS,
        "decoder_hidden_size": width,
        "decoder_num_hidden_layers": method.DECODER_DEPTH or DECODER_DEPTH,
        "decoder_num_attention_heads": method.DECODER_HEADS or DECODER_HEADS,
        "decoder_intermediate_size": 4 * width,
        "mask_ratio": method.MASK_RATIO or MASK_RATIO,
        "norm_pix_loss": method.NORM_TARGET,
    }


def _run(
    cfg: str, processes: int, threads: int | None, options: list[str], folder: Path
) -> list[dict[str, Any]]:
    script = "main_single_gpu.py"
    flags = [f"-cfg={cfg}", f"-output={folder / 'run'}"]
    if processes > 1:
        script = "main_multi_gpu.py"
        flags.append(f"-ngpus={processes}")
    run([sys.executable, ROOT / script, *flags, "-o", *options], threads, CUDA_VISIBLE_DEVICES="")
    return train_records(folder / "run")


def _counts_text(processes: int, threads: int) -> str:
    thread_count = counted(threads, "thread")
    return f"{counted(processes, 'process', 'processes')} of {thread_count}"
