"""The scheduler is killed in the middle of training and started again: the job ends well."""

from __future__ import annotations

import signal
from pathlib import Path

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
    assert all(end.text.count("the scheduler is back after") >= 2 for end in ended)
