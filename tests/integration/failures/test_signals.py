"""Ctrl-C and SIGTERM, whatever the script is doing: it ends at once, and the others hear why. A script that
handles them goes on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.failures.scripts import (
    PLAIN_PROLOGUE,
    PLAIN_WAIT_FOR_THE_END,
    SHORT_TIMEOUTS,
    assert_tidy,
    start,
    start_plain,
)
from tests.integration.jobs import Ended, Job

Begin = Callable[[Job, int, str], None]
"""`start` or `start_plain`."""

DOING = {
    "waiting for MXNet": "kv.push('k', ones()); show('now'); mx.nd.waitall()",
    "reading a result": "kv.pushpull('k', ones(), out=out); show('now'); out.asnumpy()",
    "waiting for the others at its end": "show('now')",
}

DOING_WITHOUT_MXNET = {
    "at a barrier": "show('now'); runtime.barrier()",
    "busy in Python": "show('now')\nwhile True: pass",
}

CODES = {signal.SIGINT: {130, -signal.SIGINT}, signal.SIGTERM: {143, -signal.SIGTERM}}
"""Python ends itself by SIGINT after Ctrl-C, so that a shell loop ends, too."""


CASES = [
    *((doing, signal.SIGINT) for doing in (*DOING, *DOING_WITHOUT_MXNET)),
    *((doing, signal.SIGTERM) for doing in ("waiting for the others at its end", "busy in Python")),
]


def signalled(
    folder: Path, begin: Begin, node: str, other: str, number: signal.Signals, *, times: int = 1
) -> tuple[Ended, Ended]:
    """Send a node a signal once it says "now"; return how it has ended, and how another one has."""
    with Job(folder, 2, **SHORT_TIMEOUTS) as job:
        begin(job, 0, node)
        start_plain(job, 1, other)
        job.wait_until_said(0, "now")
        time.sleep(0.3)  # for it to be where it waits
        for _ in range(times):
            job.send(0, number)
            time.sleep(0.03)
        return job.end(0, 60), job.end(1, 60)


@pytest.mark.parametrize(("doing", "number"), CASES)
def test_a_signal_ends_a_node_at_once(doing: str, number: signal.Signals, tmp_path: Path) -> None:
    begin = start if doing in DOING else start_plain
    node = {**DOING, **DOING_WITHOUT_MXNET}[doing]
    interrupted, other = signalled(tmp_path, begin, node, PLAIN_WAIT_FOR_THE_END, number)
    assert interrupted.code in CODES[number]
    assert_tidy(interrupted)
    assert other.code == 1
    assert "netstorm.errors.NodeFailed: rank 0 (127.0.0.1:" in other.err
    assert f"interrupted by {'Ctrl-C (SIGINT)' if number is signal.SIGINT else 'SIGTERM'}" in other.err
    assert_tidy(other)


def test_a_signal_ends_nodes_that_wait_for_others_to_join(tmp_path: Path) -> None:
    with Job(tmp_path, 3, **SHORT_TIMEOUTS) as job:
        for rank in (0, 1):
            job.start(rank, PLAIN_PROLOGUE + "runtime_of_this_process()")
        for rank in (0, 1):
            job.wait_until_said(rank, "waiting for 1 of 3 nodes")  # its log, every few seconds
        job.send(0, signal.SIGINT)
        job.send(1, signal.SIGTERM)
        ended = [job.end(0, 60), job.end(1, 60)]
    for end, number in zip(ended, CODES, strict=True):
        assert end.code in CODES[number]
        assert_tidy(end)


def test_impatient_users_press_ctrl_c_more_than_once(tmp_path: Path) -> None:
    interrupted, other = signalled(
        tmp_path, start, DOING["reading a result"], PLAIN_WAIT_FOR_THE_END, signal.SIGINT, times=3
    )
    assert interrupted.code != 0
    assert other.code == 1


def test_nodes_agree_on_a_signal_that_one_of_them_handles_and_end_well_together(tmp_path: Path) -> None:
    handles = """
flag = []
signal.signal(signal.SIGTERM, lambda number, frame: flag.append(number))
show("now")
while out.asnumpy()[0] < 3:
    kv.pushpull("k", ones() * (1 + len(flag)), out=out)
show("saving")
"""
    follows = """
while out[0] < 3:
    step()
"""
    handled, other = signalled(tmp_path, start, handles, follows, signal.SIGTERM)
    assert "saving" in handled.out
    assert (handled.code, other.code) == (0, 0), handled.text + other.text


def test_a_script_that_ends_in_its_handler_without_having_left_ends_the_job(tmp_path: Path) -> None:
    handles = """
def stop(number, frame):
    show("saving")
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
show("now")
while True:
    time.sleep(0.05)
"""
    handled, other = signalled(tmp_path, start, handles, PLAIN_WAIT_FOR_THE_END, signal.SIGTERM)
    assert "saving" in handled.out
    assert other.code == 1
    assert "its script ended with exit code 1, after SIGTERM" in other.err
