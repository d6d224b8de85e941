"""Several jobs on one scheduler: each as if it were alone, whatever becomes of the others."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import JoinRefused, NodeFailed, NodeLost, NodeRemoved
from netstorm.lab.simulation.cluster import SimulatedJobs
from netstorm.scheduler.snapshot import JobPhase
from netstorm.topology.network import Network
from tests.simulated.jobs import examples


def join(jobs, nodes):
    jobs.run_until_ended([node.joined for node in nodes])
    for node in nodes:
        assert node.joined.error is None, node.joined.error


def push(nodes, value, size=120):
    """Let every node push one round of ones times `value` and its rank; return what they wait for."""
    return [node.push("w", np.full(size, value + node.rank, np.float32)) for node in nodes]


def total(nodes, value):
    return sum(value + node.rank for node in nodes)


def finish(jobs, nodes):
    pending = [node.finish() for node in nodes]
    jobs.run_until_ended(pending)
    for one in pending:
        assert one.error is None, one.error


def endless(nodes, value, size=120):
    """Let every node push the next round as soon as it has the last; return the sums so far."""
    sums = []

    def go(node):
        if not node.alive or node.failure is not None:
            return
        (one,) = push([node], value, size)

        def ended():
            if one.error is None:
                sums.append(float(one.result()[0]))
                go(node)

        one.then(ended)

    for node in nodes:
        go(node)
    return sums


def when_all(pending, action):
    """Call `action` once all of `pending` have ended."""
    left = len(pending)

    def one_less():
        nonlocal left
        left -= 1
        if not left:
            action()

    for one in pending:
        one.then(one_less)


def test_two_jobs_with_the_same_ranks_and_keys_sum_each_its_own():
    jobs = SimulatedJobs()
    one, other = jobs.start("one", 3), jobs.start("other", 2)
    join(jobs, [*one, *other])
    pending = {id(nodes): push(nodes, value) for nodes, value in ((one, 10), (other, 1000))}
    jobs.run_until_ended([*pending[id(one)], *pending[id(other)]])
    for nodes, value in ((one, 10), (other, 1000)):
        for result in pending[id(nodes)]:
            assert (result.result() == total(nodes, value)).all()
    finish(jobs, [*one, *other])
    jobs.run_until(lambda: not jobs.scheduler.machine.jobs)


@given(st.integers(0, 2**32), st.data())
@examples(3)
def test_a_job_that_fails_in_the_middle_does_not_disturb_the_others(seed, data):
    jobs = SimulatedJobs(
        seed=seed, delay_s=0.05, jitter_s=0.1, heartbeat_interval_s=0.5, heartbeat_timeout_s=2.0
    )
    sizes = {"doomed": data.draw(st.integers(2, 4)), "good": data.draw(st.integers(1, 4))}
    started = {name: jobs.start(name, size, chunk_size=50) for name, size in sizes.items()}
    join(jobs, [node for nodes in started.values() for node in nodes])
    doomed, good = started["doomed"], started["good"]
    lost = endless(doomed, 1)
    sums = endless(good, 100)
    jobs.run_for(data.draw(st.floats(0.0, 0.5)))
    how = data.draw(st.sampled_from(("crash", "silence", "fails")))
    victim = data.draw(st.sampled_from(doomed))
    if how == "fails":
        victim.fail("out of memory")
    else:
        victim.process.die(silent=how == "silence")
    jobs.run_until(lambda: all(node.failure is not None for node in doomed if node is not victim))
    for node in doomed:
        if node is not victim:
            assert isinstance(node.failure, (NodeLost, NodeFailed)), node.failure
            assert f"rank {victim.rank} " in str(node.failure)
    before = len(sums)
    jobs.run_for(5.0)
    assert len(sums) > before + 5 * len(good)
    assert set(sums) == {total(good, 100)}
    assert set(lost) <= {total(doomed, 1)}
    assert all(node.failure is None for node in good)


@given(st.integers(0, 2**32))
@examples(3)
def test_jobs_come_and_go_in_any_order_and_names_are_used_again(seed):
    chance = random.Random(seed)
    jobs = SimulatedJobs(seed=seed, delay_s=0.005, jitter_s=0.01, forming_s=chance.choice((0.0, 0.5)))
    sums: list[str] = []

    def run(name, times):
        size, value = chance.randint(1, 4), chance.randint(1, 1000)
        nodes = jobs.start(name, size)

        def summed():
            assert all((one.result() == total(nodes, value)).all() for one in pending)
            sums.append(name)
            when_all([node.finish() for node in nodes], again)

        def again():
            if times > 1:
                jobs.at(jobs.now + chance.uniform(0.0, 0.5), lambda: run(name, times - 1))

        pending = push(nodes, value)
        when_all(pending, summed)

    for name in ("a", "b", "c"):
        jobs.at(chance.uniform(0.0, 2.0), functools.partial(run, name, 3))
    jobs.run_until(lambda: len(sums) == 9 and not jobs.scheduler.machine.jobs, 120.0)
    assert sorted(sums) == sorted("abc" * 3)


def test_a_name_can_be_used_again_while_the_nodes_of_the_failed_job_still_hear_why():
    jobs = SimulatedJobs(delay_s=0.01)
    first = jobs.start("one", 3)
    join(jobs, first)
    first[1].process.die(silent=True)
    jobs.run_until(lambda: jobs.scheduler.machine.jobs[0].phase is JobPhase.FAILED)
    second = jobs.start("one", 2)
    join(jobs, second)
    pending = push(second, 5)
    jobs.run_until_ended(pending)
    assert (pending[0].result() == total(second, 5)).all()
    jobs.run_until(lambda: first[0].failure is not None and first[2].failure is not None)


def test_a_scheduler_of_two_jobs_ends_when_both_have_and_lets_no_third_one_in():
    jobs = SimulatedJobs(jobs=2)
    one, other = jobs.start("one", 2), jobs.start("other", 2)
    join(jobs, [*one, *other])
    (third,) = jobs.start("third", 1)
    jobs.run_until_ended([third.joined])
    assert isinstance(third.joined.error, JoinRefused)
    assert "started for 2 jobs" in str(third.joined.error)
    finish(jobs, one)
    jobs.run_until(lambda: len(jobs.scheduler.machine.jobs) == 1)
    assert not jobs.scheduler.machine.outcome
    finish(jobs, other)
    jobs.run_until(lambda: jobs.scheduler.machine.outcome is not None)
    outcome = jobs.scheduler.machine.outcome
    assert outcome is not None
    assert outcome.exit_code == 0


FAR = """
nodes: {0: {}, 1: {}, 2: {}}
links:
  - {between: [0, 2], rate: 1Gbit, latency: 60ms}
  - {between: [0, 1], rate: 1Gbit, latency: 5ms}
  - {between: [1, 2], rate: 100Mbit, latency: 5ms}
"""


def test_a_job_changes_to_the_trees_of_its_share_while_another_runs_and_back_when_that_has_ended(tmp_path):
    file = tmp_path / "network.yaml"
    file.write_text(FAR)
    jobs = SimulatedJobs(
        delay_s=0.05, network_file=str(file), model="100kB", num_roots=1, chunk_size=25_000, aux_path=False
    )

    def near():
        """Whether the small job's sums take the short slow link of ranks 1 and 2, not the long fast one."""
        (tree,) = jobs.scheduler.machine.job("small").policy.trees
        return 0 not in (tree.root, tree.reduce_parent[2])

    small = jobs.start("small", 3)
    join(jobs, small)
    assert near()
    sums = endless(small, 1, size=25_000)
    large = jobs.start("large", 3, job_weight=19)
    join(jobs, large)
    jobs.run_until(lambda: not near())
    policy = jobs.scheduler.machine.job("small").policy
    assert "job 'large' has begun: this one plans with 5% of each link" in policy.reason
    large[0].fail("out of memory")
    jobs.run_until(near)
    jobs.run_for(0.5)
    policy = jobs.scheduler.machine.job("small").policy
    assert "job 'large' has ended: this one plans with 100% of each link" in policy.reason
    assert set(sums) == {total(small, 1)}
    assert all(node.failure is None for node in small)


@pytest.mark.parametrize("seed", [0])
def test_the_same_seed_gives_the_same_run(seed):
    def run():
        jobs = SimulatedJobs(seed=seed, delay_s=0.01, jitter_s=0.02)
        one, other = jobs.start("one", 3), jobs.start("other", 2)
        join(jobs, [*one, *other])
        endless(one, 1)
        sums = endless(other, 10)
        jobs.run_for(3.0)
        return len(sums), jobs.network.traffic

    assert run() == run()


def test_an_elastic_job_goes_on_without_a_node_that_dies_and_with_its_successor_beside_another_job():
    jobs = SimulatedJobs(seed=4, heartbeat_timeout_s=8.0)
    steady = jobs.start("steady", 2)
    changing = jobs.start("changing", 3, elastic="1:3")
    join(jobs, steady + changing)
    sums = endless(steady, 1.0)
    jobs.run_until_ended(push(changing, 1.0))
    changing[1].process.die()
    survivors = [changing[0], changing[2]]
    died_at = jobs.now
    jobs.run_until_ended(push(survivors, 1.0))
    assert jobs.now - died_at < 4.0  # the two signs that its process has ended; not silence
    assert [node.operations[-1].contributors for node in survivors] == [{0b101: 1}] * 2
    (successor,) = jobs.start_more("changing", [1])
    join(jobs, [successor])
    assert successor.machine.needs_state
    assert len(jobs.scheduler.machine.job("changing").peers) == 3
    before = len(sums)
    jobs.run_for(1.0)
    assert len(sums) > before
    assert all(node.failure is None for node in (*steady, *survivors, successor))


def test_a_node_that_is_out_of_an_elastic_job_of_several_learns_why(monkeypatch):
    jobs = SimulatedJobs(seed=5, heartbeat_timeout_s=4.0)
    nodes = jobs.start("changing", 3, elastic="1:3")
    join(jobs, nodes)
    nodes[2].process.suspend()
    monkeypatch.setattr(jobs.network, "acknowledges", lambda _, **__: False)
    jobs.run_until(lambda: len(jobs.scheduler.machine.job("changing").peers) == 2, 30.0)
    nodes[2].process.go_on()
    jobs.run_until(lambda: nodes[2].failure is not None, 30.0)
    assert isinstance(nodes[2].failure, NodeRemoved), nodes[2].failure
    assert "no heartbeat for" in str(nodes[2].failure)


@pytest.mark.slow
def test_a_job_of_higher_priority_is_as_fast_as_alone_and_the_other_goes_on():
    """Two jobs on the same three hosts, whose links both would fill."""
    network = Network.uniform(3, rate=10e6, latency=0.01)
    size, names = 200_000, ("first", "second")
    hosts = {SimulatedJobs.host_of(job, rank): rank for job in names for rank in network.ranks}

    def sums(*, priorities: tuple[int, ...]) -> list[int]:
        """Return how many rounds each job has had after 20 s; a job without a number does not run."""
        jobs = SimulatedJobs(seed=3, network=network, hosts=hosts)
        counts = []
        for job, priority in zip(names, priorities, strict=False):
            nodes = jobs.start(job, 3, job_priority=priority)
            join(jobs, nodes)
            counts.append(endless(nodes, 1, size))
        jobs.run_for(20.0)
        return [len(done) // 3 for done in counts]

    [alone] = sums(priorities=(0,))
    first, second = sums(priorities=(2, 1))
    equal = sums(priorities=(0, 0))
    assert first > 0.85 * alone
    assert max(equal) < 0.7 * alone
    assert 1 <= second < 0.4 * alone
