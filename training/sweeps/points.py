"""A sweep's file, a YAML of keys and values, and the points that it means.

    command: main_single_gpu.py -cfg=vit_digits -o TRAIN.NUM_EPOCHS 20
    keys:
      TRAIN.BASE_LR: [3e-4, 1e-3, 3e-3]        # or {log_uniform: [1e-4, 1e-2]}
      TRAIN.WEIGHT_DECAY: {uniform: [0.0, 0.2]}
    method: random

Points are functions of the file: the same ones in the same order, whatever is killed when. Optuna's
depend on results, too: they are kept in the sweep's folder before their runs start.
"""

import heapq
import importlib.util
import itertools
import math
import random
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import FromFile
from errors import InputError, install
from settings import registry
from settings.documents import read_yaml
from settings.options import Configuration
from settings.registry import ROOT, refuse_other
from settings.values import parse_value, quoted
from training.command_line import config_from_arguments

PROGRAMS = ("main_single_gpu.py", "main_multi_gpu.py")
METHODS = ("grid", "random", "optuna")
_DRAWN = ("choice", "uniform", "log_uniform")
MOST = 10_000  # runs
# The points that Optuna's sampler knows: the newest, and the best of the others.
_NEWEST = 1000
_NEWEST_STEP = 100
_BEST = 25
_OWN = ("OUTPUT", "MODEL.RESUME", "EVAL", "NGPUS")  # a sweep's own, which no key may be

Point = dict[str, str]  # a word for each key, as after -o


class Distribution(NamedTuple):
    """What a key's values are drawn from: words, or an interval."""

    choices: list[str]
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def at(self, share: float) -> str:
        """Returns the value at a share, 0 <= share < 1, of what there is to choose from."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = low + share * (high - low)
        return word(math.exp(value) if self.log else value)

    def edges(self) -> list[str]:
        """Returns the values that a check has to try."""
        return self.choices or [word(self.low), word(self.high)]

    def holds(self, text: Any) -> bool:
        """Returns whether a text is a word that may be drawn."""
        if self.choices or type(text) is not str:
            return text in self.choices
        try:
            number = float(text)
        except ValueError:
            return False
        # Its four digits may have led it out of the interval.
        slack = 1e-3 * max(abs(self.low), abs(self.high))
        return word(number) == text and self.low - slack <= number <= self.high + slack

    def value(self, word: str) -> str | float:
        """Returns what Optuna takes for a word: of an interval, the number, which rounding may have
        led out of it.
        """
        return word if self.choices else min(max(float(word), self.low), self.high)


class Sweep(NamedTuple):
    """A sweep's file, read.

    Attributes:
        program: of PROGRAMS.
        words: its flags, as all runs have them.
        metric: of the best evaluation of a run; "": what its BEST_METRIC means.
        processes: of a run; its GPUs.
    """

    program: str
    words: list[str]
    keys: dict[str, Distribution]
    method: str
    runs: int
    seed: int
    seeds: list[int]
    metric: str
    side_by_side: int | None
    processes: int
    output: Path

    def names(self, index: int) -> dict[str, int | None]:
        """Returns the runs of a point by name, with their SEED; None: the configuration's."""
        return (
            {f"{index:04}_seed{seed}": seed for seed in self.seeds}
            if self.seeds
            else {f"{index:04}": None}
        )

    def arguments(self, name: str, point: Point, seed: int | None) -> list[str]:
        """Returns the flags of a run, which goes on where it was killed."""
        values = [f"{key}={value}" for key, value in point.items()] + (
            [] if seed is None else [f"SEED={seed}"]
        )
        several = [f"-ngpus={self.processes}"] if self.program == "main_multi_gpu.py" else []
        return [
            *self.words,
            *several,
            f"-output={self.output / name}",
            "-resume=auto",
            "-o",
            *values,
        ]

    def command(self, name: str, point: Point, seed: int | None) -> list[str]:
        """Returns the words of a run's command."""
        return [sys.executable, str(ROOT / self.program), *self.arguments(name, point, seed)]


def word(value: Any) -> str:
    """Returns a value as a word after -o; of a float, four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_sweep(file: Path) -> Sweep:
    """Returns what the file says.

    Raises:
        InputError: it can't be read; a key or a value isn't one of a sweep.
    """
    content = read_yaml(file)
    known = {
        "command": str, "keys": dict, "method": str, "runs": int, "seed": int, "seeds": list, "metric": str,
        "side_by_side": int, "devices": int, "output": str,
    }  # fmt: skip
    for key, value in content.items():
        refuse_other(f"{file}: a key", key, known)
        if type(value) is not known[key]:
            raise InputError(f"{file}: {key} is {quoted(value)}, expected {known[key].__name__}")
    for key in ("command", "keys"):
        if not content.get(key):
            raise InputError(f"{file} has no {key}; docs/own_data.md shows a sweep's file")
    words = _words(file, content["command"])
    method = content.get("method", "grid")
    refuse_other(f"{file}: method", method, METHODS)
    keys = {
        key: _drawn_value(f"{file}: {key}", key, values) for key, values in content["keys"].items()
    }
    if method == "grid" and (drawn := [key for key, values in keys.items() if not values.choices]):
        raise InputError(
            f"{file}: {drawn[0]} is an interval, but method grid needs values; list them"
        )
    if method == "grid" and (
        twice := [key for key, own in keys.items() if len(set(own.choices)) < len(own.choices)]
    ):
        raise InputError(
            f"{file}: {twice[0]} has a value twice, and a grid would repeat its runs; leave one out"
        )
    if ("runs" in content) == (method == "grid"):
        raise InputError(
            f"{file}: "
            + (
                "a grid has a run for each point; leave runs out"
                if method == "grid"
                else "runs is missing"
            )
        )
    number = (
        math.prod(len(values.choices) for values in keys.values())
        if method == "grid"
        else content["runs"]
    )
    seeds = content.get("seeds", [])
    if (
        not all(type(seed) is int and seed >= 0 for seed in seeds)
        or len(set(seeds)) < len(seeds)
        or (seeds and "SEED" in keys)
    ):
        raise InputError(
            f"{file}: seeds is {quoted(seeds)}, expected whole numbers from 0, each once, and no key SEED"
        )
    counts = {"runs": number * max(1, len(seeds)), "devices": content.get("devices", 1)}
    for name, count in (counts | {"side_by_side": content.get("side_by_side", 1)}).items():
        if not 1 <= count <= MOST:
            raise InputError(f"{file}: {name} is {count}, expected 1 to {MOST}")
    if counts["devices"] > 1 and words[0] == PROGRAMS[0]:
        raise InputError(
            f"{file}: devices is {counts['devices']}, but {PROGRAMS[0]} takes one; take {PROGRAMS[1]}"
        )
    if method == "optuna" and not importlib.util.find_spec("optuna"):
        raise InputError(
            f"{file}: method optuna needs optuna, which isn't installed; {install('sweep')}"
        )
    return Sweep(
        words[0], words[1:], keys, method, number, content.get("seed", 0), seeds, content.get("metric", ""),
        content.get("side_by_side"), counts["devices"], Path(content.get("output") or Path("output") / file.stem),
    )  # fmt: skip


def _words(file: Path, command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:  # a quote without its end
        raise InputError(f"{file}: command can't be read ({error})") from None
    words = words[1:] if words[:1] == ["python"] else words
    if not words or words[0] not in PROGRAMS:
        raise InputError(
            f"{file}: command begins with {quoted(words[0] if words else '')}, expected {' or '.join(PROGRAMS)}"
        )
    own = {"output", "resume", "eval", "explain", "last_epoch", "ngpus", "h", "help"}
    for given in words[1:]:
        name = given.partition("=")[0]
        if name in _OWN or (name.startswith("-") and name.lstrip("-").replace("-", "_") in own):
            raise InputError(
                f"{file}: command has {given}, which the sweep gives or has no use for; leave it out"
            )
    return words


def _drawn_value(where: str, key: str, values: Any) -> Distribution:
    if key in _OWN:
        raise InputError(f"{where} is the sweep's own; leave it out")
    kind, values = (
        next(iter(values.items()))
        if isinstance(values, dict) and len(values) == 1
        else ("choice", values)
    )
    refuse_other(f"{where} from", kind, _DRAWN)
    if (
        not isinstance(values, list)
        or not values
        or any(isinstance(value, dict) for value in values)
    ):
        raise InputError(
            f"{where} is {quoted(values)}, expected a list of values, or one of {', '.join(_DRAWN)} with one"
        )
    if kind == "choice":
        return Distribution([str(value) for value in values])
    low, high = ends = [parse_value(str(value)) for value in values] if len(values) == 2 else [0, 0]
    if (
        not all(type(end) in (int, float) for end in ends)
        or not low < high
        or (kind == "log_uniform" and low <= 0)
    ):
        expected = "two numbers, the lower one first" + ", above 0" * (kind == "log_uniform")
        raise InputError(f"{where} is {quoted(values)}, expected {expected}")
    return Distribution([], float(low), float(high), kind == "log_uniform")


# ------------------------------------------------------------------- points


def plan_points(sweep: Sweep) -> list[Point]:
    """Returns a grid's or a random sweep's points: the first ones are the same for any number of
    them.
    """
    if sweep.method == "grid":
        values = [drawn.choices for drawn in sweep.keys.values()]
        return [dict(zip(sweep.keys, chosen, strict=True)) for chosen in itertools.product(*values)]
    draws = (random.Random(f"{sweep.seed} {index}") for index in range(sweep.runs))
    return [{key: drawn.at(draw.random()) for key, drawn in sweep.keys.items()} for draw in draws]


class Suggestions:
    """Optuna's points of a sweep, each a function of the ones before it and of what they gave.

    Its sampler looks at every trial that it knows, for each suggestion. It knows the newest
    ``_NEWEST`` points, up to ``_NEWEST_STEP`` more, and the best of the others: a suggestion takes
    as long late in a sweep as early.
    """

    def __init__(self, sweep: Sweep) -> None:
        import optuna  # pyright: ignore[reportMissingImports]: an extra

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna: Any = optuna
        self.sweep = sweep
        self.space: dict[str, Any] = {
            key: optuna.distributions.CategoricalDistribution(list(dict.fromkeys(drawn.choices)))
            if drawn.choices
            else optuna.distributions.FloatDistribution(drawn.low, drawn.high, log=drawn.log)
            for key, drawn in sweep.keys.items()
        }
        self.study: Any = None
        # The points that the study knows are those from ``first`` up to ``told``, and the best ones
        # before.
        self.first = self.told = 0

    def next(
        self, points: Sequence[Point], scores: Sequence[float | None], count: int
    ) -> list[Point]:
        """Returns the next ``count`` points after ``points``, whose ``scores`` are better the
        higher; None: failed.

        A sampler's draws depend on the point's number alone, so a sweep that was killed goes on
        with the same ones.
        """
        first = max(0, len(points) - _NEWEST) // _NEWEST_STEP * _NEWEST_STEP
        if self.study is None or first != self.first:
            self.study = self.optuna.create_study(direction="maximize")
            done = [
                (score, index) for index, score in enumerate(scores[:first]) if score is not None
            ]
            best = sorted(index for _, index in heapq.nlargest(_BEST, done))
            self._tell(points, scores, best)
            self.first = self.told = first
        self._tell(points, scores, range(self.told, len(points)))
        self.told = len(points)
        asked = []
        for index in range(len(points), len(points) + count):
            draw = int.from_bytes(random.Random(f"{self.sweep.seed} {index}").randbytes(4), "big")
            # The liar counts those that run beside it.
            self.study.sampler = self.optuna.samplers.TPESampler(seed=draw, constant_liar=True)
            asked.append(self.study.ask(self.space))
        for trial in asked:
            # What they give is told with their words, whose digits are fewer.
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        return [{key: word(value) for key, value in trial.params.items()} for trial in asked]

    def _tell(
        self, points: Sequence[Point], scores: Sequence[float | None], indexes: Iterable[int]
    ) -> None:
        for index in indexes:
            if scores[index] is not None:
                told = {
                    key: self.sweep.keys[key].value(word) for key, word in points[index].items()
                }
                trial = self.optuna.create_trial(
                    params=told, distributions=self.space, value=scores[index]
                )
                self.study.add_trial(trial)


def edges(sweep: Sweep) -> list[Point]:
    """Returns points that have each value which a check has to try: each key's in turn, the others
    at their first.
    """
    first = {key: drawn.edges()[0] for key, drawn in sweep.keys.items()}
    return [first | {key: value} for key, drawn in sweep.keys.items() for value in drawn.edges()]


def check(
    sweep: Sweep,
    points: Sequence[Point],
    tell: Callable[[], Any] = int,
    read: dict[Any, FromFile] | None = None,
) -> str:
    """Returns the sweep's metric: of every point; all configurations are read as a run's start
    reads them.

    Args:
        tell: is called after each of the points.
        read: as ``asked_config``'s: the command's file is read once for all calls.

    Raises:
        InputError: one can't be meant, or has no such metric; the line names the point.
    """
    metric = sweep.metric
    seeds = sweep.seeds or [None]
    read = {} if read is None else read
    for point, seed in [
        *((point, seeds[0]) for point in points),
        *((points[0], seed) for seed in seeds[1:]),
    ]:
        try:
            config = config_from_arguments(
                sweep.program, sweep.arguments("0", point, seed), read=read
            )
            metric = metric or _own_metric(config)
            _check_measured(metric, config)
        except InputError as error:
            shown = " ".join(f"{key}={value}" for key, value in point.items())
            raise InputError(f"the run of {shown}: {error}") from None
        tell()
    return metric


def _metrics(config: Configuration) -> list[str]:
    return [*registry.tasks.components[config.TASK].given.get("metrics", "loss").split(), "loss"]


def _own_metric(config: Configuration) -> str:
    return _metrics(config)[0] if config.BEST_METRIC == "auto" else config.BEST_METRIC


def _check_measured(metric: str, config: Configuration) -> None:
    refuse_other("metric", metric.removeprefix("ema/"), _metrics(config))
    if metric.startswith("ema/") and not config.TRAIN.MODEL_EMA:
        raise InputError(
            f"metric is {metric}, but TRAIN.MODEL_EMA is False; set it True, or leave out ema/"
        )
