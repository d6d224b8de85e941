"""Fixtures for tests with real MXNet."""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.jobs import Job
from tests.integration.mxnet.script_process import PROLOGUE, Script

with pytest.MonkeyPatch.context() as patch:
    for name in {"sklearn", "scipy.stats"} - sys.modules.keys():  # as in `quick_start`: a second and a half
        patch.setitem(sys.modules, name, None)
    from netstorm.frontends.mxnet.compat import mx
    from netstorm.frontends.mxnet.engine import Completion, NDArray, drain, push_async


@pytest.fixture(scope="session", autouse=True)
def nodes_are_forked(mxnet_forker: None) -> None:
    """Start the forker before the first test, which would seem to leave it behind."""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Start programs; whatever still runs at the end of the test is killed.

    They find `PROLOGUE` done, in a process that is forked from one that has MXNet; with an `environment`,
    which MXNet reads when it is imported, in a new interpreter. Without `prologue` MXNet is still to be
    imported.
    """
    scripts: list[Script] = []

    def start(source: str, *, prologue: bool = True, **environment: str) -> Script:
        folder = tmp_path / str(len(scripts))
        folder.mkdir()
        forker = None if environment else Job.mxnet_forker if prologue else Job.forker
        scripts.append(Script(PROLOGUE * prologue + source, folder, forker, **environment))
        return scripts[-1]

    yield start
    for process in scripts:
        process.kill()


@pytest.fixture(autouse=True)
def no_errors_left_behind() -> Iterator[None]:
    """Raise here what a test has left pending in MXNet, which the next test's `waitall` would raise."""
    yield
    with contextlib.suppress(mx.base.MXNetError):
        mx.nd.waitall()


@pytest.fixture
def started() -> Iterator[Callable[..., Completion]]:
    """Push an operation and return its completion once it has started; complete it after the test."""
    completions: list[Completion] = []

    def push(reads: tuple[NDArray, ...] = (), writes: tuple[NDArray, ...] = ()) -> Completion:
        begun: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        push_async(begun.put, reads=reads, writes=writes, name="test")
        completions.append(begun.get(timeout=60))
        return completions[-1]

    yield push
    for completion in completions:
        completion.succeed()
    assert drain(60)
