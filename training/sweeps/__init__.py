"""Sweeps: runs over values of keys.

``points`` reads a sweep's file and chooses the values of its runs. ``results`` keeps its folder and
writes its tables. Neither imports Paddle, so that the process that watches the runs stays small.
"""
