"""Measures a model's errors on corrupted images, as ImageNet-C does (arXiv:1903.12261).

    python tools/robustness.py -output=DIR -pretrained=RUN/checkpoints/best [-corruptions=LIST -severities=LIST]

All other flags, and -o, are those of main_multi_gpu.py. Each of 15 corruptions at each of five severities
is an evaluation, in DIR/<corruption>-<severity>. DIR/clean is an evaluation without corruption. The
same command resumes: finished evaluations aren't repeated. -published=FOLDER evaluates the images
of FOLDER/<corruption>/<severity>/<class>/, as ImageNet-C is published, and corrupts nothing itself.

DIR/robustness.json and the printed table contain the errors and their means. For ImageNet's 1,000
classes, they also contain mCE and relative mCE, which divide by AlexNet's errors.
"""

import argparse
import contextlib
import functools
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, install, reading, remedy, reporting  # noqa: E402
from launch import signals  # noqa: E402
from launch.files import refuse_links, removing_if_stopped, writing_whole  # noqa: E402
from settings.corruptions import BENCHMARK, CORRUPTIONS, SEVERITIES  # noqa: E402
from settings.parser import Parser  # noqa: E402
from settings.plain import (  # noqa: E402
    Rule,
    check_form,
    is_real,
    is_whole,
    parsed_json,
    value_text,
    whole_file,
)
from training.results import MOST_CLASSES, read_result  # noqa: E402

CLEAN = "clean"
_FILE = "robustness.json"
# The most bytes of that file.
_LONGEST = 1 << 20
_REPEAT = "; remove it to repeat the evaluation"
_DICTIONARY = Rule("a dictionary", lambda value: type(value) is dict)
_WRITTEN = {"asked": _DICTIONARY}
_RESULT = {
    "acc1": Rule("a percentage", lambda value: is_real(value, 0, 100)),
    "config": _DICTIONARY,
}
_MODEL = {
    "NUM_CLASSES": Rule("a number of classes", lambda value: is_whole(value, 1, MOST_CLASSES))
}
# All published images are evaluated, uncropped.
_PUBLISHED = ("DATA.CROP_PCT", "1.0", "DATA.VAL_SPLIT", "null", "DATA.FOLDS", "null")
# Keys that don't change a result, and so may differ when the command is repeated.
_FREE = ("OUTPUT", "NGPUS", "DATA.NUM_WORKERS", "DATA.PREFETCH")


def arguments_of(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns this command's own flags, and those of the evaluations.

    Raises:
        InputError: there is no such corruption or severity.
    """
    parser = Parser(__doc__, passes_on=True)
    listed = functools.partial(
        parser.add_argument, type=lambda text: text.split(","), metavar="LIST"
    )
    listed(
        "-corruptions",
        "--corruptions",
        default=[*BENCHMARK],
        help="names of corruptions, separated by commas; default: the 15 of the benchmark",
    )
    listed(
        "-severities",
        "--severities",
        default=[*map(str, SEVERITIES)],
        help="severities from 1 to 5; default: 1,2,3,4,5",
    )
    parser.add_argument("-published", "--published", metavar="FOLDER", help="ImageNet-C's images")
    arguments, rest = parser.parse_known_args(words)
    for flag, known in (("corruptions", CORRUPTIONS), ("severities", [*map(str, SEVERITIES)])):
        if others := [name for name in getattr(arguments, flag) if name not in known]:
            raise InputError(f"-{flag} has '{others[0]}', expected any of {','.join(known)}")
    return arguments, rest


def cells(arguments: argparse.Namespace) -> Iterator[tuple[str, int, list[str]]]:
    """Yields (corruption, severity, flags of its evaluation), the clean one first."""
    yield CLEAN, 0, []
    for name, severity in itertools.product(arguments.corruptions, arguments.severities):
        if arguments.published:
            where = Path(arguments.published) / name / severity
            yield name, int(severity), ["-dataset=folder", f"-data_path={where}", "-o", *_PUBLISHED]
        else:
            yield name, int(severity), ["-o", "DATA.CORRUPTION", name, "DATA.SEVERITY", severity]


def evaluation_result(folder: Path, flags: list[str]) -> dict:
    """Returns the result of the evaluation in ``folder``. If there is none, the evaluation is run.

    Raises:
        SystemExit: the evaluation failed, and printed why.
    """
    if not (folder / "result.json").exists():
        command = [
            sys.executable,
            str(ROOT / "main_multi_gpu.py"),
            *flags,
            "-eval",
            f"-output={folder}",
        ]
        end_with_this = functools.partial(signals.die_with_parent, signal.SIGTERM)
        with (
            removing_if_stopped(None if folder.exists() else folder),
            subprocess.Popen(
                command, stdout=subprocess.DEVNULL, preexec_fn=end_with_this
            ) as process,
        ):
            status = process.wait()
        if status:
            raise SystemExit(status if status > 0 else 128 - status)
    result = read_result(folder, _REPEAT)
    with reading(folder / "result.json", "a run's result", _REPEAT):
        check_form(result, _RESULT, tuple(_RESULT))
        check_form(result["config"].get("MODEL"), _MODEL, tuple(_MODEL), "config.MODEL.")
    return result


def clean_config(arguments: argparse.Namespace, rest: list[str]) -> Any:
    """Returns the configuration of the clean evaluation.

    All evaluations are checked before the first one starts.

    Raises:
        InputError: an evaluation would be refused.
    """
    from training.command_line import config_from_arguments

    config = config_from_arguments("tools/robustness.py", [*rest, "-eval"], vars(arguments))
    if not config.OUTPUT:
        raise InputError("-output is missing; pass -output=DIR")
    if config.DATA.CORRUPTION:
        raise InputError("DATA.CORRUPTION has no effect here; leave it out, and use -corruptions")
    if config.TASK != "classification":
        raise InputError(f"TASK is {config.TASK}, expected classification")
    if not (arguments.published or find_spec("imagecorruptions")):
        raise InputError(f"corruptions need imagecorruptions-imaug; {install('robustness')}")
    for _, _, flags in itertools.islice(cells(arguments), 1, None):
        evaluation = config_from_arguments("tools/robustness.py", [*rest, "-eval", *flags])
        path = evaluation.DATA.DATA_PATH
        if arguments.published and not Path(path).is_dir():
            raise InputError(
                f"-published: there is no folder {path}; expected <corruption>/<severity>/<class>/"
            )
    return config


def main() -> None:
    arguments, rest = arguments_of(sys.argv[1:])
    config = clean_config(arguments, rest)
    from settings.configuration import leaves
    from training.robustness import format_table, summarize

    output = Path(config.OUTPUT)
    errors = {}
    classes = 0
    values = {key: value for key, value in leaves(config) if key not in _FREE}
    values["published"] = arguments.published
    if (output / _FILE).exists():
        with reading(output / _FILE, "a result of this command", "; choose another -output"):
            record = parsed_json(whole_file(output / _FILE, _LONGEST))
            check_form(record, _WRITTEN, tuple(_WRITTEN))
            before = record["asked"]
        for key, value in values.items():
            if before.get(key) != value:
                difference = f"of {key} {value_text(before.get(key))}, not {value}"
                raise InputError(f"{output} has evaluations {difference}; choose another -output")
    is_new = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    try:
        names = [
            f"{name}-{severity}" if severity else name for name, severity, _ in cells(arguments)
        ]
        refuse_links(output, "|".join(map(re.escape, [_FILE, *names])))
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}; {remedy(error)}, or choose another -output"
        ) from None

    def write(means: dict) -> None:
        with writing_whole(output / _FILE) as file:
            file.write(json.dumps({"asked": values, "errors": errors, **means}, indent=2) + "\n")

    write({})
    clean = 0.0
    for name, severity, flags in cells(arguments):
        folder = output / (f"{name}-{severity}" if severity else name)
        # If the tool is stopped before the first result, it removes the folder that it made.
        new_folder = output if is_new and name == CLEAN else None
        try:
            with removing_if_stopped(new_folder):
                result = evaluation_result(folder, [*rest, *flags])
        except SystemExit:
            # If there is no result, nothing is left behind.
            if not any(output.glob("*/result.json")):
                (output / _FILE).unlink()
                with contextlib.suppress(OSError):
                    output.rmdir()
            raise
        error = 100 - result["acc1"]
        classes = result["config"]["MODEL"]["NUM_CLASSES"]
        title = f"{name} {severity}" if severity else name
        print(f"{title}: error {error:.2f}, samples {result['num_samples']}", flush=True)
        if severity:
            errors.setdefault(name, {})[severity] = error
        else:
            clean = error
    means = summarize(errors, clean, classes)
    write(means)
    print(format_table(errors, means))


if __name__ == "__main__":
    with reporting():
        main()
