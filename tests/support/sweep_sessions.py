"""Sweeps for tests: their files, and sessions whose runs take no time."""

import json
import math

import yaml

from launch import side_by_side
from tools.sweep import Session
from training.sweeps import results
from training.sweeps.points import plan_points, read_sweep

COMMAND = "python main_single_gpu.py -cfg=vit_digits -o TRAIN.NUM_EPOCHS 2 TRAIN.WARMUP_EPOCHS 0"
KEYS = {
    "TRAIN.BASE_LR": ["1e-4", 0.001],
    "TRAIN.GRAD_CLIP": [None, 1.0],
    "TRAIN.OPTIMIZER.BETAS": [[0.9, 0.99]],
}
DRAWN = {
    "TRAIN.BASE_LR": {"log_uniform": ["1e-5", "1e-1"]},
    "TRAIN.WEIGHT_DECAY": {"uniform": [0, 0.5]},
}


def sweep_of(folder, **content):
    file = folder / "sweep.yaml"
    content = {"command": COMMAND, "keys": KEYS, "output": str(folder / "swept")} | content
    content = {key: value for key, value in content.items() if value is not None}
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return read_sweep(file)


def finish(sweep, name, value):
    """Writes the files that a finished run leaves."""
    (sweep.output / name).mkdir(parents=True, exist_ok=True)
    result = {
        "best": {"acc1": value, "loss": 1.0, "epoch": 3},
        "acc1": 0.0,
        "loss": 2.0,
        "num_samples": 4,
    }
    (sweep.output / name / "result.json").write_text(json.dumps(result))


def session_of(sweep, monkeypatch, dies_after=10**9, fails=()):
    """Returns a session whose runs take no time, and the list of runs. acc1 is a function of the
    point.

    Args:
        dies_after: the number of runs after which the session ends by KeyboardInterrupt.
        fails: the names of the runs that fail.
    """

    def run(commands, environments, on_end, pass_fds):
        for command in commands:
            if len(ran) == dies_after:
                raise KeyboardInterrupt
            ran.append(command.name)
            point = dict(
                word.split("=", 1)
                for word in command.words[command.words.index("-resume=auto") + 2 :]
            )
            failed = command.name in fails
            if not failed:
                finish(
                    sweep, command.name, 90 - (math.log10(float(point["TRAIN.BASE_LR"])) + 3) ** 2
                )
            command.printed.write_text("one\nerror: two\n\n")
            on_end(command.name, 1 if failed else 0)
        return 0

    ran = []
    monkeypatch.setattr(side_by_side, "run", run)
    plan = [] if sweep.method == "optuna" else plan_points(sweep)
    session = Session(sweep, plan, results.read_points(sweep, plan), "acc1", [{}, {}])
    return session, ran
