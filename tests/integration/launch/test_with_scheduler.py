"""Whole jobs: the real scheduler, and nodes that join it and meet at barriers, without MXNet."""

from __future__ import annotations

import signal
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from netstorm.cli.launch.variables import is_free
from tests.integration.forking import ROOT
from tests.integration.jobs import Ended, free_port
from tests.integration.launch.launcher import Launcher, ended, inside, until

JOIN = """
from netstorm.kvstore.process.runtime import runtime_of_this_process
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


def scheduler_of(launcher_pid: int) -> psutil.Process:
    below = psutil.Process(launcher_pid).children(recursive=True)
    (found,) = (each for each in below if {"netstorm", "scheduler"} <= {*each.cmdline()})
    return found


def test_a_job_runs_from_the_schedulers_start_to_its_end(job):
    end = job.run(
        JOIN + "print('met')", "-n", "2", "--site", "a,b", "--topology", "star", NETSTORM_LOG="debug"
    )
    assert end.code == 0
    lines = end.out.splitlines()
    assert sorted(line for line in lines if not line.startswith("[scheduler]")) == [
        f"[{r}] met" for r in range(2)
    ]
    assert lines[0].endswith(", encrypted; waiting for 2 nodes")
    assert "network: all links assumed equal; star" in end.err
    said = [line for line in lines if line.startswith("[scheduler]")]  # Python prints at a process's very end
    assert said[-1] == (
        "[scheduler] netstorm scheduler: job 'default' has ended well: 2 nodes, 0 keys, so nobody has summed "
        "anything over NetStorm"
    )
    assert "netstorm-verdict" not in end.out
    assert "[launch]" not in end.err


def test_the_rank_whose_exception_ended_the_job_is_the_first_failure_however_late_its_process_ends(job):
    program = (
        JOIN
        + """
import atexit
if rank == 1:
    atexit.register(time.sleep, 1)
    raise ValueError("boom")
runtime.barrier()
"""
    )
    end = job.run(program, "-n", "2")
    assert end.code == 1
    assert "NodeFailed: rank 1" in end.err
    assert end.err.splitlines()[-2:] == [
        "[launch] exit code 1: rank 0 and the scheduler",
        "[launch] rank 1 on 127.0.0.1 failed with exit code 1: ValueError: boom",
    ]


DIES_FIRST = """
if rank == 1:
    said = pathlib.Path("logs/scheduler.log")
    while not said.exists() or said.read_text().count("INFO the node at") < {others}: time.sleep(0.01)
    {dies}
"""
"""Rank 1 ends before it joins, once others wait for it."""


def assert_told(end: Ended) -> None:
    """Assert that rank 0 and the launcher have named rank 1, which could not import a module."""
    assert end.code == 1
    said = [line for line in end.err.splitlines() if line.startswith("[0] ") and "NodeLost" in line]
    assert said[0].endswith(
        "NodeLost: rank 1 (127.0.0.1) ended before all nodes had joined: exit code 1; last line of its "
        "error output: ModuleNotFoundError: No module named 'nothere'"
    )
    assert end.err.splitlines()[-1] == (
        "[launch] rank 1 on 127.0.0.1 failed with exit code 1: ModuleNotFoundError: No module named 'nothere'"
    )


def test_a_rank_that_exits_with_0_and_never_joins_is_named_to_those_that_wait(job):
    program = DIES_FIRST.format(others=1, dies="sys.exit(0)") + JOIN
    end = job.run(program, "-n", "2", "--log-dir", "logs", PS_HEARTBEAT_TIMEOUT="60")
    assert end.code == 1
    assert "NodeLost: rank 1 (127.0.0.1) ended before all nodes had joined: exit code 0" in end.err
    assert "rank 1 (127.0.0.1) ended before all nodes had joined" in end.err.splitlines()[-1]


def test_a_rank_that_hears_nothing_is_ended_soon_if_the_job_cannot_begin_and_says_why(job):
    program = "if rank == 1: import nothere\ntime.sleep(600)"
    end = job.run(program, "-n", "2", "--grace", "500")
    assert end.code == 1
    assert (
        "[0] netstorm: ended by the launcher (SIGTERM), since rank 1 on 127.0.0.1 failed with exit code 1: "
        "ModuleNotFoundError: No module named 'nothere'"
    ) in end.err


def test_a_rank_that_hears_has_the_time_to_say_so_however_slow_it_is(job):
    slow = f"try:\n{textwrap.indent(JOIN, '    ')}\nexcept Exception:\n    time.sleep(4)\n    raise\n"
    assert_told(
        job.run(DIES_FIRST.format(others=1, dies="import nothere") + slow, "-n", "2", "--log-dir", "logs")
    )


def test_a_job_that_no_process_joins_ends_with_a_code_of_its_own_and_says_what_to_write(job):
    end = job.run("print('trained')", "-n", "2", "--grace", "500")
    assert end.code == 78
    assert end.out.count("trained") == 2
    last = end.err.splitlines()[-1]
    assert last.startswith("[launch] job 'default' has failed: no process has joined the job")
    assert 'init_process_group("netstorm")' in last
    assert "python -m netstorm.run" in last


def test_how_a_member_has_ended_is_told_to_the_others_which_end_though_what_it_has_forked_lives_on(job):
    dies = "os.fork() or time.sleep(600); os.kill(os.getpid(), signal.SIGKILL)"
    program = JOIN + f"if rank == 1:\n    sys.stderr.write('last words\\n')\n    {dies}\nruntime.barrier()"
    end = job.run(program, "-n", "2", PS_HEARTBEAT_TIMEOUT="300")
    assert end.code == 137
    assert "NodeLost: rank 1 (127.0.0.1:" in end.err
    assert (
        "is lost: its process has ended: killed by SIGKILL; last line of its error output: last words;"
    ) in end.err
    assert "sending SIG" not in end.err
    assert "[launch] rank 1 on 127.0.0.1 was killed by SIGKILL" in end.err


def test_an_elastic_job_waits_for_a_failed_start_to_be_repeated_and_begins_without_one_that_fails_for_good(
    job,
):
    program = (
        "attempt = int(os.environ['NETSTORM_RESTART'])\n"
        "if rank == 1 and attempt == 0 or rank == 2: sys.exit('no such data')\n" + JOIN
    )
    end = job.run(program, "-n", "3", "--restarts", "1", NETSTORM_ELASTIC="2:3", NETSTORM_JOIN_TIMEOUT="1000")
    assert end.code == 0, end.err
    assert (job.folder / "joined-0").exists()
    assert (job.folder / "joined-1").exists()
    assert (
        "rank 2 on 127.0.0.1 failed with exit code 1: no such data; the job goes on with 2 nodes" in end.err
    )


def test_ranks_that_handle_the_launchers_sigterm_and_exit_with_0_are_a_job_that_ended_well(job):
    program = (
        JOIN
        + """
flag = []
signal.signal(signal.SIGTERM, lambda *_: flag.append(1))
note(os.getpid(), f"handler-{rank}")
while not flag: time.sleep(0.01)
runtime.barrier()
print("saved")
"""
    )
    with job.started(program, "-n", "2", "--grace", "100") as process:
        until(lambda: len([*job.folder.glob("handler-*")]) == 2, "the handlers")
        scheduler_of(process.pid).terminate()  # as Slurm does, which sends it to all processes of a job
        process.send_signal(signal.SIGTERM)
        end = ended(process)
    assert end.code == 0, end.err
    assert end.out.count("saved") == 2


def test_a_quiet_launcher_prints_what_the_nodes_print_and_nothing_else_and_they_listen_at_ports_in_a_row(job):
    while not is_free((port := free_port()) + 1):
        pass
    end = job.run(JOIN + "print('met')", "-n", "2", "--quiet", "--log-dir", "logs", NETSTORM_PORT=str(port))
    said = [line for line in end.err.splitlines() if "WARNING waiting for" not in line]  # a slow start
    assert (end.code, sorted(end.out.splitlines()), said) == (0, ["[0] met", "[1] met"], [])
    log = (job.folder / "logs" / "scheduler.log").read_text()
    assert "has ended well" in log
    assert f"rank 0 (127.0.0.1:{port}), rank 1 (127.0.0.1:{port + 1})" in log


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


def test_ctrl_c_while_nodes_wait_for_each_other_ends_the_job_at_once(job):
    with job.started(JOIN + "runtime.barrier() if rank else time.sleep(600)", "-n", "2") as process:
        until_joined(job, 2)
        process.send_signal(signal.SIGINT)
        end = ended(process)
    assert end.code == 130
    assert "sending SIGINT to ranks 0, 1" in end.err
    assert end.err.count("sending") == 1


def test_nothing_outlives_a_launcher_that_was_killed_with_its_scheduler(job):
    with job.started(JOIN + "time.sleep(600)", "-n", "2") as process:
        until_joined(job, 2)
        scheduler = scheduler_of(process.pid)
        process.kill()
        until(lambda: not inside(job.folder) and not scheduler.is_running(), "all processes to end")


def test_a_job_through_ssh_has_its_scheduler_on_the_first_host_and_names_a_rank_that_dies_before_it_joins(
    job,
):
    (job.folder / "hosts").write_text("127.0.0.1 slots=2\n")
    fake_ssh = f"{sys.executable} {Path(__file__).with_name('fake_ssh.py')}"
    script = str(ROOT / "scripts" / "launch_ssh.sh")
    job.words = lambda *options: [
        *(script, "hosts", "--ssh", fake_ssh, "--python", sys.executable, *options),
        *("--", sys.executable, str(job.program)),
    ]
    port = str(free_port())
    program = DIES_FIRST.format(others=1, dies="import nothere") + JOIN
    end = job.run(program, "--port", port, "--log-dir", "logs")
    assert_told(end)
    assert f"[scheduler] netstorm scheduler: job 'default' at 127.0.0.1:{port}" in end.out


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_rank_of_pytorch_hears_of_one_that_dies_before_pytorchs_own_rendezvous(job):
    program = DIES_FIRST.format(others=1, dies="import nothere") + (
        "import torch.distributed as dist\ndist.init_process_group('netstorm')\n"
    )
    assert_told(job.run(program, "-n", "2", "--log-dir", "logs"))


def test_the_scripts_make_a_job_of_processes_that_are_started_one_by_one(job):
    scripts = ROOT / "scripts"
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
