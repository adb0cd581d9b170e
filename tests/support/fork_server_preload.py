"""The last that the fork server of ``ranks`` imports: it does once what each rank would do again."""

import gc

from config import default_values

default_values()  # reads the keys of all architectures
gc.freeze()
gc.set_threshold(10_000)  # as tests/conftest.py
