"""Subjects of ``growth`` about weights, predictions and long runs: loading, averaging, a report and
the end of an epoch.
"""

import json
from collections.abc import Callable
from pathlib import Path

from tools.benchmarks.growth_measure import Growth

_CLASSES = 1000
# epochs whose end is measured
_TIMES = 20


def load_weights(size: int, folder: Path) -> Callable[[], object]:
    """Measures how a .safetensors file is loaded into a model. It has ``size`` blocks of ViT-L/16,
    of 50 MB each.
    """
    from models import create_model
    from weights import load_weights, save_weights

    model = create_model("vit_large_patch16_224", depth=size)
    save_weights(model, folder / "model.safetensors")
    return lambda: load_weights(model, folder / "model.safetensors")


def average_weights(size: int, folder: Path) -> Callable[[], object]:
    """Measures how ``size`` files of 40 MB each are averaged."""
    import numpy as np

    from tools.average_checkpoints import average
    from weights.formats import write_weights

    files = [folder / f"{number}.safetensors" for number in range(size)]
    for number, file in enumerate(files):
        write_weights(
            file, {f"blocks.{i}": np.full([1024, 1024], number, np.float32) for i in range(10)}
        )

    def work() -> None:
        with average(files) as arrays:
            write_weights(folder / "mean.safetensors", arrays)

    return work


def predictions(size: int, folder: Path) -> Callable[[], object]:
    """Measures how predictions.csv of 1,000 classes is written, and the report that is made from
    it.
    """
    import numpy as np
    from PIL import Image

    from config import get_config, resolved_yaml
    from datasets import ImageDataset
    from training.predictions import FILE, Predictions, write
    from training.report import write_report

    class Images(ImageDataset):
        mode = "RGB"

        def __len__(self) -> int:
            return size

        def name(self, index: int) -> str:
            return f"{folder}/n{index % _CLASSES:08}/n{index % _CLASSES:08}_{index}.JPEG"

        def image(self, index: int) -> Image.Image:
            return Image.new("RGB", (256, 256))

    random = np.random.default_rng(0)
    kept = Predictions()
    label, guess = random.integers(0, _CLASSES, [2, size])
    predicted = np.where(random.random(size) < 0.8, label, guess)
    kept.add(label=label, predicted=predicted, probability=random.random(size).astype(np.float32))
    dataset = Images.__new__(Images)
    dataset.classes = [f"class {number}" for number in range(_CLASSES)]
    config = get_config("vit_digits")
    (folder / "config.yaml").write_text(resolved_yaml(config))
    (folder / "classes.json").write_text(json.dumps(dataset.classes))
    result = {"loss": 1.0, "acc1": 100 * float((label == predicted).mean()), "num_samples": size}
    (folder / "result.json").write_text(json.dumps(result))

    def work() -> None:
        write(folder / FILE, kept.gather(), dataset, str(folder))
        write_report(folder, dataset)

    return work


def epoch_end(size: int, folder: Path) -> Callable[[], object]:
    """Measures the ends of 20 epochs, with report and checkpoint, in a run that has kept the
    checkpoints of ``size`` epochs.
    """
    from config import get_config
    from datasets import get_dataset
    from models import build_model
    from training.checkpoint import Progress, Saver
    from training.checkpoint.storage import FILES, checkpoint_name
    from training.classification import Classification
    from training.optim import LossScaler, build_optimizer
    from training.run import Run

    config = get_config(
        "vit_digits", ["DATA.DATASET", "synthetic", "SAVE_FREQ", "1", "OUTPUT", str(folder / "run")]
    )
    run = Run(config, [])
    task = Classification(config)
    run.begin()
    for epoch in range(1, size + 1):
        earlier = run.checkpoints / checkpoint_name(epoch, 0)
        earlier.mkdir(parents=True)
        for name in FILES:
            (earlier / name).touch()
    model = build_model(config)
    optimizer = build_optimizer(config, model)
    saver = Saver(
        config, run, {"val": model}, optimizer, LossScaler(False), get_dataset(config, "train")
    )
    progress = Progress(epoch=size, step=size)

    def end_epoch() -> None:
        progress.end_epoch(progress.epoch + 1)
        metrics = {"loss": 1.0, "acc1": 50.0, "acc5": 90.0}
        run.report(
            "val", task.line("val", metrics), step=progress.step, epoch=progress.epoch, **metrics
        )
        saver.save(progress, improved=progress.keep_best({"val": metrics}, task.score))
        saver.wait()

    # The first save of a process lists the checkpoints.
    end_epoch()

    def work() -> None:
        for _ in range(_TIMES):
            end_epoch()

    return work


MEASURES = {
    "load_weights": Growth("blocks of 50 MB", (3, 6, 12, 24), load_weights, 1, (1, 2, 3), memory=0),
    "average_weights": Growth("files", (4, 8, 16, 32), average_weights, 1, (1, 2, 3), memory=0),
    "predictions": Growth(
        "images", (80_000, 160_000, 320_000, 640_000, 1_280_000), predictions, 1, (200, 400, 800)
    ),
    "epoch_end": Growth("epochs", (250, 500, 1000, 2000, 4000), epoch_end, 0, (10, 20, 40)),
}
