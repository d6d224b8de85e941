"""Whole jobs: the real scheduler, and nodes that join it and meet at barriers, without MXNet."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.launch.launcher import REPOSITORY, Launcher, ended, inside, until

JOIN = """
from netstorm.kvstore.process.lifetime import runtime_of_this_process
runtime = runtime_of_this_process()
assert runtime.rank == rank
runtime.barrier()
note(os.getpid(), f"joined-{rank}")
"""


@pytest.fixture
def job(launcher: Launcher) -> Launcher:
    """A launcher that starts a scheduler too. A machine that does other work loses it no nodes."""
    launcher.heartbeat_timeout_s = 10.0
    launcher.words = lambda *options: [  # type: ignore[method-assign]
        word for word in Launcher.words(launcher, *options) if word != "--no-scheduler"
    ]
    return launcher


def until_joined(job: Launcher, nodes: int) -> None:
    until(lambda: len([*job.folder.glob("joined-*")]) == nodes, "the nodes to join")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def scheduler_of(launcher_pid: int) -> psutil.Process:
    below = psutil.Process(launcher_pid).children(recursive=True)
    (found,) = (each for each in below if {"netstorm", "scheduler"} <= {*each.cmdline()})
    return found


def test_a_job_runs_from_the_schedulers_start_to_its_end(job):
    end = job.run(JOIN + "print('met')", "-n", "3", "--site", "a,b,c", "--topology", "star")
    assert end.code == 0
    lines = end.out.splitlines()
    assert sorted(line for line in lines if not line.startswith("[scheduler]")) == [
        f"[{r}] met" for r in range(3)
    ]
    assert "star" in lines[0]
    said = [line for line in lines if line.startswith("[scheduler]")]  # Python prints at a process's very end
    assert said[-1] == "[scheduler] netstorm scheduler: job 'default' has ended well: 3 nodes, 0 keys, so nobody has summed "
        "anything over NetStorm"
    assert "netstorm-verdict" not in end.out
    assert "[launch]" not in end.err


def test_the_rank_whose_exception_ended_the_job_is_the_first_failure_however_late_its_process_ends(job):
    program = (
        JOIN
        + """
import atexit
if rank == 2:
    atexit.register(time.sleep, 1)
    raise ValueError("boom")
runtime.barrier()
"""
    )
    end = job.run(program, "-n", "3")
    assert end.code == 1
    assert "NodeFailed: rank 2" in end.err
    assert end.err.splitlines()[-2:] == [
        "[launch] exit code 1: ranks 0, 1 and the scheduler",
        "[launch] rank 2 on 127.0.0.1 failed with exit code 1: ValueError: boom",
    ]


def test_a_node_that_is_killed_is_noticed_by_the_others_which_end_by_themselves(job):
    program = JOIN + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nruntime.barrier()"
    end = job.run(program, "-n", "2", PS_HEARTBEAT_TIMEOUT="2")
    assert end.code == 137
    assert "NodeLost: rank 1" in end.err
    assert "sending SIG" not in end.err
    assert "[launch] rank 1 on 127.0.0.1 was killed by SIGKILL" in end.err


def test_a_scheduler_that_dies_is_the_first_failure(job):
    program = JOIN + "runtime.barrier() if rank else time.sleep(600)"
    with job.started(program, "-n", "2", "--grace", "1", PS_HEARTBEAT_TIMEOUT="2") as process:
        until_joined(job, 2)
        scheduler_of(process.pid).kill()
        end = ended(process)
    assert end.code == 137
    assert "[launch] the scheduler was killed by SIGKILL; ranks 0, 1 have " in end.err
    assert end.err.splitlines()[-1].startswith("[launch] the scheduler was killed by SIGKILL")


def test_a_scheduler_that_cannot_start_is_reported_and_no_node_starts(job):
    (job.folder / "network.yaml").write_text("nodes: {0: {}}\nlinks: []\nroutes: {}\n")
    end = job.run("", "-n", "2", "--network", "network.yaml")
    assert end.code == 2
    assert "[scheduler] netstorm: " in end.err
    assert "network.yaml" in end.err
    *_, missing, last = end.err.splitlines()
    assert missing == "[launch] not started: ranks 0, 1"
    assert last.startswith("[launch] the scheduler failed with exit code 2: netstorm: ")
    assert job.pids() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_nodes_wait_for_each_other_ends_the_job_at_once(job, number, code):
    with job.started(JOIN + "runtime.barrier() if rank else time.sleep(600)", "-n", "2") as process:
        until_joined(job, 2)
        process.send_signal(number)
        end = ended(process)
    assert end.code == code
    assert f"sending {number.name} to ranks 0, 1" in end.err
    assert end.err.count("sending") == 1


def test_nothing_outlives_a_launcher_that_was_killed_with_its_scheduler(job):
    with job.started(JOIN + "time.sleep(600)", "-n", "2") as process:
        until_joined(job, 2)
        scheduler = scheduler_of(process.pid)
        process.kill()
        process.wait()
        until(lambda: not inside(job.folder) and not scheduler.is_running(), "all processes to end")


def test_a_job_through_ssh_has_its_scheduler_on_the_first_host(job):
    (job.folder / "hosts").write_text("127.0.0.1 slots=2\n")
    fake_ssh = f"{sys.executable} {Path(__file__).with_name('fake_ssh.py')}"
    job.words = lambda *options: [
        *(
            str(REPOSITORY / "scripts" / "launch_ssh.sh"),
            "hosts",
            "--ssh",
            fake_ssh,
            "--python",
            sys.executable,
        ),
        *(*options, "--", sys.executable, str(job.program)),
    ]
    port = str(free_port())
    end = job.run(JOIN + "if rank: raise ValueError('boom')\nruntime.barrier()", "--port", port)
    assert end.code == 1
    assert f"[scheduler] netstorm scheduler: job 'default' at 127.0.0.1:{port}" in end.out
    assert "[launch] rank 1 on 127.0.0.1 failed with exit code 1" in end.err.splitlines()[-1]


def test_the_scripts_make_a_job_of_processes_that_are_started_one_by_one(job):
    scripts = REPOSITORY / "scripts"
    starter = job.folder / "start"
    starter.write_text(
        f"""set -e
export DMLC_PS_ROOT_URI=127.0.0.1 DMLC_PS_ROOT_PORT={free_port()} DMLC_NUM_WORKER=2
{scripts}/run_scheduler.sh & scheduler=$!
NETSTORM_RANK=0 {scripts}/run_node.sh {sys.executable} program.py & node=$!
NETSTORM_RANK=1 {scripts}/run_node.sh {sys.executable} program.py
wait $node
wait $scheduler
"""
    )
    job.words = lambda: ["bash", str(starter)]
    end = job.run(JOIN + "print('met')")
    assert end.code == 0
    assert end.out.count("met") == 2
    assert "has ended well: 2 nodes" in end.out
