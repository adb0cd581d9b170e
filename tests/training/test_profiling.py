"""Profiled steps: the trace, the table of what takes longest, and that nothing else changes."""

import hashlib
import json

import paddle
import pytest
from conftest import TINY

from config import get_config
from errors import InputError
from training import profiling
from training.command_line import config_from_arguments
from training.profiling import Profile, Total, own_times, span, table
from training.run import Run

OPTIONS = [*TINY, "DATA.BATCH_SIZE", "64", "MODEL.DROPOUT", "0.1", "TRAIN.NUM_EPOCHS", "2"]
WITHOUT_DRIVER = paddle.device.is_compiled_with_cuda() and not paddle.device.cuda.device_count()


def event(name, begin, length, category="Operator", thread="7(C++)"):
    return {"name": name, "ts": begin, "dur": length, "cat": category, "tid": thread}


def test_the_time_of_an_operator_is_without_those_within_it():
    events = [
        event("Linear[9 us]", 0, 9e6, "Forward", "7(Python)"),
        event("matmul dygraph[4 us]", 1, 4e6),
        event("matmul dygraph[2 us]", 5e6 + 1, 2e6),
        # The same moment in another thread.
        event("matmul dygraph[3 us]", 2, 3e6, thread="8(C++)"),
        event("Global_CustomOpGradNode: vit_linear_grad[1 us]", 20e6, 1e6),
    ]
    assert own_times(events) == {
        "Linear (layer)": Total(3.0, 1),
        "matmul": Total(9.0, 3),
        "vit_linear_grad": Total(1.0, 1),
    }
    assert own_times([]) == {}


def test_the_table_has_the_parts_and_the_longest_operators():
    events = [event(f"op_{number} dygraph[]", 100 * number, number) for number in range(1, 13)]
    events.append(event("backward[]", 0, 1000, "PythonUserDefined"))
    events.append(event("forward[]", 1000, 1000, "PythonUserDefined"))
    events.append(event("forward[]", 2000, 1000, "PythonUserDefined"))
    # Paddle's own event of the same name is another one.
    events.append(event("backward[]", 0, 500, "UserDefined"))
    lines = list(table(events, 3))
    assert lines[:4] == [
        "profile of 3 steps, 1.0 ms a step:",
        "  part       ms  calls  share",
        "  forward   2.0      2  66.7%",
        "  backward  1.0      1  33.3%",
    ]
    assert [line.split()[0] for line in lines[5:]] == [
        f"op_{number}" for number in range(12, 2, -1)
    ]
    assert list(table([], 3)) == []


def test_a_span_does_nothing_unless_steps_are_recorded(monkeypatch):
    monkeypatch.setattr(profiling.profiler, "RecordEvent", lambda name: pytest.fail(name))
    with span(profiling.FORWARD) as entered:
        assert entered is None


class Stuck:
    """Paddle's profiler, which fails to stop, and takes no more steps then."""

    steps = 0

    def __init__(self, **_):
        pass

    def start(self):
        pass

    def step(self):
        self.steps += 1

    def stop(self):
        self.step = self.stop
        raise RuntimeError("CUPTI is busy")


def test_a_profiler_that_fails_to_stop_is_a_line_and_the_training_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling.profiler, "Profiler", Stuck)
    monkeypatch.setattr(paddle.device, "is_compiled_with_cuda", lambda: False)
    run = Run(get_config(None, [*OPTIONS, "OUTPUT", str(tmp_path / "run")]), [])
    said = []
    monkeypatch.setattr(run, "info", said.append)
    profile = Profile(2, run)
    for _ in range(10):
        profile.end_step()
    profile.finish()
    [line] = said
    assert line.startswith("the trace can't be written (RuntimeError: CUPTI is busy); ")
    with span(profiling.FORWARD) as entered:
        assert entered is None


def test_a_build_whose_profiler_needs_a_driver_is_refused(monkeypatch):
    monkeypatch.setattr(paddle.device, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(profiling, "num_gpus", lambda: 0)
    with pytest.raises(InputError, match="PROFILE needs a GPU with this build of Paddle"):
        Profile(1, None)


def test_what_cannot_be_profiled_is_refused():
    with pytest.raises(InputError, match="PROFILE is 51, expected 0 to 50"):
        get_config(None, [*TINY, "PROFILE", "51"])
    flags = ["-cfg=vit_digits", "-profile=2"]
    assert config_from_arguments("main", flags).PROFILE == 2
    with pytest.raises(InputError, match="PROFILE has no effect under EVAL; leave it out"):
        config_from_arguments("main", [*flags, "-eval"])


def weights(run):
    return hashlib.sha256((run / "checkpoints/last/model.safetensors").read_bytes()).hexdigest()


@pytest.mark.long
@pytest.mark.skipif(WITHOUT_DRIVER, reason="this build's profiler needs a driver")
def test_a_profiled_run_has_a_trace_of_each_rank_and_the_same_weights(program, tmp_path):
    status, _, err = program("main_multi_gpu.py", "-output=plain", "-o", *OPTIONS)
    assert status == 0, err
    # Longer than the run of 2 x 11 steps: an evaluation and saves are in it.
    flags = ["-profile=50", "-output=run", "-o", *OPTIONS]
    status, out, err = program("main_multi_gpu.py", *flags)
    assert status == 0, err
    assert weights(tmp_path / "run") == weights(tmp_path / "plain")
    log = out + err
    assert "profile of 19 steps, " in log
    assert "trace of 19 steps: run/trace_rank0.json" in log
    for rank in (0, 1):
        events = json.loads((tmp_path / "run" / f"trace_rank{rank}.json").read_text())
        spans = [
            one["name"].partition("[")[0]
            for one in events["traceEvents"]
            if one.get("cat") == "PythonUserDefined"
        ]
        for name in (profiling.FORWARD, profiling.BACKWARD, profiling.UPDATE, profiling.ALL_REDUCE):
            assert spans.count(name) == 19, name
        assert spans.count(profiling.LOADER) >= 19
        assert spans.count(profiling.EVALUATION) == 2
        assert profiling.SAVE in spans or rank
    assert "\nPROFILE: 0\n" in (tmp_path / "run" / "config.yaml").read_text()
    # A run that is resumed isn't profiled again.
    before = (tmp_path / "run" / "trace_rank0.json").stat().st_mtime_ns
    flags = ["-resume=auto", "-output=run", "-o", "TRAIN.NUM_EPOCHS", "3"]
    status, out, err = program("main_multi_gpu.py", *flags)
    assert status == 0, err
    assert "profile of" not in out + err
    assert (tmp_path / "run" / "trace_rank0.json").stat().st_mtime_ns == before
