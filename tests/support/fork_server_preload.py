"""The last module that the fork server of ``ranks`` imports: work that each rank would repeat."""

import gc

from config import default_values

default_values()  # reads the keys of all architectures
gc.freeze()
gc.set_threshold(10_000)  # as tests/conftest.py
