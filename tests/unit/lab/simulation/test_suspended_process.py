"""A process that is stopped does nothing, and then all that has come meanwhile: as by SIGSTOP, SIGCONT."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Busy, Fault, Reset
from netstorm.protocol.frames import SCHEDULER


def cluster():
    return SimulatedCluster(2, heartbeat_timeout_s=20.0, link_timeout_s=15.0).join()


def push(node):
    return node.push("w", np.ones(4, np.float32))


def test_what_comes_for_it_waits_and_so_does_what_its_program_asks():
    job = cluster()
    job.faults.suspend(1, 2.0)
    pending = [push(node) for node in job.nodes]
    job.run_for(1.9)
    assert not any(one.ended for one in pending)
    assert not job.nodes[1].process.stack.machine.outstanding()
    job.run_until_ended(pending, 5.0)
    assert [one.result().tolist() for one in pending] == [[2.0] * 4] * 2


def connections(node):
    links = node.process.stack.endpoint.links().values()
    return sum(link["connections"] for link in links)


@pytest.mark.parametrize("stopped", [1, SCHEDULER])
@pytest.mark.parametrize("seconds", [1.0, 6.0, 90.0])
def test_others_wait_for_it_and_keep_their_connections(stopped, seconds):
    job = cluster()
    job.run_until_ended([push(node) for node in job.nodes])
    before = [connections(node) for node in job.nodes]
    job.faults.suspend(stopped, seconds)
    pending = [node.barrier() for node in job.nodes] + [push(node) for node in job.nodes]
    job.run_for(seconds - 0.1)
    assert not all(one.ended for one in pending)
    job.run_until_ended(pending, 5.0)
    assert all(one.ended_well for one in pending)
    assert [connections(node) for node in job.nodes] == before
    job.finish()


@pytest.mark.parametrize("stopped", [1, SCHEDULER])
@pytest.mark.parametrize("late", [False, True])
def test_who_is_silent_is_not_said_to_be_busy_where_its_machine_answers_late(
    stopped, late, caplog, monkeypatch
):
    job = SimulatedCluster(2, heartbeat_timeout_s=5.0, link_timeout_s=5.0).join()
    for endpoint in (job.scheduler.stack.endpoint, *(node.process.stack.endpoint for node in job.nodes)):
        monkeypatch.setattr(endpoint, "_answers_late", lambda _: late)
    job.faults.suspend(stopped, 40.0)
    pending = [push(node) for node in job.nodes]
    job.run_until_ended(pending, 60.0)
    assert ("nothing has come for" in caplog.text) == late
    assert ("its Python has not run for" in caplog.text) != late


@pytest.mark.parametrize("elastic", ["", "1:3"])
@pytest.mark.parametrize("seed", range(3))
def test_all_can_be_stopped_together_or_one_after_the_other(elastic, seed):
    """When they go on, none takes another one's silence for a loss, though all time-outs have passed."""
    job = SimulatedCluster(3, seed=seed, elastic=elastic, heartbeat_timeout_s=4.0, link_timeout_s=3.0).join()
    job.run_until_ended([push(node) for node in job.nodes])
    chance = random.Random(seed)
    for end in (SCHEDULER, 0, 1, 2):
        job.at(job.now + chance.uniform(0.0, 2.0), functools.partial(job.faults.suspend, end, 30.0))
    job.run_for(chance.uniform(0.0, 2.5))
    pending = [push(node) for node in job.nodes]
    job.run_until_ended(pending, 60.0)
    assert [one.result().tolist() for one in pending] == [[3.0] * 4] * 3
    job.finish()


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_right_while_processes_are_busy_and_connections_break(seed):
    chance = random.Random(seed)
    busy = [
        Busy(at=chance.uniform(0.0, 20.0), rank=chance.randrange(-1, 3), seconds=chance.uniform(0.1, 15.0))
        for _ in range(5)
    ]
    resets = [Reset(at=chance.uniform(0.0, 20.0), source=0, target=chance.choice((1, 2))) for _ in range(3)]
    faults: list[Fault] = [*busy, *resets]
    job = SimulatedCluster(3, seed=seed, faults=faults, heartbeat_timeout_s=3.0, link_timeout_s=2.0).join()
    for _ in range(30):
        pending = [push(node) for node in job.nodes]
        job.run_until_ended(pending, 120.0)
        assert [one.result().tolist() for one in pending] == [[3.0] * 4] * 3
        job.run_for(1.0)
    job.finish()


def test_a_time_out_does_not_count_the_time_in_which_its_own_process_did_not_run():
    job = SimulatedCluster(2, wait_timeout_s=60.0).join()
    waits = push(job.nodes[0])
    job.run_for(30.0)
    job.faults.suspend(0, 50.0)
    job.run_for(60.0)
    assert not waits.ended
    late = push(job.nodes[1])
    job.run_until_ended([waits, late], 10.0)
    assert waits.ended_well


def test_a_link_that_is_broken_while_both_ends_run_is_found_although_kernels_acknowledge(monkeypatch):
    """As through a proxy whose other side is cut off."""
    job = SimulatedCluster(3, heartbeat_timeout_s=4.0, link_timeout_s=3.0).join()
    job.run_until_ended([push(node) for node in job.nodes])
    monkeypatch.setattr(job.network, "acknowledges", lambda _, **__: True)
    job.faults.cut(0, 1)
    job.network.detect_s = 1e6
    pending = [push(node) for node in job.nodes]
    job.run_until_ended(pending, 120.0)
    assert [one.result().tolist() for one in pending] == [[3.0] * 4] * 3
    assert job.scheduler.machine.failed_links


def test_a_process_that_is_killed_while_it_is_stopped_stays_dead():
    job = SimulatedCluster(2, elastic="1:2", heartbeat_timeout_s=3.0).join()
    job.faults.suspend(1, 1.0)
    job.faults.crash(1)
    job.run_for(2.0)
    assert not job.nodes[1].alive
    one = push(job.nodes[0])
    job.run_until_ended([one], 10.0)
    assert one.result().tolist() == [1.0] * 4
