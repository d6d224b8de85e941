"""A node is killed without a word: everybody else hears of it, in time and in every call."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.integration.failures.scripts import SHORT_TIMEOUTS, assert_tidy, start, start_plain
from tests.integration.jobs import Ended, Job

TIMEOUT_S = 3
MARGIN_S = 5

CATCHES = """
step()
kv.pushpull("k", ones(), out=out)  # rank 2 will not push
show("waiting")
try:
    out.asnumpy()
except errors.NodeLost as error:
    show("asnumpy:", isinstance(error, mx.base.MXNetError), error)
calls = {
    "push": lambda: kv.push("k", ones()),
    "pull": lambda: kv.pull("k", out=out),
    "pushpull": lambda: kv.pushpull("k", ones(), out=out),
    "init": lambda: kv.init("other", ones()),
    "broadcast": lambda: kv.broadcast("other", ones(), out=out),
    "barrier": kv._barrier,
    "set_optimizer": lambda: kv.set_optimizer(mx.optimizer.SGD()),
    "another store": lambda: mx.kv.create("netstorm"),
}
for name, call in calls.items():
    try:
        call()
    except errors.NodeLost as error:
        show(name + ":", isinstance(error, ConnectionError), error)
show("the script ends as if nothing had happened")
"""

DOES_NOT_CATCH = """
step()
kv.pushpull("k", ones(), out=out)
out.wait_to_read()
show("never reached")
"""

DIES = """
step()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
show("child", child, "of rank 2")
time.sleep(60)
"""


class Story:
    """The job, and what was seen of it."""

    def __init__(self, job: Job) -> None:
        start(job, 0, CATCHES)
        start(job, 1, DOES_NOT_CATCH)
        start_plain(job, 2, DIES)
        job.wait_until_said(2, "of rank 2")
        job.wait_until_said(0, "waiting")
        orphan = psutil.Process(int(job.said(2).split()[1]))
        died = time.monotonic()
        job.send(2, signal.SIGKILL)
        self.catches, self.does_not_catch = job.end(0), job.end(1)
        self.seconds = time.monotonic() - died
        self.orphan_lives = orphan.is_running()
        self.orphans_connections = orphan.net_connections("tcp")
        self.scheduler = job.end(-1)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with Job(tmp_path_factory.mktemp("lost"), 3, **SHORT_TIMEOUTS) as job:
        yield Story(job)


def lost_text(end: Ended, call: str) -> str:
    """Return what a call's line says."""
    return next((line for line in end.out.splitlines() if line.startswith(call + ":")), "nothing")


def test_reading_a_result_raises_node_lost_which_is_also_mxnets_error(story: Story) -> None:
    read = lost_text(story.catches, "asnumpy")
    assert read.startswith("asnumpy: True rank 2 (127.0.0.1:")
    assert "is lost: its process has ended: its connections have ended" in read
    assert "last heard: round 3 of key 'k'" in read or "last heard: round 2 of key 'k'" in read


@pytest.mark.parametrize(
    "call", ["push", "pull", "pushpull", "init", "broadcast", "barrier", "set_optimizer", "another store"]
)
def test_every_later_call_raises_it_again(call: str, story: Story) -> None:
    assert lost_text(story.catches, call).startswith(f"{call}: True rank 2 (127.0.0.1:")


def test_everybody_hears_of_it_in_time(story: Story) -> None:
    assert story.seconds < TIMEOUT_S + MARGIN_S


def test_a_script_that_swallows_the_error_still_ends_with_an_exit_code_that_tells(story: Story) -> None:
    assert "as if nothing had happened" in story.catches.out
    assert story.catches.code == 1
    assert story.catches.error_lines[0].startswith("netstorm: rank 0: NodeLost: rank 2 (127.0.0.1:")
    assert len(story.catches.error_lines) == 1


def test_a_script_that_does_not_catch_it_ends_with_its_traceback(story: Story) -> None:
    assert story.does_not_catch.code == 1
    assert "never reached" not in story.does_not_catch.out
    assert "netstorm.errors.NodeLost: rank 2 (127.0.0.1:" in story.does_not_catch.err
    assert_tidy(story.does_not_catch)


def test_an_orphaned_child_keeps_no_connection_of_the_dead_rank_open(story: Story) -> None:
    assert story.orphan_lives
    assert story.orphans_connections == []


def test_the_scheduler_ends_and_names_the_lost_node(story: Story) -> None:
    assert story.scheduler.code != 0
    assert "rank 2 (127.0.0.1:" in story.scheduler.text
