"""tools/watch.py: the states and curves of runs, whatever their files hold; nothing else is served."""

import contextlib
import fcntl
import http.client
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time

import pytest
from support.browser import CHROMIUM, browsing, pictured
from support.programs import ROOT

from errors import InputError
from inference.watch import curves as watched_curves
from inference.watch import runs as watched_runs
from inference.watch.curves import MOST_POINTS, Curve, Curves
from inference.watch.files import Files
from inference.watch.runs import Runs
from inference.watch.server import Server
from tools import watch
from training.pages import page

BAD = "<img src=x onerror=alert(1)>"
CONFIG = """MODEL:
  NAME: vit_digits
DATA:
  DATASET: digits
TRAIN:
  NUM_EPOCHS: 10
TASK: classification
EVAL: false
TAG: '{tag}'
"""


def record(split, step, epoch, **values):
    return json.dumps({"split": split, "step": step, "epoch": epoch, **values}) + "\n"


def make_run(folder, log="", epochs=3, tag="first"):
    """A run that ended without a word, unless ``log`` says how."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(tag=tag))
    lines = ""
    for epoch in range(1, epochs + 1):
        lines += record("train", 10 * epoch, epoch, loss=2 / epoch, lr=0.1, images_per_s=99.5)
        lines += record("val", 10 * epoch, epoch, loss=3 / epoch, acc1=50 - (epoch - 2) ** 2)
    (folder / "metrics.jsonl").write_text(lines)
    began = "0229 14:00:00 configuration\n0229 14:00:09 epoch 3/10 step 30: loss: 1, left: 7 min\n"
    (folder / "log.txt").write_text(began + log)
    (folder / ".lock").write_text(f"process 1 on {platform.node()}")
    return folder


@contextlib.contextmanager
def locked(folder):
    """Another process holds the run's lock: a process doesn't see its own."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(done[1])
        with open(folder / ".lock", "r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
    os.read(ready[0], 1)
    yield
    os.write(done[1], b"x")
    os.waitpid(child, 0)
    for descriptor in (*ready, *done):
        os.close(descriptor)


def states(root):
    return {row["name"]: (row["state"], row["detail"]) for row in Runs(root).rows()}


def test_a_row_has_what_the_files_say(tmp_path):
    make_run(tmp_path / "one")
    [row] = Runs(tmp_path).rows()
    expected = {
        "name": "one", "model": "vit_digits", "data": "digits", "task": "classification",
        "tag": "first", "epoch": 3, "epochs": 10, "metric": "acc1", "best": 50, "best_epoch": 2,
        "lr": 0.1, "images_per_s": 99.5, "unread": 0, "report": False, "picture": False, "left": "",
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert row["news"] == pytest.approx(time.time(), abs=30)


def test_a_folder_that_is_a_run_is_one_row_with_its_own_name(tmp_path):
    assert [row["name"] for row in Runs(make_run(tmp_path / "one")).rows()] == ["one"]
    assert Runs(tmp_path / "none").rows() == []


def test_each_state_has_its_evidence(tmp_path):
    stop = "stopped by SIGTERM after step 30, saved in one; -resume=auto -output=one continues"
    make_run(tmp_path / "stopped", f"0229 14:01:00 {stop}\n")
    make_run(tmp_path / "failed", "0229 14:01:00 error: the loss is nan at step 30\n")
    make_run(tmp_path / "killed")
    finished = make_run(tmp_path / "finished")
    (finished / "result.json").write_text('{"loss": 1.0, "acc1": 50.0}')
    # A resumed run has added records since, and was killed.
    resumed = make_run(tmp_path / "resumed")
    (resumed / "result.json").write_text('{"loss": 1.0, "acc1": 50.0}')
    os.utime(resumed / "result.json", (1, 1))
    # What a run said before it was resumed doesn't count.
    again = f"0229 14:01:00 {stop}\n0229 15:00:00 epoch 4/10 step 40: loss: 1\n"
    make_run(tmp_path / "again", again)
    # It was killed before its first epoch.
    starts = "0229 15:00:00 configuration, where it isn't the default:\n  TASK: mae\n"
    make_run(tmp_path / "starts", f"0229 14:01:00 {stop}\n{starts}")
    elsewhere = make_run(tmp_path / "elsewhere")
    (elsewhere / ".lock").write_text("process 7 on another")
    lost = "its log gives no reason; the process may have been killed"
    assert states(tmp_path) == {
        "stopped": ("stopped", stop),
        "failed": ("failed", "error: the loss is nan at step 30"),
        "killed": ("failed", lost),
        "finished": ("finished", ""),
        "resumed": ("failed", lost),
        "again": ("failed", lost),
        "starts": ("failed", lost),
        "elsewhere": ("training", "on another machine"),
    }
    past = time.time() - 1500
    for name in ("metrics.jsonl", "log.txt"):
        os.utime(elsewhere / name, (past, past))
    assert states(tmp_path)["elsewhere"] == (
        "silent",
        "no news for 25 min, from another machine",
    )


def test_a_lock_that_is_held_is_a_run_that_trains(tmp_path):
    folder = make_run(tmp_path / "one")
    with locked(folder):
        [row] = Runs(tmp_path).rows()
        assert (row["state"], row["left"]) == ("training", "7 min")
        past = time.time() - 1500
        for name in ("metrics.jsonl", "log.txt"):
            os.utime(folder / name, (past, past))
        assert states(tmp_path)["one"] == ("silent", "no news for 25 min; its process is alive")
        config = CONFIG.format(tag="").replace("EVAL: false", "EVAL: true")
        (folder / "config.yaml").write_text(config)
        os.utime(folder / "log.txt")
        assert states(tmp_path)["one"][0] == "evaluating"
    assert states(tmp_path)["one"][0] == "failed"


def test_an_evaluation_has_the_number_of_its_result(tmp_path):
    folder = make_run(tmp_path / "eval")
    (folder / "metrics.jsonl").unlink()
    (folder / "result.json").write_text('{"loss": 1.0, "acc1": 51.5, "weights": "w"}')
    [row] = Runs(tmp_path).rows()
    assert (row["state"], row["metric"], row["best"], row["epoch"]) == (
        "finished", "acc1", 51.5, None,
    )  # fmt: skip


# ------------------------------------------------------------------ curves


def follow(tmp_path, curves, seconds=10.0):
    curves.follow(Files(tmp_path), (), time.monotonic() + seconds)
    return curves.points()


def test_records_are_read_once_and_followed(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    file.write_text(record("train", 1, 1, loss=3.0) + '{"split": "train", "st')
    curves = Curves()
    assert follow(tmp_path, curves) == {"loss": {"train": [[1], [3]]}}
    read = []
    parse = watched_curves.parsed_json
    monkeypatch.setattr(
        watched_curves,
        "parsed_json",
        lambda line, *a, **k: read.append(line) or parse(line, *a, **k),
    )
    with open(file, "a") as more:
        more.write('ep": 2, "epoch": 1, "loss": 2.5}\n' + record("val", 2, 1, loss=2.0))
    points = follow(tmp_path, curves)
    assert points == {"loss": {"train": [[1, 2], [3, 2.5]], "val": [[2], [2]]}}
    assert len(read) == 2
    assert curves.best == {"loss": (2, 1)}
    # A resumed run replaces the file, and may have added more than was removed.
    lines = [record("train", step, 1, loss=9.0) for step in range(1, 9)]
    (tmp_path / "new").write_text("".join(lines))
    os.replace(tmp_path / "new", file)
    assert follow(tmp_path, curves) == {"loss": {"train": [list(range(1, 9)), [9] * 8]}}
    assert curves.best == {}
    # A copy of a run is renewed in place, as by scp.
    file.write_text("".join(record("train", step, 1, loss=5.0) for step in range(1, 20)))
    assert follow(tmp_path, curves) == {"loss": {"train": [list(range(1, 20)), [5] * 19]}}


def test_half_a_record_that_a_crash_left_does_not_wait_to_be_read(tmp_path):
    folder = make_run(tmp_path / "one")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"split": "train", "st')
    [row] = Runs(tmp_path).rows()
    assert (row["epoch"], row["unread"]) == (3, 0)


@pytest.mark.parametrize(
    "line",
    [
        b"[]", b"{", b"[" * 60000, b"\xff", b'{"split": "train"}', b'{"split": "x", "step": 1, "epoch": 1}',
        b'{"split": "train", "step": -1, "epoch": 1, "loss": 1}',
        b'{"split": "train", "step": 1.5, "epoch": 1, "loss": 1}',
        b'{"split": "train", "step": 1, "epoch": 1, "loss": NaN}',
        b'{"split": "train", "step": 1, "epoch": 1, "loss": 1e300}',
        b'{"split": "train", "step": 1, "epoch": 1, "loss": "1", "' + BAD.encode() + b'": 1}',
        b"x" * 200_000,
    ],
    ids=range(12),
)  # fmt: skip
def test_a_line_that_no_run_writes_is_left_out(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n" + record("val", 1, 1, loss=2).encode())
    assert follow(tmp_path, Curves()) == {"loss": {"val": [[1], [2]]}}


def test_a_curve_keeps_its_means_in_a_bounded_number_of_points():
    curve = Curve()
    for step in range(1, 40 * MOST_POINTS + 1):
        curve.add(step, float(step))
    assert MOST_POINTS // 2 <= len(curve.values) < MOST_POINTS
    width = curve.records
    for place, (step, value) in enumerate(zip(curve.steps, curve.values, strict=True)):
        assert step == (place + 1) * width
        assert value == step - (width - 1) / 2


def test_a_large_file_is_read_in_parts(tmp_path):
    make_run(tmp_path / "one")
    with open(tmp_path / "one" / "metrics.jsonl", "a") as file:
        file.writelines(record("train", step, 4, loss=1.0) for step in range(41, 40_000))
    before = time.monotonic()
    run = watched_runs.WatchedRun(("one",), "one")
    assert not run.renew(Files(tmp_path), before + 0.1)
    assert time.monotonic() - before < 2
    assert run.row(time.time())["unread"] > 0
    while not run.renew(Files(tmp_path), time.monotonic() + 1):
        pass
    assert run.curves.last["train"]["step"] == 39_999


# ------------------------------------------------------------------ files


def test_no_link_is_followed_out_of_the_folder(tmp_path):
    outside = make_run(tmp_path / "outside")
    (outside / "report.html").write_text("secret")
    (outside / "result.json").write_text('{"loss": 1.0, "acc1": 9.0}')
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(outside)
    assert Runs(root).rows() == []
    folder = make_run(root / "one")
    for name in ("metrics.jsonl", "log.txt", ".lock", "config.yaml"):
        (folder / name).unlink()
    for name in ("metrics.jsonl", "log.txt", "result.json", "report.html", ".lock"):
        (folder / name).symlink_to(outside / name)
    assert Runs(root).rows() == []
    (folder / "config.yaml").write_text(CONFIG.format(tag=""))
    assert Runs(root).rows() == []
    (folder / "result.json").unlink()
    (folder / "result.json").write_text("{}")
    watched = Runs(root)
    [row] = watched.rows()
    assert (row["epoch"], row["best"], row["report"]) == (None, None, False)
    with pytest.raises(OSError, match="report.html"):
        watched.content(row["key"], "report.html", 100)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "log.txt", "result.json", "config.yaml", ".lock"]
)
def test_a_pipe_or_a_folder_is_no_file(tmp_path, name):
    for number, make in enumerate((os.mkfifo, os.mkdir)):
        folder = make_run(tmp_path / str(number))
        (folder / "result.json").write_text("{}")
        (folder / name).unlink()
        make(folder / name)
    assert len(Runs(tmp_path).rows()) == (0 if name == "config.yaml" else 2)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"- 1", b"MODEL: 5", b"a: &a [*a]", b"x" * 2_000_000],
    ids=range(6),
)
def test_another_configuration_is_a_row_without_a_model(tmp_path, content):
    folder = make_run(tmp_path / "one")
    (folder / "config.yaml").write_bytes(content)
    (folder / "result.json").write_bytes(content)
    [row] = Runs(tmp_path).rows()
    assert (row["model"], row["epochs"], row["epoch"]) == ("", None, 3)


def test_hundreds_of_runs_are_cheap_to_renew(tmp_path, monkeypatch):
    for number in range(300):
        make_run(tmp_path / f"sweep{number % 3}" / f"run{number}")
    monkeypatch.setattr(watched_runs, "_INTERVAL", 0.0)
    watched = Runs(tmp_path)
    until = time.monotonic() + 60
    while any(row["epoch"] is None for row in watched.rows()) and time.monotonic() < until:
        pass
    read = []
    monkeypatch.setattr(watched_runs, "read_yaml", read.append)
    before = time.process_time()
    rows = watched.rows()
    assert time.process_time() - before < 1
    assert len(rows) == 300
    assert not read
    # A deeper folder than those of sweeps isn't looked at, and at most so many runs are.
    make_run(tmp_path / "a" / "b" / "c" / "d")
    assert len(watched.rows()) == 300
    assert watched.files.all_found
    monkeypatch.setattr("inference.watch.files.MOST_RUNS", 7)
    monkeypatch.setattr(watched, "_search_at", 0.0)
    assert len(watched.rows()) == 7
    assert not watched.files.all_found


def test_a_search_that_takes_long_holds_up_no_reading(tmp_path, monkeypatch):
    """A tree of images beside the runs: it is searched for a tenth of the time."""
    make_run(tmp_path / "one")
    monkeypatch.setattr(watched_runs, "_INTERVAL", 0.0)
    monkeypatch.setattr(watched_runs, "_PATIENCE", 0.2)
    searches = []
    runs = Files.runs

    def slow_runs(self):
        searches.append(1)
        time.sleep(0.3)
        return runs(self)

    monkeypatch.setattr(Files, "runs", slow_runs)
    watched = Runs(tmp_path)
    for _ in range(5):
        [row] = watched.rows()
        assert (row["epoch"], row["model"]) == (3, "vit_digits")
    assert len(searches) == 1
    monkeypatch.setattr(watched, "_search_at", 0.0)
    make_run(tmp_path / "two")
    assert {row["name"] for row in watched.rows()} == {"one", "two"}


# ------------------------------------------------------------------ the server


@pytest.fixture
def server(tmp_path):
    root = tmp_path / "output"
    folder = make_run(root / f"a{BAD.replace('/', '')}", tag=BAD)
    (folder / "report.html").write_text(
        page.page("report", page.renewal("Training.", time.time()), reloads=True)
    )
    (folder / "curves.png").write_bytes(b"\x89PNG\r\n\x1a\n...")
    make_run(root / "b")
    (root / "b" / "curves.png").write_bytes(b"<html>")
    (root / "secret.html").write_text("secret")
    served = Server(root, "127.0.0.1", 0)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": "127.0.0.1", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_what_is_served(server):
    status, headers, body = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"TITLES_OF_CURVES" not in body
    rows = {row["name"]: row for row in json.loads(ask(server, "/runs")[2])["runs"]}
    assert rows.keys() == {"b", f"a{BAD.replace('/', '')}"}
    key, other = (rows[name]["key"] for name in sorted(rows))
    drawn = json.loads(ask(server, f"/curves?run={key}&run=0000000000000000")[2])
    assert drawn.keys() == {key}
    assert drawn[key]["loss"]["val"] == [[10, 20, 30], [3, 1.5, 1]]
    assert drawn[key]["acc1"]["val"] == [[10, 20, 30], [49, 50, 49]]
    status, headers, body = ask(server, f"/run/{key}/report.html")
    assert (status, b"Training." in body) == (200, True)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none'")
    assert "allow-same-origin" not in policy
    assert ask(server, f"/run/{key}/curves.png")[1]["Content-Type"] == "image/png"
    assert ask(server, f"/run/{other}/curves.png")[0] == 404
    assert ask(server, f"/run/{other}/report.html")[0] == 404
    status, _, body = ask(server, "/", method="HEAD")
    assert (status, body) == (200, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/secret.html", "/../secret.html", "/run/../secret.html", "/run/{key}/../../secret.html", "/run/{key}/config.yaml",
        "/run/{key}/report.html/", "/run/%2e%2e/report.html", "/run//report.html", "/run/{key}/checkpoints/best", "/a/report.html",
        "/run/{key}%00/report.html",
    ],
)  # fmt: skip
def test_nothing_else_is_served(server, path):
    key = json.loads(ask(server, "/runs")[2])["runs"][0]["key"]
    status, headers, body = ask(server, path.format(key=key))
    assert (status, body) == (404, b"there is no such page\n")
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_an_address_that_is_no_address(server):
    assert ask(server, "http://[x/")[0] == 400
    assert ask(server, "/curves?" + "run=1&" * 40)[0] == 400
    assert ask(server, "/runs", method="POST")[0] == 501


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("127.0.0.1:8001", 200), ("[::1]:9", 200),
                                              ("evil.example", 403), ("evil.example:8001", 403), ("", 403)])  # fmt: skip
def test_a_foreign_name_of_this_machine_is_refused(server, host, status):
    found, _, body = ask(server, "/runs", Host=host)
    assert found == status
    if status == 403 and host:
        assert body.startswith(b"found the Host evil.example, expected localhost or 127.0.0.1")


def test_a_client_that_says_nothing_holds_up_nobody(server, monkeypatch):
    silent = [http.client.HTTPConnection("127.0.0.1", server.server_address[1]) for _ in range(9)]
    for one in silent:
        one.connect()
    before = time.monotonic()
    assert ask(server, "/runs")[0] == 200
    assert time.monotonic() - before < 5
    for one in silent:
        one.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none"], "none isn't a folder; name a folder of runs, such as ./output"),
        ([".", "-port=70000"], "-port is 70000, expected 0 to 65535 (0: any that is free)"),
        (
            [".", "-host=a..b", "-port=0"],
            "can't listen at a..b, port 0 (this isn't a host name); ch",
        ),
    ],
)
def test_wrong_words_are_a_line(monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["watch", *words])
    with pytest.raises(InputError, match=re.escape(said)):
        watch.main()


def test_a_port_that_is_taken_is_a_line(server, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["watch", ".", f"-port={server.server_address[1]}"])
    with pytest.raises(InputError, match="Address already in use"):
        watch.main()


def test_neither_paddle_nor_matplotlib_is_imported(tmp_path):
    words = [
        "import sys",
        "import inference.watch.server",
        "print([m for m in ('paddle', 'matplotlib') if m in sys.modules])",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


# ------------------------------------------------------------------ in a browser

NAMES = "[...document.querySelectorAll('#rows td.run label > span:last-child')].map((one) => one.firstChild.data)"
WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_lists_sorts_draws_and_renews(server, width, monkeypatch):
    with browsing() as browser:
        browser.open(server.url, width)
        browser.wait("document.querySelectorAll('#rows tr').length === 2")
        # Without one that trains, those with records are drawn.
        browser.wait("document.querySelectorAll('#charts section').length === 4")
        titles = "[...document.querySelectorAll('#charts h2')].map((one) => one.textContent)"
        assert browser.value(titles) == [
            "loss",
            "accuracy, top 1 (%)",
            "learning rate",
            "images per second",
        ]
        # Training and evaluation of two runs.
        assert (
            browser.value("document.querySelectorAll('#charts section polyline').length")
            == 4 + 2 + 2 + 2
        )
        pictured(browser, f"watch-{width}")
        assert not browser.value(WIDER)
        # What strangers named is text, and none of it is an image.
        assert browser.value("document.querySelectorAll('img').length") == 0
        assert BAD in browser.value("document.getElementById('rows').textContent")
        browser.value("document.querySelector('th[data-key=name] button').click()")
        assert [name[0] for name in browser.value(NAMES)] == ["a", "b"]
        browser.value("document.querySelector('th[data-key=name] button').click()")
        assert [name[0] for name in browser.value(NAMES)] == ["b", "a"]
        browser.value("document.querySelector('#rows input').click()")
        browser.wait("document.querySelectorAll('#charts section polyline').length === 5")
        browser.value("document.getElementById('clear').click()")
        browser.wait("!document.getElementById('none').hidden")
        with open(server.runs.files.root / "b" / "metrics.jsonl", "a") as file:
            file.write(record("val", 40, 4, loss=0.5, acc1=77.25))
        browser.wait("document.getElementById('rows').textContent.includes('77.25')")
        make_run(server.runs.files.root / "c")
        browser.wait("document.querySelectorAll('#rows tr').length === 3")
        assert browser.said == []


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
def test_any_values_have_few_marks(server):
    """Huge ones beside each other too, whose marks can't be counted by adding 1."""
    folder = server.runs.files.root / "b"
    lines = [record("val", step, step, loss=1e17 + 16 * step) for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    with browsing() as browser:
        browser.open(server.url)
        browser.wait("document.querySelectorAll('#charts section').length > 0")
        for low, high, marks in ((0, 1, 6), (0.1, 0.9, 4), (-3, 5, 4), (0, 10, 6)):
            assert len(browser.value(f"ticks({low}, {high}, 5)")) == marks
        assert len(browser.value("ticks(1e17, 1e17 + 16, 5)")) <= 6
        assert browser.said == []


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
def test_a_report_reloads_itself_and_reaches_nothing(server):
    key = next(row["key"] for row in server.runs.rows() if row["report"])
    with browsing() as browser:
        browser.open(f"{server.url}run/{key}/report.html")
        browser.wait("document.querySelector('time').textContent.includes(':')")
        assert browser.value("document.querySelector('time').textContent") != ""
        assert browser.value("self.origin") == "null"
        assert browser.said == []
