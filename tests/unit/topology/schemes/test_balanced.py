"""Balanced trees, and what becomes of them where links are missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import Unreachable, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Link, Network, Rank, Routing, balanced


def overlay(size: int, *edges: tuple[int, int]) -> Network:
    return replace(
        Network.uniform(size),
        links=tuple(
            Link(source=Rank(source), target=Rank(target), rate=100e6)
            for i, j in edges
            for source, target in ((i, j), (j, i))
        ),
    )


@given(networks(symmetric=None, routing=Routing.UNDERLAY), st.integers(1, 10))
def test_where_all_may_talk_parents_are_as_in_a_heap(network: Network, degree: int):
    (tree,) = balanced(network, degree).trees

    expected = tuple((rank - 1) // degree if rank else -1 for rank in network.ranks)
    assert tree.root == 0
    assert tree.reduce_parent == tree.broadcast_parent == expected


@given(st.integers(2, 12), st.integers(1, 3))
def test_a_line_of_ranks_is_a_tree_of_any_degree(size: int, degree: int):
    network = overlay(size, *((rank, rank + 1) for rank in range(size - 1)))

    (tree,) = balanced(network, degree).trees

    assert tree.reduce_parent == tuple(range(-1, size - 1))


def test_where_links_are_missing_each_rank_takes_those_it_is_linked_with():
    network = overlay(7, (0, 3), (0, 5), (0, 1), (3, 2), (5, 4), (1, 3), (1, 6), (6, 5))

    forest = balanced(network)

    assert forest.trees[0].reduce_parent == (-1, 0, 3, 0, 5, 6, 1)
    assert forest.reason == "balanced: a tree of degree 2 in order of rank"


def test_leaves_of_a_crowded_hub_go_below_it_all_the_same():
    network = overlay(6, (0, 1), *((1, leaf) for leaf in range(2, 6)))

    forest = balanced(network, 2)

    assert forest.trees[0].reduce_parent == (-1, 0, 1, 1, 1, 1)
    assert (
        forest.reason
        == "balanced: a tree of degree 2 in order of rank; for want of links a rank has 4 children"
    )


@given(networks(symmetric=True), st.integers(1, 4))
def test_on_links_that_lead_both_ways_both_phases_take_the_same_edges(network: Network, degree: int):
    (tree,) = balanced(network, degree).trees

    assert tree.reduce_parent == tree.broadcast_parent


def test_a_ring_of_links_that_lead_one_way_is_gone_around_once_up_and_once_down():
    network = replace(
        Network.uniform(3),
        links=tuple(Link(source=Rank(rank), target=Rank((rank + 1) % 3), rate=100e6) for rank in range(3)),
    )

    (tree,) = balanced(network).trees

    assert tree.reduce_parent == (-1, 2, 0)
    assert tree.broadcast_parent == (-1, 0, 1)


def test_ranks_without_a_path_are_named():
    with pytest.raises(Unreachable, match=r"^there is no path to rank 0 for ranks 2, 3$"):
        balanced(overlay(4, (0, 1), (2, 3)))


@pytest.mark.parametrize("degree", [0, -2])
def test_a_tree_without_children_is_refused(degree: int):
    with pytest.raises(UsageError, match=f"^degree {degree}: expected at least 1"):
        balanced(Network.uniform(3), degree)
