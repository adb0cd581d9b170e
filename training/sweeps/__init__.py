"""Sweeps: runs over values of keys. ``points``: a sweep's file and the points that it means; ``results``: its folder, and
what its runs gave. Nothing here imports Paddle: the process that watches the runs stays small.
"""
