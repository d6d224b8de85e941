"""What the scripts of failing jobs have in common.

A node begins and ends alike with any frontend, and without MXNet it needs a fifth of the processor time to
start. So MXNet is where the frontend is what is tested; the other nodes of a job do without it.
"""

from __future__ import annotations

from typing import Any

from tests.integration.jobs import Ended, Job

PROLOGUE = """
import os, signal, sys, time
import numpy as np
import netstorm.frontends.mxnet
from netstorm import errors
from netstorm.frontends.mxnet.compat import mx

def show(*words):
    print(*words, flush=True)

def ones(number=50_000):
    return mx.nd.ones((number,))

def step():
    kv.pushpull("k", ones(), out=out)
    out.wait_to_read()
"""

JOIN = """
kv = mx.kv.create("dist_sync_netstorm")
kv.init("k", ones())
out = mx.nd.zeros((50_000,))
step()
"""

PLAIN_PROLOGUE = """
import os, signal, sys, time
import numpy as np
import netstorm
from netstorm import errors
from netstorm.kvstore.process.runtime import runtime_of_this_process
from netstorm.kvstore.operations import Operation
from netstorm.protocol.messages import ANY_RULE

def show(*words):
    print(*words, flush=True)
"""

PLAIN_JOIN = """
runtime = runtime_of_this_process()
key = runtime.register(runtime.open_namespace(), "k", (50_000,), "float32")
out = np.zeros(50_000, np.float32)

def step(source=np.ones(50_000, np.float32)):
    runtime.allreduce(
        Operation(key=key, round=key.take_round(), source=source, destination=out, done=print, rule=ANY_RULE)
    )

step(None if runtime.rank else np.ones(50_000, np.float32))  # kv.init
step()
"""

PLAIN_WAIT_FOR_THE_END = """
while True:
    time.sleep(0.1)
    runtime.check()
"""

SHORT_TIMEOUTS = {"PS_HEARTBEAT_INTERVAL": 0.5, "PS_HEARTBEAT_TIMEOUT": 3, "NETSTORM_LINK_TIMEOUT": 3}


def start(job: Job, rank: int, script: str, **variables: Any) -> None:
    """Start a node that has joined and has a key `k` with a round behind it, and then runs `script`."""
    job.start(rank, PROLOGUE + JOIN + script, **variables)


def start_plain(job: Job, rank: int, script: str, **variables: Any) -> None:
    """Start a node like that without MXNet: `script` finds `runtime`, `out` and the same `step`."""
    job.start(rank, PLAIN_PROLOGUE + PLAIN_JOIN + script, **variables)


def assert_tidy(end: Ended) -> None:
    """Check that a process has printed nothing that its user cannot understand."""
    for text in ("Exception ignored", "Fatal Python error", "terminate called", "Traceback"):
        assert end.err.count(text) <= (text == "Traceback"), end.err  # an uncaught error has one
