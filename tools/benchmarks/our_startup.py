"""main_single_gpu.py or main_multi_gpu.py, which says how far it has come, for tools/benchmark.py:
it takes the script's name, then its flags.

Whoever reads the lines as they come knows when: "begun", "imported", "data" (the data set is made),
and the run's own.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

IMPORTS = {
    "main_single_gpu": "launch.signals datasets utils models.pretrained training.engine training.optim training.run",
    "main_multi_gpu": "paddle.distributed launch.spawned datasets utils models.pretrained",
}


def main() -> None:
    print("begun", flush=True)
    name = sys.argv.pop(1)
    program = importlib.import_module(name)
    program.import_paddle()
    for module in IMPORTS[name].split():  # what it imports before it has anything to do
        importlib.import_module(module)
    print("imported", flush=True)
    datasets = sys.modules["datasets"]
    get_datasets = datasets.get_datasets

    def noted(*args: object) -> object:
        found = get_datasets(*args)
        print("data", flush=True)
        return found

    vars(datasets)["get_datasets"] = noted
    with importlib.import_module("errors").reporting():
        program.main()


if __name__ == "__main__":
    main()
