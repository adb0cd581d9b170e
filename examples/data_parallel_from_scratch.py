"""Data parallelism by hand: each process takes its part of a batch, gradients are summed over the
processes, all step.

    python examples/data_parallel_from_scratch.py [--processes 2] [--batch_size 64] [--steps 10] [--lr 0.05]

``paddle.DataParallel`` and one process with the whole batch make the same steps. The program prints
how far apart their parameters end. The difference is rounding, which grows from step to step if the
rate is large (--lr 0.2). On GPUs (one process on each; not run) the sums go over NCCL, on a CPU
over gloo.
"""

import math
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
from sklearn.datasets import load_digits

from settings.parser import Parser

# of each layer: the shape of its weight, the number of inputs of an output, the number of outputs
LAYERS = [
    ((20, 1, 3, 3), 9, 20),
    ((50, 20, 5, 5), 500, 50),
    ((800, 128), 800, 128),
    ((128, 10), 128, 10),
]
Params = list[paddle.Tensor]
Batch = tuple[paddle.Tensor, paddle.Tensor]


def init_params() -> Params:
    """Returns the weights and biases of two convolutions and two linear layers, in turn. Weights
    follow He's initialisation.
    """
    params = []
    for shape, inputs, outputs in LAYERS:
        params += [paddle.randn(shape) * math.sqrt(2 / inputs), paddle.zeros([outputs])]
    return params


def lenet(images: paddle.Tensor, params: Params) -> paddle.Tensor:
    """Computes the logits [B, 10] of images [B, 1, 28, 28]."""
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    x = F.avg_pool2d(F.relu(F.conv2d(images, w1, b1)), 2)
    x = F.avg_pool2d(F.relu(F.conv2d(x, w2, b2)), 2)  # [B, 50, 4, 4]
    return F.relu(x.flatten(1) @ w3 + b3) @ w4 + b4


class LeNet(nn.Layer):
    """``lenet`` as a layer, which ``paddle.DataParallel`` can wrap."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        assign = nn.initializer.Assign
        own = [
            self.create_parameter(p.shape, default_initializer=assign(p.numpy())) for p in params
        ]
        self.params = nn.ParameterList(own)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        return lenet(images, list(self.params))


def digits_batches(size: int, steps: int) -> list[Batch]:
    """Returns batches (images [B, 1, 28, 28] in 0..1, labels [B]) of scikit-learn's digits, the
    same on every rank.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = F.interpolate(
        paddle.to_tensor(pixels / 16, "float32").reshape([-1, 1, 8, 8]), [28, 28], mode="bilinear"
    )
    labels = paddle.to_tensor(labels, "int64")
    places = [paddle.arange(step * size, (step + 1) * size) % len(labels) for step in range(steps)]
    return [(images[place], labels[place]) for place in places]


def split_batch(batch: Batch, rank: int, ranks: int) -> Batch:
    """Returns this rank's part of a batch. If the size can't be divided evenly, the parts differ by
    one sample.
    """
    images, labels = batch
    start = len(images) * rank // ranks
    end = len(images) * (rank + 1) // ranks
    return images[start:end], labels[start:end]


def train_by_hand(params: Params, batches: list[Batch], lr: float, rank: int, ranks: int) -> Params:
    """Returns the parameters after a step of SGD on each batch, which ``ranks`` processes share."""
    params = [p.clone().detach() for p in params]
    for p in params:
        p.stop_gradient = False
    for batch in batches:
        images, labels = split_batch(batch, rank, ranks)
        # The sum over all ranks has to be the mean over the whole batch, even if parts differ in
        # size.
        loss = F.cross_entropy(lenet(images, params), labels, reduction="sum") / len(batch[0])
        loss.backward()
        with paddle.no_grad():
            for p in params:
                gradient = p.grad
                assert gradient is not None
                if ranks > 1:
                    dist.all_reduce(gradient)
                p.subtract_(lr * gradient)
                p.clear_gradient()
    return params


def train_data_parallel(
    params: Params, batches: list[Batch], lr: float, rank: int, ranks: int
) -> Params:
    """Returns the same as ``train_by_hand``, computed by ``paddle.DataParallel``."""
    network = paddle.DataParallel(LeNet(params))
    optimizer = paddle.optimizer.SGD(lr, parameters=network.parameters())
    for batch in batches:
        images, labels = split_batch(batch, rank, ranks)
        loss = F.cross_entropy(network(images), labels, reduction="sum") / len(batch[0])
        # DataParallel takes the mean over the ranks.
        (loss * ranks).backward()
        optimizer.step()
        optimizer.clear_grad()
    return list(network.parameters())


def difference(ours: Params, theirs: Params) -> float:
    """Returns the largest difference of any parameter on any rank."""
    differences = [(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)]
    largest = paddle.stack(differences).max().detach()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def worker(size: int, steps: int, lr: float) -> None:
    """Trains in three ways and compares them. Each process calls it."""
    dist.init_parallel_env()
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    paddle.seed(rank)
    start = init_params()
    # Each rank has drawn its own parameters. All take those of rank 0.
    for p in start:
        dist.broadcast(p, src=0)
    batches = digits_batches(size, steps)
    ours = train_by_hand(start, batches, lr, rank, ranks)
    paddles = train_data_parallel(start, batches, lr, rank, ranks)
    alone = train_by_hand(start, batches, lr, rank=0, ranks=1)
    differences = {
        "moved from the start": difference(ours, start),
        "by hand - paddle.DataParallel": difference(ours, paddles),
        "by hand - one process": difference(ours, alone),
    }
    if rank == 0:
        parts = " + ".join(str(len(split_batch(batches[0], r, ranks)[0])) for r in range(ranks))
        images, labels = batches[0]
        loss = [F.cross_entropy(lenet(images, p), labels).item() for p in (start, ours)]
        print(f"{ranks} processes over {dist.get_backend()}, {steps} steps of {parts} images")
        print(f"loss of the first batch {loss[0]:.4f} -> {loss[1]:.4f}")
        print("largest differences of the parameters:")
        for name, largest in differences.items():
            print(f"  {name:30} {largest:.1e}")


if __name__ == "__main__":
    parser = Parser(__doc__)
    gpus = paddle.device.cuda.device_count() if paddle.device.is_compiled_with_cuda() else 0
    defaults = {"processes": max(2, gpus), "batch_size": 64, "steps": 10, "lr": 0.05}
    for name, default in defaults.items():
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help="(default: %(default)s)"
        )
    args = parser.parse_args()
    if args.processes < 2:
        parser.error(
            f"--processes is {args.processes}, expected at least 2: a single process has nothing to compare with"
        )
    dist.spawn(worker, (args.batch_size, args.steps, args.lr), nprocs=args.processes)
