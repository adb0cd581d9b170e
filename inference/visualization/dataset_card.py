"""The card of a dataset that was checked: the README.md of a repository on the Hugging Face Hub."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from inference.visualization.dataset_report import DatasetReport
from loading.check.findings import Finding, have_labels, table
from loading.check.images import CheckedImages
from loading.class_names import class_name
from loading.label_sets import LabelSets, every_label
from settings.configuration import Configuration
from settings.registry import datasets
from training.pages import markdown

# The most rows of the table of classes.
_ROWS = 1000
# The Hub's classes of sizes: each begins at a number of images.
_SIZES = {
    0: "n<1K",
    1_000: "1K<n<10K",
    10_000: "10K<n<100K",
    100_000: "100K<n<1M",
    1_000_000: "1M<n<10M",
    10_000_000: "10M<n<100M",
}


def data_name(config: Configuration) -> str:
    """Returns the name of a dataset for a page that others read: its folder's own name, without
    the path to it, or the name of DATA.DATASET if it has no folder.
    """
    name = config.DATA.DATASET
    if "data_path" in datasets.components[name].keys:
        path = os.path.normpath(str(config.DATA.DATA_PATH))
        return os.path.basename(path) or name
    return name


def dataset_card(config: Configuration, checked: DatasetReport, license_name: str | None) -> str:
    """Returns the card of a dataset.

    Args:
        license_name: as the Hub names it; None: it isn't known.
    """
    name = data_name(config)
    count = sum(len(part.records) for part in checked.parts.values())
    values: dict[str, Any] = {
        "pretty_name": name,
        **license_entries(license_name),
        "task_categories": [_task_category(checked.parts)],
        "size_categories": [[size for least, size in _SIZES.items() if count >= least][-1]],
    }
    licence = f"The licence is {markdown.text(license_name)}."
    if license_name is None:
        licence = "The licence isn't known, because none was given."
    return markdown.page(
        values,
        name,
        f"{count:,} images in the layout that `-dataset={config.DATA.DATASET}` of paddle-vit-toolkit reads. "
        "The numbers below are of a check that decoded every image in full.",
        *data_sections(config, checked),
        markdown.section("Licence", licence),
        markdown.section("Limits", markdown.bullets(_limits(checked))),
    )


def data_sections(config: Configuration, checked: DatasetReport) -> list[str]:
    """Returns the result of a check as sections of a card: counts, findings and classes."""
    parts = checked.parts
    rows = [(name, *values) for name, values in table(parts)]
    findings = [_finding(config, finding) for finding in checked.findings]
    sections = [
        markdown.section("Data", markdown.table(["", *parts], rows), _verdict(checked)),
        markdown.section("Findings", markdown.bullets(findings or ["none"])),
    ]
    if have_labels(parts):
        sections.append(markdown.section("Images of each class", *_classes(parts)))
    return sections


def license_entries(name: str | None) -> dict[str, str]:
    """Returns the front matter's entries for a licence.

    Args:
        name: what the user gave; None: nothing, which the Hub calls "unknown".
    """
    if name is None:
        return {"license": "unknown"}
    if name.lower() in LICENSES:
        return {"license": name.lower()}
    return {"license": "other", "license_name": name}


# The licences of images and weights that the Hub knows best; others are "other" there, with a name.
LICENSES = frozenset(
    {
        "apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "isc", "unlicense", "mpl-2.0",
        "gpl", "gpl-2.0", "gpl-3.0", "lgpl", "lgpl-2.1", "lgpl-3.0", "agpl-3.0",
        "cc", "cc0-1.0", "cc-by-2.0", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0",
        "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nd-4.0",
        "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0",
        "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0",
        "odbl", "odc-by", "pddl", "etalab-2.0", "openrail", "creativeml-openrail-m",
        "unknown", "other",
    }
)  # fmt: skip


def _task_category(parts: Mapping[str, CheckedImages]) -> str:
    first = next(iter(parts.values()))
    if first.masks:
        return "image-segmentation"
    return "image-classification" if have_labels(parts) else "image-feature-extraction"


def _verdict(checked: DatasetReport) -> str:
    return f"The check's result: {markdown.text(checked.verdict)}."


def _finding(config: Configuration, finding: Finding) -> str:
    """Returns a finding with its examples, without the path to the data on this machine."""
    path = os.path.join(str(config.DATA.DATA_PATH), "")
    lines = [finding.text, *finding.examples]
    shown = [markdown.text(line.replace(path, "")) for line in lines]
    kind = "stops a run: " if finding.is_error else ""
    examples = f", such as {'; '.join(shown[1:])}" if finding.examples else ""
    return f"{kind}{shown[0]}{examples}"


def _classes(parts: Mapping[str, CheckedImages]) -> list[str]:
    """Returns the table of classes, and a line about those that it leaves out."""
    labels = [every_label(part.source.labels) for part in parts.values()]
    names = next(iter(parts.values())).source.classes
    count = max(len(names), *(int(held.max(initial=-1)) + 1 for held in labels))
    counts = [np.bincount(held, minlength=count) for held in labels]
    rows = [
        (label, class_name(names, label), *(f"{held[label]:,}" for held in counts))
        for label in range(min(_ROWS, count))
    ]
    left_out = f"{count - _ROWS:,} more classes aren't listed." if count > _ROWS else ""
    return [markdown.table(["number", "class", *parts], rows), left_out]


def _limits(checked: DatasetReport) -> list[str]:
    """Returns the limitations of the check."""
    limits = [
        "It wasn't checked whether the labels are right.",
        "Equal images are found by their bytes, and similar ones by a hash of what they show:"
        " other images"
        " may show the same scene as well.",
        "It wasn't checked whether images show persons or protected works.",
    ]
    if "val" not in checked.parts:
        limits.append("There are no validation images, so no leak into them could be found.")
    if any(isinstance(part.source.labels, LabelSets) for part in checked.parts.values()):
        limits.append("Images may have several classes, so the classes' counts add up to more.")
    return limits
