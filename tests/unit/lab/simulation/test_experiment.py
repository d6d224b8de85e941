from __future__ import annotations

from dataclasses import replace

import pytest

from netstorm.errors import UsageError
from netstorm.lab.simulation.experiment import (
    CLUSTER_BYTES,
    CLUSTER_WORK,
    Engine,
    Experiment,
    by_predictor,
    choose_engine,
    in_cluster,
    quartiles,
    summarise,
)
from netstorm.topology.form import form_policy
from netstorm.topology.network import Change, Network, Rank

RATE = 100e6
MEGABYTE = 1_000_000
BOTH = pytest.mark.parametrize("measure", [in_cluster, by_predictor])


def experiment(*tensors, **more):
    return Experiment(tensors=tensors or (8 * MEGABYTE,), chunk_bytes=250_000, **more)


@BOTH
def test_a_star_of_equal_links_takes_two_transfers_and_two_latencies(measure):
    network = Network.uniform(4, rate=RATE, latency=0.01)
    (seconds,) = measure(network, form_policy(network, "star"), experiment())
    # The result of a chunk goes down while the next ones still come up: links are full in both directions.
    up, one_more_chunk = 8 * 8 * MEGABYTE / RATE, 8 * 250_000 / RATE
    assert seconds == pytest.approx(up + one_more_chunk + 2 * 0.01, rel=0.05)


@BOTH
def test_rounds_are_as_many_as_were_asked_for_and_told_one_by_one(measure):
    network = Network.uniform(3, rate=RATE, latency=0.01)
    told: list[float] = []
    times = measure(
        network, form_policy(network), experiment(MEGABYTE, 2 * MEGABYTE, 6, rounds=3), told.append
    )
    assert list(times) == told
    assert len(times) == 3


@BOTH
def test_rounds_after_a_change_of_the_network_take_what_the_new_rates_say(measure):
    network = Network.uniform(2, rate=RATE, latency=0.001)
    slower = tuple(
        Change(at=2.0, source=Rank(source), target=Rank(1 - source), rate=RATE / 4) for source in (0, 1)
    )
    times = measure(replace(network, changes=slower), form_policy(network, "star"), experiment(rounds=6))
    assert times[-1] == pytest.approx(4 * times[0], rel=0.1)


def test_the_cluster_and_the_predictor_agree():
    network = Network.uniform(5, rate=RATE, latency=0.02)
    for scheme in ("star", "fapt", "balanced"):
        policy = form_policy(network, scheme)
        assert in_cluster(network, policy, experiment())[0] == pytest.approx(
            by_predictor(network, policy, experiment())[0], rel=0.1
        )


def test_the_cluster_is_chosen_up_to_its_limits_and_not_beyond():
    def chosen(nodes, **what):
        return choose_engine(nodes, Experiment(**what))[0]

    assert chosen(CLUSTER_WORK, tensors=(4,), chunk_bytes=4) is Engine.CLUSTER
    assert chosen(CLUSTER_WORK + 1, tensors=(4,), chunk_bytes=4) is Engine.PREDICTOR
    assert chosen(2, tensors=(CLUSTER_BYTES // 2,), chunk_bytes=2**30) is Engine.CLUSTER
    assert chosen(2, tensors=(CLUSTER_BYTES // 2 + 1,), chunk_bytes=2**30) is Engine.PREDICTOR


def test_chunks_are_counted_by_tensor():
    assert Experiment(tensors=(1, 1000, 1001), chunk_bytes=1000).chunks == 1 + 1 + 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tensors": ()}, "at least one"),
        ({"tensors": (4, 0)}, "1 byte or more"),
        ({"chunk_bytes": 3}, "chunks of 3 bytes"),
        ({"rounds": 0}, "0 rounds"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(wrong, message):
    with pytest.raises(UsageError, match=message):
        Experiment(**{"tensors": (4,), "chunk_bytes": 4, **wrong})


def test_a_summary_knows_the_optimum_of_the_seeds_that_have_one():
    found = summarise({0: 4.0, 1: 2.0, 2: 8.0}, {0: 1.0, 1: 1.0, 7: 5.0})
    assert (found.q1_s, found.median_s, found.q3_s, found.seeds) == (3.0, 4.0, 6.0, 3)
    assert found.of_optimum == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert summarise({0: 4.0}, {}).of_optimum is None


def test_one_value_is_all_its_quartiles():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
