"""Which job a group joins, by its arguments and the environment."""

from __future__ import annotations

from typing import Any

import pytest

from netstorm.errors import SettingsError, UsageError
from netstorm.frontends.numpy.group import _settings
from netstorm.settings import Settings

LAUNCHED = {
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9100",
    "DMLC_NUM_WORKER": "3",
    "NETSTORM_RANK": "2",
    "RANK": "1",
    "WORLD_SIZE": "5",
}


def settings(**arguments: Any) -> Settings:
    names = ("scheduler", "rank", "size", "job", "site")
    return _settings(**(dict.fromkeys(names) | arguments))


def place(found: Settings) -> tuple[str, int, int, int]:
    return found.scheduler_host, found.scheduler_port, found.rank, found.num_workers


@pytest.fixture
def environment(monkeypatch):
    def use(*names: str, **others: str) -> None:
        for name, value in ({name: LAUNCHED[name] for name in names} | others).items():
            monkeypatch.setenv(name, value)

    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    return use


def test_what_netstorm_launch_sets_counts_and_arguments_win(environment):
    environment(*LAUNCHED)
    assert place(settings()) == ("10.0.0.1", 9100, 2, 3)
    found = settings(scheduler="[2001:db8::3]:9200", rank=0, size=2, job="mine", site="here")
    assert place(found) == ("2001:db8::3", 9200, 0, 2)
    assert (found.job, found.site) == ("mine", "here")


def test_other_launchers_ranks_count_if_there_are_none_of_our_own(environment):
    environment("DMLC_PS_ROOT_URI", "RANK", "WORLD_SIZE")
    assert place(settings()) == ("10.0.0.1", 9091, 1, 5)
    assert place(settings(rank=3, size=4)) == ("10.0.0.1", 9091, 3, 4)
    environment(RANK="first")
    with pytest.raises(SettingsError, match="RANK='first': expected a whole number"):
        settings()


def test_a_scheduler_must_be_named(environment):
    environment("RANK", "WORLD_SIZE")
    with pytest.raises(
        UsageError, match=r"^Group\(\): no scheduler is named: start the program with `netstorm"
    ):
        settings(rank=0, size=1)
    with pytest.raises(SettingsError, match=r"^scheduler='localhost': "):
        settings(scheduler="localhost")
