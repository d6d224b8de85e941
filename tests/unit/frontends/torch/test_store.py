"""Entries of PyTorch's store: who has the job's key knows those of others who have it. Where it listens."""

from __future__ import annotations

import importlib
import socket
from datetime import timedelta

import psutil
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from netstorm.errors import NotAuthorised, SettingsError
from netstorm.frontends.torch.store import limit_the_store_to_its_address, sealed, unsealed
from netstorm.pslite.keys import JobKey

KEY = JobKey(b"k" * 32)
ADDRESS = "10.0.0.1:9091"


def test_an_entry_is_what_was_put_into_it_with_a_key_and_without():
    assert unsealed(sealed(ADDRESS, "name", KEY), "name", KEY) == ADDRESS
    assert unsealed(sealed(ADDRESS, "name", None), "name", None) == ADDRESS


@pytest.mark.parametrize(
    "content",
    [
        ADDRESS,
        "",
        sealed("10.0.0.66:9091", "name", KEY).replace("66", "1"),
        sealed(ADDRESS, "another name", KEY),
        sealed(ADDRESS, "name", JobKey(b"x" * 32)),
    ],
    ids=["no code", "empty", "another text", "of another entry", "another key"],
)
def test_an_entry_of_somebody_else_is_refused_with_what_to_do(content):
    with pytest.raises(NotAuthorised, match=r"(?s)'name'.*NETSTORM_KEY_FILE.*same file.*MASTER_PORT"):
        unsealed(content, "name", KEY)


def test_a_process_without_the_key_that_rank_0_has_is_told_so():
    with pytest.raises(SettingsError, match="set NETSTORM_KEY_FILE"):
        unsealed(sealed(ADDRESS, "name", KEY), "name", None)


def listening_at(port: int) -> set[str]:
    found = psutil.Process().net_connections(kind="inet")
    return {each.laddr.ip for each in found if each.status == "LISTEN" and each.laddr.port == port}


def test_the_store_listens_at_the_address_of_the_job_alone(monkeypatch):
    module = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "_create_c10d_store", module._create_c10d_store)  # put back afterwards
    limit_the_store_to_its_address()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = module._create_c10d_store("127.0.0.1", port, 0, 1, timedelta(seconds=30))
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert listening_at(port) == {"127.0.0.1"}
