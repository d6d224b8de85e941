"""What we use of PyTorch that it calls private is in one module, and is there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from netstorm.frontends.torch.internals import RELEASES

FRONTEND = Path(importlib.import_module("netstorm.frontends.torch").__path__[0])
INTERNALS = FRONTEND / "internals.py"

OUR_OWN = {"_netstorm", "_getframe"}
"""Private attributes of other objects that are none of PyTorch's: a mark of ours, and Python's."""


def numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:2]))


def exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        try:
            for part in parts[length:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize("name", sorted(RELEASES))
def test_the_installed_release_has_a_private_name_if_the_table_says_so(name):
    first, last = RELEASES[name]
    installed = numbers(torch.__version__)
    expected = numbers(first) <= installed and (not last or installed <= numbers(last))
    assert exists(name) == expected, f"PyTorch {torch.__version__}: {name} in the releases {first} to {last}"


def private_uses(path: Path) -> Iterator[str]:
    """Yield what a module uses of PyTorch's private names: imports, and attributes of other objects."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        match node:
            case ast.ImportFrom(module=str(module), names=aliases):
                names = [f"{module}.{alias.name}" for alias in aliases]
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.Constant(value=str(text)) if re.fullmatch(r"torch(\.\w+)+", text):
                names = [text]
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=attribute) if (
                re.match(r"_[a-zA-Z]", attribute) and attribute not in OUR_OWN
            ):
                names = [f"torch.{attribute}"] if not belongs_to_us(path, attribute) else []
            case _:
                pass
        for name in names:
            if name.startswith("torch.") and re.search(r"\._[a-zA-Z]", name):
                yield f"{path.name}:{getattr(node, 'lineno', 0)}: {name}"


def belongs_to_us(path: Path, attribute: str) -> bool:
    """Return whether a class of the module itself has a private attribute of this name."""
    own = rf"(self\.{attribute}\b|def {attribute}\b|^    {attribute}\b)"
    return re.search(own, path.read_text(), re.MULTILINE) is not None


def test_no_other_module_uses_private_names_of_pytorch():
    found = [use for path in sorted(FRONTEND.glob("*.py")) if path != INTERNALS for use in private_uses(path)]
    assert found == []


def test_what_looks_for_private_names_finds_them(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "from torch._C import x\nimport torch\ntorch._C.y()\ngroup._world\nf('torch._dynamo.utils')\n"
    )
    assert len(list(private_uses(path))) == 4
