"""The scheduler as a process: real sockets, signals, exit codes, and what it prints."""

from __future__ import annotations

import random
import signal
import socket
import time
from pathlib import Path

import ntplib
import pytest

from netstorm.protocol import messages as m
from netstorm.pslite.sntp_socket import SntpClient
from tests.integration.jobs import run_netstorm
from tests.integration.scheduler.scripted import SchedulerProcess, ScriptedNode, wait_for


def test_a_whole_job_in_good_order(tmp_path):
    with SchedulerProcess(tmp_path) as scheduler:
        port = scheduler.port
        with ScriptedNode(port, 1) as one, ScriptedNode(port, 0) as zero:
            joined = one.hears(m.Joined)
            assert [(one.rank, one.port) for one in joined.members] == [(0, zero.port), (1, one.port)]
            assert zero.hears(m.Joined).policy == joined.policy
            for node in (zero, one):
                node.say(m.RegisterKeys(keys=(m.KeySpec(0, "w", (3,), "float32"),)))
                assert node.hears(m.KeysRegistered).grants[0].key == 0
                node.say(m.TopologyRequest(begun=(m.RoundBegun(0, 0, "sgd"),)))
                assert node.hears(m.TopologyAnswer).bindings[0].granted == 1
                node.say(m.Barrier(number=0))
            for node in (zero, one):
                node.hears(m.BarrierReached)
                node.say(m.Finished(last_rounds={0: 0}))
            for node in (zero, one):
                node.hears(m.AllFinished)
                node.leave()
            assert scheduler.exit_code() == 0
        output = scheduler.output()
        assert f"netstorm scheduler: job 'default' at 127.0.0.1:{port}" in output
        assert output.endswith("netstorm scheduler: job 'default' has ended well: 2 nodes, 1 keys\n")


def test_it_says_live_whom_it_waits_for_and_so_do_the_nodes(tmp_path):
    with SchedulerProcess(tmp_path) as scheduler, ScriptedNode(scheduler.port, 1) as node:
        text = f"waiting for 1 of 2 nodes; here: 1 (127.0.0.1:{node.port}, site1); not here: 0"
        assert node.hears(m.Waiting).text == text
        scheduler.says(text)


def test_a_node_that_dies_is_reported_to_the_others_and_the_exit_code_is_1(tmp_path):
    scheduler = SchedulerProcess(tmp_path, PS_HEARTBEAT_INTERVAL="0.2", PS_HEARTBEAT_TIMEOUT="100")
    with scheduler, ScriptedNode(scheduler.port, 0) as zero:
        with ScriptedNode(scheduler.port, 1) as one:
            zero.hears(m.Joined)
            one.hears(m.Joined)
        gone = zero.hears(m.PeerGone)
        assert (gone.rank, gone.kind) == (1, "lost")
        assert gone.reason.startswith(
            f"rank 1 (127.0.0.1:{one.port}, site1) is lost: its process has ended: "
        )
        zero.leave()
        assert scheduler.exit_code() == 1
        assert f"has failed: {gone.reason}" in scheduler.output()


def test_ctrl_c_ends_the_job_and_the_nodes_are_told(tmp_path):
    with SchedulerProcess(tmp_path) as scheduler:
        with ScriptedNode(scheduler.port, 0) as zero, ScriptedNode(scheduler.port, 1) as one:
            zero.hears(m.Joined)
            one.hears(m.Joined)
            scheduler.signal(signal.SIGINT)
            for node in (zero, one):
                assert node.hears(m.PeerGone) == m.PeerGone(
                    rank=-1, kind="stopped", reason="the scheduler was stopped by SIGINT"
                )
                node.leave()
        assert scheduler.exit_code() == 130


def test_a_second_signal_does_not_wait_for_nodes(tmp_path):
    with SchedulerProcess(tmp_path) as scheduler:
        with ScriptedNode(scheduler.port, 0) as zero, ScriptedNode(scheduler.port, 1):
            zero.hears(m.Joined)
            scheduler.signal(signal.SIGTERM)
            zero.hears(m.PeerGone)
            scheduler.signal(signal.SIGTERM)
            assert scheduler.exit_code() == 143
        scheduler.says("stopped by a second SIGTERM")


def test_a_scheduler_that_nobody_comes_to_gives_up_after_the_join_timeout(tmp_path):
    with SchedulerProcess(tmp_path, "--join-timeout", "500ms") as scheduler:
        assert scheduler.exit_code() == 1
        assert (
            "not every node came within 0.5 s (NETSTORM_JOIN_TIMEOUT): waiting for 2 of 2"
            in scheduler.output()
        )


def test_a_node_of_another_job_hears_why_it_is_refused(tmp_path):
    scheduler = SchedulerProcess(tmp_path, "--job", "mine")
    with scheduler, ScriptedNode(scheduler.port, job="yours") as node:
        gone = node.hears(m.PeerGone)
        assert gone.kind == "refused"
        assert "is of job 'yours', the scheduler of job 'mine'" in gone.reason


def test_the_ready_file_is_there_when_nodes_can_connect_and_never_an_old_one(tmp_path):
    (tmp_path / "ready").write_text("127.0.0.1:1\n")
    with SchedulerProcess(tmp_path) as scheduler:
        scheduler.says("netstorm scheduler: job")
        assert scheduler.port != 1
        socket.create_connection(("127.0.0.1", scheduler.port), timeout=10).close()
        assert scheduler.ready_file.read_text() == f"127.0.0.1:{scheduler.port}\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["output", "ready"]


def test_any_ntp_client_gets_the_cluster_time_at_the_same_port(tmp_path):
    with SchedulerProcess(tmp_path) as scheduler:
        stats = ntplib.NTPClient().request("127.0.0.1", port=scheduler.port, version=4, timeout=60)
        assert abs(stats.offset) <= stats.delay / 2 + 0.005, "as exact as the exchange was fast"
        assert (stats.stratum, stats.leap, ntplib.ref_id_to_text(stats.ref_id, 2)) == (10, 0, "127.127.1.0")


def test_a_nodes_io_thread_follows_the_cluster_clock(tmp_path):
    with SchedulerProcess(tmp_path) as scheduler, ScriptedNode(scheduler.port, 0) as node:
        client = SntpClient("127.0.0.1", scheduler.port)
        client.start(node.thread)
        wait_for(lambda: client.counters.get("sntp_exchanges") >= 2, "the time")
        wait_for(lambda: client.sync.error_bound(time.monotonic()) < 0.1, "an exchange that was fast")
        before, found, after = time.time_ns(), client.now_ns(), time.time_ns()
        assert before - 200_000_000 < found < after + 200_000_000
        client.stop(node.thread)


def test_random_bytes_on_both_ports_do_not_disturb_the_job(tmp_path):
    chance = random.Random(4)
    with SchedulerProcess(tmp_path) as scheduler, ScriptedNode(scheduler.port, 0) as zero:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            for _ in range(50):
                udp.sendto(chance.randbytes(chance.randrange(200)), ("127.0.0.1", scheduler.port))
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", scheduler.port), timeout=10) as tcp:
                tcp.sendall(chance.randbytes(chance.randrange(1, 2000)))
        with ScriptedNode(scheduler.port, 1) as one:
            assert (zero.hears(m.Joined).rank, one.hears(m.Joined).rank) == (0, 1)


# ------------------------------------------------------------------------------------- it cannot begin


def fails(folder: Path, *arguments: str, **variables: str) -> str:
    """Run a scheduler that cannot begin; return its only line on standard error."""
    done = run_netstorm(folder, "scheduler", *arguments, **variables)
    assert (done.code, done.out) == (2, ""), done
    (line,) = done.err.splitlines()
    return line


def test_a_port_that_is_taken_is_an_error_that_names_the_variable(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = fails(tmp_path, "--port", str(port))
    assert line.startswith(f"netstorm: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert "DMLC_PS_ROOT_PORT" in line


def test_a_udp_port_that_is_taken_is_an_error_that_names_the_variable(tmp_path):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        line = fails(tmp_path, "--port", "0", "--sntp-port", str(other.getsockname()[1]))
    assert "cannot tell the time at UDP 127.0.0.1" in line
    assert "NETSTORM_SNTP_PORT" in line


TWO = "nodes: {0: {}, 1: {}}\nlinks: [{between: [0, 1], rate: 100Mbit}]\n"


@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        (
            ("--num-workers", "3", "--network", "two.yaml"),
            {},
            "NETSTORM_NETWORK='two.yaml' describes 2 nodes, but DMLC_NUM_WORKER=3: both must be the same",
        ),
        (("--num-workers", "2", "--network", "wrong.yaml"), {}, "wrong.yaml:2"),
        ((), {"DMLC_NUM_WORKER": "none"}, "DMLC_NUM_WORKER='none'"),
        (("--port", "0", "--ready-file", "no/such/folder"), {}, "No such file or directory"),
    ],
    ids=["another number of nodes", "a wrong file", "a wrong variable", "no such folder"],
)
def test_what_is_wrong_is_named_with_where_it_is(tmp_path, arguments, variables, says):
    (tmp_path / "two.yaml").write_text(TWO)
    (tmp_path / "wrong.yaml").write_text(TWO.replace("100Mbit", "-5Mbit"))
    words = [str(tmp_path / word) if "." in word or "/" in word else word for word in arguments]
    assert says in fails(tmp_path, *words, **variables).replace(f"{tmp_path}/", "")
