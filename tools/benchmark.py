"""Measures the speed of this machine, and compares it with other toolkits.

    python tools/benchmark.py loader [--against timm paddlevit] [-data_path FOLDER] [--workers 1]
    python tools/benchmark.py train [--against default|timm] [--processes 1] [-amp]
    python tools/benchmark.py eval [--against timm] [-amp]
    python tools/benchmark.py dino --dino FOLDER --python PATH
    python tools/benchmark.py segmentation -cfg NAME [--against transformers]
    python tools/benchmark.py zoo [-cfg NAME ...]
    python tools/benchmark.py paddlevit --paddlevit FOLDER [-cfg NAME ...]
    python tools/benchmark.py infer [-cfg NAME ...] [-batch_size 1 8] [--against timm]
    python tools/benchmark.py infer -cfg NAME -pretrained WEIGHTS -data_path FOLDER
    python tools/benchmark.py scale [--processes 1 2]
    python tools/benchmark.py startup [--processes 1 2]
    python tools/benchmark.py checkpoint [-output DIR]
    python tools/benchmark.py host [--steps 100]
    python tools/benchmark.py serve [--clients 1 8 64] [--workers 1] [--seconds 20]
    python tools/benchmark.py growth [SUBJECT ...] [-quick]

and with each: [-repeats N] [--threads N] [--json FILE]; with each but growth: [-cfg NAME]
[-batch_size N] [-o KEY VALUE ...]

Each run is a separate process with a warm-up that isn't measured. The toolkits take turns, so that
a change of the machine's speed affects all of them. A table shows the median, minimum and maximum of
the runs, and the ratios run by run. --json FILE stores all values. If torch and timm aren't installed
for this interpreter, --timm_python PATH names one that has them (tools/check_parity.py -h explains
how to install them). Everything runs on the CPU. The files in tools/benchmarks/ explain the
measurements.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import reporting  # noqa: E402
from settings.parser import Parser  # noqa: E402
from settings.registry import refuse_other  # noqa: E402
from tools.benchmarks.dino import dino  # noqa: E402
from tools.benchmarks.evaluation import evaluation  # noqa: E402
from tools.benchmarks.growth import MEASURES, growth  # noqa: E402
from tools.benchmarks.host import host  # noqa: E402
from tools.benchmarks.inference import MODELS, MODES, SIDES, infer  # noqa: E402
from tools.benchmarks.loading import loader  # noqa: E402
from tools.benchmarks.paddlevit import PADDLEVITS, paddlevit  # noqa: E402
from tools.benchmarks.saving import checkpoint  # noqa: E402
from tools.benchmarks.segmentation import segmentation  # noqa: E402
from tools.benchmarks.serving import serving  # noqa: E402
from tools.benchmarks.startup import startup  # noqa: E402
from tools.benchmarks.training import scale, train  # noqa: E402
from tools.benchmarks.zoo import ZOO, zoo  # noqa: E402

_VIT = "vit_small_patch16_224"
# For each subject, the function that measures it, and the defaults of its flags.
_SUBJECTS = {
    "loader": (loader, {"cfg": _VIT, "batch_size": 64, "repeats": 5, "threads": 1, "against": []}),
    "train": (
        train,
        {"cfg": _VIT, "batch_size": 8, "repeats": 5, "processes": 1, "against": ["default"]},
    ),
    "dino": (dino, {"cfg": _VIT, "batch_size": 4, "repeats": 5}),
    "eval": (evaluation, {"cfg": _VIT, "batch_size": 8, "repeats": 5, "against": []}),
    "segmentation": (
        segmentation,
        {"cfg": "segformer_b0_ade20k", "batch_size": 2, "repeats": 3, "against": []},
    ),
    "zoo": (
        zoo,
        {
            "cfg": ZOO,
            "batch_size": 8,
            "repeats": 3,
            "reports": 2,
            "batches": 10,
            "against": ["timm"],
        },
    ),
    "paddlevit": (paddlevit, {"cfg": PADDLEVITS, "batch_size": 8, "repeats": 3, "reports": 2}),
    "infer": (
        infer,
        {"cfg": MODELS, "batch_size": [1, 8], "repeats": 5, "threads": 2, "against": []},
    ),
    "scale": (
        scale,
        {"cfg": "vit_digits", "batch_size": None, "repeats": 5, "threads": 1, "processes": [1, 2]},
    ),
    "startup": (startup, {"cfg": _VIT, "batch_size": 8, "repeats": 5, "processes": [1, 2]}),
    "checkpoint": (checkpoint, {"cfg": "vit_base_patch16_224", "batch_size": 2, "repeats": 2}),
    "host": (host, {"cfg": _VIT, "batch_size": 2, "repeats": 5, "threads": 1}),
    "serve": (serving, {"cfg": _VIT, "batch_size": 32, "repeats": 3}),
    "growth": (growth, {"repeats": 3}),
}
_PEERS = {
    "loader": ("timm", "paddlevit"),
    "train": ("default", "timm"),
    "eval": ("timm",),
    "infer": ("timm",),
    "segmentation": ("transformers",),
    "zoo": ("timm",),
}


def main() -> None:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for what, (_, defaults) in _SUBJECTS.items():
        _add(commands.add_parser(what), what, defaults)
    arguments = parser.parse_args()
    _SUBJECTS[arguments.what][0](arguments)


def _add(command: argparse.ArgumentParser, what: str, defaults: dict) -> None:
    def flag(name: str, default: object = None, kind: type = int, **how: Any) -> None:
        command.add_argument(
            f"-{name}", f"--{name}", default=defaults.get(name, default), type=kind, **how
        )

    many: dict[str, Any] = {"nargs": "+"}
    flag("repeats", help="runs of each side")
    flag("json", kind=Path, metavar="FILE", help="where to write every value")
    if what != "growth":
        flag(
            "cfg",
            kind=str,
            help="YAML file, or a model's name",
            **(many if what in ("infer", "paddlevit", "zoo") else {}),
        )
        flag("batch_size", help="per process", **(many if what == "infer" else {}))
        flag(
            "o",
            [],
            str,
            nargs="*",
            action="extend",
            metavar="KEY VALUE",
            help="any keys, for the toolkit's side",
        )
    if what != "startup":
        cores = len(os.sched_getaffinity(0))
        flag("threads", cores, help="of each side; scale: of each process (default: %(default)s)")
    if what in _PEERS:
        # Even a single word becomes a list.
        words = "+" if what == "loader" else 1
        flag("against", kind=str, nargs=words, choices=_PEERS[what])
        flag(
            "timm_python",
            sys.executable,
            str,
            metavar="PATH",
            help="an interpreter with torch and timm, or transformers",
        )
    if "processes" in defaults:
        several: dict[str, Any] = {"nargs": "+"} if isinstance(defaults["processes"], list) else {}
        flag("processes", **several)
    if what == "loader":
        flag(
            "data_path",
            kind=str,
            metavar="FOLDER",
            help="train/<class>/*.jpg; default: tools/make_photographs.py's",
        )
        flag("workers", 1)
        flag("images", 2048, help="in each run, for each of its figures")
        flag(
            "auto_augment",
            kind=str,
            metavar="POLICY",
            help="rand-m9-mstd0.5, 3a, trivial, augmix-m3, ..., for all",
        )
        flag("color_jitter", 0.0, float, metavar="SHARE", help="TRAIN.COLOR_JITTER, for all")
        command.add_argument(
            "-evaluation", "--evaluation", action="store_true", help="an evaluation's images"
        )
    if what == "growth":
        subjects = ", ".join(MEASURES)
        command.add_argument(
            "subjects",
            nargs="*",
            type=_subject,
            metavar="SUBJECT",
            help=f"of {subjects}; none: all",
        )
        command.add_argument(
            "-quick", "--quick", action="store_true", help="small sizes, which show no exponent"
        )
    if what == "dino":
        command.add_argument(
            "-dino",
            "--dino",
            type=Path,
            required=True,
            metavar="FOLDER",
            help="a checkout of facebookresearch/dino",
        )
        flag(
            "python",
            sys.executable,
            str,
            metavar="PATH",
            help="an interpreter with torch and torchvision",
        )
    if what == "paddlevit":
        command.add_argument(
            "-paddlevit",
            "--paddlevit",
            type=Path,
            required=True,
            metavar="FOLDER",
            help="a checkout of BR-IDL/PaddleViT",
        )
    if what in ("dino", "paddlevit", "segmentation", "train", "zoo"):
        flag("reports", 3, help="of two steps each, after the warm-up")
    if what in ("eval", "zoo"):
        flag("batches", 20, help="in each run")
    if what in ("train", "eval"):
        command.add_argument(
            "-amp", "--amp", action="store_true", help="bfloat16; train: beside float32"
        )
    if what == "eval":
        flag("timm_modes", ["eager", "compile"], str, nargs="+", choices=("eager", "compile"))
    elif what == "infer":
        flag("seconds", 5.0, float, help="of each run")
        flag("pretrained", kind=str, metavar="WEIGHTS", help="trained weights, for acc1")
        flag("dataset", kind=str, help="with -pretrained: the kind of the labelled set")
        flag("data_path", kind=str, metavar="FOLDER", help="with -pretrained: the labelled set")
        flag(
            "sides",
            list(SIDES),
            str,
            nargs="+",
            choices=SIDES,
            metavar="FORMAT, PRECISION",
            help="exports to run",
        )
        flag("timm_modes", list(MODES), str, nargs="+", choices=MODES)
    elif what == "scale":
        flag("epochs", 3, help="in each run, after the first")
        flag("steps", 8, help="of the largest number of processes in an epoch of synthetic images")
    elif what == "host":
        flag("steps", 100, help="in each run, after the first ten")
    elif what == "serve":
        flag("clients", [1, 8, 64], nargs="+", help="that ask at once")
        flag("workers", 1, help="of the server, which share the threads")
        flag("seconds", 20, help="of each run")
    elif what == "checkpoint":
        flag("saves", 2, help="in each run")
        flag(
            "output",
            kind=Path,
            metavar="DIR",
            help="a folder on the disk to write to; default: the temporary one",
        )


def _subject(name: str) -> str:
    refuse_other("SUBJECT", name, MEASURES)
    return name


if __name__ == "__main__":
    with reporting():
        main()
