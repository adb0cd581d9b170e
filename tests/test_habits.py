"""The files of the project's habits: what they call is there, and their words agree with the code."""

import re

import pytest
import yaml
from conftest import ROOT
from support import links

from settings.parser import __version__

KINDS = (".github/**/*.yml", ".pre-commit-config.yaml", "compose.yaml")
YAML = sorted(file for kind in KINDS for file in ROOT.glob(kind))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", YAML, ids=lambda file: file.name)
def test_yaml_can_be_read(file):
    assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)


def test_the_workflow_calls_targets_of_the_makefile():
    [job] = read(".github/workflows/test.yml")["jobs"].values()
    matrix = job["strategy"]["matrix"]
    [command] = [step["run"] for step in job["steps"] if "run" in step]
    assert command == "make ${{ matrix.target }} PYTHON=python${{ matrix.python }}"
    called = {*matrix["target"], *(row["target"] for row in matrix["include"])}
    here = set(re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.M))
    # Another Python than that of .ci/run.
    assert called == here | {"test-smoke"}
    assert {"python": "3.13", "target": "test-smoke"} in matrix["include"]
    assert called <= TARGETS
    assert re.search(r"3, 10\) <= v <= \(3, 13", (ROOT / "Makefile").read_text())
    assert matrix["python"] == ["3.10", "3.11", "3.12"]


def test_what_runs_before_a_commit_is_what_make_lint_runs():
    [repository] = read(".pre-commit-config.yaml")["repos"]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    called = {hook["entry"].split()[2] for hook in repository["hooks"] if " -m " in hook["entry"]}
    assert called == set(re.findall(r"-m (\w+)", lint))
    pins = (ROOT / "constraints.txt").read_text()
    assert all(re.search(rf"^{name.removesuffix('_lib')}==", pins, re.M) for name in called)
    [script] = [
        hook["entry"].split()[1] for hook in repository["hooks"] if " -m " not in hook["entry"]
    ]
    assert (ROOT / script).is_file()


def test_the_citation_is_of_this_version():
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = read("CITATION.cff")
    # what the format asks for
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["title"].startswith(f"{project['name']}: ")
    assert citation["version"] == project["version"] == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    # The changelog's newest section with a version is this one's, of the same day.
    page = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[\d.*", page, re.M)[0]
    assert newest == f"## [{__version__}] - {citation['date-released']}"
    assert citation["license"] == project["license"]
    assert citation["authors"] == project["authors"]


def test_links_between_the_pages_lead_somewhere(tmp_path):
    assert {
        str(page.relative_to(ROOT)): links.broken(page)
        for page in links.pages()
        if links.broken(page)
    } == {}
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`, three\n[a](#one-two-three) [b](#two) [c](none.md) [d](page.md#x) [e](http://none)\n"
    )
    assert links.broken(page) == ["#two", "none.md", "page.md#x"]
    (tmp_path / "more.md").write_text(
        "## Serve\n## Serve\n[a](#serve) [b](#serve-1) [c](#serve-2) `[d](none.md)`\n"
    )
    assert links.broken(tmp_path / "more.md") == ["#serve-2"]
