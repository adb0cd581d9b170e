"""Compares runs: their figures, their settings, and whether they differ by more than chance.

    python tools/compare_runs.py RUN OTHER -output compared.html
    python tools/compare_runs.py RUN

RUN and OTHER are folders of runs that are over, trainings or evaluations; there may be more. The
first one is compared with each of the others. Runs that differ in SEED alone are one: where both
sides have several, their means are compared by Welch's t-test. Otherwise the answers to the same
images are, by McNemar's exact test; of a k-fold, those of all its folds. -output writes a page that
needs no network, with the curves of all runs over each other. Of one RUN alone, its report.html,
confusion.csv and confusion.png are made anew.

Exit status: 0; 2 where a folder isn't a run's, or a file in it says something that no run writes.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import (  # noqa: E402  (first: it says what isn't installed)
    InputError,
    RunError,
    printable,
    remedy,
    reporting,
)

# isort: split
from settings.options import Parser  # noqa: E402


def write_report_again(folder: Path) -> Path:
    """Writes the report of a run that is over; without pictures of mistakes where the data can't be
    read.

    Raises:
        InputError: the folder isn't one of a run that is over.
        OSError: it can't be written.
    """
    from config import get_config, with_values
    from datasets import get_dataset
    from training.report import write_report
    from training.report.run_files import read_run

    read_run(folder)  # whose error says more than that of a missing config.yaml
    try:
        # Looking at a run writes into its own folder alone.
        config = with_values(get_config(folder / "config.yaml"), "this command", DATA__CACHE=None)
        dataset = get_dataset(config, "val")
    except RunError as error:
        print(f"there are no pictures of the mistakes: {error}", file=sys.stderr)
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
        raise InputError("-output is for a comparison; of one run its own report.html is written")
    if output and (output.suffix.lower() not in (".html", ".htm") or not output.parent.is_dir()):
        raise InputError(
            f"-output {output}: expected a file that ends in .html, in a folder that is there"
        )
    try:
        if len(options.runs) == 1:
            print(f"{write_report_again(options.runs[0])} is written")
            return
        from training.report.compare import compare, page_of, screen
        from utils import writing_whole

        found = compare(options.runs)
        print("\n".join(printable(line, len(line)) for line in screen(found).split("\n")))
        if output:
            with writing_whole(output) as file:
                file.write(page_of(found))
            print(f"{output} is written")
    except OSError as error:
        raise RunError(
            f"{error.filename} isn't written ({error.strerror}); {remedy(error)}"
        ) from None


if __name__ == "__main__":
    with reporting():
        main()
