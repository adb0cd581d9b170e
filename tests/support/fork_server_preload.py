"""The last module that the fork server of ``ranks`` imports: work that each rank would repeat."""

import gc
import os

from config import default_values

# The programs that ranks start have the path that the tests were started with.
path = os.environ["PYTHONPATH"].split(os.pathsep, 2)[2]
if path:
    os.environ["PYTHONPATH"] = path
else:
    del os.environ["PYTHONPATH"]
default_values()  # reads the keys of all architectures
gc.freeze()
gc.set_threshold(10_000)  # as tests/conftest.py
