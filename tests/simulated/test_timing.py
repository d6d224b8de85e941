"""Virtual time is realistic, and the predictor agrees with the simulated cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.experiment import Experiment, in_cluster
from netstorm.protocol.frames import SCHEDULER
from netstorm.topology.network import Change, Network, Node, Rank, generate
from netstorm.topology.packing import packing
from netstorm.topology.policy import Policy
from netstorm.topology.prediction import predict
from netstorm.topology.schemes import fapt, star
from netstorm.topology.tree import Tree

RATE = 100e6
LATENCY = 0.015
MEGABYTES = 8


def round_time(cluster):
    """Return the virtual seconds of one all-reduce of 8 MB, when connections are up and rates are known."""
    values = [np.ones(MEGABYTES * 250_000, np.float32)] * cluster.size
    cluster.allreduce("w", values)
    before = cluster.now
    cluster.allreduce("w", values)
    return cluster.now - before


@pytest.mark.parametrize("nodes", [2, 5])
def test_trees_with_all_roots_share_a_mesh_to_within_a_tenth_of_what_is_possible(nodes):
    # Each of `nodes` equal shares crosses each link twice: to its root, and from it.
    possible = 2 * MEGABYTES * 8e6 / nodes / RATE
    network = Network.uniform(nodes, rate=RATE, latency=LATENCY)
    took = round_time(SimulatedCluster(nodes, network=network, seed=1))
    assert possible <= took <= 1.1 * possible + 4 * LATENCY


def test_a_star_is_as_slow_as_the_access_line_of_its_hub():
    network = Network.uniform(4, rate=RATE, latency=LATENCY)
    capped = replace(network, nodes=(Node(rank=Rank(0), ingress=RATE), *network.nodes[1:]))
    took = round_time(SimulatedCluster(4, network=capped, seed=1, topology="star", hub=0))
    reduce_s = 3 * MEGABYTES * 8e6 / RATE
    assert reduce_s <= took <= 1.3 * reduce_s + 4 * LATENCY


def test_links_carry_what_the_trees_put_on_them_and_no_more():
    cluster = SimulatedCluster(4, seed=1, topology="star", hub=0)
    cluster.allreduce("w", [np.ones(1_000_000, np.float32)] * 4)
    for leaf in (1, 2, 3):
        assert 4_000_000 <= cluster.traffic(leaf, 0) <= 4_020_000
        assert 4_000_000 <= cluster.traffic(0, leaf) <= 4_020_000
        assert cluster.traffic(leaf, int(SCHEDULER)) < 2_000
    assert cluster.traffic(1, 2) == 0


def test_a_link_that_becomes_slow_makes_rounds_slow_from_then_on():
    network = Network.uniform(2, rate=RATE, latency=LATENCY)
    change = Change(at=10.0, source=Rank(0), target=Rank(1), rate=RATE / 10)
    cluster = SimulatedCluster(2, network=replace(network, changes=(change,)), seed=1)
    fast = round_time(cluster)
    cluster.run_for(10.0)
    slow = round_time(cluster)
    assert slow == pytest.approx(10 * fast, rel=0.15)


def test_clocks_that_run_fast_or_slow_change_nothing_that_matters():
    cluster = SimulatedCluster(3, seed=8)
    shown = [node.process.now() for node in [*cluster.join().nodes, cluster.nodes[0]]]
    assert max(shown[:3]) - min(shown[:3]) > 1.0
    cluster.run_for(3600.0)
    results = cluster.allreduce("w", [np.ones(3)] * 3)
    assert all((total == 3).all() for total in results)


# ----------------------------------------------------- predictions; benchmarks/prediction.py runs random ones

KB = 1000


def both(network, policy, tensors, chunk_bytes):
    """Return the predicted and the simulated seconds of a round."""
    predicted = predict(network, policy, tensors, chunk_bytes=chunk_bytes).seconds
    (simulated,) = in_cluster(network, policy, Experiment(tensors=tensors, chunk_bytes=chunk_bytes, seed=5))
    return predicted, simulated


@pytest.mark.parametrize(
    ("family", "nodes", "scheme"),
    [
        ("mesh", 7, lambda network: packing(network, tensor_bytes=4000 * KB, chunk_bytes=250 * KB)),
        ("asymmetric", 4, fapt),
        ("internet2", 9, fapt),
        ("internet2", 6, star),
    ],
)
def test_predictions_hold_in_the_simulated_cluster(family, nodes, scheme):
    network = generate(family, nodes, 11)
    predicted, simulated = both(network, scheme(network).policy(0), (2600 * KB, 1400 * KB), 250 * KB)
    assert predicted == pytest.approx(simulated, rel=0.01)


def test_predictions_hold_behind_access_caps_where_order_depends_on_trifles():
    network = generate("cloud", 6, 11)
    predicted, simulated = both(network, fapt(network).policy(0), (4000 * KB,), 250 * KB)
    assert predicted == pytest.approx(simulated, rel=0.1)


def test_more_is_in_flight_on_a_long_fat_link_than_a_few_chunks():
    network = Network.uniform(2, rate=400e6, latency=0.1)
    policy = Policy(version=0, trees=(Tree.undirected(Rank(0), (-1, 0)),), weights=(1,))
    predicted, simulated = both(network, policy, (16_000 * KB,), 250 * KB)
    assert predicted == pytest.approx(simulated, rel=0.03)
    assert predicted < 2 * 16_000 * KB * 8 / 400e6 + 0.4


def test_a_cap_that_two_children_share_costs_both_the_same_in_both():
    network = Network.uniform(3, rate=80e6, latency=0.02)
    network = replace(network, nodes=(Node(rank=Rank(0), ingress=80e6), *network.nodes[1:]))
    policy = Policy(version=0, trees=(Tree.undirected(Rank(0), (-1, 0, 0)),), weights=(1,))
    predicted, simulated = both(network, policy, (4000 * KB,), 500 * KB)
    assert predicted == pytest.approx(simulated, rel=0.01)
    assert predicted > 2 * 4000 * KB * 8 / 80e6


def test_a_link_that_changes_has_changed_in_both():
    # The first round, which is not counted, takes more than 1 s; the change comes in its middle.
    change = Change(at=1.0, source=Rank(1), target=Rank(0), rate=8e6)
    network = replace(Network.uniform(2, rate=16e6), changes=(change,))
    policy = Policy(version=0, trees=(Tree.undirected(Rank(0), (-1, 0)),), weights=(1,))
    predicted = predict(network, policy, (3000 * KB,), chunk_bytes=250 * KB, start=1.0).seconds
    (simulated,) = in_cluster(network, policy, Experiment(tensors=(3000 * KB,), chunk_bytes=250 * KB))
    assert predicted == pytest.approx(simulated, rel=0.01)
