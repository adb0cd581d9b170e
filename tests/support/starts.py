"""Starts of main_multi_gpu.py in this process, and the errors that they end with."""

from errors import InputError
from main_multi_gpu import read_datasets
from support.training_runs import work
from training.command_line import config_from_arguments

# A small ViT on the folder ``data``.
SMALL_YAML = """
DATA: {DATASET: folder, DATA_PATH: data, BATCH_SIZE: 8, BATCH_SIZE_EVAL: 7, IMAGE_SIZE: 8, NUM_WORKERS: 0}
MODEL: {TYPE: ViT, NAME: small, NUM_CLASSES: auto, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 2, WARMUP_EPOCHS: 0, BASE_LR: 3e-3}
SAVE_FREQ: 1
REPORT: False
"""


def start_error(flags):
    """Trains as main_multi_gpu.py does with these flags; returns its error, or None."""
    try:
        work(*read_datasets(config_from_arguments("main_multi_gpu.py", flags)))
    except InputError as error:
        return str(error)
    return None
