"""How the processes of a run are stopped and watched.

``signals``, ``requests``, ``progress``: a rank notes signals, heeds them between two steps, and tells how far it is.
``verdict``: what to say of ranks that fail, are lost or stall. ``spawned``, ``launched``: the process that watches: one
for all that it spawned or, where a launcher started them, one for each. ``gpus``: which GPUs there are to run on.
"""
