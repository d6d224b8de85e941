"""A scheduler is started at an address that no node knows, and takes a job of real processes over."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from netstorm.pslite.keys import JobKey, SchedulerKey
from tests.integration.elastic.test_standby import SCRIPT
from tests.integration.jobs import Job, free_port

RECOVERING = -2
OTHER = -3
IMPOSTOR = -4

QUICK = {"PS_HEARTBEAT_INTERVAL": 0.5, "PS_HEARTBEAT_TIMEOUT": 3, "NETSTORM_LINK_TIMEOUT": 2}


def begun(job, **variables):
    """Start nodes that sum until a file `stop` is there; return their addresses."""
    ports = [free_port() for _ in range(job.nodes)]
    for rank, port in enumerate(ports):
        job.start(rank, SCRIPT, NETSTORM_PORT=port, **variables)
    for rank in range(job.nodes):
        job.wait_until_said(rank, "step 20")
    return [f"127.0.0.1:{port}" for port in ports]


def answers_about_time(port):
    """Return how many answers to its SNTP requests a node has had."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if "sntp_exchanges" in line).split()[-1])


def test_a_job_is_taken_over_from_one_of_its_nodes_with_its_key(tmp_path):
    key, schedulers, web = tmp_path / "job.key", tmp_path / "scheduler.key", free_port()
    JobKey.create(key)
    new = [sys.executable, "-m", "netstorm", "keys", "new", "--scheduler", str(schedulers)]
    subprocess.run(new, check=True, capture_output=True)
    SchedulerKey.create(tmp_path / "other.key")
    with Job(
        tmp_path,
        3,
        NETSTORM_ELASTIC="1:3",
        NETSTORM_RECOVERABLE=1,
        NETSTORM_KEY_FILE=key,
        NETSTORM_SCHEDULER_KEY=schedulers,
        **QUICK,
    ) as job:
        peers = begun(job)
        job.send(-1, signal.SIGKILL)
        job.send(0, signal.SIGKILL)
        command = ["--recover", "--port", "0", "--peers", peers[1]]
        job.start_scheduler(OTHER, *command, NETSTORM_KEY_FILE="", NETSTORM_SCHEDULER_KEY="")
        job.start_scheduler(IMPOSTOR, *command, NETSTORM_SCHEDULER_KEY=tmp_path / "other.key")
        command[-1] = f"{peers[0]},{peers[1]}"
        job.start_scheduler(RECOVERING, *command, NETSTORM_HTTP_PORT=web)
        job.wait_until_said(RECOVERING, "is agreed on")
        job.wait_until_said(1, "which takes the job over")
        address = job.said(RECOVERING).partition(" at ")[2].partition(",")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{web}/status.json", timeout=60) as answer:
            status = json.load(answer)
        assert (status["phase"], status["scheduler"]) == ("running", address), status
        stranger = job.end(OTHER)
        assert stranger.code == 2
        assert f"{peers[1]} requires a key, and this process has none" in stranger.text
        impostor = job.end(IMPOSTOR)
        assert impostor.code == 2
        assert f"--peers {peers[1]}: it follows only schedulers with the secret" in impostor.text
        (tmp_path / "stop").touch()
        for rank in (1, 2):
            ended = job.end(rank)
            assert ended.code == 0, ended.text
            assert "ends well" in ended.out
        assert job.end(RECOVERING).code == 0


@pytest.mark.slow
def test_a_job_that_nodes_may_not_leave_is_taken_over_with_all_of_them(tmp_path):
    web = free_port()
    with Job(tmp_path, 2, NETSTORM_RECOVERABLE=1, **QUICK) as job:
        peers = begun(job, NETSTORM_METRICS_PORT=web)
        command = ["--recover", "--port", "0", "--peers", peers[0]]
        job.start_scheduler(OTHER, *command)
        alive = job.end(OTHER)
        assert alive.code == 2
        assert f"has a scheduler, at {job.address}: 2 nodes follow it" in alive.text
        job.send(-1, signal.SIGKILL)
        job.start_scheduler(RECOVERING, *command)
        job.wait_until_said(RECOVERING, "taking over job")
        before = answers_about_time(web)  # of the scheduler that is dead
        deadline = time.monotonic() + 60.0
        while answers_about_time(web) == before:
            assert time.monotonic() < deadline, "the node does not ask the new scheduler for the time"
            time.sleep(0.2)
        (tmp_path / "stop").touch()
        for rank in range(2):
            ended = job.end(rank)
            assert ended.code == 0, ended.text
        assert job.end(RECOVERING).code == 0


@pytest.mark.slow
def test_errors_say_which_peer_is_wrong_and_what_to_do(tmp_path):
    with Job(tmp_path, 1, NETSTORM_RECOVERABLE=1, **QUICK) as job:
        (peer,) = begun(job)
        for command, expected in (
            (
                ["--peers", peer, "--job", "other"],
                f"--peers {peer}: {peer} refused this process: this is a node",
            ),
            (
                ["--peers", peer, "-n", "2"],
                "its job has 1 ranks and no NETSTORM_ELASTIC, this scheduler 2 and none",
            ),
            (["--peers", job.address], "this is the scheduler of job 'default', not rank"),
            (
                ["--peers", f"127.0.0.1:{free_port()}", "--join-timeout", "3"],
                "no node of job 'default' comes: 127.0.0.1:",
            ),
        ):
            job.start_scheduler(OTHER, "--recover", "--port", "0", *command)
            ended = job.end(OTHER)
            assert ended.code == 2
            assert expected in ended.text
        (tmp_path / "stop").touch()
        assert job.end(0).code == 0
