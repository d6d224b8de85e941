"""The chart of deploy/kubernetes: rendered by Helm, valid for the API, and run as a kubelet would.

There is no cluster here: a container is a process of its user on this machine, with its variables, its
command and its key. What a cluster's network and its volumes do is not tested.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from netstorm.cli.launch.variables import is_free
from netstorm.pslite.keys import JobKey
from tests.integration.forking import ROOT
from tests.integration.jobs import PYTHONPATH, free_port

CHART = ROOT / "deploy/kubernetes"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
CLUSTERS = [f"--values={CHART}/clusters/{name}.yaml" for name in ("tokyo", "frankfurt")]
OF_ONE = ["--set=image=registry.example.org/train:7", "--set=command={train.py,--epochs=2}"]
KEY = '{"netstorm": "job key", "secret": "aA{}[]<>"}\n'
TRAIN = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_backend()}: sum {total[0]:.0f}, {sys.argv[1:]}", flush=True)
dist.destroy_process_group()
"""

pytestmark = pytest.mark.slow  # whose script installs Helm
if HELM is None:
    pytest.skip("no helm, 3.8 or later, which renders the chart", allow_module_level=True)


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *words], capture_output=True, text=True, timeout=60, check=False)


def rendered(*options: str, version: str = "1.30") -> dict[tuple[str, str], Any]:
    """Return what `helm install job` would send to a cluster of a version, by kind and name."""
    said = helm("template", "job", str(CHART), f"--kube-version={version}", *options)
    assert said.returncode == 0, said.stderr
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(said.stdout)}


def pod(manifests: dict[tuple[str, str], Any], job: str = "job") -> dict[str, Any]:
    spec: dict[str, Any] = manifests["Job", job]["spec"]["template"]["spec"]
    return spec


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return a container's variables; of those that the pod's own state has, the field's name."""
    return {
        one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"]
    }


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.key"
    path.write_text(KEY)
    return path


@pytest.mark.parametrize("options", [[], OF_ONE, CLUSTERS[:1], CLUSTERS[1:], ["key"]])
def test_helm_and_the_api_of_old_and_new_clusters_find_nothing_wrong(
    options: list[str], key_file: Path
) -> None:
    options = [f"--set-file=key.text={key_file}"] if options == ["key"] else options
    linted = helm("lint", "--strict", str(CHART), *options)
    assert linted.returncode == 0, linted.stdout
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for version in ("1.28", validator.latest_version()):
        for manifest in rendered(*options, version=version).values():
            validator.validate(manifest, version, strict=True)


def test_the_chart_becomes_a_package_that_renders_the_same(tmp_path: Path) -> None:
    assert helm("package", str(CHART), f"--destination={tmp_path}").returncode == 0
    (package,) = tmp_path.iterdir()
    assert helm("template", "job", str(package)).stdout == helm("template", "job", str(CHART)).stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--set=image="], "image"),
        (["--set=nodes=0"], "nodes"),
        (["--set=node=3"], "node"),
        (["--set=command=train.py"], "command"),
        (["--set=env.NETSTORM_CHUNK_SIZE=1000000"], "env.NETSTORM_CHUNK_SIZE"),  # a number: 1e+06
        (["--set-string=env.NETSTORM_RANK=0"], "NETSTORM_RANK"),  # the pod's index says it
        (["--set=scheduler.port=70000"], "scheduler.port"),
        (["--set=scheduler.enabled=false"], "scheduler.address"),
        (["--set=scheduler.address=http://tokyo"], "scheduler.address"),
        (["--set=clusters.enabled=true"], "master.address"),
        (["--set=clusters.enabled=true"], "clusters.nodes"),
        (["--set=clusters.enabled=true"], "clusters.site"),
        ([*CLUSTERS[1:], "--set=clusters.address=203.0.113.9"], "nodes"),
        (["--set=sharedMemory=much"], "sharedMemory"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(options: list[str], named: str) -> None:
    said = helm("template", "job", str(CHART), *options)
    assert said.returncode != 0
    path = named.replace(".", "[./]")  # Helm 4 writes /scheduler/port
    assert re.search(rf"(\W|^){path}\W", said.stderr), said.stderr


def test_pods_of_one_cluster_are_ranks_that_find_the_scheduler_and_each_other_before_they_are_ready() -> None:
    manifests = rendered(*OF_ONE, "--set-string=env.NETSTORM_TOPOLOGY=fapt")
    job = manifests["Job", "job"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    (node,) = pod(manifests)["containers"]
    assert node["image"] == "registry.example.org/train:7"
    assert node["args"] == ["train.py", "--epochs=2"]
    found = variables(node)
    assert found["NETSTORM_TOPOLOGY"] == "fapt"
    assert found["DMLC_NODE_HOST"] == "status.podIP"
    for name, address in [("job-scheduler", "DMLC_PS_ROOT_URI"), ("job", "MASTER_ADDR")]:
        service = manifests["Service", name]["spec"]
        assert service["publishNotReadyAddresses"]  # nobody's readiness is probed before a job begins
        labels = manifests["Job", name]["spec"]["template"]["metadata"]["labels"]
        assert service["selector"].items() <= labels.items()
        assert found[address].endswith(name)
    # A pod of an Indexed Job has its index as host name, and the headless Service of its subdomain names it.
    assert manifests["Service", "job"]["spec"]["clusterIP"] == "None"
    assert pod(manifests)["subdomain"] == "job"
    assert found["MASTER_ADDR"] == "job-0.job"
    ports = manifests["Service", "job-scheduler"]["spec"]["ports"]
    assert {(port["port"], port["protocol"]) for port in ports} == {(9091, "TCP"), (9091, "UDP")}
    (scheduler,) = pod(manifests, "job-scheduler")["containers"]
    assert variables(scheduler)["DMLC_PS_ROOT_PORT"] == found["DMLC_PS_ROOT_PORT"] == "9091"
    assert not any(pod(manifests, name).get("hostNetwork") for name in ("job", "job-scheduler"))


@pytest.mark.parametrize("index", [0, 1])
def test_the_index_of_a_pod_and_the_nodes_of_the_clusters_before_make_its_rank(index: int) -> None:
    (node,) = pod(rendered(*CLUSTERS[1:]))["containers"]
    shell, _, script, *rest = node["command"]
    script = script.replace("exec python -m netstorm.run", "echo $NETSTORM_RANK $RANK $WORLD_SIZE")
    said = subprocess.run(
        [shell, "-c", script, *rest, *node["args"]],
        env={"JOB_COMPLETION_INDEX": str(index), "DMLC_NUM_WORKER": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == f"{index + 1} {index + 1} 3 train.py\n"


@pytest.mark.parametrize("job", ["job", "job-scheduler"])
def test_a_pod_that_is_not_root_can_read_the_key_and_nobody_else(job: str, key_file: Path) -> None:
    for options, secret in ([], "netstorm-key"), ([f"--set-file=key.text={key_file}"], "job-key"):
        manifests = rendered(*options)
        spec = pod(manifests, job)
        user = spec["securityContext"]
        assert user["runAsNonRoot"]
        assert user["runAsUser"] != 0
        (volume,) = (each["secret"] for each in spec["volumes"] if "secret" in each)
        assert volume["secretName"] == secret
        # A volume of a Secret belongs to root and to fsGroup.
        assert volume["defaultMode"] & 0o040, "the pod's group may read it"
        assert user["fsGroup"], "and the process is in that group"
        assert volume["defaultMode"] & 0o007 == 0, "no other may"
        (container,) = spec["containers"]
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "key")
        assert mount["readOnly"]
        assert variables(container)["NETSTORM_KEY_FILE"] == f"{mount['mountPath']}/job.key"
        if options:
            assert base64.b64decode(manifests["Secret", secret]["data"]["job.key"]).decode() == KEY
        else:
            assert not [kind for kind, _ in manifests if kind == "Secret"]


def test_ranks_numbers_and_addresses_of_several_clusters_make_one_job() -> None:
    begin, jobs = 0, [rendered(options) for options in CLUSTERS]
    found = []
    for job in jobs:
        nodes = job["Job", "job"]["spec"]
        (node,) = pod(job)["containers"]
        assert f"NETSTORM_RANK=$(({begin} + JOB_COMPLETION_INDEX))" in node["command"][2]
        assert nodes["completions"] == nodes["parallelism"]
        begin += nodes["completions"]
        found.append(variables(node))
        # Pods' networks end at the cluster: the host's, whose port lets no second node in.
        assert pod(job)["hostNetwork"]
        (port,) = node["ports"]
        assert port["hostPort"] == port["containerPort"] == int(variables(node)["NETSTORM_PORT"])
    tokyo, frankfurt = found
    assert [tokyo.pop("NETSTORM_SITE"), frankfurt.pop("NETSTORM_SITE")] == ["tokyo", "frankfurt"]
    assert tokyo == frankfurt
    assert tokyo["DMLC_NUM_WORKER"] == str(begin)
    assert [tokyo["DMLC_PS_ROOT_URI"], tokyo["MASTER_ADDR"]] == ["203.0.113.7", "203.0.113.8"]
    assert [("Job", "job-scheduler") in job for job in jobs] == [True, False]
    assert pod(jobs[0], "job-scheduler")["hostNetwork"]


def test_the_only_node_behind_an_outer_address_advertises_it_and_listens_everywhere() -> None:
    (node,) = pod(rendered(CLUSTERS[0], "--set=clusters.address=198.51.100.4"))["containers"]
    assert variables(node)["DMLC_NODE_HOST"] == "198.51.100.4"
    assert variables(node)["NETSTORM_BIND"] == "*"


def test_a_dashboard_is_beside_the_scheduler_where_a_sidecar_does_not_keep_a_job_from_ending() -> None:
    (sidecar,) = pod(rendered(), "job-scheduler")["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    for manifests in rendered("--set=scheduler.dashboard=false"), rendered(version="1.28"):
        assert "initContainers" not in pod(manifests, "job-scheduler")


class Kubelet:
    """Runs the containers of pods as processes of their user, all with the address 127.0.0.1."""

    def __init__(self, folder: Path, manifests: dict[tuple[str, str], Any], names: dict[str, str]) -> None:
        self.folder = folder
        self.manifests = manifests
        self.names = names
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, job: str, *arguments: str, index: int | None = None, kind: str = "containers"
    ) -> subprocess.Popen[str]:
        """Start the container of the pod of a job's index."""
        spec = pod(self.manifests, job)
        (container,) = spec[kind]
        own = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": PYTHONPATH}
        if spec.get("enableServiceLinks", True):
            own |= {"NETSTORM_SCHEDULER_PORT": "tcp://10.96.0.9:9091"}
        own |= variables(container) if "env" in container else {}
        if index is not None:
            own["JOB_COMPLETION_INDEX"] = str(index)
        user = spec["securityContext"]
        reads = "-all,+dac_read_search"  # the interpreter may be below /root
        words = ["setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}"]
        words += [f"--groups={user['fsGroup']}", f"--inh-caps={reads}", f"--ambient-caps={reads}"]
        process = subprocess.Popen(
            [*words, *map(self._here, [*container["command"], *container.get("args", []), *arguments])],
            env={name: self._here(value) for name, value in own.items()},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def _here(self, word: str) -> str:
        return self.names.get(word, word)


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    if os.geteuid():
        pytest.skip("only root can run processes of another user")
    manifests = rendered("--set=image=any")
    port = free_port()
    while not is_free(port + 1000):
        port = free_port()
    with tempfile.TemporaryDirectory() as made:  # pytest's is closed to others
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "train.py").write_text(TRAIN)
        (secret,) = (volume["secret"] for volume in pod(manifests)["volumes"] if "secret" in volume)
        JobKey.fresh().write(folder / "job.key")
        os.chown(folder / "job.key", 0, 10001)  # as fsGroup does it
        (folder / "job.key").chmod(secret["defaultMode"])
        names = dict.fromkeys(("job-scheduler", "job-0.job", "status.podIP"), "127.0.0.1")
        names |= {
            "9091": str(port),
            "127.0.0.1:9091": f"127.0.0.1:{port}",
            "10091": str(port + 1000),
            "/key/job.key": str(folder / "job.key"),
        }
        kubelet = Kubelet(folder, manifests, names)
        try:
            yield kubelet
        finally:
            for process in kubelet.processes:
                process.kill()
                process.communicate()


def test_a_job_whose_pods_start_before_its_scheduler_trains_with_a_key_that_their_group_alone_may_read(
    kubelet: Kubelet,
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    nodes = [kubelet.start("job", "--epochs=2", index=index) for index in range(2)]
    scheduler, shown = None, ""
    deadline = time.monotonic() + 100
    while "http://127.0.0.1:" not in shown:  # started again until the scheduler is there, as a sidecar is
        assert time.monotonic() < deadline, shown
        dashboard = kubelet.start("job-scheduler", kind="initContainers")
        scheduler = scheduler or kubelet.start("job-scheduler")
        assert dashboard.stdout is not None
        shown = dashboard.stdout.readline()
    nodes.append(kubelet.start("job", "--epochs=2", index=2))
    for rank, node in enumerate(nodes):
        out, _ = node.communicate(timeout=100)
        assert node.returncode == 0, out
        assert f"rank {rank} of netstorm: sum 3, ['--epochs=2']" in out
        assert "NETSTORM_SCHEDULER_PORT" not in out  # of a Service, not a setting
    assert scheduler is not None
    out, _ = scheduler.communicate(timeout=60)
    assert scheduler.returncode == 0, out
    assert "encrypted; waiting for 3 nodes" in out
