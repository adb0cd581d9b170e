"""Profiles some steps of a training (PROFILE): a Chrome trace, and what takes longest in it.

Paddle's profiler records the operators. ``span`` names the parts of a step in the trace.
"""

import collections
import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import paddle
from paddle import profiler

from errors import InputError
from launch.files import temporary_folder
from training.run import Run, trace_name
from utils import num_gpus, rank, writing_whole

# Steps before the first one that is recorded: workers start in them, and memory is taken.
WARMUP = 3
# The operators and layers that the table in the log has.
LONGEST = 10
# The categories of their events. Paddle records no event for a compiled operator of the forward
# pass: its time is that of its layer.
_OPERATOR = "Operator"
_LAYER = "Forward"

# The parts of a step, and what may come between two steps.
LOADER = "wait for the loader"
FORWARD = "forward"
BACKWARD = "backward"
ALL_REDUCE = "all-reduce of the gradients"
UPDATE = "update"
REPORT = "report"
SAVE = "checkpoint"
EVALUATION = "evaluation"
SPANS = (LOADER, FORWARD, BACKWARD, ALL_REDUCE, UPDATE, REPORT, SAVE, EVALUATION)

_is_recording = False


def span(name: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that the trace shows under this name, one of SPANS.

    Unless steps are being recorded, it does nothing.
    """
    return profiler.RecordEvent(name) if _is_recording else contextlib.nullcontext()


class Profile:
    """Records the steps after the first WARMUP ones of a process. Every rank has its own.

    Args:
        steps: the number of steps to record. If training ends before, they are fewer.
        run: gets the trace and, on rank 0, the table.

    Raises:
        InputError: this build of Paddle can't profile here.
    """

    def __init__(self, steps: int, run: Run) -> None:
        if paddle.device.is_compiled_with_cuda() and not num_gpus():
            raise InputError(
                "PROFILE needs a GPU with this build of Paddle, whose profiler doesn't start"
                " without its driver; leave it out, or install paddlepaddle for CPUs"
            )
        self.steps = steps
        self.run = run
        self.seen = 0
        self.trace = b""
        self.profiler: Any = None

    def end_step(self) -> None:
        """Begins or ends the recording, if it is time to. It is called after each step."""
        self.seen += 1
        if self.profiler:
            self.profiler.step()
        if self.seen == WARMUP:
            self._start()
        elif self.seen == WARMUP + self.steps:
            self.finish()

    def _start(self) -> None:
        global _is_recording
        targets = [profiler.ProfilerTarget.CPU]
        if num_gpus():
            targets.append(profiler.ProfilerTarget.GPU)
        # Without this function, the profiler would write into the current folder.
        self.profiler = profiler.Profiler(targets=targets, on_trace_ready=self._read)
        self.profiler.start()
        _is_recording = True

    def _read(self, recorded: Any) -> None:
        """Keeps the recorded trace, which Paddle can only write to a file."""
        with temporary_folder() as folder:
            file = Path(folder) / "trace.json"
            recorded.export(str(file), "json")
            self.trace = file.read_bytes()

    def finish(self) -> None:
        """Ends the recording, if there is one: writes the trace, and logs what takes longest."""
        global _is_recording
        if not self.profiler:
            return
        # If Paddle's profiler fails to stop, the training continues without it.
        recording = self.profiler
        self.profiler = None
        steps = self.seen - WARMUP
        with self.run.logging_failure("the trace"):
            _is_recording = False
            recording.stop()
            path = self.run.directory / trace_name(rank())
            with writing_whole(path, "wb") as file:
                file.write(self.trace)
            events = [event for event in json.loads(self.trace)["traceEvents"] if "dur" in event]
            for line in table(events, steps):
                self.run.info(line)
            self.run.info(f"trace of {steps} steps: {path}, for ui.perfetto.dev")
        self.trace = b""


class Total(NamedTuple):
    """The times of all events of a name.

    Attributes:
        seconds: their sum, without that of the events within them.
        calls: their number.
    """

    seconds: float
    calls: int


def table(events: Iterable[dict[str, Any]], steps: int) -> Iterator[str]:
    """Yields the lines of the table: the parts of the steps, and the longest operators and layers.

    Args:
        events: those of a Chrome trace that have a duration, in microseconds.
        steps: the number of steps that were recorded.
    """
    events = list(events)
    spans: dict[str, Total] = {}
    operators: list[dict[str, Any]] = []
    for event in events:
        name = _name(event)
        if event.get("cat") == "PythonUserDefined" and name in SPANS:
            before = spans.get(name, Total(0.0, 0))
            spans[name] = Total(before.seconds + event["dur"] / 1e6, before.calls + 1)
        elif event.get("cat") in (_OPERATOR, _LAYER):
            operators.append(event)
    if not events:
        return
    first = min(event["ts"] for event in events)
    seconds = (max(event["ts"] + event["dur"] for event in events) - first) / 1e6
    yield f"profile of {steps} steps, {1000 * seconds / max(1, steps):.1f} ms a step:"
    yield from _rows("part", {name: spans[name] for name in SPANS if name in spans}, seconds)
    totals = own_times(operators)
    ordered = sorted(totals, key=lambda name: (-totals[name].seconds, name))
    yield from _rows(
        "operator or layer", {name: totals[name] for name in ordered[:LONGEST]}, seconds
    )


def own_times(events: list[dict[str, Any]]) -> dict[str, Total]:
    """Returns the total of each operator and layer, without what is called within it.

    Args:
        events: of operators and layers; those of a thread are nested or follow each other.
    """
    sums: dict[str, float] = collections.defaultdict(float)
    calls: dict[str, int] = collections.Counter()
    # Of each thread, the events that the next one may lie in: (end, name).
    around: dict[Any, list[tuple[float, str]]] = collections.defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        name = _name(event)
        end = event["ts"] + event["dur"]
        # Paddle writes a thread as "4711(Python)" and "4711(C++)".
        stack = around[str(event.get("tid")).partition("(")[0]]
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if stack:
            sums[stack[-1][1]] -= event["dur"] / 1e6
        stack.append((end, name))
        sums[name] += event["dur"] / 1e6
        calls[name] += 1
    return {name: Total(sums[name], calls[name]) for name in calls}


def _name(event: dict[str, Any]) -> str:
    """Returns an event's name without its duration and Paddle's additions: "matmul" for the
    operator "matmul dygraph[1 ms]", "Linear (layer)" for the layer "Linear[1 ms]".
    """
    name = event["name"].partition("[")[0]
    if event.get("cat") == _LAYER:
        return f"{name} (layer)"
    name = name.removesuffix(" dygraph").removeprefix("Global_")
    return name.removeprefix("CustomOpGradNode: ")


def _rows(title: str, totals: dict[str, Total], seconds: float) -> Iterator[str]:
    """Yields a table of totals; ``seconds`` are all of the recorded time."""
    rows = [(title, "ms", "calls", "share")]
    for name, total in totals.items():
        share = f"{total.seconds / seconds:.1%}"
        rows.append((name, f"{1000 * total.seconds:.1f}", str(total.calls), share))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        yield "  " + "  ".join([name.ljust(widths[0]), *cells])
