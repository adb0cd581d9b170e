"""TO_STATIC: a graph of a segmentation model trains as its layers do."""

import numpy as np
import paddle
import pytest

import ops
from config import get_config
from models.heads import dpt
from models.layers.activations import gelu
from settings.registry import tasks
from training.setup import _trace

PLAIN = "MODEL.PATCH_SIZE 8 MODEL.EMBED_DIM 16 MODEL.DEPTH 4 MODEL.NUM_HEADS 2"
STAGES = "MODEL.EMBED_DIM 8 MODEL.STAGE_DEPTHS [1,1,1,1] MODEL.NUM_HEADS [1,2,2,4]"
# Heads, and the options of their encoders. No layer draws random numbers.
CASES = {
    "linear": f"MODEL.TYPE vit {PLAIN} HEAD.DROPOUT 0.0",
    "upernet": f"MODEL.TYPE swin {STAGES} MODEL.WINDOW_SIZE 4 HEAD.DROPOUT 0.0 HEAD.AUXILIARY True",
    "segformer": (
        "MODEL.TYPE pvtv2 MODEL.STAGE_DEPTHS [1,1,1,1] MODEL.EMBED_DIMS [8,16,16,32]"
        " MODEL.NUM_HEADS [1,2,2,4] HEAD.DROPOUT 0.0"
    ),
    "segmenter": f"MODEL.TYPE vit {PLAIN}",
    "setr_naive": f"MODEL.TYPE vit {PLAIN}",
    "setr_pup": f"MODEL.TYPE vit {PLAIN}",
    "setr_mla": f"MODEL.TYPE vit {PLAIN}",
    "dpt": f"MODEL.TYPE vit {PLAIN} HEAD.DROPOUT 0.0",
    "topformer": "MODEL.TYPE topformer MODEL.DROPPATH 0.0 HEAD.DROPOUT 0.0",
    "trans2seg": "MODEL.TYPE resnet MODEL.DEPTH 18 HEAD.STRIDE 64",
    "eomt": f"MODEL.TYPE vit {PLAIN} HEAD.NUM_QUERIES 6 HEAD.NUM_BLOCKS 2",
}


def trained(config, traced):
    """Returns the loss of a batch, and the gradients by name."""
    paddle.seed(0)
    task = tasks.choose(config)(config, ["a", "b", "c"])
    model = task.build_network()
    model.train()
    task.ignored = 255
    if model.decode_head.has_loss:
        task.head = model.decode_head
    if traced:
        _trace(model)
    side = config.DATA.IMAGE_SIZE
    count = 8 if side > 64 else 2
    rng = np.random.default_rng(0)
    batch = {
        "pixels": paddle.to_tensor(rng.integers(0, 256, (count, side, side, 3)).astype(np.uint8)),
        "mask": paddle.to_tensor(rng.integers(0, 3, (count, side, side)).astype(np.uint8)),
    }
    paddle.seed(1)
    loss = task.step(model, batch, 1)["loss"].mean()
    loss.backward()
    gradients = {
        name: value.grad.numpy()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    return loss.item(), gradients


@pytest.mark.smoke
@pytest.mark.parametrize("head", CASES)
def test_a_graph_has_the_layers_loss_and_gradients(head, monkeypatch):
    # Graphs are of Paddle's operators. The compiled ones round otherwise, which batch norms over few
    # values enlarge to parts of a thousand: as much as noise of 1e-7 in the image.
    monkeypatch.setattr(ops, "_enabled", False)
    # So do ReLUs: DPT's has many values near 0, of which a graph's rounding moves some to the other
    # side. A smooth function tests the rest.
    monkeypatch.setattr(dpt, "relu", gelu)
    options = ["TASK", "segmentation", "HEAD.NAME", head, "MODEL.NUM_CLASSES", "3"]
    # TopFormer's last maps of 64 pixels have one place, ResNet's four.
    size = "128" if head in ("topformer", "trans2seg") else "64"
    options += [*CASES[head].split(), "DATA.IMAGE_SIZE", size, "DATA.CROP_MODE", "own"]
    config = get_config(None, options)
    loss, gradients = trained(config, traced=False)
    graph_loss, graph_gradients = trained(config, traced=True)
    assert graph_loss == pytest.approx(loss, rel=1e-5)
    assert graph_gradients.keys() == gradients.keys()
    assert len(gradients) > 10
    largest = max(np.linalg.norm(gradient) for gradient in gradients.values())
    for name, gradient in gradients.items():
        # The gradient of a bias before a batch norm is rounding alone.
        allowed = 3e-4 * (np.linalg.norm(gradient) + 1e-3 * largest)
        assert np.linalg.norm(graph_gradients[name] - gradient) <= allowed, name
