"""Two jobs with priorities on one host: real processes, and the table that they share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tests.integration.failures.scripts import start_plain
from tests.integration.jobs import Job

STEPS = """
for _ in range(20):
    step()
    assert (out == 2).all(), out
show("pid", os.getpid(), "is ready")
while not os.path.exists(sys.argv[0] + ".end"):
    time.sleep(0.05)
runtime.finish()
"""


def test_jobs_with_priorities_share_a_table_and_have_right_sums(tmp_path: Path) -> None:
    for name in ("low", "high"):
        (tmp_path / name).mkdir()
    with (
        Job(tmp_path / "low", 2, NETSTORM_JOB_PRIORITY=1) as low,
        Job(tmp_path / "high", 2, NETSTORM_JOB_PRIORITY=2) as high,
    ):
        for job in (low, high):
            for rank in range(2):
                start_plain(job, rank, STEPS)
        for job in (low, high):
            for rank in range(2):
                job.wait_until_said(rank, "is ready")
        # While they live: afterwards their rows are anybody's.
        namespace = Path("/proc/self/ns/net").stat().st_ino
        table = np.fromfile(f"/dev/shm/netstorm-traffic-{os.geteuid()}-{namespace}", np.int64)
        for job in (low, high):
            for rank in range(2):
                (job.folder / f"script{rank}.py.end").touch()
        ended = {job: [job.end(rank) for rank in range(2)] for job in (low, high)}
    priorities = dict(zip(table[1::4].tolist(), table[2::4].tolist(), strict=True))  # of processes
    for priority, job in ((1, low), (2, high)):
        for end in ended[job]:
            assert end.code == 0, end.text
            assert priorities[int(end.out.split()[1])] == priority
