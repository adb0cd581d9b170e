"""``host`` measures the time that a training step takes on the host, in ms, part by part. With
small batches, a GPU waits for it.

The model is so narrow that computing takes next to nothing, and the compiled operators for CPUs are
off. A run on a GPU makes the same calls of Python and of Paddle's operators. The time to launch
kernels isn't included, because nothing is run on a GPU. Each run is a process of its own
(our_host.py).
"""

import argparse

from launch.files import temporary_folder
from tools.benchmarks.measure import Benchmark, ask, measure, option_words, positive
from tools.benchmarks.our_host import WHOLE, WHOLE_WALL

# steps that don't count
WARM_UP = 10

# A ViT of 12 blocks of width 12, which has 152 parameter tensors, and the usual parts of a recipe.
_DEFAULTS = {
    "DATA.IMAGE_SIZE": 32, "MODEL.EMBED_DIM": 12, "MODEL.NUM_HEADS": 3, "MODEL.NUM_CLASSES": 10, "MODEL.DROPPATH": 0.1,
    "TRAIN.GRAD_CLIP": 1.0, "TRAIN.MODEL_EMA": True, "TRAIN.MIXUP_ALPHA": 0.8, "TRAIN.CUTMIX_ALPHA": 1.0,
    "TRAIN.LOSS": "auto", "TRAIN.RANDOM_ERASE_PROB": 0.25,
}  # fmt: skip


def host(arguments: argparse.Namespace) -> None:
    """Measures the host's part of a step.

    Raises:
        InputError: nothing is to be measured; -o names a key that isn't free here, or what
            ``get_config`` refuses.
    """
    positive(arguments, "steps", "batch_size", "threads")
    # The last step also reports.
    steps = WARM_UP + arguments.steps + 1
    fixed = {
        "DATA.DATASET": "synthetic",
        "DATA.BATCH_SIZE": arguments.batch_size,
        "DATA.NUM_WORKERS": 0,
        "DATA.SYNTHETIC_SIZE": arguments.batch_size * steps,
        "REPORT_FREQ": steps,
        "SAVE_FREQ": 0,
        "TRAIN.NUM_EPOCHS": 1,
        "TRAIN.WARMUP_EPOCHS": 0,
        "TRAIN.ACCUM_ITER": 1,
    }
    options = option_words(arguments, fixed, _DEFAULTS)

    def steps_of_a_run() -> dict[str, list[float]]:
        with temporary_folder() as folder:
            request = {
                "cfg": arguments.cfg,
                "options": [*options, "OUTPUT", f"{folder}/run"],
                "warm_up": WARM_UP,
            }
            return ask("our_host.py", request, arguments.threads)

    title = (
        f"{arguments.cfg} of width 12 on 32 pixels, batch {arguments.batch_size},"
        f" {arguments.steps} steps a run:"
        " host time on this CPU, medians of the runs; not run on a GPU"
    )
    units = {WHOLE: "CPU ms", WHOLE_WALL: "ms", "": "CPU ms"}
    measure(Benchmark(title, {"a step": steps_of_a_run}, units), arguments)
