"""Helpers of architectures that have several stages."""

from collections.abc import Iterable, Sequence
from typing import Any

from paddle import nn

from errors import InputError


def check_stages(depths: Sequence[int], dims: Sequence[int]) -> None:
    """Raises InputError unless STAGE_DEPTHS and EMBED_DIMS have four numbers, one per stage."""
    for key, numbers in (("STAGE_DEPTHS", depths), ("EMBED_DIMS", dims)):
        if len(numbers) != 4:
            raise InputError(f"{key} is {list(numbers)}, expected four numbers: one per stage")


def check_counts(stages: int, **numbers: Sequence[float]) -> None:
    """Raises InputError unless each of the keys has as many numbers as STAGE_DEPTHS has stages."""
    for key, values in numbers.items():
        if len(values) != stages:
            raise InputError(
                f"{key} is {list(values)}, expected {stages} numbers: one per stage of STAGE_DEPTHS"
            )


def drop_path_rates(rate: float, depths: Sequence[int], shape: str = "linear") -> list[list[float]]:
    """Returns each block's rate of stochastic depth, stage by stage.

    Args:
        rate: the rate of the last block.
        depths: number of blocks in each stage.
        shape: "linear": rates grow from 0 at the first block; "constant": all blocks have ``rate``.
    """
    if shape == "constant":
        return [[rate] * depth for depth in depths]
    last = max(1, sum(depths) - 1)
    starts = [sum(depths[:stage]) for stage in range(len(depths))]
    return [
        [rate * (start + i) / last for i in range(depth)]
        for start, depth in zip(starts, depths, strict=True)
    ]


def feature_info(
    modules: Sequence[str], channels: int | Sequence[int], reductions: int | Sequence[int]
) -> list[dict[str, Any]]:
    """Returns ``ImageModel.feature_info`` for the outputs of ``modules``.

    Args:
        modules: names of the layers.
        channels: channels of each output, or of all of them.
        reductions: pixels along a side of a place, of each output, or of all of them.
    """
    if isinstance(channels, int):
        channels = [channels] * len(modules)
    if isinstance(reductions, int):
        reductions = [reductions] * len(modules)
    return [
        {"module": module, "num_chs": channels, "reduction": reduction}
        for module, channels, reduction in zip(modules, channels, reductions, strict=True)
    ]


def groups_by_block(stem: str, name: str, stages: Iterable[Any]) -> list[tuple[str, ...]]:
    """Returns timm's groups for layer-wise learning rate decay, without that of the head.

    They are the stem, then each block. The first block of a stage has the downsampling before it.

    Args:
        stem: name of the stem.
        name: name of the list of stages.
        stages: the stages, each with ``blocks``.
    """
    groups: list[tuple[str, ...]] = [(stem,)]
    for i, stage in enumerate(stages):
        blocks: list[tuple[str, ...]] = [
            (f"{name}.{i}.blocks.{j}",) for j in range(len(stage.blocks))
        ]
        blocks[0] += (f"{name}.{i}.downsample",)
        groups += blocks
    return groups


def groups_of_twelve(model: nn.Layer, classifier: str) -> list[tuple[str, ...]]:
    """Returns groups of twelve consecutive parameters, then the classifier.

    They are timm's for layer-wise learning rate decay of architectures without groups of their own.

    Args:
        classifier: name of the layer that timm takes for the classifier.
    """
    names = [name for name, _ in model.named_parameters() if not name.startswith(f"{classifier}.")]
    groups = [tuple(names[start : start + 12]) for start in range(0, len(names), 12)]
    return [*groups, (classifier,)]
