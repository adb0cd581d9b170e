"""Weight files that a stranger wrote."""

from pathlib import Path

import pytest
from hostile import attempt, damaged
from hypothesis import given
from hypothesis import strategies as st

from weights.formats import read_weights

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("name", ["weights.pth", "weights_legacy.pth", "weights.safetensors"])
def test_a_damaged_weight_file_is_read_or_refused(name, tmp_path):
    whole, path = (GOLDEN / name).read_bytes(), tmp_path / "file"
    path.write_bytes(whole)
    assert attempt(name, len(whole), lambda: read_weights(path)) == ""

    @given(st.data())
    def try_one(data):
        path.write_bytes(data.draw(damaged(whole)))
        attempt(name, path.stat().st_size, lambda: read_weights(path))

    try_one()
