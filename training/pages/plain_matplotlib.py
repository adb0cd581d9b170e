"""Imports Matplotlib without the settings of the current folder.

Modules that import Matplotlib import this module first. The current folder may be anybody's, and a
``matplotlibrc`` in it could start LaTeX, or be a pipe.
"""

import os


def _import() -> None:
    exists = os.path.exists
    # Matplotlib looks for the file by this function. Changing the current folder instead would
    # change it for all threads.
    os.path.exists = lambda path: path != "matplotlibrc" and exists(path)
    try:
        import matplotlib  # noqa: F401
    finally:
        os.path.exists = exists


_import()
