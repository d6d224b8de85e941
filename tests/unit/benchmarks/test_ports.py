"""Ports for jobs in namespaces: here, all of them in this one."""

from __future__ import annotations

import contextlib
import importlib
import socket
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ports(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("systems.ports")


def here(_rank):
    return contextlib.nullcontext()


def listening(port):
    listener = socket.socket()
    listener.bind(("", port))
    listener.listen()
    return listener


@pytest.mark.parametrize("after", [0, 1])
def test_a_port_that_is_in_use_or_whose_next_one_is_is_not_handed_out(ports, after):
    free = ports.NamespacePorts(here)(0)
    with listening(free + after):
        assert ports.NamespacePorts(here)(0) != free


def test_no_port_is_handed_out_twice_for_whichever_rank(ports):
    free = ports.NamespacePorts(here)
    found = [free(rank) for rank in (0, 1, 0, 2)]
    assert len(set(found)) == 4
    assert all(port + 1 not in found for port in found)


def test_the_error_when_no_port_is_left_names_the_rank(ports, monkeypatch):
    monkeypatch.setattr(ports, "_is_free", lambda _port: False)
    with pytest.raises(RuntimeError, match="no free TCP port from 21000 to 31999 beside rank 3"):
        ports.NamespacePorts(here)(3)
