"""An architecture of one file: registered, built, listed, its keys checked."""

import importlib.util
import sys

import pytest

from config import get_config
from errors import InputError
from models import ARCHITECTURES, build_model, create_model, list_models
from settings import architectures as reading
from settings.architectures import all_keys, architecture, architectures
from tools.list_models import print_keys

TINY = '''
from collections.abc import Sequence
from typing import Literal

from paddle import nn

from settings.keys import Rate, Size
from models.base import ImageModel, register


@register("tiny")
class Tiny(ImageModel):
    """A mean of colours.

    Args:
        hue: what it sees,
            on two lines.
        depths: of nothing.
    """

    def __init__(
        self,
        image_size: int | Sequence[int] = 8,
        in_channels: int = 3,
        num_classes: int = 2,
        hue: Literal["red", "blue"] = "red",
        depths: Sequence[Size] = (1, 2),
        droppath: Rate = 0.0,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes)
        self.num_features, self.hue, self.depths = in_channels, hue, depths
        self._add_classifiers()

    def forward_features(self, x):
        return x.mean(axis=[2, 3])

    def forward_head(self, x):
        return self.head(x)
'''


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """Returns a function that imports a file of its own, which is forgotten afterwards."""
    monkeypatch.setattr(reading, "_FILES", list(reading._FILES))
    before = dict(ARCHITECTURES.registered)

    def load(source):
        (tmp_path / "tiny.py").write_text(source)
        spec = importlib.util.spec_from_file_location("tiny", tmp_path / "tiny.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "tiny", module)
        spec.loader.exec_module(module)
        return module

    yield load
    ARCHITECTURES.registered.clear()
    ARCHITECTURES.registered.update(before)
    for cached in (architectures, all_keys):
        cached.cache_clear()


@pytest.mark.smoke
def test_a_new_architecture_is_one_file(tmp_path, own_file, monkeypatch, capsys):
    module = own_file(TINY)
    (tmp_path / "configs" / "tiny").mkdir(parents=True)
    file = tmp_path / "configs" / "tiny" / "tiny_blue.yaml"
    file.write_text(
        "BASE: ''\nMODEL: {TYPE: Tiny, HUE: blue, DEPTHS: [3, 4]}\nDATA: {IMAGE_SIZE: 8}\n"
    )
    monkeypatch.setattr("settings.merging.CONFIG_DIR", tmp_path / "configs")
    assert list_models() == ["tiny_blue"]
    model = create_model("tiny_blue", num_classes=5)
    assert (type(model), model.hue, model.depths, model.num_classes) == (
        module.Tiny,
        "blue",
        [3, 4],
        5,
    )
    assert type(build_model(get_config("tiny_blue"))) is module.Tiny
    for options, message in (
        (["MODEL.HUEE", "red"], "unknown key MODEL.HUEE; did you mean MODEL.HUE?"),
        (
            ["MODEL.HUE", "green"],
            "MODEL.HUE is 'green', expected one of red, blue; did you mean red?",
        ),
        (["MODEL.DEPTHS", "[0]"], "MODEL.DEPTHS is [0], expected 1 to 1000000"),
        (["MODEL.DROPPATH", "1"], "MODEL.DROPPATH is 1.0, expected 0 <= value < 1"),
        (
            ["MODEL.EMBED_DIM", "8"],
            "MODEL.EMBED_DIM is 8, but Tiny takes no EMBED_DIM; leave it out",
        ),
    ):
        with pytest.raises(InputError) as caught:
            get_config("tiny_blue", options)
        assert str(caught.value) == f"command line: {message}"
    print_keys("tiny_blue")
    assert [line.split("  ", 1)[0] for line in capsys.readouterr().out.splitlines()] == [
        "key", "MODEL.DEPTHS", "MODEL.DROPPATH", "MODEL.HUE",
    ]  # fmt: skip
    assert architecture("tiny").arguments["MODEL.HUE"].text == "what it sees, on two lines."
    # What Tiny's DROPPATH doesn't need, ViT's does.
    get_config(None, ["EVAL", "True", "MODEL.TYPE", "tiny", "MODEL.DROPPATH", "0.1"])
    with pytest.raises(InputError, match=r"MODEL.DROPPATH has no effect under EVAL; leave it out$"):
        get_config(None, ["EVAL", "True", "MODEL.TYPE", "ViT", "MODEL.DROPPATH", "0.1"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("hue: str", "hue has no default, which a key needs"),
        ("hue='red'", "hue has no type, which a key needs"),
        ("hue: dict = None", "hue is dict; the type of a key is one of bool, int, float, str"),
    ],
)
def test_an_argument_that_can_be_no_key_is_named_with_its_line(own_file, argument, message):
    source = TINY.replace('        hue: Literal["red", "blue"] = "red",\n', "")
    own_file(source.replace("        self,\n", f"        self,\n        {argument},\n"))
    with pytest.raises(InputError, match=rf"/tiny\.py:23: Tiny's {message}"):
        get_config()
