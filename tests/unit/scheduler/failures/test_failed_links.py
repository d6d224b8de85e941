"""What follows from links that have failed: ways around them, and which policy is wanted."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from netstorm.scheduler.awareness.failed_link import FailedLinkRecord
from netstorm.scheduler.failures.failed_links import LinkFailures
from netstorm.scheduler.policies.assumptions import InitialAssumptions, PolicySettings, Workload
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult, tree_pairs
from netstorm.scheduler.policies.policy_former import form
from netstorm.topology.networks.elements import Link, Node, Rank
from netstorm.topology.networks.network import Network, Routing
from netstorm.topology.policy import Detour, Policy
from netstorm.topology.schemes.form import form_policy

MESH = Network.uniform(4, rate=100e6, latency=0.01)


def linked(
    size: int, pairs: list[tuple[int, int]], routing: Routing = Routing.OVERLAY, **rates: float
) -> Network:
    return Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(size)),
        links=tuple(
            Link(source=Rank(a), target=Rank(b), rate=rates.get(f"r{a}{b}", 1e8), latency=0.01)
            for one, other in pairs
            for a, b in ((one, other), (other, one))
        ),
        routing=routing,
    )


RING = linked(4, [(0, 1), (1, 2), (2, 3), (3, 0)])


class Told:
    """Failures, and the policy that they leave."""

    def __init__(self, network: Network = MESH, topology: str = "fapt", **plan: Any) -> None:
        self.policy = form_policy(network, topology, hub=0)
        planned = InitialAssumptions(
            network=network,
            known=True,
            settings=PolicySettings(topology=topology, hub=0, **plan),
            workload=Workload((10**6,), 10**5),
        )
        self.failures = LinkFailures(network.size, planned)

    def fail(self, source: int, target: int) -> bool:
        return self.failures.fail(FailedLinkRecord(source, target, "no answer", 1.0), self.policy)

    def look(self, *, restoring: bool = True) -> Policy | FormationRequest | None:
        found = self.failures.look(self.policy, None, None, restoring=restoring)
        if isinstance(found, Policy):
            self.policy = found
        return found

    def settle(self) -> list[str]:
        """Have everything formed that is asked for; return the topologies that were asked for."""
        asked = []
        while self.failures.due() == -math.inf:
            question = self.look()
            if isinstance(question, FormationRequest):
                asked.append(question.topology)
                policy = self.failures.formed(form(question), self.policy)
                self.policy = policy or self.policy
        return asked

    def ways(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {(one.source, one.target): one.way for one in self.failures.told()}


def test_a_way_leads_over_links_that_there_are_and_that_work():
    told = Told(RING)
    assert told.fail(0, 1)
    assert told.ways() == {(0, 1): (0, 3, 2, 1)}


def test_of_short_ways_the_fastest_is_taken():
    network = linked(4, [(0, 1), (0, 2), (2, 1), (0, 3), (3, 1)], r02=1e6, r21=1e6)
    told = Told(network)
    assert told.fail(0, 1)
    assert told.ways() == {(0, 1): (0, 3, 1)}


def test_every_new_failure_is_kept_clear_of_by_all_ways():
    told = Told()
    failed = [(0, 1), (0, 2), (3, 1)]
    for pair in failed:
        assert told.fail(*pair)
    for (source, target), way in told.ways().items():
        assert (way[0], way[-1]) == (source, target)
        assert not set(pairwise(way)) & told.failures.avoided


def test_the_other_direction_is_avoided_only_if_it_can_be_spared():
    told = Told(linked(3, [(0, 1), (1, 2), (2, 0)]))
    assert told.fail(0, 1)
    assert told.failures.avoided == {(0, 1), (1, 0)}
    chain = Told(replace(RING, links=tuple(one for one in RING.links if (one.source, one.target) != (3, 0))))
    assert chain.fail(0, 1) is True
    assert chain.failures.avoided == {(0, 1)}
    assert chain.ways() == {(0, 1): (0, 3, 2, 1)}


def test_without_its_only_link_nobody_can_go_on():
    told = Told(linked(3, [(0, 1), (1, 2)]))
    assert not told.fail(1, 2)
    assert not told.failures.failures


@pytest.mark.parametrize("topology", ["fapt", "mst", "ring", "star", "sharded", "packing", "auto"])
def test_a_policy_without_the_link_is_found_whatever_the_topology(topology):
    told = Told(topology=topology)
    pair = min(tree_pairs(told.policy))
    assert told.fail(*pair)
    asked = told.settle()
    assert asked[0] == topology
    assert told.failures.suits(told.policy)
    assert told.policy.version == 1
    assert f"link {pair[0]}→{pair[1]} has failed" in told.policy.reason


def test_where_routes_are_shared_pairs_that_are_no_links_do_too():
    told = Told(linked(4, [(0, 1), (1, 2), (2, 3)], Routing.UNDERLAY))
    assert told.fail(0, 1)
    told.settle()
    assert told.failures.suits(told.policy)


def test_when_the_last_link_is_back_the_policy_from_before_is_again():
    told = Told(topology="star")
    before = told.policy
    told.fail(0, 1)
    told.settle()
    told.fail(0, 2)
    told.settle()
    assert told.failures.restore(0, 1)
    told.settle()
    assert told.failures.suits(told.policy)
    assert told.failures.restore(0, 2)
    told.settle()
    assert told.policy.trees == before.trees
    assert "works again" in told.policy.reason
    assert not told.failures.restore(0, 2)


def test_who_follows_the_network_decides_himself_what_to_do_with_a_link_that_is_back():
    told = Told(topology="star")
    told.fail(0, 1)
    told.settle()
    told.failures.restore(0, 1)
    assert told.look(restoring=False) is None
    assert told.failures.due() == math.inf


def test_a_policy_whose_detours_alone_use_the_link_loses_these_at_once():
    told = Told(topology="star")
    lanes = ((1e8, 0.0), (1e8, 0.0))
    detours = tuple(Detour(path=path, links=lanes) for path in ((1, 2, 0), (1, 3, 0)))
    told.policy = msgspec.structs.replace(told.policy, detours=detours)
    told.fail(1, 2)
    policy = told.look()
    assert isinstance(policy, Policy)
    assert policy.detours == detours[1:]
    assert policy.trees == form_policy(MESH, "star", hub=0).trees


def test_an_answer_that_is_outdated_by_the_next_failure_is_asked_for_again():
    told = Told()
    told.fail(0, 1)
    question = told.look()
    assert isinstance(question, FormationRequest)
    told.fail(0, 2)
    assert told.failures.formed(form(question), told.policy) is None
    told.settle()
    assert told.failures.suits(told.policy)


def test_what_cannot_be_formed_leaves_the_job_with_ways_around():
    told = Told()
    told.fail(0, 1)
    question = told.look()
    assert isinstance(question, FormationRequest)
    nothing = FormationResult(number=question.number, problem="the process that forms policies has ended")
    assert told.failures.formed(nothing, told.policy) is None
    assert told.failures.due() == math.inf
    assert told.ways()
