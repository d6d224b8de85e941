"""A standby scheduler takes over a job of real processes whose scheduler is killed."""

from __future__ import annotations

import signal

from netstorm.pslite.keys import JobKey, SchedulerKey
from tests.integration.jobs import Job, free_port

STANDBY = -2

SCRIPT = """
import queue
from pathlib import Path
import numpy as np
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.frames import ranks_in
from netstorm.settings import Settings

runtime = Runtime(Settings.from_environment())
key = runtime.register(runtime.open_namespace(), "w", (100_000,), "int64")
stop, step, over = Path(__file__).with_name("stop"), 0, False
while not over:
    source = np.full(100_000, 1 << 2 * runtime.rank, np.int64)
    source[0] = stop.exists()
    total, ended = np.empty_like(source), queue.SimpleQueue()
    operation = Operation(key=key, round=key.take_round(), source=source, destination=total, done=ended.put)
    runtime.submit(operation)
    error = ended.get(timeout=60)
    assert error is None, error
    for bits, chunks in operation.contributors.items():
        for chunk in ranks_in(chunks):
            start, end = key.layout.bounds[chunk]
            assert (total[max(start, 1):end] == sum(1 << 2 * rank for rank in ranks_in(bits))).all()
    step, over = step + 1, bool(total[0])
    if step % 20 == 0:
        print(f"step {step}", flush=True)
runtime.finish()
runtime.close()
print("ends well", flush=True)
"""


def test_a_standby_takes_over_when_the_scheduler_is_killed_and_all_sums_are_right(tmp_path):
    port = free_port()
    JobKey.create(tmp_path / "job.key")
    SchedulerKey.create(tmp_path / "scheduler.key")
    settings = {
        "NETSTORM_KEY_FILE": tmp_path / "job.key",
        "NETSTORM_SCHEDULER_KEY": tmp_path / "scheduler.key",
        "NETSTORM_ELASTIC": "1:3",
        "NETSTORM_STANDBYS": f"127.0.0.1:{port}",
        "PS_HEARTBEAT_INTERVAL": 0.5,
        "PS_HEARTBEAT_TIMEOUT": 3,
        "NETSTORM_LINK_TIMEOUT": 2,
    }
    with Job(tmp_path, 3, **settings) as job:
        job.start_scheduler(STANDBY, "--standby", "--port", str(port))
        for rank in range(3):
            job.start(rank, SCRIPT)
        for rank in range(3):
            job.wait_until_said(rank, "step 20")
        job.send(-1, signal.SIGKILL)
        job.wait_until_said(STANDBY, "taking over job")
        job.wait_until_said(STANDBY, "is agreed on")
        job.send(2, signal.SIGKILL)
        job.wait_until_said(STANDBY, "2 nodes")
        (tmp_path / "stop").touch()
        for rank in range(2):
            ended = job.end(rank)
            assert ended.code == 0, ended.text
            assert "ends well" in ended.out
        assert job.end(STANDBY).code == 0
