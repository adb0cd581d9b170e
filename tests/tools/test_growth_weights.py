"""The subjects of ``growth`` that weights, predictions and long runs are: each does its work, at a
small size.
"""

import pytest
from safetensors.numpy import load_file

from tools.benchmarks.growth_weights import MEASURES


@pytest.mark.parametrize("name", MEASURES)
def test_sizes_grow(name):
    for sizes in (MEASURES[name].sizes, MEASURES[name].quick):
        assert len(sizes) >= 3
        assert list(sizes) == sorted(set(sizes))


def test_the_mean_of_files(tmp_path):
    MEASURES["average_weights"].prepare(3, tmp_path)()
    found = load_file(tmp_path / "mean.safetensors")
    assert len(found) == 10
    assert all((array == 1).all() for array in found.values())


def test_a_model_takes_its_own_weights(tmp_path):
    report = MEASURES["load_weights"].prepare(1, tmp_path)()
    assert len(report.loaded) == 20
    assert (tmp_path / "model.safetensors").stat().st_size > 50e6


def test_a_table_and_a_report(tmp_path):
    MEASURES["predictions"].prepare(200, tmp_path)()
    lines = (tmp_path / "predictions.csv").read_text().splitlines()
    assert len(lines) == 201
    assert lines[1].startswith('"n00000000/n00000000_0.JPEG",')
    assert "The most confident mistakes" in (tmp_path / "report.html").read_text()


def test_the_ends_of_epochs(tmp_path):
    MEASURES["epoch_end"].prepare(10, tmp_path)()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "last").resolve().name == "epoch_0031"
    assert len(list(checkpoints.glob("epoch_*"))) == 31
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 21
