"""CycleMLP's shifted channels, ends and errors; PaddleViT's own code computes its logits and
gradients in test_paddlevit_models.py.
"""

import numpy as np
import paddle
import pytest
from golden.paddlevit_models import array
from support.small_models import small_cyclemlp

from config import get_config
from errors import InputError
from models import build_model
from models.cyclemlp import CycleFC, CycleMLP
from weights import load_weights
from weights.formats import write_weights
from weights.layout import file_name


@pytest.mark.parametrize("axis", [0, 1])
def test_each_channel_is_read_from_its_place(axis):
    paddle.seed(0)
    layer = CycleFC(7, axis)
    layer.bias.set_value(paddle.randn([7]))
    x = np.random.RandomState(0).standard_normal((2, 5, 6, 7)).astype(np.float32)
    shifted = np.zeros_like(x)
    for channel in range(7):
        step = (channel + 1) % 3 - 1
        for place in range(x.shape[1 + axis]):
            if 0 <= place + step < x.shape[1 + axis]:
                to = [slice(None), slice(None), slice(None), channel]
                to[1 + axis] = place
                source = list(to)
                source[1 + axis] = place + step
                shifted[tuple(to)] = x[tuple(source)]
    expected = shifted @ layer.weight.numpy()[:, :, 0, 0].T + layer.bias.numpy()
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), expected, atol=1e-5)


def test_the_first_three_channels_stay_or_come_from_either_side():
    layer = CycleFC(3, axis=1)
    layer.weight.set_value(paddle.eye(3).reshape([3, 3, 1, 1]))
    row = paddle.arange(1, 5, dtype="float32").reshape([1, 1, 4, 1]).tile([1, 1, 1, 3])
    assert layer(row).numpy()[0, 0].T.tolist() == [[1, 2, 3, 4], [2, 3, 4, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("ending", ["safetensors", "pdparams"])
def test_offsets_in_files_of_others_are_left_out(tmp_path, ending):
    model = small_cyclemlp()
    arrays = {}
    for name, tensor in model.state_dict().items():
        values = array(file_name(name), tuple(tensor.shape))
        arrays[file_name(name)] = values
    offsets = {
        f"{name}.offset": np.zeros((1, 2 * layer.weight.shape[0], 1, 1), np.float32)
        for name, layer in model.named_sublayers()
        if isinstance(layer, CycleFC)
    }
    assert len(offsets) == 10
    linear = ("fc1.weight", "fc2.weight", "proj.weight", "mlp_c.weight", "head.weight")
    stored = dict(arrays)
    if ending == "safetensors":
        for name, values in arrays.items():
            if name.endswith(linear) and values.ndim == 2:
                stored[name] = np.ascontiguousarray(values.T)
    file = tmp_path / f"theirs.{ending}"
    write_weights(file, stored | offsets)
    assert not load_weights(model, file).fresh
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), arrays[file_name(name)], err_msg=name)


def test_initialisation_is_the_authors():
    paddle.seed(0)
    model = CycleMLP(64, embed_dims=(64, 64, 64, 64))
    block = model.network[0][0]
    for layer in (block.attn.sfc_h, block.attn.mlp_c, block.attn.reweight.fc1, block.mlp.fc1):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.1)
    assert not block.attn.sfc_w.bias.numpy().any()
    bound = (49 * 3) ** -0.5
    values = np.abs(model.patch_embed.proj.weight.numpy())
    assert 0.95 * bound < values.max() <= bound * (1 + 1e-6)
    assert np.abs(model.network[1].proj.bias.numpy()).max() <= (9 * 64) ** -0.5


def test_drop_path_rises_over_all_blocks():
    model = small_cyclemlp(droppath=0.4)
    rates = [block.drop_path1.drop_prob for i in range(4) for block in model.network[2 * i]]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_the_classifier_reads_the_mean_of_normalised_places():
    model = small_cyclemlp()
    model.eval()
    for side, places in ((3, 1), (64, 2), (100, 4)):
        images = paddle.to_tensor(array("images", (2, 3, side, side)))
        features = model.forward_features(images)
        assert features.shape == [2, places, places, 20]
    logits = features.mean([1, 2]) @ model.head.weight + model.head.bias
    np.testing.assert_allclose(model(images).numpy(), logits.numpy(), atol=1e-5)


def test_layer_groups_are_the_blocks():
    model = small_cyclemlp()
    groups = model.layer_groups()
    assert groups[:3] == [("patch_embed",), ("network.0.0",), ("network.2.0", "network.1")]
    assert (len(groups), groups[-1]) == (7, ("norm", "head"))
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{prefix}.") for group in groups for prefix in group) == 1, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.EMBED_DIMS", "[8, 8]"], r"EMBED_DIMS is \[8, 8\], expected four numbers"),
        (["MODEL.MLP_RATIO", "[4, 4]"], r"MLP_RATIO is \[4.*\], expected 4 numbers: one per stage"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("cyclemlp_b1", options))
