"""Training speed of a configuration on this machine, tuned (TUNE_CPU) against Paddle's defaults, in one call.

    python tools/benchmark.py train -cfg=vit_small_patch16_224 -batch_size=8

Each measurement is a run of main_single_gpu.py on synthetic images, in a process of its own; the two kinds alternate,
so that a machine whose speed drifts drifts for both. The first report of each run is its warm-up and doesn't count.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 2  # per report


def measure(cfg: str, batch_size: int, reports: int, tuned: bool) -> float:
    """Returns the median images/s over ``reports`` reports of one run, after its warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "TUNE_CPU": tuned,
            "DATA.SYNTHETIC_SIZE": batch_size * STEPS * (reports + 1),
            "REPORT_FREQ": STEPS,
            "TRAIN.NUM_EPOCHS": 1,
            "TRAIN.WARMUP_EPOCHS": 0,
        }
        flags = [f"-cfg={cfg}", "-dataset=synthetic", f"-batch_size={batch_size}", f"-output={folder}/run", "-o"]
        words = [str(word) for pair in options.items() for word in pair]
        command = [sys.executable, str(ROOT / "main_single_gpu.py"), *flags, *words]
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [record["images_per_s"] for record in map(json.loads, lines) if record["split"] == "train"]
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser("tools/benchmark.py", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["train"])
    parser.add_argument("-cfg", "--cfg", default="vit_small_patch16_224", help="YAML file, or a model's name")
    parser.add_argument("-batch_size", "--batch_size", type=int, default=8)
    parser.add_argument("-repeats", "--repeats", type=int, default=3, help="runs of each kind")
    parser.add_argument("-reports", "--reports", type=int, default=3, help=f"reports of {STEPS} steps in a run")
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {"tuned": [], "default": []}
    for _ in range(arguments.repeats):
        for kind in rates:
            rates[kind].append(measure(arguments.cfg, arguments.batch_size, arguments.reports, kind == "tuned"))
    print(f"{arguments.cfg}, batch {arguments.batch_size}, one process, {os.cpu_count()} cores, {platform.machine()}")
    for kind, values in rates.items():
        print(f"{kind:8} {statistics.median(values):6.2f} images/s  (min {min(values):.2f}, max {max(values):.2f})")
    ratios = [tuned / default for tuned, default in zip(rates["tuned"], rates["default"], strict=True)]
    print(f"ratio    {statistics.median(ratios):6.2f}           (min {min(ratios):.2f}, max {max(ratios):.2f})")


if __name__ == "__main__":
    main()
