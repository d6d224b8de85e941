"""Tests whose bodies run on all nodes of one real job: starting three MXNets costs more than most tests do.

    @on_nodes
    def test_all_contributions_are_added(kv): ...

runs `test_all_contributions_are_added` on every node of the module's job, one test after the other, each with
a store of its own. A test passes if it passes on every node; the last one, if the job also ends well and says
nothing. One that fails or hangs ends the job, and those after it say so.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import importlib
import inspect
import secrets
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from netstorm.frontends.mxnet.compat import mx
from tests.integration.jobs import Ended, Job

NODES = 3

PASSED = "passed: "

LONGEST_S = 150
"""For all tests of a module together."""


_EXPECTED = (
    "reads values in its update",  # a word on LARS and LBSGD, which one test uses
    "] ../src/",  # MXNet's own log
    "Accumulating with float16",  # MXNet's advice on multi-precision
)


@dataclass
class JobReport:
    """What became of a module's job."""

    names: list[str]
    """Tests in the order in which they ran."""
    ended: list[Ended]

    def _check_end(self) -> None:
        for rank, end in enumerate(self.ended):
            unexpected = [line for line in end.error_lines if not any(text in line for text in _EXPECTED)]
            assert (end.code, unexpected) == (0, []), f"rank {rank}: exit code {end.code}, {unexpected}"

    def check(self, name: str) -> None:
        """Fail unless the test has passed on all nodes, which have ended well if it is the last one."""
        if all(name in _passed(end) for end in self.ended):
            if name == self.names[-1]:
                self._check_end()
            return
        first = next(name for name in self.names if any(name not in _passed(end) for end in self.ended))
        missing = [rank for rank, end in enumerate(self.ended) if first not in _passed(end)]
        texts = [f"--- rank {rank}, exit code {end.code}:\n{end.text}" for rank, end in enumerate(self.ended)]
        not_run = "" if first == name else f"not run: the job ended in {first}\n"
        pytest.fail(f"{not_run}not passed on ranks {missing}\n" + "\n".join(texts), pytrace=False)


def on_nodes(body: Callable[[Any], None]) -> Callable[..., None]:
    """Turn `body`, which is given a store, into a test that runs it on every node."""

    @pytest.mark.timeout(300)  # includes the whole job, if it is the first of its module
    def test(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
        report_of(request, tmp_path_factory).check(body.__name__)

    for attribute in functools.WRAPPER_ASSIGNMENTS[:4]:  # no __wrapped__: pytest would look at its parameters
        setattr(test, attribute, getattr(body, attribute))
    vars(test)["body"] = body
    return test


_reports: dict[ModuleType, JobReport] = {}


def report_of(request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> JobReport:
    """Return what became of the job of a test's module; it runs now if it has not yet."""
    module = request.module
    if module not in _reports:
        _reports[module] = _run_job(module, request.session, folders)
    return _reports[module]


def _run_job(module: ModuleType, session: pytest.Session, folders: pytest.TempPathFactory) -> JobReport:
    """Run the bodies of a module's selected tests on all nodes of a job."""
    selected = {item.name for item in session.items if getattr(item, "module", None) is module}
    names = [name for name in _bodies(module) if name in selected]
    script = f"from {__name__} import run\nNAMES = {names!r}\nrun({module.__name__!r}, NAMES)\n"
    settings = {"CHUNK_SIZE": 10_000, **getattr(module, "SETTINGS", {})}
    with Job(folders.mktemp(module.__name__.rsplit(".", 1)[-1]), NODES, **settings) as job:
        for rank in range(NODES):
            job.start(rank, script, **getattr(module, "VARIABLES", {}).get(rank, {}))
        try:
            return JobReport(names, job.end_all(LONGEST_S + 30))
        except AssertionError:  # not even that
            return JobReport(names, [Ended(-1, job.said(rank), "") for rank in range(NODES)])


def run(module: str, names: list[str]) -> None:
    """On a node: run the bodies of tests. A hang ends in tracebacks of all threads."""
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    np.set_printoptions(threshold=8, edgeitems=1)  # in the report of a failure
    found = importlib.import_module(module)
    bodies, store = _bodies(found), getattr(found, "STORE", "dist_sync_netstorm")
    for name in names:
        kv = mx.kv.create(store)
        try:
            bodies[name](kv)
        except Exception as error:  # noqa: BLE001 -- a test may fail in any way
            traceback.print_exc()
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if frame.f_globals["__name__"] == module:
                    for variable, value in frame.f_locals.items():
                        print(f"  {variable} = {' '.join(repr(value).split()):.200}", file=sys.stderr)
            sys.exit(1)
        kv._barrier()
        print(PASSED + name, flush=True)


def _bodies(module: ModuleType) -> dict[str, Callable[[Any], None]]:
    """Return the bodies that run on nodes, by the names of their tests, in the order of the source."""
    found = {name: test.body for name, test in vars(module).items() if hasattr(test, "body")}
    return dict(sorted(found.items(), key=lambda entry: inspect.getsourcelines(entry[1])[1]))


def _passed(end: Ended) -> set[str]:
    return {line.removeprefix(PASSED) for line in end.out.splitlines() if line.startswith(PASSED)}


def everywhere(kv: Any, value: float) -> list[float]:
    """On a node: return a number of every rank's, by rank."""
    store = mx.kv.create("dist_sync_netstorm")
    mine, found = (mx.nd.zeros((kv.num_workers,), dtype="float64") for _ in range(2))
    mine[kv.rank] = value
    store.init("value", found)
    store.pushpull("value", mine, out=found)
    return [float(number) for number in found.asnumpy()]


@contextmanager
def shared_folder(kv: Any) -> Iterator[Path]:
    """On a node: a new folder of all ranks, which is removed when all have done what is in the block."""
    number = int(everywhere(kv, float(secrets.randbits(40)) if kv.rank == 0 else 0.0)[0])
    folder = Path(tempfile.gettempdir()) / f"netstorm-test-{number}"
    folder.mkdir(exist_ok=True)
    yield folder
    kv._barrier()
    if kv.rank == 0:
        shutil.rmtree(folder)


def settled(kv: Any) -> None:
    """On a node: wait until all that any rank has pushed has been applied."""
    mx.nd.waitall()
    kv._barrier()


def same_everywhere(kv: Any, *arrays: Any) -> bool:
    """On a node: return whether all ranks have the same bytes in `arrays`."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.asnumpy().tobytes())
    number = int.from_bytes(digest.digest()[:6], "big")  # a float64 holds 52 bits
    return set(everywhere(kv, number)) == {float(number)}
