"""PyTorch's own names in unedited scripts, and what `import torch` itself finds of NetStorm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")

ROOT = Path(__file__).resolve().parents[3]

RECORD = """
import json, os, sys, types
import torch
import torch.distributed as dist

created = []
startup = types.ModuleType("netstorm.frontends.torch.startup")  # stands in for the one that joins a job

def create_process_group(options, backend_options):
    created.append([options.group_rank, options.group_size])
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

startup.create_process_group = create_process_group
sys.modules[startup.__name__] = startup

def init(**arguments):
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **arguments)
"""


def run(folder: Path, source: str, *words: str, **variables: str) -> Any:
    """Run a script; return its last line, read as JSON."""
    script = folder / "script.py"
    script.write_text(source)
    ended = subprocess.run(
        [sys.executable, *words, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_names_of_pytorchs_backends_mean_netstorm_in_groups_and_meshes_and_real_gloo_is_pytorchs(tmp_path):
    script = """
from torch.distributed.device_mesh import init_device_mesh
from netstorm.frontends.torch.site_mesh import site_mesh
from netstorm.frontends.torch.site_sums import hierarchical_all_reduce

names = ("gloo", "GLOO", "mpi", "nccl", dist.Backend.GLOO, "cpu:gloo", "cpu:gloo,cuda:nccl", None)
forms = {}
for form in names:
    init(**({} if form is None else {"backend": form}))
    assert dist.get_world_size() == 1
    forms[str(form)] = [dist.get_backend(), len(created)]
    created.clear()
    dist.destroy_process_group()

init(backend="gloo")
groups = {"default": None, "gloo": dist.new_group(backend="gloo"), "same": dist.new_group()}
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",), backend_override={"a": "gloo"})
groups["mesh"] = mesh.get_group()
made = len(created)
groups["real"] = real = dist.new_group(backend="real_gloo")
total = torch.ones(3)
dist.all_reduce(total, group=real)
kinds = {name: dist.get_backend(group) for name, group in groups.items()}
real_kind = type(real._get_backend(torch.device("cpu"))).__name__
dist.destroy_process_group()
made = [made, len(created)]

init(backend="gloo")
mesh = site_mesh()
sites = [dist.get_backend(mesh.get_group(name)) for name in ("site", "local")]
total = torch.ones(3)
hierarchical_all_reduce(total, mesh)
inner = dist.get_backend(site_mesh(inner_backend="gloo").get_group("local"))
dist.destroy_process_group()
print(json.dumps([forms, kinds, made, real_kind, sites, inner, total.tolist()]))
"""
    forms, kinds, made, real_kind, sites, inner, total = run(tmp_path, RECORD + script, "-m", "netstorm.run")
    assert forms == {
        "gloo": ["netstorm", 1],
        "GLOO": ["netstorm", 1],
        "mpi": ["netstorm", 1],
        "nccl": ["netstorm", 1],
        "cpu:gloo": ["cpu:netstorm", 1],
        "cpu:gloo,cuda:nccl": ["cpu:netstorm,cuda:netstorm", 1],
        "None": ["netstorm", 1],
    }
    assert kinds == {
        **dict.fromkeys(("default", "gloo", "same", "mesh"), "netstorm"),
        "real": "real_gloo",
    }
    assert made == [4, 4]
    assert real_kind == "ProcessGroupGloo"
    # PyTorch's Gloo inside a site, even where its name is taken over.
    assert (sites, inner, total) == (["netstorm", "real_gloo"], "real_gloo", [1.0, 1.0, 1.0])


def test_the_user_chooses_the_names_also_in_processes_that_a_script_spawns_and_what_a_rank_starts_is_no_rank(
    tmp_path,
):
    script = """
import torch.multiprocessing as mp

def names():
    return [str(dist.Backend(name)) for name in ("gloo", "mpi", "nccl", "cpu:gloo,cuda:nccl")]

def spawned(index, queue):
    queue.put(names())

if __name__ == "__main__":
    import subprocess
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(spawned, (queue,), nprocs=1)
    init(backend="nccl")
    dist.destroy_process_group()
    child = "import torch.distributed as dist; print(dist.Backend('nccl'))"
    output = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    print(json.dumps([names(), queue.get(), output.split()]))
"""
    chosen = ["gloo", "mpi", "netstorm", "cpu:gloo,cuda:netstorm"]
    found = run(tmp_path, RECORD + script, "-m", "netstorm.run", NETSTORM_TORCH_BACKENDS="nccl")
    assert found == [chosen, chosen, ["nccl"]]


def test_import_torch_makes_the_backend_known_and_one_that_maps_names_in_another_way_is_an_error(tmp_path):
    script = """
import json, sys, torch
import torch.distributed as dist
from netstorm.frontends.torch.autoload import autoload
autoload()  # as PyTorch does where NetStorm is installed
ours = sorted(name for name in sys.modules if name.startswith("netstorm"))
at_first = [ours, "zmq" in sys.modules, str(dist.Backend("gloo")), dist.Backend.NETSTORM]

import torch.distributed.distributed_c10d as c10d
from netstorm.errors import UsageError
from netstorm.frontends.torch.take_over import own_name, take_over_backends

c10d.BackendConfig.get_device_backend_map = lambda self: {"cpu": "gloo"}
try:
    take_over_backends("gloo")
except UsageError as error:
    print(json.dumps([at_first, [str(error), str(dist.Backend("gloo")), own_name("gloo")]]))
"""
    (ours, zmq, gloo, name), (message, *names) = run(tmp_path, script)
    assert ours == [  # and imports nothing else of NetStorm
        "netstorm",
        "netstorm.frontends",
        "netstorm.frontends.torch",
        "netstorm.frontends.torch.autoload",
        "netstorm.frontends.torch.names",
    ]
    assert (zmq, gloo, name) == (False, "gloo", "netstorm")
    assert message.startswith("NETSTORM_TORCH_BACKENDS=gloo: PyTorch 2.")
    assert 'init_process_group the backend "netstorm" instead' in message
    assert names == ["gloo", "gloo"]


LAUNCHED = {"DMLC_ROLE": "worker", "NETSTORM_RESTART": "0", "RANK": "0"}


@pytest.mark.slow
def test_a_rank_of_the_launcher_says_that_its_default_group_is_not_netstorms_and_what_it_starts_does_not(
    tmp_path,
):
    script = """
import contextlib, io, subprocess
startup.join_before_rendezvous = lambda *_, **__: None
said = {}
for form in ("gloo", None):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        dist.init_process_group(form, store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group(backend="gloo")
    said[str(form)] = errors.getvalue()
    dist.destroy_process_group()
init(backend="netstorm")
child = (
    "import torch.distributed as dist;"
    "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
)
ended = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
said["child"] = ended.stdout + ended.stderr
print(json.dumps(said))
"""
    said = run(tmp_path, RECORD + script, **LAUNCHED)
    assert said["gloo"].startswith("netstorm: rank 0 makes a default group of PyTorch's own backend 'gloo'")
    assert 'init_process_group("netstorm")' in said["gloo"]
    assert "python -m netstorm.run" in said["gloo"]
    assert said["gloo"].count("\n") == 1
    assert "of PyTorch's default backend" in said["None"]
    assert said["child"] == ""


def test_neither_framework_is_imported_before_the_script_does_it(tmp_path):
    script = """
import importlib.util, json, sys
found = [importlib.util.find_spec(name) is not None for name in ("torch", "numpy")]
print(json.dumps([found, "torch" in sys.modules, "mxnet" in sys.modules]))
"""
    assert run(tmp_path, script, "-m", "netstorm.run") == [[True, True], False, False]


def test_a_wrong_list_of_names_is_refused_in_one_line(tmp_path):
    (tmp_path / "script.py").write_text("import torch")
    ended = subprocess.run(
        [sys.executable, "-m", "netstorm.run", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NETSTORM_TORCH_BACKENDS": "glue"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "netstorm: NETSTORM_TORCH_BACKENDS='glue': expected a list such as gloo,mpi"
    )
    assert ended.stderr.count("\n") == 1
