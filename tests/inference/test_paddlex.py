"""Exports for PaddleX 3.7.2 and PaddleClas 2.6.0 hold what these read, and answer as Predictor.

Neither is installed here. What stands for them below does what their code does: the arguments that
their operations take, Paddle Inference with its default passes, their rounding of sides, their
comparison with thresholds.
"""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import yaml
from golden.formula import array
from PIL import Image

from config import get_config
from errors import InputError
from inference import Predictor
from inference.exporting import check_combination, write_export
from inference.fidelity import crops
from inference.paddlex import Probabilities, check_paddlex, file_threshold
from inference.preparation import crop_begin
from models import build_model
from settings.registry import Component, tasks
from weights import save_weights

CLASSES = ["cat", "dög", "3", "a b", "#"]
SMALL = [
    "DATA.IMAGE_SIZE",
    "32",
    "DATA.CROP_PCT",
    "0.8",
    "MODEL.PATCH_SIZE",
    "8",
    "MODEL.EMBED_DIM",
    "16",
]
SMALL += ["MODEL.DEPTH", "2", "MODEL.NUM_HEADS", "2", "MODEL.NUM_CLASSES", "5"]
THRESHOLDS = [0.5, 0.46, 0.54, 0.4, 0.6]


# ------------------------------------------------------- what stands for them


def resize_image(resize_short=None, size=None, backend="cv2", interpolation="LINEAR"):
    """``ResizeImage`` of both: with cv2 it wouldn't blur before it shrinks; sides are rounded."""
    assert backend == "pil"

    def apply(pixels):
        height, width = pixels.shape[:2]
        scale = (resize_short or 0) / min(height, width)
        to = size or (round(width * scale), round(height * scale))
        return np.asarray(
            Image.fromarray(pixels).resize(to, Image.Resampling[interpolation.upper()])
        )

    return apply


def normalize_image(mean, std, scale, order, channel_num):
    assert (order, channel_num, len(mean), len(std)) == ("", 3, 3, 3)
    return lambda pixels: (
        (pixels * np.float32(scale) - np.float32(mean)) / np.float32(std)
    ).astype("float32")


def to_chw_image():
    return lambda pixels: pixels.transpose(2, 0, 1)


OPERATIONS = {
    "ResizeImage": resize_image,
    "NormalizeImage": normalize_image,
    "ToCHWImage": to_chw_image,
}


def prepared_by_a_client(operations, pixels):
    for operation in operations:
        [(name, given)] = operation.items()
        pixels = OPERATIONS[name](**given or {})(pixels)
    return np.ascontiguousarray(pixels[None])


class PaddleX:
    """``create_model(name, model_dir=...).predict`` of PaddleX 3.7.2 on a CPU, one picture at a
    time.
    """

    def __init__(self, folder):
        settings = yaml.safe_load((folder / "inference.yml").read_text(encoding="utf-8"))
        assert set(settings) == {"Global", "Hpi", "PreProcess", "PostProcess"}
        self.operations = settings["PreProcess"]["transform_ops"]
        [(self.post, self.given)] = settings["PostProcess"].items()  # of another key it calls None
        self.name = settings["Global"]["model_name"]
        [[shape, *_]] = settings["Hpi"]["backend_configs"]["paddle_infer"][
            "trt_dynamic_shapes"
        ].values()
        assert shape == [1, 3, 32, 32]
        program = next(
            file for file in folder.glob("inference.*") if file.suffix in (".json", ".pdmodel")
        )
        config = paddle.inference.Config(str(program), str(folder / "inference.pdiparams"))
        config.disable_glog_info()
        config.enable_mkldnn()
        if program.suffix == ".json":
            config.enable_new_ir(True)
            config.enable_new_executor(True)
            config.set_optimization_level(3)  # Paddle 2.6 has none, and no PaddleX 3
        config.enable_memory_optim()
        self.predictor = paddle.inference.create_predictor(config)

    def __call__(self, pixels):
        x = prepared_by_a_client(self.operations, pixels)
        [shares] = self.predictor.run([paddle.to_tensor(x)])[0].numpy()
        names = self.given["label_list"]
        if self.post == "Topk":
            order = shares.argsort()[::-1][: self.given["topk"]]
        else:
            # of a list it takes the n-th for the n-th picture
            assert type(self.given["threshold"]) is float
            order = [k for k in shares.argsort()[::-1] if shares[k] > self.given["threshold"]]
        return {str(names[k]): float(shares[k]) for k in order}


class PaddleClas:
    """``ClsPredictor`` of PaddleClas 2.6.0, started in the folder."""

    ASKS = (
        "inference_model_dir",
        "batch_size",
        "infer_imgs",
        "use_fp16",
        "use_gpu",
        "cpu_num_threads",
        "ir_optim",
    )

    def __init__(self, folder):
        settings = yaml.safe_load((folder / "paddleclas.yml").read_text(encoding="utf-8"))
        asked = settings["Global"]
        assert set(self.ASKS) <= set(asked)
        assert asked["use_onnx"] is True  # which has no other key to read
        self.operations = settings["PreProcess"]["transform_ops"]
        post = settings["PostProcess"]
        self.post = post.pop("main_indicator")  # without it the answer is None
        [(name, self.given)] = post.items()
        assert name == self.post
        lines = (
            (folder / self.given.pop("class_id_map_file")).read_text(encoding="utf-8").splitlines()
        )
        self.names = {
            int(number): name for number, _, name in (line.partition(" ") for line in lines)
        }
        runtime = pytest.importorskip("onnxruntime")
        self.session = runtime.InferenceSession(
            str(folder / asked["inference_model_dir"] / "inference.onnx")
        )

    def __call__(self, pixels):
        x = prepared_by_a_client(self.operations, pixels)
        [[shares]] = self.session.run(None, {self.session.get_inputs()[0].name: x})
        if self.post == "Topk":
            order = shares.argsort()[-self.given["topk"] :][::-1]
        else:
            order = np.flatnonzero(shares >= self.given["threshold"])
        return {self.names[k]: float(shares[k]) for k in order.tolist()}


CLIENTS = {"paddlex": PaddleX, "paddleclas": PaddleClas}


# ------------------------------------------------------------------- answers


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    paddle.seed(3)
    model = build_model(get_config(None, SMALL))
    model.head.weight.set_value(3 * array("head", (16, 5)))
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_weights(model, file)
    (file.parent / "small.yaml").write_text("TAG: of a test\n")
    return file


def trained_and_exported(weights, target, kind, task, thresholds, *words):
    if kind == "paddleclas":
        pytest.importorskip("paddle2onnx")
    trained = Predictor(weights, str(weights.parent / "small.yaml"), [*SMALL, *words], CLASSES)
    trained.task = task
    trained.thresholds = thresholds
    found = write_export(
        trained.config, trained.model, target, CLASSES, kind, task=task, thresholds=thresholds
    )
    assert "probabilities differ from the eager ones by " in str(found)
    return trained


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("task", "thresholds"),
    [
        ("classification", []),
        ("multilabel", []),
        ("multilabel", [0.45] * 5),
        ("multilabel", THRESHOLDS),
    ],
)
@pytest.mark.parametrize("words", [["DATA.CROP_MODE", "center"], ["DATA.CROP_MODE", "squash"]])
def test_clients_give_predictors_labels_and_scores(
    kind, task, thresholds, words, weights, tmp_path
):
    trained = trained_and_exported(weights, tmp_path / "out", kind, task, thresholds, *words)
    client = CLIENTS[kind](tmp_path / "out")
    answers = set()
    # Sides whose resized length is ours, and any. (Of the others it may be a pixel more or less.)
    for image in [
        *crops(20),
        *(crops(1)[0].resize(size) for size in ((160, 80), (120, 240), (40, 40))),
    ]:
        [expected] = trained([image])
        found = client(np.asarray(image))
        near = {
            name
            for name, share in found.items()
            if any(abs(share - least) < 0.02 for least in thresholds or [0.5])
        }
        assert set(found) ^ set(expected.classes) <= near
        for name, share in zip(expected.classes, expected.probabilities, strict=True):
            assert name in near or found[name] == pytest.approx(share, abs=0.02)
        answers.add(tuple(sorted(found)))
    assert task == "classification" or len(answers) > 1


def test_paddlexs_names_choose_its_code(weights, tmp_path):
    for task, name in (
        ("classification", "CLIP_vit_base_patch16_224"),
        ("multilabel", "CLIP_vit_base_patch16_448_ML"),
    ):
        trained_and_exported(weights, tmp_path / task, "paddlex", task, [])
        assert PaddleX(tmp_path / task).name == name
        # read by the locale's encoding
        assert (tmp_path / task / "inference.yml").read_bytes().isascii()


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 33), (35, 40), (50, 32), (61, 47)])
def test_the_graph_crops_where_predictor_does(height, width):
    images = paddle.to_tensor(
        np.random.default_rng(0).normal(size=(2, 3, height, width)).astype(np.float32)
    )
    model = SimpleNamespace(image_size=(32, 32))
    cropped = Probabilities._crop(SimpleNamespace(size=model.image_size), images)
    top, left = round((height - 32) / 2), round((width - 32) / 2)
    np.testing.assert_array_equal(
        cropped.numpy(), images.numpy()[:, :, top : top + 32, left : left + 32]
    )
    assert crop_begin(paddle.to_tensor([3, 5])).tolist() == [2, 2]


def test_one_threshold_serves_where_each_class_has_its_own():
    assert file_threshold([]) == 0.5
    assert file_threshold([0.3, 0.3]) == 0.3
    assert file_threshold([0.3, 0.6]) == 0.15
    assert file_threshold([0.0, 0.6]) == 1e-9


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("words", "task", "line"),
    [
        (
            ["DATA.IMAGE_CHANNELS", "1"],
            "classification",
            "reads 8-bit RGB, but the model takes 1 channels",
        ),
        (
            ["DATA.IMAGE_DTYPE", "float32"],
            "classification",
            r"the model takes 3 channels \(DATA.IMAGE_DTYPE float32\)",
        ),
        (
            ["DATA.IMAGE_SIZE", "[32,48]"],
            "classification",
            r"can't resize images until they cover 32 x 48 pixels",
        ),
        (
            ["DATA.CROP_PCT", "1.15"],
            "classification",
            r"can't pad images \(DATA.CROP_PCT 1.15\)",
        ),
        (
            [],
            "masked",
            "is for classifiers, not for TASK masked; use -format",
        ),
    ],
)
def test_what_a_client_cant_do_is_refused(kind, words, task, line, monkeypatch):
    monkeypatch.setitem(
        tasks.components, "masked", Component("training.masked", {"columns": ""}, "", {})
    )
    if "DATA.IMAGE_CHANNELS" in words:
        words = [*words, "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"]
    with pytest.raises(InputError, match=f"^-format {kind}.*{line}"):
        check_paddlex(get_config(None, [*SMALL, *words]), kind, task)
    check_paddlex(
        get_config(None, [*SMALL, "DATA.IMAGE_SIZE", "[32,48]", "DATA.CROP_MODE", "squash"]),
        kind,
        "multilabel",
    )


def test_other_precisions_and_predictor_are_refused(weights, tmp_path):
    for kind in CLIENTS:
        for precision in ("float16", "bfloat16", "int8"):
            line = f"-format {kind} -precision {precision}: it only supports float32"
            with pytest.raises(InputError, match=line):
                check_combination(kind, precision)
    trained_and_exported(weights, tmp_path / "out", "paddlex", "classification", [])
    line = "an export of -format paddlex, which returns probabilities; use the checkpoint that it was made from"
    with pytest.raises(InputError, match=line):
        Predictor(tmp_path / "out")


def test_plain_exports_have_no_file_of_theirs(weights, tmp_path):
    """Their graphs give logits, which both would take for probabilities."""
    trained = Predictor(weights, str(weights.parent / "small.yaml"), SMALL, CLASSES)
    write_export(trained.config, trained.model, tmp_path / "out", CLASSES)
    assert not {"inference.yml", "paddleclas.yml"} & {
        file.name for file in (tmp_path / "out").iterdir()
    }
