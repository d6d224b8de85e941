"""Three regions of several ranks each, started by torchrun, as docs/guides/several-gpus-a-region.md says.

There a host has eight ranks; here it has two, and tensors of the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from netstorm.lab.emulation.wan import Wan
from netstorm.topology.network import Network
from tests.wan.traces import NETSTORM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed"),
]

SITES, LOCAL, LIMIT_S = ("tokyo", "frankfurt", "dallas"), 2, 200

TRAIN = """
import json, os, sys
import torch
import torch.distributed as dist
from netstorm.frontends.torch.site_mesh import site_mesh
from netstorm.frontends.torch.site_sums import site_hook

STEPS = 5


def batch(rank, step):
    torch.manual_seed(100 * rank + step)
    return torch.randn(8, 400), torch.randn(8, 1)


def step_of(model, optimizer, batches):
    optimizer.zero_grad()
    for inputs, wanted in batches:
        (torch.nn.functional.mse_loss(model(inputs), wanted) / len(batches)).backward()
    optimizer.step()


def fresh():
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


dist.init_process_group("netstorm")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = site_mesh()
model, optimizer = fresh()
parallel = torch.nn.parallel.DistributedDataParallel(model)
parallel.register_comm_hook(mesh, site_hook)
for step in range(STEPS):
    step_of(parallel, optimizer, [batch(rank, step)])
alone, optimizer = fresh()
for step in range(STEPS):
    step_of(alone, optimizer, [batch(other, step) for other in range(ranks)])
whole = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
right = torch.cat([parameter.detach().reshape(-1) for parameter in alone.parameters()])
found = {
    "site": os.environ["NETSTORM_SITE"],
    "place": int(os.environ["LOCAL_RANK"]),
    "mesh": [mesh.size(0), mesh.size(1)],
    "backends": [dist.get_backend(mesh.get_group(name)) for name in ("site", "local")],
    "digest": whole.numpy().tobytes().hex()[:2000],
    "wrong": (whole - right).abs().max().item(),
}
print("FOUND", json.dumps(found), flush=True)
dist.destroy_process_group()
"""


def test_a_command_on_each_of_three_hosts_trains_one_model(tmp_path: Path) -> None:
    script, key = tmp_path / "train.py", tmp_path / "job.key"
    script.write_text(TRAIN)
    subprocess.run([*NETSTORM, "keys", "new", str(key)], check=True, capture_output=True)
    processes: list[tuple[subprocess.Popen[bytes], Path]] = []
    with Wan.up(Network.uniform(len(SITES), rate=100e6, latency=0.02)) as wan:
        try:
            for host, site in enumerate(SITES):
                torchrun = [sys.executable, "-m", "torch.distributed.run"]
                torchrun += ["--nnodes", str(len(SITES)), "--nproc-per-node", str(LOCAL)]
                torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{wan.address(0)}:29500"]
                torchrun += ["--local-addr", wan.address(host)]  # the namespaces share one host's name
                output = tmp_path / f"out-{site}"
                with output.open("wb") as file:
                    process = subprocess.Popen(
                        wan.command(host, [*torchrun, str(script)]),
                        env={
                            **os.environ,
                            "NETSTORM_SITE": site,
                            "NETSTORM_KEY_FILE": str(key),
                            "OMP_NUM_THREADS": "1",
                            "GLOO_SOCKET_IFNAME": "lo",  # inside a site
                        },
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                processes.append((process, output))
            codes = [process.wait(LIMIT_S) for process, _ in processes]
        finally:
            for process, _ in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    said = [output.read_text(errors="replace") for _, output in processes]
    assert codes == [0, 0, 0], "\n\n".join(said)
    found = [
        json.loads(line.split("FOUND ")[1]) for text in said for line in text.splitlines() if "FOUND " in line
    ]
    assert sorted((one["site"], one["place"]) for one in found) == sorted(
        (site, place) for site in SITES for place in range(LOCAL)
    )
    assert all(one["mesh"] == [len(SITES), LOCAL] for one in found)
    assert all(one["backends"] == ["netstorm", "gloo"] for one in found)
    assert len({one["digest"] for one in found}) == 1
    assert max(one["wrong"] for one in found) < 1e-5
