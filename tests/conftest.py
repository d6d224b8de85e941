"""What holds for every test: it leaves nothing behind, and CI generates the same examples every time."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    max_examples=25,
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


_SECONDS = {
    "wan": 130,  # its tests run one after the other
    "integration/failures/test_liveness.py": 40,
    "integration/test_examples.py": 300,
    "integration/test_race.py": 240,
    "integration/test_benchmarks.py": 240,
    "integration/elastic": 150,
    "integration/launch/test_with_scheduler.py": 70,
    "integration/torch/test_take_over.py": 70,
    "integration/mxnet": 50,
    "integration/numpy": 50,
    "integration/torch": 50,
    "integration/docs": 40,
    "integration/launch": 30,
    "integration": 20,
    "simulated": 10,
}
"""How long files take, or those of a folder: the longest begin, so that workers end together.

A run says at its end which files took longest."""

_TO_SAY_S = 30.0


def _seconds(path: Path) -> int:
    parts = path.relative_to(_TESTS).parts
    known = (_SECONDS.get("/".join(parts[:length])) for length in range(len(parts), 0, -1))
    return next((seconds for seconds in known if seconds is not None), 0)


@pytest.hookimpl(trylast=True)  # pytest-randomly has shuffled by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; the order of others stays as it is."""
    items.sort(key=lambda item: -_seconds(item.path))


def pytest_collection() -> None:
    """Look for no garbage while modules are imported."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Never look for garbage in what has been imported: frameworks bring a million objects."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of `wan` to one worker: they would wait for each other."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return "tests/wan" if scope.startswith("tests/wan/") else scope

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which files took longest, for the table above."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += round(report.duration)
    longest = [f"{took:4} s  {file}" for file, took in seconds.most_common(15) if took >= _TO_SAY_S]
    if longest:
        terminalreporter.section("files that took longest (tests/conftest.py)")
        terminalreporter.write_line("\n".join(longest))


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
    """Keep the developer's own DMLC_* and NETSTORM_* variables, and Slurm's, out of the tests."""
    from netstorm.settings import declarations
    from netstorm.settings.values import LAUNCHER_VARIABLES

    ours = {declaration.variable for declaration in declarations().values()}
    for variable in os.environ.keys() & (ours | LAUNCHER_VARIABLES):
        monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Undo what a runtime or a scheduler within a test has set: what is logged is asked by others."""
    logger = logging.getLogger("netstorm")
    level = logger.level
    yield
    if logger.level != level:
        logger.setLevel(level)
