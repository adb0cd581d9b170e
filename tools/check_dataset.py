"""Checks whether a dataset can be trained on. Every image is decoded in full.

    python tools/check_dataset.py -dataset=folder -data_path=/data/flowers --report check.html
    python tools/check_dataset.py -dataset=folder -data_path=/data/flowers/train --split 0.2 -output lists
    python tools/check_dataset.py -dataset=folder -data_path=/data/flowers --card README.md -license cc-by-4.0
    python tools/check_dataset.py -dataset=folder -data_path=/data/flowers --apply wrong/label_errors.csv -output fixed

Errors would stop a run: images that can't be read or are too large; masks that can't be read, contain
values of no class or differ in size from their images; classes without images; labels out of range.
Remarks are problems that make results unreliable: equal or similar images in both training and
validation, or with two labels; masks that are ignored completely; classes without a pixel. The report
of masks also shows some images with their masks.

--split takes a share of each class for validation, as DATA.VAL_SPLIT does in a training. It writes
train_list.txt, val_list.txt and classes.txt for -dataset=imagenet2012, multilabel_list or masks_list.
Nothing is moved, and images that can't be read aren't listed. --groups keeps images together: a pattern of
their paths, or a file with a path, a tab and a group on each line.

--card writes a dataset card, as the Hugging Face Hub shows it: counts by class and part, sizes, formats,
duplicates and leaks. Without -license, the card says that the licence is unknown.

--apply reads the table of tools/find_label_errors.py after you have edited it. It writes the same
lists with the corrected labels and without removed images; the data itself isn't changed.

Exit status: 0 if the data can be used, with or without remarks; 1 if a run would end in an error.
With --split and --apply, the status is that of the lists. 2 for a wrong command line, or data that can't be checked.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
import numpy as np  # noqa: E402
from tqdm import tqdm  # noqa: E402

from config import get_config, named_keys  # noqa: E402
from launch.files import obstacle, writing_whole  # noqa: E402
from settings.configuration import Configuration, is_users  # noqa: E402
from settings.needs import float_pixels  # noqa: E402
from settings.parser import Parser  # noqa: E402
from settings.registry import datasets  # noqa: E402
from settings.tasks import dataset_columns  # noqa: E402
from training.automatic import data_options  # noqa: E402

LISTS = {"train": "train_list.txt", "val": "val_list.txt"}
# The column of masks that -dataset=masks_list reads.
MASK = "mask"


def check_images(
    config: Configuration,
    workers: int,
    limit: Any = "auto",
    listed: bool = False,
    edits: Path | None = None,
) -> Any:
    """Reads every image of DATA.DATASET; returns a ``DatasetReport``.

    Args:
        workers: processes that read images.
        limit: the number of classes, which labels are below; "auto": any label is taken.
        listed: whether lists of the readable images will be written. Then the verdict is about
            these.
        edits: a table of edited labels, which are checked in place of the data's own.

    Raises:
        InputError: there are no training images to check, or a label is outside the range; or as
            ``loading.label_edits.apply_table``.
        RunError: a process was killed.
    """
    from inference.visualization.dataset_report import DatasetReport
    from loading.check.findings import duplicate_pairs, findings
    from loading.check.images import check_images, image_source
    from loading.label_edits import apply_table
    from loading.label_sets import are_known, every_label
    from loading.layout import validation_files
    from loading.sources import MOST_CLASSES, Split
    from loading.subsets import read_split

    data = config.DATA
    modes = ["train", "val"]
    # Lists of edited labels needn't have a validation set: a run may split them.
    if edits and data.VAL_SPLIT is None and not validation_files(data.DATASET, data.DATA_PATH):
        modes.remove("val")
    parts = {}
    problems = {}
    # Grey images are read as colours, too.
    read_as = data.IMAGE_CHANNELS if float_pixels(data) else "RGB"
    read: dict[str, Any] = {}
    sources = {}
    skipped: list[str] = []
    for mode in modes:
        problems[mode] = []
        try:
            split = Split(mode, limit, problems[mode], skipped=skipped)
            read[mode] = read_split(data, split, datasets.choose(config))
            sources[mode] = image_source(read[mode], data.MAX_PIXELS, read_as)
        except InputError as error:
            if mode == "train":
                raise
            problems[mode].append(str(error))
    if edits:
        read, counts = apply_table(edits, read, data.DATA_PATH)
        sources = {
            mode: image_source(each, data.MAX_PIXELS, read_as) for mode, each in read.items()
        }
        print(
            f"{edits}: relabel {counts['relabel']}, remove {counts['remove']}, keep {counts['keep']}"
        )
    for mode, source in sources.items():
        known = len(source.classes) or MOST_CLASSES
        labels = every_label(source.labels)
        # The readers of lists check this themselves; other datasets are checked here.
        is_outside = len(labels) and not 0 <= labels.min() <= labels.max() < known
        if is_outside and are_known(source.labels):
            raise InputError(
                f"the {mode} labels are {labels.min()}..{labels.max()}, expected 0..{known - 1}"
            )
        with tqdm(total=len(source.labels), desc=mode, disable=None, dynamic_ncols=True) as bar:
            parts[mode] = check_images(
                source, data.MAX_PIXELS, data.EXIF_ORIENTATION, workers, bar.update
            )
    found, images, alike = findings(config, parts, problems, sorted(set(skipped)), listed)
    errors = sum(finding.is_error for finding in found)
    remarks = len(found) - errors
    if errors:
        verb = "stops" if errors == 1 else "stop"
        verdict = f"not usable: {errors} of the findings {verb} a run"
    else:
        noun = "remark" if remarks == 1 else "remarks"
        verdict = f"usable, {remarks} {noun}"
    title = data.DATASET
    if "data_path" in datasets.components[data.DATASET].keys:
        title = f"{data.DATASET}: {printable(data.DATA_PATH)}"
    return DatasetReport(
        title,
        verdict,
        not errors,
        parts,
        found,
        images,
        duplicate_pairs(images, alike),
        data.EXIF_ORIENTATION,
        data.MAX_PIXELS,
    )


def screen(result: Any) -> str:
    """Returns the text that a check prints: the table of counts, the findings, the verdict."""
    from loading.check.findings import table

    rows = [("", list(result.parts)), *table(result.parts)]
    widths = [max(len(values[column]) for _, values in rows) for column in range(len(result.parts))]
    name_width = max(18, *(len(name) + 1 for name, _ in rows))
    lines = [result.title]
    for name, values in rows:
        cells = (value.rjust(width) for value, width in zip(values, widths, strict=True))
        lines.append(f"  {name:<{name_width}}{'   '.join(cells)}")
    for finding in result.findings:
        kind = "error" if finding.is_error else "remark"
        text = finding.text
        if finding.examples:
            text += f", such as {finding.examples[0]}"
        lines.append(f"{kind}: {printable(text, 400)}")
    return "\n".join([*lines, result.verdict])


def write_lists(output: Path, root: Path, parts: Mapping[str, Any]) -> str:
    """Writes a list of each part, without the images that can't be read. Returns a line for the
    user.

    Args:
        root: the folder that the images' paths are relative to. In the lists they are relative to
            ``output``.
    """
    from loading.check.mask_findings import usable_masks
    from loading.class_names import FILE
    from loading.label_sets import LabelSets, are_known
    from loading.mask_folders import COLORS, colors_text
    from utils import writing_whole

    counts = {}
    kind = "imagenet2012"
    source = parts["train"].source
    if isinstance(source.labels, LabelSets):
        kind = "multilabel_list"
    elif MASK in source.masks:
        kind = "masks_list"
    elif not are_known(source.labels):
        kind = "images_list"

    def listed(name: str) -> str:
        """Returns the path of a file of this name, relative to the lists."""
        path = os.path.join(os.path.realpath(root), os.path.relpath(name, root))
        relative = os.path.relpath(path, os.path.realpath(output))
        holds_tab = kind == "masks_list" and "\t" in relative
        if relative != relative.strip() or "\n" in relative or holds_tab:
            raise InputError(f"{printable(path)}: a list can't contain a name like this; rename it")
        return relative

    try:
        output.mkdir(parents=True, exist_ok=True)
        for mode, part in parts.items():
            usable = part.records["readable"].copy()
            if kind == "masks_list":
                usable &= usable_masks(part.masks[MASK])
            kept = np.flatnonzero(usable).tolist()
            labels = part.source.labels
            with writing_whole(output / LISTS[mode], "wb") as file:
                for place in kept:
                    line = listed(part.source.name(place))
                    if kind == "multilabel_list":
                        line += f"\t{','.join(map(str, labels.of(place)))}"
                    elif kind == "masks_list":
                        line += f"\t{listed(part.source.masks[MASK].name(place))}"
                    elif kind == "imagenet2012":
                        line += f" {labels[place]}"
                    file.write(os.fsencode(f"{line}\n"))
            counts[mode] = len(kept)
        classes = source.classes
        colours = source.masks[MASK].kind if kind == "masks_list" else None
        if colours and colours.table is not None and colours.table.of_colours:
            with writing_whole(output / COLORS) as file:
                file.write(colors_text(classes, colours.table))
        elif classes:
            with writing_whole(output / FILE) as file:
                file.write("".join(f"{name}\n" for name in classes))
    except OSError as error:
        raise RunError(
            f"-output {output}: the lists aren't written ({error.strerror}); {remedy(error)}"
        ) from None
    written = " and ".join(f"{count:,} in {LISTS[mode]}" for mode, count in counts.items())
    return f"{output}: {written}; train with -dataset={kind} -data_path={output}"


def check_outputs(options: argparse.Namespace, config: Configuration) -> None:
    """Raises InputError if an output can't be written, before the images are read."""
    if (options.output is None) != (options.split is None and options.apply is None):
        raise InputError(
            "--split SHARE and --apply FILE need -output DIR, the folder for their lists, and -output"
            " needs one of the two; pass both flags"
        )
    if options.output and datasets.components[config.DATA.DATASET].returns != "Files":
        raise InputError(
            f"--split and --apply write lists of files; DATASET {config.DATA.DATASET} has none"
        )
    name = config.DATA.DATASET
    if options.apply and "labels" not in dataset_columns(name):
        raise InputError(f"--apply edits labels, but the images of DATASET {name} have none")
    if options.apply and config.DATA.FOLDS is not None:
        raise InputError(
            "--apply lists all training images, but DATA.FOLDS would split them; set DATA.FOLDS in"
            " the runs on the lists"
        )
    if options.output and dataset_columns(name) == (MASK,) and name not in ("masks", "masks_list"):
        raise InputError(
            f"--split lists masks as they are stored, but the indices that DATASET {name} stores"
            " aren't"
            " those of its classes; use DATA.VAL_SPLIT in the training instead"
        )
    if options.output:
        for name in (*LISTS.values(), "classes.txt", "colors.txt"):
            file = options.output / name
            if os.path.lexists(file):
                raise InputError(f"{file} already exists; choose another -output, or remove it")
    if options.license and not options.card:
        raise InputError("-license is for --card FILE.md; add that, or leave it out")
    if options.card:
        if options.card.suffix.lower() != ".md":
            raise InputError(f"--card {options.card}: expected a file that ends in .md")
        if problem := obstacle(options.card):
            raise InputError(f"--card {options.card}: {problem.strerror}; choose another")
    for flag, file in (("--report", options.report), ("--card", options.card)):
        if file and (not file.parent.is_dir() or not os.access(file.parent, os.W_OK)):
            raise InputError(f"{flag} {file}: its folder doesn't exist or isn't writable")
    if options.report and options.report.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--report {options.report}: expected a file that ends in .html")


def build_config(options: argparse.Namespace) -> Configuration:
    """Returns the configuration that the flags and -o set."""
    flags = {
        "DATA.DATASET": options.dataset, "DATA.DATA_PATH": options.data_path, "DATA.VAL_SPLIT": options.split,
        "DATA.SPLIT_SEED": options.seed, "DATA.SPLIT_GROUPS": options.groups,
    }  # fmt: skip
    named = named_keys(options.o)
    is_named = options.dataset or options.cfg or "DATA.DATASET" in named
    if options.data_path and not is_named:
        # Of -o, it matters only which keys are set, not their values.
        asked = dict.fromkeys(named)
        asked |= {key: value for key, value in flags.items() if value is not None}
        # As in a training, images are split if there are none for validation. --apply and --card
        # are about the parts that the data itself has.
        is_split = not (options.apply or options.card)
        _, plan = data_options(asked, is_evaluation=not is_split)
        for note in plan.notes:
            print(note)
        flags |= {option.key: option.value for option in plan.options}
    given = []
    for key, value in flags.items():
        if value is not None:
            given += [key, str(value)]
    return get_config(options.cfg, [*given, *options.o])


def parsed_arguments() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = Parser(__doc__)

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option("dataset", metavar="NAME", help=f"what -data_path holds: {', '.join(datasets.names())}")
    option("data_path", metavar="DIR", help="the dataset's folder")
    option(
        "cfg",
        metavar="FILE",
        help="YAML file, or a model's name, whose number of classes limits the labels",
    )
    parser.add_keys()
    option(
        "split",
        type=float,
        metavar="SHARE",
        help="share of each class for validation; needs -output",
    )
    option(
        "groups", metavar="PATTERN|FILE", help="with --split: groups of images that stay together"
    )
    option("seed", type=int, metavar="N", help="with --split: the random seed; default: 0")
    option("apply", type=Path, metavar="FILE", help="an edited table of labels; needs -output")
    option(
        "output", type=Path, metavar="DIR", help="the folder for the lists of --split and --apply"
    )
    option(
        "report",
        type=Path,
        metavar="FILE.html",
        help="a page with pictures, which are also written to FILE.png",
    )
    option("card", type=Path, metavar="FILE.md", help="a dataset card, such as README.md")
    option(
        "license",
        metavar="NAME",
        help="with --card: the licence, such as cc-by-4.0; default: unknown",
    )
    option(
        "workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="number of processes; default: one per core",
    )
    options = parser.parse_args()
    if options.workers < 1:
        parser.error(f"--workers is {options.workers}, expected 1 or more")
    return options


def main() -> None:
    options = parsed_arguments()
    config = build_config(options)
    check_outputs(options, config)
    start = time.monotonic()
    given = options.cfg or is_users(config, "MODEL.NUM_CLASSES")
    limit = config.MODEL.NUM_CLASSES if given else "auto"
    result = check_images(config, options.workers, limit, bool(options.output), options.apply)
    seconds = time.monotonic() - start
    count = sum(len(part.records) for part in result.parts.values())
    print(screen(result))
    print(f"{count:,} images in {seconds:,.1f} s: {count / seconds:,.0f} a second")
    if options.output:
        print(write_lists(options.output, Path(config.DATA.DATA_PATH), result.parts))
    if options.report:
        from inference.visualization.dataset_report import write_report

        try:
            drawn = write_report(options.report, result)
        except OSError as error:
            raise RunError(
                f"--report {options.report} can't be written ({error.strerror}); {remedy(error)}"
            ) from None
        print(f"{options.report} and {drawn} are written")
    if options.card:
        from inference.visualization.dataset_card import dataset_card

        try:
            with writing_whole(options.card) as file:
                file.write(dataset_card(config, result, options.license))
        except OSError as error:
            raise RunError(
                f"--card {options.card} can't be written ({error.strerror}); {remedy(error)}"
            ) from None
        print(f"{options.card} is written")
    if not result.usable:
        raise SystemExit(1)


if __name__ == "__main__":
    with reporting():
        main()
