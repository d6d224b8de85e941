"""torchft's Manager over NetStorm: one of two replicas is killed, comes back, and has the other's state."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.torch.tools.training import DEADLINE_S, ROOT, installed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), installed("torchft", "torchft")]

TRAIN = """
import hashlib, os, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer
from netstorm.frontends.torch.torchft import ProcessGroupNetStorm

number, end = int(sys.argv[1]), Path(sys.argv[2])
deadline = timedelta(seconds=30)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
torch.manual_seed(number)  # torchft gives all replicas the first one's weights
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
manager = Manager(
    pg=ProcessGroupNetStorm(timeout=deadline),
    min_replica_size=1,
    load_state_dict=lambda state: (model.load_state_dict(state["m"]), optimizer.load_state_dict(state["o"])),
    state_dict=lambda: {"m": model.state_dict(), "o": optimizer.state_dict()},
    replica_id=f"replica_{number}",
    store_addr="127.0.0.1",
    store_port=store.port,
    rank=0,
    world_size=1,
    timeout=deadline,
)
parallel, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
while not end.exists() or manager.current_step() < int(end.read_text()):
    managed.zero_grad()
    parallel(torch.randn(4, 8)).square().mean().backward()
    managed.step()
    print("step", manager.current_step(), "of", manager.num_participants(), flush=True)
    time.sleep(0.05)
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest(), flush=True)
manager.shutdown()
"""

LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer

server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000)
print(server.address(), flush=True)
sys.stdin.read()
server.shutdown()
"""

MORE = 60
"""Steps that are taken after both replicas are known to be there again."""


def wait_until_said(path: Path, pattern: str) -> str:
    """Wait until a process has written a line that begins as `pattern`, and return it."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        said = path.read_text(errors="replace") if path.exists() else ""
        for line in said.splitlines():
            if re.match(pattern, line):
                return line
        assert time.monotonic() < deadline, f"{pattern!r} was never said: {said[-3000:]}"
        time.sleep(0.05)


def test_a_replica_that_is_killed_comes_back_and_has_the_bits_of_the_other(tmp_path: Path) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RUST_LOG": "warn",
    }

    def start(name: str, program: str, *arguments: object) -> subprocess.Popen[bytes]:
        with (tmp_path / name).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", program, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        processes.append(process)
        return process

    try:
        start("lighthouse", LIGHTHOUSE)
        environment["TORCHFT_LIGHTHOUSE"] = wait_until_said(tmp_path / "lighthouse", "http")
        end = tmp_path / "end"
        first, second = start("0", TRAIN, 0, end), start("1", TRAIN, 1, end)
        wait_until_said(tmp_path / "1", r"step \d\d+ of 2")
        second.send_signal(signal.SIGKILL)
        again = start("1 again", TRAIN, 1, end)
        step = int(wait_until_said(tmp_path / "1 again", r"step \d\d+ of 2").split()[1])
        (tmp_path / "draft").write_text(str(step + MORE))
        (tmp_path / "draft").rename(end)
        ended = [process.wait(DEADLINE_S) for process in (first, again)]
        said = [(tmp_path / name).read_text(errors="replace") for name in ("0", "1 again")]
        assert ended == [0, 0], said
        assert " of 1\n" in said[0], said[0]  # it went on alone, meanwhile
        weights = [wait_until_said(tmp_path / name, "weights") for name in ("0", "1 again")]
        assert weights[0] == weights[1]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
