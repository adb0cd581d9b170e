"""Compares PaddleViT's own models, at full size, with what this toolkit makes of its files.

    python tools/check_paddlevit.py PADDLEVIT ["vip*"] [-double] [-python PYTHON]

PADDLEVIT is a checkout of BR-IDL/PaddleViT. PYTHON is an interpreter with Paddle for PaddleViT's
code, by default this one. It needs no GPU.

For each YAML file below PADDLEVIT/image_classification, PaddleViT's code builds the model, gives it
random weights and computes the logits of two random images. This toolkit reads the same YAML file
and weights, and computes the logits again. The largest difference is printed as a share of the
logits' range. The change from one image to the other is printed, too: without it, equal logits
would show nothing.

With -double, both sides compute in float64. What differs then isn't rounding, which some models
magnify with random weights. Then the gradients of a training step are compared, too: the largest
difference in one parameter is a share of the largest value of its gradient. A gradient whose values
are all below a millionth of the largest one counts as much as that.
"""

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
from config import get_config  # noqa: E402
from launch.files import temporary_folder  # noqa: E402
from launch.startup import end_with_parent  # noqa: E402
from settings.parser import Parser  # noqa: E402

# The largest difference of logits, over their range.
TOLERANCE = 1e-5


def compare(file: Path, python: str, folder: Path, dtype: Any) -> dict[str, Any]:
    """Compares the model of one of PaddleViT's YAML files.

    Args:
        python: the interpreter for PaddleViT's code.
        folder: for the weights and the outputs.
        dtype: float32 or float64.

    Returns:
        a dict of ``parameters``, ``expected`` (PaddleViT's count), ``difference`` (of the logits)
        and ``change`` (from one image to the other), both over the range of the logits, and
        ``gradients`` (0 in float32).
    """
    import numpy as np
    import paddle

    from models import build_model
    from tools.benchmarks.paddlevit_reference import convert, without_drops
    from weights import load_weights

    script = ROOT / "tools" / "benchmarks" / "paddlevit_reference.py"
    done = subprocess.run(
        [python, str(script), str(file), str(folder), dtype],
        capture_output=True,
        text=True,
        preexec_fn=end_with_parent,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunError(f"{file}: PaddleViT's code fails: {reason}")
    answer = json.loads(done.stdout.splitlines()[-1])
    config = get_config(file)
    model = build_model(config, head_init_scale=1.0)
    load_weights(model, folder / "weights.pdparams")
    convert(model, dtype)
    model.eval()
    outputs = np.load(folder / "outputs.npz")
    images = paddle.to_tensor(outputs["images"], dtype)
    with paddle.no_grad():
        logits = model(images).numpy()
    expected = outputs["logits"]
    span = np.ptp(expected)
    gradients = 0.0
    if dtype == "float64":
        training_logits = without_drops(model)(images)
        paddle.nn.functional.cross_entropy(training_logits, paddle.to_tensor([0, 1])).backward()
        # They come from PaddleViT's names to ours as weights do.
        wanted = build_model(config, head_init_scale=1.0)
        load_weights(wanted, folder / "gradients.pdparams")
        gradients = _largest_difference(model, wanted)
    return {
        "parameters": sum(parameter.size for parameter in model.parameters()),
        "expected": answer["parameters"],
        "difference": float(np.abs(logits - expected).max() / span),
        "change": float(np.abs(np.diff(expected, axis=0)).max() / span),
        "gradients": gradients,
    }


def _largest_difference(model: Any, wanted: Any) -> float:
    """Returns the largest difference between the gradients of ``model`` and the parameters of
    ``wanted``, over the largest value of each.
    """
    pairs = []
    for (_, parameter), (_, values) in zip(
        model.named_parameters(), wanted.named_parameters(), strict=True
    ):
        expected = values.numpy()
        found = 0 * expected if parameter.grad is None else parameter.grad.numpy()
        pairs.append((abs(found - expected).max(), abs(expected).max()))
    least = 1e-6 * max(largest for _, largest in pairs)
    return float(max(difference / max(largest, least) for difference, largest in pairs))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("paddlevit", help="a checkout of BR-IDL/PaddleViT")
    parser.add_argument("pattern", nargs="?", default="*", help="a shell pattern of its YAML files")
    parser.add_argument(
        "-python", "--python", default=sys.executable, help="an interpreter with Paddle"
    )
    parser.add_argument("-double", "--double", action="store_true", help="compute in float64")
    arguments = parser.parse_args()
    if not shutil.which(arguments.python):
        raise InputError(f"-python is {arguments.python}, which isn't a program")
    pattern = arguments.pattern.removesuffix(".yaml")
    place = Path(arguments.paddlevit) / "image_classification"
    files = sorted(place.glob(f"*/configs/{pattern}.yaml"), key=lambda file: file.stem)
    if not files:
        raise InputError(
            f"no file {place}/*/configs/{pattern}.yaml; expected a checkout of BR-IDL/PaddleViT"
        )
    import paddle

    from ops.device import set_tf32, tune_cpu

    dtype = "float64" if arguments.double else "float32"
    tune_cpu(1)
    # TF32 has 10 bits, and would differ by more than the tolerance.
    set_tf32(False)
    failed = []
    print("| model | reference | parameters | difference | change | gradients | s |")
    print("|---|---|---|---|---|---|---|")
    for file in files:
        start = time.monotonic()
        with temporary_folder() as folder:
            found = compare(file, arguments.python, folder, dtype)
        has_same_count = found["parameters"] == found["expected"]
        count = f"{found['parameters']:,}"
        if not has_same_count:
            count += f", PaddleViT's {found['expected']:,}"
        cells = [
            file.stem,
            "PaddleViT",
            count,
            f"{found['difference']:.1e}",
            f"{found['change']:.3f}",
            f"{found['gradients']:.1e}",
            f"{time.monotonic() - start:.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        is_near = max(found["difference"], found["gradients"]) <= TOLERANCE
        if not (has_same_count and is_near and found["change"] > TOLERANCE):
            failed.append(file.stem)
    print(f"\n{len(files)} models; paddle {paddle.__version__}, {dtype}; tolerance {TOLERANCE:g}")
    if failed:
        raise RunError(
            f"{len(failed)} of {len(files)} models differ from PaddleViT's: {', '.join(failed)}"
        )


if __name__ == "__main__":
    with reporting():
        main()
