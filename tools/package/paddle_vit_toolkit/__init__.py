"""The toolkit as one package, for programs that stand elsewhere and have modules of their own.

    from paddle_vit_toolkit import Predictor, evaluate, train
    from paddle_vit_toolkit.models import create_model, list_models

``pip install`` makes the package known: of the repository (with or without ``-e``) or of a wheel.
PYTHONPATH=tools/package and a call of ``paddle.hub`` (hubconf.py) do so without an installation.
Nothing else of the toolkit gets onto Python's path.

The toolkit's modules are called ``config``, ``utils``, ``models`` and the like, and import one
another by these names. Other programs have modules of the same names. So the toolkit's modules are
imported as parts of this package: ``config`` is ``paddle_vit_toolkit.config``. An import statement
calls the function ``__import__`` of its module's builtins. Modules of this package have one that
puts the package's name before the names of the toolkit's own modules. This also holds within
functions and threads. The program's modules keep their names in ``sys.modules``. Classes are pickled
by their full names, which a spawned process finds on the same path.

Type checkers and editors read the text, and don't see that. A wheel has a stub beside each module,
in which imports have their full names (build_command.py).

Other ways were tried or considered:

- A wheel whose modules have full names in their own imports. Its programs (``paddle-vit train``)
  are files of the same wheel. They would import ``paddle_vit_toolkit.errors`` as other programs do,
  but have to set the warnings, loggers and signals that the package leaves alone in other programs.
  Paddle's warning at its import would still need a hook. An installation by ``-e`` and
  ``paddle.hub`` would still need this file, so there would be two mechanisms to test.
- Setting the program's modules aside while the toolkit's are imported. That goes wrong at the first
  import within a function, in threads, and for pickles, which would name ``models.vit``.
- Relative imports. The root would have to be a package, and its programs would no longer start by
  their paths.
- Other names for all modules. Scripts that import today's names would break.
"""

import builtins
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from errors import InputError, RunError
    from inference import Predictor
    from settings.parser import __version__
    from training.api import RunResult, evaluate, train

__all__ = [
    "InputError", "Predictor", "RunError", "RunResult", "__version__", "evaluate", "train",
]  # fmt: skip

_HERE = pathlib.Path(__file__).resolve().parent
# installed, or within the repository
ROOT = _HERE if (_HERE / "models").is_dir() else _HERE.parents[2]
if not (ROOT / "models" / "__init__.py").is_file():
    raise ImportError(
        f"{ROOT} isn't the toolkit that {__file__} belongs to; install it by pip install FOLDER"
    )
__path__.append(str(ROOT))

_OWN = {file.stem for file in ROOT.glob("[!_]*.py")} | {
    file.parent.name for file in ROOT.glob("*/*.py")
}


def _import(
    name: str,
    globals: Mapping | None = None,
    locals: Mapping | None = None,
    fromlist: Sequence = (),
    level: int = 0,
) -> types.ModuleType:
    """``__import__`` of this package's modules."""
    first = name.partition(".")[0]
    if first == "paddle" and first not in sys.modules:
        # The filters of the program that imports this package stay as they are.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No ccache found")
            return builtins.__import__(name, globals, locals, fromlist, level)
    if level or first not in _OWN:
        return builtins.__import__(name, globals, locals, fromlist, level)
    found = builtins.__import__(f"{__name__}.{name}", globals, locals, fromlist)
    return found if fromlist else sys.modules[f"{__name__}.{first}"]


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs a file of the toolkit as a part of this package."""

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__builtins__"] = vars(builtins) | {"__import__": _import}
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds this package's modules, and no others."""

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder())


# The modules of what this package has at its top. They are imported when it is used.
_MODULE_OF = {
    "InputError": "errors",
    "Predictor": "inference",
    "RunError": "errors",
    "RunResult": "training.api",
    "__version__": "settings.parser",
    "evaluate": "training.api",
    "train": "training.api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
