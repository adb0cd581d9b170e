"""Exports of each head give the eager logits, of images of one size and of any size."""

import numpy as np
import paddle
import pytest

from config import get_config
from inference import formats
from inference.backends import RUNNERS
from models import build_model
from models.layers.conv import adaptive_mean
from models.layers.graph_sizes import bicubic_weights, bilinear_weights, means_of_regions
from models.layers.rotary import RotaryEmbedding
from models.layers.windows import _in_windows_in_graph, in_windows
from models.paddle_inference import inputs_of, save_program
from models.swin import shift_mask, shift_mask_in_graph
from weights.resize import bicubic_matrix, bilinear_matrix

SIZE = 64
# The small encoders: their options.
PLAIN = "MODEL.PATCH_SIZE 8 MODEL.EMBED_DIM 32 MODEL.DEPTH 4 MODEL.NUM_HEADS 2"
STAGES = "MODEL.EMBED_DIM 16 MODEL.STAGE_DEPTHS [2,2,2,2] MODEL.NUM_HEADS [1,2,2,4]"
ENCODERS = {
    "vit": f"MODEL.TYPE vit {PLAIN}",
    "vit_bilinear": f"MODEL.TYPE vit {PLAIN} MODEL.POS_RESIZE bilinear",
    "eva": f"MODEL.TYPE eva {PLAIN}",
    "dinov3": f"MODEL.TYPE eva {PLAIN} MODEL.ROPE_TYPE dinov3 MODEL.USE_ABS_POS_EMB False",
    "swin": f"MODEL.TYPE swin {STAGES} MODEL.WINDOW_SIZE 3",
    "swin_pad_first": f"MODEL.TYPE swin {STAGES} MODEL.WINDOW_SIZE 3 MODEL.PAD_FIRST True",
    "swin_always_partition": (
        f"MODEL.TYPE swin {STAGES} MODEL.WINDOW_SIZE 5 MODEL.PAD_FIRST True"
        " MODEL.ALWAYS_PARTITION True"
    ),
    "swinv2": f"MODEL.TYPE swinv2 {STAGES} MODEL.WINDOW_SIZE 3",
    "pvtv2": (
        "MODEL.TYPE pvtv2 MODEL.STAGE_DEPTHS [1,1,1,1] MODEL.EMBED_DIMS [8,16,16,32]"
        " MODEL.NUM_HEADS [1,2,2,4]"
    ),
    "topformer": "MODEL.TYPE topformer",
    "resnet": "MODEL.TYPE resnet MODEL.DEPTH 18",
}
# Encoders, heads, and whether their graphs take images of any size.
CASES = [
    ("vit", "linear", True),
    ("vit", "upernet", True),
    ("vit", "segmenter", True),
    ("vit", "setr_naive", True),
    ("vit", "setr_pup", True),
    ("vit", "setr_mla", True),
    ("vit", "dpt", True),
    ("vit", "eomt", True),
    ("vit_bilinear", "dpt", True),
    ("eva", "linear", True),
    ("dinov3", "linear", True),
    ("swin", "linear", True),
    ("swin_pad_first", "linear", True),
    ("swin_always_partition", "linear", True),
    ("swinv2", "linear", True),
    ("pvtv2", "segformer", True),
    ("topformer", "topformer", True),
    ("resnet", "trans2seg", False),
]


def random_model(encoder, head):
    """Returns a model with random weights, whose norms, biases and statistics are random, too."""
    options = ["TASK", "segmentation", "HEAD.NAME", head, "MODEL.NAME", "small"]
    options += [*ENCODERS[encoder].split(), "MODEL.NUM_CLASSES", "5"]
    options += ["DATA.IMAGE_SIZE", str(SIZE), "DATA.CROP_MODE", "own"]
    if head == "trans2seg":
        options += ["HEAD.STRIDE", str(SIZE)]
    paddle.seed(0)
    model = build_model(get_config(None, options))
    rng = np.random.default_rng(0)
    for name, value in model.state_dict().items():
        if name.endswith("attn_mask_probs"):
            continue
        noise = rng.normal(size=value.shape)
        if name.endswith("_variance"):
            values = np.exp(0.3 * noise)
        elif len(value.shape) == 1:
            values = value.numpy() + 0.2 * noise
        elif "embed" in name.rpartition(".")[2] or "table" in name:
            values = 0.5 * noise
        else:
            inputs = value.shape[1:] if len(value.shape) == 4 else value.shape[:1]
            values = noise / np.sqrt(np.prod(inputs))
        value.set_value(values.astype(np.float32))
    model.eval()
    return model


def run_of(model, kind, inputs, folder):
    if kind == "paddle":
        save_program(model, folder / "inference", inputs)
        return RUNNERS[kind](folder, "inference", "float32")
    onnx = pytest.importorskip("onnx", reason="the extra export isn't installed")
    graph = formats.simplify(formats.onnx_of(model, folder, inputs, "logits"), folder)
    if kind == "onnx":
        onnx.save(graph, str(folder / "model.onnx"))
    else:
        formats.save_openvino(formats.openvino_of(graph, folder), folder / "model.xml", half=False)
    return RUNNERS[kind](folder, "model", "float32")


def check(encoder, head, kind, any_size, folder):
    model = random_model(encoder, head)
    inputs = inputs_of(model)
    sizes = [(SIZE, SIZE)]
    if any_size:
        inputs = paddle.static.InputSpec([None, 3, None, None], "float32", "images")
        # The last one is smaller than some encoders compute.
        sizes += [(SIZE + 13, SIZE + 31), (SIZE - 11, SIZE + 1), (20, SIZE + 1)]
    run = run_of(model.inference_model(), kind, inputs, folder)
    rng = np.random.default_rng(1)
    for size in sizes:
        images = rng.normal(size=(2, 3, *size)).astype(np.float32)
        with paddle.no_grad():
            expected = model(paddle.to_tensor(images)).numpy()
        # The images matter.
        assert np.abs(expected[0] - expected[1]).max() > 0.02 * np.ptp(expected)
        found = run(images)
        tolerance = 1e-5 * np.ptp(expected)
        np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)
        # One pixel of Trans2Seg has two classes with equal logits, of which rounding chooses.
        second, first = np.sort(expected, axis=1)[:, -2:].swapaxes(0, 1)
        is_clear = first - second > 2 * tolerance
        assert is_clear.mean() > 0.99
        assert (found.argmax(1) == expected.argmax(1))[is_clear].all()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["paddle", "onnx"])
@pytest.mark.parametrize(("encoder", "head", "any_size"), CASES)
def test_every_head_gives_the_eager_logits(encoder, head, any_size, kind, tmp_path):
    check(encoder, head, kind, any_size, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("encoder", "head"), [("vit", "eomt"), ("swin", "linear")])
def test_openvino_gives_the_eager_logits(encoder, head, tmp_path):
    check(encoder, head, "openvino", True, tmp_path)


@pytest.mark.smoke
def test_a_plain_vits_graph_takes_images_of_any_size(tmp_path):
    check("vit", "linear", "paddle", True, tmp_path)


# ------------------------------------------------- what graphs compute of sides


def sides(*values):
    return [paddle.to_tensor([value]) for value in values]


@pytest.mark.parametrize(("old", "new"), [(8, 8), (8, 13), (8, 5), (8, 1), (1, 4)])
def test_weights_of_resizing_are_those_of_positions(old, new):
    found = bicubic_weights(old, *sides(new)).numpy()
    np.testing.assert_allclose(found, bicubic_matrix(old, new), atol=1e-6)
    found = bilinear_weights(old, *sides(new)).numpy()
    np.testing.assert_allclose(found, bilinear_matrix(old, new), atol=1e-6)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (6, 6), (9, 7), (11, 5)])
def test_means_of_regions_are_the_eager_ones(size):
    maps = paddle.to_tensor(np.random.default_rng(0).normal(size=(2, 3, 9, 7)).astype(np.float32))
    expected = adaptive_mean(maps, size).numpy()
    for given in (size, sides(*size)):
        np.testing.assert_allclose(means_of_regions(maps, given).numpy(), expected, atol=1e-6)


class Pooled(paddle.nn.Layer):
    """The means of regions of a convolution's maps."""

    def __init__(self, size):
        super().__init__()
        self.conv = paddle.nn.Conv2D(3, 4, 1)
        self.size = size

    def forward(self, images):
        return adaptive_mean(self.conv(images), self.size)


# Maps of one column are a product over one number, which oneDNN computed wrongly where a matrix was
# transposed.
@pytest.mark.parametrize("sides", [(9, 7), (1, 7), (9, 1), (1, 1)])
@pytest.mark.parametrize("size", [(1, 1), (2, 3)])
def test_means_of_a_convolutions_maps_are_the_eager_ones_in_paddle_inference(size, sides, tmp_path):
    model = Pooled(size)
    images = np.random.default_rng(0).normal(size=(2, 3, *sides)).astype(np.float32)
    inputs = paddle.static.InputSpec([None, 3, *sides], "float32", "images")
    found = run_of(model, "paddle", inputs, tmp_path)(images)
    np.testing.assert_allclose(found, model(paddle.to_tensor(images)).numpy(), atol=1e-6)


@pytest.mark.parametrize("kind", ["cat", "dinov3"])
@pytest.mark.parametrize("reference", [None, 6])
def test_angles_are_those_of_a_known_grid(kind, reference):
    rope = RotaryEmbedding(kind, (4, 4), 16, 100.0, reference, prefix=2)
    for found, expected in zip(rope._table_in_graph(sides(5, 7)), rope((5, 7)), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("size", [(9, 9), (8, 10), (2, 4), (1, 1)])
@pytest.mark.parametrize("pad_first", [False, True])
@pytest.mark.parametrize("shift", [(0, 0), (1, 1), (2, 0)])
def test_windows_and_their_masks_are_those_of_known_sides(size, pad_first, shift):
    window = (3, 4)
    rng = np.random.default_rng(0)
    maps = paddle.to_tensor(rng.normal(size=(2, *size, 5)).astype(np.float32))
    seen = []

    def layer(windows):
        seen.append(windows.numpy())
        return windows * 2 + windows.mean(1, keepdim=True)

    expected = in_windows(maps, window, layer, shift, pad_first)
    found = _in_windows_in_graph(maps, window, layer, shift, pad_first)
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
    mask = shift_mask_in_graph(sides(*size), window, shift)
    np.testing.assert_array_equal(mask.numpy(), shift_mask(size, window, shift))
