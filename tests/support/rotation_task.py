"""A task whose outputs are classes of its own: by how much an image is turned. Tests copy it to
training/.
"""

import paddle
from paddle.nn import functional as F

import utils
from loading.transforms import Normalize
from settings.registry import tasks
from training.task import Task


@tasks.register("rotation", metrics="acc1", columns="", classes="0 90 180 270")
class Rotation(Task):
    """Finds out by how many quarters an image was turned. The images of a batch take turns."""

    best = "acc1"

    def __init__(self, config, classes=()):
        super().__init__(config, classes)
        data = config.DATA
        self.normalize = Normalize(data.IMAGENET_MEAN, data.IMAGENET_STD)

    def _turned(self, pixels):
        turns = paddle.arange(len(pixels)) % 4
        images = self.normalize(pixels)
        by_turn = paddle.stack([paddle.rot90(images, turn, [2, 3]) for turn in range(4)], 1)
        return by_turn[paddle.arange(len(pixels)), turns], turns

    def step(self, network, batch, epoch):
        images, turns = self._turned(batch["pixels"])
        return {"loss": F.cross_entropy(network(images), turns, reduction="none")}

    def evaluate(self, forward, batches):
        total = paddle.zeros([3], "float64")
        for batch in batches:
            images, turns = self._turned(batch["pixels"])
            logits = forward(images)
            losses = F.cross_entropy(logits, turns, reduction="none")
            right = (logits.argmax(1) == turns).astype("float32") * 100
            columns = paddle.stack([losses, right, paddle.ones_like(losses)])
            total += columns.astype("float64").sum(1)
        loss, acc1, count = utils.all_reduce_sum(total).tolist()
        return {"loss": loss / count, "acc1": acc1 / count, "num_samples": int(count)}
