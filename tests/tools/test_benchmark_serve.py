"""tools/benchmark.py serve: a server and its clients, once, on a model that takes no time."""

import json
import sys

import pytest

import tools.benchmark


@pytest.mark.long
def test_a_server_is_measured_against_the_plain_model(monkeypatch, tmp_path, capsys):
    words = ["-cfg=vit_digits", "-repeats=1", "--seconds=1", "--clients", "1", "4", "-batch_size=4"]
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["tools/benchmark.py", "serve", *words, f"--json={file}"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tools.benchmark.main()
    report = json.loads(file.read_text())
    printed = capsys.readouterr().out.splitlines()
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]
    figures = {
        kind: {what: s["values"] for what, s in of.items()}
        for kind, of in report["figures"].items()
    }
    assert {kind: list(found) for kind, found in figures.items()} == {
        "plain model": ["images/s"],
        "1 client": ["images/s", "p50", "p99"],
        "4 clients": ["images/s", "p50", "p99"],
    }
    for name in ("1 client", "4 clients"):
        assert 0 < figures[name]["p50"][0] <= figures[name]["p99"][0]
    [one, _] = report["ratios"]
    assert (
        one["median"] == figures["1 client"]["images/s"][0] / figures["plain model"]["images/s"][0]
    )
    assert "batch 4, workers 1" in printed[0]
