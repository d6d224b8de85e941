"""The machine of an elastic job's scheduler dies, and another scheduler is started elsewhere."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.lab.simulation.process import host_of
from netstorm.protocol.frames import SCHEDULER
from netstorm.protocol.messages import ViewAgreed
from tests.simulated.elastic.elastic_run import STEPS, ElasticRun
from tests.simulated.jobs import examples, on_messages

NOTICED_S = 8.0
"""By then a node has lost a scheduler that is gone, however it has gone."""


def serves(scheduler):
    """Return whether a scheduler that was started to take over has done so, and goes on."""
    return scheduler.machine.job is not None and scheduler.machine.outcome is None


def begin(found, start):
    """Start a scheduler, which is found later."""
    found.append(start())


def refusal(scheduler):
    """Return why a scheduler has not taken over."""
    assert scheduler.machine.outcome.exit_code == 2
    return scheduler.machine.outcome.text


@given(st.integers(0, 2**32), st.integers(3, 5), st.booleans(), st.booleans())
@examples(2)
def test_one_peer_that_is_alive_is_enough_to_take_the_job_over(seed, nodes, silent, dies):
    """With `dies`, one of the peers dies with the scheduler: the machine had a rank, too."""
    chance = random.Random(f"recovery {seed}")
    run = ElasticRun(seed, nodes, recoverable=True, keyed=True)
    cluster, end = run.cluster, run.cluster.now + chance.random()
    cluster.at(end, lambda: cluster.faults.crash(SCHEDULER, silent=silent))
    if dies:
        cluster.at(end, lambda: cluster.faults.crash(0, silent=silent))
    cluster.run_until(lambda: cluster.now > end + 9 * chance.random(), 20.0, "an operator who reacts")
    scheduler = cluster.start_standby("elsewhere", peers=[0, nodes - 1])
    run.run_to_the_end()
    assert serves(scheduler)
    assert all(one.step == STEPS for rank, one in run.programs.items() if rank > 0 or not dies)
    followed = {node.machine.live.scheduler for node in cluster.nodes if node.alive}
    assert {address and address[0] for address in followed} == {"elsewhere"}, "whom nodes ask for the time"


@given(st.integers(0, 2**32), st.integers(2, 5))
@examples(2)
def test_of_two_that_recover_the_job_one_wins(seed, nodes):
    chance = random.Random(f"two {seed}")
    run = ElasticRun(seed, nodes, steps=2 * STEPS, recoverable=True, keyed=True)
    cluster = run.cluster
    cluster.faults.crash(SCHEDULER, silent=chance.random() < 0.5)
    found: list[Any] = []
    for host in ("here", "there"):
        peers = chance.sample(range(nodes), chance.randint(1, nodes))
        start = functools.partial(cluster.start_standby, host, peers)
        cluster.at(cluster.now + NOTICED_S * chance.random(), functools.partial(begin, found, start))
    run.run_to_the_end()
    assert all(one.running and one.step == 2 * STEPS for one in run.programs.values())
    cluster.run_for(20.0)
    assert sorted(map(serves, found)) == [False, True]
    (other,) = (one.machine for one in found if not serves(one))
    assert other.outcome is not None
    assert "has a scheduler, at" in other.outcome.text or "no majority here" in other.outcome.text


@given(st.integers(0, 2**32), st.integers(2, 5), st.booleans())
@examples(2)
def test_a_scheduler_that_comes_back_with_its_log_does_not_get_the_nodes_again(seed, nodes, recoverable):
    chance = random.Random(f"back {seed}")
    run = ElasticRun(seed, nodes, keep_log=True, recoverable=recoverable, keyed=True)
    cluster = run.cluster
    cluster.faults.crash(SCHEDULER)
    cluster.run_for(4.0)
    scheduler = cluster.start_standby("elsewhere", peers=range(nodes))
    cluster.run_until(lambda: scheduler.machine.job is not None, 30.0, "the taking over")
    cluster.run_for(chance.choice((0.0, 0.1, 3.0)))
    cluster.start(SCHEDULER)
    run.run_to_the_end()
    assert all(one.running and one.step == STEPS for one in run.programs.values())
    assert serves(scheduler)
    cluster.run_until(lambda: cluster.scheduler.machine.outcome is not None, 60.0, "the end of the other one")


def test_nodes_do_not_leave_a_scheduler_that_is_alive_and_the_error_says_where_it_is():
    run = ElasticRun(1, 3, steps=20, recoverable=True)
    cluster = run.cluster
    scheduler = cluster.start_standby("elsewhere", peers=[1])
    cluster.run_until(lambda: scheduler.machine.outcome is not None, 30.0, "the refusal")
    assert "has a scheduler, at scheduler:9091: 3 nodes follow it" in refusal(scheduler)
    run.run_to_the_end()
    assert all(one.running for one in run.programs.values())


def test_the_error_names_the_peers_of_which_none_answers():
    run = ElasticRun(1, 2, recoverable=True, join_timeout_s=10.0)
    for rank in (SCHEDULER, 0, 1):
        run.cluster.faults.crash(rank)
    scheduler = run.cluster.start_standby("elsewhere", peers=[0, 1])
    run.cluster.run_until(lambda: scheduler.machine.outcome is not None, 30.0, "the end")
    assert "no node of job 'default' comes: node0:" in refusal(scheduler)


@given(st.integers(0, 2**32), st.integers(3, 6), st.booleans())
@examples(2)
def test_of_all_schedulers_whatever_is_cut_off_at_most_one_goes_on(seed, nodes, recoverable):
    check_one_goes_on(seed, nodes, recoverable=recoverable)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(st.integers(0, 2**32), st.integers(3, 6), st.booleans())
@settings(max_examples=20)
def test_of_all_schedulers_at_most_one_goes_on_many_seeds(seed, nodes, recoverable):
    check_one_goes_on(seed, nodes, recoverable=recoverable)


def check_one_goes_on(seed, nodes, *, recoverable):
    """Hosts are split in two again and again, the scheduler may end and come back with its log, and operators
    start others on both sides.
    """
    chance = random.Random(f"fencing {seed}")
    run = ElasticRun(seed, nodes, steps=2000, pause_s=3.0, keep_log=True, recoverable=recoverable)
    cluster = run.cluster
    results: list[Any] = []
    # Those that are cut off have results, too.
    setattr(run.checks, "same", lambda node, *what: results.append((node, *what)))  # noqa: B010
    agreed = agreed_views(cluster)
    hosts = [host_of(SCHEDULER), "here", "there", *map(host_of, range(nodes))]

    def split(side):
        for one, other in itertools.combinations(hosts, 2):
            cluster.network.heal(one, other)
            if (one in side) != (other in side):
                cluster.network.cut(one, other)

    def end_or_begin():
        if cluster.scheduler.alive:
            cluster.faults.crash(SCHEDULER, silent=chance.random() < 0.3)
        else:
            cluster.start(SCHEDULER)

    at = cluster.now
    for host in ("here", "there"):
        peers = chance.sample(range(nodes), chance.randint(1, nodes))
        start = functools.partial(cluster.start_standby, host, peers)
        cluster.at(at + 20 * chance.random(), functools.partial(begin, [], start))
    for _ in range(chance.randint(1, 4)):
        at += 8 * chance.random()
        cluster.at(at, functools.partial(split, set(chance.sample(hosts, chance.randint(1, len(hosts) - 1)))))
        if chance.random() < 0.5:
            cluster.at(at + 8 * chance.random(), end_or_begin)
    cluster.run_until(lambda: cluster.now > at + 60.0, 120.0, "all decisions")
    before = {rank: one.step for rank, one in run.programs.items()}
    cluster.run_for(10.0)
    goes_on = [rank for rank, one in run.programs.items() if one.running and one.step > before[rank]]
    assert len({cluster.started(rank).process.machine.members for rank in goes_on}) <= 1
    those = [cluster.started(rank) for rank in goes_on]
    known: dict[Any, bytes] = {}
    for node, what, content in results:
        assert node not in those or known.setdefault(what, content) == content, what
    schedulers = [scheduler for scheduler, _ in itertools.groupby(agreed.values())]
    assert len(schedulers) == len(set(schedulers)), "two take turns"
    return schedulers, goes_on


def agreed_views(cluster):
    """Return by whom each view is agreed on, which must be one scheduler; by number, in order of time."""
    found: dict[int, str] = {}

    def record(source, _target, agreed):
        assert found.setdefault(agreed.view, source) == source, f"two agree on view {agreed.view}"

    on_messages(cluster, ViewAgreed, record)
    return found
