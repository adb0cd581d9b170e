"""Whole training runs in this process, for the tests."""

from pathlib import Path

import numpy as np
import paddle
from safetensors.numpy import load_file

import engine
import utils
from config import get_config
from datasets import ArrayDataset, get_datasets
from models import build_model
from optim import freeze
from records import Run


def train(options, output, length=None):
    """Trains as main_worker does, on the first ``length`` images; returns a checksum of this rank's weights."""
    config, dataset, val = get_datasets(get_config(None, [*options, "OUTPUT", str(output)]))
    if length:
        dataset = ArrayDataset(config, "train", dataset.images[:length], dataset.labels[:length], dataset.classes)
    utils.seed_everything(config.SEED)
    model = build_model(config)
    freeze(config, model)
    network = paddle.DataParallel(model) if utils.world_size() > 1 else model
    engine.fit(config, network, dataset, val, Run(config, dataset.classes))
    return float(sum(np.abs(p.numpy().astype(np.float64)).sum() for p in model.state_dict().values()))


def weights(output):
    return load_file(Path(output) / "checkpoints" / "last" / "model.safetensors")
