"""A launched run whose every port is attacked, from its start to its end, goes on to the same bits."""

import multiprocessing
import time

import pytest
from support import port_attackers
from support.launches import printed, statuses, torchrun
from support.ranks import free_ports
from support.training_runs import assert_same_run

FLAGS = [
    "-output=run",
    "-cfg=vit_digits",
    "-o",
    "TRAIN.NUM_EPOCHS",
    "2",
    "TRAIN.WARMUP_EPOCHS",
    "0",
    "MODEL.DEPTH",
    "2",
]
SPAWN = multiprocessing.get_context("spawn")


class Targets:
    """The ports of ``pids``, two watchers, and of their ranks.

    Paddle's store is left out while Paddle starts: it answers anybody then (docs/evidence/guarantees.md,
    The network).
    """

    def __init__(self, pids, log):
        self.pids = pids
        self.log = log

    def __call__(self):
        watchers = {str(pid) for pid in self.pids}
        ranks = {line for pid in watchers for line in _children(pid)}
        ports = port_attackers.listening(watchers | ranks if self.log.exists() else watchers)
        return {port for _, port in ports}


def _children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return file.read().split()
    except OSError:
        return []


def run(folder, attacked=False):
    """Trains on two ranks, the second after a thousand strangers; returns what the attacker did,
    and the output.
    """
    folder.mkdir()
    [port] = free_ports(1)
    first = torchrun(folder, 0, port, *FLAGS)
    started = [first]
    ended = SPAWN.Event()
    done = SPAWN.Array("l", 3)
    attacker = None
    if attacked:
        targets = Targets([first[0].pid], folder / "run" / "log.txt")
        attacker = SPAWN.Process(
            target=port_attackers.attack, args=(targets, ended, done), daemon=True
        )
        attacker.start()
        until = time.monotonic() + 30
        while done[2] < 1000 and time.monotonic() < until:
            time.sleep(0.1)
    started.append(torchrun(folder, 1, port, *FLAGS))
    assert statuses(*started) == [0, 0], printed(*started)
    ended.set()
    if attacker:
        attacker.join(20)
        assert attacker.exitcode == 0
    return list(done), printed(*started)


@pytest.mark.long
def test_a_run_whose_ports_are_attacked_does_not_notice(tmp_path):
    run(tmp_path / "quiet")
    (tries, taken, most), loud = run(tmp_path / "attacked", attacked=True)
    print(f"{tries} attacks, {taken} connected, up to {most} open")
    assert tries > 30
    assert taken > 10
    assert most > 1000
    assert_same_run(tmp_path / "quiet" / "run", tmp_path / "attacked" / "run")
    assert [line for line in loud.splitlines() if "rror" in line] == []
