"""Ranks with the variables of Slurm's `srun`, whose scheduler's port another job has taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from netstorm.launchers import Place
from tests.integration.jobs import PYTHONPATH
from tests.integration.scheduler.scripted import wait_for


def test_a_port_of_another_job_is_an_error_at_rank_0_and_its_scheduler_refuses_the_others(
    tmp_path: Path,
) -> None:
    job = str(os.getpid())
    port = Place(launcher="srun", rank=("", 0), size=("", 2), start=f"slurm-{job}.0.0").port
    (tmp_path / "train.py").write_text("import netstorm; netstorm.Group()")
    variables = {**os.environ, "PYTHONPATH": PYTHONPATH, "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}
    variables |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    other = ["-n", "2", "--host", "127.0.0.1", "--port", str(port), "--job", "other"]
    ready = tmp_path / "ready"
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "netstorm", "scheduler", *other, "--ready-file", str(ready)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(ready.exists, "the other scheduler")
        ended = [
            subprocess.run(
                [sys.executable, "-m", "netstorm.run", str(tmp_path / "train.py")],
                env={**variables, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            for rank in ("0", "1")
        ]
    finally:
        scheduler.kill()
        scheduler.wait()
    assert [end.returncode for end in ended] == [2, 1]
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in ended[0].stderr
    assert f"is of job 'slurm-{job}.0.0', the scheduler of job 'other'" in ended[1].stderr
