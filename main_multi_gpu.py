"""Train or evaluate on every device of a machine, or, under paddle.distributed.launch, of several machines.

python main_multi_gpu.py -cfg=configs/vit/vit_digits.yaml -dataset=digits
python -m paddle.distributed.launch --nproc_per_node 2 main_multi_gpu.py -cfg=... (the same flags)
"""

import multiprocessing
import os

import launchers
from config import config_from_arguments
from errors import reported


def main_worker(config, dataset_train, dataset_val):
    """What each process does. Everything after ``parallel.init`` is the same for one process and for many."""
    import paddle
    import paddle.distributed as dist

    import engine
    import parallel
    import supervision
    import utils
    from models import build_model
    from optim import freeze
    from prepare import share_batch
    from records import Run

    paddle.disable_signal_handler()  # its C++ dumps, at SIGTERM and when a peer is lost, hide the line that matters
    supervision.note_signals()
    ranks = utils.world_size()
    settings = utils.set_device_flags(config, int(os.environ.get("PADDLE_LOCAL_SIZE", ranks)))
    parallel.init(config)
    config = share_batch(config, ranks)
    run = Run(config, dataset_val.classes)
    supervision.keep_native_errors(run.directory / f"log_{utils.rank()}.txt")
    devices = ", ".join(utils.all_gather(paddle.device.get_device()))
    run.info(f"{ranks} process{f'es over {dist.get_backend()}' if ranks > 1 else ''} on {devices}: {settings}")
    utils.seed_everything(config.SEED)
    model = build_model(config)
    if config.EVAL:
        engine.evaluate_only(config, model, dataset_val, run)
    else:
        freeze(config, model)  # before the wrapper, which waits for the gradients of what trains
        engine.fit(config, parallel.wrap_model(config, model), dataset_train, dataset_val, run)
    supervision.end_workers()


def spawned_worker(failed, beats, *args):
    """``main_worker`` in a process of its own, which doesn't outlive its parent."""
    import supervision
    import utils

    utils.die_with_parent()
    supervision.share_beats(beats)
    # A spawned process would spawn its loader's workers, too, each of which imports Paddle anew.
    multiprocessing.set_start_method("fork", force=True)
    with reported(failed):
        main_worker(*args)


def main():
    """Builds the datasets once and spawns a worker per device, or is a worker itself where a launcher started it."""
    config = config_from_arguments("main_multi_gpu.py")
    meeting = launchers.meet(config.DIST.INIT_TIMEOUT) if launchers.launched() else None  # before Paddle's import
    import paddle
    import paddle.distributed as dist

    import datasets
    import supervision
    import utils
    from weights.preprocessing import with_preprocessing

    paddle.disable_signal_handler()
    # Ranks that are ended together leave their loaders' semaphores to Python's tracker, which would say so.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
    ranks = 1 if meeting else utils.num_processes(config.NGPUS)
    config, dataset_train, dataset_val = datasets.get_datasets(with_preprocessing(config))
    if meeting:
        meeting.ready()
        main_worker(config, dataset_train, dataset_val)
        return
    supervision.hold_signals()  # until the ranks listen; this process passes signals on
    spawn = multiprocessing.get_context("spawn")
    failed, beats = spawn.Value("i", 0), spawn.Array("d", 3 * ranks, lock=False)
    arguments = (failed, beats, config, dataset_train, dataset_val)
    context = dist.spawn(spawned_worker, args=arguments, nprocs=ranks, join=False)
    supervision.Ranks(context, failed, beats, config.DIST.TIMEOUT).wait()


if __name__ == "__main__":
    with reported():
        main()
