"""Look-aheads in the simulated cluster: tiny ones never hang, and right ones make rounds faster."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.experiment import Experiment, in_cluster
from netstorm.topology.form import form_policy
from netstorm.topology.network import Rank, generate
from netstorm.topology.policy import Policy
from netstorm.topology.prediction import predict
from netstorm.topology.tree import Tree
from tests.simulated.jobs import examples, jobs

MB = 1_000_000
VALUES = np.arange(300.0)


def stars(look_ahead_s: float, look_ahead: int = 1) -> Policy:
    """Return three stars with a look-ahead of less than a chunk."""
    return Policy(
        version=0,
        trees=tuple(
            Tree.undirected(Rank(root), tuple(-1 if rank == root else root for rank in range(3)))
            for root in range(3)
        ),
        weights=(1, 1, 1),
        look_ahead=look_ahead,
        look_ahead_s=look_ahead_s,
    )


def three_ranks(look_ahead_s: float, look_ahead: int = 1) -> SimulatedCluster:
    return SimulatedCluster(3, seed=2, policy=stars(look_ahead_s, look_ahead), chunk_size=10).join()


@given(
    jobs(policies=(1, 4)).map(
        lambda job: replace(job, chunk_size=min(job.chunk_size, 16), look_aheads=(1, 60, 500))
    )
)
@examples(15)
def test_sums_are_right_with_any_look_ahead(job):
    cluster = job.cluster().join()
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values(), 600.0)  # one chunk at a time, with long delays
    job.check(pending)
    cluster.finish()


def test_a_rank_that_comes_late_finds_that_the_others_have_sent_everything():
    ended = {}
    for look_ahead_s in (0.0, 1.0, 5.0):
        cluster = three_ranks(look_ahead_s)
        begin = cluster.now
        first = [cluster.nodes[rank].push("w", VALUES) for rank in (0, 1)]
        cluster.run_for(2.0)
        last = cluster.nodes[2].push("w", VALUES)
        cluster.run_until_ended([*first, last])
        assert (last.result() == 3 * VALUES).all()
        ended[look_ahead_s] = cluster.now - begin
    assert ended[0.0] == pytest.approx(ended[1.0], abs=1e-4)
    assert ended[5.0] > ended[1.0] + 0.02  # one chunk after the other


@pytest.mark.parametrize("first", [0, 2])
def test_a_program_that_wants_one_sum_before_it_pushes_another_key_is_not_stopped(first):
    cluster = three_ranks(look_ahead_s=4.0)
    for name in "ab":  # so that a is before b in the job's order
        cluster.allreduce(name, [VALUES] * 3)
    begin = cluster.now
    node = cluster.nodes[first]
    # All but one rank have pushed a, and it is waited for; the one wants b first.
    others = [other.push(name, VALUES) for other in cluster.nodes if other is not node for name in "ab"]
    wanted = node.push("b", VALUES)
    cluster.run_until_ended([wanted])
    assert cluster.now - begin < 4.5
    late = node.push("a", VALUES)
    cluster.run_until_ended([*others, late])
    assert all((one.result() == 3 * VALUES).all() for one in (*others, wanted, late))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["cloud", "internet2"])
def test_the_gain_is_the_cluster_s_as_well_as_the_predictor_s(family):
    network = generate(family, 6, 2)
    experiment = Experiment(tensors=(24 * MB, 8 * MB), chunk_bytes=MB // 5, seed=5)
    policy = form_policy(network, "packing", tensors=experiment.tensors, chunk_bytes=MB // 5)
    times = []
    for one in (policy, msgspec.structs.replace(policy, look_ahead=0)):
        (simulated,) = in_cluster(network, one, experiment)
        predicted = predict(network, one, experiment.tensors, chunk_bytes=MB // 5).seconds
        assert predicted == pytest.approx(simulated, rel=0.1 if family == "cloud" else 0.01)
        times.append(simulated)
    assert times[0] < 0.995 * times[1]
