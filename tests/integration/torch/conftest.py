"""Ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.forking import Forker
from tests.integration.torch.elastic_ranks import ElasticRanks, Started
from tests.integration.torch.ranks import Ranks


@pytest.fixture
def forker(torch_forker: Forker) -> Forker:
    """The process that ranks are forked from."""
    return torch_forker


@pytest.fixture
def ranks(forker: Forker, tmp_path: Path) -> Iterator[Ranks]:
    """A job that a test may start."""
    with Ranks(forker, tmp_path) as job:
        yield job


@pytest.fixture
def job(forker: Forker, tmp_path: Path) -> Iterator[Started]:
    """Elastic jobs that a test may start."""
    with ExitStack() as stack:

        def start(begin: int, bounds: str, folder: Path = tmp_path, **settings: object) -> ElasticRanks:
            return stack.enter_context(ElasticRanks(forker, folder, begin=begin, elastic=bounds, **settings))

        yield start
