"""One door to all schemes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from netstorm.errors import Unreachable, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.settings import TopologyName
from netstorm.topology import SCHEMES, Network, Options, Policy, Routing, form_policy

FORMED = sorted(set(SCHEMES) - {"custom"})  # which is read from a file: test_custom.py
SEARCHED = ["auto", "packing", "ring-best"]  # each policy takes a tenth of a second
schemes = st.sampled_from([name for name in FORMED if name not in SEARCHED])


def formed(network: Network, scheme: str, **options: Any) -> Policy:
    """Return a scheme's policy; an overlay that has not the links of a ring is left out."""
    try:
        return form_policy(network, scheme, **options)
    except Unreachable:
        assert scheme in {"ring", "ring-best"}
        reject()


@settings(max_examples=100)
@given(networks(symmetric=None, capped=True, routing=None), schemes, st.integers(0, 9))
def test_every_edge_of_every_policy_is_a_pair_that_may_talk(network: Network, scheme: str, roots: int):
    check(formed(network, scheme, version=7, num_roots=min(roots, network.size)), network)


@pytest.mark.parametrize("scheme", SEARCHED)
@settings(max_examples=20)
@given(network=networks(max_nodes=6, symmetric=None, capped=True, routing=None))
def test_so_it_is_in_policies_that_are_searched_for(network: Network, scheme: str):
    check(formed(network, scheme, version=7, tensors=(3_000_000,)), network)


def check(policy: Policy, network: Network) -> None:
    pairs = set(network.pairs())
    assert policy.version == 7
    assert policy.size == network.size
    assert sum(policy.weights) >= len(policy.trees)
    for tree in policy.trees:  # that they span is checked when they are made
        assert {(rank, parent) for rank, parent in enumerate(tree.reduce_parent) if parent >= 0} <= pairs
        assert {(parent, rank) for rank, parent in enumerate(tree.broadcast_parent) if parent >= 0} <= pairs


@given(networks(symmetric=None), schemes, st.randoms(use_true_random=False))
def test_a_policy_does_not_depend_on_the_order_of_links(network: Network, scheme: str, rng: random.Random):
    check_order(network, scheme, rng)


@pytest.mark.parametrize("scheme", SEARCHED)
@settings(max_examples=5)
@given(network=networks(max_nodes=5, symmetric=None), rng=st.randoms(use_true_random=False))
def test_nor_does_one_that_is_searched_for(network: Network, scheme: str, rng: random.Random):
    check_order(network, scheme, rng)


def check_order(network: Network, scheme: str, rng: random.Random) -> None:
    links = list(network.links)
    rng.shuffle(links)

    assert formed(replace(network, links=tuple(links)), scheme) == formed(network, scheme)


@pytest.mark.parametrize("scheme", FORMED)
@pytest.mark.parametrize("routing", Routing)
def test_a_single_node_is_a_tree_of_its_own(scheme: str, routing: Routing):
    policy = form_policy(replace(Network.uniform(1), routing=routing), scheme)

    assert [(tree.root, tree.reduce_parent, tree.broadcast_parent) for tree in policy.trees] == [
        (0, (-1,), (-1,))
    ]
    assert policy.weights == (1000,)


@pytest.mark.parametrize(("hub", "taken"), [(None, 0), (-1, 0), (2, 2)])
def test_the_settings_way_to_say_any_hub_is_understood(hub: int | None, taken: int):
    assert form_policy(Network.uniform(3), "star", hub=hub).trees[0].root == taken


def test_the_number_of_roots_and_the_chunk_size_reach_the_scheme():
    assert len(form_policy(Network.uniform(5), "fapt", num_roots=2).trees) == 2
    with pytest.raises(UsageError, match="chunk_bytes is -4"):
        form_policy(Network.uniform(2), "fapt", chunk_bytes=-4)


def test_an_unknown_scheme_is_answered_with_those_there_are():
    with pytest.raises(UsageError, match=r"^topology 'rings': expected one of star, sharded, .*custom"):
        form_policy(Network.uniform(2), "rings")


def test_the_settings_allow_exactly_the_schemes_there_are():
    assert list(get_args(TopologyName)) == list(SCHEMES)


def test_an_unknown_option_is_answered_with_those_there_are():
    with pytest.raises(UsageError, match=r"^option 'roots' of a topology: expected one of num_roots, hub, "):
        form_policy(Network.uniform(2), "fapt", roots=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensors": ()}, "tensors of \\[\\] bytes: expected at least one"),
        ({"tensors": (0, 0)}, "tensors of \\[0, 0\\] bytes: expected at least one"),
        ({"degree": 0}, "degree 0: expected at least 1"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0: expected at least 1"),
    ],
)
def test_options_that_no_scheme_can_use_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=f"^{message}"):
        form_policy(Network.uniform(2), "star", **options)


def test_the_size_of_all_tensors_is_their_sum():
    assert Options(tensors=(100, 20)).tensor_bytes == 120
