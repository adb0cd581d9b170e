"""Predicts with several processes, and writes all predictions to one CSV file: index, label,
prediction, probability.

    python examples/gather_predictions.py -output predictions.csv [-cfg FILE] [-pretrained WEIGHTS] [-ngpus N] ...

takes the flags of main_multi_gpu.py. Without -cfg, the configuration is that of the run that saved
WEIGHTS. Without -pretrained either, it is vit_digits on the digits, with fresh weights.
``utils.all_gather`` takes any objects, whose sizes may differ from rank to rank. The file has every
sample of the validation set once, in its order, for any number of processes. With GPUs there is one
process on each (not run).
"""

import csv
import sys
from pathlib import Path
from typing import Any

# Python only looks in examples/, the folder of this program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# First: these handle broken streams, and report packages that aren't installed.
import launch.startup  # noqa: F401
from errors import InputError, reporting

# isort: split
from settings.configuration import Configuration
from training.command_line import config_from_arguments

COLUMNS = ("index", "label", "prediction", "probability")


def predictions(
    config: Configuration, model: Any, dataset: Any, rank: int, ranks: int
) -> list[tuple]:
    """Returns the rows of this rank's share of ``dataset``."""
    import paddle
    from paddle.nn import functional as F

    from datasets import get_dataloader
    from launch.progress import EVALUATING, beat
    from loading.transforms import Normalize

    loader = get_dataloader(config, dataset, "val", rank=rank, ranks=ranks)
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    model.eval()
    # All stay on the device until the end, so that no step waits for a copy.
    labels = []
    predicted = []
    confidences = []
    with paddle.no_grad():
        for batch in loader:
            beat(EVALUATING)
            probabilities = F.softmax(model(normalize(batch["pixels"])), axis=1)
            labels.append(batch["labels"])
            predicted.append(probabilities.argmax(1))
            confidences.append(probabilities.max(1))
    # With fewer samples than ranks, some ranks have none.
    if not labels:
        return []
    columns = (paddle.concat(column).tolist() for column in (labels, predicted, confidences))
    return list(zip(loader.batch_sampler.indices, *columns, strict=True))


def worker(config: Configuration, dataset: Any, file: Path) -> None:
    """Predicts this rank's share and gathers all predictions. Runs in each process."""
    import utils
    from models import build_model
    from ops.device import set_device_flags
    from training import parallel
    from weights import load_weights

    parallel.init(config)
    set_device_flags(config, utils.world_size())
    # Fresh weights are then the same on every rank.
    utils.seed_everything(config.SEED)
    model = build_model(config)
    if config.MODEL.PRETRAINED:
        allow = config.MODEL.PRETRAINED_ALLOW
        classes = config.MODEL.PRETRAINED_CLASSES
        adapter = config.MODEL.PRETRAINED_ADAPTER
        load_weights(model, config.MODEL.PRETRAINED, allow=allow, classes=classes, adapter=adapter)
    shares = utils.all_gather(predictions(config, model, dataset, utils.rank(), utils.world_size()))
    if utils.rank() == 0:
        rows = sorted(row for share in shares for row in share)
        with utils.writing_whole(file) as opened:
            writer = csv.writer(opened, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows((*row, f"{probability:.6f}") for *row, probability in rows)
        hits = sum(label == prediction for _, label, prediction, _ in rows)
        print(
            f"{file}: {' + '.join(str(len(share)) for share in shares)} = {len(rows)} samples, {hits} right"
        )


def run_rank(failed: Any, beats: Any, *args: Any) -> None:
    """Runs ``worker`` in a process of its own. If it fails, one line on stderr says why, and the
    other processes are ended.
    """
    import utils
    from launch import progress, signals

    signals.stop_at_once()
    progress.share_beats(beats, progress.FIELDS * utils.rank())
    with reporting(failed):
        worker(*args)


def main() -> None:
    """Reads the data once and starts a process per device, which gets it."""
    config = config_from_arguments(
        "gather_predictions.py", ["-default_cfg=vit_digits", *sys.argv[1:]]
    )
    if not config.OUTPUT:
        raise InputError("-output is missing: the CSV file to write")
    if config.TASK != "classification":
        raise InputError(
            f"TASK is {config.TASK}; this example writes one class per row; use tools/predict.py"
            " for several"
        )
    import paddle.distributed as dist

    import utils
    from config import with_values
    from datasets import get_datasets
    from launch.spawned import prepare_spawn, run
    from models.pretrained import with_preprocessing
    from training.checkpoint import classes_of

    classes = None
    if config.MODEL.PRETRAINED:
        classes = classes_of(config.MODEL.PRETRAINED, config.MODEL.PRETRAINED_ADAPTER)
    config = with_preprocessing(with_values(config, EVAL=True))
    config, _, dataset = get_datasets(config, classes)

    def start(config: Configuration, ranks: int, failed: Any, beats: Any) -> Any:
        arguments = (failed, beats, config, dataset, Path(config.OUTPUT))
        return dist.spawn(run_rank, args=arguments, nprocs=ranks, join=False)

    ranks = utils.num_processes(config.NGPUS)
    if ranks > 1:
        prepare_spawn()
    # Waits for the ranks, sends signals on to them, and reports failures and stalls.
    run(config, ranks, start)


if __name__ == "__main__":
    with reporting():
        main()
