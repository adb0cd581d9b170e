"""The file of a sweep, and the points of its runs.

A sweep's file is YAML::

    command: main_single_gpu.py -cfg=vit_digits -o TRAIN.NUM_EPOCHS 20
    keys:
      TRAIN.BASE_LR: [3e-4, 1e-3, 3e-3]        # or {log_uniform: [1e-4, 1e-2]}
      TRAIN.WEIGHT_DECAY: {uniform: [0.0, 0.2]}
    method: random

A point is a value for each key. The points of a grid or a random sweep depend on the file alone, so
a sweep that was killed continues with the same ones. Optuna's points also depend on the results of
earlier runs. So they are written to the sweep's folder before their runs start.
"""

import heapq
import importlib.util
import itertools
import math
import random
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import FromFile
from errors import InputError, install
from settings import registry
from settings.configuration import Configuration
from settings.documents import read_yaml
from settings.registry import ROOT, refuse_other
from settings.tasks import dataset_columns, loss_is_relative
from settings.values import parse_value, quoted
from training.command_line import config_from_arguments

PROGRAMS = ("main_single_gpu.py", "main_multi_gpu.py")
METHODS = ("grid", "random", "optuna")
_DISTRIBUTIONS = ("choice", "uniform", "log_uniform")
# Runs of a sweep.
MOST = 10_000
# Metrics that only an evaluation with a probe has.
PROBED = ("knn", "rankme")
# Optuna's sampler knows so many of the newest points, and of the best among the others.
_NEWEST = 1000
_NEWEST_STEP = 100
_BEST = 25
# Keys that the sweep sets for each run, so that its file can't.
_RESERVED = ("OUTPUT", "MODEL.RESUME", "EVAL", "NGPUS")
# Flags that the sweep sets for each run, or that a run of a sweep can't have.
_RESERVED_FLAGS = ("output", "resume", "eval", "explain", "last_epoch", "ngpus", "h", "help")

# The value of each key as text, as it is written after -o.
Point = dict[str, str]


class Distribution(NamedTuple):
    """The values that a key may take: a list of words, or an interval if there are none.

    Attributes:
        choices: words; empty for an interval.
        low, high: bounds of the interval.
        log: whether logarithms are distributed uniformly.
    """

    choices: list[str]
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def at(self, share: float) -> str:
        """Returns the value at a share of the choices or the interval, 0 <= share < 1."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        if self.log:
            low = math.log(self.low)
            high = math.log(self.high)
            return word(math.exp(low + share * (high - low)))
        return word(self.low + share * (self.high - self.low))

    def edges(self) -> list[str]:
        """Returns the values to check before the sweep starts: all choices, or both bounds."""
        return self.choices or [word(self.low), word(self.high)]

    def holds(self, text: Any) -> bool:
        """Returns whether a value is a word that ``at`` may return."""
        if self.choices or type(text) is not str:
            return text in self.choices
        try:
            number = float(text)
        except ValueError:
            return False
        # Rounding to four digits may have moved it out of the interval.
        slack = 1e-3 * max(abs(self.low), abs(self.high))
        return word(number) == text and self.low - slack <= number <= self.high + slack

    def value(self, word: str) -> str | float:
        """Returns the value of a word for Optuna: the word, or the number of an interval."""
        if self.choices:
            return word
        # Rounding to four digits may have moved it out of the interval.
        return min(max(float(word), self.low), self.high)


class Sweep(NamedTuple):
    """The content of a sweep's file.

    Attributes:
        program: one of PROGRAMS.
        words: the command's arguments, which all runs have.
        keys: the keys that differ between runs.
        method: one of METHODS.
        runs: number of points.
        seed: of random and Optuna's points.
        seeds: each point has a run for each of them; empty: one run with the configuration's SEED.
        metric: by which runs are compared, of a run's best evaluation; "": its BEST_METRIC.
        side_by_side: number of runs at the same time; None: it isn't given.
        processes: number of processes, and GPUs, of a run.
        output: the sweep's folder.
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
        """Returns the names of a point's runs with their SEED, or None for the configuration's."""
        if self.seeds:
            return {f"{index:04}_seed{seed}": seed for seed in self.seeds}
        return {f"{index:04}": None}

    def arguments(self, name: str, point: Point, seed: int | None) -> list[str]:
        """Returns the arguments of a run, which continues if it was killed before."""
        arguments = list(self.words)
        if self.program == "main_multi_gpu.py":
            arguments.append(f"-ngpus={self.processes}")
        arguments += [f"-output={self.output / name}", "-resume=auto", "-o"]
        arguments += [f"{key}={value}" for key, value in point.items()]
        if seed is not None:
            arguments.append(f"SEED={seed}")
        return arguments

    def command(self, name: str, point: Point, seed: int | None) -> list[str]:
        """Returns a run's command."""
        return [sys.executable, str(ROOT / self.program), *self.arguments(name, point, seed)]


def word(value: Any) -> str:
    """Returns a value as text after -o; a float is rounded to four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_sweep(file: Path) -> Sweep:
    """Reads a sweep's file.

    Raises:
        InputError: the file can't be read, or a key or value isn't valid for a sweep.
    """
    content = read_yaml(file)
    kinds = {
        "command": str,
        "keys": dict,
        "method": str,
        "runs": int,
        "seed": int,
        "seeds": list,
        "metric": str,
        "side_by_side": int,
        "devices": int,
        "output": str,
    }
    for key, value in content.items():
        refuse_other(f"{file}: a key", key, kinds)
        if type(value) is not kinds[key]:
            raise InputError(f"{file}: {key} is {quoted(value)}, expected {kinds[key].__name__}")
    for key in ("command", "keys"):
        if not content.get(key):
            raise InputError(
                f"{file} has no {key}; docs/guides/sweep.md describes the file of a sweep"
            )
    program, *words = _command_words(file, content["command"])
    method = content.get("method", "grid")
    refuse_other(f"{file}: method", method, METHODS)
    keys = {
        key: _distribution(f"{file}: {key}", key, values) for key, values in content["keys"].items()
    }
    if method == "grid":
        _check_grid(file, keys)
        if "runs" in content:
            raise InputError(f"{file}: a grid runs each point once; leave runs out")
        points = math.prod(len(distribution.choices) for distribution in keys.values())
    else:
        if "runs" not in content:
            raise InputError(f"{file}: runs is missing")
        points = content["runs"]
    seeds = content.get("seeds", [])
    _check_seeds(file, seeds, keys)
    processes = content.get("devices", 1)
    counts = {
        "runs": points * max(1, len(seeds)),
        "devices": processes,
        "side_by_side": content.get("side_by_side", 1),
    }
    for name, count in counts.items():
        if not 1 <= count <= MOST:
            raise InputError(f"{file}: {name} is {count}, expected 1 to {MOST}")
    if processes > 1 and program == PROGRAMS[0]:
        raise InputError(
            f"{file}: devices is {processes}, but {PROGRAMS[0]} uses one; use {PROGRAMS[1]}"
        )
    if method == "optuna" and not importlib.util.find_spec("optuna"):
        raise InputError(
            f"{file}: method optuna needs optuna, which isn't installed; {install('sweep')}"
        )
    return Sweep(
        program=program,
        words=words,
        keys=keys,
        method=method,
        runs=points,
        seed=content.get("seed", 0),
        seeds=seeds,
        metric=content.get("metric", ""),
        side_by_side=content.get("side_by_side"),
        processes=processes,
        output=Path(content.get("output") or Path("output") / file.stem),
    )


def _check_grid(file: Path, keys: Mapping[str, Distribution]) -> None:
    """Raises InputError unless each key has a list of different values."""
    for key, distribution in keys.items():
        if not distribution.choices:
            raise InputError(
                f"{file}: {key} is an interval, but method grid needs a list of values"
            )
    for key, distribution in keys.items():
        if len(set(distribution.choices)) < len(distribution.choices):
            raise InputError(
                f"{file}: {key} has a value twice, so the grid would repeat runs; remove one"
            )


def _check_seeds(file: Path, seeds: list[Any], keys: Mapping[str, Distribution]) -> None:
    """Raises InputError unless seeds are different whole numbers, and SEED isn't a key besides."""
    whole = all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or len(set(seeds)) < len(seeds) or (seeds and "SEED" in keys):
        raise InputError(
            f"{file}: seeds is {quoted(seeds)}, expected different whole numbers from 0 on, and no"
            " key SEED"
        )


def _command_words(file: Path, command: str) -> list[str]:
    """Returns the words of a sweep's command, of which the first is one of PROGRAMS."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        # A quote isn't closed.
        raise InputError(f"{file}: command can't be parsed ({error})") from None
    if words[:1] == ["python"]:
        words = words[1:]
    if not words or words[0] not in PROGRAMS:
        first = words[0] if words else ""
        raise InputError(
            f"{file}: command begins with {quoted(first)}, expected {' or '.join(PROGRAMS)}"
        )
    for argument in words[1:]:
        name = argument.partition("=")[0]
        flag = name.lstrip("-").replace("-", "_") if name.startswith("-") else ""
        if name in _RESERVED or flag in _RESERVED_FLAGS:
            raise InputError(
                f"{file}: command has {argument}, which the sweep sets itself or doesn't support;"
                " leave it out"
            )
    return words


def _distribution(where: str, key: str, values: Any) -> Distribution:
    """Returns the distribution of a key from its values in the file.

    Args:
        where: names the file and the key in errors.
    """
    if key in _RESERVED:
        raise InputError(f"{where} is set by the sweep; leave it out")
    kind = "choice"
    if isinstance(values, dict) and len(values) == 1:
        [(kind, values)] = values.items()
    refuse_other(f"{where} from", kind, _DISTRIBUTIONS)
    is_filled_list = isinstance(values, list) and bool(values)
    if not is_filled_list or any(isinstance(value, dict) for value in values):
        raise InputError(
            f"{where} is {quoted(values)}, expected a list of values, or one of"
            f" {', '.join(_DISTRIBUTIONS)} with one"
        )
    if kind == "choice":
        return Distribution([str(value) for value in values])
    log = kind == "log_uniform"
    bounds = [parse_value(str(value)) for value in values] if len(values) == 2 else []
    are_numbers = len(bounds) == 2 and all(type(bound) in (int, float) for bound in bounds)
    if not are_numbers or not bounds[0] < bounds[1] or (log and bounds[0] <= 0):
        expected = "two numbers, the lower one first"
        if log:
            expected += ", above 0"
        raise InputError(f"{where} is {quoted(values)}, expected {expected}")
    return Distribution([], float(bounds[0]), float(bounds[1]), log)


# ------------------------------------------------------------------- points


def plan_points(sweep: Sweep) -> list[Point]:
    """Returns the points of a grid or a random sweep.

    A random sweep of more runs begins with the same points.
    """
    if sweep.method == "grid":
        choices = [distribution.choices for distribution in sweep.keys.values()]
        return [
            dict(zip(sweep.keys, values, strict=True)) for values in itertools.product(*choices)
        ]
    points = []
    for index in range(sweep.runs):
        generator = random.Random(f"{sweep.seed} {index}")
        points.append(
            {key: distribution.at(generator.random()) for key, distribution in sweep.keys.items()}
        )
    return points


class Suggestions:
    """The points of a sweep that Optuna suggests.

    A point is a function of the points before it and of their scores.

    For each suggestion, Optuna's sampler looks at all trials that it knows. So that a suggestion
    doesn't take longer late in a sweep, it gets the newest ``_NEWEST`` points, up to
    ``_NEWEST_STEP`` more, and the ``_BEST`` best of the others.
    """

    def __init__(self, sweep: Sweep) -> None:
        import optuna  # pyright: ignore[reportMissingImports]: an extra

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna: Any = optuna
        self.sweep = sweep
        self.space: dict[str, Any] = {}
        for key, own in sweep.keys.items():
            if own.choices:
                choices = list(dict.fromkeys(own.choices))
                self.space[key] = optuna.distributions.CategoricalDistribution(choices)
            else:
                self.space[key] = optuna.distributions.FloatDistribution(
                    own.low, own.high, log=own.log
                )
        self.study: Any = None
        # The study knows the points from ``first`` up to ``end``, and the best before these.
        self.first = 0
        self.end = 0

    def next(
        self, points: Sequence[Point], scores: Sequence[float | None], count: int
    ) -> list[Point]:
        """Returns the next ``count`` points.

        The sampler's random numbers depend on a point's index alone, so that a sweep that was
        killed continues with the same points.

        Args:
            points: all points until now.
            scores: of these points, the higher the better; None: the run failed.
        """
        first = max(0, len(points) - _NEWEST) // _NEWEST_STEP * _NEWEST_STEP
        if self.study is None or first != self.first:
            self.study = self.optuna.create_study(direction="maximize")
            done = [
                (score, index) for index, score in enumerate(scores[:first]) if score is not None
            ]
            best = sorted(index for _, index in heapq.nlargest(_BEST, done))
            self._add(points, scores, best)
            self.first = first
            self.end = first
        self._add(points, scores, range(self.end, len(points)))
        self.end = len(points)
        trials = []
        for index in range(len(points), len(points) + count):
            generator = random.Random(f"{self.sweep.seed} {index}")
            seed = int.from_bytes(generator.randbytes(4), "big")
            # With a constant liar, the sampler takes the trials that run at the same time into
            # account.
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            trials.append(self.study.ask(self.space))
        for trial in trials:
            # Closed here. ``_add`` adds them again with their scores, and with the rounded values
            # that the runs had.
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        return [{key: word(value) for key, value in trial.params.items()} for trial in trials]

    def _add(
        self, points: Sequence[Point], scores: Sequence[float | None], indexes: Iterable[int]
    ) -> None:
        """Adds the points at some indexes to the study, except those without a score."""
        for index in indexes:
            if scores[index] is None:
                continue
            values = {key: self.sweep.keys[key].value(word) for key, word in points[index].items()}
            trial = self.optuna.create_trial(
                params=values, distributions=self.space, value=scores[index]
            )
            self.study.add_trial(trial)


def edges(sweep: Sweep) -> list[Point]:
    """Returns points that have each value to check once, with the first value of the other keys."""
    edges_by_key = {key: distribution.edges() for key, distribution in sweep.keys.items()}
    first = {key: values[0] for key, values in edges_by_key.items()}
    return [first | {key: value} for key, values in edges_by_key.items() for value in values]


def check(
    sweep: Sweep,
    points: Sequence[Point],
    tell: Callable[[], Any] = int,
    read: dict[Any, FromFile] | None = None,
) -> str:
    """Checks the configurations of points as the start of a run would; returns the sweep's metric.

    Args:
        tell: is called after each of the points.
        read: as for ``config_from_arguments``, so that the command's file is read once for several
            calls.

    Raises:
        InputError: a configuration isn't valid, or its task has no such metric. The line names the
            point.
    """
    metric = sweep.metric
    seeds = sweep.seeds or [None]
    read = {} if read is None else read
    runs = [(point, seeds[0]) for point in points]
    # Other seeds differ in nothing else, so one point is enough.
    runs += [(points[0], seed) for seed in seeds[1:]]
    for point, seed in runs:
        try:
            config = config_from_arguments(
                sweep.program, sweep.arguments("0", point, seed), read=read
            )
            metric = metric or _default_metric(config)
            _check_metric(metric, config)
        except InputError as error:
            shown = " ".join(f"{key}={value}" for key, value in point.items())
            raise InputError(f"the run of {shown}: {error}") from None
        tell()
    return metric


def _metrics(config: Configuration) -> list[str]:
    """Returns the metrics of a configuration's task."""
    declared = registry.tasks.components[config.TASK].given.get("metrics", "loss")
    probed = PROBED if config.PROBE.FREQ else []
    return [*declared.split(), "loss", *probed]


def _default_metric(config: Configuration) -> str:
    if config.BEST_METRIC != "auto":
        return config.BEST_METRIC
    if loss_is_relative(config.TASK):
        raise InputError(
            f"metric is missing, and a lower loss of TASK {config.TASK} doesn't mean a better"
            " model;"
            " add metric: knn (labelled images), rankme or loss; the first two need PROBE.FREQ"
        )
    return _metrics(config)[0]


def _check_metric(metric: str, config: Configuration) -> None:
    name = metric.removeprefix("ema/")
    refuse_other("metric", name, _metrics(config))
    if name in PROBED and config.PROBE.FREQ != config.VALIDATE_FREQ:
        raise InputError(
            f"PROBE.FREQ is {config.PROBE.FREQ}, expected VALIDATE_FREQ ({config.VALIDATE_FREQ}),"
            f" because metric is {metric}, and any evaluation may be the best"
        )
    dataset = config.DATA.DATASET
    if name == "knn" and not {"labels", "*"} & set(dataset_columns(dataset)):
        raise InputError(
            f"metric is {metric}, but DATA.DATASET {dataset} has no labels; use rankme"
        )
    if metric.startswith("ema/") and not config.TRAIN.MODEL_EMA:
        raise InputError(
            f"metric is {metric}, but TRAIN.MODEL_EMA is False; set it True, or leave out ema/"
        )
