"""A page of the runs of a folder: their state, and their curves side by side (tools/watch.py).

Neither Paddle nor Matplotlib is imported here.
"""
