"""DiLoCo's sums with a quorum, one of whose ranks takes several times as long a step: the others do not wait
for it, wherever it stands in the tree. Time is virtual, so these are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.messages import LossTerms
from netstorm.topology.network import Link, Network, Rank, Routing
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from netstorm.training.periods import FragmentSchedule, Periodic

RANKS, SLOW, VALUES = 4, 3, 40_000
STEP_S, TIMES_SLOWER, STEPS = 0.05, 4, 240
EVERY, DELAY, GRACE_S = 20, 10, 0.2
TERMS = LossTerms(bound=1.5 / RANKS, deadline_s=GRACE_S)  # as OuterQuorum of three ranks

TREES = {
    "a leaf": Tree.undirected(Rank(0), (-1, 0, 1, 2)),
    "in the middle": Tree.undirected(Rank(0), (-1, 3, 3, 0)),
    "the root of a star": Tree.undirected(Rank(3), (3, 3, 3, -1)),
    "the root of a chain": Tree.undirected(Rank(3), (3, 0, 1, -1)),
}


@dataclass
class Program:
    """The training loop of one rank, as `DiLoCo` makes it: sums begin, are applied, and a rank that is behind
    goes on to the next.

    Attributes:
        waited_s: for sums, in all.
        taken: steps that it has computed.
    """

    cluster: SimulatedCluster
    rank: int
    step_s: float
    terms: LossTerms | None
    plan: FragmentSchedule
    waited_s: float = 0.0
    taken: int = 0
    ended_at: float = -1.0
    sums: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = Periodic("DiLoCo", self.plan)
        self.node = self.cluster.nodes[self.rank]
        self.kept = np.zeros(VALUES, np.float32)
        self.compute()

    def compute(self) -> None:
        if self.steps.steps >= STEPS:
            self.ended_at = self.cluster.now
        else:
            self.cluster.at(self.cluster.now + self.step_s, self.step)

    def step(self) -> None:
        self.taken += 1
        self.kept += 1
        self.go_on(hurries=False)

    def go_on(self, *, hurries: bool) -> None:
        self.steps.next_step(hurries=hurries)
        if self.plan.begin_at(self.steps.steps):
            pending = self.node.push("a", self.kept, loss=self.terms)
            self.sums.append((pending, self.node.operations[-1]))
        if not self.plan.apply_at(self.steps.steps):
            self.applied()
            return
        waits_from = self.cluster.now

        def ended() -> None:
            self.waited_s += self.cluster.now - waits_from
            self.applied()

        pending, _ = self.sums[-1]
        if pending.ended:
            ended()
        else:
            pending.then(ended)

    def applied(self) -> None:
        if self.terms is not None and self.is_behind() and self.steps.steps < STEPS:
            self.go_on(hurries=True)
        else:
            self.compute()

    def is_behind(self) -> bool:
        has_ended = bool(self.sums) and self.sums[-1][0].ended
        was_late = has_ended and self.rank not in self.ranks_in_sum(-1)
        key = self.node.keys["a"]
        return self.node.machine.is_behind(key.identity, key.last_taken + 1, begun=was_late)

    def ranks_in_sum(self, number: int) -> set[int]:
        """Return who is in all chunks of a sum's result."""
        found = self.sums[number][1].contributors
        return {rank for rank in range(RANKS) if all(bits >> rank & 1 for bits in found)}


def trained(tree: Tree, *, slower: float, terms: LossTerms | None, **settings: Any) -> list[Program]:
    """Return the programs when all have ended."""
    links = tuple(
        Link(source=Rank(a), target=Rank(b), rate=100e6, latency=0.01)
        for a in range(RANKS)
        for b in range(RANKS)
        if a != b
    )
    cluster = SimulatedCluster(
        RANKS,
        network=Network(nodes=Network.uniform(RANKS).nodes, links=links, routing=Routing.OVERLAY),
        policy=Policy(version=0, trees=(tree,), weights=(1,)),
        loss_bound=TERMS.bound,
        **settings,
    ).join()
    plan = FragmentSchedule(fragments=1, sync_every=EVERY, delay=DELAY)
    for node in cluster.nodes:
        node.register("a", (VALUES,), "float32")
    programs = [
        Program(cluster, rank, STEP_S * (slower if rank == SLOW else 1), terms, plan) for rank in range(RANKS)
    ]
    cluster.run_until(lambda: all(one.ended_at >= 0 for one in programs), 300, "the end of all programs")
    return programs


@pytest.mark.parametrize("settings", [{}, {"elastic": "2:4"}], ids=["fixed", "elastic"])
@pytest.mark.parametrize("place", TREES)
@pytest.mark.parametrize("slower", [TIMES_SLOWER, pytest.param(9, marks=pytest.mark.slow)])
def test_a_rank_that_is_several_times_slower_costs_the_others_nothing_wherever_it_is(place, settings, slower):
    programs = trained(TREES[place], slower=slower, terms=TERMS, **settings)
    for one in programs[:SLOW]:
        assert one.waited_s <= 0.1, "of 12 s: one sum has a long way down a chain"
        assert one.taken == STEPS
    slow = programs[SLOW]
    assert slow.taken < STEPS / 2
    late = sum(SLOW not in slow.ranks_in_sum(number) for number in range(len(slow.sums)))
    assert 0 < late < len(slow.sums), "it is late at times, and counts at others"


def test_without_a_quorum_they_wait_for_all_of_its_steps():
    programs = trained(TREES["a leaf"], slower=TIMES_SLOWER, terms=None)
    assert programs[0].waited_s > (TIMES_SLOWER - 1.2) * STEPS * STEP_S
