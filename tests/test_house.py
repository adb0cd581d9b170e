"""The plan of the house: CONTRIBUTING.md's list of rooms, held against the imports that the code has."""

import ast
import re

import pytest
import yaml
from programs import ROOT

FILES = sorted(
    file
    for file in ROOT.rglob("*.py")
    if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
    and file.relative_to(ROOT).parts[0] not in ("output", "log", "logs")
)
TREES = {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
HOUSE = {name: tree for name, tree in TREES.items() if not name.startswith("tests/")}
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROOMS = re.findall(r"^([\w/.]+)(?: |$)", re.search(r"## Where things are.*?```\n(.*?)```", PAGE, re.S)[1], re.M)
MODULES = {re.sub(r"(/__init__)?\.py$", "", name).replace("/", "."): name for name in HOUSE}


def room(name):
    """The line of the list that a file is on."""
    return ROOMS.index(name if "/" not in name else f"{name.partition('/')[0]}/")


def imported(tree):
    """Yields each module or name that a file imports, wherever in it, by its dotted name; none is relative."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def targets(name):
    """The files of the house that a file imports."""
    found = set()
    for dotted in imported(HOUSE[name]):
        module = dotted if dotted in MODULES else dotted.rpartition(".")[0]
        found |= {MODULES[module]} & HOUSE.keys() if module in MODULES else set()
    return found - {name}


IMPORTS = {name: targets(name) for name in HOUSE}


def packages(dotted):
    return dotted == "paddle" or dotted.startswith("paddle.")


def test_every_file_is_in_a_room_and_every_room_is_there():
    assert {room(name) for name in HOUSE} == set(range(len(ROOMS)))
    assert len(ROOMS) <= 18
    assert len([name for name in ROOMS if name.endswith(".py")]) <= 8 == len([n for n in HOUSE if "/" not in n])


def test_a_room_imports_only_rooms_above_it_in_the_list():
    up = [(a, b) for a, seen in IMPORTS.items() for b in seen if room(b) > room(a)]
    assert not up


def test_no_files_import_each_other_in_a_circle():
    left = {name: set(seen) for name, seen in IMPORTS.items()}
    while ends := {name for name, seen in left.items() if not seen & left.keys()}:
        left = {name: seen for name, seen in left.items() if name not in ends}
    assert not left


def test_the_house_has_at_most_ten_floors():
    below = {
        a: {room(b) for name, seen in IMPORTS.items() if room(name) == a for b in seen} - {a} for a in range(len(ROOMS))
    }
    floors: dict[int, int] = {}
    for place in range(len(ROOMS)):
        floors[place] = 1 + max((floors[other] for other in below[place]), default=0)
    assert max(floors.values()) <= 10


def test_what_starts_and_watches_processes_imports_no_paddle():
    for name in (name for name in HOUSE if name.startswith("launch/") or name == "errors.py"):
        assert not [dotted for dotted in imported(HOUSE[name]) if packages(dotted)], name
    assert {room(b) for a, seen in IMPORTS.items() if a.startswith("launch/") for b in seen} == {
        ROOMS.index("errors.py"),
        ROOMS.index("launch/"),
    }


def test_distribution_is_where_the_page_says():
    [said] = re.findall(r"`paddle\.distributed` appears in (.*?), and nowhere else", PAGE, re.S)
    told = set(re.findall(r"`([\w/.]+)`", said))
    found = {name for name, tree in HOUSE.items() if any(d.startswith("paddle.distributed") for d in imported(tree))}
    assert {name if "/" not in name or name in told else f"{name.partition('/')[0]}/" for name in found} == told


def test_the_changelog_leads_to_modules_that_are_there_and_ends_at_this_version():
    page, project = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "pyproject.toml"))
    rows = re.findall(r"^\| (`.*`) \| (`.*)\|$", page, re.M)
    paths = [path for row in rows for path in re.findall(r"`([\w.]+)`", row[1])]
    assert len(rows) > 10
    assert not [path for path in paths if path not in MODULES and path.rpartition(".")[0] not in MODULES]
    old = [path for row in rows for path in re.findall(r"`([\w.]+)`", row[0])]
    assert not set(old) & MODULES.keys()
    assert re.findall(r"^## \[(.*)\]", page, re.M)[:2] == ["Unreleased", re.search('version = "(.*)"', project)[1]]


def test_what_random_changes_are_tried_on_is_there():
    rows = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text(encoding="utf-8"))
    assert rows.keys() <= HOUSE.keys()
    for name, row in rows.items():
        assert {f"tests/{test}" for test in row["tests"].split()} <= TREES.keys()
        assert row["killed"][-1] + len(row.get("same", [])) <= row["places"], name


def test_a_room_has_its_own_folder_of_tests():
    folders = {name.split("/")[1] for name in TREES if name.startswith("tests/") and name.count("/") > 1}
    assert folders - {"faults", "fuzz", "golden", "stand_in"} <= {name.rstrip("/") for name in ROOMS}


@pytest.mark.parametrize("name", TREES)
def test_files_have_350_lines_at_most_and_functions_60(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 350
    functions = (n for n in ast.walk(TREES[name]) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    long = [f"{f.name}: {f.end_lineno - f.lineno + 1}" for f in functions if f.end_lineno - f.lineno + 1 > 60]
    assert not long
