"""The build commands of the wheel (pyproject.toml): the repository's modules and folders become one
package, whose metadata have the addresses of the repository.

In the repository ``config.py``, ``models/`` and the others are at the top. In a wheel they are
beside ``paddle_vit_toolkit/__init__.py``, which imports them from there. Beside each module is a
stub in which imports have their full names, for type checkers and editors. ``pip install -e`` copies
nothing and writes no stubs.
"""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

_ROOMS = (
    "configs",
    "inference",
    "launch",
    "loading",
    "models",
    "ops",
    "settings",
    "tools",
    "training",
    "weights",
)
# Measurements, and comparisons with other toolkits: a checkout has them, a wheel doesn't.
FOR_DEVELOPERS = (
    "tools/benchmark.py",
    "tools/benchmarks",
    "tools/check_paddlevit.py",
    "tools/check_parity.py",
    "tools/gpu",
)
_KINDS = (".cc", ".h", ".html", ".json", ".py", ".safetensors", ".txt", ".yaml")
# The host and the path in git's remotes. A user's name and password before the host stay out.
_REMOTES = (
    r"https?://(?:[^/]*@)?([\w.:-]+)/(.+)",
    r"ssh://(?:[^/]*@)?([\w.-]+)(?::\d+)?/(.+)",
    r"[\w.-]+@([\w.-]+):(.+)",
)
# The hashes of the shipped weights.
_SUMS = "SHA256SUMS"


def files() -> Iterator[Path]:
    """Yields the toolkit's files, relative to the repository: its code, its configurations and what
    they read.
    """
    # the version, which runs note, and what messages say to install
    yield from (Path("pyproject.toml"), Path("constraints.txt"))
    yield from sorted(Path().glob("*.py"))
    for room in _ROOMS:
        of_room = (
            file
            for file in sorted(Path(room).rglob("*"))
            if file.suffix in _KINDS or file.name == _SUMS
        )
        yield from (file for file in of_room if "egg-info" not in str(file) and file.is_file())


def stub(text: str, names: set[str]) -> str:
    """Returns a module's text in which imports name the toolkit's modules as an installed copy does:
    ``from paddle_vit_toolkit.config import ...``. It is for type checkers and editors.

    Args:
        text: in which imports are written as ruff formats them.
        names: the toolkit's modules and folders.
    """
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        line = getattr(node, "lineno", 0) - 1
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in names:
            lines[line] = lines[line].replace("from ", "from paddle_vit_toolkit.", 1)
        elif isinstance(node, ast.Import) and node.names[0].name.partition(".")[0] in names:
            dotted = "." in node.names[0].name
            start = "import paddle_vit_toolkit." if dotted else "from paddle_vit_toolkit import "
            lines[line] = lines[line].replace("import ", start, 1)
    return "".join(lines)


def _write_stub(file: Path, names: set[str]) -> None:
    """Writes the stub of a module next to it."""
    text = stub(file.read_text(encoding="utf-8"), names)
    file.with_suffix(".pyi").write_text(text, encoding="utf-8")


def repository_address(folder: Path) -> str | None:
    """Returns the address, in a browser, of the repository that a folder was cloned from.

    It is None for a folder that isn't a clone, and for a clone of another folder.

    Args:
        folder: the top of the toolkit. A repository that it lies in isn't the toolkit's.
    """
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "remote", "get-url", "origin"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    for pattern in _REMOTES:
        if remote := re.fullmatch(pattern, done.stdout.strip()):
            host, path = remote.groups()
            return f"https://{host}/{path.strip('/').removesuffix('.git')}"
    return None


def project_urls(folder: Path) -> dict[str, str]:
    """Returns the addresses in the metadata of a wheel, by their labels; {} without a repository.

    Those of a source distribution are the ones that it was made with.
    """
    about = folder / "PKG-INFO"
    if about.is_file():
        text = about.read_text(encoding="utf-8").partition("\n\n")[0]
        return dict(re.findall(r"^Project-URL: ([^,\n]+), (.+)$", text, re.M))
    repository = repository_address(folder)
    if repository is None:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class WriteMetadata(egg_info):
    """``egg_info`` whose metadata also have the addresses of the repository."""

    def run(self) -> None:
        about: Any = self.distribution.metadata
        about.project_urls = project_urls(Path())
        super().run()


class BuildPackage(build_py):
    """``build_py`` that also copies the toolkit's files, each module with a stub next to it."""

    def run(self) -> None:
        target = Path(self.build_lib) / "paddle_vit_toolkit"
        shutil.rmtree(target, ignore_errors=True)  # an earlier build's files
        super().run()
        if self.editable_mode:
            return
        names = {path.stem for path in Path().glob("*.py")} | set(_ROOMS)
        for file in files():
            if any(file.is_relative_to(name) for name in FOR_DEVELOPERS):
                continue
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(file), str(target / file))
            # Programs are started, and not imported.
            if file.suffix == ".py" and file.parts[0] != "tools":
                _write_stub(target / file, names)
        _write_stub(target / "__init__.py", names)

    def get_source_files(self) -> list[str]:
        """Returns the files of a source distribution."""
        return [*super().get_source_files(), *map(str, files())]
