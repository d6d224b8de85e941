"""Ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.torch.local_updates.rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks that serve all tests here: they are no test's to clean up."""
    with RankPool() as ranks:
        ranks.warm_up()
        yield ranks
