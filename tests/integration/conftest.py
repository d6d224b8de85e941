"""What tests of several folders start once."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.integration.forking import Forker
from tests.integration.jobs import PYTHONPATH, Job

_ENVIRONMENT = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session", autouse=True)
def netstorm_forker() -> Iterator[None]:
    """The process that schedulers and plain nodes are forked from: it is no test's to clean up."""
    with Forker("tests.integration.forker", _ENVIRONMENT) as Job.forker:
        yield
    Job.forker = None


@pytest.fixture(scope="session")
def torch_forker() -> Iterator[Forker]:
    """The process that ranks with PyTorch are forked from: it is no test's to clean up."""
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    with Forker("tests.integration.torch.forker", variables) as process:
        yield process


@pytest.fixture(scope="session")
def mxnet_forker() -> Iterator[None]:
    """The process that nodes with MXNet are forked from: it is no test's to clean up."""
    if find_spec("mxnet") is None:
        yield
        return
    with Forker("tests.integration.mxnet.forker", _ENVIRONMENT) as Job.mxnet_forker:
        yield
    Job.mxnet_forker = None
