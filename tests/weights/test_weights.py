"""Saving and loading weights, into another class count or resolution too; what is refused."""

import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from errors import InputError
from loading.label_spaces import imagenet_synsets
from models import create_model
from weights import file_arrays, find_weights, load_weights, save_weights
from weights.imagenet22k import imagenet1k_rows
from weights.names import google_names
from weights.resize import resize_pos_embed

HEAD = ("head.weight", "head.bias")


@pytest.fixture
def saved(tmp_path):
    model = create_model("vit_digits")
    save_weights(model, tmp_path / "model.safetensors")
    return model, tmp_path


def test_weights_come_back_exactly_by_every_form_of_the_path(saved):
    model, folder = saved
    for path in (folder, folder / "model", folder / "model.safetensors"):
        fresh = create_model("vit_digits")
        report = load_weights(fresh, path)
        assert (
            str(report)
            == f"{len(model.state_dict())} tensors loaded from {folder / 'model.safetensors'}"
        )
        for name, tensor in model.state_dict().items():
            assert (fresh.state_dict()[name].numpy() == tensor.numpy()).all(), name


def test_the_file_has_timms_layout(saved):
    model, folder = saved
    stored = load_file(folder / "model.safetensors")
    assert stored["blocks.0.mlp.fc1.weight"].shape == (128, 64)  # [out, in]
    assert (stored["blocks.0.attn.proj.weight"] == model.blocks[0].attn.proj.weight.numpy().T).all()
    assert (stored["patch_embed.proj.weight"] == model.patch_embed.proj.weight.numpy()).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("head.bias"), r"missing head\.bias$"),
        (lambda a: a.update(extra=np.zeros(1)), r"unexpected extra$"),
        (
            lambda a: a.update({"head.bias": np.zeros(3)}),
            r"head\.bias is \[3\], the model's \[10\]",
        ),
        (lambda a: [a.pop(n) for n in list(a)[:7]], r"and 3 more$"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(saved, change, message):
    _, folder = saved
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "other.safetensors")
    fresh = create_model("vit_digits")
    before = {name: tensor.numpy().copy() for name, tensor in fresh.state_dict().items()}
    with pytest.raises(InputError, match=message):
        load_weights(fresh, folder / "other.safetensors")
    assert all((fresh.state_dict()[name].numpy() == value).all() for name, value in before.items())


def test_files_that_are_no_weights_are_refused(tmp_path):
    model = create_model("vit_digits")
    with pytest.raises(InputError, match="no weights at"):
        find_weights(tmp_path / "absent")
    (tmp_path / "weights.pdparams").write_bytes(b"x")
    with pytest.raises(InputError, match="it isn't a weight file"):
        load_weights(model, tmp_path / "weights.pdparams")
    for content in (b"", b"short", b"\xff" * 64):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(InputError, match="it is empty|it isn't a weight file"):
            load_weights(model, tmp_path / "bad")


def save(model, folder):
    save_weights(model, folder / "file.safetensors")
    return folder / "file.safetensors"


def values(model):
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("distilled", [False, True])
def test_a_classifier_of_other_classes_stays_fresh_when_fine_tuning(tmp_path, distilled):
    source = create_model("vit_digits", num_classes=1000, distilled=distilled)
    file = save(source, tmp_path)
    model = create_model("vit_digits", distilled=distilled)
    fresh = values(model)
    stored = values(source)
    with pytest.raises(InputError, match=r"head.weight is \[64, 1000\], the model's \[64, 10\]"):
        load_weights(model, file)
    report = load_weights(model, file, strict=False)
    heads = [name for name in fresh if name.startswith("head")]
    assert len(heads) == 2 + 2 * distilled
    assert set(report.loaded) == set(fresh) - set(heads)
    assert str(report) == (
        f"{len(fresh) - len(heads)} tensors loaded from {file};"
        " classifier initialised randomly: 1000 classes in the file, 10 in the model"
    )
    for name, value in values(model).items():
        assert (value == (fresh if name in heads else stored)[name]).all(), name


def test_a_backbone_without_a_classifier_is_fine_tuned_and_no_more(tmp_path):
    source = create_model("vit_digits", num_classes=0)
    file = save(source, tmp_path)
    model = create_model("vit_digits")
    report = load_weights(model, file, strict=False)
    assert str(report).endswith(
        "; classifier initialised randomly: none in the file, 10 in the model"
    )
    assert (model.norm.weight == source.norm.weight).all()
    assert (model.patch_embed.proj.weight == source.patch_embed.proj.weight).all()
    with pytest.raises(
        InputError,
        match=r"missing head.weight, .*; it has no classifier; train one, or use its fea",
    ):
        load_weights(model, file)


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_a_head_that_reads_pre_logits_is_told(tmp_path, prefix):
    source = create_model("vit_digits", num_classes=0)
    arrays = google_names(source, file_arrays(source))
    width = source.num_features
    arrays |= {
        "pre_logits/kernel": np.ones((width, width), np.float32),
        "pre_logits/bias": np.ones(width, np.float32),
    }
    arrays |= {
        "head/kernel": np.ones((width, 10), np.float32),
        "head/bias": np.ones(10, np.float32),
    }
    np.savez(tmp_path / "a.npz", **{f"{prefix}{name}": array for name, array in arrays.items()})
    model = create_model("vit_digits")
    cause = "its classifier reads a layer pre_logits, which isn't supported"
    assert str(load_weights(model, tmp_path / "a.npz", strict=False)).endswith(
        f"classifier initialised randomly: {cause}"
    )
    with pytest.raises(
        InputError,
        match=f"missing head.weight, head.bias; {cause}; train one, or use its features",
    ):
        load_weights(model, tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("weight", "bias", "warning"),
    [
        (
            0.0,
            np.zeros(10),
            "the weights of its classifier are the same for all classes, so all classes get the same probability",
        ),
        (
            0.5,
            np.ones(10),
            "the weights of its classifier are the same for all classes, so all classes get the same probability",
        ),
        (
            0.0,
            np.arange(10),
            "the weights of its classifier are 0, so all images get the same probabilities",
        ),
        (0.5, np.arange(10), ""),
    ],
)
@pytest.mark.parametrize("options", [{}, {"distilled": True}, {"head_batch_norm": True}])
def test_a_classifier_that_tells_nothing_apart_is_warned_of(
    tmp_path, weight, bias, warning, options
):
    model = create_model("vit_digits", **options)
    for name in model.classifier_names():
        layer = getattr(model, name)
        layer = layer[1] if options.get("head_batch_norm") else layer
        layer.weight.set_value(np.full(layer.weight.shape, weight, np.float32))
        layer.bias.set_value(bias.astype(np.float32))
    file = save(model, tmp_path)
    assert load_weights(model, file).warning == (warning and f"{file}: {warning}")
    assert load_weights(model, file, strict=False).warning == ""  # a training may start so


def test_a_single_output_and_no_classifier_are_no_reason_to_warn(tmp_path):
    for classes in (0, 1):
        model = create_model("vit_digits", num_classes=classes)
        assert load_weights(model, save(model, tmp_path)).warning == ""


def test_a_classifier_of_the_same_classes_is_loaded_when_fine_tuning(saved):
    model, folder = saved
    fresh = create_model("vit_digits")
    assert str(load_weights(fresh, folder, strict=False)) == str(load_weights(fresh, folder))
    assert (fresh.head.weight.numpy() == model.head.weight.numpy()).all()


def test_imagenet1ks_rows_are_those_of_their_synsets():
    """Rows of Swin's own map; its list has two synsets more than that of fall 2011, and neither has
    the teddy bear.
    """
    fall = imagenet1k_rows("imagenet22k")
    swin = imagenet1k_rows("imagenet22k_swin")
    synsets = imagenet_synsets()
    assert [swin[place] for place in (0, 1, 2, 850, 997, 998, 999)] == [
        359,
        368,
        460,
        5564,
        21200,
        21369,
        21817,
    ]
    assert (len(fall), len(swin), len(set(swin.values()))) == (999, 1000, 1000)
    assert synsets[850] == "n04399382"
    assert 850 not in fall
    for place, row in fall.items():
        more = sum(synsets[place] > extra for extra in ("n03931044", "n09859684"))
        assert swin[place] == row + more, synsets[place]
    assert list(fall.values()) == sorted(fall.values())  # as the synsets


@pytest.mark.parametrize(("order", "kept"), [("imagenet22k", 999), ("imagenet22k_swin", 1000)])
@pytest.mark.parametrize("strict", [True, False])
def test_a_classifier_of_imagenet22k_keeps_imagenet1ks_rows(tmp_path, order, kept, strict):
    source = create_model("vit_digits", num_classes=21841)
    file = save(source, tmp_path)
    model = create_model("vit_digits", num_classes=1000)
    fresh = values(model)
    stored = values(source)
    report = load_weights(model, file, strict=strict, classes=order)
    told = f"classifier: {kept:,} of its 21,841 classes kept ({order}), those of ImageNet-1k"
    assert report.changes == [told + ", 1 fresh" * (kept < 1000)]
    assert set(report.loaded) == set(fresh)
    rows = imagenet1k_rows(order)
    found = values(model)
    for place in range(1000):
        expected = {
            name: stored[name][..., rows[place]] if place in rows else fresh[name][..., place]
            for name in HEAD
        }
        assert all((found[name][..., place] == expected[name]).all() for name in HEAD), place
    assert (found["blocks.0.attn.qkv.weight"] == stored["blocks.0.attn.qkv.weight"]).all()
    with pytest.raises(InputError, match=r"head.weight is \[64, 21841\], the model's \[64, 1000\]"):
        load_weights(model, file)  # never without being asked


def test_another_number_of_rows_isnt_imagenet22ks(tmp_path):
    model = create_model("vit_digits", num_classes=1000)
    told = "its classifier has 21843 classes, expected 21841 (MODEL.PRETRAINED_CLASSES imagenet22k) or 1000; set it to"
    with pytest.raises(InputError, match=re.escape(told)):
        load_weights(
            model,
            save(create_model("vit_digits", num_classes=21843), tmp_path),
            False,
            classes="imagenet22k",
        )
    whole = save(create_model("vit_digits", num_classes=1000), tmp_path)  # fine-tuned already
    assert load_weights(model, whole, classes="imagenet22k").changes == []
    backbone = save(create_model("vit_digits", num_classes=0), tmp_path)
    report = load_weights(model, backbone, strict=False, classes="imagenet22k")
    assert report.changes == [
        "classifier initialised randomly: none in the file, 1000 in the model"
    ]
    # a model of all classes takes all of them
    other = create_model("vit_digits", num_classes=21841)
    assert load_weights(other, save(other, tmp_path), classes="imagenet22k").changes == []


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("options", "prefix"),
    [({}, 1), ({"no_embed_class": True}, 0), ({"distilled": True}, 2), ({"global_pool": "avg"}, 1)],
)
def test_the_position_embedding_of_another_grid_is_resized(tmp_path, options, prefix, strict):
    source = create_model("vit_digits", **options)
    file = save(source, tmp_path)
    model = create_model("vit_digits", image_size=12, **options)
    report = load_weights(model, file, strict=strict)
    assert (
        str(report)
        == f"{len(values(model))} tensors loaded from {file}; pos_embed resized from 4 x 4 to 6 x 6"
    )
    stored = source.pos_embed.numpy()
    assert (model.pos_embed.numpy()[:, :prefix] == stored[:, :prefix]).all()
    assert (model.pos_embed.numpy() == resize_pos_embed(stored, prefix, 6)).all()


def test_other_classes_and_another_grid_are_both_told(tmp_path):
    file = save(create_model("vit_digits"), tmp_path)
    report = load_weights(
        create_model("vit_digits", image_size=4, num_classes=3), file, strict=False
    )
    assert str(report).endswith(
        "; pos_embed resized from 4 x 4 to 2 x 2; classifier initialised randomly: 10 classes in the file, 3 in the model"
    )


PLAIN = {}
DISTILLED = {"distilled": True}
OTHER_CLASSES = {"num_classes": 3}


@pytest.mark.parametrize(
    ("stored", "built", "change", "message"),
    [
        (
            DISTILLED,
            PLAIN,
            {},
            "unexpected dist_token, head_dist.bias, head_dist.weight; pos_embed is [1, 18, 64]",
        ),
        (
            PLAIN,
            DISTILLED,
            {},
            "missing dist_token, head_dist.weight, head_dist.bias; pos_embed is [1, 17, 64]",
        ),
        (
            PLAIN,
            OTHER_CLASSES,
            {"head.bias": None},
            "missing head.bias; head.weight is [64, 10], the model's [64, 3]",
        ),
        (
            PLAIN,
            OTHER_CLASSES,
            {"head.bias": (4,)},
            "head.weight is [64, 10], the model's [64, 3]; head.bias is [4], the model's [3]",
        ),
        (PLAIN, PLAIN, {"head.bias": ()}, "head.bias is [], the model's [10]"),
        (PLAIN, PLAIN, {"head.weight": (10, 5)}, "head.weight is [5, 10], the model's [64, 10]"),
        (PLAIN, PLAIN, {"norm.bias": (63,)}, "norm.bias is [63], the model's [64]"),
        (PLAIN, PLAIN, {"head.extra": (10,)}, "unexpected head.extra"),
        (
            PLAIN,
            PLAIN,
            {"pos_embed": (1, 16, 64)},
            "pos_embed is [1, 16, 64], the model's [1, 17, 64]",
        ),
        (
            PLAIN,
            PLAIN,
            {"pos_embed": (1, 26, 32)},
            "pos_embed is [1, 26, 32], the model's [1, 17, 64]",
        ),
        (
            PLAIN,
            PLAIN,
            {"pos_embed": (1, 26, 64, 1)},
            "pos_embed is [1, 26, 64, 1], the model's [1, 17, 64]",
        ),
        (
            PLAIN,
            PLAIN,
            {"pos_embed": (1, 1, 64)},
            "pos_embed is [1, 1, 64], the model's [1, 17, 64]",
        ),
        (PLAIN, DISTILLED, {"pos_embed": (1, 1, 64)}, "missing dist_token, head_dist.weight"),
    ],
)
def test_what_fine_tuning_does_not_take_is_named(tmp_path, stored, built, change, message):
    file = save(create_model("vit_digits", **stored), tmp_path)
    arrays = load_file(file)
    for name, shape in change.items():
        arrays.pop(name, None)
        if shape is not None:
            arrays[name] = np.zeros(shape, np.float32)
    save_file(arrays, file)
    model = create_model("vit_digits", **built)
    before = values(model)
    with pytest.raises(InputError) as caught:
        load_weights(model, file, strict=False)
    assert str(caught.value).startswith(f"{file} doesn't fit the model: {message}")
    assert all((value == before[name]).all() for name, value in values(model).items())
