"""NETSTORM_UNEVEN=join: scripts end after different numbers of batches, and the others' rounds go on."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import Disagreement, UnevenRounds, WaitTimeout
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import Pending
from netstorm.lab.testing.faults import Fault
from netstorm.lab.testing.strategies import fault_plans
from tests.simulated.jobs import examples, random_policy


@dataclass
class UnevenJob:
    """Each rank has its own number of batches, pushes all keys in each, and ends when it has all results."""

    nodes: int
    seed: int
    keys: int
    most_rounds: int
    policies: int
    gaps_s: float
    faults: tuple[Fault, ...] = ()
    mixed: bool = False
    """Rounds of a key are dense, or of some rows, at random."""

    def __post_init__(self):
        chance = random.Random(self.seed)
        self.counts = [chance.randint(1, self.most_rounds) for _ in range(self.nodes)]
        self.sizes = [chance.choice((0, 1, 30, 200)) for _ in range(self.keys)]

    def form(self, key, number):
        """Return how a round travels."""
        forms = [{}, {"as_rows": True}] if self.mixed else [{}]
        return random.Random(f"{self.seed} {key} {number}").choice(forms)

    def value(self, rank, key, number):
        drawn = np.random.default_rng([self.seed, rank, key, number])
        return drawn.integers(-9, 10, self.sizes[key]).astype(np.float32)

    def right(self, key, number):
        zeros = np.zeros(self.sizes[key], np.float32)
        ranks = [rank for rank in range(self.nodes) if number < self.counts[rank]]
        return sum((self.value(rank, key, number) for rank in ranks), zeros)

    def run(self):
        """Return what each rank has got, by rank, key and round, when all have ended."""
        chance = random.Random(self.seed + 1)
        policy = random_policy(chance, self.nodes)
        cluster = SimulatedCluster(
            self.nodes, seed=self.seed, policy=policy, chunk_size=16, uneven="join", faults=self.faults
        ).join()
        pending: dict[tuple[int, int, int], Pending] = {}
        ended: list[Pending] = []
        last = 0.0
        for version in range(1, self.policies):
            policy = random_policy(chance, self.nodes, version)
            time = cluster.now + 0.3 * version * chance.random() ** 2
            cluster.at(max(time, last), functools.partial(cluster.install_policy, policy))
            last = max(time, last)
        for node in cluster.nodes:
            self.play(cluster, node, chance, pending, ended)
        cluster.run_until(lambda: len(ended) == self.nodes, 600.0, "the end of all programs")
        cluster.run_until_ended(ended, 600.0)
        return cluster, pending, ended

    def play(self, cluster, node, chance, pending, ended):
        """Let a rank push one after the other, now and then without waiting, and then end."""
        orders = [
            random.Random(f"{self.seed} {number}") for number in range(self.most_rounds)
        ]  # of all ranks
        todo = [
            key
            for order in orders[: self.counts[node.rank]]
            for key in order.sample(range(self.keys), self.keys)
        ]
        counts = dict.fromkeys(range(self.keys), 0)

        def step():
            while todo:
                key = todo.pop(0)
                number = counts[key]
                counts[key] += 1
                pushed = pending[node.rank, key, number] = node.push(
                    f"k{key}", self.value(node.rank, key, number), **self.form(key, number)
                )
                if chance.random() < 0.7:
                    pushed.then(lambda: cluster.at(cluster.now + chance.random() * self.gaps_s, step))
                    return
            waited = [one for (rank, _, _), one in pending.items() if rank == node.rank and not one.ended]
            if waited:
                waited[0].then(step)
            else:
                ended.append(node.finish())

        step()

    def check(self, pending):
        for (rank, key, number), one in pending.items():
            right = self.right(key, number)
            assert one.result().tobytes() == right.tobytes(), f"rank {rank}, k{key}, round {number}"


uneven_jobs = st.builds(
    UnevenJob,
    nodes=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    keys=st.integers(1, 3),
    most_rounds=st.integers(1, 9),
    policies=st.integers(1, 4),
    gaps_s=st.sampled_from([0.0, 0.02, 1.0]),
    mixed=st.booleans(),
)


@given(uneven_jobs)
@examples(15)
def test_a_finished_rank_contributes_zeros_until_all_have_finished(job):
    cluster, pending, ended = job.run()
    assert len(pending) == sum(job.counts) * job.keys
    job.check(pending)
    assert all(one.ended_well for one in ended)
    assert all(node.has_left and node.failure is None for node in cluster.nodes)


@given(st.data(), uneven_jobs.filter(lambda job: job.nodes > 1))
@examples(7)
def test_zeros_and_sums_come_through_broken_connections(data, job):
    job.faults = data.draw(fault_plans(job.nodes, duration_s=2.0, longest_cut_s=4.0))
    _, pending, ended = job.run()
    job.check(pending)
    assert all(one.ended_well for one in ended)


def test_while_others_go_on_a_finished_rank_waits_for_nothing_and_never_gives_up():
    cluster = SimulatedCluster(3, seed=4, uneven="join", wait_timeout_s=5.0).join()
    cluster.allreduce("w", [np.ones(4)] * 3)
    ended = cluster.nodes[1].finish()
    for _ in range(6):
        cluster.run_for(3.0)  # six times: longer than a finished rank would wait for somebody who is stuck
        pushed = [cluster.nodes[rank].push("w", np.ones(4)) for rank in (0, 2)]
        cluster.run_until_ended(pushed, 4.0)
        assert all((one.result() == 2).all() for one in pushed)
        assert cluster.nodes[1].machine.outstanding() == 0
    assert not ended.ended
    cluster.finish()


def test_a_rank_that_waits_at_a_barrier_does_not_contribute_zeros_and_is_told_so():
    cluster = SimulatedCluster(2, seed=4, uneven="join", wait_timeout_s=30.0).join()
    cluster.allreduce("w", [np.ones(4)] * 2)
    waiting = cluster.nodes[0].barrier()
    pushed = cluster.nodes[1].push("w", np.ones(4))
    cluster.run_until_ended([waiting, pushed], 60.0)
    for one in (waiting, pushed):
        with pytest.raises(WaitTimeout, match=r"barrier 0: waiting for .*rank 1 .*zeros when its script has"):
            one.result()


def test_finished_ranks_hold_up_no_barrier():
    cluster = SimulatedCluster(3, seed=4, uneven="join").join()
    early = cluster.nodes[0].barrier()
    cluster.run_for(0.1)
    cluster.nodes[1].finish()
    cluster.run_for(0.1)
    cluster.nodes[2].finish()
    cluster.run_until_ended([early], 5.0)
    later = cluster.nodes[0].barrier()
    cluster.run_until_ended([later], 5.0)
    assert early.ended_well
    assert later.ended_well


def test_a_finished_rank_does_nothing_with_sums_so_any_update_rule_of_the_others_will_do():
    cluster = SimulatedCluster(3, seed=4, uneven="join").join()
    cluster.allreduce("w", [np.ones(4)] * 3)
    cluster.nodes[0].finish()
    cluster.run_for(1.0)  # its zeros have begun the round
    pushed = [cluster.nodes[rank].push("w", np.ones(4), rule="sgd lr=0.1") for rank in (1, 2)]
    cluster.run_until_ended(pushed, 5.0)
    assert all((one.result() == 2).all() for one in pushed)
    for rank in (1, 2):
        cluster.nodes[rank].push("w", np.ones(4), rule=f"sgd lr={rank}")
    cluster.run_for(1.0)
    failure = cluster.nodes[1].failure
    assert isinstance(failure, Disagreement)
    assert "rank 1 updates with 'sgd lr=1', rank 2 with 'sgd lr=2'" in str(failure)


def test_a_key_that_a_finished_rank_never_knew_is_an_error():
    cluster = SimulatedCluster(2, seed=4, uneven="join").join()
    cluster.nodes[1].finish()
    cluster.run_for(0.1)
    waiting = cluster.nodes[0].push("new", np.ones(4))
    cluster.run_until_ended([waiting], 5.0)
    with pytest.raises(UnevenRounds, match="must be initialised before any rank ends"):
        waiting.result()


def test_a_rank_that_has_ended_contributes_zeros_to_compressed_rounds_too():
    cluster = SimulatedCluster(3, seed=4, uneven="join").join()
    values = np.array([0.5, -2, 0.1], np.float32)
    pending = [node.push("w", values, threshold=0.5) for node in cluster.nodes]
    cluster.run_until_ended(pending)
    cluster.nodes[0].finish()
    cluster.run_for(1.0)
    later = [cluster.nodes[rank].push("w", values, threshold=0.5) for rank in (1, 2)]
    cluster.run_until_ended(later)
    assert all(one.result().tolist() == [1, -1, 0] for one in later)


def test_zeros_of_a_rank_that_has_ended_fit_whatever_kind_of_array_the_others_push():
    cluster = SimulatedCluster(3, seed=4, uneven="join", wait_timeout_s=5.0).join()
    values = np.array([[0, 0], [0.5, -2], [0.1, 0]], np.float32)
    cluster.allreduce("w", [values] * 3)
    cluster.nodes[0].finish()
    cluster.run_for(1.0)  # its zeros are there before the others' values
    for kind in ({"as_rows": True}, {}, {"threshold": 0.5}, {"as_rows": True}, {"threshold": 0.5}, {}):
        pushed = [cluster.nodes[rank].push("w", values, **kind) for rank in (1, 2)]
        cluster.run_until_ended(pushed, 60.0)
        right = [[0, 0], [1, -1], [0, 0]] if "threshold" in kind else 2 * values
        assert all((one.result() == right).all() for one in pushed), kind
