"""Jobs that the pages have the reader start with commands of a shell: they train, with both frameworks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from netstorm.cli.launch.variables import is_free
from tests.integration.docs.pages import ROOT, blocks
from tests.integration.jobs import free_port

pytestmark = pytest.mark.timeout(300)  # each starts several interpreters with PyTorch or MXNet

TRAIN = {
    "torch": """
import torch, torch.distributed as dist
dist.init_process_group("netstorm")
total = torch.ones(3)
dist.all_reduce(total)
print(f"sum {total[0]:.0f}", flush=True)
dist.destroy_process_group()
""",
    "mxnet": """
import netstorm.frontends.mxnet
import mxnet as mx
kv = mx.kv.create("dist_sync_netstorm")
total = mx.nd.zeros(3)
kv.init("total", total)
kv.pushpull("total", mx.nd.ones(3), out=total)
print(f"sum {total[0].asscalar():.0f}", flush=True)
""",
}
"""What a page calls train.py."""

SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
export SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!); done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=1; done
exit $status
"""
"""What Slurm's srun does with two tasks, on one host."""


def on_this_machine(text: str) -> str:
    """Return a page's commands with two nodes, addresses and ports of this machine."""
    port = free_port()
    while not is_free(port + 1000):
        port = free_port()
    changes = {"10.0.0.1": "127.0.0.1", "=9091": f"={port}", "DMLC_NUM_WORKER=3": "DMLC_NUM_WORKER=2"}
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of bash in a folder that has what a checkout has."""
    (folder / "scripts").symlink_to(ROOT / "scripts")
    path = f"{folder}:{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def page_of(name: str, languages: Sequence[str]) -> list[str]:
    return [block.text for block in blocks(*languages) if block.page == name]


@pytest.mark.parametrize("framework", ["torch", pytest.param("mxnet", marks=pytest.mark.slow)])
def test_a_job_that_is_started_by_hand_as_the_page_says_trains(framework, tmp_path):
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    (tmp_path / "train.py").write_text(TRAIN[framework])
    texts = page_of("docs/getting-started/your-own-script.md", ["sh"])
    scheduler, node = (
        next(text for text in texts if script in text) for script in ("run_scheduler.sh", "run_node.sh")
    )
    second = node.replace("NETSTORM_RANK=0", "NETSTORM_RANK=1")
    assert second != node
    # By number: `wait -n` fails if two have ended at once, as it knows of one of them no more.
    together = "".join(f"({one}) & all+=($!)\n" for one in (scheduler, node, second))
    script = (
        f'netstorm keys new job.key\n{together}for each in "${{all[@]}}"; do wait "$each" || exit 1; done'
    )
    ended = run(on_this_machine(script), tmp_path)
    assert (ended.returncode, ended.stdout.count("sum 2")) == (0, 2), ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_batch_script_for_slurm_trains(tmp_path):
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    (tmp_path / "train.py").write_text(TRAIN["torch"])
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    (script,) = page_of("docs/guides/slurm-and-kubernetes.md", ["bash"])
    ended = run("netstorm keys new ~/job.key\n" + script, tmp_path, SLURM_NTASKS="2")
    assert (ended.returncode, ended.stdout.count("sum 2")) == (0, 2), ended.stdout + ended.stderr


@pytest.mark.slow
def test_three_regions_train_as_their_page_says(tmp_path):
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    page = "docs/getting-started/three-regions.md"
    (tmp_path / "train.py").write_text(page_of(page, ["python"])[0])
    hosts = page_of(page, ["text"])[0]
    for number, address in enumerate(re.findall(r"^(\S+) site=", hosts, re.MULTILINE), start=1):
        hosts = hosts.replace(address, f"127.0.0.{number} address=127.0.0.{number}")
    (tmp_path / "hosts.txt").write_text(hosts)
    (script,) = (text for text in page_of(page, ["sh"]) if "netstorm launch" in text)
    ssh = (
        f"--ssh '{sys.executable} {ROOT / 'tests/integration/launch/fake_ssh.py'}' --python {sys.executable}"
    )
    script = script.replace("--hosts", f"{ssh} --hosts").replace("/var/tmp/netstorm", str(tmp_path / "state"))
    variables = {"DMLC_PS_ROOT_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    ended = run(script.replace("=9200", f"={free_port()}"), tmp_path, **variables)
    assert (ended.returncode, ended.stdout.count("] loss 0.")) == (0, 3), ended.stdout + ended.stderr
