"""A process that is stopped does nothing, and then all that has come meanwhile: as by SIGSTOP, SIGCONT."""

from __future__ import annotations

import numpy as np

from netstorm.simulation.cluster import SimulatedCluster


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
    assert not job.nodes[1].process.stack.machine.requests.outstanding()
    job.run_until_ended(pending, 5.0)
    assert [one.result().tolist() for one in pending] == [[2.0] * 4] * 2


def test_others_give_up_its_connections_after_a_while_and_it_comes_back():
    job = cluster()
    job.run_until_ended([push(node) for node in job.nodes])
    broken = []
    reset_all = job.network.reset_all

    def reset_and_note(host):
        broken.append((job.now, host))
        return reset_all(host)

    job.network.reset_all = reset_and_note
    began = job.now
    job.faults.suspend(1, 6.0)
    pending = [push(node) for node in job.nodes]
    job.run_until_ended(pending, 20.0)
    assert broken == [(began + job.network.detect_s, "node1")]
    assert all(one.ended_well for one in pending)
    job.finish()


def test_one_that_goes_on_in_time_keeps_its_connections():
    job = cluster()
    job.network.reset_all = lambda host: (_ for _ in ()).throw(AssertionError(host))
    job.faults.suspend(1, 1.0)
    job.run_until_ended([push(node) for node in job.nodes], 20.0)


def test_a_process_that_is_killed_while_it_is_stopped_stays_dead():
    job = SimulatedCluster(2, elastic="1:2", heartbeat_timeout_s=3.0).join()
    job.faults.suspend(1, 1.0)
    job.faults.crash(1)
    job.run_for(2.0)
    assert not job.nodes[1].alive
    one = push(job.nodes[0])
    job.run_until_ended([one], 10.0)
    assert one.result().tolist() == [1.0] * 4
