"""Writes views.npz beside this file: what DINO's own augmentation draws, and what torchvision's
operations on Pillow images make of given factors (torchvision 0.28.0, Pillow 13.0.0).

    PYTHONPATH=.:tests python tests/golden/make_views.py DINO

DINO is a copy of github.com/facebookresearch/dino, whose main_dino.py has the transform.
"""

import random
import sys
import types
from pathlib import Path

import numpy as np
import torch
from PIL import ImageFilter, ImageOps

from golden.formula import CHANGES, photograph, picture

# torchvision's operators don't load beside a CPU torch
for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
from torchvision import transforms  # noqa: E402
from torchvision.transforms import functional  # noqa: E402

COUNT = 600
GLOBAL_SCALE = (0.4, 1.0)
LOCAL_SCALE = (0.05, 0.4)
OPERATIONS = {
    "brightness": functional.adjust_brightness,
    "contrast": functional.adjust_contrast,
    "saturation": functional.adjust_saturation,
    "hue": functional.adjust_hue,
}


def changed() -> dict[str, np.ndarray]:
    """The picture after each of the changes of colours, in colours and in grey."""
    found = {}
    for mode in ("RGB", "L"):
        for number, (jitter, is_grey, radius, is_solarized) in enumerate(CHANGES):
            image = picture(mode)
            for name, factor in jitter:
                image = OPERATIONS[name](image, factor)
            if is_grey:
                image = functional.to_grayscale(image, len(image.getbands()))
            if radius is not None:
                image = image.filter(ImageFilter.GaussianBlur(radius))
            if is_solarized:
                image = ImageOps.solarize(image)
            found[f"changed/{mode}/{number}"] = np.asarray(image)
    return found


class Recorder:
    """Notes what is drawn for a view, in the order in which the authors' transform draws."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._watch(transforms.RandomResizedCrop, "get_params", self._crop, static=True)
        self._watch(transforms.ColorJitter, "get_params", self._jitter, static=True)
        self._watch(transforms.functional, "hflip", lambda *_: self._note(flip=1))
        grey = "rgb_to_grayscale"
        self._watch(transforms.functional, grey, lambda *_: self._note(grey=1))
        self._watch(ImageOps, "solarize", lambda *_: self._note(solarize=1))
        blur = ImageFilter.GaussianBlur

        def watched_blur(radius: float) -> ImageFilter.GaussianBlur:
            self._note(radius=radius)
            return blur(radius)

        ImageFilter.GaussianBlur = watched_blur

    def _watch(self, holder: object, name: str, note: object, static: bool = False) -> None:
        function = getattr(holder, name)

        def watched(*arguments: object, **keywords: object) -> object:
            result = function(*arguments, **keywords)
            note(result)
            return result

        setattr(holder, name, staticmethod(watched) if static else watched)

    def _note(self, **values: float) -> None:
        self.rows[-1] |= values

    def _crop(self, box: tuple) -> None:
        top, left, height, width = map(int, box)
        self.rows.append({"top": top, "left": left, "height": height, "width": width})

    def _jitter(self, params: tuple) -> None:
        order, *factors = params
        names = dict(zip(OPERATIONS, factors, strict=True))
        first = {f"{name}_place": order.tolist().index(n) for n, name in enumerate(names)}
        self._note(**names, **first)


def drawn(dino: str) -> dict[str, np.ndarray]:
    """What the authors' transform draws, and the mean and deviation of each channel of its views."""
    sys.path.insert(0, dino)
    from main_dino import DataAugmentationDINO

    torch.manual_seed(0)
    random.seed(0)
    recorder = Recorder()
    transform = DataAugmentationDINO(GLOBAL_SCALE, LOCAL_SCALE, 1)
    image = photograph()
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    for _ in range(COUNT):
        views = transform(image)
        for row, view in zip(recorder.rows[-len(views) :], views, strict=True):
            pixels = (view * std + mean) * 255
            for channel, colour in enumerate(("red", "green", "blue")):
                row[f"mean_{colour}"] = float(pixels[channel].mean())
                row[f"std_{colour}"] = float(pixels[channel].std())
    names = sorted({name for row in recorder.rows for name in row})
    found = {}
    for number, view in enumerate(("first", "second", "local")):
        rows = recorder.rows[number :: len(views)]
        for name in names:
            values = [row.get(name, np.nan) for row in rows]
            found[f"drawn/{view}/{name}"] = np.array(values, np.float32)
    return found


if __name__ == "__main__":
    np.savez_compressed(Path(__file__).with_name("views.npz"), **changed(), **drawn(sys.argv[1]))
