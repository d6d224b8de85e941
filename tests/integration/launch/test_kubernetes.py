"""The manifests of deploy/kubernetes: rendered by kubectl, valid for the API, and run as a kubelet would.

There is no cluster here: a container is a process of its user on this machine, with its variables, its
command and its key. What a cluster's network and its volumes do is not tested.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from netstorm.cli.launch.variables import is_free
from netstorm.pslite.keys import JobKey
from tests.integration.forking import ROOT
from tests.integration.jobs import PYTHONPATH, free_port

KUBERNETES = ROOT / "deploy/kubernetes"
CLUSTERS = ["one-cluster", "several-clusters/tokyo", "several-clusters/frankfurt"]
TRAIN = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_backend()}: sum {total[0]:.0f}, {sys.argv[1:]}", flush=True)
dist.destroy_process_group()
"""

if shutil.which("kubectl") is None:
    pytest.skip("no kubectl, 1.21 or later, which renders manifests", allow_module_level=True)


def rendered(cluster: str) -> dict[tuple[str, str], Any]:
    """Return what `kubectl apply -k` would send, by kind and name."""
    words = ["kubectl", "kustomize", str(KUBERNETES / cluster)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(said.stdout)}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_api_of_old_and_new_clusters_takes_the_manifests(cluster: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for manifest in rendered(cluster).values():
        for version in ("1.28", validator.latest_version()):
            validator.validate(manifest, version, strict=True)


def test_ranks_and_numbers_of_several_clusters_make_one_job() -> None:
    begin, jobs = 0, [rendered(cluster) for cluster in CLUSTERS[1:]]
    for job in jobs:
        nodes, values = job["Job", "netstorm"]["spec"], job["ConfigMap", "netstorm"]["data"]
        assert int(values["FIRST_RANK"]) == begin
        assert nodes["completions"] == nodes["parallelism"]
        begin += nodes["completions"]
    shared = [
        {
            name: value
            for name, value in job["ConfigMap", "netstorm"]["data"].items()
            if "DMLC" in name or "MASTER" in name
        }
        for job in jobs
    ]
    assert shared[0] == shared[1]
    assert int(shared[0]["DMLC_NUM_WORKER"]) == begin
    assert [("Job", "netstorm-scheduler") in job for job in jobs] == [True, False]


class Kubelet:
    """Runs the containers of pods as processes of their user, all with the address 127.0.0.1."""

    def __init__(self, folder: Path, manifests: dict[tuple[str, str], Any], names: dict[str, str]) -> None:
        self.folder = folder
        self.manifests = manifests
        self.names = names
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, job: str, *arguments: str, index: int | None = None) -> subprocess.Popen[str]:
        """Start the pod of a job's index."""
        pod = self.manifests["Job", job]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": PYTHONPATH}
        if pod.get("enableServiceLinks", True):
            variables |= {"NETSTORM_SCHEDULER_PORT": "tcp://10.96.0.9:9091"}
        for source in container["envFrom"]:
            variables |= self.manifests["ConfigMap", source["configMapRef"]["name"]]["data"]
        for one in container["env"]:
            field = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[one["name"]] = {"status.podIP": "127.0.0.1"}[field] if field else one["value"]
        if index is not None:
            variables["JOB_COMPLETION_INDEX"] = str(index)
        user = pod["securityContext"]
        reads = "-all,+dac_read_search"  # the interpreter may be below /root
        words = ["setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}"]
        words += [f"--groups={user['fsGroup']}", f"--inh-caps={reads}", f"--ambient-caps={reads}"]
        process = subprocess.Popen(
            [*words, *container["command"], *container.get("args", []), *arguments],
            env={name: self.names.get(value, value) for name, value in variables.items()},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    if os.geteuid():
        pytest.skip("only root can run processes of another user")
    manifests = rendered("one-cluster")
    port = free_port()
    while not is_free(port + 1000):
        port = free_port()
    with tempfile.TemporaryDirectory() as made:  # pytest's is closed to others
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "train.py").write_text(TRAIN)
        (secret,) = (
            volume["secret"]
            for volume in manifests["Job", "netstorm"]["spec"]["template"]["spec"]["volumes"]
            if "secret" in volume
        )
        JobKey.fresh().write(folder / "job.key")
        os.chown(folder / "job.key", 0, 10001)  # as fsGroup does it
        (folder / "job.key").chmod(secret["defaultMode"])
        names = {"netstorm-scheduler": "127.0.0.1", "netstorm-0.netstorm": "127.0.0.1"}
        names |= {"9091": str(port), "10091": str(port + 1000), "/key/job.key": str(folder / "job.key")}
        kubelet = Kubelet(folder, manifests, names)
        try:
            yield kubelet
        finally:
            for process in kubelet.processes:
                process.kill()
                process.communicate()


@pytest.mark.slow
def test_a_job_whose_pods_start_before_its_scheduler_trains_with_a_key_that_only_their_group_reads(
    kubelet: Kubelet,
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    nodes = [kubelet.start("netstorm", "--epochs=2", index=index) for index in range(3)]
    scheduler = kubelet.start("netstorm-scheduler")
    for rank, node in enumerate(nodes):
        out, _ = node.communicate(timeout=100)
        assert node.returncode == 0, out
        assert f"rank {rank} of netstorm: sum 3, ['--epochs=2']" in out
        assert "NETSTORM_SCHEDULER_PORT" not in out  # of a Service, not a setting
    out, _ = scheduler.communicate(timeout=60)
    assert scheduler.returncode == 0, out
    assert "encrypted; waiting for 3 nodes" in out
