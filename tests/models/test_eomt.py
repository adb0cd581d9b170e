"""EoMT against transformers' (golden/make_eomt.py), its masks, and what doesn't fit."""

import json
import zlib

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import array
from safetensors.numpy import save_file

from config import get_config
from errors import InputError
from models import build_model
from models.heads import matching
from models.heads.eomt import DoublingConv2D
from models.heads.matching import Answers, matching_loss
from training.checkpoint import description_of
from weights import load_weights
from weights.layout import linear_weights
from weights.names import timm_names

GOLDEN = np.load(ROOT / "tests" / "golden" / "eomt.npz")
DESCRIPTION = json.loads((ROOT / "tests" / "golden" / "eomt.json").read_text())
CLASSES = 5
SIDE = 48
POINTS = 64
IGNORED = 255
OPTIONS = [
    "TASK", "segmentation", "MODEL.TYPE", "ViT", "MODEL.NUM_CLASSES", str(CLASSES), "DATA.IMAGE_SIZE", str(SIDE),
    "MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "4", "MODEL.NUM_HEADS", "2",
    "MODEL.INIT_VALUES", "1.0", "MODEL.REG_TOKENS", "2", "MODEL.NO_EMBED_CLASS", "True",
    "HEAD.NAME", "eomt", "HEAD.NUM_BLOCKS", "2", "HEAD.NUM_QUERIES", "6", "DATA.CROP_MODE", "squash", "DATA.CROP_PCT", "1.0",
]  # fmt: skip


# As in golden/make_eomt.py, which needs torch.
def values(name, shape):
    if name == "attn_mask_probs":
        return np.ones(shape, np.float32)
    if name == "criterion.empty_weight":
        return np.float32([1.0] * (shape[0] - 1) + [0.1])
    normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        normal = 0.2 * normal + ("norm" in name and "weight" in name) + ("lambda" in name) * 0.5
    elif "token" in name or "position" in name or name == "query.weight":
        normal = normal * 0.5
    else:
        normal = normal * 1.5 * np.prod(shape[1:]) ** -0.5
    return normal.astype(np.float32)


def points(shape):
    index = np.arange(1, np.prod(shape) + 1, dtype=np.float64)
    return paddle.to_tensor((index * 0.7548776662466927 % 1).reshape(shape).astype(np.float32))


def masks():
    rows, columns = np.mgrid[:SIDE, :SIDE]
    first = np.where(rows < 20, 0, np.where(columns < 30, 3, 4))
    second = np.where((rows - 24) ** 2 + (columns - 20) ** 2 < 200, 1, 3)
    return np.stack([first, second]).astype(np.uint8)


def images():
    return paddle.to_tensor(array("images", (2, 3, SIDE, SIDE)) * 5)


def arrays():
    return {name: values(name, tuple(shape)) for name, shape in DESCRIPTION["shapes"].items()}


@pytest.fixture
def model(tmp_path):
    """The model with transformers' weights, in evaluation mode."""
    save_file(arrays(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(DESCRIPTION["config"]))
    model = build_model(get_config(None, OPTIONS))
    load_weights(model, tmp_path)
    model.eval()
    return model


def answers_of(model, pixels):
    """Returns the head's answers, as it computes them in the model's mode."""
    return model.decode_head.features(model.encoder, pixels, []).answers


def within(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(found, expected, atol=tolerance * np.ptp(expected), rtol=0)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["masked", "plain"])
def test_answers_and_scores(model, mode):
    if mode == "plain":
        model.decode_head.attn_mask_probs.set_value(np.zeros(2, np.float32))
    answers = answers_of(model, images())
    assert len(answers) == (3 if mode == "masked" else 1)
    for layer, (mask_logits, class_logits) in enumerate(answers):
        within(mask_logits.numpy(), GOLDEN[f"{mode}/masks/{layer}"])
        within(class_logits.numpy(), GOLDEN[f"{mode}/classes/{layer}"])
    logits = model(images())
    assert list(logits.shape) == [2, CLASSES, SIDE, SIDE]
    within(logits.exp().numpy()[:, :, ::3, ::3], GOLDEN[f"{mode}/scores"])
    # The images have an effect.
    assert np.abs(np.diff(GOLDEN[f"{mode}/scores"], axis=0)).max() > 0.1


@pytest.mark.smoke
def test_loss_and_gradients(model, monkeypatch):
    monkeypatch.setattr(paddle, "rand", points)
    model.train()
    losses = []
    # Points differ by the number of images, so each is a batch of its own, as in the golden file.
    for image, mask in zip(images().split(2), paddle.to_tensor(masks()).split(2), strict=True):
        loss = matching_loss(model(image), mask, IGNORED, POINTS)
        loss.sum().backward()
        losses.append(loss.item())
    np.testing.assert_allclose(losses, GOLDEN["losses"], rtol=1e-5)

    stored = {
        name.removeprefix("grad/"): GOLDEN[name] for name in GOLDEN if name.startswith("grad/")
    }
    expected = timm_names(model.weight_names, stored, "torch", list(model.state_dict()))
    transposed = linear_weights(model)
    parameters = dict(model.named_parameters())
    assert expected.keys() == parameters.keys()
    # A gradient whose terms cancel out is only rounding.
    least = 2e-2 * max(np.ptp(gradient) for gradient in expected.values())
    for name, gradient in expected.items():
        found = parameters[name].grad.numpy()
        found = found.T if name in transposed else found
        atol = 1e-5 * max(np.ptp(gradient), least)
        np.testing.assert_allclose(found, gradient, atol=atol, rtol=0, err_msg=name)


def test_names_of_the_authors(model, tmp_path):
    own = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    transposed = linear_weights(model)
    of_authors = {}
    for name, value in own.items():
        renamed = name.replace("decode_head.", "network.")
        renamed = renamed.replace("encoder.", "network.encoder.backbone.")
        of_authors[renamed] = np.ascontiguousarray(value.T if name in transposed else value)
    of_authors["criterion.empty_weight"] = np.ones(CLASSES + 1, np.float32)
    of_authors["network.encoder.pixel_mean"] = np.ones((1, 3, 1, 1), np.float32)
    save_file(of_authors, tmp_path / "authors.safetensors")
    fresh = build_model(get_config(None, OPTIONS))
    load_weights(fresh, tmp_path / "authors.safetensors")
    for name, tensor in fresh.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), own[name], err_msg=name)


def test_the_loss_of_an_image_depends_on_no_other(model, monkeypatch):
    def rand(shape):
        """Returns the same points for each image and each mask."""
        return points((1, *shape[1:])).tile([shape[0], 1, 1])

    monkeypatch.setattr(paddle, "rand", rand)
    model.train()
    outputs = model(images())
    mask = paddle.to_tensor(masks())

    def loss(rows):
        chosen = [Answers(one.masks[rows], one.classes[rows]) for one in outputs]
        return matching_loss(chosen, mask[rows], IGNORED, POINTS).numpy()

    both = loss(slice(0, 2))
    np.testing.assert_allclose(both[:1], loss(slice(0, 1)), rtol=1e-6)
    np.testing.assert_allclose(both[1:], loss(slice(1, 2)), rtol=1e-6)
    assert abs(both[0] - both[1]) > 0.1


def test_pixels_without_a_class_count_nowhere(model):
    """An image's border without a class, whatever the answers are there, changes no loss."""
    model.train()
    outputs = model(images())
    mask = masks()
    mask[:, :, SIDE // 2 :] = IGNORED

    def loss_and_gradient(added):
        masks_there = outputs[0].masks.detach().clone()
        # Not the columns beside the border, which points on its left read, too.
        masks_there[:, :, :, 7:] += added
        masks_there.stop_gradient = False
        answers = [Answers(masks_there, outputs[0].classes.detach())]
        paddle.seed(3)
        loss = matching_loss(answers, paddle.to_tensor(mask), IGNORED, 512)
        loss.sum().backward()
        return loss.numpy(), masks_there.grad.numpy()

    plain, gradient = loss_and_gradient(0.0)
    changed, _ = loss_and_gradient(50.0)
    np.testing.assert_allclose(plain, changed, rtol=1e-6)
    assert gradient[:, :, :, :6].any()
    assert not gradient[:, :, :, 7:].any()


def test_an_image_without_a_class_has_no_loss(model):
    model.train()
    outputs = model(images())
    mask = masks()
    mask[0] = IGNORED
    losses = matching_loss(outputs, paddle.to_tensor(mask), IGNORED, POINTS)
    assert losses[0].item() == 0
    assert losses[1].item() > 1
    nothing = matching_loss(outputs, paddle.full([2, SIDE, SIDE], IGNORED), IGNORED, POINTS)
    nothing.sum().backward()
    assert not nothing.any().item()
    # Other processes wait for a gradient of each parameter.
    assert all(parameter.grad is not None for parameter in model.decode_head.parameters())
    assert not any(parameter.grad.any().item() for parameter in model.parameters())


def test_more_classes_than_queries(model):
    model.train()
    outputs = [Answers(one.masks[:, :2], one.classes[:, :2]) for one in model(images())]
    loss = matching_loss(outputs, paddle.to_tensor(masks()), IGNORED, POINTS)
    assert np.isfinite(loss.numpy()).all()


def test_masks_are_given_to_the_answers_that_have_them():
    """A perfect answer, its queries in any order, has next to no loss."""
    mask = masks()
    order = [[2, 0, 5], [4, 1]]
    mask_logits = np.full((2, 6, SIDE, SIDE), -40, np.float32)
    class_logits = np.zeros((2, 6, CLASSES + 1), np.float32)
    class_logits[:, :, -1] = 40
    for image, queries in enumerate(order):
        for query, label in zip(queries, np.unique(mask[image]), strict=True):
            mask_logits[image, query][mask[image] == label] = 40
            class_logits[image, query, label] = 80
    perfect = Answers(paddle.to_tensor(mask_logits), paddle.to_tensor(class_logits))
    loss = matching_loss([perfect], paddle.to_tensor(mask), IGNORED, 2048)
    # Points beside the border between two masks are between 0 and 1.
    assert loss.numpy().max() < 8
    moved = Answers(perfect.masks[:, [1, 2, 3, 4, 5, 0]], perfect.classes)
    assert matching_loss([moved], paddle.to_tensor(mask), IGNORED, 2048).numpy().min() > 20


def test_points_are_a_function_of_the_seed(model):
    model.train()
    outputs = model(images())
    losses = []
    for seed in (1, 1, 2):
        paddle.seed(seed)
        losses.append(matching_loss(outputs, paddle.to_tensor(masks()), IGNORED, 512).numpy())
    np.testing.assert_array_equal(losses[0], losses[1])
    assert (losses[0] != losses[2]).all()


def test_equal_costs_and_costs_that_are_not_finite():
    costs = np.zeros((1, 3, 3), np.float32)
    classes = np.array([[2, 4, -1]])
    pairs = matching._assigned(costs, classes)
    assert pairs.queries.tolist() == [0, 1]
    assert pairs.classes.tolist() == [2, 4]
    costs[0, :, 0] = np.nan
    costs[0, 1, 1] = np.inf
    pairs = matching._assigned(costs, classes)
    assert sorted(zip(pairs.queries, pairs.classes, strict=True)) == [(1, 2), (2, 4)]


def test_masks_vanish_block_by_block(model):
    """The steps of the authors' configurations for four and for three blocks, as shares."""
    head = model.decode_head
    for share, expected in [
        (0, [1, 1]),
        (0.25, [0.5**0.9, 1]),
        (0.5, [0, 1]),
        (0.75, [0, 0.5**0.9]),
    ]:
        head.after_update(share)
        np.testing.assert_allclose(head.attn_mask_probs.numpy(), expected, rtol=1e-6)
    head.after_update(0.9)
    assert not head.attn_mask_probs.any().item()
    # They are stored with the weights.
    assert "decode_head.attn_mask_probs" in model.state_dict()


def test_an_evaluation_masks_the_same_queries_each_time(model):
    head = model.decode_head
    head.attn_mask_probs.set_value(np.float32([0.5, 0.5]))
    first, second = (model(images()).numpy() for _ in range(2))
    np.testing.assert_array_equal(first, second)
    seen = []
    for probability in (0.0, 0.5, 1.0):
        head.attn_mask_probs.set_value(np.float32([probability] * 2))
        tokens = paddle.zeros([1, 3 + 36 + 6, 16])
        mask_logits = paddle.full([1, 6, 12, 12], -1.0)
        model.encoder.patch_embed.last_grid = (6, 6)
        mask = head._attention_mask(model.encoder, tokens, mask_logits, 0).numpy()[0]
        # Only queries are masked, and only from places.
        assert not mask[:39].any()
        assert not mask[39:, :3].any()
        assert not mask[39:, 39:].any()
        rows = mask[39:, 3:39]
        assert ((rows == 0) | (rows == -1e9)).all()
        seen.append(int((rows[:, 0] < 0).sum()))
    # Of 0, 0.62, 0.24, 0.85, 0.47 and 0.09, so many are below the probability.
    assert seen == [0, 4, 6]


def test_doubling_is_a_transposed_convolution():
    layer = DoublingConv2D(3, 5)
    x = paddle.to_tensor(array("x", (2, 4, 6, 3)))
    expected = paddle.nn.functional.conv2d_transpose(
        x.transpose([0, 3, 1, 2]), layer.weight, layer.bias, stride=2
    )
    within(layer(x).numpy(), expected.transpose([0, 2, 3, 1]).numpy(), 1e-6)


def test_images_of_other_sizes(model):
    logits = model(paddle.to_tensor(array("wide", (1, 3, 40, 70)) * 5))
    assert list(logits.shape) == [1, CLASSES, 40, 70]
    assert np.isfinite(logits.numpy()).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["HEAD.NUM_BLOCKS", "5"],
            "HEAD.NUM_BLOCKS is 5, but the encoder has only 4 blocks",
        ),
        (
            ["HEAD.INDICES", "[1]"],
            "HEAD.INDICES is [1], but HEAD.NAME eomt runs the encoder's blocks",
        ),
        (["MODEL.BLOCK", "parallel"], "needs an encoder whose attention supports masks"),
        (["MODEL.GLOBAL_POOL", "avg"], "reads normalised tokens"),
        (["MODEL.PATCH_DROP", "0.1"], "MODEL.PATCH_DROP is above 0"),
        (["METHOD.LOSS", "ohem"], "METHOD.LOSS has no effect with HEAD.NAME eomt"),
        (["METHOD.DICE", "1.0"], "METHOD.DICE has no effect with HEAD.NAME eomt"),
    ],
)
def test_what_does_not_fit(options, message):
    with pytest.raises(InputError) as error:
        build_model(get_config(None, [*OPTIONS, *options]))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_rotary_encoder(tmp_path):
    """Queries aren't rotated: their order has no effect."""
    options = [*OPTIONS[:2], "MODEL.TYPE", "Eva", *OPTIONS[4:16], "MODEL.GLOBAL_POOL", "token"]
    options += ["MODEL.ROPE_TYPE", "dinov3", "HEAD.NAME", "eomt", "HEAD.NUM_BLOCKS", "2"]
    options += ["HEAD.NUM_QUERIES", "6", *OPTIONS[-4:]]
    model = build_model(get_config(None, options))
    for name, tensor in model.state_dict().items():
        if name != "decode_head.attn_mask_probs":
            tensor.set_value(values(name, tuple(tensor.shape)))
    model.eval()
    before = model(images()).numpy()
    assert np.abs(np.diff(before, axis=0)).max() > 0.1
    queries = model.decode_head.q.weight
    queries.set_value(queries.numpy()[::-1].copy())
    within(model(images()).numpy(), before)
    places = answers_of(model, images())
    assert len(places) == 3


def test_weights_of_transformers_describe_themselves(model, tmp_path):
    """As tue-mps/ade20k_semantic_eomt_large_512, with its preprocessor's settings."""
    preprocessor = {
        "do_normalize": True, "do_pad": False, "do_rescale": True, "do_resize": True, "do_split_image": True,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        "image_processor_type": "EomtImageProcessor", "resample": 2, "rescale_factor": 1 / 255,
        "size": {"longest_edge": None, "shortest_edge": SIDE},
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    description = description_of(tmp_path)
    assert description.task == "segmentation"
    config = description.to_config()
    assert config.DATA.CROP_MODE == "short"
    assert config.DATA.INTERPOLATION == "bilinear"
    assert config.DATA.IMAGENET_MEAN == [0.485, 0.456, 0.406]
    assert config.DATA.IMAGE_SIZE == SIDE
    assert config.HEAD.STRIDE == [SIDE, SIDE]
    again = build_model(config)
    load_weights(again, tmp_path)
    again.eval()
    np.testing.assert_array_equal(again(images()).numpy(), model(images()).numpy())

    (tmp_path / "config.json").write_text(
        json.dumps(DESCRIPTION["config"] | {"num_upscale_blocks": 3})
    )
    with pytest.raises(InputError, match="num_upscale_blocks is 3, only 1 is supported"):
        description_of(tmp_path)
