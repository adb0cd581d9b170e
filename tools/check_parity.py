"""Compares every shipped model, at full size, with timm's model of the same weights.

    python tools/check_parity.py ["deit*"] [-python PYTHON] [-small]

PYTHON is an interpreter with torch and timm, by default this one. It needs no GPU and no Paddle:

    python -m venv reference
    reference/bin/pip install torch==2.13.0                     # the CPU build suffices
    reference/bin/pip install --no-deps timm==1.0.31 torchvision==0.28.0
    reference/bin/pip install huggingface_hub safetensors numpy pyyaml

For each model, timm makes random weights and computes the logits of two random images.
``load_weights`` reads the weights here, and the model computes the logits again. The largest
difference is printed as a share of the logits' range. The change from one image to the other is
printed, too: without it, equal logits would show nothing. The features that the classifier reads
are compared in the same way, and the intermediate with the largest difference. timm's LeNet has
neither.

-small is for models that need more memory than this machine has. They keep their widths. Plain ones
have two blocks, ConvNeXt has one block in each stage, and the others get images of 128 x 128.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import (  # noqa: E402  (first: it says what isn't installed)
    InputError,
    RunError,
    reporting,
)

# isort: split
from config import find_config, get_config  # noqa: E402
from launch.files import temporary_folder  # noqa: E402
from launch.startup import end_with_parent  # noqa: E402
from settings.names import names  # noqa: E402
from settings.parser import Parser  # noqa: E402

# The largest difference of logits and features, over their range.
TOLERANCE = 1e-4
# The same for intermediates. Batch norms magnify rounding at single positions, and pooling, which
# averages it, comes after the intermediates.
INTERMEDIATE_TOLERANCE = 1e-3
_DIGITS = {
    "img_size": 8,
    "patch_size": 2,
    "embed_dim": 64,
    "depth": 4,
    "num_heads": 4,
    "mlp_ratio": 2.0,
}


def reference(name: str) -> tuple[str, dict[str, Any]]:
    """Returns timm's name of a model, and the arguments that its constructor needs for it."""
    if name == "vit_digits":
        return "vit_tiny_patch16_224", _DIGITS
    # lenet, which timm lacks, keeps its name.
    timm_name = names(find_config(name)).get("timm", name).partition(".")[0]
    # MAE fine-tunes with average pooling.
    return timm_name, {"global_pool": "avg"} if name.endswith("_finetune") else {}


def smaller(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the overrides of ``create_model`` that make a model smaller, and those of timm's
    constructor.
    """
    from models import ARCHITECTURES

    kind = get_config(name).MODEL.TYPE.lower()
    if kind in ("vit", "deit", "eva"):
        return {"depth": 2}, {"depth": 2}
    if kind == "convnext":
        return {"stage_depths": [1] * 4}, {"depths": [1] * 4}
    return {"image_size": 128}, {} if ARCHITECTURES[kind].min_image_size else {"img_size": 128}


def compare(
    name: str, timm: subprocess.Popen[str], python: str, folder: Path, small: bool = False
) -> dict[str, Any]:
    """Compares a model with timm's.

    Returns:
        a dict of ``model`` (timm's name), ``parameters``, ``expected`` (timm's count) and
        ``versions``. ``difference`` is the difference between our logits and timm's, and ``change``
        that between two images; both are over the range of the logits. ``features`` and
        ``intermediates`` are the largest differences of these (0 if timm has none).
    """
    import numpy as np
    import paddle

    from models import create_model
    from weights import load_weights

    overrides: dict[str, Any] = {"head_init_scale": 1.0}
    if name.startswith("poolformer_"):
        # timm's PoolFormer has a norm before the classifier, which its authors' lacks.
        overrides["fc_norm"] = True
    options: dict[str, Any] = {}
    if small:
        smaller_overrides, options = smaller(name)
        overrides |= smaller_overrides
    model = create_model(name, **overrides)
    model.eval()
    timm_name, needed = reference(name)
    options |= needed | {"num_classes": model.num_classes, "in_chans": model.in_channels}
    images = (model.in_channels, *model.image_size)
    request = {"model": timm_name, "options": options, "images": images, "folder": str(folder)}
    assert timm.stdin is not None
    assert timm.stdout is not None
    try:
        timm.stdin.write(json.dumps(request) + "\n")
        timm.stdin.flush()
        answer = json.loads(timm.stdout.readline())
    except (OSError, ValueError):
        # Closing the input writes what is still buffered, which fails, too.
        with contextlib.suppress(OSError):
            timm.stdin.close()
        raise RunError(
            f"{python} returned no logits of {timm_name}: it needs torch and timm (see -h)"
        ) from None
    load_weights(model, folder / "weights.safetensors")
    outputs = np.load(folder / "outputs.npz")
    with paddle.no_grad():
        logits = model(paddle.to_tensor(outputs["images"])).numpy()
        maps = model.forward_intermediates(
            paddle.to_tensor(outputs["images"]), norm=True, intermediates_only=True
        )
    parameters = sum(parameter.size for parameter in model.parameters())
    model.reset_classifier(0)
    with paddle.no_grad():
        features = model(paddle.to_tensor(outputs["images"])).numpy()
    change = float(np.abs(np.diff(outputs["logits"], axis=0)).max() / np.ptp(outputs["logits"]))
    differences = {
        "difference": _difference(logits, outputs["logits"]),
        "features": 0.0,
        "intermediates": 0.0,
    }
    if answer["info"]:
        info = [[stage["num_chs"], stage["reduction"]] for stage in model.feature_info]
        if answer["info"] != info:
            raise RunError(f"{name}'s feature_info differs from timm's {answer['info']}")
        differences["features"] = _difference(features, outputs["features"])
        differences["intermediates"] = max(
            _difference(features.numpy(), outputs[str(index)])
            for index, features in enumerate(maps)
        )
    return {
        "model": timm_name,
        "parameters": parameters,
        "expected": answer["parameters"],
        "change": change,
        **differences,
        "versions": f"timm {answer['timm']}, torch {answer['torch']}",
    }


def _difference(found: Any, expected: Any) -> float:
    if found.shape != expected.shape:
        raise RunError(f"found {list(found.shape)}, timm gives {list(expected.shape)}")
    return float(abs(found - expected).max() / (expected.max() - expected.min()))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("pattern", nargs="?", default="*", help="a shell pattern of names")
    parser.add_argument(
        "-python", "--python", default=sys.executable, help="an interpreter with torch and timm"
    )
    parser.add_argument(
        "-small", "--small", action="store_true", help="smaller models of the same widths"
    )
    arguments = parser.parse_args()
    if not shutil.which(arguments.python):
        raise InputError(f"-python is {arguments.python}, which isn't a program")
    import paddle

    from models import list_models
    from ops.device import set_tf32, tune_cpu

    names = list_models(arguments.pattern)
    if not names:
        raise InputError(
            f"no model matches {arguments.pattern!r}; without a pattern all are checked"
        )
    tune_cpu(1)
    # TF32 has 10 bits, and would differ from timm by more than the tolerance.
    set_tf32(False)
    failed = []
    script = [arguments.python, str(ROOT / "tools" / "benchmarks" / "timm_reference.py")]
    with (
        temporary_folder() as folder,
        subprocess.Popen(
            script,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        ) as timm,
    ):
        print(
            "| model | timm's | parameters | difference | change | features | intermediates | s |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for name in names:
            start = time.monotonic()
            found = compare(name, timm, arguments.python, folder, arguments.small)
            has_same_count = found["parameters"] == found["expected"]
            count = f"{found['parameters']:,}"
            if not has_same_count:
                count += f", timm's {found['expected']:,}"
            cells = [
                name,
                found["model"],
                count,
                f"{found['difference']:.1e}",
                f"{found['change']:.3f}",
                f"{found['features']:.1e}",
                f"{found['intermediates']:.1e}",
                f"{time.monotonic() - start:.0f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
            is_near = (
                max(found["difference"], found["features"]) <= TOLERANCE
                and found["intermediates"] <= INTERMEDIATE_TOLERANCE
            )
            if not (has_same_count and is_near and found["change"] > TOLERANCE):
                failed.append(name)
    tolerances = f"tolerance {TOLERANCE:g}, of intermediates {INTERMEDIATE_TOLERANCE:g}"
    print(f"\n{len(names)} models; paddle {paddle.__version__}, {found['versions']}; {tolerances}")
    if failed:
        raise RunError(
            f"{len(failed)} of {len(names)} models differ from timm's: {', '.join(failed)}"
        )


if __name__ == "__main__":
    with reporting():
        main()
