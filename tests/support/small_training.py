"""A small model with its optimizer and its saver, for tests of checkpoints."""

import numpy as np
import paddle
from safetensors.numpy import load_file

import utils
from config import get_config
from datasets import get_datasets
from models import build_model
from training.checkpoint import Saver, storage
from training.optim import LossScaler, ModelEma, build_optimizer
from training.run import Run


class SmallTraining:
    """A model, its average and its optimizer, with a saver of them."""

    def __init__(self, output, options):
        self.config, self.train, _ = get_datasets(
            get_config(None, [*options, "OUTPUT", str(output)])
        )
        utils.seed_everything(0)
        self.model = build_model(self.config)
        self.ema = ModelEma(self.model, 0.5, False)
        self.optimizer = build_optimizer(self.config, self.model)
        self.run = Run(self.config, self.train.classes)
        self.run.begin()
        parts = {"val": self.model, "ema": self.ema.model}
        self.saver = Saver(
            self.config, self.run, parts, self.optimizer, LossScaler(False), self.train
        )

    def update(self, update):
        """Makes one step with a gradient of random weights."""
        self.model(paddle.ones([2, 1, 8, 8])).square().sum().backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.ema.update(self.model, update)

    def held(self):
        """Returns the arrays of the model, its average and its optimizer, by the file of a
        checkpoint.
        """
        return {
            storage.MODEL: {k: v.numpy().copy() for k, v in self.model.state_dict().items()},
            storage.EMA: {k: v.numpy().copy() for k, v in self.ema.model.state_dict().items()},
            storage.OPTIMIZER: {
                f"{name}/moment1_0": self.optimizer.state_dict()[f"{parameter.name}_moment1_0"]
                .numpy()
                .copy()
                for name, parameter in self.model.named_parameters()
            },
        }

    def assert_saved(self, name, held):
        """Asserts that the files of a checkpoint hold the arrays that ``held`` returned at its
        time.
        """
        for file, expected in held.items():
            found = load_file(self.run.checkpoints / name / file)
            for key, value in expected.items():
                value = value if found[key].shape == value.shape else value.T
                same = np.array_equal(found[key], value) or np.array_equal(found[key], value.T)
                assert same, f"{file} {key}"
