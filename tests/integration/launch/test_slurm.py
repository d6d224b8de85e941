"""`netstorm launch --slurm` in a real Slurm: its controller and three nodes, on this machine."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.integration.dashboard.chromium import first_update
from tests.integration.forking import ROOT
from tests.integration.jobs import PYTHONPATH, free_port

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
PATIENCE_S = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
if missing := [name for name in NEEDED if shutil.which(name, path=PATH) is None]:
    pytest.skip(f"no {missing[0]}: apt install munge slurm-client slurmctld slurmd", allow_module_level=True)
if os.geteuid():
    pytest.skip("Slurm's daemons need root", allow_module_level=True)

TRAIN = """
import json, os, pathlib, signal, sys, time
import numpy as np
import netstorm
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
group = netstorm.Group()
saved = pathlib.Path("saved.json")
begin = json.loads(saved.read_text()) if saved.exists() else 0
last, how = int(sys.argv[1]), sys.argv[2:]
print(f"rank {group.rank} of {group.size} on {os.environ['SLURMD_NODENAME']} begins at {begin}", flush=True)
for step in range(begin, last):
    total = group.allreduce(np.array([1.0, bool(asked)]))
    if how and group.rank == 1:
        sys.exit("disk full")
    if total[1]:
        if group.rank == 0:
            saved.write_text(json.dumps(step))
        break
    pathlib.Path(f"step-{group.rank}").write_text(str(step))
    time.sleep(0.05)
else:
    print(f"rank {group.rank} ends at {last} with sum {total[0]:.0f}", flush=True)
group.barrier()
"""


class Cluster:
    """A Slurm of a test's own. Its nodes are called by addresses of loopback, so that names need no DNS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, "PATH": PATH, "PYTHONPATH": PYTHONPATH, "MARK": self.mark}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        here, addresses = socket.gethostname(), [f"127.0.0.{number}" for number in (1, 2, 3)]
        (folder / "key").write_bytes(secrets.token_bytes(64))
        (folder / "key").chmod(0o600)
        (folder / "state").mkdir()
        (folder / "cgroup.conf").touch()
        (folder / "slurm.conf").write_text(
            f"ClusterName=test\nSlurmctldHost={here}(127.0.0.1)\nSlurmctldPort={free_port()}\n"
            # A job is queued again when its credentials have expired: after 5 s, not 120.
            f"SlurmUser=root\nAuthInfo=socket={folder}/munge.socket,cred_expire=5\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\n"
            f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/%n.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nKillWait=10\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nSlurmdParameters=config_overrides\n"
            "PartitionName=all Nodes=ALL Default=YES State=UP\n"
            + "".join(
                f"NodeName={address} NodeHostname={here} NodeAddr={address} Port={free_port()} CPUs=4\n"
                for address in addresses
            )
        )
        self._addresses = addresses
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        munged = [f"--{name}={self.folder}/{file}" for name, file in (
            ("socket", "munge.socket"), ("key-file", "key"), ("pid-file", "munge.pid"),
            ("seed-file", "seed"), ("log-file", "munge.log"),
        )]  # fmt: skip
        self._start("munged", "--foreground", "--force", *munged)
        self.until((self.folder / "munge.socket").exists, "munged")
        self._start("slurmctld", "-D")
        for address in self._addresses:
            self._start("slurmd", "-D", "-N", address)
        self.until(lambda: self.said("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3", "three nodes")

    def _start(self, *words: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )

    def said(self, *words: str) -> str:
        """Return what a command of Slurm's says."""
        ended = subprocess.run(
            words,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return ended.stdout

    def submit(self, script: str, *words: str) -> str:
        """Queue a batch job of a script, and return its number."""
        (self.folder / "train.py").write_text(script)
        batch = str(ROOT / "deploy/slurm/netstorm.sbatch")
        job = self.said("sbatch", "--parsable", "--output=out", batch, "train.py", *words).strip()
        assert job.isdecimal(), self.log()
        return job

    def ended(self, job: str) -> tuple[str, str]:
        """Wait for a job's end; return its state and exit code as Slurm has them, and what it has printed."""
        found: dict[str, str] = {}

        def is_over() -> bool:
            shown = self.said("scontrol", "show", "job", job)
            found.update(word.partition("=")[::2] for word in shown.split() if "=" in word)
            return found.get("JobState") in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}

        self.until(is_over, f"job {job}")
        self.until(lambda: not self.left(), "processes of the job")
        return f"{found['JobState']} {found['ExitCode']}", (self.folder / "out").read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}: {self.log()}"
            time.sleep(0.1)

    def log(self) -> str:
        out = self.folder / "out"
        return (self.folder / "daemons.log").read_text()[-3000:] + (out.read_text() if out.exists() else "")

    def left(self) -> list[psutil.Process]:
        """Return the processes of jobs that are there."""
        return [each for each in psutil.process_iter() if self._is_of_a_job(each)]

    def _is_of_a_job(self, process: psutil.Process) -> bool:
        try:
            variables = process.environ()
        except psutil.Error:
            return False
        return variables.get("MARK") == self.mark and "SLURM_JOB_ID" in variables

    def stop(self) -> None:
        self.said("scancel", "--signal=KILL", "--full", "--user=root")
        for process in self.left():
            process.kill()
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # The path of a Unix socket has at most 107 characters, and Slurm's begin with this folder.
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def test_a_job_whose_time_is_up_is_queued_again_and_goes_on_from_its_checkpoint(cluster: Cluster) -> None:
    job = cluster.submit(TRAIN, "200")
    cluster.until(lambda: all((cluster.folder / f"step-{rank}").exists() for rank in range(3)), "steps")
    cluster.said("scancel", "--batch", "--signal=TERM", job)  # as --signal=B:TERM@90 does
    cluster.until((cluster.folder / "saved.json").exists, "the checkpoint")
    state, out = cluster.ended(job)
    assert state == "COMPLETED 0:0", out
    saved = int((cluster.folder / "saved.json").read_text())
    assert 0 < saved < 200
    for rank in range(3):
        for begin in (0, saved):
            assert f"rank {rank} of 3 on 127.0.0.{rank + 1} begins at {begin}\n" in out
        assert out.count(f"rank {rank} ends at 200 with sum 3\n") == 1
    assert f"job 'slurm-launch.{job}.0' at 127.0.0.1:" in out
    assert f"job 'slurm-launch.{job}.1' at 127.0.0.1:" in out
    assert ", encrypted" in out


def test_a_rank_that_fails_fails_the_job_and_its_host_is_named(cluster: Cluster) -> None:
    state, out = cluster.ended(cluster.submit(TRAIN, "200", "fails"))
    assert state == "FAILED 1:0", out
    assert "rank 1 on 127.0.0.2 failed with exit code 1: disk full" in out


def test_a_jobs_page_is_on_its_first_node_and_no_process_of_a_cancelled_job_is_left(cluster: Cluster) -> None:
    job = cluster.submit(TRAIN.replace("asked.append(True)", "None"), "100000")
    cluster.until(lambda: all((cluster.folder / f"step-{rank}").exists() for rank in range(3)), "steps")
    if find_spec("uvicorn") is not None:
        printed = re.compile(
            r"\[dashboard\] netstorm dashboard: (http://127.0.0.1:(\d+)/\?token=\S+)\n"
            r"(?:.*\n)*?.*from another machine first: ssh -N -L (\d+):127.0.0.1:\3 \S+\n"
        )
        cluster.until(lambda: printed.search(cluster.log()) is not None, "the address of the page")
        found = printed.search(cluster.log())
        assert found is not None
        assert found[2] == found[3]
        assert len(first_update(found[1], nodes=3)["frame"]["nodes"]) == 3
    cluster.said("scancel", job)
    assert cluster.ended(job)[0].startswith("CANCELLED")
