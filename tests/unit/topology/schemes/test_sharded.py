"""A parameter server on every rank."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.lab.testing.strategies import networks
from netstorm.topology import Network, sharded
from netstorm.topology.resources import Resources, pair_loads


@pytest.mark.parametrize("size", [2, 3, 9])
def test_every_pair_carries_two_nths_of_the_tensor_each_way(size: int):
    network = Network.uniform(size)
    forest = sharded(network)

    loads = pair_loads(Resources.of(network), forest.trees, forest.shares)

    np.testing.assert_allclose(loads, 2 / size)
    weights = forest.policy(0).weights
    assert max(weights) - min(weights) <= 1


@given(networks(symmetric=None))
def test_every_rank_is_the_root_of_a_tree_as_shallow_as_links_allow(network: Network):
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(network.ranks)
    graph.add_edges_from((link.source, link.target) for link in network.links)

    forest = sharded(network)

    assert [tree.root for tree in forest.trees] == list(network.ranks)
    assert len(set(forest.shares)) == 1
    for tree in forest.trees:
        for parents, hops in (
            (tree.reduce_parent, nx.shortest_path_length(graph, target=tree.root)),
            (tree.broadcast_parent, nx.shortest_path_length(graph, source=tree.root)),
        ):
            for rank, parent in enumerate(parents):
                assert parent < 0 or hops[rank] == hops[parent] + 1


@given(networks(symmetric=None), st.data())
def test_the_reason_says_how_many_hubs_are_not_linked_to_all(network: Network, data: st.DataObject):
    linked = {(link.source, link.target) for link in network.links}
    lacking = sum(
        any({(hub, rank), (rank, hub)} - linked for rank in network.ranks if rank != hub)
        for hub in network.ranks
    )

    reason = sharded(network).reason

    assert (f"; {lacking} of {network.size} hubs" in reason) == bool(lacking)
