"""ResNet on Paddle's Fleet: data parallelism as its guide shows it, on random images.

    python -m paddle.distributed.launch --gpus=0,1 --log_dir logs examples/fleet_resnet.py     # GPUs: not run
    python -m paddle.distributed.launch --nproc_per_node 2 --log_dir logs examples/fleet_resnet.py --image_size 32
    python examples/fleet_resnet.py --image_size 32                                            # one process

Rank r prints the loss and accuracies of its own batches into logs/workerlog.r. The rate is
proportional to the global batch (--batch_size times the processes), so the number of processes may
change. It rises during the first epoch. Every rank takes the same number of steps, otherwise some
would wait for ever. So the tail is dropped.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

# Python only looks in examples/, the folder of this program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# First: it sets what Paddle reads when it is imported, and reports packages that aren't installed.
import errors  # noqa: F401

# isort: split
import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed import fleet
from paddle.io import DataLoader, Dataset, DistributedBatchSampler
from paddle.vision.models import ResNet
from paddle.vision.models.resnet import BasicBlock, BottleneckBlock

from settings.parser import Parser

# the global batch for which --base_lr is meant
BASE_BATCH = 32
MOMENTUM = 0.9
L2_DECAY = 1e-4


class RandomDataset(Dataset):
    """Random images [3, S, S] with labels [1]. A sample only depends on its index, not on the process
    that loads it.
    """

    def __init__(self, num_samples: int, image_size: int, num_classes: int) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.image_size = image_size
        self.num_classes = num_classes

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(index)
        image = rng.random([3, self.image_size, self.image_size], np.float32)
        return image, rng.integers(self.num_classes, size=1)

    def __len__(self) -> int:
        return self.num_samples


def learning_rate(
    base_lr: float, global_batch: int, warmup_steps: int
) -> paddle.optimizer.lr.LinearWarmup:
    """Returns a learning rate that rises from a tenth of its peak in ``warmup_steps`` steps. The peak
    is proportional to the global batch.
    """
    peak = base_lr * global_batch / BASE_BATCH
    return paddle.optimizer.lr.LinearWarmup(peak, warmup_steps, start_lr=peak / 10, end_lr=peak)


def largest_difference(model: nn.Layer) -> float:
    """Returns the largest difference of any rank's trained parameters from those of rank 0. The
    statistics of batch norm don't count, which each rank computes by itself.
    """
    differences = []
    for parameter in (p for p in model.parameters() if not p.stop_gradient):
        first = parameter.clone().detach()
        dist.broadcast(first, src=0)
        differences.append((parameter.detach() - first).abs().max())
    largest = paddle.stack(differences).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def train_model(args: argparse.Namespace) -> None:
    """Trains the model. Each process calls it."""
    fleet.init(is_collective=True)
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    paddle.seed(0)
    block = BottleneckBlock if args.depth >= 50 else BasicBlock
    model = ResNet(block, args.depth, num_classes=args.num_classes)
    dataset = RandomDataset(args.num_samples, args.image_size, args.num_classes)
    sampler = DistributedBatchSampler(
        dataset, args.batch_size, ranks, rank, shuffle=False, drop_last=True
    )
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=args.num_workers)
    rate = learning_rate(args.base_lr, args.batch_size * ranks, warmup_steps=len(sampler))
    decay = paddle.regularizer.L2Decay(L2_DECAY)
    optimizer: Any = paddle.optimizer.Momentum(
        rate, MOMENTUM, parameters=model.parameters(), weight_decay=decay
    )
    # Paddle 3.3's distributed_model takes a single process for a pipeline, and fails.
    if ranks > 1:
        model = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(optimizer)
    if rank == 0:
        global_batch = args.batch_size * ranks
        batches = f"{len(sampler)} steps of {args.batch_size} x {ranks} = {global_batch} images"
        print(f"{batches} an epoch; learning rate {rate.start_lr:g} to {rate.end_lr:g}", flush=True)
    for epoch in range(args.epochs):
        model.train()
        for batch_id, (images, labels) in enumerate(loader):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            rate.step()
            if batch_id % args.report == 0:
                acc1, acc5 = (paddle.metric.accuracy(logits, labels, k=k) for k in (1, 5))
                values = (
                    f"loss: {loss.item():.5f}, acc1: {acc1.item():.5f}, acc5: {acc5.item():.5f}"
                )
                print(f"[Epoch {epoch}, batch {batch_id}] {values}", flush=True)
    if ranks > 1:
        largest = largest_difference(model)
        if rank == 0:
            print(f"parameters of {ranks} ranks differ by {largest:.1e}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the flags in ``argv``; None: in the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--num_samples", type=int, default=3200)
    parser.add_argument("--batch_size", type=int, default=32, help="per process")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--num_classes", type=int, default=102)
    parser.add_argument("--depth", type=int, default=50, choices=(18, 34, 50, 101, 152))
    parser.add_argument(
        "--base_lr", type=float, default=0.1, help=f"of a global batch of {BASE_BATCH}"
    )
    parser.add_argument("--num_workers", type=int, default=1)
    parser.add_argument("--report", type=int, default=5, help="steps between two lines of the log")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train_model(parse())
