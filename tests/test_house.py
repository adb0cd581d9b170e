"""The plan of the house: CONTRIBUTING.md's list of rooms, held against the imports that the code
has.
"""

import ast
import re
from pathlib import Path

import yaml
from support.imports import HOUSE, NAMES, imported, imports, tree_of
from support.programs import ROOT

from settings.parser import __version__

PAGE = (ROOT / "docs/design.md").read_text(encoding="utf-8")
ROOMS = re.findall(
    r"^([\w/.]+)(?: |$)", re.search(r"## The packages.*?```\n(.*?)```", PAGE, re.S)[1], re.M
)


def room(name):
    """The line of the list that a file is on."""
    return ROOMS.index(name if "/" not in name else f"{name.partition('/')[0]}/")


def packages(dotted):
    return dotted == "paddle" or dotted.startswith("paddle.")


def test_every_file_is_in_a_room_and_every_room_is_there():
    assert {room(name) for name in HOUSE} == set(range(len(ROOMS)))
    assert len(ROOMS) <= 19
    assert (
        len([name for name in ROOMS if name.endswith(".py")])
        <= 7
        == len([n for n in HOUSE if "/" not in n])
    )


def test_a_room_imports_only_rooms_above_it_in_the_list():
    up = [(a, b) for a, seen in imports().items() for b in seen if room(b) > room(a)]
    assert not up


def test_no_files_import_each_other_in_a_circle():
    left = {name: set(seen) for name, seen in imports().items()}
    while ends := {name for name, seen in left.items() if not seen & left.keys()}:
        left = {name: seen for name, seen in left.items() if name not in ends}
    assert not left


def test_the_house_has_at_most_ten_floors():
    seen_from = imports().items()
    below = {
        a: {room(b) for name, seen in seen_from if room(name) == a for b in seen} - {a}
        for a in range(len(ROOMS))
    }
    floors: dict[int, int] = {}
    for place in range(len(ROOMS)):
        floors[place] = 1 + max((floors[other] for other in below[place]), default=0)
    assert max(floors.values()) <= 10


def test_what_starts_and_watches_processes_imports_no_paddle():
    for name in (name for name in HOUSE if name.startswith("launch/") or name == "errors.py"):
        assert not [dotted for dotted in imported(tree_of(name)) if packages(dotted)], name
    assert {room(b) for a, seen in imports().items() if a.startswith("launch/") for b in seen} == {
        ROOMS.index("errors.py"),
        ROOMS.index("launch/"),
    }


def test_distribution_is_where_the_page_says():
    [said] = re.findall(r"`paddle\.distributed` appears in (.*?), and nowhere else", PAGE, re.S)
    told = set(re.findall(r"`([\w/.]+)`", said))
    found = {
        name
        for name in HOUSE
        if any(d.startswith("paddle.distributed") for d in imported(tree_of(name)))
    }
    assert {
        name if "/" not in name or name in told else f"{name.partition('/')[0]}/" for name in found
    } == told


def test_what_is_deprecated_ends_after_one_more_minor_version():
    """A call of ``errors.deprecated`` that is due is removed, with what it is about."""
    now = tuple(map(int, __version__.split(".")[:2]))
    found = {}
    for name in HOUSE:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("deprecated"):
                [since] = [each.value.value for each in node.keywords if each.arg == "since"]
                found[name, node.lineno] = tuple(map(int, since.split(".")))
    for place, (major, minor) in found.items():
        assert (major, minor) <= now < (major, minor + 2), place


def test_what_random_changes_are_tried_on_is_there():
    rows = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text(encoding="utf-8"))
    assert rows.keys() <= HOUSE
    for name, row in rows.items():
        assert {f"tests/{test}" for test in row["tests"].split()} <= set(NAMES)
        assert row["killed"][-1] + len(row.get("same", [])) <= row["places"], name


def test_no_file_imports_a_test():
    """What test files share is in tests/support. The programs that they write import it, too."""
    modules = {Path(name).stem for name in NAMES if Path(name).name.startswith("test_")}
    found = {}
    for name in NAMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        for line in re.findall(r"\b(?:import|from) .*\btest_.*", text):
            # a file that a text names isn't imported
            if modules & set(re.findall(r"\btest_\w+\b(?!\.py)", line)):
                found[name] = line
    assert not found
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'pythonpath = [".", "tests"]\n' in project


def test_a_room_has_its_own_folder_of_tests():
    folders = {
        name.split("/")[1] for name in NAMES if name.startswith("tests/") and name.count("/") > 1
    }
    assert folders - {"faults", "fuzz", "golden", "stand_in", "support", "warm"} <= {
        name.rstrip("/") for name in ROOMS
    }


# What takes a file apart, as this house calls it. Each call stands in a ``with reading(...)`` (or
# ``readable`` or ``whole``, which are made of it), or in a function that is called from within one,
# or reads what no stranger wrote.
PARSERS = {
    "json.load", "json.loads", "np.load", "np.loadtxt", "np.lib.format.open_memmap", "pickle.load", "pickle.loads",
    "yaml.load", "yaml.safe_load", "safe_open", "Image.open", "tarfile.open", "zipfile.ZipFile", "gzip.open",
    "gzip.GzipFile", "gzip.decompress", "zlib.decompress", "simplejpeg.decode_jpeg", "DataUnpickler",
}  # fmt: skip
WITHIN = {
    "loading/archives.py: _members", "loading/cache.py: __init__", "loading/files.py: npz",
    "loading/shards.py: _plain_members", "loading/transforms/decode.py: _decode",
    "loading/transforms/isolated_process.py: _serve_images", "loading/transforms/formats.py: opened_plain",
    "weights/archives.py: _read_torch", "weights/archives.py: read_zip",
    "weights/formats.py: _read_pickle", "weights/formats.py: _read_torch_legacy", "settings/plain.py: parsed_json",
}  # fmt: skip
NO_STRANGERS = {
    "inference/text/tokenizer.py: _asked": "what a process of the same program sends",
    "inference/text/tokenizing_process.py: _main": "the same; whatever else is raised, it tells",
    "inference/text/tokenizing_process.py: _by_merges": "a process with limits, which tells what is raised",
    "inference/text/tokenizing_process.py: _is_gemmas": "the same",
    "inference/text/tokenizing_process.py: _text": "the same",
    "inference/serve/messages.py: head_of": "what the server's own processes send each other",
    "launch/admission.py: _read_greeting": "a line whose proof was right",
    "launch/launched.py: receive": "the same",
    "launch/sharing.py: _wait": "what a process of the same user sends",
    "launch/spawned.py: open": "memory that the parent shares",
    "launch/verdict.py: failure_in": "the same",
    "loading/sources.py: _digits": "scikit-learn's own file",
    "training/live_report.py: _work": "memory that the parent shares",
    "training/profiling.py: finish": "what Paddle's profiler has just written",
    "utils.py: all_gather": "a pickle whose proof was right",
}


def parsed_outside(node, within=False, function=""):
    """Yields the functions that call one of PARSERS outside of ``reading``."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.With):
        called = {
            ast.unparse(item.context_expr).partition("(")[0].rpartition(".")[2]
            for item in node.items
        }
        within = within or bool(called & {"reading", "readable", "whole"})
    if isinstance(node, ast.Call) and ast.unparse(node.func) in PARSERS and not within:
        yield function
    for child in ast.iter_child_nodes(node):
        yield from parsed_outside(child, within, function)


# Who takes JSON apart but ``settings.plain.parsed_json``: what they read, no stranger wrote.
JSON_OF_OUR_OWN = {
    "settings/names.py": "a file that ships",
    "tools/list_models.py": "the same",
    "tools/package/docs_tables.py": "the same",
    "inference/serve/messages.py": "what the server's own processes send each other",
    "inference/text/tokenizer.py": "what a process that it started sends",
    "inference/text/tokenizing_process.py": "a process with limits, which tells what is raised",
    "launch/admission.py": "a line whose proof was right",
    "launch/launched.py": "the same",
    "launch/sharing.py": "what a process of the same user sends",
    "launch/verdict.py": "memory that the parent shares",
    "tools/check_paddlevit.py": "what a process that it started prints",
    "tools/check_parity.py": "the same",
    "tools/gpu/checks.py": "what a process that it started prints",
    "training/profiling.py": "what Paddle's profiler has just written",
    "tools/gpu/probe.py": "its own arguments, and a run that it made",
}


def test_json_of_strangers_is_read_in_one_place():
    attributes = {
        (name, ast.unparse(node))
        for name in HOUSE
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Attribute) and not name.startswith("tools/benchmarks/")
    }
    found = {
        name for name, used in attributes if used in ("json.load", "json.loads", "json.JSONDecoder")
    }
    assert found == {"settings/plain.py"} | JSON_OF_OUR_OWN.keys()


def test_no_gradient_passes_a_gather_along_another_axis():
    """Paddle 2.6 computes it along the first one; ``index_select`` takes its place."""
    found = {
        name
        for name in HOUSE
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "paddle.gather"
        if len(node.args) > 2 or any(keyword.arg == "axis" for keyword in node.keywords)
    }
    # It takes the logits of evaluations.
    assert found == {"models/heads/windows.py"}


def test_figures_are_saved_in_one_place():
    """Another one would make formulas of names with "$" (``training.pages.plotting``)."""
    found = {
        name
        for name in HOUSE
        if re.search(r"\b(savefig|pyplot)\b", (ROOT / name).read_text("utf-8"))
    }
    assert found == {"training/pages/plotting.py"}


def test_strangers_files_are_read_where_whatever_is_raised_becomes_a_line():
    rooms = {name: tree_of(name) for name in sorted(HOUSE) if not name.startswith("tools/")}
    found = {
        f"{name}: {function}" for name, tree in rooms.items() for function in parsed_outside(tree)
    }
    assert found == WITHIN | NO_STRANGERS.keys()
