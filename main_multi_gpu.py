"""Trains or evaluates on every device of a machine, or of several machines under a launcher.

python main_multi_gpu.py -cfg=configs/vit/vit_digits.yaml -dataset=digits
python -m paddle.distributed.launch --nproc_per_node 2 main_multi_gpu.py -cfg=... (the same flags)

``main`` builds the datasets once and spawns ``main_worker`` for each device. Under a launcher, each
process already is a rank: it reads the data and calls ``main_worker`` itself. Modules that a run of
one process doesn't need are imported where they are used.
"""

# Handles signals and broken streams from the first moment on: the other imports take a second.
import launch.startup

# isort: split
import contextlib
import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from errors import counted, reporting, reporting_memory
from launch import caller, devices, launchers, progress, signals, stall, streams
from training.command_line import config_from_arguments


def import_paddle():
    """Imports Paddle, and holds signals back until it is imported.

    Paddle's import installs signal handlers of its own, in C++. They print a long dump, in which
    the line that matters is lost, and disabling them doesn't bring Python's handlers back.
    ``signals.stop_at_once`` installs those again.

    Raises:
        InputError: Paddle sees no GPU though the machine has some.
    """
    streams.hurry()
    signals.block_signals()
    with launch.startup.without_collection():
        import paddle

        # Later collections leave out the many objects that exist now.
        gc.freeze()
    paddle.disable_signal_handler()
    signals.stop_at_once()
    if paddle.device.is_compiled_with_cuda():
        devices.check_seen(paddle.device.cuda.device_count())


def main_worker(config, dataset_train, dataset_val, failed=None):
    """Trains or evaluates as one rank of a run; each process calls it. After ``parallel.init``, the
    code is the same for one process and for many.

    Args:
        failed: where this rank leaves its failure for the process that watches it, as in
            ``errors.reporting``.
    """
    import paddle.distributed as dist

    import utils
    from ops.device import set_device_flags
    from settings.registry import tasks
    from training import engine, parallel
    from training.batch_size import agree_on_batch_sizes
    from training.equal_ranks import check_network, check_same
    from training.live_report import LiveReport
    from training.optim import freeze
    from training.run import Run

    run = None
    with reporting_memory(lambda: memory_advice(config, run and run.directory)):
        ranks = utils.world_size()
        stall.begin(config.DIST.TIMEOUT, by_gloo=ranks > 1 and not utils.num_gpus())
        if not config.DATA.NUM_WORKERS:
            # This process reads the images itself.
            stall.watch(failed)
        ranks_here = int(os.environ.get("PADDLE_LOCAL_SIZE", ranks))
        settings = set_device_flags(config, ranks_here)
        # Calls init_parallel_env, unless this is the only process.
        parallel.init(config)
        config = agree_on_batch_sizes(config)
        check_same(config, dataset_train, dataset_val)
        run = Run(config, dataset_val.classes)
        processes = counted(ranks, "process", "processes")
        if ranks > 1:
            processes += f" over {dist.get_backend()}"
        run.info(f"{processes} on {', '.join(run.devices)}: {settings}")
        utils.seed_everything(config.SEED)
        task = tasks.choose(config)(config, dataset_val.classes)
        live = None
        if config.REPORT and not config.EVAL:
            # Its process is forked from this one, which has no weights yet.
            live = LiveReport(run, task, dataset_val)
        with run.logging_end(), live or contextlib.nullcontext():
            network = task.build_network()
            check_network(network)
            if config.EVAL:
                engine.evaluate_only(task, network, dataset_val, run)
            else:
                # Before the network is wrapped: the wrapper waits for the gradients of what trains.
                freeze(config, network)
                network = parallel.wrap_model(config, network)
                engine.fit(task, network, dataset_train, dataset_val, run, live)
        if utils.rank() == 0:
            leave_report(run, dataset_val)
        signals.end_workers()


def leave_report(run, dataset_val):
    """Writes report.html if REPORT is set, and names the run's files. Rank 0 does this last.

    A program that called this run (``launch.caller``) gets its folder.
    """
    if run.config.REPORT:
        with run.logging_failure("report.html", f"python tools/compare_runs.py {run.directory}"):
            from training.report import write_report

            write_report(run.directory, dataset_val)
    run.log_files()
    caller.answer(run.directory)


def memory_advice(config, directory):
    """Returns advice for a run that ran out of memory: which settings need less, and how to continue
    a training with them.

    Args:
        directory: the run's directory; None: it has none yet.
    """
    smaller = "use a smaller model, or end other processes that use memory"
    if progress.doing() == progress.STARTING:
        return f"the model alone needs more memory than there is: {smaller}"
    is_evaluating = config.EVAL or progress.doing() == progress.EVALUATING
    size = config.DATA.BATCH_SIZE_EVAL if is_evaluating else config.DATA.BATCH_SIZE
    if size == 1:
        return f"the batch is a single image already: lower -image_size, or {smaller}"
    if config.EVAL:
        return f"lower -batch_size_eval (now {size})"
    if is_evaluating:
        ways = [f"lower -batch_size_eval (now {size})"]
    else:
        batch = f"-batch_size (now {config.DATA.BATCH_SIZE})"
        if config.DATA.GLOBAL_BATCH:
            batch = f"DATA.GLOBAL_BATCH (now {config.DATA.GLOBAL_BATCH})"
        accumulation = f"-accum_iter (now {config.TRAIN.ACCUM_ITER})"
        ways = [f"lower {batch} and raise {accumulation} by the same factor"]
        # An architecture that can't recompute has no such key.
        if not (config.MODEL.get("RECOMPUTE", True) or config.TO_STATIC):
            ways.append("or set MODEL.RECOMPUTE True")
    if directory and any((directory / "checkpoints").glob("epoch_*")):
        ways.append(f"-resume=auto -output={directory} continues with it from the last checkpoint")
    return "; ".join(ways)


@contextlib.contextmanager
def as_rank(failed, beats):
    """Makes this process a rank within the body. The process that watches it receives its progress
    and its failure. If its parent ends, it ends, too.

    Args:
        failed: shared bytes for the failure (``errors.reporting``).
        beats: shared numbers for the progress, of this rank alone or of all ranks of the machine.
    """
    signals.die_with_parent()
    first = progress.FIELDS * int(os.environ.get("PADDLE_TRAINER_ID") or 0)
    # A launched rank has an array of its own. Spawned ranks share one.
    if len(beats) == progress.FIELDS:
        first = 0
    progress.share_beats(beats, first)
    # Under "spawn", each of the loader's workers would import Paddle again.
    multiprocessing.set_start_method("fork", force=True)
    # A fork inherits the signals that its parent has recorded. The parent sends them to it, too, so
    # they would count twice.
    signals.received.clear()
    signals.stop_at_once()
    with reporting(failed):
        import_paddle()
        yield
    streams.finish()


def watched_worker(failed, beats, given):
    """Runs ``main_worker`` in a process that another one watches.

    Args:
        failed, beats: as for ``as_rank``.
        given: ``spawned.SharedObjects`` with the configuration and the datasets; or, under a
            launcher, the configuration alone: the ranks of this machine read the data once.
    """
    from launch import spawned

    with as_rank(failed, beats):
        if isinstance(given, spawned.SharedObjects):
            config, dataset_train, dataset_val = given.open()
        else:
            import utils
            from launch import launched, sharing

            config, dataset_train, dataset_val = sharing.read_once(
                lambda: read_datasets(given, utils.world_size()), datasets_key(given)
            )
            launched.wait_for_all()
        main_worker(config, dataset_train, dataset_val, failed=failed)


def spawn(worker, count, failed, beats, *objects):
    """Starts ``worker(failed, beats, SharedObjects(*objects))`` in ``count`` processes, for
    ``spawned.run``.

    On a CPU, they are forks of this process if it has imported Paddle and done nothing else with
    it. Otherwise they are new Python processes: CUDA can't be forked, and neither can a program
    that computed with Paddle before it called ``main``. A fork would lack Paddle's threads. Paddle
    may also remember that the process was alone, so that each rank would train by itself.
    """
    import paddle
    import paddle.distributed as dist

    from launch import spawned

    arguments = failed, beats, spawned.SharedObjects(*objects)
    has_computed = paddle.base.core.host_memory_stat_peak_value("Allocated", 0) > 0
    was_alone = dist.parallel._global_parallel_env is not None
    if paddle.get_device() == "cpu" and not has_computed and not was_alone:
        return dist.spawn(worker, args=arguments, nprocs=count, join=False, start_method="fork")
    with spawned.without_current_folder():
        return dist.spawn(worker, args=arguments, nprocs=count, join=False, start_method="spawn")


def read_datasets(config, ranks=1):
    """Returns (configuration, training set, validation set).

    From here on the configuration is final. It has what pretrained weights say about their model and
    its images, the number of the data's classes, each rank's share of DATA.GLOBAL_BATCH, and numbers
    for batch sizes that are "auto". An evaluation's classes are those of the weights.
    """
    import datasets
    from models.pretrained import with_preprocessing
    from training.checkpoint import check_task, classes_of
    from training.setup import share_batch

    classes = None
    if config.EVAL and config.MODEL.PRETRAINED:
        check_task(config.MODEL.PRETRAINED, config.TASK, config.MODEL.PRETRAINED_ADAPTER)
        classes = classes_of(config.MODEL.PRETRAINED, config.MODEL.PRETRAINED_ADAPTER)
    config = share_batch(with_preprocessing(config), ranks)
    config, dataset_train, dataset_val = datasets.get_datasets(config, classes)
    if "auto" in (config.DATA.BATCH_SIZE, config.DATA.BATCH_SIZE_EVAL):
        from training.batch_size import find_batch_sizes

        config = find_batch_sizes(config, dataset_train, dataset_val, ranks)
    return config, dataset_train, dataset_val


def datasets_key(config):
    """Returns bytes that are equal on two ranks of a machine if ``read_datasets`` would return the
    same to both.
    """
    from settings.configuration import leaves
    from training.versions import versions

    return repr((versions(), sorted(leaves(config)))).encode()


def next_start(config, count):
    """Returns (configuration, number of processes, words that describe them) for a restart of
    spawned ranks, of which there were ``count``.
    """
    from config import with_values
    from training.checkpoint import newest_whole

    ranks = devices_now()
    if config.NGPUS != -1:
        ranks = min(ranks, config.NGPUS)
    processes = counted(ranks, "process", "processes")
    if ranks < count:
        processes += f" instead of {count}, the number of devices now,"
    checkpoint = newest_whole(Path(config.OUTPUT) / "checkpoints") or "the beginning"
    config = with_values(config, "a restart", MODEL__RESUME="auto")
    return config, ranks, f"with {processes} from {checkpoint}"


def devices_now():
    """Counts the devices. GPUs are counted in another process: in this one, CUDA remembers how many
    there were.
    """
    from launch import spawned
    from utils import num_gpus, num_processes

    if not num_gpus():
        return num_processes(-1)
    with spawned.without_current_folder():
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        counted = pool.submit(num_processes, -1)
    with pool:
        return counted.result()


def main():
    """Builds the datasets once and spawns a worker per device. If a launcher started this process,
    it becomes one of the workers instead.
    """
    caller.end_with_caller()
    config = config_from_arguments("main_multi_gpu.py")
    # Before Paddle's import, which reads the variables that this sets.
    if launchers.is_launched():
        from launch import launched

        streams.hurry()
        launched.watch(watched_worker, config)
    import_paddle()
    import ops
    import utils
    from launch import spawned
    from training.setup import share_batch

    ranks = utils.num_processes(config.NGPUS)
    if ranks > 1:
        spawned.prepare_spawn()
        ops.decide()
    config, dataset_train, dataset_val = read_datasets(config, ranks)

    def start(config, ranks, failed, beats):
        # A restart may have fewer ranks.
        config = share_batch(config, ranks)
        return spawn(watched_worker, ranks, failed, beats, config, dataset_train, dataset_val)

    # Waits for the ranks, and starts them again if some are lost (DIST.MAX_RESTART).
    spawned.run(config, ranks, start, next_start)


if __name__ == "__main__":
    with reporting():
        main()
