"""Trackers: VisualDL, TensorBoard, Weights & Biases, MLflow, SwanLab and Trackio, which show a
run's records.

None of these packages is needed. They are imported only in the process that follows a run's
metrics.jsonl (``training.tracking``). All of them work offline: their files lie in the run's
folder.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from settings.configuration import leaves
from settings.registry import trackers

# Variables that are set before a package is imported: it sends nothing and prints nothing.
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Later releases of MLflow need it for the store of files.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    # Trackio would ask Hugging Face for the name of the user whose token it finds.
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "true",
}


class Tracker:
    """A tracker of one run. If a method raises, this tracker is turned off, and the run continues.

    Args:
        folder: the tracker's own folder, within the run's.
        config: the run's configuration, as nested dicts.

    Attributes:
        written: a pattern of the names of what the tracker writes into its folder. These entries
            are removed when a run is resumed.
    """

    written = ".*"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Adds one record of metrics.jsonl.

        Args:
            split: "train", "val" or "ema".
            step: the run's step.
            values: the record's numbers by name.
        """
        raise NotImplementedError

    def end(self, final: Mapping[str, float]) -> None:
        """Ends the tracker's run.

        Args:
            final: the numbers of result.json by name; empty if the run didn't come to its end.
        """
        raise NotImplementedError


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration's values by dotted key, as numbers and texts.

    Trackers take these alone as hyperparameters.
    """
    return {
        key: value if type(value) in (int, float) else str(value)
        for key, value in leaves(dict(config))
    }


# Entries of result.json, and of an evaluation in it, that aren't results.
_NO_RESULTS = ("config", "versions", "environment")


def final_numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of result.json by name: acc1, best/acc1, ema/acc1, ema/best/acc1."""
    results = {key: value for key, value in result.items() if key not in _NO_RESULTS}
    if "ema" in results:
        # The evaluation of the averaged weights repeats the configuration.
        average = results["ema"].items()
        results["ema"] = {key: value for key, value in average if key not in _NO_RESULTS}
    return {
        key.replace(".", "/"): value
        for key, value in leaves(results)
        if type(value) in (int, float)
    }


@trackers.register("visualdl", package="visualdl", extra="visualdl")
class VisualDL(Tracker):
    """VisualDL, which is Paddle's own tracker."""

    written = r"vdlrecords\..*"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from visualdl import LogWriter  # pyright: ignore[reportMissingImports]: an extra

        self.writer = LogWriter(logdir=str(folder), flush_secs=10)
        self.config = flat(config)

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{split}/{name}", value, step)

    def end(self, final: Mapping[str, float]) -> None:
        for name, value in final.items():
            self.writer.add_scalar(f"result/{name}", value, 0)
        self.writer.add_hparams(self.config, [f"result/{name}" for name in final] or ["train/loss"])
        self.writer.close()


@trackers.register("tensorboard", package="tensorboardX", extra="tensorboard")
class TensorBoard(Tracker):
    """TensorBoard. tensorboardX writes its files, and needs neither TensorFlow nor torch."""

    written = r"events\.out\.tfevents\..*"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]: an extra

        self.writer = SummaryWriter(str(folder), flush_secs=10)
        self.config = flat(config)

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{split}/{name}", value, step)

    def end(self, final: Mapping[str, float]) -> None:
        from tensorboardX.summary import hparams  # pyright: ignore[reportMissingImports]: an extra

        results = {f"result/{name}": value for name, value in final.items()}
        for name, value in results.items():
            self.writer.add_scalar(name, value, 0)
        file = self.writer.file_writer
        # It is open.
        assert file is not None
        # add_hparams would write them as a second run.
        for summary in hparams(self.config, results):
            file.add_summary(summary)
        self.writer.close()


@trackers.register("wandb", package="wandb", extra="wandb")
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
        # W&B's own steps can't go back. A resumed run's may, if its batch size is another one.
        self.run.define_metric("*", step_metric="step")

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step} | {f"{split}/{name}": value for name, value in values.items()})

    def end(self, final: Mapping[str, float]) -> None:
        self.run.summary.update({f"result/{name}": value for name, value in final.items()})
        self.run.finish(exit_code=0 if final else 1)


@trackers.register("mlflow", package="mlflow", extra="mlflow")
class MLflow(Tracker):
    """MLflow, with a store of files: ``mlflow ui --backend-store-uri RUN/mlflow`` shows it.

    The environment variable MLFLOW_EXPERIMENT_NAME names the experiment.
    """

    written = r"[0-9]+|\.trash|models"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]: an extra
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]: an extra

        self.metric = Metric
        self.client = MlflowClient(tracking_uri=folder.absolute().as_uri())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "runs"
        experiment = self.client.create_experiment(name)
        self.run = self.client.create_run(experiment, run_name=folder.parent.name).info.run_id
        # MLflow takes values of up to 500 characters.
        parameters = [Param(key, str(value)[:500]) for key, value in flat(config).items()]
        self.client.log_batch(self.run, params=parameters)

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [
            self.metric(f"{split}/{name}", value, now, step) for name, value in values.items()
        ]
        self.client.log_batch(self.run, metrics)

    def end(self, final: Mapping[str, float]) -> None:
        self.add("result", 0, final)
        self.client.set_terminated(self.run, "FINISHED" if final else "KILLED")


# Besides the records, SwanLab would collect the console's output, the machine's hardware, the
# installed packages and the checkout's Git address, and would call a webhook.
_ONLY_RECORDS = {
    "terminal": {"proxy_type": "none"},
    "probe": dict.fromkeys(
        ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor"), False
    ),
    "integration": {"webhook": {"url": ""}},
    # The name of the run's folder, which otherwise has the time.
    "run": {"dir": "run"},
}
# Variables by which Trackio would send a run to a server.
_TRACKIO_SERVERS = (
    "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL",
    "TRACKIO_BUCKET_ID",
    "TRACKIO_DATASET_ID",
    "TRACKIO_WEBHOOK_URL",
)


@trackers.register("swanlab", package="swanlab", extra="swanlab")
class SwanLab(Tracker):
    """SwanLab: ``swanlab sync RUN/swanlab/run`` uploads it.

    The environment variable SWANLAB_PROJ_NAME names the project.
    """

    written = r"run|\.gitignore"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]: an extra

        swanlab.merge_settings(_ONLY_RECORDS)
        self.run = swanlab.init(
            mode="offline",
            log_dir=str(folder),
            project=os.environ.get("SWANLAB_PROJ_NAME") or "runs",
            name=folder.parent.name,
            resume="never",
            config=dict(config),
        )

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        self.run.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def end(self, final: Mapping[str, float]) -> None:
        if final:
            self.add("result", 0, final)
        self.run.finish("success" if final else "aborted")


@trackers.register("trackio", package="trackio", extra="trackio")
class Trackio(Tracker):
    """Trackio: ``TRACKIO_DIR=RUN/trackio trackio show`` shows it."""

    written = r"runs\..*|inbox|media"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        # Trackio reads its folder's name when it is imported.
        os.environ["TRACKIO_DIR"] = str(folder)
        for name in _TRACKIO_SERVERS:
            os.environ.pop(name, None)
        import trackio  # pyright: ignore[reportMissingImports]: an extra

        self.run = trackio.init(
            project="runs",
            name=folder.parent.name,
            config=dict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        self.run.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def end(self, final: Mapping[str, float]) -> None:
        if final:
            self.add("result", 0, final)
        self.run.finish()
