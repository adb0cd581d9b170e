"""Reads the files of trackers: values by (tag, step), hyper-parameters and results."""

import contextlib
import json
import sqlite3
import struct

import yaml

from training.trackers import Tracker


def of_tensorboard(file):
    """Yields the payloads of a file of TFRecords. A record is a length and its checksum, and the
    payload and its checksum.
    """
    data = file.read_bytes()
    place = 0
    while place < len(data):
        (size,) = struct.unpack_from("<Q", data, place)
        yield data[place + 12 : place + 12 + size]
        place += 16 + size


def of_level_db(file):
    """Yields the payloads of LevelDB's log, whose blocks are of 32 KiB, after a head of 7 bytes."""
    data = file.read_bytes()
    place = 7
    part = b""
    while place < len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<4xHB", data, place)
        part += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield part
            part = b""


def apart(values):
    """Returns the values by (tag, step) without the results, and the results by name."""
    others = {}
    results = {}
    for (tag, step), value in values.items():
        if tag.startswith("result/"):
            results[tag.removeprefix("result/")] = value
        else:
            others[tag, step] = value
    return others, results


def read_tensorboard(folder):
    from tensorboardX.proto import event_pb2, plugin_hparams_pb2

    values = {}
    parameters = {}
    [file] = folder.iterdir()
    for payload in of_tensorboard(file):
        for value in event_pb2.Event.FromString(payload).summary.value:
            if value.WhichOneof("value") == "simple_value":
                key = value.tag, event_pb2.Event.FromString(payload).step
                assert key not in values
                values[key] = value.simple_value
            elif value.tag == "_hparams_/session_start_info":
                content = plugin_hparams_pb2.HParamsPluginData.FromString(
                    value.metadata.plugin_data.content
                )
                for name, one in content.session_start_info.hparams.items():
                    parameters[name] = getattr(one, one.WhichOneof("kind"))
    shown, results = apart(values)
    return shown, parameters, results


def read_visualdl(folder):
    from visualdl.proto.record_pb2 import Record
    from visualdl.reader.record_reader import RecordReader

    values = {}
    parameters = {}
    [file] = folder.iterdir()
    for payload in RecordReader(str(file)).get_all():
        for value in Record.FromString(payload).values:
            if value.WhichOneof("one_value") == "value":
                assert (value.tag, value.id) not in values
                values[value.tag, value.id] = value.value
            elif value.WhichOneof("one_value") == "hparam":
                for one in value.hparam.hparamInfos:
                    parameters[one.name] = getattr(one, one.WhichOneof("type"))
    shown, results = apart(values)
    return shown, parameters, results


def read_wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    values = {}
    parameters = {}
    results = {}
    [run] = [entry for entry in folder.iterdir() if entry.name.startswith("offline-run-")]
    for payload in of_level_db(next(run.glob("*.wandb"))):
        record = Record.FromString(payload)
        if record.WhichOneof("record_type") == "run":
            parameters |= {
                item.key: json.loads(item.value_json) for item in record.run.config.update
            }
        elif record.WhichOneof("record_type") == "history":
            row = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for name in (name for name in row if "/" in name):
                assert (name, row["step"]) not in values
                values[name, row["step"]] = row[name]
        elif record.WhichOneof("record_type") == "summary":
            named = {item.key: json.loads(item.value_json) for item in record.summary.update}
            results |= {
                name[7:]: value for name, value in named.items() if name.startswith("result/")
            }
    return values, parameters, results


def read_mlflow(folder):
    values = {}
    parameters = {}
    [experiment] = [
        entry for entry in folder.iterdir() if entry.name not in (".trash", "models", "0")
    ]
    [run] = [entry for entry in experiment.iterdir() if (entry / "metrics").is_dir()]
    for file in (entry for entry in (run / "metrics").rglob("*") if entry.is_file()):
        for line in file.read_text().splitlines():
            _, value, step = line.split()[:3]
            key = str(file.relative_to(run / "metrics")), int(step)
            assert key not in values
            values[key] = float(value)
    for file in (run / "params").iterdir():
        parameters[file.name] = file.read_text()
    assert yaml.safe_load((run / "meta.yaml").read_text())["status"] == 3  # finished
    shown, results = apart(values)
    return shown, parameters, results


def read_swanlab(folder):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.proto.swanlab.run.v1.run_pb2 import RUN_STATE_FINISHED

    values = {}
    state = None
    [file] = (folder / "run").glob("*.swanlab")
    for payload in of_level_db(file):
        record = Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        assert kind != "log"  # the console's output
        if kind == "scalar":
            key = record.scalar.key, record.scalar.step
            assert key not in values
            values[key] = float(record.scalar.value.number)
        elif kind == "finish":
            state = record.finish.state
    assert state == RUN_STATE_FINISHED
    config = yaml.safe_load((folder / "run/files/config.yaml").read_text())
    # Nothing about the machine, and no list of the installed packages.
    files = {entry.name for entry in (folder / "run/files").iterdir()}
    assert files == {"config.yaml", "swanlab-metadata.json"}
    about = json.loads((folder / "run/files/swanlab-metadata.json").read_text())
    assert about.pop("_version")
    assert set(about.values()) == {None}
    shown, results = apart(values)
    return shown, {name: entry["value"] for name, entry in config.items()}, results


def read_trackio(folder):
    values = {}
    with contextlib.closing(sqlite3.connect(folder / "runs.db")) as database:
        for step, row in database.execute("SELECT step, metrics FROM metrics"):
            for name, value in json.loads(row).items():
                assert (name, step) not in values
                # Infinity is a text in it.
                values[name, step] = float(value)
        [[config]] = database.execute("SELECT config FROM configs")
    config = json.loads(config)
    assert config.pop("_Username") is None
    shown, results = apart(values)
    return shown, config, results


READERS = {
    "visualdl": read_visualdl,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "swanlab": read_swanlab,
    "trackio": read_trackio,
}


class FailingTracker(Tracker):
    """A tracker that fails at its third record where its folder is called ``odd``."""

    def __init__(self, folder, config):
        self.folder = folder
        self.steps = []

    def add(self, split, step, values):
        self.steps.append((split, step))
        if self.folder.name == "odd" and len(self.steps) == 3:
            raise ConnectionError("no\nroute")

    def end(self, final):
        (self.folder / "end").write_text(json.dumps([self.steps, final]))
