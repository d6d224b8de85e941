"""The predictor agrees with the simulated cluster: real nodes, sessions and windows on virtual time.

Cheap cases; `benchmarks/prediction.py` runs random ones, and prints how the differences are distributed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from netstorm.lab.simulation.experiment import Experiment, in_cluster
from netstorm.topology.network import Change, Network, Node, Rank, generate
from netstorm.topology.packing import packing
from netstorm.topology.policy import Policy
from netstorm.topology.prediction import predict
from netstorm.topology.schemes import fapt, star
from netstorm.topology.tree import Tree

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
