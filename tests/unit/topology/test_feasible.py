"""Of every scheme: its trees span, its pairs may talk, and no resource carries more than it can."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from netstorm.errors import Unreachable, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Network, Policy
from netstorm.topology.form import SCHEMES, Options
from netstorm.topology.network import FAMILIES, generate
from netstorm.topology.prediction import predict
from netstorm.topology.resources import Resources, fluid_time, latency_bound, optimum
from tests.unit.topology.flow_program import capacity, loads

MB = 1_000_000
FORMED = [name for name in SCHEMES if name != "custom"]


def check(network: Network, policy: Policy, nbytes: int) -> None:
    """That the trees span is checked by `Tree` itself; all else is checked here."""
    allowed = set(network.pairs())
    for tree in policy.trees:
        for rank in network.ranks:
            if rank != tree.root:
                assert (rank, tree.reduce_parent[rank]) in allowed
                assert (tree.broadcast_parent[rank], rank) in allowed
    seconds = fluid_time(Resources.of(network), policy, nbytes)
    filled = [
        float(load) * 8 * nbytes / (seconds * capacity(network, resource))
        for resource, load in loads(network, policy).items()
    ]
    assert max(filled) == pytest.approx(1.0)
    assert seconds >= optimum(network, nbytes).seconds * (1 - 1e-6)


@pytest.mark.parametrize("scheme", FORMED)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nbytes", [100_000, 40 * MB])
def test_a_scheme_s_policy_is_feasible_and_no_faster_than_physics(scheme, family, nbytes):
    network = generate(family, 7, 5)
    policy = SCHEMES[scheme](network, Options(tensors=(nbytes,))).policy(0)
    check(network, policy, nbytes)
    found = predict(network, policy, [nbytes], chunk_bytes=256 * 1024).seconds
    assert found >= optimum(network, nbytes).seconds * (1 - 1e-6)
    assert found >= latency_bound(network, nbytes) * (1 - 1e-6)


@pytest.mark.parametrize("scheme", ["star", "sharded", "mst", "ring-best", "fapt", "packing", "auto"])
@settings(max_examples=12)
@given(network=networks(2, 6, symmetric=None, capped=True, routing=None))
def test_so_it_is_in_strange_networks(scheme, network):
    try:
        policy = SCHEMES[scheme](network, Options(tensors=(4 * MB,))).policy(0)
    except (UsageError, Unreachable):
        assert scheme == "ring-best"  # which not every network has
        return
    check(network, policy, 4 * MB)
    found = predict(network, policy, [4 * MB], chunk_bytes=256 * 1024).seconds
    assert found >= latency_bound(network, 4 * MB) * (1 - 1e-6)
