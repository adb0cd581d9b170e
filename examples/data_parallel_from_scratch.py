"""Data parallelism by hand: each process takes its part of a batch, gradients are summed over the processes, all step.

    python examples/data_parallel_from_scratch.py [--processes 2] [--batch_size 64] [--steps 10] [--lr 0.05]

The same steps are made by ``paddle.DataParallel`` and by one process with the whole batch; how far the parameters end
up from each other is printed: rounding, which grows from step to step where the rate is large (--lr 0.2). On GPUs (one process on each; not run) the sums go over NCCL, on a CPU over gloo.
"""

import argparse
import math
import zlib  # noqa: F401  (Paddle 2.6 carries another one that crashes Python's, unless that is loaded already)

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from sklearn.datasets import load_digits

WEIGHTS = [(20, 1, 3, 3), (50, 20, 5, 5), (800, 128), (128, 10)]

# ------------------------------------------------------------ model and data


def init_params() -> list[paddle.Tensor]:
    """Returns weight, bias, weight, bias, ... of two convolutions and two linear layers, by He's initialisation."""
    params = []
    for shape in WEIGHTS:
        outputs, inputs = (shape[0], math.prod(shape[1:])) if len(shape) == 4 else (shape[1], shape[0])
        params += [paddle.randn(shape) * math.sqrt(2 / inputs), paddle.zeros([outputs])]
    return params


def lenet(images: paddle.Tensor, params: list[paddle.Tensor]) -> paddle.Tensor:
    """images [B, 1, 28, 28] -> logits [B, 10]."""
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    x = F.avg_pool2d(F.relu(F.conv2d(images, w1, b1)), 2)
    x = F.avg_pool2d(F.relu(F.conv2d(x, w2, b2)), 2)  # [B, 50, 4, 4]
    x = F.relu(x.flatten(1) @ w3 + b3)
    return x @ w4 + b4


class LeNet(nn.Layer):
    """The same function as a layer, which ``paddle.DataParallel`` can wrap."""

    def __init__(self, params: list[paddle.Tensor]) -> None:
        super().__init__()
        assign = nn.initializer.Assign
        own = [self.create_parameter(p.shape, default_initializer=assign(p.numpy())) for p in params]
        self.params = nn.ParameterList(own)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        return lenet(images, list(self.params))


def digits_batches(batch_size: int, steps: int) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
    """Returns batches (images [B, 1, 28, 28] in 0..1, labels [B]) of scikit-learn's digits, the same on every process."""
    pixels, labels = load_digits(return_X_y=True)
    images = paddle.to_tensor(pixels / 16, "float32").reshape([-1, 1, 8, 8])
    images = F.interpolate(images, size=[28, 28], mode="bilinear")
    places = [paddle.arange(step * batch_size, (step + 1) * batch_size) % len(labels) for step in range(steps)]
    labels = paddle.to_tensor(labels, "int64")
    return [(images[place], labels[place]) for place in places]


# -------------------------------------------------------------------- training


def split_batch(batch: tuple, rank: int, ranks: int) -> tuple[paddle.Tensor, ...]:
    """Returns this rank's part of a batch; where the size doesn't divide, parts differ by one sample."""
    size = len(batch[0])
    start, end = size * rank // ranks, size * (rank + 1) // ranks
    return tuple(tensor[start:end] for tensor in batch)


def train_by_hand(params: list[paddle.Tensor], batches: list[tuple], lr: float, rank: int, ranks: int) -> list:
    """Returns the parameters after a step of SGD on each batch, of which this is ``rank`` of ``ranks`` processes."""
    params = [p.clone().detach() for p in params]
    for p in params:
        p.stop_gradient = False
    for batch in batches:
        images, labels = split_batch(batch, rank, ranks)
        # The sum over the ranks' parts has to be the whole batch's mean, also where the parts aren't equal.
        loss = F.cross_entropy(lenet(images, params), labels, reduction="sum") / len(batch[0])
        loss.backward()
        with paddle.no_grad():
            for p in params:
                gradient = p.grad
                if ranks > 1:
                    dist.all_reduce(gradient)
                p.subtract_(lr * gradient)
                p.clear_gradient()
    return params


def train_data_parallel(params: list[paddle.Tensor], batches: list[tuple], lr: float, rank: int, ranks: int) -> list:
    """Returns what ``train_by_hand`` does, by Paddle's own engine."""
    network = paddle.DataParallel(LeNet(params))
    optimizer = paddle.optimizer.SGD(lr, parameters=network.parameters())
    for batch in batches:
        images, labels = split_batch(batch, rank, ranks)
        loss = F.cross_entropy(network(images), labels, reduction="sum") / len(batch[0])
        (loss * ranks).backward()  # DataParallel takes the mean over the ranks
        optimizer.step()
        optimizer.clear_grad()
    return list(network.parameters())


def difference(ours: list[paddle.Tensor], theirs: list[paddle.Tensor]) -> float:
    """Returns the largest difference of any parameter on any process."""
    largest = paddle.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)]).max().detach()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def worker(arguments: argparse.Namespace) -> None:
    """What each process does."""
    dist.init_parallel_env()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    number = paddle.to_tensor([rank + 1.0])
    dist.all_reduce(number)
    paddle.seed(rank)  # each draws parameters of its own,
    start = init_params()
    for p in start:  # and takes those of rank 0
        dist.broadcast(p, src=0)
    batches = digits_batches(arguments.batch_size, arguments.steps)
    ours = train_by_hand(start, batches, arguments.lr, rank, ranks)
    theirs = train_data_parallel(start, batches, arguments.lr, rank, ranks)
    whole = train_by_hand(start, batches, arguments.lr, 0, 1)
    first = [p.clone().detach() for p in ours]
    for p in first:
        dist.broadcast(p, src=0)
    found = {
        "moved from the start": difference(ours, start),
        "by hand - paddle.DataParallel": difference(ours, theirs),
        "by hand - one process": difference(ours, whole),
        "any rank - rank 0": difference(ours, first),
    }
    if rank == 0:
        size = arguments.batch_size
        parts = " + ".join(str(size * (r + 1) // ranks - size * r // ranks) for r in range(ranks))
        where = f"{ranks} processes over {dist.get_backend()} on {paddle.get_device()}"
        print(f"{where}; all-reduce of 1, 2, ... gives {number.item():g}")
        loss = [F.cross_entropy(lenet(batches[0][0], p), batches[0][1]).item() for p in (start, ours)]
        print(f"{arguments.steps} steps of {parts} images; loss of the first batch {loss[0]:.4f} -> {loss[1]:.4f}")
        print("largest differences of the parameters:")
        for what, largest in found.items():
            print(f"  {what:30} {largest:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = paddle.device.cuda.device_count() if paddle.device.is_compiled_with_cuda() else 0
    parser.add_argument("--processes", type=int, default=gpus or 2, help="at least 2 (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=64, help="of all processes together")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    arguments = parser.parse_args()
    if arguments.processes < 2:
        parser.error(f"--processes is {arguments.processes}, expected at least 2: one compares with nothing")
    dist.spawn(worker, args=(arguments,), nprocs=arguments.processes)


if __name__ == "__main__":
    main()
