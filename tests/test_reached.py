"""The test files that ``make check`` chooses for a change."""

import pytest
from support.reached import ALWAYS, chosen


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        # imported by the test itself
        ("weights/resize.py", "tests/weights/test_resize.py"),
        # by way of tests/support
        ("models/vit.py", "tests/models/test_vit.py"),
        # chosen by name: nothing imports it
        ("training/optim/lion.py", "tests/training/test_optim.py"),
        ("config.py", "tests/test_config.py"),
        # no module
        ("docs/reference/keys.md", "tests/test_site.py"),
        ("tests/training/test_window.py", "tests/training/test_window.py"),
    ],
)
def test_a_change_reaches_the_tests_that_import_it(changed, first):
    run, left_out = chosen([changed], 12)
    assert first in run[:12]
    assert set(ALWAYS) <= set(run)
    assert len(run) <= 14
    assert (
        left_out == len(chosen([changed], 1000)[0]) - len(set(run) | set(ALWAYS)) or len(run) < 14
    )


def test_changed_tests_are_run_beyond_the_limit():
    changed = ["tests/training/test_window.py", "tests/training/test_optim.py"]
    assert chosen(changed, 1) == ([changed[1], changed[0], *ALWAYS], 0)
