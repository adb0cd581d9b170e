"""The last module that the fork server of ``ranks`` imports. It does work that each rank would
repeat.
"""

import gc
import os

from config import default_values

# The programs that ranks start have the path that the tests were started with.
path = os.environ["PYTHONPATH"].split(os.pathsep, 2)[2]
if path:
    os.environ["PYTHONPATH"] = path
else:
    del os.environ["PYTHONPATH"]
# This reads the keys of all architectures.
default_values()
gc.freeze()
# as in tests/conftest.py
gc.set_threshold(10_000)
