"""What setuptools does to build a wheel (pyproject.toml): the repository's modules and folders go
into one package.

In the repository ``config.py``, ``models/`` and the others are at the top. In a wheel they are
beside ``paddle_vit_toolkit/__init__.py``, which imports them from there. ``pip install -e`` copies
nothing.
"""

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
    "tools/check_parity.py",
    "tools/gpu",
)
_KINDS = (".cc", ".h", ".html", ".json", ".py", ".txt", ".yaml")


def files() -> Iterator[Path]:
    """Yields the toolkit's files, relative to the repository: its code, its configurations and what
    they read.
    """
    # the version, which runs note, and what messages tell to install
    yield from (Path("pyproject.toml"), Path("constraints.txt"))
    yield from sorted(Path().glob("*.py"))
    for room in _ROOMS:
        of_room = (file for file in sorted(Path(room).rglob("*")) if file.suffix in _KINDS)
        yield from (
            file
            for file in of_room
            if "egg-info" not in str(file) and "built" not in file.parts and file.is_file()
        )


class BuildPackage(build_py):
    """``build_py`` that also copies the toolkit's files."""

    def run(self) -> None:
        target = Path(self.build_lib) / "paddle_vit_toolkit"
        shutil.rmtree(target, ignore_errors=True)  # an earlier build's files
        super().run()
        if not self.editable_mode:
            for file in files():
                if any(file.is_relative_to(name) for name in FOR_DEVELOPERS):
                    continue
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(file), str(target / file))

    def get_source_files(self) -> list[str]:
        """Returns what a source distribution has to hold."""
        return [*super().get_source_files(), *map(str, files())]
