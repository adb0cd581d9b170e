"""Starts, stops and watches the processes of a run. It imports no Paddle, and ``errors`` alone of
the other rooms.

A run of one process uses the first four entries of this list, which follows the order of a start:

- ``startup`` handles signals before any other import. ``streams`` keeps programs alive when their
  output is closed. ``files`` opens whatever is written.
- ``launchers`` reads what a launcher set for this process. ``devices`` finds the GPUs and cores that
  it may use.
- ``signals`` records the signals that a rank receives. ``progress`` reports how far a rank is.
- ``stall`` names an image whose reading takes too long.
- ``spawned`` starts ranks and watches them. ``launched`` watches a rank that a launcher started:
  each rank then has a process that watches it.
- ``rendezvous`` connects the ranks that a launcher started. ``admission`` is rank 0's part of it.
  ``channel`` is a connection whose messages are authenticated. ``secret`` holds the secret that all
  ranks of a user know.
- ``sharing`` reads the data of launched ranks once on each machine.
- ``store`` closes Paddle's store to all other programs.
- ``verdict`` decides why a run ends if ranks fail or stall.
- ``nodes`` is the program of run_train_multi_node.sh: it waits for the other machines.
- ``caller`` runs a program for another Python program, such as a notebook.
- ``side_by_side`` runs whole commands, each on its own devices.
"""
