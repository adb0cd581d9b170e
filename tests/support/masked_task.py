"""A task without labels, whose network has an encoder and a decoder. Tests copy it to training/."""

from typing import Any

import paddle
from paddle import nn
from PIL import Image

import utils
from loading.transforms import Normalize
from models import build_model
from models.pretraining.network import PretrainingNetwork
from settings.registry import tasks
from training.task import Task


@tasks.register("masked", columns="")
class Masked(Task):
    """Computes an image anew from its features."""

    def __init__(self, config, classes=()):
        super().__init__(config, classes)
        data = config.DATA
        self.normalize = Normalize(data.IMAGENET_MEAN, data.IMAGENET_STD)

    def build_network(self):
        return Network(build_model(self.config))

    def step(self, network, batch, epoch):
        return {"loss": network(self.normalize(batch["pixels"]))}

    def evaluate(self, forward, batches):
        total = paddle.zeros([2], "float64")
        for batch in batches:
            losses = forward(self.normalize(batch["pixels"]))
            total += paddle.stack([losses, paddle.ones_like(losses)]).astype("float64").sum(1)
        loss, count = utils.all_reduce_sum(total).tolist()
        return {"loss": loss / count, "num_samples": int(count)}

    def draw(self, model, dataset, folder):
        Image.new("L", (24, 16)).save(folder / "reconstructions.png")


class Network(PretrainingNetwork):
    def __init__(self, encoder: Any) -> None:
        super().__init__(encoder)
        height, width = encoder.image_size
        self.decoder = nn.Linear(encoder.num_features, encoder.in_channels * height * width)
        self.mask_token = self.create_parameter([1, 1, encoder.num_features])

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        features = self.encoder(images) + self.mask_token.mean()
        return (self.decoder(features) - images.flatten(1)).square().mean(1)
