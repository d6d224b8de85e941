"""Elastic jobs of real processes with MXNet: ranks die, are stopped, come back and join; all stay equal."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.elastic.scripts import (
    COUNTS,
    GLUON,
    TIMEOUTS,
    ask_for_the_end,
    digest_of,
    kill,
    start,
)
from tests.integration.jobs import Job


def test_survivors_of_a_kill_go_on_and_who_comes_back_is_equal(tmp_path: Path) -> None:
    with Job(tmp_path, 3, NETSTORM_ELASTIC="1:3", **TIMEOUTS) as job:
        for rank in range(3):
            start(job, rank, COUNTS)
        job.wait_until_said(0, "ranks (0, 1, 2)")
        kill(job, 0)  # the one whose initial values all have, and the root of some trees
        job.wait_until_said(1, "ranks (1, 2)")
        start(job, 0, COUNTS)
        job.wait_until_said(0, "ranks (0, 1, 2)")
        ask_for_the_end(tmp_path)
        ended = job.end_all()
    assert len({digest_of(one) for one in ended}) == 1
    assert "begins at step 0" not in ended[0].out, "it has begun anew"


def test_a_newcomer_gets_weights_that_the_scripts_keep(tmp_path: Path) -> None:
    with Job(tmp_path, 2, NETSTORM_ELASTIC="1:3", UPDATE_ON_KVSTORE=0, **TIMEOUTS) as job:
        for rank in range(2):
            start(job, rank, GLUON)
        job.wait_until_said(0, "ranks (0, 1)")
        start(job, 2, GLUON)
        job.wait_until_said(0, "ranks (0, 1, 2)")
        ask_for_the_end(tmp_path)
        ended = [job.end(rank) for rank in range(3)]
    assert len({digest_of(one) for one in ended}) == 1


SOME_CODECS = {
    "*dense0_weight": {"type": "int8"},
    "*dense1_weight": {"type": "powersgd", "rank": 1},
    "*bias": {"type": "topk", "ratio": 0.25},
    "*": "none",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"NETSTORM_RESCALE": 0},
        {"COMPRESSION": json.dumps(SOME_CODECS)},
        {"COMPRESSION": json.dumps({"type": "auto", "every": 3})},
    ],
    ids=["unscaled", "codecs", "auto"],
)
def test_a_newcomer_gets_weights_and_states_that_the_store_keeps(
    tmp_path: Path, variables: dict[str, Any]
) -> None:
    with Job(tmp_path, 3, NETSTORM_ELASTIC="1:4", UPDATE_ON_KVSTORE=1, **TIMEOUTS, **variables) as job:
        for rank in range(3):
            start(job, rank, GLUON)
        job.wait_until_said(0, "ranks (0, 1, 2)")
        kill(job, 1)
        start(job, 1, GLUON)
        start(job, 3, GLUON)
        job.wait_until_said(0, "ranks (0, 1, 2, 3)")
        ask_for_the_end(tmp_path)
        ended = [job.end(rank) for rank in range(4)]
    assert len({digest_of(one) for one in ended}) == 1


@pytest.mark.slow
def test_a_rank_that_was_stopped_for_the_wait_time_out_hears_that_it_is_out_and_can_come_back(
    tmp_path: Path,
) -> None:
    short = {**TIMEOUTS, "PS_HEARTBEAT_TIMEOUT": 5, "NETSTORM_WAIT_TIMEOUT": 8}
    with Job(tmp_path, 3, NETSTORM_ELASTIC="1:3", **short) as job:
        for rank in range(3):
            start(job, rank, COUNTS)
        job.wait_until_said(0, "ranks (0, 1, 2)")
        job.send(1, signal.SIGSTOP)
        job.wait_until_said(0, "ranks (0, 2)")
        job.send(1, signal.SIGCONT)
        removed = job.end(1)
        assert removed.code == 3, removed.text
        assert "removed:" in removed.out
        assert "rank 1 is out of the job since view 1" in removed.out
        assert "start it again" in removed.out
        start(job, 1, COUNTS)
        job.wait_until_said(1, "ranks (0, 1, 2)")
        ask_for_the_end(tmp_path)
        ended = job.end_all()
    assert len({digest_of(one) for one in ended}) == 1


@pytest.mark.slow
def test_with_too_few_nodes_a_job_waits_until_one_comes(tmp_path: Path) -> None:
    with Job(tmp_path, 2, NETSTORM_ELASTIC="2:3", **TIMEOUTS) as job:
        for rank in range(2):
            start(job, rank, COUNTS)
        job.wait_until_said(0, "ranks (0, 1)")
        kill(job, 1)
        job.wait_until_said(0, "the job has 1 nodes (ranks 0) and waits until there are 2")
        start(job, 2, COUNTS)
        job.wait_until_said(0, "ranks (0, 2)")
        ask_for_the_end(tmp_path)
        assert digest_of(job.end(0)) == digest_of(job.end(2))


@pytest.mark.slow
def test_with_too_few_nodes_for_too_long_the_error_names_the_numbers(tmp_path: Path) -> None:
    with Job(tmp_path, 2, NETSTORM_ELASTIC="2:3", NETSTORM_WAIT_FOR_NODES=1, **TIMEOUTS) as job:
        for rank in range(2):
            start(job, rank, COUNTS)
        job.wait_until_said(0, "ranks (0, 1)")
        kill(job, 1)
        ended = job.end(0)
    assert ended.code == 1
    assert "the job has 1 nodes (ranks 0) and needs at least 2 (NETSTORM_ELASTIC=2:3)" in ended.err
    assert "within 1 s (NETSTORM_WAIT_FOR_NODES)" in ended.err


@pytest.mark.slow
def test_survivors_complete_their_next_step_soon_after_a_kill(tmp_path: Path) -> None:
    times = []
    patient = {"PS_HEARTBEAT_TIMEOUT": 100, "NETSTORM_LINK_TIMEOUT": 100}  # nobody waits for them
    with Job(tmp_path, 4, NETSTORM_ELASTIC="1:4", **TIMEOUTS | patient) as job:
        for rank in range(4):
            start(job, rank, COUNTS)
        for repetition in range(3):
            job.wait_until_said(3, "ranks (0, 1, 2, 3)")
            said = job.said(0)
            began = time.monotonic()
            kill(job, 3)
            while said == job.said(0):
                assert time.monotonic() - began < 60, said
                time.sleep(0.005)
            times.append(time.monotonic() - began)
            if repetition < 2:
                start(job, 3, COUNTS)
        ask_for_the_end(tmp_path)
        ended = [job.end(rank) for rank in range(3)]
    assert len({digest_of(one) for one in ended}) == 1
    print("from SIGKILL to the survivors' next step, s:", *(f"{one:.2f}" for one in times))


@pytest.mark.slow
def test_who_comes_after_the_end_of_the_scripts_gets_their_last_state(tmp_path: Path) -> None:
    with Job(tmp_path, 2, NETSTORM_ELASTIC="1:3", **TIMEOUTS) as job:
        slow_end = COUNTS + "\nwhile not STOP.with_name('late').exists():\n    time.sleep(0.05)\n"
        start(job, 0, slow_end)
        start(job, 1, COUNTS)
        job.wait_until_said(0, "ranks (0, 1)")
        ask_for_the_end(tmp_path)
        job.wait_until_said(0, "digest:")
        late = COUNTS.replace("while not ended", "ended = mx.nd.ones((1,))\n    while not ended")
        start(job, 2, late)
        job.wait_until_said(2, "begins at step")
        (tmp_path / "late").touch()
        ended = [job.end(rank) for rank in range(3)]
    assert [one.code for one in ended] == [0, 0, 0], [one.text for one in ended]
    assert "begins at step 0" not in ended[2].out
