"""hubconf.py and tools/package: the toolkit within a program that has modules of the same names."""

import json
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT
from PIL import Image
from safetensors.numpy import save_file
from sklearn.datasets import load_sample_images
from support.clashing_modules import CLASHING_MODULES
from support.imports import imported, imports, tree_of

from config import get_config
from inference import Predictor
from models import build_model, create_model, list_models
from training.checkpoint import describe
from training.checkpoint.description import METADATA
from weights import file_arrays, save_weights

# Their modules are imported before ours, and others of them only afterwards.
BEFORE = """
    import json, logging, multiprocessing, os, pickle, signal, sys, warnings
    import numpy as np, paddle
    import config, errors, models, utils
    HOUSE = sys.argv[1]

    def surroundings():
        return [
            {name: value for name, value in os.environ.items() if name != "KMP_DUPLICATE_LIB_OK"},  # threadpoolctl's
            list(sys.path), logging.getLogger().level, sys.excepthook, sys.stdout, sys.stderr, list(warnings.filters),
            [signal.getsignal(number) for number in range(1, 32)], multiprocessing.get_start_method(allow_none=True),
        ]

    def theirs():
        import datasets
        from models import vit
        named = [module.NAME for module in (config, utils, errors, models, vit, datasets)] + list(datasets.late())
        assert all(name.startswith("their ") for name in named), named
        for name in ("configs", "launch", "loading", "training", "weights"):
            assert name not in sys.modules, name
        return len(named)

    def load(name, folder=HOUSE, **overrides):
        model = paddle.hub.load(folder, name, source="local", **overrides)
        model.eval()
        return model
"""


@pytest.fixture
def theirs(tmp_path):
    """A function that runs a program of another folder; returns what its variable ``told`` holds at
    its end. The interpreter is a warm one, which has imported Paddle, unless another is given.
    """
    for name, text in CLASHING_MODULES.items():
        (tmp_path / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / name).write_text(text)

    def run(program, *arguments, house=ROOT, python=None):
        file = tmp_path / "theirs" / "program.py"
        file.write_text(textwrap.dedent(BEFORE) + textwrap.dedent(program))
        command = [python or warm.python(), str(file), str(house), *map(str, arguments)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=warm.environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.smoke
def test_another_program_and_ours_keep_their_modules(theirs, tmp_path):
    """Computing, loading, configurations, lazy imports, workers that are forked and spawned,
    pickles.
    """
    model = create_model("vit_digits")
    model.head.weight.set_value(np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32))
    model.eval()
    save_weights(model, tmp_path / "weights.safetensors")
    images = np.random.default_rng(1).normal(size=(3, 1, 8, 8)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    program = """
        def count(config):  # in a spawned process: what it is given was unpickled
            from paddle_vit_toolkit.models import build_model
            return type(build_model(config)).__name__, theirs()

        if __name__ == "__main__":
            before = surroundings()
            model = load("vit_digits", pretrained=sys.argv[2])
            after = surroundings()
            package = f"{HOUSE}/tools/package"  # it is there before where the toolkit is installed by -e
            assert after[1] == before[1] + [package] * (package not in before[1])
            assert before[:1] + before[2:] == after[:1] + after[2:]
            logits = model(paddle.to_tensor(np.load(sys.argv[3])))

            from paddle_vit_toolkit.config import get_config, with_values
            from paddle_vit_toolkit.datasets import get_dataloader, get_dataset
            from paddle_vit_toolkit.models import create_model
            from paddle_vit_toolkit.models.base import ImageModel
            from paddle_vit_toolkit.ops.device import tune_cpu
            from paddle_vit_toolkit.weights import load_weights
            theirs()
            assert isinstance(model, ImageModel)
            assert pickle.loads(pickle.dumps(type(model))) is type(model)
            other = create_model("vit_digits", num_classes=10)
            other.eval()
            load_weights(other, sys.argv[2])
            tune_cpu(1)
            assert paddle.allclose(other(paddle.to_tensor(np.load(sys.argv[3]))), logits, atol=1e-5)
            cfg = get_config("vit_digits", ["DATA.NUM_WORKERS", "1", "DATA.BATCH_SIZE_EVAL", "100"])
            dataset = get_dataset(cfg, "val")  # of a component that is imported when it is asked for
            seen = sum(len(batch["labels"]) for batch in get_dataloader(cfg, dataset, "val"))  # by a forked worker
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                spawned = pool.apply(count, [cfg])
            print(json.dumps([logits.numpy().tolist(), seen, len(dataset), spawned, theirs()]))
    """
    logits, seen, length, spawned, named = theirs(
        program,
        tmp_path / "weights.safetensors",
        tmp_path / "images.npy",
        python=sys.executable,
    )
    with paddle.no_grad():
        np.testing.assert_allclose(
            logits, model(paddle.to_tensor(images)).numpy(), rtol=1e-5, atol=1e-5
        )
    assert np.ptp(logits) > 1
    assert seen == length > 100
    assert (spawned, named) == (["VisionTransformer", len(CLASHING_MODULES)], len(CLASHING_MODULES))


def test_every_shipped_model_is_an_entry_with_a_text_and_overrides(theirs):
    program = """
        told = [paddle.hub.list(HOUSE, source="local"), paddle.hub.help(HOUSE, "swin_tiny_patch4_window7_224", "local")]
        told.append(paddle.hub.help(HOUSE, "predictor", "local"))
        told.append(load("resnet18", num_classes=3, image_size=(64, 32))(paddle.zeros([1, 3, 64, 32])).shape)
        again = paddle.hub.load(HOUSE, "lenet", source="local", force_reload=True, pretrained=False)
        told.append(type(again) is type(load("lenet")))
        told.append(type(load("convmixer_768_32.in1k", depth=1)) is type(load("convmixer_768_32", depth=1)))
        told.append(type(load("pvt_v2_b0", stage_depths=[1, 1, 1, 1])).__name__)
        for name, words in (
            ("lenet", {"pretrained": True}), ("vit_digits", {"num_clases": 3}), ("vit_digits", {"pretrained": "/none"}),
            ("vit_digit", {}), ("swin_tiny_patch4_window7_224", {"image_size": 230}),
        ):
            try:
                told.append(str(load(name, **words)))
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
        theirs()
        print(json.dumps(told))
    """
    entries, text, of_predictor, shape, same, tagged, called, *refused = theirs(program)
    assert entries == sorted([*list_models(), "predictor"])
    lines = text.splitlines()
    assert lines[0].startswith("Swin-T (arXiv:2103.14030)")
    assert "images [B, 3, 224, 224] float32 -> [B, 1000]" in lines[2]
    words = {line.strip().partition(":")[0] for line in lines}
    assert words >= {
        "pretrained",
        "num_classes",
        "image_size",
        "image_channels",
        "window_size",
        "droppath",
    }
    assert of_predictor.startswith("Returns a trained checkpoint that predicts as ``-eval`` does")
    assert (shape, same, tagged, called) == ([1, 3], True, True, "PyramidVisionTransformerV2")
    wanted = (
        "InputError: timm has no weights of lenet; pass pretrained=FILE, or leave it out",
        "InputError: command line: unknown key MODEL.NUM_CLASES; did you mean MODEL.NUM_CLASSES?",
        "InputError: no weights at /none",
        "RuntimeError: Cannot find callable vit_digit in hubconf",
        "InputError: IMAGE_SIZE 230 is not a multiple of PATCH_SIZE 4",
    )
    assert [line[: len(start)] for line, start in zip(refused, wanted, strict=True)] == list(wanted)


def test_a_checkpoint_answers_as_here(theirs, tmp_path):
    """On photographs; given as the weights of a named model it is that model."""
    size = [
        "DATA.IMAGE_SIZE",
        "32",
        "MODEL.EMBED_DIM",
        "16",
        "MODEL.DEPTH",
        "2",
        "MODEL.NUM_HEADS",
        "2",
    ]
    config = get_config(
        "vit_tiny_patch16_224", [*size, "MODEL.NUM_CLASSES", "2", "MODEL.HEAD_INIT_SCALE", "1.0"]
    )
    described = {METADATA: describe(config, ["bridge", "flower"]).to_json()}
    save_file(file_arrays(build_model(config)), tmp_path / "model.safetensors", described)
    files = [tmp_path / "china.jpg", tmp_path / "flower.jpg"]
    for file, photograph in zip(files, load_sample_images().images, strict=True):
        Image.fromarray(photograph).save(file)
    program = """
        predictor = paddle.hub.load(HOUSE, "predictor", source="local", path=sys.argv[2])
        sizes = {"num_classes": 2, "image_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}
        model = load("vit_tiny_patch16_224", pretrained=sys.argv[2], **sizes)
        for one, other in zip(model.parameters(), predictor.model.parameters()):
            assert paddle.equal_all(one, other)
        theirs()
        print(json.dumps(predictor(sys.argv[3:])))
    """
    found = theirs(program, tmp_path, *files)
    expected = Predictor(tmp_path)(files)
    assert [answer[0] for answer in found] == list(map(str, files))
    assert [answer[2] for answer in found] == [answer.classes for answer in expected]
    np.testing.assert_allclose(
        [a[3] for a in found], [a.probabilities for a in expected], rtol=0, atol=1e-6
    )


def test_two_copies_serve_one_program(theirs, tmp_path):
    """And each has the operators, which Paddle takes once by their names."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", "output", "data")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=left_out)
    (tmp_path / "copy" / "configs" / "vit" / "vit_own.yaml").write_text("BASE: vit_digits.yaml\n")
    program = """
        other, found = sys.argv[2], []
        for folder, name in ((HOUSE, "vit_digits"), (other, "vit_own"), (HOUSE, "vit_digits")):
            paddle.seed(0)
            model = load(name, folder, head_init_scale=1.0)
            package = type(model).__module__.partition(".")[0]
            __import__(f"{package}.ops.device")
            sys.modules[f"{package}.ops.device"].tune_cpu(1)
            found.append([package, model(paddle.ones([1, 1, 8, 8])).numpy().tolist()])
        theirs()
        print(json.dumps(found))
    """
    (first, logits), (second, others), (third, again) = theirs(program, tmp_path / "copy")
    assert first == third == "paddle_vit_toolkit"
    assert second.startswith("paddle_vit_toolkit_")
    assert again == logits
    np.testing.assert_allclose(others, logits, rtol=0, atol=1e-6)


def test_what_isnt_installed_is_named_by_paddle_hub(theirs, tmp_path):
    (tmp_path / "theirs" / "yacs.py").write_text("raise ModuleNotFoundError('gone', name='yacs')\n")
    program = """
        told = [paddle.hub.list(HOUSE, source="local")]
        try:
            load("lenet")
        except RuntimeError as error:
            told.append(str(error))
        print(json.dumps(told))
    """
    found = theirs(program, python=sys.executable)
    assert found == [["predictor"], "Missing dependencies: yacs"]


def test_the_dependencies_are_what_the_models_import():
    import hubconf

    optional = {"huggingface_hub", "threadpoolctl"}  # of hf-hub:... and of models.paddle_inference
    needed = set()
    new = {name for name in imports() if name.startswith(("models/", "weights/"))}
    while new:
        needed |= new
        new = {other for name in new for other in imports()[name]} - needed
    own = {name.partition("/")[0].removesuffix(".py") for name in imports()} | set(
        sys.stdlib_module_names
    )
    names = {
        dotted.partition(".")[0] for name in needed for dotted in imported(tree_of(name))
    } - own
    assert names == set(hubconf.dependencies) | optional
