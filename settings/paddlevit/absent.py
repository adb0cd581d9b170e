"""What PaddleViT has and this toolkit doesn't: 16 families of its models, and its other tasks."""

import re
from collections.abc import Collection

# The family, what MODEL.TYPE is in its files of any year, and what the names of its models begin
# with.
_FAMILIES = (
    ("BoTNet", "botnet", "botnet50"),
    ("ConvMLP", "convmlp", "convmlp_"),
    ("CSwin", "cswin", "cswin_"),
    ("CvT", "cvt", "cvt[-_]"),
    ("CycleMLP", "cyclemlp", "cyclemlp_"),
    ("FF_Only", "ff_only|ffonly", "ff_(only_|base|tiny)"),
    ("Focal Transformer", "focal", "focal_"),
    ("HVT", "hvt", "(scale_)?hvt_"),
    ("MobileFormer", "mobileformer", "mobileformer_"),
    ("RepLKNet", "replknet", "replknet_"),
    ("RepMLP", "repmlp|repmlp_resnet", "repmlp_"),
    ("ResT", "rest|rest_v2", "rest(v2)?_"),
    ("Shuffle Transformer", "shuffle|shuffle_transformer", "shuffle_vit_"),
    ("T2T-ViT", "t2t-vit|t2t_vit", "t2t[-_]vit[-_]"),
    ("TopFormer", "topformer", "topformer_"),
    ("ViP", "vip", "vip_"),
)
# The task, and what only PaddleViT's files for it have: values of MODEL.TYPE (a pattern), and keys
# or sections.
_TASKS = (
    ("GANs", "transgan|styleformer", ("DATA.MAX_GEN_NUM",)),
    ("object detection", "detr|pvtv2_det", ("FPN.", "MODEL.NUM_QUERIES")),
    ("semantic segmentation", "", ("VAL.MULTI_SCALES_VAL",)),
    ("DINO's pre-training", "dino_vit", ("DATA.LOCAL_CROPS_NUMBER",)),
)
FAMILIES = tuple(family for family, *_ in _FAMILIES)
_SEE = "; docs/paddlevit.md lists what is"


def absent_type(model_type: str) -> str:
    """Returns the line for a MODEL.TYPE that only PaddleViT has, or ""."""
    kind = model_type.strip().lower()
    for family, types, _ in _FAMILIES:
        if re.fullmatch(types, kind):
            return f"PaddleViT's {family} isn't here{_SEE}"
    task = next((task for task, types, _ in _TASKS if types and re.fullmatch(types, kind)), None)
    return _task_line(task) if task else ""


def absent_name(name: str) -> str:
    """Returns the line for the name of a model that only PaddleViT has, or ""."""
    found = next((family for family, _, names in _FAMILIES if re.match(names, name.lower())), None)
    return f"PaddleViT's {found} isn't here{_SEE}" if found else ""


def absent_task(keys: Collection[str]) -> str:
    """Returns the line for a file of PaddleViT's for a task that isn't here, or "".

    Args:
        keys: the dotted keys that the file sets.
    """
    for task, _, marks in _TASKS:
        if any(
            key == mark or (mark[-1] == "." and key.startswith(mark))
            for key in keys
            for mark in marks
        ):
            return _task_line(task)
    # Its files for classification all have a TYPE; those for detection with Swin have none.
    if "MODEL.TRANS.WINDOW_SIZE" in keys and "MODEL.TYPE" not in keys:
        return _task_line("object detection")
    return ""


def _task_line(task: str) -> str:
    return f"it is PaddleViT's for {task}, a task that isn't here{_SEE}"
