"""Groups whose members change by PyTorch's `_reconfigure`: grow, shrink, both, apart and together again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from netstorm.errors import NetStormError
from netstorm.lab.emulation import unmet_requirements
from netstorm.lab.emulation.namespaces import inside
from netstorm.lab.emulation.wan import Wan
from netstorm.pslite.keys import JobKey
from netstorm.topology.network import Network
from tests.integration.torch.begin import PATIENCE, error_of
from tests.integration.torch.ranks import Ranks

PRIVATE: Any = dist
"""With what PyTorch 2.14 calls private, and 2.13 does not have."""

pytestmark = pytest.mark.skipif(
    not hasattr(PRIVATE, "_reconfigure"),
    reason=f"PyTorch {torch.__version__} has no _reconfigure(); 2.14 has",
)

DEADLINE_S = 60
SHORT = {"PS_HEARTBEAT_INTERVAL": "0.5", "PS_HEARTBEAT_TIMEOUT": "3"}


class Process:
    """This process, its group, and the store by which processes tell each other their handles."""

    def __init__(self, timeout: timedelta = PATIENCE) -> None:
        self.number, self.all = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        path = os.environ["STORE"].removeprefix("file://")
        self.store = FileStore(path, self.all)
        named: dict[str, Any] = {"enable_reconfigure": True}  # which PyTorch 2.13 does not know
        dist.init_process_group(
            "netstorm", store=self.store, rank=self.number, world_size=self.all, timeout=timeout, **named
        )
        self.store.set(f"handle/{self.number}", self.handle)

    @property
    def handle(self) -> str:
        handle: str = PRIVATE._get_reconfigure_handle()
        return handle

    def handles(self, members: Sequence[int]) -> list[str]:
        return [self.store.get(f"handle/{each}").decode() for each in members]

    def enter(self, uuid: int, members: Sequence[int], limit_s: float = 30) -> None:
        """Enter a view of these processes, by their numbers, and assert that PyTorch knows its ranks."""
        PRIVATE._reconfigure(uuid, self.handles(members), timeout=timedelta(seconds=limit_s)).wait()
        assert (dist.get_rank(), dist.get_world_size()) == (members.index(self.number), len(members))
        assert dist.get_process_group_ranks(None) == list(range(len(members)))

    def assert_sums(self, members: Sequence[int], size: int = 1000) -> None:
        """Assert that a sum has the values of these processes, and of no other one."""
        tensor = torch.full((size,), 10.0**self.number)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [sum(10.0**each for each in members)]

    def wait_for_all(self, name: str) -> None:
        self.store.set(f"{name}/{self.number}", "")
        self.store.wait([f"{name}/{each}" for each in range(self.all)], timedelta(seconds=DEADLINE_S))


def change() -> str:
    process = Process()
    views: list[list[int]] = [[0, 1], [0, 1, 2], [2, 3, 1], [3], [3, 2, 1, 0]]
    assert PRIVATE._supports_reconfigure()
    assert "has not been reconfigured yet" in error_of(dist.all_reduce, torch.ones(1))
    refused = ""
    for number, members in enumerate(views):
        if process.number in members:
            process.enter(100 + number, members)
            process.assert_sums(members)
            root = len(members) - 1
            tensor = torch.tensor([float(process.number)])
            dist.broadcast(tensor, src=root)
            assert tensor.item() == members[root]
        process.wait_for_all(f"view {number}")
        if number == 2 and process.number == 0:  # the others have left
            refused = error_of(dist.all_reduce, torch.ones(1))
        process.wait_for_all(f"after {number}")
    dist.destroy_process_group()
    return refused


def test_a_group_grows_shrinks_does_both_at_once_and_comes_together_again(ranks: Ranks) -> None:
    ranks.start(change, 4)
    refused = ranks.answers()[0]
    assert refused.startswith("Uneven") or "finished" in refused or "reconfigured" in refused, refused


def split() -> None:
    process = Process()
    for nth, parts in enumerate([[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 2], [3, 1]]]):
        for place, members in enumerate(parts):
            if process.number in members:
                process.enter(10 * nth + place, members)
                for _ in range(3):
                    process.assert_sums(members)
    process.wait_for_all("end")


def test_two_parts_without_each_other_work_both_and_merge(ranks: Ranks) -> None:
    ranks.start(split, 4)
    ranks.answers()


def often() -> None:
    process = Process()
    for uuid in range(8):
        members = [(place + uuid) % 3 for place in range(3)]
        process.enter(uuid, members)
        process.assert_sums(members, size=300_000)  # and goes at once, while it forwards the result


def test_members_that_have_their_result_leave_without_taking_it_from_the_others(ranks: Ranks) -> None:
    ranks.start(often, 3)
    ranks.answers()


def miss(absent: int) -> tuple[str, float]:
    process = Process()
    members = [0, 1, 2]
    process.wait_for_all("here")
    if process.number == absent:
        process.wait_for_all("missed")
        return "", 0.0
    began = time.monotonic()
    error = error_of(process.enter, 1, members, 2.0)
    took = time.monotonic() - began
    assert "last reconfiguration has failed" in error_of(dist.all_reduce, torch.ones(1))
    rest = [each for each in members if each != absent]
    process.enter(2, rest)
    process.assert_sums(rest)
    process.wait_for_all("missed")
    return error, took


@pytest.mark.parametrize("absent", [0, 2])
def test_a_member_that_does_not_come_is_named_and_the_rest_can_go_on(ranks: Ranks, absent: int) -> None:
    ranks.start(miss, 3, absent=absent)
    for number, (error, took) in enumerate(ranks.answers()):
        if number != absent:
            assert error.startswith("WaitTimeout"), error
            assert f"not here: {absent}" in error, error
            assert f"rank {absent}: process {ranks.pids[absent]} of host" in error, error
            assert took < DEADLINE_S


def survive(members: list[int]) -> float:
    process = Process()
    process.enter(1, members)
    try:
        for step in range(1_000_000):
            process.assert_sums(members)
            if step == 3:
                print("running", flush=True)
    except NetStormError as error:
        print("lost:", error, flush=True)
    killed = int(process.store.get("killed"))
    began = time.monotonic()
    rest = [each for each in members if each != killed]
    process.enter(2, rest)
    took = time.monotonic() - began
    process.assert_sums(rest)
    dist.destroy_process_group()
    return took


@pytest.mark.parametrize("victim", [0, 1])
def test_after_kill_9_the_others_hear_of_it_and_go_on_without_it(ranks: Ranks, victim: int) -> None:
    ranks.start(survive, 3, members=[0, 1, 2], **SHORT)
    for rank in range(3):
        ranks.wait_until_said(rank, "running")
    ranks.send(victim, signal.SIGKILL)
    store = FileStore(f"{ranks.folder}/store", 3)
    store.set("killed", str(victim))
    for rank in {0, 1, 2} - {victim}:
        assert ranks.answer(rank) >= 0, ranks.said(rank)


def leave_calls() -> str:
    process = Process()
    process.enter(1, [0, 1])
    process.wait_for_all("entered")
    errors: list[str] = []
    if process.number == 0:
        work: Any = dist.all_reduce(torch.ones(10), async_op=True)

        def wait() -> None:
            errors.append(error_of(work.wait))
            process.store.set("left", "")

        waiting = threading.Thread(target=wait)
        waiting.start()
        process.enter(2, [0, 1])
        waiting.join()
    else:
        process.store.wait(["left"])  # or its own leaving would be the error
        process.enter(2, [0, 1])
    process.assert_sums([0, 1])
    process.wait_for_all("summed")
    PRIVATE.group.WORLD.abort()
    assert "was aborted" in error_of(dist.all_reduce, torch.ones(1))
    process.enter(3, [1, 0])
    process.assert_sums([0, 1])
    return "".join(errors)


def test_calls_of_the_view_before_end_with_an_error_that_says_so(ranks: Ranks) -> None:
    ranks.start(leave_calls, 2)
    assert "the group was reconfigured, to view 2" in ranks.answers()[0]


def train() -> list[float]:
    process = Process()
    process.enter(1, [0, 1, 2])
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    parallel = DistributedDataParallel(model, init_sync=False)
    gradients = []
    for uuid, members in enumerate([[0, 1, 2], [2, 0]], start=2):
        if process.number in members:
            process.enter(uuid, members)
            model.zero_grad()
            parallel(torch.full((1, 3), float(process.number))).sum().backward()
            gradient = model.weight.grad
            assert gradient is not None
            gradients.append(gradient[0, 0].item())
    process.wait_for_all("end")
    return gradients


def test_ddp_averages_over_the_members_of_the_view_that_it_is_in(ranks: Ranks) -> None:
    ranks.start(train, 3)
    assert ranks.answers() == [[1.0, 1.0], [1.0], [1.0, 1.0]]


def with_key() -> list[str]:
    process = Process()
    process.enter(1, [1, 0])
    process.assert_sums([0, 1])
    forged = process.handles([0])[0].replace("netstorm:", "netstorm:AAAA")
    return [error_of(PRIVATE._reconfigure, 2, [forged, process.handle]), error_of(process.enter, 1, [0, 1])]


def test_handles_are_made_under_the_jobs_key_and_a_number_is_used_once(ranks: Ranks, tmp_path: Path) -> None:
    key = tmp_path / "job.key"
    JobKey.create(key)
    ranks.start(with_key, 2, NETSTORM_KEY_FILE=key)
    for forged, again in ranks.answers():
        assert forged.startswith("NotAuthorised"), forged
        assert "uuid 1 was already used" in again


def far_apart(hosts: list[tuple[str, str]]) -> list[int]:
    """Return over how many connections that were there others came to this scheduler, up to each view."""
    number = int(os.environ["RANK"])
    namespace, os.environ["DMLC_NODE_HOST"] = hosts[number]
    used = []
    with inside(namespace):
        process = Process()
        group: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        counters = group._scheduler._running.driver.endpoint.counters
        ahead = 0
        for uuid, members in enumerate([[0, 1, 2], [1, 2, 0], [2, 0], [0, 2]]):
            if number in members:
                process.enter(uuid, members)
            process.wait_for_all(f"entered {uuid}")
            used.append(counters.get("reserved_used"))
            if number in members:
                process.assert_sums(members)
                ahead += len(members) - 1
                deadline = time.monotonic() + DEADLINE_S
                while counters.get("reserved") < ahead:
                    assert time.monotonic() < deadline, counters.snapshot()
                    time.sleep(0.02)
            process.wait_for_all(f"after {uuid}")
        dist.destroy_process_group()
    return used


@pytest.mark.slow
@pytest.mark.skipif(bool(unmet_requirements()), reason="no right to network namespaces")
def test_far_members_of_the_view_before_enter_the_next_one_over_connections_that_are_there(
    ranks: Ranks, tmp_path: Path
) -> None:
    key = tmp_path / "job.key"
    JobKey.create(key)
    with Wan.up(Network.uniform(3, rate=1e9, latency=0.02)) as wan:
        hosts = [(wan.namespace(rank), wan.address(rank)) for rank in range(3)]
        ranks.start(far_apart, 3, hosts=hosts, NETSTORM_KEY_FILE=key)
        used = ranks.answers()
    assert used == [[0, 0, 0, 1], [0, 2, 2, 2], [0, 0, 1, 1]]


def groups() -> tuple[float, str, str, float]:
    process = Process()
    early = error_of(dist.new_group)
    process.enter(1, [0, 1, 2, 3])
    mine = [dist.new_group(pair) for pair in ([0, 1], [2, 3])][process.number // 2]
    of_all: Any = dist.new_group()
    tensor = torch.tensor([float(process.number)])
    dist.all_reduce(tensor, group=mine)
    dist.broadcast(tensor, src=2, group=of_all)
    process.wait_for_all("grouped")
    late, second = "", torch.tensor([0.0])
    if process.number != 2:
        process.enter(2, [3, 1, 0])
        late = error_of(dist.all_reduce, torch.ones(1), group=of_all)
        again = dist.new_group([0, 2])
        if process.number != 1:
            second = torch.tensor([float(process.number)])
            dist.all_reduce(second, group=again)
        process.assert_sums([3, 1, 0])
    process.wait_for_all("end")
    return tensor.item(), early, late, second.item()


def test_a_views_groups_end_with_it_and_say_what_to_do(ranks: Ranks) -> None:
    ranks.start(groups, 4)
    for number, (value, early, late, again) in enumerate(ranks.answers()):
        assert value == 2 + 3
        assert "in no view: it has not been reconfigured yet" in early
        if number != 2:
            assert late.startswith("Closed"), late
            assert "make it again" in late, late
            assert again == (0.0 if number == 1 else 3.0)
