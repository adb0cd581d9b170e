"""Repeats a step of a training and shows, layer by layer, where it stops being finite.

    python tools/replay.py RUN -step=3

RUN is a run's folder. Without -step, it is the last step in its bad_steps.json: one whose loss isn't
finite, or is more than 10 times the median of the losses before it. Training is repeated from the
newest checkpoint before that step, or from the beginning, with as many processes as the run had. On
a CPU every number is that of the run, and a line says if the data has changed since. Nothing is
written without -output.

The tables list what each layer returns and then the gradients in the order of the backward pass, up to
the first layer that isn't finite. If all are finite, the samples with the largest losses are named.

With -output=FOLDER, a new folder contains the step: weights.safetensors, the weights before it, as a
checkpoint's model.safetensors; batch_rank<k>.npz, the columns of each process's batch, its samples'
names, and what the network was given (input_0, ...); and step.json, its epoch, seed, number of
processes, learning rate, losses and what was found.

Exit status: 0 with a finding or without one; 2 if the step can't be repeated.
"""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import (  # noqa: E402  (first: it says what isn't installed)
    InputError,
    counted,
    reporting,
)

# isort: split
from launch.files import check_new_folder, making_folder  # noqa: E402
from settings.parser import Parser  # noqa: E402


class Start(NamedTuple):
    """Where a repetition starts.

    Attributes:
        checkpoint: None: the beginning of the run.
        step: the number of steps that were made before.
        ranks: the number of processes; None: it isn't known.
    """

    checkpoint: Path | None
    step: int
    ranks: int | None


def parsed_arguments() -> argparse.Namespace:
    """Returns the parsed command line.

    Raises:
        InputError: a flag is out of range, or RUN isn't the folder of a training.
    """
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a training")
    parser.add_argument(
        "-step",
        "--step",
        type=int,
        metavar="N",
        help="number of the step, from 1; default: the last one in RUN/bad_steps.json",
    )
    parser.add_argument(
        "-ngpus",
        "--ngpus",
        type=int,
        metavar="N",
        help="number of processes; default: as many as the run had",
    )
    parser.add_argument(
        "-output",
        "--output",
        type=Path,
        metavar="FOLDER",
        help="a new folder, which gets the step's batch and the weights before it",
    )
    arguments = parser.parse_args()
    if arguments.step is not None and arguments.step < 1:
        raise InputError(f"-step is {arguments.step}, expected 1 or more")
    if arguments.ngpus is not None and arguments.ngpus < 1:
        raise InputError(f"-ngpus is {arguments.ngpus}, expected 1 or more")
    if not (arguments.run / "config.yaml").is_file():
        raise InputError(f"{arguments.run} has no config.yaml; expected the folder of a training")
    if arguments.output:
        check_new_folder(arguments.output)
    return arguments


def start_before(run: Path, step: int, recorded: list[dict[str, Any]]) -> Start:
    """Returns the newest whole checkpoint before a step, or the beginning of the run.

    Args:
        recorded: the steps in bad_steps.json, for which checkpoints may have been kept.
    """
    from training.checkpoint import storage
    from training.checkpoint.kept import kept_checkpoints
    from training.checkpoint.state import read_state

    found = storage.find_checkpoints(run / "checkpoints")
    found += kept_checkpoints(run, [record["step"] for record in recorded])
    for checkpoint in sorted(found, key=storage.position, reverse=True):
        try:
            storage.verify(checkpoint)
            state = read_state(checkpoint)
        except InputError as error:
            print(f"{error}; an earlier one is used", file=sys.stderr)
            continue
        if state["step"] < step:
            return Start(checkpoint, state["step"], state["ranks"])
    return Start(None, 0, None)


def replay_worker(failed: Any, beats: Any, given: Any) -> None:
    """Repeats the step as one of several ranks.

    Args:
        failed, beats, given: as for ``main_multi_gpu.watched_worker``. ``given`` has the arguments
            of ``replay_as_rank``.
    """
    from main_multi_gpu import as_rank

    with as_rank(failed, beats):
        replay_as_rank(*given.open(), failed=failed)


def replay_as_rank(
    config: Any, train: Any, run: Path, step: int, output: Path | None, failed: Any = None
) -> None:
    """Repeats the step as one rank, or as the only process; rank 0 prints the report.

    Args:
        output: an existing folder, which gets the step; None: nothing is written.
    """
    import utils
    from launch import signals, stall
    from ops.device import set_device_flags
    from training import parallel
    from training.replay import replay, report, write_findings

    ranks = utils.world_size()
    stall.begin(config.DIST.TIMEOUT, by_gloo=ranks > 1 and not utils.num_gpus())
    if not config.DATA.NUM_WORKERS:
        stall.watch(failed)
    set_device_flags(config, ranks)
    parallel.init(config)
    seen = utils.all_gather(replay(config, train, run, step, output))
    if utils.rank() == 0:
        for line in report(seen):
            print(line)
        if output:
            write_findings(output, config, seen)
    signals.end_workers()


def main() -> None:
    arguments = parsed_arguments()
    run = arguments.run
    from main_multi_gpu import import_paddle, read_datasets, spawn

    import_paddle()
    import utils
    from config import get_config, with_values
    from launch import spawned
    from training.bad_steps import FILE, read_bad_steps

    config = get_config(run / "config.yaml")
    if config.EVAL:
        raise InputError(f"{run} is an evaluation, which has no steps; expected a training")
    recorded = read_bad_steps(run)
    if arguments.step is None and not recorded:
        raise InputError(f"{run} has no {FILE}: all its losses were in proportion; pass -step=N")
    step = arguments.step or recorded[-1]["step"]
    start = start_before(run, step, recorded)
    # A resumed run may have other processes than the one that wrote the checkpoint.
    known = next((record["ranks"] for record in recorded if record["step"] == step), None)
    ranks = arguments.ngpus or known or start.ranks or utils.num_processes(config.NGPUS)
    # The file may be another user's: it doesn't say where this command writes.
    config = with_values(
        config,
        "this command",
        OUTPUT=None,
        TRACKERS=None,
        DATA__CACHE=None,
        MODEL__RESUME=start.checkpoint and str(start.checkpoint),
    )
    if config.TO_STATIC:
        # The layers of a graph can't be looked at.
        config = with_values(config, "this command", TO_STATIC=False)
        print("note: the run was compiled (TO_STATIC), so the last digits may differ")
    if config.MODEL.get("RECOMPUTE"):
        # Its layers would compute twice. Stage 3 of sharding needs that, and stage 2 has its bits.
        values: dict[str, Any] = {"MODEL__RECOMPUTE": False}
        if config.DIST.STRATEGY.sharding_configs.stage == 3:
            values["DIST__STRATEGY__sharding_configs__stage"] = 2
        config = with_values(config, "this command", **values)
    where = start.checkpoint or "the beginning"
    steps = counted(step - start.step, "step", "steps")
    processes = counted(ranks, "process", "processes")
    print(f"repeating {steps} from {where}, in {processes}", flush=True)
    if ranks > 1:
        spawned.prepare_spawn()
    config, train, _ = read_datasets(config, ranks)
    with contextlib.ExitStack() as stack:
        output = None
        if arguments.output:
            output = stack.enter_context(making_folder(arguments.output))
        if ranks == 1:
            replay_as_rank(config, train, run, step, output)
        else:

            def started(config: Any, ranks: int, failed: Any, beats: Any) -> Any:
                return spawn(replay_worker, ranks, failed, beats, config, train, run, step, output)

            spawned.run(config, ranks, started)
    if arguments.output:
        print(f"saved in {arguments.output}")


if __name__ == "__main__":
    with reporting():
        main()
