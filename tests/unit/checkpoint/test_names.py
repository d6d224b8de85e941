"""Names of checkpoints, and which may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.checkpoint.names import folder_of_step, step_of_folder, superfluous


@given(st.integers(0, 10**18 - 1))
def test_a_folder_is_named_after_its_step(step):
    assert step_of_folder(folder_of_step(step)) == step


@pytest.mark.parametrize("name", ["step-12", "step-0001234567", "step-000123.tmp", "other", "step-00012x"])
def test_other_folders_are_no_checkpoints(name):
    assert step_of_folder(name) is None


@pytest.mark.parametrize(
    ("complete", "keep", "removed"),
    [
        ({1: True, 2: True, 3: True}, None, []),
        ({1: True, 2: True, 3: True}, 2, [1]),
        ({1: True, 2: False, 3: True}, 2, [2]),
        ({1: True, 2: False, 3: True}, 1, [1, 2]),
        ({1: True, 2: False}, 1, []),
        ({1: False, 2: False}, 1, []),
    ],
)
def test_the_oldest_go_and_what_was_half_written_before_a_complete_one(complete, keep, removed):
    assert superfluous(complete, keep) == removed


@given(st.dictionaries(st.integers(0, 30), st.booleans()), st.none() | st.integers(1, 5))
def test_the_newest_complete_one_stays(complete, keep):
    newest = max((step for step, is_complete in complete.items() if is_complete), default=None)
    assert newest not in superfluous(complete, keep)
