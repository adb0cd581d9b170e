"""DATA.IMAGE_SIZE: one number or two, however it is written; what a model doesn't take is answered
by what it takes.
"""

import pytest

from config import get_config, resolved_yaml, with_values
from errors import InputError
from models import build_model
from training.command_line import config_from_arguments


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("96", 96),
        ("96x64", [96, 64]),
        ("[96, 64]", [96, 64]),
        ("96,64", [96, 64]),
        ("[96]", 96),
        ("96x96", 96),
    ],
)
def test_an_image_size_is_one_number_or_height_and_width(tmp_path, word, expected):
    given = [
        get_config(None, ["DATA.IMAGE_SIZE", word]),
        config_from_arguments("test", [f"-image_size={word}"]),
    ]
    (tmp_path / "sized.yaml").write_text(f"DATA:\n  IMAGE_SIZE: {word}\n")
    given.append(get_config(tmp_path / "sized.yaml"))
    assert [config.DATA.IMAGE_SIZE for config in given] == [expected] * 3
    (tmp_path / "run.yaml").write_text(resolved_yaml(given[2]))
    kept = get_config(tmp_path / "run.yaml").DATA.IMAGE_SIZE
    assert kept == expected
    assert with_values(given[0], DATA__IMAGE_SIZE=[32, 32]).DATA.IMAGE_SIZE == 32


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("96x64x3", "takes int or a list of ints, found '96x64x3'"),
        ("[96, 64.5]", "takes int or a list of ints"),
        ("None", "takes int or a list of ints, found None"),
        ("[]", r"is \[\], expected 1 to 10000"),
        ("[0, 5]", r"is \[0, 5\], expected 1 to 10000"),
        ("10001x1", r"is \[10001, 1\], expected 1 to 10000"),
        ("[1, 2, 3]", r"is \[1, 2, 3\], expected a number of pixels, or two: \[height, width\]"),
        ("[4, 4, 4]", r"is \[4, 4, 4\], expected a number of pixels, or two"),
    ],
)
def test_no_other_image_size_is_taken(word, message):
    with pytest.raises(InputError, match=f"DATA.IMAGE_SIZE {message}"):
        get_config(None, ["DATA.IMAGE_SIZE", word])


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        (
            "vit_tiny_patch16_224",
            "100x64",
            "100 x 64 is not a multiple of PATCH_SIZE 16.* one that is: 96 x 64 or 112 x 64",
        ),
        (
            "swin_tiny_patch4_window7_224",
            "2x64",
            "2 x 64 is not a multiple of PATCH_SIZE 4.* one that is: 4 x 64",
        ),
        (
            "levit_128",
            "230x150",
            "230 x 150 is not a multiple of 16; choose one that is: 224 x 144 or 240 x 160",
        ),
        (
            "coat_lite_tiny",
            "64x65",
            "64 x 65 is not a multiple of 32; choose one that is: 64 or 64 x 96",
        ),
        (
            "crossvit_15_224",
            "200x240",
            "200 x 240 times IMAGE_SCALES .* one that is: 120 x 240 or 240",
        ),
        (
            "convnext_tiny",
            "31x64",
            "is 31 x 64, ConvNeXt takes images of at least 32 x 32; choose a larger one",
        ),
    ],
)
def test_a_size_that_a_model_does_not_take_is_answered_by_those_that_fit(name, size, message):
    with pytest.raises(InputError, match=f"^IMAGE_SIZE {message}$"):
        build_model(get_config(name, ["DATA.IMAGE_SIZE", size]))
