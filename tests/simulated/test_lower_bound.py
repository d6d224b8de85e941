"""No round of real nodes on virtual time beats the bound, whatever the network, the tensors and the trees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.lab.simulation.experiment import Experiment, in_cluster
from netstorm.topology.form import form_policy
from netstorm.topology.lower_bound import PART_HEADER_BYTES, lower_bound
from netstorm.topology.network import FAMILIES, generate
from netstorm.topology.resources import optimum


@pytest.mark.parametrize("scheme", ["fapt", "packing"])
@settings(max_examples=6, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    nodes=st.integers(2, 5),
    seed=st.integers(0, 1000),
    tensors=st.lists(st.integers(1, 250_000).map(lambda elements: 4 * elements), min_size=1, max_size=3),
    chunk_bytes=st.sampled_from([64 * 1024, 256 * 1024]),
)
def test_no_simulated_round_beats_it(scheme, *, family, nodes, seed, tensors, chunk_bytes):
    network = generate(family, nodes, seed)
    policy = form_policy(network, scheme, tensors=tuple(tensors), chunk_bytes=chunk_bytes)
    experiment = Experiment(tensors=tuple(tensors), chunk_bytes=chunk_bytes, rounds=1, seed=seed)
    (took,) = in_cluster(network, policy, experiment)
    best = optimum(network, sum(tensors))
    least = lower_bound(
        network, best, tensors, chunk_bytes=chunk_bytes, header_bytes=PART_HEADER_BYTES
    ).seconds
    assert took >= least * (1 - 1e-6)
