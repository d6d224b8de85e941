"""A node is killed without a word: everybody else hears of it, at once and in every call."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil

from tests.integration.failures.scripts import assert_tidy, start, start_plain
from tests.integration.jobs import Job

PATIENT = {"PS_HEARTBEAT_TIMEOUT": 120, "NETSTORM_LINK_TIMEOUT": 120}
"""Whoever waits for one of these is too late for `Job.end`."""

CALLS = {
    "push": "kv.push('k', ones())",
    "pull": "kv.pull('k', out=out)",
    "pushpull": "kv.pushpull('k', ones(), out=out)",
    "init": "kv.init('other', ones())",
    "broadcast": "kv.broadcast('other', ones(), out=out)",
    "barrier": "kv._barrier()",
    "set_optimizer": "kv.set_optimizer(mx.optimizer.SGD())",
    "another store": "mx.kv.create('netstorm')",
}

CATCHES = f"""
step()
kv.pushpull("k", ones(), out=out)  # rank 2 will not push
show("waiting")
try:
    out.asnumpy()
except errors.NodeLost as error:
    show("asnumpy:", isinstance(error, mx.base.MXNetError), error)
for name, call in {CALLS}.items():
    try:
        eval(call)
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


def test_a_killed_rank_is_named_in_every_call_of_the_others_and_by_the_scheduler(tmp_path: Path) -> None:
    with Job(tmp_path, 3, **PATIENT) as job:
        start(job, 0, CATCHES)
        start(job, 1, DOES_NOT_CATCH)
        start_plain(job, 2, DIES)
        job.wait_until_said(2, "of rank 2")
        job.wait_until_said(0, "waiting")
        orphan = psutil.Process(int(job.said(2).split()[1]))
        job.send(2, signal.SIGKILL)
        catches, does_not_catch, scheduler = (job.end(process) for process in (0, 1, -1))
        assert orphan.is_running()
        assert orphan.net_connections("tcp") == []  # or nobody would notice that its parent has died

    lost = "True rank 2 (127.0.0.1:"
    said = dict(line.split(": ", 1) for line in catches.out.splitlines() if f": {lost}" in line)
    assert said.keys() == {"asnumpy", *CALLS}
    assert all(text.startswith(lost) for text in said.values())  # also MXNet's error, and a ConnectionError
    assert "is lost: its process has ended: its connections have ended" in said["asnumpy"]
    assert re.search("last heard: round [1-3] of key 'k'", said["asnumpy"])

    assert "as if nothing had happened" in catches.out
    assert catches.code == 1  # which tells, although the script has swallowed the error
    (line,) = catches.error_lines
    assert line.startswith("netstorm: rank 0: NodeLost: rank 2 (127.0.0.1:")

    assert does_not_catch.code == 1
    assert "never reached" not in does_not_catch.out
    assert "netstorm.errors.NodeLost: rank 2 (127.0.0.1:" in does_not_catch.err
    assert_tidy(does_not_catch)

    assert scheduler.code != 0
    assert "rank 2 (127.0.0.1:" in scheduler.text
