"""Nodes with MXNet are forked."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def nodes_are_forked(mxnet_forker: None) -> None:
    """Start the forker before the first test, which would seem to leave it behind."""
