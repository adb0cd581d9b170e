"""timm's side of tools/benchmark.py, in a process of its own: it needs torch and timm, and no
Paddle.

The argument is a request as one word of JSON, and the answer is one line. ``measure`` is
"versions", "train", "eval", "infer" or "loader". Everything runs on the CPU, with ``threads``
threads. "train" and "eval" also answer with ``peak_memory`` of this process, in MB.
"""

import contextlib
import importlib
import json
import platform
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]: another interpreter runs this
from rates import calls_rate, images_per_second, workers_cpu

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from timm_reference import build, timm


def made_batches(
    request: dict[str, Any], count: int = 4
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (images [B, C, S, S] uint8, labels [B]) for ever: ``count`` random batches in turn."""
    shape = (request["batch_size"], *request["image"])
    classes = request["options"].get("num_classes", 1)
    made = [
        (torch.randint(0, 256, shape, dtype=torch.uint8), torch.randint(0, classes, shape[:1]))
        for _ in range(count)
    ]
    while True:
        yield from made


def normalize(images: torch.Tensor, request: dict[str, Any]) -> torch.Tensor:
    """Returns uint8 images as float32, normalised for the model."""
    mean, std = (255 * torch.tensor(request[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return images.float().sub_(mean).div_(std)


def autocast(request: dict[str, Any]) -> contextlib.AbstractContextManager:
    """Returns the context for a forward pass, which is bfloat16 autocast with ``amp``."""
    return torch.autocast("cpu", torch.bfloat16) if request["amp"] else contextlib.nullcontext()


def train(request: dict[str, Any]) -> list[float]:
    """Returns the images/s of ``reports`` rounds of ``steps`` training steps. A round before them
    isn't timed.
    """
    if request["model"] == "mae":
        model = build_mae(request["options"])
    else:
        model = build(request["model"], request["options"])
    model.train()
    create_optimizer = importlib.import_module("timm.optim").create_optimizer_v2
    optimizer = create_optimizer(model, opt="adamw", lr=1e-3, weight_decay=request["weight_decay"])
    criterion = torch.nn.CrossEntropyLoss()
    batches = made_batches(request)
    rates = []
    for _ in range(request["reports"] + 1):
        started = time.perf_counter()
        for _ in range(request["steps"]):
            images, labels = next(batches)
            with autocast(request):
                outputs = model(normalize(images, request))
                loss = outputs.loss if request["model"] == "mae" else criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        rates.append(request["steps"] * request["batch_size"] / (time.perf_counter() - started))
    return rates[1:]


def build_mae(options: dict[str, Any]) -> torch.nn.Module:
    """Returns the masked autoencoder of the library transformers, with fixed positions."""
    transformers = importlib.import_module("transformers")
    return transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**options))


@torch.no_grad()
def evaluate(request: dict[str, Any]) -> list[float]:
    """Returns [images/s] of an evaluation with the weights of a file, which counts hits. The rate
    is that of ``batches`` batches after the first ``warm_up``.
    """
    model = build(request["model"], request["options"]).eval()
    # Not strict, because PoolFormer's last norm has another name.
    timm.models.load_checkpoint(model, request["weights"], strict=False)
    run = torch.compile(model) if request["compile"] else model
    source = made_batches(request)
    hits = torch.zeros((), dtype=torch.int64)
    with autocast(request):
        for index in range(request["warm_up"] + request["batches"]):
            if index == request["warm_up"]:
                started = time.perf_counter()
            images, labels = next(source)
            hits += (run(normalize(images, request)).argmax(1) == labels).sum()
    return [request["batches"] * request["batch_size"] / (time.perf_counter() - started)]


@torch.no_grad()
def infer(request: dict[str, Any]) -> list[float]:
    """Returns [images/s] from images [B, C, S, S] to logits. ``mode`` is eager, compile or
    max-autotune.
    """
    dtype = torch.bfloat16 if request["bfloat16"] else torch.float32
    model = build(request["model"], request["options"]).eval().to(dtype)
    images = torch.randn((request["batch_size"], *request["image"]), dtype=dtype)
    if request["mode"] == "max-autotune":
        importlib.import_module("torch._inductor.config").freezing = True  # pyright: ignore[reportAttributeAccessIssue]
    run = model
    if request["mode"] != "eager":
        torch_mode = {"compile": "default", "max-autotune": "max-autotune"}[request["mode"]]
        run = torch.compile(model, mode=torch_mode)

    def call() -> object:
        return run(images).float().numpy()

    return [calls_rate(call, len(images), request["warm_up"], request["seconds"])]


class ListedFiles(timm.data.readers.reader.Reader):
    """The files of a list. Each line has a path and a label."""

    def __init__(self, file: str) -> None:
        super().__init__()
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        self.samples = [
            (path, int(label)) for path, _, label in (line.rpartition(" ") for line in lines)
        ]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return open(path, "rb"), label

    def __len__(self) -> int:
        return len(self.samples)

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.samples[index][0]


def load(request: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns (images/s, images per CPU second) for the dataset alone, and for the loader with its
    prefetcher.
    """
    dataset = timm.data.ImageDataset(request["list"], reader=ListedFiles(request["list"]))
    training = not request["evaluation"]
    # timm has no TrivialAugment, so torchvision's takes the place of timm's policies.
    trivial = request["auto_augment"] == "trivial"
    loader = timm.data.create_loader(
        dataset,
        input_size=(3, *request["size"]),
        batch_size=request["batch_size"],
        is_training=training,
        scale=request["scale"],
        ratio=request["ratio"],
        hflip=request["hflip"],
        color_jitter=request["color_jitter"] or None,
        auto_augment=None if trivial else request["auto_augment"],
        interpolation=request["interpolation" if training else "eval_interpolation"],
        crop_pct=request["crop_pct"],
        mean=request["mean"],
        std=request["std"],
        num_workers=request["workers"],
        device=torch.device("cpu"),
    )
    if trivial:
        transforms = importlib.import_module("torchvision.transforms")
        # after crop and flip
        dataset.transform.transforms.insert(2, transforms.TrivialAugmentWide())
    amount = request["warm_up"], request["images"]
    batch_sizes = (len(labels) for _, labels in loader)
    # Each sample counts as one image.
    samples = (len(dataset[index][:1]) for index in range(len(dataset)))
    # The loader comes first, as in our_loader.py.
    loader_rates = images_per_second(batch_sizes, *amount, workers_cpu)
    dataset_rates = images_per_second(samples, *amount, time.process_time)
    return {"loader": loader_rates, "dataset": dataset_rates}


def main() -> None:
    request = json.loads(sys.argv[1])
    if request["measure"] == "versions":
        answer = {
            "torch": torch.__version__,
            "timm": timm.__version__,
            "python": platform.python_version(),
        }
    else:
        torch.set_num_threads(request["threads"])
        functions = {"train": train, "eval": evaluate, "infer": infer, "loader": load}
        answer = functions[request["measure"]](request)
    if request["measure"] in ("train", "eval"):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        answer = {"images_per_s": answer, "peak_memory": peak}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
