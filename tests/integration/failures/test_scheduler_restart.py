"""The scheduler is killed in the middle of training and started again: the job ends as if nothing had been."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.failures.descent import SCRIPT, end_with_the_right_weights, wait_for_steps
from tests.integration.jobs import Job


def test_a_scheduler_that_is_killed_and_started_again_costs_nothing_but_time(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with Job(tmp_path, 3, NETSTORM_STATE_DIR=state, PS_HEARTBEAT_TIMEOUT=30) as job:
        for rank in range(3):
            job.start(rank, SCRIPT)
        for _ in range(2):
            wait_for_steps(job, 0, 20)
            job.send(-1, signal.SIGKILL)
            job.start_scheduler_again()
            job.wait_until_said(-1, "goes on: 3 nodes")
            wait_for_steps(job, 0, 20)
        ended = end_with_the_right_weights(job)
    assert all(end.text.count("the scheduler is back after") == 2 for end in ended)


def test_without_a_log_the_end_of_the_scheduler_is_the_end_of_the_job(tmp_path: Path) -> None:
    with Job(tmp_path, 2, NETSTORM_LINK_TIMEOUT=3) as job:
        for rank in range(2):
            job.start(rank, SCRIPT)
        wait_for_steps(job, 0, 5)
        job.send(-1, signal.SIGKILL)
        for rank in range(2):
            ended = job.end(rank)
            assert ended.code != 0
            assert "SchedulerLost: rank" in ended.err


@pytest.mark.parametrize("content", [b"something else entirely", b"NSSTATE\x07" + bytes(100)])
def test_a_file_that_is_no_log_of_this_version_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "default.log").write_bytes(content)
    with pytest.raises(AssertionError, match=r"default\.log is (not a scheduler's log|written by another)"):
        Job(tmp_path, 2, NETSTORM_STATE_DIR=state)
