"""Ranks and the scheduler do not agree, or do not find each other: an error that names both sides."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.integration.failures.scripts import (
    PLAIN_PROLOGUE,
    PROLOGUE,
    SHORT_TIMEOUTS,
    assert_tidy,
    start,
    start_plain,
)
from tests.integration.jobs import Job

ONE_RANK_DIFFERS = {
    "shape": (
        "kv.init('fc1_weight', mx.nd.ones((10, 21 if odd else 20)))",
        "KeyMismatch",
        ["as (10, 21) float32", "as (10, 20) float32", "fc1_weight"],
    ),
    "type": (
        "runtime.register(0, 'bias', (4,), 'float16' if odd else 'float32')",
        "KeyMismatch",
        ["as (4,) float16", "as (4,) float32", "bias"],
    ),
    "optimiser": (
        "kv.set_optimizer(mx.optimizer.create('adam' if odd else 'sgd'))",
        "Disagreement",
        ["with 'Adam#", "with 'SGD#", "the same optimizer", "of key 'k':"],
    ),
    "learning rate": (
        "sgd = mx.optimizer.SGD(); kv.set_optimizer(sgd); step(); sgd.set_learning_rate(0.2 if odd else 0.1)",
        "Disagreement",
        [" lr=0.2 ", " lr=0.1 ", "with 'SGD#"],
    ),
    "a hyper-parameter": (
        "kv.set_optimizer(mx.optimizer.SGD(momentum=0.9 if odd else 0.8))",
        "Disagreement",
        ["updates with 'SGD#", "the same optimizer and hyper-parameters"],
    ),
    "an optimiser on some ranks only": (
        "kv.set_optimizer(mx.optimizer.SGD()) if not odd else None",
        "Disagreement",
        ["with 'SGD#", "with 'no rule'"],
    ),
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.slow if what == "a hyper-parameter" else ())
        for what in ONE_RANK_DIFFERS
    ],  # another optimiser differs in the same way
)
def test_ranks_that_differ_are_named_on_every_rank(what: str, tmp_path: Path) -> None:
    script, error, texts = ONE_RANK_DIFFERS[what]
    nodes = 3 if what == "shape" else 2
    odd = f"odd = rank == {nodes - 1}"
    with Job(tmp_path, nodes, **SHORT_TIMEOUTS) as job:
        for rank in range(nodes):
            plain = script.startswith("runtime.")
            begin, barrier = (start_plain, "runtime.barrier") if plain else (start, "kv._barrier")
            begin(job, rank, f"rank = {rank}; {odd}; {script}; step(); {barrier}(); step()")
        for end in job.end_all(60):
            assert end.code == 1
            said = f"netstorm.errors.{error}: " in end.err
            if error == "Disagreement":  # short rounds are reported late: the script may have ended by then
                said = said or any(f"netstorm: rank {rank}: {error}: " in end.err for rank in range(nodes))
            assert said, end.err
            for text in [*texts, f"rank {nodes - 1} "]:
                assert text in end.err
            assert_tidy(end)


def test_who_does_not_belong_to_the_job_is_refused_by_name_and_the_job_goes_on(tmp_path: Path) -> None:
    joins = PLAIN_PROLOGUE + "runtime_of_this_process(); show('joined')"
    other_release = PLAIN_PROLOGUE + "netstorm.__version__ = '9.9'; runtime_of_this_process()"
    with Job(tmp_path, 2, **SHORT_TIMEOUTS) as job:
        job.start(0, joins)
        job.wait_until_said(0, "waiting for 1 of 2 nodes")
        job.start(2, joins, NETSTORM_RANK=0)
        job.start(3, joins, NETSTORM_RANK=-1, DMLC_NUM_WORKER=3)
        job.start(4, joins, NETSTORM_RANK=7)
        job.start(5, joins, NETSTORM_RANK=-1, CHUNK_SIZE=1234)
        job.start(6, joins, NETSTORM_RANK=-1, NETSTORM_JOB="another")
        job.start(7, other_release, real=True, NETSTORM_RANK=-1)
        refused = {number: job.end(number, 60) for number in range(2, 8)}
        job.start(1, joins)
        ended = [job.end(0, 60), job.end(1, 60)]
    expected = {
        2: ["asks for rank 0, which the node at 127.0.0.1:", "NETSTORM_RANK must differ"],
        3: ["DMLC_NUM_WORKER=3", "DMLC_NUM_WORKER=2"],
        4: ["NETSTORM_RANK=7: expected a rank from 0 to 1, since DMLC_NUM_WORKER=2"],
        5: ["CHUNK_SIZE=1234", "32768 at the scheduler"],
        6: ["'another'", "'default'"],
        7: ["runs NetStorm 9.9", "the scheduler 0."],
    }
    for number, texts in expected.items():
        end = refused[number]
        assert end.code == 1, number
        assert ("netstorm.errors.JoinRefused: " in end.err) == (number != 4), end.err  # it refuses itself
        for text in texts:
            assert text in end.err, (text, end.err)
        assert_tidy(end)
    assert [(end.code, end.out) for end in ended] == [(0, "joined\n")] * 2


def test_a_scheduler_that_is_not_there_is_named_by_its_address(tmp_path: Path) -> None:
    script = PROLOGUE + "mx.kv.create('netstorm')"
    with socket.socket() as unused, Job(tmp_path, 1, **SHORT_TIMEOUTS) as job:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        port = unused.getsockname()[1]
        job.start(0, script, DMLC_PS_ROOT_PORT=port, NETSTORM_JOIN_TIMEOUT=2)
        end = job.end(0, 60)
    assert end.code == 1
    assert f"netstorm.errors.WaitTimeout: no answer from the scheduler at 127.0.0.1:{port} (" in end.err
    assert "This node has tried for 2 s (NETSTORM_JOIN_TIMEOUT)" in end.err
    assert_tidy(end)


def test_missing_nodes_are_reported_with_who_is_here(tmp_path: Path) -> None:
    with Job(tmp_path, 3, **SHORT_TIMEOUTS) as job:  # the scheduler logs every 3 s whom it waits for
        job.start(1, PLAIN_PROLOGUE + "runtime_of_this_process()", NETSTORM_JOIN_TIMEOUT=6)
        end = job.end(1, 60)
    assert end.code == 1
    assert "netstorm.errors.WaitTimeout: not every node came within 6 s (NETSTORM_JOIN_TIMEOUT)" in end.err
    assert "waiting for 2 of 3 nodes; here: 1 (127.0.0.1:" in end.err
    assert "not here: 0, 2" in end.err
    assert_tidy(end)


def test_a_node_of_another_protocol_version_is_refused_at_once_and_the_job_goes_on(tmp_path: Path) -> None:
    older = """
from netstorm.protocol import frames
frames.PROTOCOL_VERSION = frames.seal.__kwdefaults__["version"] = 1
"""
    with Job(tmp_path, 1) as job:
        job.start(0, older + PLAIN_PROLOGUE + "runtime_of_this_process()", real=True)
        end = job.end(0, 60)
        assert end.code == 1
        assert "netstorm.errors.JoinRefused: cannot join the scheduler at 127.0.0.1:" in end.err
        assert "refused this process: it speaks NetStorm's protocol in version" in end.err
        assert "and this process in version 1: install" in end.err
        start_plain(job, 0, "show('joined')")
        [end] = job.end_all(60)
    assert (end.code, end.out) == (0, "joined\n")
