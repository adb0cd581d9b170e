"""The last module that the fork server of ``ranks`` imports. It does work that each rank would
repeat.
"""

import gc

from config import default_values

# This reads the keys of all architectures.
default_values()
gc.freeze()
# as in tests/conftest.py
gc.set_threshold(10_000)
