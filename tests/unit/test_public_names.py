"""What `import netstorm` gives, and what it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import netstorm

_IMPORTED = """
import sys
before = set(sys.modules)
import netstorm
print(len(netstorm.__all__), *sorted(set(sys.modules) - before))
"""


def run(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_every_name_is_there_and_in_the_stub_that_type_checkers_read():
    assert netstorm.__file__ is not None
    stub = ast.parse(Path(netstorm.__file__).with_suffix(".pyi").read_text())
    declared = [
        str(alias.asname) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert sorted([*declared, "__version__"]) == netstorm.__all__
    assert set(netstorm.__all__) <= set(dir(netstorm))
    for name in netstorm.__all__:
        assert getattr(netstorm, name)
    assert netstorm.Group.__module__ == "netstorm.frontends.numpy.group"


def test_another_name_is_no_attribute():
    with pytest.raises(AttributeError, match="module 'netstorm' has no attribute 'Gruop'"):
        netstorm.Gruop  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_imports_nothing_before_it_is_used():
    _, *modules = run(_IMPORTED).split()
    assert [name for name in modules if name.startswith("netstorm")] == ["netstorm"]
    assert not {"numpy", "zmq", "msgspec", "asyncio", "typing"} & set(modules)


def test_the_frontend_imports_no_framework_but_numpy():
    program = "import sys, netstorm; netstorm.Group; print(*sys.modules)"
    modules = set(run(program).split())
    assert "numpy" in modules
    assert not {"torch", "mxnet", "jax", "asyncio", "scipy"} & modules
