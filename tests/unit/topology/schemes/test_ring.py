"""Rings: what their trees put on links, and where there is none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import Unreachable
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Forest, Link, Network, Rank, Routing, ring
from netstorm.topology.network import generate
from netstorm.topology.resources import Resources, fluid_time, pair_loads
from netstorm.topology.schemes import ring_trees
from netstorm.topology.searched_schemes import ring_best


def loads(network: Network, forest: Forest) -> dict[tuple[int, int], float]:
    resources = Resources.of(network)
    volumes = pair_loads(resources, forest.trees, forest.shares)
    return {pair: load for pair, load in zip(resources.pairs, volumes, strict=True) if load}


def overlay(size: int, edges: set[tuple[int, int]]) -> Network:
    return replace(
        Network.uniform(size),
        links=tuple(
            Link(source=Rank(source), target=Rank(target), rate=100e6)
            for i, j in sorted(edges)
            for source, target in ((i, j), (j, i))
        ),
    )


@given(st.permutations(range(9)), st.integers(2, 9))
def test_every_hop_of_a_ring_carries_the_same_and_nothing_else_is_sent(order: list[int], size: int):
    around = [Rank(rank) for rank in order if rank < size]
    forest = Forest(trees=ring_trees(around), shares=(1.0,) * size, reason="")

    assert loads(Network.uniform(size), forest) == pytest.approx(
        {(around[i - 1], around[i]): 2 * (size - 1) / size for i in range(size)}
    )


def test_a_plain_ring_is_in_order_of_rank():
    forest = ring(Network.uniform(4))

    assert set(loads(Network.uniform(4), forest)) == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert [tree.root for tree in forest.trees] == [0, 1, 2, 3]
    assert forest.trees[1].reduce_parent == (1, -1, 3, 0)
    assert forest.trees[1].broadcast_parent == (3, -1, 1, 2)


def test_a_ring_in_order_of_rank_names_the_links_that_it_lacks():
    network = overlay(4, {(0, 1), (1, 2), (1, 3), (0, 2), (2, 3)})

    with pytest.raises(Unreachable, match=r"^a ring in order of rank needs .*: 3→0; expected .*ring-best"):
        ring(network)

    assert {tree.root for tree in ring_best(network).trees} == set(network.ranks)


@settings(max_examples=25)
@given(networks(2, 6, symmetric=None, capped=True, routing=Routing.UNDERLAY))
def test_no_order_of_few_ranks_is_faster_than_the_best_one(network: Network):
    resources = Resources.of(network)
    nbytes = 1e12  # so that latency counts for nothing

    def seconds(forest: Forest) -> float:
        return fluid_time(resources, forest.policy(0), nbytes)

    orders = [(Rank(0), *rest) for rest in itertools.permutations(network.ranks[1:])]
    best = min(
        seconds(Forest(trees=ring_trees(order), shares=(1.0,) * network.size, reason="")) for order in orders
    )
    assert seconds(ring_best(network, tensor_bytes=nbytes)) == pytest.approx(best, rel=1e-2)


@pytest.mark.parametrize("family", ["mesh", "internet2", "cloud", "asymmetric"])
def test_annealing_comes_within_a_tenth_of_the_best_order(monkeypatch: pytest.MonkeyPatch, family: str):
    for seed in range(3):
        network = generate(family, 8, seed)
        resources = Resources.of(network)
        exact = ring_best(network)
        with monkeypatch.context() as patch:
            patch.setattr("netstorm.topology.searched_schemes.EXACT_NODES", 1)
            annealed = ring_best(network, seed=seed)
        best = fluid_time(resources, exact.policy(0), 1e8)
        assert fluid_time(resources, annealed.policy(0), 1e8) <= 1.1 * best


def test_the_same_seed_gives_the_same_order():
    network = generate("mesh", 12, 5)

    assert ring_best(network, seed=3) == ring_best(network, seed=3)


@settings(max_examples=20)
@given(st.permutations(range(14)), st.sets(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=6))
def test_a_ring_hidden_in_an_overlay_is_found(order: list[int], more: set[tuple[int, int]]):
    edges = {tuple(sorted((order[i - 1], order[i]))) for i in range(14)}
    edges |= {(min(pair), max(pair)) for pair in more if pair[0] != pair[1]}
    network = overlay(14, {(i, j) for i, j in edges})

    used = loads(network, ring_best(network))

    assert len(used) == 14
    assert set(used) <= set(network.pairs())


def test_a_rank_at_the_end_of_one_link_is_in_no_ring():
    network = overlay(5, {(0, 1), (1, 2), (2, 0), (2, 3), (3, 1), (3, 4)})

    with pytest.raises(Unreachable, match=r"^there is no ring through all ranks: rank 4 with links to one "):
        ring_best(network)


@pytest.mark.parametrize(("leaves", "certainty"), [(4, "there is no ring"), (8, "no ring was found")])
def test_an_overlay_without_a_ring_is_refused_with_what_is_missing(leaves: int, certainty: str):
    hubs = {(0, leaf) for leaf in range(2, leaves + 2)} | {(1, leaf) for leaf in range(2, leaves + 2)}

    with pytest.raises(Unreachable, match=rf"^{certainty} through all ranks .* lacks the links \d+→\d+"):
        ring_best(overlay(leaves + 2, hubs))
