from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import InspectLoader, MetaPathFinder

import pytest

from netstorm.frontends.import_hook import on_import

NAME = "a_framework_of_this_test"


class InMemory(MetaPathFinder, InspectLoader):
    """Finds one package, which counts how often it is executed."""

    def find_spec(self, fullname, path, target=None):
        return importlib.util.spec_from_loader(fullname, self, is_package=True) if fullname == NAME else None

    def get_source(self, fullname):
        return "import sys\nsys.executions += 1\nVALUE = 7\n"

    def is_package(self, fullname):
        return True


@pytest.fixture
def framework(monkeypatch):
    """Let the package be found in memory; return its loader."""
    loader = InMemory()
    monkeypatch.setattr(sys, "meta_path", [loader, *sys.meta_path])
    monkeypatch.setattr(sys, "executions", 0, raising=False)
    yield loader
    sys.modules.pop(NAME, None)


def test_the_function_imports_the_package_once_when_a_script_does(framework):
    calls = []

    def first_import():
        calls.append(importlib.import_module(NAME).VALUE)

    on_import({NAME: first_import})
    assert calls == []
    module = importlib.import_module(NAME)
    assert module is importlib.import_module(NAME)
    assert module is sys.modules[NAME]
    assert (module.VALUE, calls, sys.executions) == (7, [7], 1)  # type: ignore[attr-defined]
    assert module.__spec__ is not None
    assert module.__spec__.loader is framework


def test_to_look_for_the_package_is_not_to_import_it(framework):
    calls: list[str] = []
    on_import({NAME: lambda: calls.append(NAME)})
    assert importlib.util.find_spec(NAME) is not None
    assert calls == []
    assert NAME not in sys.modules


def test_a_package_that_is_not_installed_is_not_found(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    on_import({"no_such_package_at_all": lambda: None})
    assert importlib.util.find_spec("no_such_package_at_all") is None
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        importlib.import_module("no_such_package_at_all")


def test_what_the_function_raises_the_import_raises_each_time(framework):
    def refuse():
        raise ValueError("of the wrong version")

    on_import({NAME: refuse})
    for _ in range(2):
        with pytest.raises(ValueError, match="of the wrong version"):
            importlib.import_module(NAME)
        assert NAME not in sys.modules
