"""Shows the costs of a model, in total and by layer: parameters, multiply-adds, activations, memory.

    python tools/model_info.py vit_base_patch16_224
    python tools/model_info.py NAME [-image_size N] [-batch_size N] [-layers] [-json] [-o KEY VALUE ...]
    python tools/model_info.py NAME -ranks 8 [-amp] [-recompute]

NAME is a shipped model, or a YAML file, such as a run's config.yaml. Multiply-adds and activations
are those of one image, counted as fvcore and timm count them (models/costs.py). Memory is measured
for a batch. One process evaluates the batch twice. Another one trains on it twice, in float32, with
AdamW. The result is the process's peak minus its memory before the model was built: resident memory
(VmHWM) on a CPU, Paddle's allocations on a GPU.

With -ranks, memory isn't measured. It is computed for each part of the memory and each stage of
sharding, for that many processes. The tool also shows how many GPUs of 24, 40 and 80 GB a training
needs (models/memory.py).
"""

import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, RunError, reporting, reporting_memory  # noqa: E402
from launch.spawned import without_current_folder  # noqa: E402
from settings.parser import Parser  # noqa: E402

# How many times a process holds tensors of the weights' size. An evaluation has the weights.
# Training also has their gradients and AdamW's two moments.
COPIES = {"evaluation": 1, "training": 4}
# The most images of a batch.
MOST_IMAGES = 100_000
MIB = 1 << 20
# The memory of common GPUs, in GiB.
GPUS = (24, 40, 80)
# The share of a GPU's memory that a plan uses. Libraries, temporary buffers and gaps take the rest.
USABLE = 0.9
# The numbers of GPUs that are tried: 1 to 1,024.
COUNTS = tuple(1 << power for power in range(11))
MOST_RANKS = 100_000


def peak(name: str, options: list[str], batch_size: int, training: bool) -> int:
    """Returns the peak of this process's memory for a batch, in bytes. It runs in a fresh process.

    Raises:
        RunError: the machine has too little memory.
    """
    import numpy as np
    import paddle
    from paddle.nn import functional as F

    from config import get_config
    from models import build_model
    from ops.device import tune_cpu
    from utils import num_gpus, process_memory, within_memory

    config = get_config(name, options)
    before = process_memory("VmRSS")
    with (
        reporting_memory(lambda: "lower -batch_size or -image_size"),
        within_memory(),
    ):
        model = build_model(config)
        # If this came earlier, the allocator would keep memory that the weights' initialisation
        # frees.
        tune_cpu(1)
        if training:
            model.train()
        else:
            model.eval()
        optimizer = paddle.optimizer.AdamW(1e-6, parameters=model.parameters())
        shape = (batch_size, model.in_channels, *model.image_size)
        classes = model.num_classes
        images = paddle.to_tensor(np.random.default_rng(0).standard_normal(shape, np.float32))
        labels = paddle.zeros([len(images)], "int64")
        # Twice, because AdamW's moments exist only after the first update.
        for _ in range(2):
            if training:
                logits = model(images)
                loss = F.cross_entropy(logits, labels) if classes else logits.mean()
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
            else:
                with paddle.no_grad():
                    model(images)
        if num_gpus():
            return paddle.device.cuda.max_memory_allocated()
        return process_memory("VmHWM") - before


def memory(name: str, options: list[str], batch_size: int, parameters: int) -> dict[str, Any]:
    """Returns the measured bytes for "evaluation" and "training", or a text why there are none."""
    from utils import free_memory

    results: dict[str, Any] = {}
    for kind, copies in COPIES.items():
        least = 4 * copies * parameters
        free = free_memory()
        if least > free:
            results[kind] = (
                f"not measured: it needs at least {least // MIB:,} MiB, but {free // MIB:,} MiB"
                " are free"
            )
            continue
        with without_current_folder():
            pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            measured = pool.submit(peak, name, options, batch_size, kind == "training")
        with pool:
            try:
                results[kind] = measured.result()
            except RunError as error:
                results[kind] = f"not measured: {error}"
            except BrokenProcessPool:
                results[kind] = (
                    f"not measured: the process was ended; {free // MIB:,} MiB were free"
                )
    return results


def plan(name: str, options: list[str], batch_size: int, ranks: int) -> list[dict[str, Any]]:
    """Returns, for each stage of sharding, the bytes of each part of a process's memory, and how
    many GPUs of each size a training needs.

    Raises:
        InputError: there are more ranks than parameters.
    """
    from config import get_config
    from models.memory import TrainingMemory

    planned = TrainingMemory(get_config(name, options))
    if ranks > len(planned.sizes):
        raise InputError(
            f"-ranks is {ranks}, but {name} only has {len(planned.sizes)} parameters to share;"
            " lower -ranks"
        )
    stages = []
    for stage in planned.stages:
        parts = planned.per_process(stage, ranks, batch_size)._asdict()
        needed = {}
        for size in GPUS:
            usable = USABLE * size * 1024 * MIB
            needed[f"{size} GB"] = None
            for count in COUNTS:
                if count > len(planned.sizes):
                    break
                if sum(planned.per_process(stage, count, batch_size)) <= usable:
                    needed[f"{size} GB"] = count
                    break
        stages.append({"stage": stage, **parts, "sum": sum(parts.values()), "gpus": needed})
    return stages


def show_plan(described: dict[str, Any]) -> None:
    """Prints a row for each stage of sharding."""
    names = ("weights", "copies", "gradients", "moments", "activations", "sum")
    rows: list[tuple[str, ...]] = [("sharding", *names, *(f"GPUs, {size} GB" for size in GPUS))]
    for stage in described["plan"]:
        sharding = f"stage {stage['stage']}" if stage["stage"] else "none"
        parts = [f"{stage[name] / MIB:,.0f}" for name in names]
        rows.append((sharding, *parts, *map(_count, stage["gpus"].values())))
    print()
    print(
        f"training on {described['ranks']} processes,"
        f" MiB of each for a batch of {described['batch_size']}; computed, not measured"
    )
    _print_columns(rows, left=1)
    print(
        f"GPUs: the lowest number, of 1, 2, 4 ... {COUNTS[-1]:,}, that can train it with this"
        " batch on each; none: more"
    )
    print(f"TRAIN.MODEL_EMA adds {4 * described['parameters'] / MIB:,.0f} MiB to each process")


def _count(gpus: int | None) -> str:
    return "none" if gpus is None else f"{gpus:,}"


def describe(
    name: str,
    image_size: str | None,
    batch_size: int,
    ranks: int | None = None,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the output of -json.

    Args:
        ranks: compute the memory of a training on this many processes; None: measure that of one.
        words: more keys of the configuration and their values.
    """
    import paddle

    from config import get_config
    from models.costs import cost

    options = list(words)
    if image_size is not None:
        options = ["DATA.IMAGE_SIZE", image_size, *options]
    config = get_config(name, options)
    costs = cost(config)
    described = {
        "name": config.MODEL.NAME,
        "images": costs.images,
        "parameters": costs.parameters,
        "macs": costs.macs,
        "activations": costs.activations,
        "batch_size": batch_size,
        "device": paddle.get_device(),
    }
    if ranks is None:
        described["memory"] = memory(name, options, batch_size, costs.parameters)
    else:
        described |= {"ranks": ranks, "plan": plan(name, options, batch_size, ranks)}
    return described | {"layers": [layer._asdict() for layer in costs.layers]}


def show(described: dict[str, Any], layers: bool) -> None:
    """Prints the result of ``describe``.

    Args:
        layers: print the table of layers, too.
    """
    weights = 4 * described["parameters"]
    images = " x ".join(map(str, described["images"]))
    rows = [
        ("model", f"{described['name']}, images of {images}"),
        ("parameters", f"{described['parameters']:,}"),
        ("multiply-adds", f"{_with_unit(described['macs'])} per image"),
        ("activations", f"{_with_unit(described['activations'])} per image"),
    ]
    parts = {"evaluation": "weights", "training": "weights, gradients, AdamW's two moments"}
    for kind, bytes_ in described.get("memory", {}).items():
        text = bytes_
        if not isinstance(bytes_, str):
            copies = f"{COPIES[kind] * weights // MIB:,} MiB are {parts[kind]}"
            text = f"{bytes_ // MIB:,} MiB, of which {copies}"
        rows.append((f"memory, {kind}", text))
    if "memory" in described:
        device = described["device"]
        batch = f"a batch of {described['batch_size']} in float32 on this {device}"
        rows.append(("", f"measured for {batch}"))
    for what, text in rows:
        print(f"{what:20}{text}")
    if "plan" in described:
        show_plan(described)
    if layers:
        print()
        print_table(described)


def _with_unit(count: int) -> str:
    return f"{count / 1e9:,.2f} G" if count >= 1e9 else f"{count / 1e6:,.2f} M"


def print_table(described: dict[str, Any]) -> None:
    """Prints a row for each layer, and their sums."""
    rows = [("layer", "kind", "output", "parameters", "MACs (M)", "%")]
    for layer in described["layers"]:
        share = f"{100 * layer['macs'] / described['macs']:.1f}"
        numbers = (f"{layer['parameters']:,}", f"{layer['macs'] / 1e6:,.2f}", share)
        output = " x ".join(map(str, layer["output"]))
        rows.append((layer["name"] or "(model)", layer["kind"], output, *numbers))
    totals = (f"{described['parameters']:,}", f"{described['macs'] / 1e6:,.2f}", "100.0")
    rows.append(("all", "", "", *totals))
    _print_columns(rows, left=3)


def _print_columns(rows: Sequence[tuple[str, ...]], left: int) -> None:
    """Prints a table. The first ``left`` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:{'<' if place < left else '>'}{widths[place]}}"
            for place, cell in enumerate(row)
        ]
        print("  ".join(cells))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("name", metavar="NAME", help="a shipped model, or a YAML file")
    parser.add_argument(
        "-image_size", "--image_size", help="pixels: a side, or 224x160 (default: the model's)"
    )
    parser.add_argument(
        "-batch_size",
        "--batch_size",
        type=int,
        default=1,
        help="batch size for the memory (default: 1)",
    )
    parser.add_argument(
        "-layers", "--layers", action="store_true", help="also print a table of the layers"
    )
    parser.add_argument(
        "-json", "--json", action="store_true", help="one JSON object, with the layers"
    )
    parser.add_argument(
        "-ranks",
        "--ranks",
        type=int,
        metavar="N",
        help="compute the memory of N training processes",
    )
    parser.add_argument("-amp", "--amp", action="store_true", help="with -ranks: in bfloat16 (AMP)")
    parser.add_argument(
        "-recompute", "--recompute", action="store_true", help="with -ranks: MODEL.RECOMPUTE"
    )
    text = "set any keys, such as MODEL.MERGE_TOKENS 13; KEY=VALUE works as well"
    parser.add_argument(
        "-o", "--o", nargs="+", action="extend", default=[], metavar="KEY VALUE", help=text
    )
    arguments = parser.parse_args()
    if arguments.ranks is None and (arguments.amp or arguments.recompute):
        raise InputError("-amp and -recompute need -ranks N")
    if arguments.ranks is not None and not 1 <= arguments.ranks <= MOST_RANKS:
        raise InputError(f"-ranks is {arguments.ranks}, expected 1 to {MOST_RANKS} processes")
    if not 1 <= arguments.batch_size <= MOST_IMAGES:
        raise InputError(
            f"-batch_size is {arguments.batch_size}, expected 1 to {MOST_IMAGES} images"
        )
    words = list(arguments.o)
    if arguments.amp:
        words += ["AMP", "True"]
    if arguments.recompute:
        words += ["MODEL.RECOMPUTE", "True"]
    described = describe(
        arguments.name, arguments.image_size, arguments.batch_size, arguments.ranks, words
    )
    if arguments.json:
        print(json.dumps(described))
    else:
        show(described, arguments.layers)


if __name__ == "__main__":
    with reporting():
        main()
