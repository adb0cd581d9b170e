"""Trains or evaluates in one process on one device.

python main_single_gpu.py -cfg=configs/vit/vit_digits.yaml -dataset=digits
"""

# Handles signals and broken streams from the first moment on: the other imports take a second.
import launch.startup  # noqa: F401

# isort: split
import os

from errors import InputError, reporting
from launch import launchers
from main_multi_gpu import import_paddle, main_worker, read_datasets
from training.command_line import config_from_arguments


def main():
    """Builds the datasets and runs the worker of main_multi_gpu.py, here as the only process."""
    config = config_from_arguments("main_single_gpu.py")
    if launchers.is_launched() and int(os.environ["PADDLE_TRAINERS_NUM"]) > 1:
        raise InputError(
            "main_single_gpu.py runs one process, but a launcher started several; launch"
            " main_multi_gpu.py"
        )
    if config.NGPUS > 1:
        raise InputError(
            f"main_single_gpu.py runs one process, found NGPUS {config.NGPUS}; run"
            " main_multi_gpu.py"
        )
    import_paddle()
    main_worker(*read_datasets(config))


if __name__ == "__main__":
    with reporting():
        main()
