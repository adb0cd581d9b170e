"""docs/guides/segmentation.md, up to "Dataset formats": its commands from the first to the last, on
drawn shapes. ``tools/serve.py`` answers the masks that ``tools/predict.py`` writes.
"""

import re

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from support.document_commands import Desk
from support.servers import serving

pytestmark = pytest.mark.long
# Flags behind a command, by a word of it, that make it small.
SMALL = {
    "make_shapes": "--count 20",
    "show_batch": "-o DATA.NUM_WORKERS 0",
    "run_train": "-ngpus=1 -o DATA.NUM_WORKERS 0 TRAIN.NUM_EPOCHS 2 VALIDATE_FREQ 1",
    "run_eval": "-ngpus=1 -output=evaluated",
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """The desk after all commands, but the server."""
    page = (ROOT / "docs" / "guides" / "segmentation.md").read_text(encoding="utf-8")
    section = page.split("\n## Dataset formats\n")[0]
    desk = Desk(tmp_path_factory.mktemp("masks"))
    commands = "".join(re.findall(r"^```sh\n(.*?)^```", section, re.M | re.S)).splitlines()
    assert len(commands) == 11
    for line in commands:
        command = line.partition("  #")[0]
        if "serve.py" in command:
            continue
        flags = next((own for word, own in SMALL.items() if word in command), "")
        done = desk.type(f"{command} {flags}".replace("/data/plants", "data/plants"))
        assert done.errors == ""
    return desk


def test_the_server_gives_the_masks_of_predict(desk):
    pictures = sorted((desk.folder / "data/plants/images/val").iterdir())
    assert len(pictures) == 4
    with serving(desk.folder / "PLANTS", folder=desk.folder) as server:
        server.ready()
        for picture in pictures:
            headers = {"Content-Type": "image/png"}
            status, answer, _ = server.ask("POST", "/mask", picture.read_bytes(), headers)
            assert status == 200
            assert answer == (desk.folder / "masks_of_all" / picture.name).read_bytes()


def test_the_export_gives_the_masks_of_the_model(desk):
    for mask in sorted((desk.folder / "masks_of_all").iterdir()):
        expected = np.asarray(Image.open(mask))
        found = np.asarray(Image.open(desk.folder / "masks_of_the_export" / mask.name))
        assert (found == expected).mean() >= 0.9999


def test_the_report_has_the_worst_classes_and_pictures(desk):
    text = (desk.folder / "PLANTS" / "report.html").read_text()
    for title in ("The worst pictures", "Confusions"):
        assert title in text
    for name in ("background", "stripes", "checks", "dots"):
        assert name in text
