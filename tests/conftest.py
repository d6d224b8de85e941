"""What holds for every test: it leaves nothing behind, and CI generates the same examples every time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.leaks import Census

# A shared CI machine is slow at times: neither a deadline nor slow generation is the code's fault.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
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
