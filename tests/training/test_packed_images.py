"""Trainings on packed images: the same bits after a resume, on two processes, and in predictions."""

import csv

import numpy as np
import pytest
from support.photographs import write_photographs
from support.ranks import run_ranks
from support.servers import form, serving
from support.training_runs import assert_same_run, records, train

from config import get_config
from datasets import get_datasets
from errors import InputError
from inference.exporting import write_export
from inference.predictor import Predictor
from inference.visualization.batches import training_panels
from loading.scales import train_sampler
from loading.transforms.naflex import packing
from models import build_model
from training.pages.panels import enlarge

MODEL = [
    *("MODEL.TYPE", "NaFlexViT", "MODEL.PATCH_SIZE", "8", "DATA.IMAGE_SIZE", "32"),
    *("MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "1", "MODEL.NUM_HEADS", "2"),
    *("MODEL.NUM_CLASSES", "2", "MODEL.GLOBAL_POOL", "avg", "MODEL.REG_TOKENS", "1"),
]
RUN = [
    *("DATA.NUM_TOKENS", "16", "DATA.TOKEN_LENGTHS", "[8, 16, 32]", "DATA.DROP_LAST", "False"),
    *("DATA.DATASET", "folder", "DATA.NUM_WORKERS", "0", "DATA.BATCH_SIZE_EVAL", "4"),
    *("TRAIN.NUM_EPOCHS", "2", "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.BASE_LR", "0.01"),
    *("REPORT_FREQ", "1", "SAVE_STEPS", "1", "KEEP_LAST", "1000"),
]


def options_of(root, batch, *further):
    data = ["DATA.DATA_PATH", str(root), "DATA.BATCH_SIZE", str(batch)]
    return [*MODEL, *RUN, *data, *further]


def train_all(runs):
    """Trains several times in the same processes: [(options, output)]."""
    for run in runs:
        train(*run)


def test_two_processes_go_on_from_the_middle_of_an_epoch_in_the_same_bits(tmp_path):
    root = write_photographs(tmp_path / "data")
    options = options_of(root, 2)
    own = train_sampler(get_config(None, options), range(18), 0, 2)
    own.set_epoch(2)
    whole = tmp_path / "whole"
    middle = whole / "checkpoints" / f"epoch_0002_sample_{own.samples_taken(1):09d}"
    resumed = tmp_path / "resumed"
    run_ranks(train_all, [(options, whole), ([*options, "MODEL.RESUME", str(middle)], resumed)])
    assert_same_run(whole, resumed)
    steps = [record for record in records(whole) if record["split"] == "train"]
    assert sum(record["samples"] for record in steps) == 2 * 18
    # One process sees the same images at each step, so its losses are those of two.
    alone = tmp_path / "alone"
    train(options_of(root, 4), alone)
    pairs = zip(records(whole), records(alone), strict=True)
    for of_two, of_one in pairs:
        assert of_two["loss"] == pytest.approx(of_one["loss"], abs=2e-5)
        assert of_two.get("samples") == of_one.get("samples")


@pytest.mark.smoke
def test_an_evaluation_and_a_prediction_give_one_answer(tmp_path):
    root = write_photographs(tmp_path / "data")
    run = tmp_path / "run"
    train(options_of(root, 4, "TRAIN.NUM_EPOCHS", "1"), run)
    evaluated = {}
    with open(run / "predictions.csv", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            evaluated[row["image"]] = (int(row["predicted"]), float(row["probability"]))
    predictor = Predictor(run / "checkpoints" / "last")
    assert predictor.config.DATA.NUM_TOKENS == 16
    images = sorted((root / "val").rglob("*.*"))
    assert len(images) == len(evaluated) == 18
    widths = {predictor.pixels(str(image)).shape for image in images}
    assert len(widths) > 1
    for image, prediction in zip(images, predictor([str(i) for i in images], top=1), strict=True):
        output, probability = evaluated[str(image.relative_to(root))]
        assert prediction.outputs == [output]
        assert prediction.probabilities[0] == pytest.approx(probability, abs=2e-6)
    flipped = list(predictor.stream(list(map(str, images)), workers=0, tta="flip"))
    assert len(flipped) == 18
    with pytest.raises(InputError, match="NUM_TOKENS 16 images aren't cropped; use -tta"):
        list(predictor.stream(list(map(str, images)), workers=0, tta="five"))
    with pytest.raises(InputError, match=r"an export takes images of one size; pass -o DATA\.NUM"):
        write_export(predictor.config, predictor.model, tmp_path / "export", [])
    assert not (tmp_path / "export").exists()


def test_a_server_answers_images_of_all_ratios_as_a_prediction_does(tmp_path):
    root = write_photographs(tmp_path / "data")
    train(options_of(root, 4, "TRAIN.NUM_EPOCHS", "1"), tmp_path / "run")
    weights = tmp_path / "run" / "checkpoints" / "last"
    files = sorted((root / "val").rglob("*.*"))[:6]
    expected = Predictor(weights)([str(file) for file in files], top=1)
    assert len({one.probabilities[0] for one in expected}) == 6
    uploads = [("image", file.name, file.read_bytes()) for file in files]
    with serving(weights, folder=tmp_path) as server:
        status, answer, _ = server.ready().ask("POST", "/predict?top=1", *form(*uploads))
        drawn = server.ask("POST", "/attention", uploads[0][2], {"Content-Type": "image/jpeg"})
    assert (status, drawn[0]) == (200, 200)
    for found, prediction in zip(answer["predictions"], expected, strict=True):
        assert found["outputs"] == prediction.outputs
        assert found["probabilities"] == prediction.probabilities


def test_a_picture_of_a_batch_shows_the_images_that_were_packed(tmp_path):
    root = write_photographs(tmp_path / "data")
    config = get_config(None, options_of(root, 4, "MODEL.NUM_CLASSES", "auto"))
    config, train_set, _ = get_datasets(config)
    train_set.pack(packing(config))
    panels = training_panels(config, train_set, epoch=1, count=4)
    sampler = train_sampler(config, train_set, 0, 1)
    sampler.set_epoch(1)
    keys = next(iter(sampler))[:4]
    for panel, (epoch, index, copy, length) in zip(panels, keys, strict=True):
        draws = train_set.generator(epoch, index, copy)
        pixels = train_set.transform(train_set.picture(index), draws, length)
        assert panel.title == train_set.classes[train_set.labels[index]]
        np.testing.assert_array_equal(panel.image, enlarge(pixels))


def test_an_export_of_images_of_one_size_agrees(tmp_path):
    for package in ("onnxruntime", "paddle2onnx"):
        pytest.importorskip(package, reason="the extra export isn't installed")
    config = get_config(None, [*MODEL, "EVAL", "True"])
    model = build_model(config)
    fidelity = write_export(config, model, tmp_path / "export", [], kind="onnx")
    assert fidelity.agreement == 1
    assert np.isfinite(fidelity.difference)
