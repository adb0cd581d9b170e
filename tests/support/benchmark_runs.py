"""Runs tools/benchmark.py in this process, with fake runs and a fake timm, which take no time."""

import json
import os
import sys

import pytest

import tools.benchmark
from tools.benchmarks import training


@pytest.fixture
def benchmark(monkeypatch, tmp_path, capsys):
    """Returns a function that runs the tool with some flags.

    It returns the JSON that the tool wrote, and the lines that it printed.
    """

    def call(*words):
        file = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", ["tools/benchmark.py", *map(str, words), f"--json={file}"])
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        tools.benchmark.main()
        return json.loads(file.read_text()), capsys.readouterr().out.splitlines()

    return call


@pytest.fixture
def canned_runs(monkeypatch):
    """Replaces runs of the main programs by their reports.

    Returns the list of calls: (program, threads, options).
    """
    called = []

    def run(command, threads, **variables):
        flags = [str(word) for word in command]
        options = dict(
            zip(flags[flags.index("-o") + 1 :: 2], flags[flags.index("-o") + 2 :: 2], strict=True)
        )
        called.append((os.path.basename(flags[1]), threads, options))
        folder = next(flag.partition("=")[2] for flag in flags if flag.startswith("-output="))
        ranks = 2 if "-ngpus=2" in flags else 1
        speed = 1.0 if options.get("TUNE_CPU") == "False" else 1.5
        os.makedirs(folder)
        with open(f"{folder}/metrics.jsonl", "w") as file:
            for epoch, (samples, rate) in enumerate(
                [(64, 1.0), (64, 32.0), (32, 64.0), (64, 16.0)]
            ):
                for part in (0.25, 0.75):
                    rates = {"images_per_s": rate * speed * (1.6 if ranks == 2 else 1)}
                    rates["peak_memory"] = 710.0 + 10 * (epoch + 1)  # never falls
                    record = {
                        "split": "train",
                        "epoch": epoch + 1,
                        "samples": samples * part,
                        **rates,
                    }
                    file.write(json.dumps(record) + '\n{"split": "val"}\n')
        return ""

    monkeypatch.setattr(training, "run", run)
    return called


def fake_timm(folder, rates=(12.0,), told=None):
    """Writes a script that replaces a Python with torch and timm. Returns its path.

    It prints its versions, gives the same answer to all other requests, and keeps the last request
    in ``request.json``.
    """
    answer = json.dumps(told or {"images_per_s": rates, "peak_memory": 500.0})
    file = folder / "python"
    versions = """case "$2" in *versions*) echo '{"torch": "2", "timm": "1"}'; exit;; esac"""
    kept = f"""printf %s "$2" > {folder}/request.json"""
    file.write_text(f"#!/bin/sh\n{versions}\n{kept}\necho 'a line'\necho '{answer}'\n")
    file.chmod(0o755)
    return file
