"""Two runs that want one port, and ranks that are killed while they meet: each ends well or with a
line.
"""

import re
import signal
import socket
import time

import pytest
from support.launches import FLAGS, MAIN, printed, start, statuses, torchrun
from support.ranks import free_ports


def folders(path, *names):
    for name in names:
        (path / name).mkdir()
    return [path / name for name in names]


@pytest.mark.long
def test_of_two_spawned_runs_on_one_port_one_goes_on(tmp_path):
    [port] = free_ports(1)
    flags = [*FLAGS, "TRAIN.NUM_EPOCHS=12"]  # longer than the other waits for a run that ends
    runs = [
        start(folder, *MAIN, "-ngpus=2", *flags, MASTER_PORT=port)
        for folder in folders(tmp_path, "a", "b")
    ]
    assert sorted(statuses(*runs, within=400)) == [0, 2]
    [said] = [printed(run) for run in runs if run[0].returncode]
    assert (
        said
        == f"error: port {port} on 127.0.0.1 is taken (by another run?); choose another MASTER_PORT\n"
    )


@pytest.mark.long
def test_of_two_launched_runs_on_one_port_one_goes_on(tmp_path):
    """The second's rank 1 tells a wrong number of ranks from a wrong run by the job, where the
    launcher names one.
    """
    [port] = free_ports(1)
    a, b = folders(tmp_path, "a", "b")
    flags = [*FLAGS, "DIST.INIT_TIMEOUT", "12", "TRAIN.NUM_EPOCHS", "30"]  # as above
    runs = [
        (
            folder,
            rank,
            torchrun(folder, rank, port, *flags, TORCHELASTIC_RUN_ID=folder.name, HOME=tmp_path),
        )
        for rank in (0, 1)
        for folder in (a, b)
    ]
    # Thirty epochs take a minute of two idle cores.
    found = {
        (folder.name, rank): (*statuses(run, within=400), printed(run))
        for folder, rank, run in runs
    }
    goes, stays = ("a", "b") if found["a", 0][0] == 0 else ("b", "a")
    assert [found[goes, rank][0] for rank in (0, 1)] == [0, 0]
    taken = (
        f"error: port {port} on 127.0.0.1 is taken (by another run?); choose another MASTER_PORT\n"
    )
    assert found[stays, 0] == (2, taken)
    meet = f"rank 0 at 127.0.0.1:{port} waits for 2 ranks of job {goes}, but this one belongs to 2 ranks of job {stays}: "
    # it came when the others had met
    late = f"rank 0 didn't answer at 127.0.0.1:{port} within 12 s"
    assert found[stays, 1][0] in (1, 2)
    assert (
        found[stays, 1][1].removeprefix("rank 1: ").startswith((f"error: {meet}", f"error: {late}"))
    )


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("after", [0.4, 1.0, 2.0])
def test_a_rank_that_is_killed_as_ranks_meet_ends_the_others(tmp_path, killed, after):
    [port] = free_ports(1)
    # it shall not end before it is killed
    flags = [*FLAGS, "DIST.INIT_TIMEOUT=6", "TRAIN.NUM_EPOCHS=50"]
    runs = [torchrun(tmp_path, rank, port, *flags) for rank in (0, 1)]
    time.sleep(after)
    runs[killed][0].send_signal(signal.SIGKILL)
    assert statuses(*runs)[killed] == -signal.SIGKILL
    other = runs[1 - killed]
    assert other[0].returncode in (1, 2)
    log = tmp_path / "run" / "log.txt"  # it may have begun by then
    logged = log.read_text().splitlines() if log.exists() else []
    said = [line for line in printed(other).splitlines() if line not in logged]
    lines = [line for line in said if not line.startswith("rank 0 waits")]
    assert len(lines) == 1, lines
    assert re.match(
        rf"(rank 1: )?error: (rank 1 of 2 didn't connect within 6 s|rank 0 didn't answer at 127.0.0.1:{port} within 6 s"
        rf"|rank 0 at 127.0.0.1:{port} ended before the run started|rank {killed} (.* )?was lost)",
        lines[0],
    )


def as_paddles(rank, port, **changed):
    """The variables that Paddle's launcher sets for one of two ranks."""
    ends = ["127.0.0.1:6170", "127.0.0.1:6171"]
    given = {
        "TRAINER_ID": rank,
        "TRAINERS_NUM": 2,
        "LOCAL_RANK": rank,
        "LOCAL_SIZE": 2,
        "MASTER": f"127.0.0.1:{port}",
    }
    given |= {"CURRENT_ENDPOINT": ends[rank], "TRAINER_ENDPOINTS": ",".join(ends)}
    return {f"PADDLE_{name}": value for name, value in (given | changed).items()}


def as_torchruns(rank, port, **changed):
    given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    return given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | changed


@pytest.mark.parametrize("style", [as_torchruns, as_paddles])
def test_a_rank_whose_numbers_contradict_ends_all_soon(tmp_path, style):
    rank, size = (
        ("RANK", "LOCAL_WORLD_SIZE") if style is as_torchruns else ("TRAINER_ID", "LOCAL_SIZE")
    )
    whole = {name.removeprefix("PADDLE_"): name for name in style(0, 1)}
    cases = [
        (
            1,
            {rank: 2},
            f"rank 2 on HOST can't start: {whole[rank]} is 2, expected a number from 0 to 1",
        ),
        (
            1,
            {rank: "one"},
            f"a rank on HOST can't start: {whole[rank]} is 'one'; expected a whole number",
        ),
        (
            0,
            {"LOCAL_RANK": 5},
            f"rank 0 on HOST can't start: {whole['LOCAL_RANK']} is 5, expected a number from 0 to 1",
        ),
        (1, {size: 3}, f"rank 1 on HOST can't start: {whole[size]} is 3, but "),
        (
            1,
            {rank: 0},
            "rank 0 on HOST has the same number as one on HOST; number each rank differently",
        ),
    ]
    began = time.monotonic()
    started = []
    for number, (place, changed, _) in enumerate(cases):
        [folder], [port] = folders(tmp_path, str(number)), free_ports(1)
        ranks = [style(other, port, **(changed if other == place else {})) for other in (0, 1)]
        started.append(
            [start(folder, *MAIN, *FLAGS, "DIST.INIT_TIMEOUT=300", **given) for given in ranks]
        )
    for (place, _, message), runs in zip(cases, started, strict=True):
        assert statuses(*runs) == [2, 2]
        said = [re.sub("^rank 0 waits .*\n", "", printed(run)) for run in runs]
        assert [text.count("\n") for text in said] == [1, 1]
        # Two that are both rank 0 may come in either order.
        assert any(
            f"error: {message}".replace("HOST", socket.gethostname()) in text for text in said
        )
        reason = message.partition(" can't start: ")[2]
        assert reason in said[place]
    assert time.monotonic() - began < 60


def test_ranks_of_two_secrets_are_told_what_to_copy(tmp_path):
    [port] = free_ports(1)
    a, b = folders(tmp_path, "a", "b")  # two homes
    flags = ["-cfg=vit_digits", "-o", "DIST.INIT_TIMEOUT", "6"]
    runs = [torchrun(folder, rank, port, *flags) for rank, folder in enumerate((a, b))]
    assert statuses(*runs) == [1, 2]
    assert f"rank 1: error: rank 0 at 127.0.0.1:{port} has a different secret than " in printed(
        runs[1]
    )
    assert (
        f"; copy {b}/.paddle_vit_secret from rank 0's machine to this one (mode 600), or set "
        in printed(runs[1])
    )
    said = "error: rank 1 of 2 didn't connect within 6 s (DIST.INIT_TIMEOUT), 1 had a different secret; start what is"
    assert said in printed(runs[0])
