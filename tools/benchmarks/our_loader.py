"""The loaders of tools/benchmark.py that run on Paddle, each measured in a process of its own.

The argument is a request as one word of JSON, whose ``pipeline`` is "ours" or "paddlevit". The
answer is one line.
"""

import json
import sys
import time
import zlib  # noqa: F401  (before Paddle: errors.py says why)
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import paddle
from PIL import Image
from rates import images_per_second, workers_cpu

import datasets
import errors
from config import get_config
from ops.device import keep_buffers


def ours(request: dict[str, Any]) -> tuple[paddle.io.Dataset, Any]:
    """Returns the toolkit's training or validation set and its loader. The process is tuned as a
    run is.
    """
    keep_buffers()
    config = get_config(request["cfg"], request["options"])
    mode = "val" if request["evaluation"] else "train"
    dataset = datasets.get_dataset(config, mode)
    needed = request["warm_up"] + request["images"]
    if len(dataset) < needed + config.DATA.BATCH_SIZE:
        raise errors.InputError(f"the set has {len(dataset)} images, expected {needed} and a batch")
    return dataset, datasets.get_dataloader(config, dataset, mode)


class PaddleVit(paddle.io.Dataset):
    """PaddleViT's training images, rebuilt from its description: ``paddle.vision`` transforms
    Pillow images, and makes float32 arrays of them.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__()
        from paddle.vision import transforms

        lines = Path(request["list"]).read_text(encoding="utf-8").splitlines()
        self.samples = [
            (path, int(label)) for path, _, label in (line.rpartition(" ") for line in lines)
        ]
        crop = {
            "scale": request["scale"],
            "ratio": request["ratio"],
            "interpolation": request["interpolation"],
        }
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(tuple(request["size"]), **crop),
                transforms.RandomHorizontalFlip(request["hflip"]),
                transforms.ToTensor(),
                transforms.Normalize(mean=request["mean"], std=request["std"]),
            ]
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            # An array: if samples are tensors, Paddle's shared memory crashed the workers in one
            # run of five.
            return self.transform(image.convert("RGB")).numpy(), label


def paddlevit(request: dict[str, Any]) -> tuple[paddle.io.Dataset, paddle.io.DataLoader]:
    """Returns PaddleViT's training set and ``paddle.io``'s loader of it."""
    dataset = PaddleVit(request)
    batches = paddle.io.DataLoader(
        dataset,
        batch_size=request["batch_size"],
        shuffle=True,
        drop_last=True,
        num_workers=request["workers"],
    )
    return dataset, batches


def main() -> None:
    request = json.loads(sys.argv[1])
    dataset, batches = {"ours": ours, "paddlevit": paddlevit}[request["pipeline"]](request)
    amount = request["warm_up"], request["images"]
    samples = (len(dataset[index][:1]) for index in range(len(dataset)))
    # The loader comes first: workers crash if they are forked from a process in which Paddle has
    # computed. Afterwards they soon wait, and don't disturb the second measurement.
    labels = "labels" if request["pipeline"] == "ours" else 1
    answer = {
        "loader": images_per_second((len(batch[labels]) for batch in batches), *amount, workers_cpu)
    }
    answer["dataset"] = images_per_second(samples, *amount, time.process_time)
    print(json.dumps(answer))


if __name__ == "__main__":
    with errors.reporting():
        main()
