"""How the processes of a run are started, stopped and watched. This room imports ``errors`` alone, and no Paddle.

``startup``: signals, before any other import. ``environment``: what started this process. ``rendezvous``: how launched
ranks find one another. ``signals``, ``progress``: a rank notes signals, and tells how far it is.
``verdict``: what to say of ranks that fail, are lost or stall. ``spawned``, ``launched``: the process that watches: one
for all that it spawned or, where a launcher started them, one for each. ``gpus``: which GPUs there are to run on.
"""
