"""Calls that differ, ranks that die, raise or do not come: every other rank hears who and why, and soon."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.integration.jobs import Job, run_job

CALL = """
import sys

import numpy as np

import netstorm

try:
    with netstorm.Group() as group:
        array = np.ones((2, 3), np.float32)
        {call}
except netstorm.NetStormError as error:
    print(type(error).__name__, error)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (
            "group.allreduce(array if group.rank else array[0])",
            ("allreduce(sum) of float32 (2, 3)", "allreduce(sum) of float32 (3,)"),
        ),
        (
            "group.allreduce(array.astype(int) if group.rank == 2 else array)",
            ("allreduce(sum) of float32 (2, 3)", "allreduce(sum) of int64 (2, 3)"),
        ),
        (
            "group.allreduce(array, 'sum' if group.rank else 'max')",
            ("allreduce(sum) of float32 (2, 3)", "allreduce(max) of float32 (2, 3)"),
        ),
        (
            "group.broadcast(array, group.rank // 2)",
            ("broadcast from rank 0 of float32 (2, 3)", "broadcast from rank 1 of float32 (2, 3)"),
        ),
        (
            "group.barrier() if group.rank else group.gather(array)",
            ("barrier()", "gather to rank 0 of float32 (2, 3)"),
        ),
        (
            "group.allreduce({'a': array, 'b' if group.rank else 'c': array})",
            ("allreduce(sum) of ['b'] float32 (2, 3)", "allreduce(sum) of ['c'] float32 (2, 3)"),
        ),
        ("group.allreduce(array) if group.rank else None", ("rank 0",)),
    ],
)
def test_calls_that_differ_are_an_error_at_all_ranks_that_names_both(call, texts, tmp_path):
    ended = run_job(tmp_path, 3, CALL.format(call=call))
    waiting = ended[1:] if texts == ("rank 0",) else ended  # rank 0 has ended well there, after one call less
    for each in waiting:
        assert each.code != 0, each.text
        assert all(text in each.out for text in texts), each.text


LOOP = """
import sys

import numpy as np

import netstorm

try:
    with netstorm.Group() as group:
        for step in range(1_000_000):
            {call}
            if step == 3:
                print("running", flush=True)
except netstorm.Unavailable as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_dies_is_named_at_all_others_within_seconds(number, tmp_path):
    with Job(tmp_path, 3) as job:
        for rank in range(3):
            call = "import asyncio; asyncio.run(asyncio.wait_for(group.allreduce_async(np.ones(1000)), 60))"
            job.start(rank, LOOP.format(call="group.allreduce(np.ones(1000))" if rank else call))
        for rank in range(3):
            job.wait_until_said(rank, "running")
        began = time.monotonic()
        job.send(1, number)
        for rank in (0, 2):
            ended = job.end(rank)
            assert ended.code == 3, ended.text
            name = "NodeLost" if number == signal.SIGKILL else "NodeFailed"
            assert f"\n{name} rank 1 " in ended.out, ended.text
        assert time.monotonic() - began < 10


def test_an_exception_in_the_block_of_a_group_is_told_to_the_others(tmp_path):
    # Well after the others' "running": word of a failure may come before the result of the sum before it.
    call = "group.allreduce(1); assert step < 50 or group.rank != 2, 'a bug'"
    ended = run_job(tmp_path, 3, LOOP.format(call=call))
    assert "AssertionError: a bug" in ended[2].err
    for each in ended[:2]:
        assert each.code == 3, each.text
        assert each.out.startswith("running\nNodeFailed rank 2 "), each.text
        assert "AssertionError: a bug" in each.out


LATE = """
import signal
import sys

import numpy as np

import netstorm

with netstorm.Group() as group:
    group.barrier()
    if group.rank == 1:
        signal.pause()
    try:
        group.barrier_async().result(timeout=0.05)
    except netstorm.Unavailable as error:
        print(type(error).__name__, error)
    group.send(np.ones(1), 2 - group.rank)
    group.recv(np.ones(1), 2 - group.rank)  # both have come: a time-out finds one missing, not two
    try:
        group.barrier(timeout=0.5)
    except netstorm.Unavailable as error:
        print(type(error).__name__, error)
        sys.exit(3)
"""


def test_a_barrier_names_those_that_have_not_come(tmp_path):
    with Job(tmp_path, 3) as job:
        for rank in range(3):
            job.start(rank, LATE)
        for rank in (0, 2):
            ended = job.end(rank)
            first, second = ended.out.splitlines()
            assert first.startswith("WaitTimeout barrier() has not ended within 0.05 s: it waits for"), first
            assert second.startswith("BarrierTimeout "), second
            assert "rank 1" in second


ALONE = """
import netstorm

for arguments in ({}, {"scheduler": "here"}, {"scheduler": "127.0.0.1:9", "rank": -7}, {"timeout": 0}):
    try:
        netstorm.Group(**arguments)
    except netstorm.UsageError as error:
        print(error)
"""


def test_a_group_without_a_job_says_how_to_start_one(tmp_path):
    with Job(tmp_path, 1) as job:
        job.start(0, ALONE, DMLC_PS_ROOT_URI="", DMLC_PS_ROOT_PORT="", NETSTORM_RANK="", DMLC_NUM_WORKER="")
        none, no_port, no_rank, no_time = job.end(0).out.splitlines()
    assert "no scheduler is named: start the program with `netstorm launch -n 3 -- python" in none
    assert no_port.startswith("scheduler='here': "), no_port
    assert no_rank.startswith("rank=-7 (an argument"), no_rank
    assert no_time == "timeout=0: expected seconds above 0, or None"


ELASTIC = """
import os
import signal

import numpy as np

import netstorm

with netstorm.Group() as group:
    newcomer = group.is_newcomer
    state = {"weights": np.zeros(1000), "step": 0, "is_gone": False, "steps_left": 20, "last": np.float32(0)}
    try:
        if newcomer:
            group.allreduce(1)
        else:
            group.share_state({"chance": np.random.default_rng()})
    except netstorm.UsageError as error:
        print(error, flush=True)
    while (state := group.share_state(state))["steps_left"]:
        if newcomer:
            newcomer = False
            print("begins in time", state["step"] > 5, state["weights"][0] == state["step"], flush=True)
        elif group.rank == 1 and state["step"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        future = group.allreduce_async(np.ones(1000), "mean")
        state = {**state, "weights": state["weights"] + future.result(), "step": state["step"] + 1}
        if 1 not in future.contributors:
            if not state["is_gone"]:
                print("without 1", flush=True)
            state["is_gone"] = True
        elif state["is_gone"]:
            state["steps_left"] -= 1
    try:
        group.broadcast(np.ones(1), 3)
    except netstorm.Unavailable as error:
        print(type(error).__name__, error)
    print("end", (state["weights"] == state["step"]).all(), group.size)
"""


def test_an_elastic_job_goes_on_without_a_rank_and_takes_a_newcomer_in(tmp_path):
    with Job(tmp_path, 3, NETSTORM_ELASTIC="2:4") as job:
        for rank in range(3):
            job.start(rank, ELASTIC)
        assert job.end(1).code == -signal.SIGKILL
        job.wait_until_said(0, "without 1")
        job.start(1, ELASTIC)
        ended = [job.end(rank) for rank in range(3)]
    for each in ended:
        assert each.code == 0, each.text
        assert "\nend True 4\n" in f"\n{each.out}", each.text
        assert re.search(r"^NodeLost .* rank 3 .*group\.members", each.out, re.MULTILINE), each.text
    assert ended[0].out.startswith("chance is a numpy.random"), ended[0].text
    assert "share_state() of NumPy's Group, before any collective call" in ended[1].out
    assert "begins in time True True\n" in ended[1].out, ended[1].out
