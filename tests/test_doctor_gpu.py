"""tools/doctor.py --gpu, rehearsed on the CPU, for no GPU is here; and its means."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import ROOT
from programs import assert_none_left, descendants, wait_for

from errors import InputError, RunError
from tools import gpu_checks, gpu_first_steps, gpu_probe, gpu_watch

REHEARSAL = "rehearsal on a CPU: says nothing about a GPU"


def start(folder, *flags, **environment):
    words = [sys.executable, str(ROOT / "tools" / "doctor.py"), *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=os.environ | {"TMPDIR": str(folder)} | environment, **streams)


def end(process, timeout=400):
    printed, errors = process.communicate(timeout=timeout)
    return process.returncode, printed, errors


# ------------------------------------------------------------------ the program


@pytest.mark.smoke
def test_without_a_gpu_one_line_says_so(tmp_path):
    for flag in ("-gpu", "--gpu"):
        status, printed, errors = end(start(tmp_path, flag))
        assert (status, printed, list(tmp_path.iterdir())) == (2, "", [])
        assert re.fullmatch(
            r"error: --gpu: Paddle \S+, (a CPU build|built for CUDA \S+ and cuDNN \S+), commit \w{10} sees no GPU,"
            r" expected at least one; .* \(docs/gpu\.md\), or rehearse on the CPU with --gpu --rehearse\n",
            errors,
        )


def test_flags_that_would_do_nothing_are_refused(tmp_path):
    apart = "--rehearse and --only go with --gpu; write that, too, or leave them out"
    launched = {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": "a:1,b:1"}
    launched["PADDLE_CURRENT_ENDPOINT"] = "a:1"
    for flags, environment, expected in [
        (["--rehearse"], {}, apart),
        (["--only", "flash"], {}, apart),
        (["--gpu", "-cfg=vit_digits_x"], {}, "-cfg does nothing with --gpu; leave it out"),
        (["--gpu", "--rehearse", "-ngpus=0"], {}, "-ngpus is 0, expected -1 (all) or at least 1"),
        (["-ngpus=-3"], {}, "-ngpus is -3, expected -1 (all) or at least 1"),
        (["--gpu", "-timeout", "3"], {}, "-timeout does nothing with --gpu; leave it out"),
        (
            ["--gpu"],
            launched,
            "--gpu starts ranks by itself, but a launcher started this; run python tools/doctor.py --gpu",
        ),
    ]:
        status, printed, errors = end(start(tmp_path, *flags, **environment))
        assert (status, printed, errors.removeprefix("rank 0: ")) == (2, "", f"error: {expected}\n")


@pytest.mark.smoke
def test_two_checks_are_rehearsed(tmp_path):
    status, printed, errors = end(start(tmp_path, "--gpu", "--rehearse", "--only", "attention", "flash"))
    assert (status, errors, list(tmp_path.iterdir())) == (0, "", [])
    lines = printed.splitlines()
    assert re.fullmatch(rf"first steps on a GPU, \d{{4}}-\d\d-\d\d \d\d:\d\d UTC: {REHEARSAL}", lines[0])
    assert [line.split()[0] for line in lines[1:4]] == ["toolkit", "paddle", "host"]
    assert paddle.__version__ in lines[2]
    assert lines[4] == (
        "ok    attention   0 of 2 attentions of a ViT under -amp (float32) are fused; none is expected below compute"
        " capability 8"
    )
    assert re.fullmatch(
        r"ok    flash       2 x 50 x 2 x 16, float32, forward and backward: fused \S+ ms, plain \S+ ms; they"
        r" round off \S+ and \S+ of the largest value",
        lines[5],
    )
    assert re.fullmatch(rf"all is well, \d+ s; {REHEARSAL}", lines[6])
    assert len(lines) == 7


@pytest.mark.slow
def test_all_are_rehearsed(tmp_path):
    status, printed, errors = end(start(tmp_path, "--gpu", "--rehearse"))
    found = dict(re.findall(r"^(?:ok|todo)  (\S+) +(.*)$", printed, re.MULTILINE))
    todo = re.findall(r"^todo  (\S+)", printed, re.MULTILINE)
    assert (todo, status, errors, list(tmp_path.iterdir())) == ([], 0, "", []), printed
    assert list(found) == list(gpu_first_steps.CHECKS)
    assert found["same-bits"].endswith("the same bits of weights: vit, swin, beit, resnet")
    assert re.fullmatch(r"killed after epoch_0002_sample_\d+, gone on with: the \d\d\d tensors of .*", found["resumed"])
    assert "saved after epoch_0001" in found["sharded"]
    assert "between 2 ranks over GLOO" in found["all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "")])
def test_a_signal_ends_it_and_what_it_started(tmp_path, number, said):
    process = start(tmp_path, "--gpu", "--rehearse", "--only", "sharded")
    wait_for(lambda: list(tmp_path.glob("doctor-*/sharded/metrics.jsonl")), process)
    left = list(descendants(process.pid))
    assert len(left) > 2
    process.send_signal(number)
    status, printed, errors = end(process)
    assert (status, errors) == (128 + number, said)
    assert "sharded  " not in printed
    assert_none_left(left)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_one_line_says_so(monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(gpu_first_steps.tempfile, "gettempdir", none)
    monkeypatch.setattr(gpu_first_steps, "_refuse", lambda arguments: None)
    with pytest.raises(InputError, match=r"^No usable .* found in \['/tmp'\]; let TMPDIR name a folder that can be"):
        gpu_first_steps.main(None, print)


def test_a_host_without_proc_is_told_by_what_else_is_known(monkeypatch):
    monkeypatch.setattr(gpu_first_steps, "Path", lambda *_: Path("/no/cpuinfo"))
    assert re.fullmatch(r"Python \S+, \S+, \d+ cores, \d+ GB, Linux .*", gpu_first_steps.host())


def test_ctrl_c_while_a_tool_is_imported_is_no_traceback():
    tool = f"import sys; sys.argv[0] = {str(ROOT / 'tools' / 'doctor.py')!r}; import startup; raise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", tool], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


# -------------------------------------------------------------------- its means


@pytest.mark.smoke
def test_copies_are_counted_by_who_asks_for_them():
    before = paddle.Tensor.item, paddle.tensor.creation._to_tensor_non_static
    with gpu_watch.counted() as count:
        for _ in range(3):
            tensor = paddle.to_tensor([1.0, 2.0])
        float(tensor.sum())
        tensor[0].item(), tensor.tolist(), bool(tensor.any())
        tensor = tensor * 2 + 1  # nothing
        tensor.set_value(np.zeros(2, np.float32))
    assert (paddle.Tensor.item, paddle.tensor.creation._to_tensor_non_static) == before
    here = f"tests/{Path(__file__).name}:"
    assert {where.partition(here)[0]: number for where, number in count.items()} == {
        "to_tensor ": 3, "__float__ ": 1, "item ": 1, "tolist ": 1, "__bool__ ": 1, "set_value ": 1,
    }  # fmt: skip


@pytest.mark.smoke
def test_attention_operators_are_seen():
    names = []
    assert all(hasattr(paddle._C_ops, name) for name in ("flash_attn", "memory_efficient_attention"))
    query = paddle.zeros([1, 2, 1, 8], "float16")
    with (
        gpu_watch.watched(paddle._C_ops, gpu_probe.BACKENDS, lambda name, *_: names.append(name)),
        pytest.raises(Exception, match="flash_attn|not registered|kernel"),  # a CPU has none
    ):
        paddle._C_ops.flash_attn(query, query, query, None, None, 0.0, False, False, False, "")
    assert names == ["flash_attn"]


def test_a_check_that_fails_is_a_finding(tmp_path):
    def fail(error):
        def check(bench):
            raise error

        return gpu_first_steps.made(check, SimpleNamespace())

    assert fail(RunError("rank 1: so")) == (False, "failed: rank 1: so")
    assert fail(KeyError("reports")) == (False, "failed: KeyError: 'reports'")
    assert fail(ValueError("one\n  two")) == (False, "failed: ValueError: one two")


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path):
    bench = gpu_checks.Bench(tmp_path, True, {})
    bench.deadline = time.monotonic() + 1.5
    program = tmp_path / "hang.py"
    program.write_text(
        "import subprocess\nprint(subprocess.Popen(['sleep', '99']).pid, flush=True)\nimport time\ntime.sleep(99)"
    )
    with (
        pytest.raises(RunError, match=r"^no end within the 240 s of a check$"),
        gpu_checks.started([str(program)], bench) as process,
    ):
        child = int(process.stdout.readline())
        gpu_checks.ended(process, bench.deadline)
    assert_none_left([process.pid, child])


def test_what_a_failed_program_said(tmp_path):
    program = tmp_path / "fail.py"
    program.write_text("import sys\nprint('W1122 a banner', file=sys.stderr)\nsys.exit('error: so')")
    bench = gpu_checks.Bench(tmp_path, True, {})
    with pytest.raises(RunError, match=r"^fail\.py ended with status 1: error: so$"):
        bench.run(str(program))
    dump = "Traceback\n  File x\nRuntimeError: out of memory\n\n----\nC++ Traceback\n[Hint: nothing]"
    assert gpu_checks.told_last(dump) == "RuntimeError: out of memory"
    assert gpu_checks.told_last("rank 1: error: so\nlast") == "rank 1: error: so"
    assert gpu_checks.told_last("a\nb\n") == "b"
    assert gpu_checks.told_last("") == "nothing on stderr"
