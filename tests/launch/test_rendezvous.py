"""Ranks that meet, over real sockets: all come, some don't, somebody else is there."""

import contextlib
import http.server
import itertools
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
from support.ranks import free_ports

from errors import InputError, RunError
from launch import admission, channel, rendezvous, secret


def together(*calls):
    """What each call of ``meet`` raised, or else its address; each runs in a thread of its own."""

    def call(keywords):
        try:
            meeting = rendezvous.meet(**{"limit": 20.0, **keywords})
            meeting.ready()
            return meeting.own_address
        except RunError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


@pytest.fixture
def port():
    return free_ports(1)[0]


def wait_until_somebody_listens(port):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.01)


@contextlib.contextmanager
def listening(port):
    """A program that listens and says nothing, as another run's store does."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        yield


@pytest.mark.parametrize(("far", "where"), [(False, "127.0.0.1"), (True, "0.0.0.0")])
def test_rank_0_may_be_told_localhost_though_others_come_from_afar(port, capfd, far, where):
    """As Kubeflow does, which tells the other machines its name."""
    for host, expected in (("localhost", where), ("127.0.0.1", "127.0.0.1")):
        listener, held = rendezvous.listen(host, port, has_other_machines=far)
        with listener, held or listener:
            assert listener.getsockname()[0] == expected
    assert capfd.readouterr().err.count("so it listens on all its addresses") == far


@pytest.mark.smoke
def test_all_ranks_meet_whatever_the_order_and_whoever_else_knocks(port, capfd):
    address = f"127.0.0.1:{port}"
    late = threading.Event()
    words = itertools.cycle([b"GET / HTTP/1.0\r\n\r\n", b"?\n", b"", b"\xff \n"])

    def knock():
        while not late.wait(0.02):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 1) as stranger,
            ):
                stranger.sendall(next(words))

    stranger = threading.Thread(target=knock)
    stranger.start()
    calls = [
        {"address": address, "place": place, "count": 3, "job": "a b", "local_ranks": 3}
        for place in (2, 1, 0)
    ]
    assert together(*calls) == ["127.0.0.1"] * 3
    late.set()
    stranger.join()
    assert capfd.readouterr().err == f"rank 0 waits at {address} for 2 more ranks\n"
    with listening(port):  # it is free for Paddle's store
        pass


@pytest.mark.parametrize("job", ["a b", "night\nly\tbuild ", "caf\udce9", "7" * 5000], ids=range(4))
@pytest.mark.parametrize("host", ["node1", "me@lab", "a\tb\n", "caf\udce9"], ids=range(4))
def test_names_that_others_chose_dont_break_the_greeting(port, monkeypatch, host, job):
    """SLURM's, torchrun's and the user's. Without GPUs none is the same, whatever the machine's
    name looks like.
    """
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    for seats in (
        ("", ""),
        ("GPU a\n0", "GPU a\n1"),
        ("GPU-\ufffd@x", "GPU-\ufffd"),
        ("9" * 200, ""),
    ):
        calls = [
            {"address": f"127.0.0.1:{port}", "place": n, "count": 2, "job": job, "gpu": seats[n]}
            for n in (0, 1)
        ]
        assert together(*calls) == ["127.0.0.1"] * 2


def test_a_gpu_is_one_ranks_on_a_machine_and_may_be_that_of_two_containers(port, monkeypatch):
    calls = [
        {"address": f"127.0.0.1:{port}", "place": n, "count": 2, "gpu": "GPU-a"} for n in (0, 1)
    ]
    monkeypatch.setattr(socket, "gethostname", lambda: "one")
    for error in together(*calls):
        assert re.match(
            "ranks 0, 1 on one share one GPU, GPU-a, but NCCL needs one for each", str(error)
        )
    hosts = iter(["one", "two"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(hosts))
    assert together(*calls) == ["127.0.0.1"] * 2


def said_to(port, words):
    """What rank 0 answers to a line."""
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(words.encode() + b"\n")
        return connection.makefile().readline()


def test_ranks_of_another_version_are_told_so(port):
    """Version 1's greeting was its party, its rank and its seat; it takes what it is answered for
    another party's.
    """
    address = f"127.0.0.1:{port}"
    waiting = ThreadPoolExecutor(1).submit(
        together, {"address": address, "place": 0, "count": 2, "limit": 3.0}
    )
    wait_until_somebody_listens(port)
    assert (
        said_to(port, f"{channel.HELLO} 2 ranks of job a b 1 @host")
        == "differs 2 ranks of job a b\n"
    )
    assert said_to(port, f"{channel.HELLO} 3 {'0' * 64} - -") == f"differs 3 {'0' * 64}\n"
    assert str(waiting.result()[0]).startswith(
        "rank 1 of 2 didn't connect within 3 s (DIST.INIT_TIMEOUT); start"
    )
    with socket.create_server(("127.0.0.1", port)) as host, ThreadPoolExecutor(1) as pool:
        guest = pool.submit(together, {"address": address, "place": 1, "count": 2})
        with host.accept()[0] as connection:
            # as version 1 took a greeting apart
            theirs, _, _ = connection.makefile().readline().rsplit(" ", 2)
            assert theirs == f"{channel.HELLO} 2"
            connection.sendall(b"differs 2 ranks\n")
        [error] = guest.result()
    expected = f"rank 0 at {address} runs another version of this toolkit; install the same version on all machines"
    assert (str(error), error.exit_status) == (expected, 2)


def test_ranks_that_never_come_are_named_on_all_that_did(port):
    address = f"127.0.0.1:{port}"
    found = together(
        *({"address": address, "place": place, "count": 5, "limit": 0.3} for place in (0, 3))
    )
    message = (
        "rank 1, 2, 4 of 5 didn't connect within 0.3 s (DIST.INIT_TIMEOUT);"
        " start what is missing, or read its error message"
    )
    assert [(str(error), error.exit_status, error.shared) for error in found] == [
        (message, 1, True)
    ] * 2


def test_a_taken_port_is_named_by_rank_0_and_no_other_rank_hangs(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER", 0.2)
    with listening(port):
        first, second = together(
            *({"address": f"127.0.0.1:{port}", "place": place, "count": 2} for place in (0, 1))
        )
    assert isinstance(first, InputError)
    assert (
        str(first)
        == f"port {port} on 127.0.0.1 is taken (by another run?); choose another MASTER_PORT"
    )
    message = f"another run or program answers at 127.0.0.1:{port}, not this run's rank 0; choose another MASTER_PORT"
    assert (str(second), second.exit_status) == (message, 2)


def test_a_web_server_is_no_rank_0(port):
    with http.server.HTTPServer(
        ("127.0.0.1", port), http.server.SimpleHTTPRequestHandler
    ) as server:
        server.RequestHandlerClass.log_message = lambda *_: None
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(InputError, match="another run or program answers at"):
            rendezvous.meet(f"127.0.0.1:{port}", 1, 2, limit=5)
        server.shutdown()


def test_an_address_that_never_answers_is_named_with_who_waits(port):
    machine = re.escape(socket.gethostname())
    with pytest.raises(RunError) as caught:
        rendezvous.meet(f"127.0.0.1:{port}", 2, 4, limit=0.2, local_ranks=2)
    assert re.fullmatch(
        rf"rank 0 didn't answer at 127.0.0.1:{port} within 0.2 s \(Connection refused; DIST.INIT_TIMEOUT\); 2 ranks"
        rf" on {machine} waited for it; start it there, correct MASTER_ADDR and MASTER_PORT, or open the .*",
        str(caught.value),
    )
    assert (caught.value.exit_status, caught.value.shared) == (1, False)
    with pytest.raises(
        RunError, match=rf"\(.*; INIT_TIMEOUT\); node 1 on {machine} waited for it; "
    ) as caught:
        rendezvous.meet(
            f"no.such.host.invalid:{port}", 1, 2, limit=0.2, kind="node", prints_error=False
        )
    assert caught.value.shared


def test_rank_0_elsewhere_than_the_address_says(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER", 0.2)
    with pytest.raises(
        InputError, match=r"rank 0 runs on .* can't reach itself at no.such.host.*MASTER_ADDR"
    ):
        rendezvous.meet(f"no.such.host.invalid:{port}", 0, 2, limit=0.2)


def test_ranks_of_two_runs_and_two_of_one_number_are_told_apart(port):
    address = f"127.0.0.1:{port}"

    def come(place, count=3, job="7"):
        return pool.submit(rendezvous.meet, address, place, count, 20.0, job)

    with ThreadPoolExecutor(5) as pool:
        first = come(0)
        ranks = [come(1), come(1)]
        for stranger, party in (
            (come(1, count=4), "4 ranks of job 7"),
            (come(1, job=""), "3 ranks"),
        ):
            with pytest.raises(InputError) as caught:
                stranger.result()
            expected = f"rank 0 at {address} waits for 3 ranks of job 7, but this one belongs to {party}: another run uses the"
            assert str(caught.value).startswith(expected)
        refused = next(as_completed(ranks))
        with pytest.raises(
            InputError,
            match="another rank with this number connected to .* first; number each differently",
        ):
            refused.result()
        ranks.remove(refused)
        meetings = [come(2).result(), ranks[0].result(), first.result()]
        list(pool.map(rendezvous.Meeting.ready, meetings))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"place": 1, "count": 3},
            "rank 1 on HOST belongs to a run of 3 ranks, rank 0 waits for 2 ranks; start all ranks with",
        ),
        (
            {"place": 5, "count": 6},
            "rank 5 on HOST belongs to a run of 6 ranks, rank 0 waits for 2 ranks; start all ranks with",
        ),
        (
            {"place": 0, "count": 2},
            "rank 0 on HOST has the same number as one on HOST; number each rank differently",
        ),
    ],
)
def test_rank_0_ends_soon_where_another_rank_has_other_numbers(port, monkeypatch, other, message):
    monkeypatch.setattr(admission, "GRACE", 0.2)
    monkeypatch.setattr(rendezvous, "claim", lambda port: None)
    address = f"127.0.0.1:{port}"
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous.meet, address, 0, 2, 60.0)
        wait_until_somebody_listens(port)
        if not other["place"]:  # it is elsewhere, and listens there
            monkeypatch.setattr(
                rendezvous,
                "listen",
                lambda *_, **__: (socket.create_server(("127.0.0.1", 0)), None),
            )
        second = pool.submit(rendezvous.meet, address, **other, limit=60.0)
        errors = [first.exception(), second.exception()]
    assert time.monotonic() - started < 15
    assert [(type(error), error.exit_status) for error in errors] == [(InputError, 2)] * 2
    # Of two with one number, either may have come first.
    assert any(
        str(error).startswith(message.replace("HOST", socket.gethostname())) for error in errors
    )


@pytest.mark.parametrize(
    ("place", "who"),
    [("2", "rank 2"), ("1", "rank 1"), ("-1", "a rank"), ("x\n", "a rank"), (None, "a rank")],
)
def test_a_rank_that_cant_start_tells_all_others(port, monkeypatch, place, who):
    monkeypatch.setattr(admission, "GRACE", 1.0)
    address = f"127.0.0.1:{port}"
    calls = [
        {"address": address, "place": place, "count": 3, "job": "a b", "limit": 60.0}
        for place in (0, 2)
    ]
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(together, *calls)
        # Rank 0 may listen only later, or, with all ranks on one machine, on loopback alone.
        rendezvous.cancel(f"{socket.gethostname()}:{port}", place, "3", "RANK is wrong", "a b")
    expected = f"{who} on {socket.gethostname()} can't start: RANK is wrong"
    assert [(str(error), type(error)) for error in others.result()] == [(expected, InputError)] * 2


def test_rank_0_that_cant_start_tells_all_others_whatever_they_wait_for(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "GRACE", 2.0)
    address = f"127.0.0.1:{port}"
    calls = [{"address": address, "place": place, "count": 3, "limit": 60.0} for place in (1, 2)]
    started = time.monotonic()
    for count in ("3", "x", None):
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(together, *calls)
            rendezvous.cancel(address, "0", count, "LOCAL_RANK is wrong")
        expected = f"rank 0 on {socket.gethostname()} can't start: LOCAL_RANK is wrong"
        assert [(str(error), type(error)) for error in others.result()] == [
            (expected, InputError)
        ] * 2
    assert time.monotonic() - started < 20


def test_a_run_of_one_has_nobody_to_tell(port):
    started = time.monotonic()
    rendezvous.cancel(f"127.0.0.1:{port}", "1", "1", "RANK is 1")
    assert time.monotonic() - started < 1


def test_nobody_is_told_where_no_rank_0_listens(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER", 0.3)
    with pytest.raises(OSError, match="refused"):
        rendezvous.cancel(f"127.0.0.1:{port}", "2", "2", "RANK is 2")


def test_a_second_rank_0_is_told_from_a_taken_port(port, monkeypatch):
    monkeypatch.setattr(admission, "GRACE", 0.2)
    monkeypatch.setattr(rendezvous, "ENDING", 0.2)
    calls = [{"address": f"127.0.0.1:{port}", "place": 0, "count": 2, "limit": 60.0}] * 2
    said = sorted(map(str, together(*calls)))
    here = socket.gethostname()
    assert said == [
        f"another rank with this number connected to 127.0.0.1:{port} first; number each differently",
        f"rank 0 on {here} has the same number as one on {here}; number each rank differently",
    ]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(together, calls[0])
        wait_until_somebody_listens(port)
        [error] = together({**calls[0], "job": "another"})
        assert (
            str(error)
            == f"port {port} on 127.0.0.1 is taken (by another run?); choose another MASTER_PORT"
        )
        assert together({**calls[0], "place": 1}) == first.result() == ["127.0.0.1"]


def test_rank_0_hears_at_once_of_another_secret_and_goes_on(port, capfd, monkeypatch):
    address = f"127.0.0.1:{port}"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous.meet, address, 0, 2, 20.0)
        wait_until_somebody_listens(port)
        for _ in range(2):
            connection = socket.create_connection(("127.0.0.1", port), 5)
            found = channel.introduce(connection, b"another", 5)
            found.send("{}")
            with pytest.raises(channel.Forged):
                found.wait(5)
            connection.close()
        second = pool.submit(rendezvous.meet, address, 1, 2, 20.0)
        list(pool.map(rendezvous.Meeting.ready, [first.result(), second.result()]))
    note = "note: a process at 127.0.0.1 has another secret and is rejected; rank 0 waits for those of its run\n"
    assert capfd.readouterr().err.count(note) == 1


def test_a_rank_that_ends_before_the_start_is_named_on_the_others(port):
    address = f"127.0.0.1:{port}"
    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(
            lambda place: rendezvous.meet(address, place, 3, 20.0), range(3)
        )
        waiting = [pool.submit(meeting.ready) for meeting in (first, third)]
        second.connection.close()  # as its process ends
        for rank in waiting:
            with pytest.raises(
                RunError, match="rank 1 ended before the run started; read its error message"
            ) as caught:
                rank.result()
            assert caught.value.shared
        first, second = pool.map(lambda place: rendezvous.meet(address, place, 2, 20.0), range(2))
        waiting = pool.submit(second.ready)
        first.close()
        with pytest.raises(
            RunError,
            match=f"rank 0 at {address} ended before the run started; see its error message",
        ):
            waiting.result()


def test_rank_0s_machine_takes_the_address_at_which_others_found_it(port):
    with socket.create_server(("127.0.0.1", port)) as host, ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(rendezvous.meet, f"127.0.0.1:{port}", 1, 2, 20.0)
        with host.accept()[0] as connection:
            theirs = connection.makefile().readline().split()[2]
            own = "0" * 64
            connection.sendall(f"challenge {own}\n".encode())
            key = channel.key(secret.shared_secret(), bytes.fromhex(theirs), bytes.fromhex(own))
            guest = channel.Channel(connection, key, host=True)
            assert json.loads(guest.wait(5))["place"] == 1
            for line in ("wait", "ok 10.0.0.1 abc", "ok"):
                guest.send(line)
            assert meeting.result().own_address == "10.0.0.1"
            assert (
                meeting.result().run_key == secret.mac(secret.shared_secret(), b"run", b"abc").hex()
            )
            meeting.result().ready()


def test_one_rank_alone_needs_no_network(port):
    with listening(port):
        assert together({"address": f"127.0.0.1:{port}", "place": 0, "count": 1}) == ["127.0.0.1"]


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "host:",
        ":29500",
        "host:0",
        "host:65536",
        "::1:29500",
        "host:http",
        "host:\u00b2",
    ],
)
def test_an_address_that_is_none(address):
    with pytest.raises(
        InputError, match=f"the master's address is '{address}'; expected HOST:PORT"
    ):
        rendezvous.meet(address, 1, 2, limit=1)


def test_interfaces_have_addresses():
    assert rendezvous.addresses()["lo"] == "127.0.0.1"
