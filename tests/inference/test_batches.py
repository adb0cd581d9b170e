"""tools/show_batch.py: the pixels that it draws are those that the task's step and an evaluation
feed.
"""

import io
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import write_images
from PIL import Image
from support.task_columns import need

from config import get_config
from datasets import get_dataloader, get_datasets
from errors import InputError
from inference.visualization.batches import evaluation_panels, training_panels, view_panels
from loading.transforms import Normalize, multi_crop
from tools import show_batch
from training.batch_panels import label, unnormalize
from training.classification import Classification
from training.pages.panels import enlarge

MIXED = [
    "TRAIN.MIXUP_ALPHA",
    "0.8",
    "TRAIN.CUTMIX_ALPHA",
    "1.0",
    "TRAIN.SMOOTHING",
    "0.1",
    "TRAIN.MIXUP_MODE",
    "elem",
]
MIXED += ["TRAIN.RANDOM_ERASE_PROB", "0.5", "TRAIN.AUTO_AUGMENT", "rand-m9"]


@pytest.fixture
def root(tmp_path):
    write_images(tmp_path / "train", {"ant": 6, "bee": 6}, size=20)
    write_images(tmp_path / "val", {"ant": 3, "bee": 3}, size=20, seed=1)
    return tmp_path


def configured(root, *options):
    words = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(root),
        "DATA.IMAGE_SIZE",
        "16",
        "DATA.NUM_WORKERS",
        "0",
    ]
    scale = ["DATA.IMAGENET_MEAN", "[0.48,0.45,0.4]", "DATA.IMAGENET_STD", "[0.22,0.23,0.24]"]
    return get_datasets(
        get_config(
            None, [*words, *scale, "DATA.BATCH_SIZE", "8", "MODEL.NUM_CLASSES", "auto", *options]
        )
    )


class Fed:
    """A network that keeps what it is given, and a loss that keeps the targets."""

    def __call__(self, images):
        self.images = images
        return paddle.zeros([images.shape[0], 2])

    def criterion(self, images, outputs, targets):
        self.targets = targets
        return paddle.zeros([images.shape[0]])


@pytest.mark.smoke
@pytest.mark.parametrize("options", [[], MIXED], ids=["plain", "mixed"])
def test_training_images_are_what_the_step_feeds(root, options):
    config, train, _ = configured(root, *options)
    task = Classification(config, train.classes)
    fed = Fed()
    model = SimpleNamespace(distilled_training=False)
    task.prepare(model, train, SimpleNamespace(info=print))
    task.criterion = fed.criterion
    loader = get_dataloader(config, train, "train")
    loader.batch_sampler.set_epoch(3)
    task.step(fed, next(iter(loader)), 3)
    panels = training_panels(config, train, 3, 5)
    assert len(panels) == 5
    mean, std = (
        np.array(values).reshape(1, 3, 1, 1)
        for values in (config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    )
    expected = (255 * (fed.images.numpy() * std + mean)).round().clip(0, 255).transpose(0, 2, 3, 1)
    for panel, pixels, target in zip(panels, expected, fed.targets.numpy(), strict=False):
        assert (panel.image == enlarge(pixels.astype(np.uint8))).all()
        if options:
            shares = (target - 0.05) / 0.9
            words = [
                f"{train.classes[k]} {shares[k]:.2f}"
                for k in np.argsort(-shares)
                if shares[k] > 0.005
            ]
            assert panel.title == (
                " +\n".join(words) if len(words) > 1 else train.classes[shares.argmax()]
            )
        else:
            assert panel.title == train.classes[target]


def test_the_views_of_an_image_are_beside_each_other(root, monkeypatch):
    need(monkeypatch)
    monkeypatch.setattr("datasets.own_classes", lambda task: [])
    monkeypatch.setattr("datasets.view_columns", lambda task: ("pixels", "local"))
    config, train, _ = configured(root, "DATA.DATASET", "images", "DATA.BATCH_SIZE", "3")
    train.views = multi_crop(config, global_scale=(0.4, 1.0), local_views=2, local_size=8)
    rows = view_panels(config, train, 2, 8)
    assert [[panel.title for panel in row] for row in rows] == 3 * [
        ["pixels 1", "pixels 2", "local 1", "local 2"]
    ]
    loader = get_dataloader(config, train, "train")
    loader.batch_sampler.set_epoch(2)
    batch = next(iter(loader))
    for row, whole, local in zip(rows, batch["pixels"], batch["local"], strict=True):
        for panel, pixels in zip(row, [*whole, *local], strict=True):
            assert (panel.image == enlarge(pixels.numpy())).all()
    assert len(view_panels(config, train, 2, 1)) == 1


def test_the_command_draws_the_views_of_a_task(root, monkeypatch, tmp_path):
    # What the keys need is found by the real tasks, and then kept.
    configured(root)
    need(monkeypatch)
    monkeypatch.setattr("datasets.own_classes", lambda task: [])
    for module in ("datasets", "settings.tasks"):
        monkeypatch.setattr(f"{module}.view_columns", lambda task: ("pixels",))
    config, train, _ = configured(root, "DATA.DATASET", "images", "DATA.BATCH_SIZE", "2")
    views = multi_crop(config, global_scale=(0.4, 1.0))
    task = SimpleNamespace(views=views)
    monkeypatch.setattr("settings.registry.tasks.choose", lambda config: lambda *_: task)
    drawn = []
    monkeypatch.setattr(
        "training.pages.sheets.sheet", lambda rows, *_, **__: drawn.extend(rows) or b""
    )
    show_batch.draw(config, 1, 3)
    assert [len(row) for row in drawn] == [2, 2, 3]
    assert drawn[0][1].title == "pixels 2"
    assert all(panel.frame for panel in drawn[2])
    assert train.views == {}


@pytest.mark.parametrize(
    "options", [[], MIXED, ["DATA.MULTI_SCALE", "[8,16]"]], ids=["plain", "mixed", "sizes"]
)
def test_fewer_images_than_a_batch_are_shown(root, options):
    config, train, _ = configured(root, "DATA.BATCH_SIZE", "512", *options)
    assert len(training_panels(config, train, 1, 64)) == 12
    config, train, _ = configured(root, *options)
    assert len(training_panels(config, train, 2, 64)) >= 8


def test_a_task_without_labels_gets_the_images_as_they_are_cropped(root, monkeypatch):
    need(monkeypatch)
    monkeypatch.setattr("datasets.own_classes", lambda task: [])
    config, train, val = configured(root, "DATA.DATASET", "images", "TRAIN.CROP", "squash")
    panels = training_panels(config, train, 2, 5)
    assert [panel.title for panel in panels] == [""] * 5
    loader = get_dataloader(config, train, "train")
    loader.batch_sampler.set_epoch(2)
    for panel, pixels in zip(panels, next(iter(loader))["pixels"], strict=False):
        assert (panel.image == enlarge(pixels.numpy())).all()
    panels = evaluation_panels(config, val, 3)
    assert [panel.title for panel in panels] == [""] * 3
    assert (panels[0].image == enlarge(val[0][0])).all()


def test_evaluation_images_are_spread_over_the_data_and_are_the_loaders(root):
    config, _, val = configured(root, "DATA.BATCH_SIZE_EVAL", "2")
    panels = evaluation_panels(config, val, 3)
    assert [panel.title for panel in panels] == ["ant", "ant", "bee"]
    for panel, index in zip(panels, (0, 2, 5), strict=True):
        assert (panel.image == enlarge(val[index][0])).all()
    assert len(evaluation_panels(config, val, 99)) == 6


def test_normalised_pixels_come_back_exactly(root):
    config = configured(root)[0]
    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, 3)
    images = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)(
        paddle.to_tensor(levels)
    )
    assert (unnormalize(config, images) == levels).all()


def test_images_of_several_classes_have_their_names(root):
    sets = {"0": "1,1,0", "1": "0,0,0", "2": "0,1,1", "3": "0,0,1"}
    for mode in ("train", "val"):
        rows = [
            f"{mode}/ant/{n if mode == 'train' else min(int(n), 2)}.png,{own}"
            for n, own in sets.items()
        ]
        (root / f"{mode}.csv").write_text("\n".join(["image,red,wide,old", *rows]))
    words = [
        "TASK",
        "multilabel",
        "DATA.DATASET",
        "multilabel_csv",
        "TRAIN.SMOOTHING",
        "0.1",
        "DATA.BATCH_SIZE",
        "4",
    ]
    config, train, val = configured(root, *words)
    assert [panel.title for panel in evaluation_panels(config, val, 4)] == [
        "red +\nwide",
        "",
        "wide +\nold",
        "old",
    ]
    assert sorted(panel.title for panel in training_panels(config, train, 0, 4)) == [
        "",
        "old",
        "red +\nwide",
        "wide +\nold",
    ]
    config, train, _ = configured(root, *words, "TRAIN.MIXUP_ALPHA", "0.8")
    assert any(" 0." in panel.title for panel in training_panels(config, train, 0, 4))


def test_labels_tell_shares():
    assert label(np.array([0.3, 0.7, 0.001]), ["a", "b", "c"]) == "b 0.70 +\na 0.30"
    assert label(np.array([0.0, 1.0]), []) == "1"
    # of several labels: the other image had none
    assert label(np.array([0.0, 0.6]), ["a", "b"]) == "b 0.60"


def test_the_command_draws_a_picture(root, monkeypatch, capsys):
    words = [
        "-cfg=vit_small_patch16_224",
        "-dataset=folder",
        f"-data_path={root}",
        f"-output={root / 'batch.png'}",
    ]
    small = [
        "-o",
        "DATA.IMAGE_SIZE",
        "16",
        "DATA.BATCH_SIZE",
        "4",
        "MODEL.NUM_CLASSES",
        "auto",
        "DATA.NUM_WORKERS",
        "0",
    ]
    monkeypatch.setattr(sys, "argv", ["x", *words, *small])
    show_batch.main()
    assert Image.open(io.BytesIO((root / "batch.png").read_bytes())).width > 400
    assert "batch.png is written" in capsys.readouterr().out
    # Nothing is measured for a picture: it shows as many images as of a batch that is large enough.
    monkeypatch.delattr("training.batch_size.find_batch_sizes")
    pictures = []
    for size in ("64", "auto"):
        sizes = ["DATA.BATCH_SIZE", size, "DATA.BATCH_SIZE_EVAL", size]
        monkeypatch.setattr(sys, "argv", ["x", *words, *small, *sizes])
        show_batch.main()
        pictures.append((root / "batch.png").read_bytes())
    assert pictures[0] == pictures[1]
    # A batch has no class twice, so it isn't that large.
    per_class = ["DATA.SAMPLER", "per_class", "DATA.PER_CLASS", "3", "DATA.BATCH_SIZE", "auto"]
    monkeypatch.setattr(sys, "argv", ["x", *words, *small, *per_class])
    show_batch.main()
    for more, message in (
        (["-output=x.jpg"], "ends in .png"),
        (["--count=65"], "expected 1 to 64"),
        (["--epoch=0"], "--epoch is 0, expected at least 1"),
    ):
        monkeypatch.setattr(sys, "argv", ["x", *words, *small[:1], *small[1:], *more])
        with pytest.raises(InputError, match=message):
            show_batch.main()
