"""Imports Matplotlib without the settings of the current folder. What imports Matplotlib imports
this module first.

A ``matplotlibrc`` of the current folder may be a stranger's: it can start LaTeX, or be a pipe.
"""

import os


def _import() -> None:
    exists = os.path.exists
    # Matplotlib looks for it by this function. Another current folder would be one for all threads.
    os.path.exists = lambda path: path != "matplotlibrc" and exists(path)
    try:
        import matplotlib  # noqa: F401
    finally:
        os.path.exists = exists


_import()
