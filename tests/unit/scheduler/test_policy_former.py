"""A job that nodes have left plans for those that are left, and its policies name all places."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.scheduler.awareness import NetworkEstimate
from netstorm.scheduler.policies import FormationRequest, tree_pairs
from netstorm.scheduler.policy_former import Restriction, form
from netstorm.topology.form import form_policy
from netstorm.topology.network import Link, Network, Node, Rank, Routing
from netstorm.topology.policy import Options, Plan, Policy


def mesh(size, fast=()):
    """Return a full mesh whose links are slow but for some pairs."""
    return Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(size)),
        links=tuple(
            Link(source=Rank(a), target=Rank(b), rate=1e9 if {a, b} in fast else 1e7, latency=0.01)
            for a in range(size)
            for b in range(size)
            if a != b
        ),
    )


def request(network, members, *, topology="fapt", frozen=False, **options):
    policy = form_policy(network, "fapt")
    in_force = msgspec.structs.replace(policy, version=3, members=members)
    estimate = NetworkEstimate.of(network, errors=(0.1,) * len(network.links), cap_error=0.0)
    return FormationRequest.of(
        estimate,
        number=7,
        topology=topology,
        options=Options(tensors=(10**7,), **options),
        in_force=in_force,
        frozen=in_force if frozen else None,
    )


def test_the_request_is_about_the_members_numbered_anew():
    asked = Restriction(request(mesh(5), (0, 2, 4), hub=Rank(2), num_roots=4)).request
    assert [node.rank for node in asked.nodes] == [0, 1, 2]
    assert len(asked.links) == len(asked.errors) == 6
    assert (asked.options.hub, asked.options.num_roots) == (1, 3)
    assert asked.in_force.size == 3
    assert asked.number == 7


def test_a_hub_that_is_not_in_the_job_is_none():
    assert Restriction(request(mesh(4), (0, 1, 2), hub=Rank(3))).request.options.hub is None


def test_pairs_to_be_measured_are_those_of_members():
    asked = Restriction(request(mesh(4), (1, 2, 3), unmeasured=((0, 1), (1, 3)), measured=((3, 1),))).request
    assert (asked.options.unmeasured, asked.options.measured) == (((0, 2),), ((2, 0),))


def test_what_is_formed_has_all_places_and_those_without_a_node_are_leaves_of_the_roots():
    """The fast links are 1-2 and 2-4; rank 3 is not in the job."""
    answer = form(request(mesh(5, fast=({1, 2}, {2, 4})), (1, 2, 4), topology="star"))
    assert answer.policy is not None
    policy = answer.policy
    assert (policy.size, policy.members) == (5, (1, 2, 4))
    for tree in policy.trees:
        for rank in (0, 3):
            assert (tree.reduce_parent[rank], tree.broadcast_parent[rank]) == (tree.root, tree.root)
        assert tree.root == 2
    assert tree_pairs(policy) == {(1, 2), (2, 1), (4, 2), (2, 4)}


def test_the_same_policy_again_is_none():
    asked = request(mesh(4), (0, 1, 3), topology="star", hub=Rank(1))
    formed = form(asked).policy
    assert formed is not None
    again = form(msgspec.structs.replace(asked, in_force=formed))
    assert (again.policy, again.problem) == (None, "it is the one in force")


def test_a_node_alone_needs_no_policy():
    assert form(request(mesh(3), (1,))).problem == "only one node is left in the job"


def test_with_frozen_roots_those_of_members_stay():
    answer = form(request(mesh(4, fast=({2, 3},)), (1, 2, 3), frozen=True))
    if answer.policy is not None:
        assert all(tree.root in (1, 2, 3) for tree in answer.policy.trees)


def test_pairs_that_share_links_count_as_having_their_own():
    ring = Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(4)),
        links=tuple(
            Link(source=Rank(a), target=Rank(b), rate=1e8, latency=0.01)
            for one in range(4)
            for a, b in ((one, (one + 1) % 4), ((one + 1) % 4, one))
        ),
        routing=Routing.UNDERLAY,
    )
    asked = Restriction(request(ring, (0, 2, 3))).request
    assert asked.routing is Routing.OVERLAY
    assert {(link.source, link.target) for link in asked.links} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }


@given(st.integers(2, 6), st.data())
def test_any_policy_survives_the_way_there_and_back(size, data):
    members = tuple(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
    asked = request(mesh(size), members)
    restriction = Restriction(asked)
    back = restriction.expanded(restriction.request.in_force)
    assert isinstance(back, Policy)
    for rank in members:
        before, after = Plan(asked.in_force, rank), Plan(back, rank)
        assert (before.reduce_parent, before.broadcast_parent) == (
            after.reduce_parent,
            after.broadcast_parent,
        )
        assert before.expected == after.expected


@pytest.mark.parametrize("members", [(), (0, 1, 2)])
def test_with_all_ranks_in_the_job_nothing_is_restricted(members):
    assert form(request(mesh(3), members)) == form(request(mesh(3), ()))
