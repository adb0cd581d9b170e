"""The large teacher of a small student, as DINOv2 trains its small models (Oquab et al. 2023,
arXiv:2304.07193): a frozen network that TASK dino has trained.
"""

from errors import InputError
from models import build_model
from models.pretraining.dino import Dino
from settings.configuration import Configuration
from settings.registry import tasks
from training.equal_ranks import load_equal
from training.tokenizer import normalisation, other_config

_KEY = "METHOD.LARGE_TEACHER"


def load_large_teacher(
    config: Configuration, file: str, path: str | None, network: Dino
) -> tuple[Dino, str]:
    """Returns the large network with its weights, frozen, and a line for the log.

    Args:
        config: the student's.
        file: the large network's YAML file.
        path: the file of its weights.
        network: the student.

    Raises:
        InputError: there is no ``path``, the network is of another task, or its weights, heads,
            images or patches don't fit.
    """
    if path is None:
        raise InputError(
            f"{_KEY} is {file}, but METHOD.LARGE_TEACHER_PATH is None; set it to the teacher's weights"
        )
    of_large = other_config(config, file, _KEY)
    if of_large.TASK != "dino":
        raise InputError(f"{_KEY} {file} has TASK {of_large.TASK}, expected dino")
    if normalisation(of_large) != normalisation(config):
        raise InputError(
            f"{_KEY} {file} normalises images differently; set DATA.IMAGENET_MEAN and"
            " DATA.IMAGENET_STD to its values"
        )
    large = tasks.choose(of_large)(of_large).make_network(build_model(of_large))
    report = load_equal(large, of_large, "teacher", f"{_KEY}_PATH", path)
    _check_outputs(large, network)
    if large.teacher is not None:
        # Its teacher teaches. Its student isn't needed any more.
        for name in large.teacher.copied:
            setattr(large, name, None)
    large.eval()
    for parameter in large.parameters():
        parameter.stop_gradient = True
    return large, f"large teacher {of_large.MODEL.NAME}: {report}"


def _check_outputs(large: Dino, network: Dino) -> None:
    """Raises InputError if the large network's outputs aren't those that the student predicts."""
    found = len(large.center)
    if found != len(network.center):
        raise InputError(
            f"{_KEY} has {found} prototypes, METHOD.PROTOTYPES is {len(network.center)}; make them"
            " equal"
        )
    if not network.patches:
        return
    if not large.patches:
        raise InputError(
            f"METHOD.PATCH_LOSS is set, but {_KEY} was trained without it; set it to 0"
        )
    grid, of_large = (each.encoder.patch_embed.grid_size for each in (network, large))
    if grid != of_large:
        raise InputError(
            f"{_KEY} has {of_large[0]} x {of_large[1]} patches, the model {grid[0]} x {grid[1]};"
            " take models with equal patches"
        )
