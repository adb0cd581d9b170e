"""How the processes of a run are started, stopped and watched. This package imports ``errors``
alone, and no Paddle.

The modules, in the order in which a start uses them:

- ``startup`` handles signals before any other import. ``streams`` keeps programs alive when their
  output is closed.
- ``environment`` finds out what started this process. ``gpus`` finds out which GPUs it may use.
- ``secret`` holds the secret that all ranks of a user know.
- ``rendezvous`` connects the ranks that a launcher started. ``admission`` is rank 0's part of it.
  ``channel`` is a connection whose messages are authenticated.
- ``spawned`` and ``launched`` are the process that watches ranks. If this program started the
  ranks, one process watches all of them. If a launcher did, each rank has its own.
- ``sharing`` reads the data of launched ranks once on each machine.
- ``fence`` closes Paddle's store to all other programs.
- ``signals`` records the signals that a rank receives. ``progress`` reports how far a rank is.
- ``verdict`` decides why a run ends if ranks fail or stall.
- ``side_by_side`` runs whole commands, each on its own devices.
"""
