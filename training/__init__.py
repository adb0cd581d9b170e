"""Training and evaluation: the command line, the loop, reports and checkpoints.

This package imports none of its modules, so that programs can answer ``-h`` and a wrong command
line before Paddle is imported.
"""
