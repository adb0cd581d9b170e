"""How the processes of a run are started, stopped and watched. This room imports ``errors`` alone, and no Paddle.

In the order of a start. ``startup``: signals, before any other import; ``streams``: standard output that ends no
program. ``environment``: what started this process. ``gpus``: which GPUs there are to run on. ``secret``: what ranks
hold in common. ``rendezvous``: launched ranks find one another; ``admission`` is rank 0's part, ``channel`` their
proved connections. ``spawned``, ``launched``: the process that watches, one for all that it spawned or, where a
launcher started them, one for each. ``fence``: Paddle's store takes nobody else. ``signals``, ``progress``: a rank
notes signals, and tells how far it is. ``verdict``: what to say of ranks that fail or stall.
``side_by_side``: whole commands, each on devices of its own.
"""
