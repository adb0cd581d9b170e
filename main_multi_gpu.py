"""Train or evaluate on every device of a machine, or, under paddle.distributed.launch, of several
machines.

python main_multi_gpu.py -cfg=configs/vit/vit_digits.yaml -dataset=digits
python -m paddle.distributed.launch --nproc_per_node 2 main_multi_gpu.py -cfg=... (the same flags)
"""

import launch.startup  # signals and streams, from the first moment on

# isort: split
import contextlib
import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from errors import reporting, reporting_memory
from launch import environment, launched, progress, sharing, signals, spawned, stall, streams
from training.command_line import config_from_arguments


def import_paddle():
    """Lets signals wait within. Paddle's import hands SIGTERM and others to its C++. Its dumps hide
    the line that matters, also when a peer is lost; and what it gives them back to isn't Python.

    Raises:
        InputError: it sees no GPU though there are some.
    """
    streams.hurry()
    signals.block_signals()
    with launch.startup.without_collection():
        import paddle

        gc.freeze()  # later collections leave out what is there now
    paddle.disable_signal_handler()
    signals.stop_at_once()
    environment.check_seen(
        paddle.device.cuda.device_count() if paddle.device.is_compiled_with_cuda() else 0
    )


def main_worker(config, dataset_train, dataset_val, failed=None):
    """Runs in each process. Everything after ``parallel.init`` is the same for one process and for
    many.

    Args:
        failed: as of ``errors.reporting``.
    """
    import paddle.distributed as dist

    import utils
    from models import build_model
    from ops.device import set_device_flags
    from training import engine, parallel
    from training.classification import add_projection
    from training.equal_ranks import check_same
    from training.optim import freeze
    from training.run import Run
    from training.setup import share_batch

    run = None
    with reporting_memory(lambda: less_memory(config, run and run.directory)):
        ranks = utils.world_size()
        stall.begin(config.DIST.TIMEOUT, by_gloo=ranks > 1 and not utils.num_gpus())
        if not config.DATA.NUM_WORKERS:
            stall.watch(failed)
        settings = set_device_flags(config, int(os.environ.get("PADDLE_LOCAL_SIZE", ranks)))
        parallel.init(config)
        check_same(config, dataset_train, dataset_val)
        config = share_batch(config, ranks)
        run = Run(config, dataset_val.classes)
        devices = ", ".join(run.devices)
        run.info(
            f"{ranks} process{f'es over {dist.get_backend()}' if ranks > 1 else ''} on {devices}: {settings}"
        )
        utils.seed_everything(config.SEED)
        model = build_model(config)
        if config.EVAL:
            engine.evaluate_only(config, model, dataset_val, run)
        else:
            # before the wrapper, which waits for the gradients of what trains
            freeze(config, model)
            add_projection(config, model)
            engine.fit(config, parallel.wrap_model(config, model), dataset_train, dataset_val, run)
        if utils.rank() == 0:
            leave_report(run, dataset_val)
        signals.end_workers()


def leave_report(run, dataset_val):
    """Writes report.html, where it is asked for, and names the run's files: the last of what rank 0
    does.
    """
    if run.config.REPORT:
        with run.logging_failure("report.html", f"python tools/compare_runs.py {run.directory}"):
            from training.report import write_report

            write_report(run.directory, dataset_val)
    run.tell_files()


def less_memory(config, directory):
    """Returns what to do where memory ran out: what takes less of it, and how a training goes on
    with that.
    """
    smaller = "take a smaller one, or end what else holds memory"
    if progress.doing() == progress.STARTING:
        return f"the model alone takes more than there is: {smaller}"
    evaluates = config.EVAL or progress.doing() == progress.EVALUATING
    size = config.DATA.BATCH_SIZE_EVAL if evaluates else config.DATA.BATCH_SIZE
    if size == 1:
        return f"the batch is one image already: lower -image_size, or the model is too large: {smaller}"
    if config.EVAL:
        return f"lower -batch_size_eval (now {size})"
    whole = config.DATA.GLOBAL_BATCH
    batch = (
        f"DATA.GLOBAL_BATCH (now {whole})"
        if whole
        else f"-batch_size (now {config.DATA.BATCH_SIZE})"
    )
    ways = [
        f"lower {batch} and raise -accum_iter (now {config.TRAIN.ACCUM_ITER}) by the same factor"
    ]
    if evaluates:
        ways = [f"lower -batch_size_eval (now {size})"]
    elif not (config.MODEL.get("RECOMPUTE", True) or config.TO_STATIC):
        # which not every architecture takes
        ways.append("or set MODEL.RECOMPUTE True")
    if directory and any((directory / "checkpoints").glob("epoch_*")):
        ways.append(f"-resume=auto -output={directory} goes on with it from the last checkpoint")
    return "; ".join(ways)


@contextlib.contextmanager
def as_rank(failed, beats):
    """Makes this process a rank within: its parent watches it and receives its failure, and it ends
    with its parent.
    """
    signals.die_with_parent()
    # In the place of this rank, or, where each has an array of its own, in the only one.
    progress.share_beats(
        beats, progress.FIELDS * int(os.environ.get("PADDLE_TRAINER_ID") or 0) % len(beats)
    )
    # A spawned process would spawn its loader's workers, too, each of which imports Paddle anew.
    multiprocessing.set_start_method("fork", force=True)
    signals.received.clear()  # the parent of a fork has recorded them, and forwards them
    signals.stop_at_once()
    with reporting(failed):
        import_paddle()
        yield
    streams.finish()


def watched_worker(failed, beats, handed):
    """Runs ``main_worker`` in a process of its own.

    Args:
        handed: the configuration, to read the data here, or ``spawned.Handed`` of it and the
            datasets.
    """
    with as_rank(failed, beats):
        if isinstance(handed, spawned.Handed):
            main_worker(*handed.open(), failed=failed)
        else:
            found = sharing.read_once(lambda: read_datasets(handed), what_is_read(handed))
            launched.wait_for_all()
            main_worker(*found, failed=failed)


def spawn(worker, count, failed, beats, *objects):
    """Starts ``worker(failed, beats, spawned.Handed(*objects))`` in ``count`` processes, for
    ``spawned.run``.

    On a CPU they are forks of this process, where it has imported Paddle and done nothing else with
    it. CUDA can't be forked, nor can a program that used Paddle before it called ``main``. A fork
    would lack its threads. And Paddle may remember that the process was alone: each rank would then
    train by itself.
    """
    import paddle
    import paddle.distributed as dist

    given = failed, beats, spawned.Handed(*objects)
    computed = paddle.base.core.host_memory_stat_peak_value("Allocated", 0) > 0
    forks = (
        paddle.get_device() == "cpu" and not computed and dist.parallel._global_parallel_env is None
    )
    if forks:
        return dist.spawn(worker, args=given, nprocs=count, join=False, start_method="fork")
    with environment.without_current_folder():
        return dist.spawn(worker, args=given, nprocs=count, join=False, start_method="spawn")


def read_datasets(config):
    """Returns (configuration, training set, validation set)."""
    import datasets
    from models.pretrained import with_preprocessing
    from training.checkpoint import classes_of

    weights = config.MODEL.PRETRAINED, config.MODEL.PRETRAINED_ADAPTER
    trained = classes_of(*weights) if config.EVAL and config.MODEL.PRETRAINED else None
    return datasets.get_datasets(with_preprocessing(config), trained)


def what_is_read(config):
    """Returns bytes that are the same on ranks of a machine to which ``read_datasets`` would return
    the same.
    """
    from settings.options import leaves
    from training.environment import versions

    return repr((versions(), sorted(leaves(config)))).encode()


def next_start(config, count):
    """Returns (configuration, number of processes, words for both) to start spawned ranks again; so
    far: ``count``.
    """
    from config import with_values
    from training.checkpoint import newest_whole

    devices = devices_now()
    now = devices if config.NGPUS == -1 else min(devices, config.NGPUS)
    processes = f"{now} process{'es' * (now > 1)}"
    if now < count:
        processes += f" instead of {count}, as many as there are devices now,"
    checkpoint = newest_whole(Path(config.OUTPUT) / "checkpoints") or "the beginning"
    return (
        with_values(config, "a restart", MODEL__RESUME="auto"),
        now,
        f"with {processes} from {checkpoint}",
    )


def devices_now():
    """Counts GPUs in another process: in this one CUDA remembers how many there were."""
    from utils import num_gpus, num_processes

    if not num_gpus():
        return num_processes(-1)
    with environment.without_current_folder():
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        counted = pool.submit(num_processes, -1)
    with pool:
        return counted.result()


def main():
    """Builds the datasets once and spawns a worker per device, or, where a launcher started it,
    becomes one of them.
    """
    config = config_from_arguments("main_multi_gpu.py")
    if environment.is_launched():  # and what it sets: before Paddle's import
        streams.hurry()
        launched.watch(watched_worker, config)
    import_paddle()
    import utils

    ranks = utils.num_processes(config.NGPUS)
    if ranks > 1:
        environment.prepare_spawn()
    config, *datasets_ = read_datasets(config)

    def start(config, ranks, failed, beats):
        return spawn(watched_worker, ranks, failed, beats, config, *datasets_)

    spawned.run(config, ranks, start, next_start)


if __name__ == "__main__":
    with reporting():
        main()
