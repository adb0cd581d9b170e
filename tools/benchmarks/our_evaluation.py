"""Runs main_single_gpu.py's evaluation and records the time of each batch, for tools/benchmark.py.

The argument is a request as one word of JSON: ``cfg``, ``options`` and ``weights``. Without
``output``, the weights are made. With ``output``, the answer is one line: ``peak_memory`` of this
process in MB, and ``images_per_s``, a list of one rate. The rate is taken from the beginning of
batch ``warm_up`` to that of the last batch. The run's beats (``progress.beat``) give these times,
because on a CPU a batch is done when its call returns.
"""

import json
import runpy
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from config import get_config
from errors import RunError, reporting
from launch import progress
from models import build_model
from training.window import peak_memory
from weights import save_weights


class Times(list):
    """Replaces the shared array of beats, and records when each batch of an evaluation began."""

    def __setitem__(self, place: int, value: float) -> None:
        # Place 2 of a beat says what the rank does.
        if place == 2 and value == progress.EVALUATING:
            self.append(time.perf_counter())


def main() -> None:
    request = json.loads(sys.argv[1])
    config = get_config(request["cfg"], request["options"])
    if "output" not in request:
        save_weights(build_model(config), Path(request["weights"]))
        print("[]")
        return
    times = Times()
    progress.share_beats(times, 0)
    flags = [
        f"-cfg={request['cfg']}",
        "-eval",
        f"-pretrained={request['weights']}",
        f"-output={request['output']}",
    ]
    sys.argv[1:] = [*flags, "-o", *request["options"]]
    runpy.run_path(f"{sys.path[0]}/main_single_gpu.py")["main"]()
    timed = times[request["warm_up"] :]
    if len(timed) < 2:
        raise RunError(
            f"the evaluation recorded {len(times)} batches,"
            f" expected {request['warm_up'] + 2} or more"
        )
    rate = (len(timed) - 1) * config.DATA.BATCH_SIZE_EVAL / (timed[-1] - timed[0])
    print(json.dumps({"images_per_s": [rate], "peak_memory": peak_memory()}))


if __name__ == "__main__":
    with reporting():
        main()
