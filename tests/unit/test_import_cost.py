"""What importing costs: which modules come with it, and how much memory. Time varies, and is not tested."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COUNT = """
import re, sys
before = set(sys.modules)
import netstorm
{more}
new = set(sys.modules) - before
memory = re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())
print(memory[1], *sorted(new))
"""


def imported(more=""):
    """Return the peak memory of a process that imports, in bytes, and the modules outside Python's own."""
    code = _COUNT.format(more=more)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    memory, *modules = ran.stdout.split()
    return int(memory) * 1024, {
        name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names
    }


def test_importing_netstorm_loads_one_module():
    memory, modules = imported()
    assert modules == {"netstorm"}
    assert memory < 40e6  # of the whole process, interpreter included


@pytest.mark.parametrize("name", ["UsageError", "PeerError"])
def test_an_error_s_class_loads_no_library(name):
    assert imported(f"netstorm.{name}")[1] == {"netstorm", "netstorm.errors"}


def test_a_group_loads_nothing_that_plans_draws_or_serves():
    packages = {name.partition(".")[0] for name in imported("netstorm.Group")[1]}
    assert "numpy" in packages
    others = {"fastapi", "matplotlib", "mxnet", "networkx", "rich", "scipy", "starlette", "torch", "typer"}
    assert not packages & (others | {"uvicorn", "prometheus_client", "psutil", "yaml"})
