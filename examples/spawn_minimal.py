"""The smallest distributed training: ``spawn``, ``DataParallel``, ``DistributedBatchSampler``, five
points in a plane.

    python examples/spawn_minimal.py                          # a process per visible GPU, or 2 on a CPU
    CUDA_VISIBLE_DEVICES=0,2 python examples/spawn_minimal.py # on these two GPUs (GPUs: not run)
    MASTER_PORT=12355 python examples/spawn_minimal.py        # the ranks meet at this port instead of a free one

Each rank prints the losses of its own batches. Rank 0 prints the accuracies, which count each
sample of all ranks once. The batches of training aren't fit for that: they count some samples twice
and drop others.
"""

import os
import sys
from pathlib import Path

# Python only looks in examples/, the folder of this program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# First: it sets what Paddle reads when it is imported, and reports packages that aren't installed.
import errors  # noqa: F401

# isort: split
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset, DistributedBatchSampler

from settings.parser import Parser

TRAIN = ([[-1.4, 2.9], [-0.8, 3.2], [-0.4, 2.4], [2.2, -1.0], [2.8, -1.7]], [0, 0, 0, 1, 1])
TEST = ([[-0.7, 2.7], [2.5, -1.3]], [0, 1])


class Points(Dataset):
    """Points [n, 2] with their labels [n]."""

    def __init__(self, features: list[list[float]], labels: list[int]) -> None:
        super().__init__()
        self.features = paddle.to_tensor(features)
        self.labels = paddle.to_tensor(labels)

    def __getitem__(self, index: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        return self.features[index], self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)


def build_network(num_inputs: int = 2, num_outputs: int = 2) -> nn.Layer:
    """Returns a network of two hidden layers: [B, num_inputs] -> logits [B, num_outputs]."""
    hidden = [nn.Linear(num_inputs, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(20, num_outputs))


@paddle.no_grad()
def compute_accuracy(network: nn.Layer, dataset: Points) -> float:
    """Returns the share of samples of ``dataset`` that the network classifies correctly. Every rank
    has to call it.

    Ranks may have different numbers of samples, so hits and samples are summed over the ranks and
    divided once.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    own = paddle.arange(rank, len(dataset), ranks)
    counts = paddle.to_tensor([0.0, len(own)])
    if len(own):
        hits = network(dataset.features[own]).argmax(1) == dataset.labels[own]
        counts[0] = hits.astype("float32").sum()
    if ranks > 1:
        dist.all_reduce(counts)
    hits, samples = counts.numpy().tolist()
    return hits / samples


def main(num_epochs: int) -> None:
    """Trains the network. Each process calls it."""
    if dist.get_world_size() > 1:
        dist.init_parallel_env()
    rank = dist.get_rank()
    train = Points(*TRAIN)
    test = Points(*TEST)
    sampler = DistributedBatchSampler(train, batch_size=2, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_sampler=sampler)
    paddle.seed(123)
    network = build_network()
    parallel = paddle.DataParallel(network) if dist.get_world_size() > 1 else network
    optimizer = paddle.optimizer.SGD(0.5, parameters=parallel.parameters())
    place = f"[{paddle.get_device().partition(':')[0].upper()}{rank}]"
    for epoch in range(num_epochs):
        # Otherwise each epoch would have the same order.
        sampler.set_epoch(epoch)
        network.train()
        for features, labels in loader:
            loss = F.cross_entropy(parallel(features), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            progress = f"Epoch: {epoch + 1:03d}/{num_epochs:03d} | Batchsize {labels.shape[0]:03d}"
            line = f"{place} {progress} | Train/Val Loss: {loss.item():.2f}\n"
            # With its newline in the same write, so that no other rank's line comes in between.
            print(line, end="", flush=True)
    network.eval()
    accuracies = {
        "Training": compute_accuracy(network, train),
        "Test": compute_accuracy(network, test),
    }
    if rank == 0:
        for name, accuracy in accuracies.items():
            print(f"{place} {name} accuracy", accuracy, flush=True)


if __name__ == "__main__":
    gpus = paddle.device.cuda.device_count() if paddle.device.is_compiled_with_cuda() else 0
    parser = Parser(__doc__)
    parser.add_argument("--processes", type=int, default=gpus or 2, help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    # Paddle reads MASTER_PORT only beside MASTER_ADDR, and PADDLE_MASTER otherwise.
    if port := os.environ.get("MASTER_PORT"):
        os.environ["PADDLE_MASTER"] = f"127.0.0.1:{port}"
    print(f"Paddle version: {paddle.__version__}\nNumber of GPUs available: {gpus}", flush=True)
    dist.spawn(main, args=(arguments.epochs,), nprocs=arguments.processes)
