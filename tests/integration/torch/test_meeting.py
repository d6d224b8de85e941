"""How the members of a group find the scheduler: addresses are tried, and no one waits for what cannot be.

The members are threads here, over a store in memory, and say that they are on different machines.
"""

from __future__ import annotations

import re
import threading
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from netstorm.errors import NetStormError, SettingsError, Unreachable, UsageError, WaitTimeout
from netstorm.settings import Settings

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from torch._C._distributed_c10d import HashStore

    from netstorm.frontends.torch import startup as scheduler_process
    from netstorm.frontends.torch.startup import answering, meet, reachable, refuse

DEADLINE_S = 60
NOWHERE = "127.0.0.77"
"""Loopback, so the attempt ends at once: nobody listens there but a listener on all addresses."""


class Members:
    """The members of one group."""

    def __init__(self, monkeypatch, tmp_path):
        self.machines: list[int] = []
        self.addresses = {1: ["127.0.0.2", "127.0.0.3"]}
        """Of each machine."""
        self.started: list[str] = []
        self.store = HashStore()
        self.environment = {"NETSTORM_SECURITY": "off", "NETSTORM_JOIN_TIMEOUT": "30"}
        self._mine = threading.local()
        monkeypatch.setattr(scheduler_process, "machine_number", lambda: self._mine.machine)
        monkeypatch.setattr(
            scheduler_process, "own_addresses", lambda: self.addresses.get(self._mine.machine, [])
        )
        monkeypatch.setattr(scheduler_process, "start_scheduler", self._start)

    def _start(self, _settings, host):
        self.started.append(host)
        return SimpleNamespace(address=f"{host}:9091")

    def meet(self, *machines, **settings):
        """Have a member on each of these machines meet; return what each of them got."""
        got: list[object] = [None] * len(machines)

        def member(rank):
            self._mine.machine = machines[rank]
            variables = {**self.environment, **settings.get(f"rank{rank}", {})}
            try:
                got[rank] = meet(self.store, rank, len(machines), Settings.from_environment(variables))[:2]
            except NetStormError as error:
                got[rank] = error

        threads = [threading.Thread(target=member, args=(rank,)) for rank in range(len(machines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        return got


@pytest.fixture
def members(monkeypatch, tmp_path):
    return Members(monkeypatch, tmp_path)


def test_on_one_machine_the_scheduler_is_on_loopback(members):
    assert members.meet(1, 1, 1) == [("127.0.0.1", 9091)] * 3


def test_on_several_it_is_at_an_address_that_all_have_reached(members):
    members.addresses[1] = ["192.0.2.77%nowhere", "127.0.0.3"]
    assert members.meet(1, 2, 3) == [("127.0.0.3", 9091)] * 3


def test_the_address_that_the_user_has_given_for_the_store_is_tried_before_others(members):
    members._mine.machine = 1
    members.addresses[1] = ["127.0.0.2", "127.0.0.3"]
    note = scheduler_process._Note
    assert scheduler_process._offered([note(addresses=("127.0.0.3",))]) == ["127.0.0.3", "127.0.0.2"]
    assert scheduler_process._offered([note(), note(addresses=("192.0.2.1",))])[-2:] == [
        "127.0.0.2",
        "127.0.0.3",
    ]


def test_an_address_that_another_host_has_too_means_that_host_there(members):
    """Bridges to containers have the same address everywhere."""
    members.addresses = {1: ["127.0.0.2", "127.0.0.3"], 2: ["127.0.0.2"]}
    assert members.meet(1, 1, 2) == [("127.0.0.3", 9091)] * 3


def test_a_group_of_the_same_name_meets_again_whatever_the_others_have_done_meanwhile(members):
    assert members.meet(1, 1) == [("127.0.0.1", 9091)] * 2
    assert members.meet(1, 2) == [("127.0.0.2", 9091)] * 2


def test_if_nobody_reaches_rank_0_all_hear_at_once_what_to_set(members):
    members.addresses = {1: ["127.0.0.2"], 2: ["127.0.0.2"]}
    first, second = members.meet(1, 2)
    assert isinstance(first, Unreachable)
    assert re.search(
        r"can be reached by all.*127\.0\.0\.2; rank 1 .*reaches none; set DMLC_NODE_HOST", str(first)
    )
    assert str(first) in str(second)
    assert members.started == []


def test_addresses_that_some_reach_and_others_do_not_are_named(members):
    members.addresses |= {2: ["127.0.0.2"], 3: ["127.0.0.3"]}
    first, *_ = members.meet(1, 2, 3)
    assert "rank 1" in str(first)
    assert "reaches 127.0.0.3, rank 2" in str(first)


def test_a_given_address_is_the_only_one(members):
    given = {"DMLC_NODE_HOST": "127.0.0.1"}
    first, second = members.meet(1, 2, rank0=given)
    assert "DMLC_NODE_HOST=127.0.0.1 at rank 0" in str(first)
    assert "rank 1 (host " in str(first)
    assert str(first) in str(second)
    members.store = HashStore()  # another group
    first, second, third = members.meet(1, 2, 2, rank1=given)
    assert "DMLC_NODE_HOST=127.0.0.1 at rank 1" in str(first)
    assert str(first) in str(second)
    assert str(first) in str(third)
    members.store = HashStore()
    assert members.meet(1, 1, rank0={"NETSTORM_BIND": "127.0.0.9"}) == [("127.0.0.9", 9091)] * 2


def test_without_a_key_several_hosts_are_refused_at_all_members(members):
    members.addresses[1] = ["10.77.0.1"]
    members.environment = {}
    first, second = members.meet(1, 2)
    assert isinstance(first, SettingsError)
    assert "NETSTORM_KEY_FILE" in str(first)
    assert str(first) in str(second)


def test_a_member_that_cannot_take_part_says_so_to_all(members):
    refuse(members.store, 2, "it is in another job")
    got = []
    for rank in (0, 1):
        members._mine.machine = 1
        with pytest.raises(UsageError, match="rank 2 of this group makes no job: it is in") as caught:
            meet(members.store, rank, 3, Settings.from_environment({"NETSTORM_JOIN_TIMEOUT": "1"}))
        got.append(caught)
    assert len(got) == 2


def test_a_wrong_setting_of_one_member_is_told_to_all(members):
    found = members.meet(1, 1, 1, rank2={"DMLC_INTERFACE": "nothing9"})
    for error in found:
        assert isinstance(error, UsageError)
        assert "DMLC_INTERFACE='nothing9': no such interface" in str(error)


def test_a_member_that_does_not_come_is_named(members):
    members._mine.machine = 1
    with pytest.raises(
        WaitTimeout, match=r"NETSTORM_JOIN_TIMEOUT\): nothing in PyTorch's store is from ranks 1, 2"
    ):
        meet(members.store, 0, 3, Settings.from_environment({"NETSTORM_JOIN_TIMEOUT": "0.1"}))


def test_only_the_process_with_the_token_counts_as_reached():
    with answering("*") as (port, token):
        tried = ["127.0.0.1", "::1", NOWHERE]
        assert reachable(["127.0.0.1"], port, token, DEADLINE_S) == ["127.0.0.1"]
        assert reachable(["127.0.0.1"], port, bytes(len(token)), DEADLINE_S) == []
        assert set(reachable(tried, port, token, DEADLINE_S)) >= {"127.0.0.1", NOWHERE}
    assert reachable(tried, port, token, DEADLINE_S) == []
