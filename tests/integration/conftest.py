"""What tests of several folders start once."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.integration.forking import Forker
from tests.integration.jobs import PYTHONPATH, Job


@pytest.fixture(scope="session")
def mxnet_forker() -> Iterator[None]:
    """The process that nodes with MXNet are forked from: it is no test's to clean up."""
    if find_spec("mxnet") is None:
        yield
        return
    environment = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with Forker("tests.integration.mxnet.forker", environment) as forker:
        Job.forker = forker
        yield
        Job.forker = None
