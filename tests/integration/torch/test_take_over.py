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


def test_every_way_to_name_a_backend_of_pytorchs_means_netstorm_on_any_machine(tmp_path):
    script = """
found = {}
names = ("gloo", "GLOO", "mpi", "nccl", dist.Backend.GLOO, "cpu:gloo", "cpu:gloo,cuda:nccl", None)
for form in names:
    init(**({} if form is None else {"backend": form}))
    assert dist.get_world_size() == 1
    found[str(form)] = [dist.get_backend(), len(created)]
    created.clear()
    dist.destroy_process_group()
print(json.dumps(found))
"""
    assert run(tmp_path, RECORD + script, "-m", "netstorm.run") == {
        "gloo": ["netstorm", 1],
        "GLOO": ["netstorm", 1],
        "mpi": ["netstorm", 1],
        "nccl": ["netstorm", 1],
        "cpu:gloo": ["cpu:netstorm", 1],
        "cpu:gloo,cuda:nccl": ["cpu:netstorm,cuda:netstorm", 1],
        "None": ["netstorm", 1],
    }


def test_groups_and_meshes_that_name_gloo_are_netstorms_and_real_gloo_is_pytorchs(tmp_path):
    script = """
from torch.distributed.device_mesh import init_device_mesh
init(backend="gloo")
groups = {"default": None, "gloo": dist.new_group(backend="gloo"), "same": dist.new_group()}
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",), backend_override={"a": "gloo"})
groups["mesh"] = mesh.get_group()
made = len(created)
groups["real"] = real = dist.new_group(backend="real_gloo")
total = torch.ones(3)
dist.all_reduce(total, group=real)
kinds = {name: dist.get_backend(group) for name, group in groups.items()}
print(json.dumps([kinds, made, len(created), type(real._get_backend(torch.device("cpu"))).__name__]))
dist.destroy_process_group()
"""
    kinds, before, after, kind = run(tmp_path, RECORD + script, "-m", "netstorm.run")
    assert kinds == {
        **dict.fromkeys(("default", "gloo", "same", "mesh"), "netstorm"),
        "real": "real_gloo",
    }
    assert before == after == 4
    assert kind == "ProcessGroupGloo"


def test_a_mesh_of_sites_uses_pytorchs_gloo_inside_even_where_its_name_is_taken_over(tmp_path):
    script = """
from netstorm.frontends.torch.site_mesh import site_mesh
from netstorm.frontends.torch.site_sums import hierarchical_all_reduce
init(backend="gloo")
mesh = site_mesh()
names = [dist.get_backend(mesh.get_group(name)) for name in ("site", "local")]
total = torch.ones(3)
hierarchical_all_reduce(total, mesh)
inner = dist.get_backend(site_mesh(inner_backend="gloo").get_group("local"))
print(json.dumps([names, inner, total.tolist()]))
"""
    assert run(tmp_path, RECORD + script, "-m", "netstorm.run") == [
        ["netstorm", "real_gloo"],
        "real_gloo",
        [1.0, 1.0, 1.0],
    ]


def test_the_user_chooses_the_names(tmp_path):
    script = """
print(json.dumps([dist.Backend(name) for name in ("gloo", "mpi", "nccl", "cpu:gloo,cuda:nccl")]))
"""
    found = run(tmp_path, RECORD + script, "-m", "netstorm.run", NETSTORM_TORCH_BACKENDS="nccl")
    assert found == ["gloo", "mpi", "netstorm", "cpu:gloo,cuda:netstorm"]


def test_processes_that_a_script_spawns_use_netstorm_too(tmp_path):
    script = """
import json
import torch.distributed as dist
import torch.multiprocessing as mp

def child(index, queue):
    queue.put(str(dist.Backend("gloo")))

if __name__ == "__main__":
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(child, (queue,), nprocs=1)
    print(json.dumps(queue.get()))
"""
    assert run(tmp_path, script, "-m", "netstorm.run") == "netstorm"


def test_processes_that_a_rank_starts_are_no_ranks_and_have_pytorchs_own_backends(tmp_path):
    script = """
import subprocess
init(backend="gloo")
dist.destroy_process_group()
child = "import torch.distributed as dist; print(dist.Backend('gloo'))"
output = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
print(json.dumps([output.split(), str(dist.Backend("gloo"))]))
"""
    assert run(tmp_path, RECORD + script, "-m", "netstorm.run") == [["gloo"], "netstorm"]


def test_import_torch_makes_the_backend_known_and_imports_nothing_else_of_netstorm(tmp_path):
    script = """
import json, sys, torch
import torch.distributed as dist
from netstorm.frontends.torch.autoload import autoload
autoload()  # as PyTorch does where NetStorm is installed
ours = sorted(name for name in sys.modules if name.startswith("netstorm"))
print(json.dumps([ours, "zmq" in sys.modules, str(dist.Backend("gloo")), dist.Backend.NETSTORM]))
"""
    ours, zmq, gloo, name = run(tmp_path, script)
    assert ours == [
        "netstorm",
        "netstorm.frontends",
        "netstorm.frontends.torch",
        "netstorm.frontends.torch.autoload",
        "netstorm.frontends.torch.names",
    ]
    assert (zmq, gloo, name) == (False, "gloo", "netstorm")


LAUNCHED = {"DMLC_ROLE": "worker", "NETSTORM_RESTART": "0", "RANK": "0"}


def test_a_rank_of_the_launcher_says_at_once_that_its_default_group_is_not_netstorms(tmp_path):
    script = """
import contextlib, io, json
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
said = {}
for form in ("gloo", None):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        dist.init_process_group(form, store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group(backend="gloo")
    said[str(form)] = errors.getvalue()
    dist.destroy_process_group()
print(json.dumps(said))
"""
    said = run(tmp_path, script, **LAUNCHED)
    assert said["gloo"].startswith("netstorm: rank 0 makes a default group of PyTorch's own backend 'gloo'")
    assert 'init_process_group("netstorm")' in said["gloo"]
    assert "python -m netstorm.run" in said["gloo"]
    assert said["gloo"].count("\n") == 1
    assert "of PyTorch's default backend" in said["None"]


def test_what_a_rank_starts_says_nothing_of_groups_of_its_own(tmp_path):
    script = """
import subprocess
init(backend="netstorm")
child = (
    "import torch.distributed as dist;"
    "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
)
ended = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
print(json.dumps(ended.stdout + ended.stderr))
"""
    stand_in = RECORD + "startup.join_before_rendezvous = lambda *_, **__: None\n"
    assert run(tmp_path, stand_in + script, **LAUNCHED) == ""


def test_neither_framework_is_imported_before_the_script_does_it(tmp_path):
    script = """
import importlib.util, json, sys
found = [importlib.util.find_spec(name) is not None for name in ("torch", "numpy")]
print(json.dumps([found, "torch" in sys.modules, "mxnet" in sys.modules]))
"""
    assert run(tmp_path, script, "-m", "netstorm.run") == [[True, True], False, False]


def test_a_pytorch_that_maps_names_in_another_way_is_an_error_that_says_what_to_do(tmp_path):
    script = """
import json
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from netstorm.errors import UsageError
from netstorm.frontends.torch.take_over import own_name, take_over_backends

c10d.BackendConfig.get_device_backend_map = lambda self: {"cpu": "gloo"}
try:
    take_over_backends("gloo")
except UsageError as error:
    print(json.dumps([str(error), str(dist.Backend("gloo")), own_name("gloo")]))
"""
    message, gloo, own = run(tmp_path, script)
    assert message.startswith("NETSTORM_TORCH_BACKENDS=gloo: PyTorch 2.")
    assert 'init_process_group the backend "netstorm" instead' in message
    assert (gloo, own) == ("gloo", "gloo")


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
