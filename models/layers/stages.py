"""What models of several stages share."""

from collections.abc import Iterable, Sequence
from typing import Any

from paddle import nn

from errors import InputError


def check_stages(depths: Sequence[int], dims: Sequence[int]) -> None:
    """Raises InputError unless both have four numbers, one per stage."""
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
        rate: the last block's.
        depths: blocks per stage.
        shape: "linear": from 0 at the first block; "constant": ``rate`` at all.
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
    """Returns ``ImageModel.feature_info`` of what ``modules`` give: one number for all of them, or
    one for each.
    """
    count = len(modules)
    columns = ([one] * count if isinstance(one, int) else one for one in (channels, reductions))
    return [
        {"module": module, "num_chs": channels, "reduction": reduction}
        for module, channels, reduction in zip(modules, *columns, strict=True)
    ]


def groups_by_block(stem: str, name: str, stages: Iterable[Any]) -> list[tuple[str, ...]]:
    """Returns timm's groups for layer-wise learning rate decay, without the head: the stem, then each
    block. A stage's first block has its downsampling.

    Args:
        name: of the list of stages in the model.
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
    """Returns groups of twelve consecutive parameters, then the classifier: timm's layer-wise decay
    for architectures without groups of their own.

    Args:
        classifier: name of the layer that timm calls so.
    """
    names = [name for name, _ in model.named_parameters() if not name.startswith(f"{classifier}.")]
    return [
        *(tuple(names[first : first + 12]) for first in range(0, len(names), 12)),
        (classifier,),
    ]
