"""What models of several stages share."""

from collections.abc import Sequence
from typing import Any

from errors import InputError


def check_stages(depths: Sequence[int], dims: Sequence[int]) -> None:
    """Raises InputError unless both have four numbers, one per stage."""
    for key, numbers in (("STAGE_DEPTHS", depths), ("EMBED_DIMS", dims)):
        if len(numbers) != 4:
            raise InputError(f"{key} is {list(numbers)}, expected four numbers: one per stage")


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
    return [[rate * (start + i) / last for i in range(depth)] for start, depth in zip(starts, depths, strict=True)]


def feature_info(
    modules: Sequence[str], channels: int | Sequence[int], reductions: int | Sequence[int]
) -> list[dict[str, Any]]:
    """Returns ``ImageModel.feature_info`` of what ``modules`` give: one number for all of them, or one for each."""
    count = len(modules)
    columns = ([one] * count if isinstance(one, int) else one for one in (channels, reductions))
    return [
        {"module": module, "num_chs": channels, "reduction": reduction}
        for module, channels, reduction in zip(modules, *columns, strict=True)
    ]
