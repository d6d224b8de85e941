"""Ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.forking import Forker
from tests.integration.torch.ranks import Ranks, torch_forker


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """The process that ranks are forked from: it is no test's to clean up."""
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    with torch_forker() as process:
        yield process


@pytest.fixture
def ranks(forker: Forker, tmp_path: Path) -> Iterator[Ranks]:
    """A job that a test may start."""
    with Ranks(forker, tmp_path) as job:
        yield job
