"""Commands that watch a job, without one."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from netstorm.cli import status_source
from netstorm.cli.main import app
from netstorm.cli.status_source import reach
from netstorm.errors import UsageError


@pytest.mark.parametrize("words", [("top",), ("record", "job.jsonl"), ("dashboard",)])
def test_who_watches_need_not_say_how_many_nodes_an_elastic_job_begins_with(words, monkeypatch):
    monkeypatch.setenv("NETSTORM_ELASTIC", "2:4")
    done = CliRunner().invoke(app, [*words, "--scheduler", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert "--scheduler 127.0.0.1:1: no scheduler there shows a job" in done.output


class Scheduler(NamedTuple):
    job: str
    jobs: tuple[Scheduler, ...] = ()


def here(monkeypatch, **schedulers):
    """Let schedulers run on this machine: their job by their address."""
    answers = {host: (host, Scheduler(job)) for host, job in schedulers.items()}
    monkeypatch.setattr(status_source, "_schedulers", lambda: (list(schedulers), []))
    monkeypatch.setattr(status_source, "_answer_of", lambda host, _: answers[host])


@pytest.mark.parametrize("schedulers", [{"one": "a"}, {"one": "a", "two": "b"}])
def test_a_job_that_nobody_knows_is_named_first_then_those_that_are_there_and_what_to_type(
    schedulers, monkeypatch
):
    here(monkeypatch, **schedulers)
    with pytest.raises(UsageError, match=r"^--job X: no such job.*there are: a.*type --job a"):
        reach(None, "X")


def test_a_job_that_nobody_knows_is_named_first_where_no_scheduler_is(monkeypatch):
    here(monkeypatch)
    with pytest.raises(UsageError, match=r"^--job X: no such job: no job of yours runs"):
        reach(None, "X")
    with pytest.raises(UsageError, match=r"^--job X: no such job: --scheduler 127"):
        reach("127.0.0.1:1", "X")


def test_of_several_schedulers_the_one_that_has_the_job_is_meant(monkeypatch):
    here(monkeypatch, one="a", two="b")
    assert reach(None, "b")[0] == "two"
    with pytest.raises(UsageError, match="2 schedulers run here: a at one, b at two; say which"):
        reach(None)
