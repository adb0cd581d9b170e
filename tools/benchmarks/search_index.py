"""Compares FAISS's searches with the exact one, in an index of random features.

    python tools/benchmarks/search_index.py [--images 100000] [--width 128] [--queries 200] [--top 10]

The features are of 1,000 classes: a random centre for each, and noise as large as the centres'
deviation. A query is an image's features with further noise. It prints for each search the seconds
to build its structure, the milliseconds for a query, and the share of the exact neighbours that it
found. The structure is built in memory, in as many threads as FAISS takes by itself.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from inference.approximate import KINDS, ApproximateSearch, recall
from inference.feature_store import Rows
from inference.search import Collected, Query
from inference.search_index import add_images
from loading.files import Paths

_CLASSES = 1000
_BATCH = 4096


class _Features:
    """Gives random features in place of those of images."""

    weights = "random"

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.made = dict.fromkeys(("cfg", "layer")) | {
            "checkpoint": "random", "sha256": "0" * 64, "options": [], "pool": "avg",
            "norm": False, "oriented": False,
        }  # fmt: skip

    def rows(self, images: Paths, workers: int) -> Iterator[Rows]:
        for first in range(0, len(images), _BATCH):
            values = self.values[first : first + _BATCH]
            names = [images[first + place] for place in range(len(values))]
            yield Rows(names, [""] * len(names), values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--top", type=int, default=10)
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(_CLASSES, arguments.width))
    values = centres[generator.integers(0, _CLASSES, arguments.images)]
    values = (values + generator.normal(size=values.shape)).astype(np.float32)
    chosen = generator.integers(0, arguments.images, arguments.queries)
    noise = 0.3 * generator.normal(size=(arguments.queries, arguments.width))
    queries = [Query(row) for row in (values[chosen] + noise).astype(np.float32)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.index"
        paths = Paths(f"/random/{place}.jpg" for place in range(arguments.images))
        features: Any = _Features(values)
        add_images(file, paths, lambda _: features, 0)
        collected = Collected(file)
        begin = time.perf_counter()
        exact = collected.rows(queries, arguments.top)
        milliseconds = 1000 * (time.perf_counter() - begin) / len(queries)
        print(f"exact  built in 0.00 s, {milliseconds:.2f} ms a query, recall 100.00 %")
        for kind in KINDS:
            begin = time.perf_counter()
            search = ApproximateSearch(collected.stored, kind)
            built = time.perf_counter()
            found = collected.rows(queries, arguments.top, search)
            milliseconds = 1000 * (time.perf_counter() - built) / len(queries)
            share = 100 * recall(found, exact)
            line = f"built in {built - begin:.2f} s, {milliseconds:.2f} ms a query"
            print(f"{kind:5}  {line}, recall {share:.2f} %")


if __name__ == "__main__":
    main()
