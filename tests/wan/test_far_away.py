"""A job over a link whose round trip is long beside the link time-out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from netstorm.lab.emulation.wan import Wan
from netstorm.topology.network import Network
from tests.wan.traces import NETSTORM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LIMIT_S = 150
SUM = """
import sys
import numpy, netstorm
with netstorm.Group(scheduler=sys.argv[1], rank=int(sys.argv[2]), size=2) as group:
    assert (group.allreduce(numpy.ones(10, "float32")) == 2).all()
"""


def test_nodes_sum_whose_handshake_takes_longer_than_the_link_time_out(
    tmp_path: Path,
) -> None:
    key = tmp_path / "job.key"
    subprocess.run([*NETSTORM, "keys", "new", str(key)], check=True, capture_output=True)
    # With keys five round trips of 1.2 s; an attempt has 2 s otherwise, and a connection 4 until it is known.
    settings = {"NETSTORM_KEY_FILE": str(key), "NETSTORM_LINK_TIMEOUT": "4s", "DMLC_NUM_WORKER": "2"}
    with Wan.up(Network.uniform(2, rate=100e6, latency=0.6)) as wan:
        address = f"{wan.address(0)}:9091"
        scheduler = [*NETSTORM, "scheduler", "--host", wan.address(0), "--port", "9091"]
        commands = [wan.command(0, scheduler)]
        for rank in (0, 1):
            node = [sys.executable, "-c", SUM, address, str(rank)]
            commands.append(wan.command(rank, ["env", f"DMLC_NODE_HOST={wan.address(rank)}", *node]))
        processes = [
            subprocess.Popen(command, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True)
            for command in commands
        ]
        try:
            said = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert not any("no connection to" in text for text in said), said
