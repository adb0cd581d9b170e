"""A run's records name the toolkit's version; a run that goes on says where it was another."""

import json

import pytest
from conftest import ROOT
from support.training_runs import train

import ops
from training.checkpoint import resume, saver, state
from training.versions import versions

HERE = versions()
# what earlier runs wrote
BEFORE = {name: version for name, version in HERE.items() if name != "toolkit"}


OTHER = BEFORE | {"paddle": "2.5"}
NEXT = HERE | {"toolkit": "9"}


@pytest.mark.parametrize("used", [True, False])
def test_a_checkpoint_takes_what_a_run_records_of_its_versions(monkeypatch, used):
    monkeypatch.setattr(ops, "are_used", lambda: used)
    found = versions()
    assert found["operators"] == ("compiled" if used else "paddle")
    assert state._are_versions(found)


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        (HERE, HERE, None),
        (BEFORE, HERE, None),
        (OTHER, HERE, f"saved with {OTHER}, resumed with {BEFORE}: the last digits may differ"),
        (HERE, NEXT, f"saved with {HERE}, resumed with {NEXT}: the last digits may differ"),
    ],
    ids=["same", "earlier", "other paddle", "other toolkit"],
)
def test_records_name_the_version_and_a_resumed_run_says_where_it_was_another(
    tmp_path, tiny, monkeypatch, capsys, then, now, told
):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "MODEL.RESUME", "auto"]
    run = tmp_path / "run"
    monkeypatch.setattr(saver, "versions", lambda: then)
    train(options, run, 32)
    assert json.loads((run / "checkpoints" / "last" / "state.json").read_text())["versions"] == then
    assert json.loads((run / "result.json").read_text())["versions"] == HERE
    assert f'version = "{HERE["toolkit"]}"' in (ROOT / "pyproject.toml").read_text().splitlines()
    monkeypatch.setattr(resume, "versions", lambda: now)
    capsys.readouterr()
    train(options, run, 32)
    lines = capsys.readouterr().out
    assert "resumed after epoch" in lines
    assert told in lines if told else "saved under" not in lines
