"""The scheduler is killed in the middle of training and started again: the job ends well."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.integration.failures.descent import (
    SCRIPT,
    end_with_the_right_weights,
    right,
    wait_for_steps,
)
from tests.integration.jobs import Job


def test_a_scheduler_that_is_killed_and_started_again_costs_nothing_but_time(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with Job(tmp_path, 3, NETSTORM_STATE_DIR=state, PS_HEARTBEAT_TIMEOUT=30) as job:
        for rank in range(3):
            job.start(rank, SCRIPT)
        for times in (1, 2):
            wait_for_steps(job, 0, 20)
            job.send(-1, signal.SIGKILL)
            job.start_scheduler_again()
            job.wait_until_said(-1, "goes on: 3 nodes")
            for rank in range(3):  # else it may be killed again before all ranks have met it
                job.wait_until_said(rank, "is back after", times=times)
            wait_for_steps(job, 0, 20)
        end_with_the_right_weights(job)


def test_a_scheduler_of_several_jobs_goes_on_with_all_of_them(tmp_path: Path) -> None:
    folder, names = tmp_path / "state", ("alice", "bob")
    with Job(tmp_path, 2, NETSTORM_STATE_DIR=folder, NETSTORM_JOBS=0, PS_HEARTBEAT_TIMEOUT=30) as job:
        for process in range(4):
            job.start(process, SCRIPT, NETSTORM_JOB=names[process // 2], NETSTORM_RANK=process % 2)
        for process in (0, 2):
            wait_for_steps(job, process, 20)
        assert sorted(path.name for path in folder.iterdir()) == ["alice.log", "bob.log"]
        job.send(-1, signal.SIGKILL)
        job.start_scheduler_again()
        for name in names:
            job.wait_until_said(-1, f"job {name!r} goes on: 2 nodes")
        for process in (0, 2):
            wait_for_steps(job, process, 20)
        (tmp_path / "enough").touch()
        for process in range(4):
            end = job.end(process)
            assert end.code == 0, end
            assert "is back after" in end.text
            steps, digest = end.out.split("weights ", 1)[1].split()
            assert digest == right(2, int(steps))
        for name in names:
            job.wait_until_said(-1, f"job {name!r} has ended well")
        for process in (4, 5):  # the name is free again, and its log begins anew
            job.start(process, SCRIPT, NETSTORM_JOB="alice", NETSTORM_RANK=process % 2)
        assert [job.end(process).code for process in (4, 5)] == [0, 0]
