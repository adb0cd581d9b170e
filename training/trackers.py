"""Where a run's records can be shown: VisualDL, TensorBoard, Weights & Biases and MLflow, behind
one interface.

None of them is needed, and none is imported but by ``training.tracking``, the process that follows
a run's metrics.jsonl. All of them are offline: what they write lies in the run's folder.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from settings.options import leaves
from settings.registry import trackers

# Before any of them is imported: nothing is sent anywhere, and nothing is printed.
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # which later releases ask for
    "DO_NOT_TRACK": "true",
}


class Tracker:
    """A place where records are shown. Whatever a method raises turns this tracker off, and nothing
    else.

    Args:
        folder: the tracker's own, in the run's.
        config: the run's configuration, as nested dicts.

    Attributes:
        written: a pattern of the names that it gives to what it writes there. Those entries are
            removed where a run goes on.
    """

    written = ".*"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Takes in one record of metrics.jsonl: numbers by name."""
        raise NotImplementedError

    def end(self, final: Mapping[str, float]) -> None:
        """Ends, with the numbers of result.json by name; none, where the run didn't come to its
        end.
        """
        raise NotImplementedError


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration by dotted key: single numbers and texts, as all of them take
    hyper-parameters.
    """
    return {
        key: value if type(value) in (int, float) else str(value)
        for key, value in leaves(dict(config))
    }


def final_numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of result.json by name: acc1, best/acc1, ema/acc1, ema/best/acc1."""
    found = leaves(
        {key: value for key, value in result.items() if key not in ("config", "versions")}
    )
    return {key.replace(".", "/"): value for key, value in found if type(value) in (int, float)}


@trackers.register("visualdl", package="visualdl", extra="trackers")
class VisualDL(Tracker):
    """Paddle's own."""

    written = r"vdlrecords\..*"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from visualdl import LogWriter  # pyright: ignore[reportMissingImports]: an extra

        self.writer, self.config = LogWriter(logdir=str(folder), flush_secs=10), flat(config)

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{split}/{name}", value, step)

    def end(self, final: Mapping[str, float]) -> None:
        for name, value in final.items():
            self.writer.add_scalar(f"result/{name}", value, 0)
        self.writer.add_hparams(self.config, [f"result/{name}" for name in final] or ["train/loss"])
        self.writer.close()


@trackers.register("tensorboard", package="tensorboardX", extra="trackers")
class TensorBoard(Tracker):
    """Its files, by tensorboardX, which needs neither TensorFlow nor torch."""

    written = r"events\.out\.tfevents\..*"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]: an extra

        self.writer, self.config = SummaryWriter(str(folder), flush_secs=10), flat(config)

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{split}/{name}", value, step)

    def end(self, final: Mapping[str, float]) -> None:
        from tensorboardX.summary import hparams  # pyright: ignore[reportMissingImports]: an extra

        results = {f"result/{name}": value for name, value in final.items()}
        for name, value in results.items():
            self.writer.add_scalar(name, value, 0)
        file = self.writer.file_writer
        assert file is not None  # it is open
        # not add_hparams, which makes a second run of it
        for summary in hparams(self.config, results):
            file.add_summary(summary)
        self.writer.close()


@trackers.register("wandb", package="wandb", extra="trackers")
class WeightsAndBiases(Tracker):
    """Weights & Biases: ``wandb sync RUN/wandb/offline-run-*`` uploads it, to WANDB_PROJECT."""

    written = r"(offline-)?run-.*|latest-run|debug.*\.log"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]: an extra

        name = folder.parent.name
        settings = wandb.Settings(
            console="off", disable_git=True, save_code=False, x_disable_stats=True
        )
        self.run = wandb.init(
            mode="offline",
            dir=str(folder.parent),
            name=name,
            config=dict(config),
            settings=settings,
        )
        # its own steps may not go back; ours, of other batches, may
        self.run.define_metric("*", step_metric="step")

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step} | {f"{split}/{name}": value for name, value in values.items()})

    def end(self, final: Mapping[str, float]) -> None:
        self.run.summary.update({f"result/{name}": value for name, value in final.items()})
        self.run.finish(exit_code=0 if final else 1)


@trackers.register("mlflow", package="mlflow", extra="trackers")
class MLflow(Tracker):
    """MLflow's file store: ``mlflow ui --backend-store-uri RUN/mlflow`` shows it.
    MLFLOW_EXPERIMENT_NAME names it.
    """

    written = r"[0-9]+|\.trash|models"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]: an extra
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]: an extra

        self.metric, self.client = Metric, MlflowClient(tracking_uri=folder.absolute().as_uri())
        experiment = self.client.create_experiment(
            os.environ.get("MLFLOW_EXPERIMENT_NAME") or "runs"
        )
        self.run = self.client.create_run(experiment, run_name=folder.parent.name).info.run_id
        self.client.log_batch(
            self.run, params=[Param(key, str(value)[:500]) for key, value in flat(config).items()]
        )

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self.client.log_batch(
            self.run, [self.metric(f"{split}/{name}", v, now, step) for name, v in values.items()]
        )

    def end(self, final: Mapping[str, float]) -> None:
        self.add("result", 0, final)
        self.client.set_terminated(self.run, "FINISHED" if final else "KILLED")
