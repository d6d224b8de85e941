from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.launch.launcher import Launcher, inside, kill


@pytest.fixture
def launcher(tmp_path) -> Iterator[Launcher]:
    """A launcher none of whose processes may be alive at the end of the test."""
    launcher = Launcher(tmp_path)
    yield launcher
    left = inside(tmp_path)  # a test that kills its launcher waits until this is empty
    kill(left)
    assert not left, "processes have outlived their job"
