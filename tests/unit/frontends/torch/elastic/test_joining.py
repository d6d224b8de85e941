"""Who joins an elastic job, as its environment says: nothing here joins one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist

from netstorm.errors import UsageError
from netstorm.frontends.torch import elastic as joining
from netstorm.frontends.torch.elastic import live_ranks

NAMED = {
    "NETSTORM_ELASTIC": "1:4",
    "DMLC_NUM_WORKER": "2",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9",
}


class Stopped(Exception):
    """Instead of joining."""


def asked_rank(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> int:
    """Return the rank that a process with these variables asks for."""
    for name in ("NETSTORM_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**NAMED, **variables}.items():
        monkeypatch.setenv(name, value)
    asked: list[int] = []

    def join(settings: Any, **_: object) -> None:
        asked.append(settings.rank)
        raise Stopped

    monkeypatch.setattr(joining, "runtime_of_this_process", join)
    with pytest.raises(Stopped):
        joining.init_process_group()
    return asked[0]


@pytest.mark.parametrize(
    ("variables", "rank"),
    [({}, -1), ({"RANK": "3"}, 3), ({"NETSTORM_RANK": "2", "RANK": "3"}, 2), ({"NETSTORM_RANK": "-1"}, -1)],
)
def test_the_rank_is_that_of_the_environment_or_any(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int
) -> None:
    assert asked_rank(monkeypatch, variables) == rank


def test_a_rank_for_which_there_is_no_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("4", "x"):
        with pytest.raises(UsageError, match=f"RANK={text}: expected a number from 0 to 3"):
            asked_rank(monkeypatch, {"RANK": text})


def test_an_elastic_job_needs_a_scheduler_that_outlives_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETSTORM_ELASTIC", "1:4")
    for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="no scheduler is named") as caught:
        joining.init_process_group()
    assert isinstance(caught.value, dist.DistBackendError)


def test_without_the_variable_the_job_is_an_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NETSTORM_ELASTIC", raising=False)
    asked: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **_: asked.append(given))
    joining.init_process_group()
    assert asked == [("netstorm",)]


def test_questions_without_a_group_say_what_to_call_first() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        live_ranks()
