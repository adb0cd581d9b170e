"""Publishes a trained classifier: a folder, or a repository on the Hugging Face Hub, with a model card.

    python tools/publish.py RUN FOLDER -license apache-2.0
    python tools/publish.py RUN hf-hub:ORG/NAME -license apache-2.0 -private

This toolkit reads the folder by -pretrained=FOLDER, timm by create_model("local-dir:FOLDER") and
transformers by AutoModelForImageClassification.from_pretrained("FOLDER"), as far as timm has the model.
RUN is a run's folder (its best checkpoint is taken), a checkpoint, or other weights that describe
themselves. The folder is loaded again before it gets its name, to verify that its logits are bit-identical.
-python names an interpreter with timm and transformers, in which it is loaded as well.

The card lists the metrics with confidence intervals, also by class, the calibration and the settings of
the training. The metrics are those of the run's last evaluation if it is of these weights, otherwise
those of -evaluation. -check decodes the run's images, and adds the problems that
tools/check_dataset.py finds. Without -license, the licence is stated as unknown. No path of this machine
and no name of an image is published, except of images in which -check finds a problem.

Uploading needs huggingface_hub and a token, either of hf auth login or in HF_TOKEN.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402  (first: it says what isn't installed)

# isort: split
from launch.files import temporary_folder  # noqa: E402
from settings.parser import Parser  # noqa: E402

# What timm and transformers compute, by another interpreter.
_PEER = ROOT / "tools" / "checks" / "published_peer.py"


def parsed_arguments() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = Parser(__doc__)
    parser.add_argument("weights", metavar="RUN", help="a run's folder, a checkpoint, or weights")
    parser.add_argument("target", metavar="FOLDER", help="a new folder, or hf-hub:ORG/NAME")

    def option(name: str, **settings: object) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)  # pyright: ignore[reportArgumentType]

    option(
        "license",
        metavar="NAME",
        help="the licence, such as apache-2.0 or cc-by-4.0; default: unknown",
    )
    option("name", metavar="NAME", help="name of the model on its card; default: the folder's")
    text = "the folder of an evaluation of these weights; default: the run's own"
    option("evaluation", type=Path, metavar="DIR", help=text)
    option(
        "check", action="store_true", help="check the run's images, and add the result to the card"
    )
    option(
        "python",
        metavar="PYTHON",
        help="an interpreter with torch, timm and transformers, to compare with them",
    )
    option("private", action="store_true", help="with hf-hub: a private repository")
    option(
        "cfg", metavar="FILE", help="the model's YAML file or name, if the weights don't name it"
    )
    parser.add_keys()
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    # After the command line is parsed: these import Paddle.
    from inference import publishing
    from inference.run_evaluation import evaluation_of, training_of

    on_hub = publishing.is_hub_name(arguments.target)
    if arguments.private and not on_hub:
        raise InputError("-private is for hf-hub:ORG/NAME; leave it out")
    repo_id = publishing.repository(arguments.target) if on_hub else ""
    target = Path(arguments.target)
    if not on_hub and os.path.lexists(target):
        raise InputError(f"{target} exists; choose another folder, or remove it")
    source = publishing.read_source(arguments.weights, arguments.cfg, arguments.o)
    evaluation = evaluation_of(source.file, arguments.evaluation)
    checked = None
    if arguments.check:
        if evaluation is None:
            raise InputError(
                "-check needs the images of a run, but these weights have none; pass"
                " -evaluation=DIR"
            )
        from tools.check_dataset import check_images

        config = evaluation.run.config
        checked = check_images(config, len(os.sched_getaffinity(0)), config.MODEL.NUM_CLASSES)
    peer = [arguments.python, str(_PEER)] if arguments.python else []
    name = arguments.name or (repo_id.partition("/")[2] if on_hub else target.absolute().name)
    with temporary_folder() as scratch:
        folder = scratch / "published" if on_hub else target
        compared = publishing.publish(
            source,
            folder,
            name,
            license_name=arguments.license,
            evaluation=evaluation,
            training=training_of(source.file),
            checked=checked,
            peer=peer,
        )
        files = sorted(file.name for file in folder.iterdir())
        where = publishing.upload(folder, repo_id, arguments.private) if on_hub else str(target)
    for line in compared:
        print(line)
    if evaluation is None:
        print("note: these weights have no evaluation, so the card has no metrics")
    elif evaluation.predictions is None:
        print(
            "note: the run's last evaluation is of other weights, so the card has no metrics by class:"
            f" evaluate them (-eval -pretrained={arguments.weights} -output=DIR), and pass"
            " -evaluation=DIR"
        )
    if arguments.license is None:
        print("note: the card has no licence; set it by -license")
    print(f"{where}: {', '.join(files)}")


if __name__ == "__main__":
    with reporting():
        main()
