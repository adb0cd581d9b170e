"""A file of PaddleViT's whose task isn't here is refused for that, before its keys are read."""

import pytest

from config import get_config
from errors import InputError
from settings.architectures import architectures
from settings.paddlevit.reading import families

# Parts of files, and the family and the task that the error names.
TASKS = {
    "MODEL: {TYPE: TransGAN, GEN_MODEL: ViT_custom}": "TransGAN for GANs",
    "DATA: {MAX_GEN_NUM: 50000}\nMODEL: {TYPE: Styleformer}": "Styleformer for GANs",
    "MODEL: {BACKBONE: resnet50, NUM_QUERIES: 100}": "DETR for object detection",
    "MODEL: {TYPE: PVTv2, NAME: pvtv2_b0}\nFPN: {OUT_CHANNELS: 256}": "PVTv2 for object detection",
    "MODEL: {DROPOUT: 0.1, TRANS: {WINDOW_SIZE: 7, NUM_HEADS: [3, 6]}}": "Swin for object detection",
}


@pytest.mark.parametrize("text", TASKS)
def test_a_family_and_its_task_are_named_before_the_keys(text, tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(f"{text}\nNO_SUCH_KEY: 1\n")
    with pytest.raises(InputError) as error:
        get_config(file)
    line = f"it is PaddleViT's {TASKS[text]}, which isn't supported; docs/migrate/paddlevit.md lists the supported ones"
    assert str(error.value) == f"{file}: {line}"


@pytest.mark.parametrize(("kind", "family"), [("DETR", "DETR"), ("Styleformer", "Styleformer")])
def test_a_type_of_another_task_is_named(kind, family):
    with pytest.raises(InputError, match=f"MODEL.TYPE is '{kind}': it is PaddleViT's {family} for"):
        get_config(None, ["MODEL.TYPE", kind])
    assert kind.lower() not in architectures()
    assert not families(kind)


def test_swin_for_classification_is_here(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text("MODEL: {TYPE: swin, TRANS: {WINDOW_SIZE: 7}}\n")
    assert get_config(file).MODEL.TYPE == "Swin"


def test_a_type_of_nobodys_is_named_before_the_keys(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("BASE: ''\nMODEL: {TYPE: vitt, DEPT: 3}\n")
    with pytest.raises(
        InputError, match=r"mine.yaml: MODEL.TYPE is 'vitt', expected one of beit, "
    ):
        get_config(file)
