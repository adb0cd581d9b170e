"""Runs main_single_gpu.py or main_multi_gpu.py, and prints how far it is, for tools/benchmark.py.

The arguments are the script's name and its flags. The lines are "begun", "imported", "data" (the
data set is made), and those of the run. Their times of arrival give the times of the parts.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

IMPORTS = {
    "main_single_gpu": "launch.signals datasets utils models.pretrained"
    " training.engine training.optim training.run",
    "main_multi_gpu": "paddle.distributed launch.spawned datasets utils models.pretrained",
}


def main() -> None:
    print("begun", flush=True)
    name = sys.argv.pop(1)
    program = importlib.import_module(name)
    program.import_paddle()
    # The modules that the run would import before its first work.
    for module in IMPORTS[name].split():
        importlib.import_module(module)
    print("imported", flush=True)
    datasets = sys.modules["datasets"]
    get_datasets = datasets.get_datasets

    def noted(*args: object) -> object:
        result = get_datasets(*args)
        print("data", flush=True)
        return result

    vars(datasets)["get_datasets"] = noted
    with importlib.import_module("errors").reporting():
        program.main()


if __name__ == "__main__":
    main()
