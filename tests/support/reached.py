"""Finds the test files that a change reaches, which ``make check`` runs.

    python tests/support/reached.py [N]    # prints at most N test files, by default 8

A file is changed if it differs from the commit where this branch left ``main``, or isn't committed.
A test file is reached if it imports a changed file, directly or through other files, at its top or
within functions. It is also reached if it names a changed file that isn't a module, such as a page
or a YAML file. A component that nothing imports counts as its package.

Tests that changed come first. Then come those with the name of a changed file, those that import a
changed file directly, and those of the same room. Among these, the nearest come first and the long
ones last. The number of files that are left out is printed to stderr.

Programs that a test starts by their path aren't seen, and neither are files that it finds by a
pattern. ``make test`` runs everything.
"""

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

from support.imports import NAMES, imported, tree_of
from support.longest import LONGEST
from support.programs import ROOT

# These concern all files, and take a second each.
ALWAYS = ("tests/test_house.py", "tests/test_words.py")


def changed_files() -> list[str]:
    """Returns the files that differ from the commit where the branch left ``main``, and those that
    git doesn't track.
    """
    base = _git("merge-base", "HEAD", "main")
    differing = _git("diff", "--name-only", *(base or ["HEAD"]))
    return sorted({*differing, *_git("ls-files", "--others", "--exclude-standard")})


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines()


@functools.cache
def module_files() -> dict[str, str]:
    """Returns the file of each module. Modules of tests/ are imported without that folder."""
    found = {}
    for name in NAMES:
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found[module.removeprefix("tests.")] = name
    return found


def files_imported_by(name: str) -> Iterator[str]:
    """Yields the repository's files that a file imports, with the packages above them."""
    for dotted in imported(tree_of(name)):
        # The packages above a module are imported, too.
        parts = dotted.split(".")
        for length in range(1, len(parts) + 1):
            if file := module_files().get(".".join(parts[:length])):
                yield file


@functools.cache
def importers() -> dict[str, set[str]]:
    """Returns the files that import each file."""
    by_file: dict[str, set[str]] = {}
    for name in NAMES:
        for file in files_imported_by(name):
            by_file.setdefault(file, set()).add(name)
    return by_file


def distances(changed: list[str]) -> dict[str, int]:
    """Returns {test file: the number of imports between it and a changed file}."""
    steps = {name: 0 for name in changed if name in NAMES}
    for name in list(steps):
        if not importers().get(name) and not Path(name).name.startswith("test_"):
            package = f"{Path(name).parent}/__init__.py"
            siblings = [other for other in NAMES if Path(other).parent == Path(name).parent]
            steps |= dict.fromkeys([package] if package in NAMES else siblings, 0)
    # Configurations are named without their suffix.
    words = {
        Path(name).stem if name.endswith(".yaml") else Path(name).name
        for name in changed
        if name not in NAMES
    }
    for name in NAMES if words else ():
        text = (ROOT / name).read_text(encoding="utf-8")
        if any(word in text for word in words):
            steps.setdefault(name, 1)
    # In the order of their distances. The loop also reaches the files that it appends.
    queue = sorted(steps, key=steps.__getitem__)
    for name in queue:
        for importer in sorted(importers().get(name, ())):
            if importer not in steps:
                steps[importer] = steps[name] + 1
                queue.append(importer)
    return {name: count for name, count in steps.items() if Path(name).name.startswith("test_")}


def chosen(changed: list[str], limit: int) -> tuple[list[str], int]:
    """Returns up to ``limit`` test files, or all that changed, and how many others are reached."""
    rooms = {_room(name) for name in changed}
    stems = {Path(name).stem.removeprefix("test_") for name in changed} - {"__init__"}
    reached = distances(changed)

    def order(name: str) -> tuple:
        namesake = any(stem in Path(name).stem for stem in stems)
        # Most tests of faults and of random files start whole runs.
        elsewhere = _room(name) not in rooms or _room(name) in ("faults", "fuzz")
        long = Path(name).name in LONGEST
        return (
            name not in changed,
            not namesake,
            min(reached[name], 2),
            elsewhere,
            long,
            reached[name],
            name,
        )

    files = sorted(reached, key=order)
    limit = max(limit, sum(name in changed for name in files))
    run = dict.fromkeys([*files[:limit], *(name for name in ALWAYS if (ROOT / name).exists())])
    return list(run), len(reached.keys() - run.keys())


def _room(name: str) -> str:
    """Returns the top folder of a file. Its tests are in the folder of that name below tests/."""
    return name.removeprefix("tests/").rpartition("/")[0].partition("/")[0]


def main(words: list[str]) -> None:
    run, left_out = chosen(changed_files(), int(words[0]) if words else 8)
    print("\n".join(run))
    if left_out:
        print(f"{left_out} more test files are reached; make test runs them", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
