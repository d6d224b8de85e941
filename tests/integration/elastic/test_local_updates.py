"""Stores with local updates in elastic jobs of real processes: ranks die and join, and all end up equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.elastic.local_updates_scripts import AVERAGES
from tests.integration.elastic.scripts import (
    GLUON,
    TIMEOUTS,
    ask_for_the_end,
    digest_of,
    kill,
    start,
)
from tests.integration.jobs import Job

INT8 = json.dumps({"end": "none", "*": "int8"})
POWER_SGD = json.dumps({"end": "none", "*": {"type": "powersgd", "rank": 1}})


def _kill_restart_and_join(folder: Path, store: str, most: int, **variables: object) -> None:
    """Kill rank 0, start it again, let another rank join, and compare the values of all at the end."""
    settings = {"STORE": store, "MOST_STEPS": most, **TIMEOUTS, **variables}
    sites = ("east", "east", "west", "west")
    with Job(folder, 3, NETSTORM_ELASTIC="1:4", **settings) as job:
        for rank in range(3):
            start(job, rank, AVERAGES, NETSTORM_SITE=sites[rank])
        job.wait_until_said(1, "ranks (0, 1, 2)")
        kill(job, 0)
        job.wait_until_said(1, "ranks (1, 2)")
        (folder / "wait").touch()  # the others are between two averages when it asks for their state
        start(job, 0, AVERAGES, NETSTORM_SITE=sites[0])
        start(job, 3, AVERAGES, NETSTORM_SITE=sites[3])
        job.wait_until_said(1, "ranks (0, 1, 2, 3)")
        ask_for_the_end(folder)
        ended = [job.end(rank) for rank in range(4)]
    assert len({digest_of(one) for one in ended}) == 1, [one.text for one in ended]
    assert "begins at step 0 after 0 averages" in ended[1].out
    assert "begins at step 0 after 0 averages" not in ended[0].out, "it has begun anew"
    averages = {line for one in ended for line in one.out.splitlines() if line.startswith("averages:")}
    assert len(averages) == 1


def test_averages_of_changes_go_on_without_the_dead_and_with_who_comes(tmp_path: Path) -> None:
    _kill_restart_and_join(tmp_path, "LocalSGD(4)", 4, COMPRESSION=INT8, ALL_STEPS=1)


@pytest.mark.slow
def test_the_state_server_waits_for_nobody_who_is_gone_or_has_just_come(tmp_path: Path) -> None:
    _kill_restart_and_join(tmp_path, "ESync(2, 6)", 6)


@pytest.mark.slow
def test_global_values_survive(tmp_path: Path) -> None:
    plain = "OuterSGD(1.0, 0.0, nesterov=False)"
    _kill_restart_and_join(tmp_path, f"DiLoCo([['*']], {plain}, 4)", 4, COMPRESSION=INT8, ALL_STEPS=1)


@pytest.mark.slow
def test_sites_go_on_without_their_lowest_rank(tmp_path: Path) -> None:
    _kill_restart_and_join(tmp_path, "HFA(2, 2)", 4)


@pytest.mark.slow
def test_averages_of_factors_survive_too(tmp_path: Path) -> None:
    _kill_restart_and_join(tmp_path, "LocalSGD(3)", 3, COMPRESSION=POWER_SGD)


@pytest.mark.slow
def test_a_gluon_trainer_goes_on_with_the_average_that_the_others_had(tmp_path: Path) -> None:
    script = GLUON.replace('mx.kv.create("dist_sync_netstorm")', "LocalSGD(2)")
    script = "from netstorm.frontends.mxnet.local_updates import LocalSGD\n" + script
    script = script.replace("not ended.asnumpy()[0]", "not (kv.is_averaged and ended.asnumpy()[0])")
    settings = {"UPDATE_ON_KVSTORE": 1, "COMPRESSION": json.dumps({"1000": "none", "*": "int8"})}
    with Job(tmp_path, 2, NETSTORM_ELASTIC="1:3", **TIMEOUTS, **settings) as job:
        for rank in range(2):
            start(job, rank, script)
        job.wait_until_said(0, "ranks (0, 1)")
        start(job, 2, script)
        job.wait_until_said(0, "ranks (0, 1, 2)")
        ask_for_the_end(tmp_path)
        ended = [job.end(rank) for rank in range(3)]
    assert len({digest_of(one) for one in ended}) == 1


@pytest.mark.slow
def test_a_site_may_lose_all_its_ranks(tmp_path: Path) -> None:
    settings = {"STORE": "HFA(2, 2)", "MOST_STEPS": 4, **TIMEOUTS}
    sites = ("east", "west", "west")
    with Job(tmp_path, 3, NETSTORM_ELASTIC="1:3", **settings) as job:
        for rank in range(3):
            start(job, rank, AVERAGES, NETSTORM_SITE=sites[rank])
        job.wait_until_said(0, "ranks (0, 1, 2)")
        kill(job, 1)
        kill(job, 2)
        job.wait_until_said(0, "ranks (0,)")
        start(job, 2, AVERAGES, NETSTORM_SITE="west")
        # If rank 1's end is seen first, a step of ranks (0, 2) has been said before.
        job.wait_until_said(0, "ranks (0, 2)", after="ranks (0,)")
        ask_for_the_end(tmp_path)
        ended = [job.end(rank) for rank in (0, 2)]
    assert len({digest_of(one) for one in ended}) == 1
