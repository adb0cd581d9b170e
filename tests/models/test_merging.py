"""Token merging against NumPy, and what it must not change."""

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F

import ops
from config import get_config, with_values
from errors import InputError
from inference.backends import RUNNERS, STEMS
from inference.exporting import write_export
from inference.visualization.attention import attention, rollout
from inference.visualization.cam import cam
from models import build_model
from models.layers.merging import Merging, match_tokens, merge_tokens
from models.vit import VisionTransformer

SIZES = {"image_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
# Options of a ViT, and the number of its tokens before the patches.
MODELS = {
    "token": ({}, 1),
    "registers": ({"reg_tokens": 3, "no_embed_class": True}, 4),
    "avg": ({"global_pool": "avg"}, 1),
    "map": ({"global_pool": "map", "class_token": False}, 0),
    "token_avg": ({"global_pool": "token_avg"}, 1),
    "distilled": ({"distilled": True}, 2),
    "qk_norm": ({"qk_norm": True, "init_values": 0.5}, 1),
    "swiglu": ({"act": "swiglu", "fc_norm": True, "global_pool": "avg"}, 1),
    "prompts": ({"prompt_tokens": 2, "prompt_deep": True}, 3),
    "odd": ({"image_size": 40, "patch_size": 8}, 1),
}


def make(name, merged, seed=0):
    """A model with random weights, in evaluation mode, and its images."""
    paddle.seed(seed)
    options, _ = MODELS[name]
    arguments = SIZES | {"num_classes": 5} | options
    model = VisionTransformer(merge_tokens=merged, **arguments)
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        noise = rng.normal(size=parameter.shape).astype(np.float32)
        parameter.set_value(parameter + 0.3 * paddle.to_tensor(noise))
    model.eval()
    side = arguments["image_size"]
    images = rng.normal(size=(3, 3, side, side)).astype(np.float32)
    return model, paddle.to_tensor(images)


@pytest.fixture(params=["operators", "plain"])
def path(request):
    """Both the compiled operators and Paddle's own compute it."""
    if request.param == "operators":
        if not ops.load():
            pytest.skip("the operators aren't compiled")
        yield request.param
        return
    ops.enable(False)
    try:
        yield request.param
    finally:
        ops.enable(True)


# ------------------------------------------------------------------ a reference, from the paper


def reference_match(keys, merged, prefix):
    """The groups of tokens that become one, in the order of the merged tokens. keys [N, d]."""
    patches = list(range(prefix, len(keys)))
    even = patches[::2]
    odd = patches[1::2]
    unit = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12)
    edges = []
    for place, token in enumerate(even):
        similarities = unit[odd] @ unit[token]
        best = int(np.argmax(similarities))
        edges.append((-similarities[best], place, token, odd[best]))
    leaving = {token: partner for _, _, token, partner in sorted(edges)[:merged]}
    groups = [[token] for token in range(prefix)]
    groups += [[token] for token in even if token not in leaving]
    groups += [[token for token in [*leaving, partner] if leaving.get(token, partner) == partner]
               for partner in odd]  # fmt: skip
    return groups


def layer_norm(x, norm):
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    scaled = (x - mean) / np.sqrt(variance + norm._epsilon)
    return scaled * norm.weight.numpy() + norm.bias.numpy()


def reference(model, image, merged, prefix):
    """The tokens after all blocks, for one image: (tokens, size of each, its patches)."""
    with paddle.no_grad():
        x = model._embed(image[None]).numpy()[0].astype(np.float64)
    sizes = np.ones(len(x))
    members = [[token] for token in range(len(x))]
    for block in model.blocks:
        attn = block.attn
        normed = layer_norm(x, block.norm1)
        qkv = normed @ attn.qkv.weight.numpy() + attn.qkv.bias.numpy()
        q, k, v = np.split(qkv.reshape(len(x), 3, attn.num_heads, -1).transpose(1, 2, 0, 3), 3)
        q, k, v = q[0], k[0], v[0]
        scores = q @ k.transpose(0, 2, 1) * attn.head_dim**-0.5 + np.log(sizes)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = (weights @ v).transpose(1, 0, 2).reshape(len(x), -1)
        x = x + out @ attn.proj.weight.numpy() + attn.proj.bias.numpy()
        pairs = min(merged, (len(x) - prefix) // 2)
        groups = reference_match(k.mean(0), pairs, prefix)
        x = np.stack([(x[g] * sizes[g, None]).sum(0) / sizes[g].sum() for g in groups])
        members = [[one for token in g for one in members[token]] for g in groups]
        sizes = np.array([sizes[g].sum() for g in groups])
        hidden = (
            layer_norm(x, block.norm2) @ block.mlp.fc1.weight.numpy() + block.mlp.fc1.bias.numpy()
        )
        from scipy.special import erf

        hidden = hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))
        x = x + hidden @ block.mlp.fc2.weight.numpy() + block.mlp.fc2.bias.numpy()
    return x, sizes, members


@pytest.mark.smoke
@pytest.mark.parametrize("merged", [1, 3, 8, 100])
@pytest.mark.parametrize("name", ["avg", "odd", "registers"])
def test_tokens_are_the_references(path, name, merged):
    model, images = make(name, merged)
    prefix = MODELS[name][1]
    with paddle.no_grad():
        features = model.forward_features(images).numpy()
    for image, found in zip(images, features, strict=True):
        tokens, sizes, members = reference(model, image, merged, prefix)
        assert sizes.sum() == len(found)
        expected = np.empty_like(found)
        for token, group in zip(tokens, members, strict=True):
            expected[group] = token
        if not isinstance(model.norm, paddle.nn.Identity):
            expected = layer_norm(expected, model.norm)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected))
        # At least one patch, or one of a pair, is left.
        assert len(tokens) - prefix >= 1


def partition(numbers):
    """The sets of places that have the same number."""
    return {frozenset(np.flatnonzero(numbers == number).tolist()) for number in np.unique(numbers)}


@pytest.mark.smoke
@pytest.mark.parametrize("merged", [1, 3, 100])
@pytest.mark.parametrize("name", ["avg", "odd", "registers", "map", "distilled"])
def test_merged_patches_are_the_references_groups(path, name, merged):
    model, images = make(name, merged)
    prefix = MODELS[name][1]
    side = model.patch_embed.grid_size[0]
    found = model.merged_patches(images, 2).numpy()
    assert found.shape == (3, side, side)
    for image, tokens in zip(images, found, strict=True):
        _, _, members = reference(model, image, merged, prefix)
        expected = {frozenset(place - prefix for place in group) for group in members[prefix:]}
        assert partition(tokens.ravel()) == expected


def test_merged_patches_of_the_first_blocks_are_parts_of_those_of_the_last():
    model, images = make("avg", 3)
    counts = []
    finer = {frozenset([place]) for place in range(16)}
    for block in range(3):
        groups = partition(model.merged_patches(images, block).numpy()[1].ravel())
        assert all(any(part <= group for group in groups) for part in finer)
        counts.append(len(groups))
        finer = groups
    assert counts == [13, 10, 7]
    model.merge_tokens = 0
    assert len(np.unique(model.merged_patches(images, 2).numpy()[0])) == 16


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_heads_over_all_places(path, name):
    model, images = make(name, 3)
    with paddle.no_grad():
        logits = model(images).numpy()
        whole = model.forward_head(model.forward_features(images)).numpy()
    np.testing.assert_allclose(logits, whole, atol=2e-6 * np.ptp(whole))
    plain, _ = make(name, 0)
    with paddle.no_grad():
        assert np.abs(plain(images).numpy() - logits).max() > 1e-3 * np.ptp(logits)


@pytest.mark.parametrize("name", MODELS)
def test_none_merged_gives_the_same_bits(name):
    model, images = make(name, 0)
    again, _ = make(name, 5)
    again.merge_tokens = 0
    assert model._shared() is None
    with paddle.no_grad():
        assert (model(images).numpy() == again(images).numpy()).all()


def test_both_ways_to_compute_agree():
    if not ops.load():
        pytest.skip("the operators aren't compiled")
    rng = np.random.default_rng(0)
    for tokens, prefix, merged in ((9, 1, 4), (10, 1, 4), (12, 0, 6), (7, 5, 1), (3, 1, 1)):
        keys = paddle.to_tensor(rng.normal(size=(4, tokens, 12)).astype(np.float32))
        sizes = paddle.to_tensor(rng.integers(1, 9, (4, tokens)).astype(np.float32))
        x = paddle.to_tensor(rng.normal(size=(4, tokens, 5)).astype(np.float32))
        ways = []
        for enabled in (True, False):
            ops.enable(enabled)
            match = match_tokens(keys, sizes, 4, 2, 4, prefix, merged)
            ways.append([*match, merge_tokens(x, match, tokens - merged)])
        ops.enable(True)
        for one, other in zip(*ways, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6)
        targets, weights, sums = (each.numpy() for each in ways[0][:3])
        assert (np.sort(np.unique(targets[0])) == np.arange(tokens - merged)).all()
        for row in range(4):
            totals = np.bincount(targets[row], weights[row])
            np.testing.assert_allclose(totals, 1, atol=1e-6)
            assert sums[row].sum() == pytest.approx(sizes.numpy()[row].sum())


def test_equal_tokens_are_merged_from_the_first(path):
    keys = paddle.ones([1, 8, 6])
    match = match_tokens(keys, None, 0, 2, 3, 0, 2)
    # Places 0 and 2 go to the first odd place; 4 and 6 stay.
    assert match.targets.numpy().tolist() == [[2, 2, 2, 3, 0, 4, 1, 5]]
    assert match.sizes.numpy().tolist() == [[1, 1, 3, 1, 1, 1]]


def test_keys_of_zeros_are_merged_like_others(path):
    match = match_tokens(paddle.zeros([2, 5, 4]), None, 0, 1, 4, 1, 2)
    assert match.targets.numpy().tolist() == [[0, 1, 1, 1, 2]] * 2


def test_a_batch_changes_no_answer(path):
    model, images = make("registers", 4)
    with paddle.no_grad():
        together = model(images).numpy()
        alone = np.concatenate([model(images[i : i + 1]).numpy() for i in range(3)])
    np.testing.assert_allclose(together, alone, atol=1e-6 * np.ptp(together))


def test_gradients_are_those_of_finite_differences(path):
    model, images = make("avg", 3)
    parameter = model.blocks[0].mlp.fc1.weight
    loss = (model(images) * paddle.arange(5, dtype="float32")).sum()
    loss.backward()
    gradient = parameter.grad.numpy()
    direction = gradient / np.linalg.norm(gradient)
    step = 1e-2
    values = []
    before = parameter.numpy()
    for sign in (1, -1):
        parameter.set_value(before + sign * step * direction)
        with paddle.no_grad():
            values.append(float((model(images) * paddle.arange(5, dtype="float32")).sum().item()))
    expected = (values[0] - values[1]) / (2 * step)
    assert np.linalg.norm(gradient) == pytest.approx(expected, rel=0.02)


def test_recompute_gives_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        model, images = make("avg", 3)
        model.recompute = recompute
        model.train()
        model(images).sum().backward()
        gradients.append(model.blocks[0].attn.qkv.weight.grad.numpy())
    np.testing.assert_allclose(*gradients, atol=1e-6 * np.abs(gradients[0]).max())


def test_a_traced_graph_computes_the_same():
    model, images = make("avg", 3)
    with paddle.no_grad():
        expected = model(images).numpy()
        traced = paddle.jit.to_static(make("avg", 3)[0], full_graph=True)
        np.testing.assert_allclose(traced(images).numpy(), expected, atol=1e-5 * np.ptp(expected))


def test_intermediates_have_all_places():
    model, images = make("registers", 4)
    with paddle.no_grad():
        features, maps = model.forward_intermediates(images)
    assert [list(each.shape) for each in maps] == [[3, 24, 4, 4]] * 3
    assert list(features.shape) == [3, 4 + 16, 24]
    # Merged places have one value.
    assert len(np.unique(maps[-1].numpy()[0, 0])) == 16 - 3 * 4


def test_pictures_of_places_refuse_merged_tokens():
    model, images = make("token", 3)
    for draw in (attention, rollout, cam):
        with pytest.raises(
            InputError, match="MODEL.MERGE_TOKENS is 3, whose tokens aren't positions"
        ):
            draw(model, images[:1])
    # A classifier of the mean reads all places.
    model, images = make("avg", 3)
    assert cam(model, images[:1]).shape == (4, 4)


def test_half_precision_merges_the_same_patches():
    model, images = make("avg", 3)
    with paddle.no_grad():
        expected = model(images).numpy()
        with paddle.amp.auto_cast(dtype="bfloat16"):
            found = model(images).astype("float32").numpy()
    np.testing.assert_allclose(found, expected, atol=0.1 * np.ptp(expected))


def steps(merged, count, half):
    """The losses of some training steps, and the logits after them; with ``half`` the factors of all
    products are rounded to bfloat16, as the operators do on a CPU that has it.
    """

    def rounded(function):
        def product(x, y, *args, **named):
            x, y = (each.astype("bfloat16").astype("float32") for each in (x, y))
            return function(x, y, *args, **named)

        return product

    with pytest.MonkeyPatch.context() as patch:
        if half:
            patch.setattr(paddle, "matmul", rounded(paddle.matmul))
            patch.setattr(F, "linear", rounded(F.linear))
        model, images = make("avg", merged)
        model.train()
        optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
        labels = paddle.to_tensor([0, 3, 4])
        losses = []
        for _ in range(count):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad(False)
            losses.append(loss.item())
        model.eval()
        with paddle.no_grad():
            logits = model(images).numpy()
    return losses, logits


def test_products_of_bfloat16_train_and_evaluate_close_to_float32():
    ops.enable(False)
    try:
        losses, logits = steps(merged=3, count=20, half=False)
        halved_losses, halved_logits = steps(merged=3, count=20, half=True)
    finally:
        ops.enable(True)
    assert losses[-1] < 0.5 * losses[0]
    assert np.isfinite(halved_losses).all()
    assert halved_losses != losses
    assert halved_losses == pytest.approx(losses, abs=0.05 * losses[0])
    np.testing.assert_allclose(halved_logits, logits, atol=0.1 * np.ptp(logits))


def test_half_of_the_patches_at_most_are_merged():
    merging = Merging(2, 5)
    assert [merging.pairs_of(tokens) for tokens in (20, 12, 11, 4, 3, 2)] == [5, 5, 4, 1, 0, 0]


@pytest.mark.parametrize("kind", ["paddle", "onnx", "openvino"])
def test_exports_merge_alike(tmp_path, kind):
    if kind != "paddle":
        pytest.importorskip("paddle2onnx", reason="the extra export isn't installed")
    config = get_config("vit_digits", ["MODEL.MERGE_TOKENS", "2", "MODEL.NUM_CLASSES", "10"])
    config = with_values(config, EVAL=True)
    paddle.seed(0)
    model = build_model(config)
    model.eval()
    write_export(config, model, tmp_path / kind, [], kind=kind)
    images = np.random.default_rng(0).normal(size=(5, config.DATA.IMAGE_CHANNELS, 8, 8))
    images = images.astype(np.float32)
    found = RUNNERS[kind](tmp_path / kind, STEMS[kind], "float32")(images)
    with paddle.no_grad():
        expected = model(paddle.to_tensor(images)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected))


@pytest.mark.parametrize("options", [{"block": "parallel"}, {"attention": "differential"}])
def test_blocks_of_another_kind_refuse_it(options):
    with pytest.raises(
        InputError, match="MERGE_TOKENS is 2, expected 0, because only BLOCK serial with"
    ):
        VisionTransformer(merge_tokens=2, embed_dim=32, num_heads=2, **options)


def test_a_task_without_a_classifier_refuses_it():
    with pytest.raises(InputError, match="MODEL.MERGE_TOKENS"):
        get_config("mae_vit_base_patch16_224", ["MODEL.MERGE_TOKENS", "2"])
