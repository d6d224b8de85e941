"""Sums within a site and across sites: right for all layouts, and each site sends its values once."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.kvstore.calls import Sites, SiteSums, run_in_turn, set_memory
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import Pending
from netstorm.protocol.messages import Member
from tests.simulated.jobs import examples

ELEMENTS = 5000


class OneTensor:
    """A tensor at each rank of a cluster whose ranks are at sites."""

    def __init__(self, layout: list[str], **options: Any) -> None:
        self.cluster = SimulatedCluster(nodes=len(layout), **options).join()
        self.members = [Member(rank, "host", 1, site, rank) for rank, site in enumerate(layout)]
        self.values = [np.full(ELEMENTS, float(rank + 1), np.float32) for rank in range(len(layout))]
        self.sums = [self._sums(rank) for rank in range(len(layout))]

    def sites(self, rank: int) -> Sites:
        return Sites.of(self.members, rank)

    def _sums(self, rank: int) -> SiteSums:
        register = functools.partial(self.cluster.nodes[rank].register, namespace=5)
        return SiteSums("w", ELEMENTS, np.dtype("float32"), self.sites(rank), register=register)

    def begin(self, rank: int, operations: list[Operation]) -> Pending:
        set_memory(operations, self.values[rank])
        node = self.cluster.nodes[rank]
        pending = Pending(self.cluster.timeline, f"rank {rank}: a site's sum")
        pending.collect_with(lambda: self.values[rank])

        def submit(operation: Operation) -> None:
            node.process.call(lambda now: node.machine.submit(operation, now))

        run_in_turn(operations, submit, pending.done)
        return pending

    def run(self, what: str) -> list[np.ndarray[Any, Any]]:
        pending = [self.begin(rank, getattr(sums, what)("w")) for rank, sums in enumerate(self.sums)]
        self.cluster.run_until_ended(pending, 60.0)
        return [one.result() for one in pending]


LAYOUTS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=7)


@given(LAYOUTS, st.integers(0, 99))
@examples(8)
def test_sums_within_a_site_and_then_of_all_are_right_at_every_rank(layout, seed):
    tensor = OneTensor(layout, seed=seed)
    within = tensor.run("within")
    for rank, values in enumerate(within):
        assert (values == sum(other + 1 for other in tensor.sites(rank).local)).all()
    tensor.values = [np.full(ELEMENTS, float(rank + 1), np.float32) for rank in range(len(layout))]
    ranks = len(layout)
    for values in tensor.run("across"):
        assert (values == ranks * (ranks + 1) / 2).all()


def test_a_leader_gives_its_values_to_its_site():
    tensor = OneTensor(["a", "b", "a", "b", "b"])
    assert [values[0] for values in tensor.run("from_leader")] == [1, 2, 1, 2, 2]


def test_a_sum_of_all_crosses_between_sites_once_each_way_and_a_sites_sum_does_not():
    layout = ["a", "a", "a", "b", "b", "b"]
    tensor = OneTensor(layout)
    between = [(i, j) for i in range(6) for j in range(6) if layout[i] != layout[j]]

    def sent() -> int:
        return sum(tensor.cluster.traffic(i, j) for i, j in between)

    before = sent()
    tensor.run("within")
    assert sent() - before < ELEMENTS
    before = sent()
    tensor.run("across")
    assert 2 * 4 * ELEMENTS <= sent() - before < 2.2 * 4 * ELEMENTS


def test_whole_numbers_are_refused():
    sites = Sites.of([Member(0, "host", 1, "a", 0)], 0)
    with pytest.raises(UsageError, match="int32"):
        SiteSums("w", 1, np.dtype("int32"), sites, register=functools.partial(Key, 0))
