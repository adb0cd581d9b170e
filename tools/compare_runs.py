"""Compares runs: their metrics, their settings, and whether the difference is significant.

    python tools/compare_runs.py RUN OTHER -output compared.html
    python tools/compare_runs.py RUN

RUN and OTHER are folders of finished runs, trainings or evaluations. There may be more of them: the
first is compared with each of the others. Runs that differ only in SEED count as one. If both sides
have several seeds, their means are compared by Welch's t-test. Otherwise the predictions on the same
images are compared by McNemar's exact test; for k-fold runs, the predictions of all folds. For
segmentation, the mIoU of the images is compared by Wilcoxon's signed-rank test.

-output writes a self-contained page with the curves of all runs. With only one RUN, its report.html,
confusion.csv and confusion.png are written again.

Exit status: 0; 2 if a folder isn't a run's, or a file in it has content that no run writes.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import (  # noqa: E402  (first: it says what isn't installed)
    InputError,
    RunError,
    printable,
    remedy,
    reporting,
)

# isort: split
from settings.parser import Parser  # noqa: E402


def write_report_again(folder: Path) -> Path:
    """Writes the report of a finished run; returns the page's path.

    If the data can't be read, the page has no pictures of mistakes.

    Raises:
        InputError: the folder isn't that of a finished run.
        OSError: the report can't be written.
    """
    from config import get_config, with_values
    from datasets import get_dataset
    from training.report import write_report
    from training.report.run_files import read_run

    # If this isn't a run, its error says more than that of a missing config.yaml.
    read_run(folder)
    try:
        # Only the run's own folder is written to, so no cache of images.
        config = with_values(get_config(folder / "config.yaml"), "this command", DATA__CACHE=None)
        dataset = get_dataset(config, "val")
    except RunError as error:
        print(f"the pictures of the mistakes are missing: {error}", file=sys.stderr)
        dataset = None
    return write_report(folder, dataset)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "-output", "--output", type=Path, metavar="FILE.html", help="a page, with curves"
    )
    options = parser.parse_args()
    output = options.output
    if output and len(options.runs) == 1:
        raise InputError(
            "-output needs several runs to compare; for a single run, its own report.html is written"
        )
    if output and (output.suffix.lower() not in (".html", ".htm") or not output.parent.is_dir()):
        raise InputError(
            f"-output {output}: expected a file that ends in .html, in an existing folder"
        )
    try:
        if len(options.runs) == 1:
            print(f"{write_report_again(options.runs[0])} is written")
            return
        from training.report.compare import compare, page_of, screen
        from utils import writing_whole

        comparison = compare(options.runs)
        print("\n".join(printable(line, len(line)) for line in screen(comparison).split("\n")))
        if output:
            with writing_whole(output) as file:
                file.write(page_of(comparison))
            print(f"{output} is written")
    except OSError as error:
        raise RunError(
            f"{error.filename} can't be written ({error.strerror}); {remedy(error)}"
        ) from None


if __name__ == "__main__":
    with reporting():
        main()
