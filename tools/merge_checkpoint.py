"""Copies a checkpoint of a sharded run, with the optimizer's state in one file.

    python tools/merge_checkpoint.py RUN/checkpoints/epoch_0010 OUT

A run resumes from either, with any number of processes. But earlier releases, and programs that read
the optimizer's moments, expect one optimizer.safetensors. If the checkpoint is the folder of a run,
its newest complete checkpoint is taken.

OUT is a new folder. The checkpoint's checksums are verified first. Its other files are copied as
they are, and OUT gets a SHA256SUMS of its own. The run's settings aren't in OUT: resume by
-cfg=RUN/config.yaml -resume=OUT.
"""

import contextlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, open_file, reporting  # noqa: E402
from launch.files import making_folder  # noqa: E402
from settings.parser import Parser  # noqa: E402


def merge(source: Path, target: Path) -> str:
    """Writes the checkpoint ``source`` to the folder ``target``. Returns a line for the user.

    Args:
        source: a checkpoint's folder, or a run's, whose newest whole checkpoint is taken.
        target: the new folder.

    Raises:
        InputError: ``source`` isn't a whole checkpoint of a sharded run, or ``target`` exists.
    """
    from training.checkpoint import newest_whole, storage
    from training.checkpoint.restore import open_share

    # Of a run's folder, the newest whole checkpoint is taken, as by -resume.
    if (source / "checkpoints").is_dir():
        source = newest_whole(source / "checkpoints") or source
    names = storage.verify(source)
    shares = storage.shares_of(source)
    if not shares:
        raise InputError(
            f"{source}: the optimizer's state is a single file already; there is nothing to merge"
        )
    if os.path.lexists(target):
        raise InputError(f"{target} already exists; choose another folder")
    if source.resolve() in target.resolve().parents:
        raise InputError(f"{target} is inside the checkpoint; choose a folder outside it")
    with contextlib.ExitStack() as opened, making_folder(target) as temporary:
        # Each tensor is read when it is written, so the shares stay open.
        arrays = {}
        for share, keys in shares.items():
            arrays |= opened.enter_context(open_share(source, share, keys))
        sums = [storage.write_file(temporary / storage.OPTIMIZER, arrays)]
        for name in names:
            if name not in (storage.SUMS, storage.INDEX, *shares):
                with open_file(source / name) as file:
                    sums.append(storage.write_file(temporary / name, file))
        storage.write_file(temporary / storage.SUMS, "".join(sums).encode())
    merged = f"{len(arrays)} tensors of {len(shares)} shares in {storage.OPTIMIZER}"
    return f"{target}: {merged}; from {source}"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "source",
        metavar="CHECKPOINT",
        help="a run's folder, or a checkpoint's: RUN/checkpoints/last",
    )
    parser.add_argument("target", metavar="OUT", help="the new folder")
    arguments = parser.parse_args()
    print(merge(Path(arguments.source), Path(arguments.target)))


if __name__ == "__main__":
    with reporting():
        main()
