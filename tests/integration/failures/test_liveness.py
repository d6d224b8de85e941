"""Dead, busy, stopped: a process that is alive is waited for, and one that has ended is missed at once."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.integration.failures.scripts import start, start_plain
from tests.integration.jobs import Job

BUSY_S = 4
"""A process that did not run for 2 s says so."""
SHORT = {"PS_HEARTBEAT_INTERVAL": 0.25, "PS_HEARTBEAT_TIMEOUT": 1, "NETSTORM_LINK_TIMEOUT": 1}
"""Each is a quarter of BUSY_S."""

STOPPED_S = 2
"""Twice each of them."""

PATIENT = {"PS_HEARTBEAT_TIMEOUT": 120, "NETSTORM_LINK_TIMEOUT": 120}
"""Whoever waits for one of these exceeds `SOON_S`."""

SOON_S = 60

HOLDS_THE_INTERPRETER = f"""
import ctypes
show("busy")
ctypes.PyDLL(None).sleep({BUSY_S})  # PyDLL keeps the interpreter lock, as C extensions do
step()
show("the sum is there")
"""

STEPS = """
step()
show("the sum is there")
"""

PLAIN_STEPS = """
for number in range(1, 10_000):
    step()
    show("step", number)
    time.sleep(0.05)
    if os.path.exists(sys.argv[0] + ".end"):
        break
runtime.finish()
"""

WAITS = """
try:
    while True:
        step()
except errors.NetStormError as error:
    show(type(error).__name__ + ":", error)
"""


def test_a_rank_whose_interpreter_is_busy_is_waited_for(tmp_path: Path) -> None:
    with Job(tmp_path, 3, **SHORT) as job:
        start(job, 1, HOLDS_THE_INTERPRETER)
        for rank in (0, 2):
            start_plain(job, rank, STEPS)
        ended = job.end_all()
        scheduler = job.end(-1)
    assert [one.code for one in (*ended, scheduler)] == [0] * 4, scheduler.text
    assert all("the sum is there" in one.out for one in ended)
    for one in (ended[0], ended[2], scheduler):
        assert "rank 1 (127.0.0.1:" in one.err
        assert "alive, but its Python has not run for" in one.err
        assert "lost" not in one.err
    assert "this process did not run for" in ended[1].err


def steps(job: Job, rank: int) -> int:
    return sum(line.startswith("step ") for line in job.said(rank).splitlines())


def wait_for_steps(job: Job, ranks: tuple[int, ...], more: int) -> None:
    for rank in ranks:
        job.wait_until_said(rank, f"step {steps(job, rank) + more}\n")


def test_whoever_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    with Job(tmp_path, 3, **SHORT) as job:
        for rank in range(3):
            start_plain(job, rank, PLAIN_STEPS)
        for stopped in ((1,), (0, 1, 2), (-1, 2), (-1, 0, 1, 2)):
            wait_for_steps(job, (0, 1, 2), 5)
            for one in stopped:
                job.send(one, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            if stopped == (1,):
                job.wait_until_said(0, "alive, but its Python has not run for")
                job.wait_until_said(-1, "alive, but its Python has not run for")
            for one in stopped:
                job.send(one, signal.SIGCONT)
            if stopped == (1,):
                job.wait_until_said(-1, "runs again")
        wait_for_steps(job, (0, 1, 2), 5)
        for rank in range(3):
            (tmp_path / f"script{rank}.py.end").touch()
        ended = [job.end(rank) for rank in (0, 1, 2, -1)]
    assert [one.code for one in ended] == [0] * 4, ended
    assert "rank 1 (127.0.0.1:" in ended[0].err
    assert "alive, but its Python has not run for" in ended[0].err
    assert "runs again" in ended[3].err


def test_a_process_that_has_crashed_is_missed_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, 2, **PATIENT) as job:
        start_plain(job, 0, WAITS)
        start_plain(job, 1, "step()\nshow('dies')\nimport ctypes; ctypes.string_at(0)\n")
        job.wait_until_said(1, "dies")
        began = time.monotonic()
        ended, scheduler = job.end(0), job.end(-1)
        seconds = time.monotonic() - began
    assert "NodeLost: rank 1 (127.0.0.1:" in ended.text
    assert "is lost: its process has ended: its connections have ended, and " in ended.text
    assert scheduler.code == 1
    assert seconds < SOON_S


def test_a_scheduler_that_has_ended_is_missed_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, 1, **PATIENT) as job:
        start_plain(job, 0, "show('has begun')\n" + WAITS)
        job.wait_until_said(0, "has begun")
        job.send(-1, signal.SIGKILL)
        began = time.monotonic()
        ended = job.end(0)
        seconds = time.monotonic() - began
    assert "SchedulerLost: rank 0 cannot reach the scheduler any more: its process has ended: " in ended.text
    assert seconds < SOON_S


def test_one_that_was_stopped_for_too_long_hears_that_the_job_has_ended_and_why(tmp_path: Path) -> None:
    with Job(tmp_path, 2, **SHORT, NETSTORM_WAIT_TIMEOUT=2) as job:
        for rank in range(2):
            start_plain(job, rank, "show('steps')\n" + WAITS)
        job.wait_until_said(1, "steps")
        job.send(1, signal.SIGSTOP)
        waits, scheduler = job.end(0), job.end(-1)
        job.send(1, signal.SIGCONT)
        stopped = job.end(1)
    reason = "NodeLost: rank 1 (127.0.0.1:"
    assert reason in waits.out
    assert reason in stopped.text
    for text in (waits.out, stopped.text, scheduler.text):
        assert "alive, but its Python has not run for" in text
        assert "(NETSTORM_WAIT_TIMEOUT)" in text
