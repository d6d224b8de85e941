"""What follows from links that have failed: detours around them, and which policy is wanted."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from netstorm.scheduler.awareness import FailedLinkRecord
from netstorm.scheduler.failures import LinkFailures
from netstorm.scheduler.policies import (
    FormationRequest,
    FormationResult,
    InitialAssumptions,
    PolicySettings,
    Workload,
    tree_pairs,
)
from netstorm.scheduler.policy_former import form
from netstorm.topology.form import form_policy
from netstorm.topology.network import Link, Network, Node, Rank, Routing
from netstorm.topology.policy import Detour, Policy

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


class Scenario:
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

    def check(self, *, restoring: bool = True) -> Policy | FormationRequest | None:
        found = self.failures.check(self.policy, None, None, restoring=restoring)
        if isinstance(found, Policy):
            self.policy = found
        return found

    def settle(self) -> list[str]:
        """Have everything formed that is asked for; return the topologies that were asked for."""
        asked = []
        while self.failures.due() == -math.inf:
            request = self.check()
            if isinstance(request, FormationRequest):
                asked.append(request.topology)
                policy = self.failures.formed(form(request), self.policy)
                self.policy = policy or self.policy
        return asked

    def detours(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {(link.source, link.target): link.way for link in self.failures.detours()}


def test_a_detour_leads_over_links_that_there_are_and_that_work_and_of_short_ones_is_the_fastest():
    scenario = Scenario(RING)
    assert scenario.fail(0, 1)
    assert scenario.detours() == {(0, 1): (0, 3, 2, 1)}
    scenario = Scenario(linked(4, [(0, 1), (0, 2), (2, 1), (0, 3), (3, 1)], r02=1e6, r21=1e6))
    assert scenario.fail(0, 1)
    assert scenario.detours() == {(0, 1): (0, 3, 1)}
    chain = Scenario(linked(3, [(0, 1), (1, 2)]))
    assert not chain.fail(1, 2)
    assert not chain.failures.failures, "without its only link nobody can go on"


def test_no_detour_leads_over_a_rank_that_is_not_in_the_job():
    scenario = Scenario(MESH)
    scenario.failures.without(2)
    assert scenario.fail(0, 1)
    assert scenario.detours() == {(0, 1): (0, 3, 1)}
    scenario.failures.with_rank(2)
    assert scenario.detours()[0, 1] in ((0, 2, 1), (0, 3, 1))


def test_every_new_failure_is_kept_clear_of_by_all_detours():
    scenario = Scenario()
    failed = [(0, 1), (0, 2), (3, 1)]
    for pair in failed:
        assert scenario.fail(*pair)
    for (source, target), way in scenario.detours().items():
        assert (way[0], way[-1]) == (source, target)
        assert not set(pairwise(way)) & scenario.failures.avoided


def test_the_other_direction_is_avoided_only_if_it_can_be_spared():
    scenario = Scenario(linked(3, [(0, 1), (1, 2), (2, 0)]))
    assert scenario.fail(0, 1)
    assert scenario.failures.avoided == {(0, 1), (1, 0)}
    chain = Scenario(
        replace(RING, links=tuple(one for one in RING.links if (one.source, one.target) != (3, 0)))
    )
    assert chain.fail(0, 1) is True
    assert chain.failures.avoided == {(0, 1)}
    assert chain.detours() == {(0, 1): (0, 3, 2, 1)}


@pytest.mark.parametrize("topology", ["fapt", "mst", "ring", "star", "sharded", "packing", "auto"])
def test_a_policy_without_the_link_is_found_whatever_the_topology(topology):
    scenario = Scenario(topology=topology)
    pair = min(tree_pairs(scenario.policy))
    assert scenario.fail(*pair)
    asked = scenario.settle()
    assert asked[0] == topology
    assert scenario.failures.usable(scenario.policy)
    assert scenario.policy.version == 1
    assert f"link {pair[0]}→{pair[1]} has failed" in scenario.policy.reason


def test_where_routes_are_shared_pairs_that_are_no_links_do_too():
    scenario = Scenario(linked(4, [(0, 1), (1, 2), (2, 3)], Routing.UNDERLAY))
    assert scenario.fail(0, 1)
    scenario.settle()
    assert scenario.failures.usable(scenario.policy)


def test_when_the_last_link_is_back_the_policy_from_before_is_again():
    scenario = Scenario(topology="star")
    before = scenario.policy
    scenario.fail(0, 1)
    scenario.settle()
    scenario.fail(0, 2)
    scenario.settle()
    assert scenario.failures.restore(0, 1)
    scenario.settle()
    assert scenario.failures.usable(scenario.policy)
    assert scenario.failures.restore(0, 2)
    scenario.settle()
    assert scenario.policy.trees == before.trees
    assert "works again" in scenario.policy.reason
    assert not scenario.failures.restore(0, 2)


def test_who_follows_the_network_decides_himself_what_to_do_with_a_link_that_is_back():
    scenario = Scenario(topology="star")
    scenario.fail(0, 1)
    scenario.settle()
    scenario.failures.restore(0, 1)
    assert scenario.check(restoring=False) is None
    assert scenario.failures.due() == math.inf


def test_a_policy_whose_detours_alone_use_the_link_loses_these_at_once():
    scenario = Scenario(topology="star")
    lanes = ((1e8, 0.0), (1e8, 0.0))
    detours = tuple(Detour(path=path, links=lanes) for path in ((1, 2, 0), (1, 3, 0)))
    scenario.policy = msgspec.structs.replace(scenario.policy, detours=detours)
    scenario.fail(1, 2)
    policy = scenario.check()
    assert isinstance(policy, Policy)
    assert policy.detours == detours[1:]
    assert policy.trees == form_policy(MESH, "star", hub=0).trees


def asked(scenario):
    scenario.fail(0, 1)
    request = scenario.check()
    assert isinstance(request, FormationRequest)
    return request


def test_an_answer_that_is_outdated_by_the_next_failure_is_asked_for_again():
    scenario = Scenario()
    request = asked(scenario)
    scenario.fail(0, 2)
    assert scenario.failures.formed(form(request), scenario.policy) is None
    scenario.settle()
    assert scenario.failures.usable(scenario.policy)


def test_what_cannot_be_formed_leaves_the_job_with_ways_around():
    scenario = Scenario()
    nothing = FormationResult(number=asked(scenario).number, problem="the process has ended")
    assert scenario.failures.formed(nothing, scenario.policy) is None
    assert scenario.failures.due() == math.inf
    assert scenario.detours()


# ---------------------------------------------------------------------------- jobs that nodes leave and join


def test_failed_links_of_a_rank_that_leaves_are_forgotten_and_the_link_of_the_last_two_cannot_fail():
    scenario = Scenario(MESH)
    scenario.fail(0, 3)
    scenario.fail(2, 3)
    scenario.failures.without(2)
    assert list(scenario.failures.failures) == [(0, 3)]
    scenario.failures.without(3)
    assert not scenario.fail(0, 1)
    assert scenario.failures.cut_off((), [(0, 1)]) == (1,)
    assert scenario.failures.cut_off((0,), [(0, 1)]) == (0,)


def test_when_the_rank_on_a_detour_leaves_those_it_connected_are_cut_off():
    """Ranks 0, 1 and 2 in a row: 1 carries everything between the others."""
    scenario = Scenario(MESH)
    scenario.failures.without(3)
    assert scenario.fail(0, 2)
    assert scenario.failures.cut_off(()) == ()
    scenario.failures.without(1)
    assert scenario.failures.detours() == ()
    assert scenario.failures.cut_off(()) == (2,)


def test_the_side_with_the_most_contributors_stays():
    scenario = Scenario(MESH)
    for pair in ((0, 2), (0, 3), (1, 2), (1, 3)):
        scenario.failures.failures[pair] = FailedLinkRecord(*pair, "no answer", 1.0)
    assert scenario.failures.cut_off(()) == (2, 3)
    assert scenario.failures.cut_off((0,)) == (0, 1)
    assert scenario.failures.cut_off((2,)) == (2, 3)
