"""What holds for every test of emulated networks: it needs privileges, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from netstorm.lab.emulation import unmet_requirements
from tests.wan.traces import nothing_left_since, traces

_LOCK = Path(tempfile.gettempdir()) / "netstorm-tests-wan.lock"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = unmet_requirements()
    if missing:
        reason = pytest.mark.skip(reason="no right to network namespaces: " + "; ".join(missing))
        for item in items:
            if "/wan/" in str(item.path):
                item.add_marker(reason)


@pytest.fixture(autouse=True)
def no_trace_left() -> Iterator[None]:
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in other processes leave traces while they run
        before = traces()
        yield
        assert nothing_left_since(before), traces() - before
