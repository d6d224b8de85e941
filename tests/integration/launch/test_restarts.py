"""`netstorm launch --restarts`: real processes fail and are started again, alone or all together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.launch.launcher import Launcher, ended, until
from tests.integration.launch.test_ssh import over_ssh
from tests.integration.launch.test_with_scheduler import JOIN, job, scheduler_of, until_joined

__all__ = ["job", "over_ssh"]  # fixtures

ATTEMPT = 'attempt = int(os.environ.get("NETSTORM_RESTART", 0))\n'

WAIT = """
def wait_for(name):
    while not pathlib.Path(name).exists(): time.sleep(0.01)
"""


def test_a_job_that_needs_all_its_nodes_is_started_again_as_a_whole(launcher, tmp_path: Path):
    program = ATTEMPT + "print('attempt', attempt, flush=True)\nsys.exit(3 * (rank == 1 and attempt < 2))"
    logs = tmp_path / "logs"
    end = launcher.run(program, "-n", "2", "--restarts", "3", "--log-dir", str(logs))
    assert end.code == 0, end.err
    assert sorted(end.out.splitlines()) == sorted(
        f"[{rank}] attempt {attempt}" for rank in range(2) for attempt in range(3)
    )
    assert "[launch] all processes are started again in 0.5 s (restart 1 of 3)" in end.err
    assert "[launch] all processes are started again in 1 s (restart 2 of 3)" in end.err
    assert (logs / "rank-0.log").read_text().splitlines() == [f"attempt {attempt}" for attempt in range(3)]


def test_a_job_that_fails_more_often_has_the_last_failures_exit_code(launcher):
    program = ATTEMPT + "sys.exit(5 + attempt)"
    end = launcher.run(program, "-n", "1", "--restarts", "1")
    assert end.code == 6
    assert end.err.count("are started again") == 1


def test_ctrl_c_before_a_restart_ends_the_job(launcher):
    program = "if rank == 0: sys.exit(3)"
    with launcher.started(program, "-n", "1", "--restarts", "99") as process:
        until(lambda: "in 1 s (restart 2 of 99)" in process.said()[1], "the second restart")
        process.send_signal(signal.SIGINT)
        assert ended(process).code == 130


def test_nodes_of_an_elastic_job_are_started_again_alone(launcher):
    program = (
        ATTEMPT
        + WAIT
        + """
if rank == 1:
    note(os.getpid(), f"attempt-{attempt}")
    if attempt < 2: os.kill(os.getpid(), signal.SIGKILL)
wait_for("attempt-2")
print("done after", attempt, flush=True)
"""
    )
    end = launcher.run(program, "-n", "2", "--restarts", "2", NETSTORM_ELASTIC="1:2")
    assert end.code == 0, end.err
    assert sorted(end.out.splitlines()) == ["[0] done after 0", "[1] done after 2"]
    assert "rank 1 on 127.0.0.1 was killed by SIGKILL; it is started again in 1 s (restart 2 of 2)" in end.err


def test_a_node_on_another_host_is_started_again_there(launcher, over_ssh):
    over_ssh("tokyo\nparis\n", script=True)
    program = ATTEMPT + "print(os.environ['SSH_CONNECTION'], attempt, flush=True)\nsys.exit(rank > attempt)"
    end = launcher.run(program, "--restarts", "1", NETSTORM_ELASTIC="1:2")
    assert end.code == 0, end.err
    lines = sorted(end.out.splitlines())
    assert [line.split()[-1] for line in lines] == ["0", "0", "1"]
    assert lines[1].split()[1:-1] == lines[2].split()[1:-1]  # the same host
    assert "rank 1 on paris failed with exit code 1; it is started again" in end.err


def test_a_scheduler_that_is_killed_is_started_again_and_the_job_goes_on(job: Launcher):
    program = JOIN + WAIT + "wait_for('go-on')\nruntime.barrier()\nprint('met again')"
    with job.started(program, "-n", "2", "--restarts", "1", PS_HEARTBEAT_TIMEOUT="20") as process:
        until_joined(job, 2)
        first = scheduler_of(process.pid)
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: first.pid not in _schedulers(process.pid), "the scheduler to end")
        (job.folder / "go-on").touch()
        end = ended(process)
    assert end.code == 0, end.out + end.err
    assert sorted(line for line in end.out.splitlines() if "met again" in line) == [
        "[0] met again",
        "[1] met again",
    ]
    assert "the scheduler was killed by SIGKILL; it is started again in 0.5 s (restart 1 of 1)" in end.err
    assert "goes on" in end.out


def _schedulers(launcher_pid: int) -> list[int]:
    try:
        return [scheduler_of(launcher_pid).pid]
    except (ValueError, psutil.Error):  # it has just ended
        return []


TRAIN = """
import netstorm.frontends.mxnet
from netstorm.frontends.mxnet.compat import mx

kv = mx.kv.create("dist_sync_netstorm")
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, momentum=0.5))
loaded = kv.load_checkpoint("checkpoints", missing_ok=True)
first = 0 if loaded is None else loaded.extra
kv.init("w", mx.nd.zeros((100,)))
value = mx.nd.zeros((100,))
for step in range(first, 8):
    kv.push("w", mx.nd.full((100,), step + 1))
    kv.pull("w", out=value)
    saving = kv.save_checkpoint("checkpoints", step=step, extra=step + 1, keep=2)
    if step == 4 and attempt == 0:
        saving.wait(60)
        kv._barrier()
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
print("began at", first, "and has", value.asnumpy().sum(), flush=True)
"""


@pytest.mark.slow
def test_a_training_whose_node_was_killed_goes_on_from_its_checkpoint_and_ends_as_if_it_had_not(
    job: Launcher,
):
    end = job.run(ATTEMPT + TRAIN, "-n", "2", "--restarts", "1", PS_HEARTBEAT_TIMEOUT="20")
    assert end.code == 0, end.text
    weight = momentum = 0.0
    for step in range(8):
        momentum = 0.5 * momentum - 2 * (step + 1)
        weight += momentum
    said = sorted(line for line in end.out.splitlines() if "began at" in line)
    assert said == [f"[{rank}] began at 5 and has {100 * weight}" for rank in range(2)]
    assert "all processes are started again in 0.5 s (restart 1 of 1)" in end.err
    assert sorted(path.name for path in (job.folder / "checkpoints").iterdir()) == [
        "step-000006",
        "step-000007",
    ]
