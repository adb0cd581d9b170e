"""Sweeps: runs over values of keys. ``points``: a sweep's file and what it means; ``results``: its
folder and tables.

Nothing here imports Paddle: the process that watches the runs stays small.
"""
