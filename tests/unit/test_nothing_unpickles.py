"""The package calls nothing that unpickles: neither modules that do, nor PyTorch's object collectives."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "netstorm"

UNPICKLES = re.compile(
    r"(\w+_)?(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?|c?[Pp]ickle|cloudpickle|dill|marshal|shelve"
)


def names_that_unpickle(source: str) -> list[str]:
    """Return what a module imports, calls or asks for by name (`getattr`), and its line."""
    found: list[str] = []
    if not UNPICKLES.search(source) and "torch.load" not in source:
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [part for alias in node.names for part in alias.name.split(".")]
            names += (getattr(node, "module", None) or "").split(".")
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
            if node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "torch":
                names.append("pickle")
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.keyword):
            names = ["pickle"] if node.arg == "allow_pickle" else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        else:
            continue
        found += [f"{getattr(node, 'lineno', '?')}: {name}" for name in names if UNPICKLES.fullmatch(name)]
    return found


def test_no_module_of_the_package_unpickles():
    modules = sorted(PACKAGE.rglob("*.py"))
    wrong = [
        f"{path.relative_to(PACKAGE)}:{place}"
        for path in modules
        for place in names_that_unpickle(path.read_text(encoding="utf-8"))
    ]
    assert len(modules) > 100
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "from torch.distributed.distributed_c10d import broadcast_object_list",
        "self._dist.scatter_object_list",
        "getattr(dist, 'recv_object_list')",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_what_unpickles_is_found(source):
    assert names_that_unpickle(source)
