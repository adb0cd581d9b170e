"""tools/make_photographs.py: the same bytes, whole or not at all."""

import io

import pytest
from PIL import Image

import tools.make_photographs
from errors import InputError


def files(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_photographs_are_the_same_bytes_for_the_same_seed(tmp_path):
    sources = sorted(tools.make_photographs.photographs())
    assert {"china", "flower"} <= set(sources)
    count = 10 * len(sources)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        told = tools.make_photographs.write(tmp_path / name, count, seed)
        assert told.startswith(f"{tmp_path / name}: {count} images of {len(sources)} photographs, ")
    found = files(tmp_path / "a")
    assert found == files(tmp_path / "b")
    other = files(tmp_path / "c")
    assert found.keys() == other.keys()
    assert all(found[name] != other[name] for name in found)
    # Of each photograph the first of eight is for validation.
    assert sorted(found) == sorted(
        f"{'val' if place % 8 == 0 else 'train'}/{name}/{place:05}.jpg"
        for name in sources
        for place in range(10)
    )
    images = [Image.open(io.BytesIO(data)) for data in found.values()]
    sizes = [image.size for image in images]
    assert all(450 <= width <= 550 and 337 <= height <= 413 for width, height in sizes)
    assert len(set(sizes)) > 5
    # 16 in the standard's table, at quality 90
    assert all(image.quantization[0][0] == 3 for image in images)


def test_photographs_are_there_whole_or_not_at_all(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="--count 3: expected at least"):
        tools.make_photographs.write(tmp_path / "few", 3, 0)
    (tmp_path / "old").mkdir()
    with pytest.raises(InputError, match="old exists; choose another -output"):
        tools.make_photographs.write(tmp_path / "old", 32, 0)
    crop = tools.make_photographs.crop
    made = []

    def fails(*given):
        made.append(given)
        if len(made) == 4:
            raise OSError("no space")
        return crop(*given)

    monkeypatch.setattr(tools.make_photographs, "crop", fails)
    with pytest.raises(OSError, match="no space"):
        tools.make_photographs.write(tmp_path / "new", 32, 0)
    assert [file.name for file in tmp_path.iterdir()] == ["old"]
