"""Subjects of ``growth`` about runs of several processes."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.benchmarks.growth_measure import Cost, Growth

_MODEL = "vit_small_patch16_224"


def prepare_save(ranks: int, folder: Path) -> Callable[[], object]:
    """Starts ``ranks`` processes with a model of 22 million parameters and a sharded optimizer
    state.

    Returns a function that makes all ranks save. It returns the largest cost among the ranks, up to
    the moment at which training can continue, when every rank has copied its tensors. The memory is
    that of a rank's copies, and the CPU time is that of its training thread. The elapsed time also
    includes waiting for cores. The files are written in the background, as in a run, and the next
    call waits for them.
    """
    endpoints = ",".join(f"127.0.0.1:{port}" for port in _free_ports(ranks))
    context = multiprocessing.get_context("spawn")
    connections = []
    for rank in range(ranks):
        here, there = context.Pipe()
        context.Process(
            target=_save_often, args=(rank, endpoints, folder, there), daemon=True
        ).start()
        there.close()
        connections.append(here)

    def largest() -> Cost:
        costs = [connection.recv() for connection in connections]
        seconds, memory, busy = map(max, zip(*costs, strict=True))
        return Cost(seconds, memory, busy)

    def save() -> Cost:
        for connection in connections:
            connection.send("save")
        return largest()

    largest()
    return save


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [taken.getsockname()[1] for taken in sockets]
    for taken in sockets:
        taken.close()
    return ports


def _save_often(rank: int, endpoints: str, folder: Path, connection: Any) -> None:
    """Saves each time that ``connection`` asks for it. Returns when the connection is closed."""
    ranks = endpoints.count(",") + 1
    os.environ |= {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(ranks),
        "PADDLE_TRAINER_ENDPOINTS": endpoints,
        "PADDLE_CURRENT_ENDPOINT": endpoints.split(",")[rank],
        "PADDLE_DISTRI_BACKEND": "gloo",
        "OMP_NUM_THREADS": "1",
    }

    import paddle

    from config import get_config
    from datasets import get_dataset
    from models import build_model
    from training import parallel
    from training.checkpoint import Progress, Saver
    from training.checkpoint.saver import optimizer_state
    from training.optim import LossScaler, build_optimizer
    from training.run import Run

    # Paddle's handlers would print pages when this process is ended.
    paddle.disable_signal_handler()
    options = ["DATA.DATASET", "synthetic", "DATA.SYNTHETIC_SIZE", "16"]
    options += ["KEEP_LAST", "1", "OUTPUT", f"{folder}/run"]
    if ranks > 1:
        options += ["DIST.ENGINE", "fleet", "DIST.STRATEGY.sharding", "True"]
    config = get_config(_MODEL, options)
    parallel.init(config)
    train = get_dataset(config, "train")
    model = build_model(config)
    optimizer = parallel.wrap_optimizer(config, build_optimizer(config, model))
    run = Run(config, train.classes)
    run.begin()
    saver = Saver(config, run, {"val": model}, optimizer, LossScaler(enabled=False), train)
    for parameter in model.parameters():
        parameter.grad = paddle.zeros_like(parameter)
    parallel.reduce_gradients(model, optimizer)
    optimizer.step()
    optimizer.clear_grad()
    tensors = list(optimizer_state(model, optimizer).values())
    if rank == 0:
        tensors += model.state_dict().values()
    copied = sum(tensor.size * tensor.element_size() for tensor in tensors)
    epoch = 0
    while True:
        epoch += 1
        started = time.perf_counter()
        busy = time.thread_time()
        saver.save(Progress(epoch=epoch, step=epoch))
        seconds = time.perf_counter() - started
        busy = time.thread_time() - busy
        if epoch == 1:
            # The first save maps the memory of the copies.
            saver.wait()
        connection.send((seconds, copied / 1e6, busy))
        try:
            connection.recv()
        except EOFError:
            return


MEASURES = {
    "sharded_save": Growth(
        unit="ranks",
        sizes=(1, 2, 4),
        prepare=prepare_save,
        expected=0,
        quick=(1, 2),
    ),
}
