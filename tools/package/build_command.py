"""The build command of the wheel (pyproject.toml): the repository's modules and folders become one
package.

In the repository ``config.py``, ``models/`` and the others are at the top. In a wheel they are
beside ``paddle_vit_toolkit/__init__.py``, which imports them from there. Beside each module is a
stub in which imports have their full names, for type checkers and editors. ``pip install -e`` copies
nothing and writes no stubs.
"""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools.command.build_py import build_py

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
        yield from (
            file
            for file in of_room
            if "egg-info" not in str(file) and "built" not in file.parts and file.is_file()
        )


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
