"""What holds for every test: it leaves nothing behind, and CI generates the same examples every time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.leaks import Census

_TESTS = Path(__file__).parent

# A shell has what it starts in the background ignore Ctrl-C, and whoever is started by that inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared CI machine is slow at times: neither a deadline nor slow generation is the code's fault. Examples
# are the same in each run here, so more of them would soon find nothing new: those of `nightly` differ each
# time.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci")
)  # pytest's --hypothesis-profile wins over it


_BY_LENGTH = ("integration", "wan", "simulated", "unit")
"""Folders, those first whose files take longest: workers that share the files then end together."""

_FIRST = "wan/test_check.py"
"""It holds the emulated WAN for minutes, for which other files in its folder would wait."""


@pytest.hookimpl(trylast=True)  # pytest-randomly has shuffled by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the folders whose files take longest; the order within them stays as it is."""
    items.sort(key=lambda item: _place(item.path))


def _place(path: Path) -> int:
    if path == _TESTS / _FIRST:
        return -1
    places = (place for place, folder in enumerate(_BY_LENGTH) if _TESTS / folder in path.parents)
    return next(places, len(_BY_LENGTH))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or a ZeroMQ context."""
    before = Census.take()
    yield
    leaked = before.leaked_since()
    if leaked:
        pytest.fail("left behind:\n  " + "\n  ".join(leaked), pytrace=False)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own DMLC_* and NETSTORM_* variables out of the tests."""
    from netstorm.settings import declarations

    for declaration in declarations().values():
        monkeypatch.delenv(declaration.variable, raising=False)
