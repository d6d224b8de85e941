"""Hivemind's `DecentralizedAverager` on its own DHT, made for PyTorch jobs over the Internet."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from systems.base import Case, Launch, Node, Process, environment, worker_command

__all__ = ["Hivemind", "why_no_hivemind"]

_MEET_S = 60.0
_MATCH_S = 2.0
"""How long after it is asked for a group is to begin: with all its members there it begins at once."""


def why_no_hivemind() -> str:
    """Return what is missing for it; empty: nothing."""
    return "" if importlib.util.find_spec("hivemind") else "hivemind not installed (pip install hivemind)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hivemind:
    """One group of all ranks. A round's time is without forming it: its optimizer does that early, too."""

    name: str = "hivemind"
    folder: Path | None = None
    """For what rank 0 tells the others; None: the system's for what is temporary."""
    framework: str = "torch"
    settings: Mapping[str, str] = field(
        default_factory=lambda: {
            "call": "DecentralizedAverager.step, triggered; groups are formed before a round, not timed",
            "target_group_size": "all ranks",
            "compression": "none (default)",
            "part_size_bytes": "512 KiB (default)",
            "bandwidth": "equal (default)",
            "relay": "off: all ranks reach each other",
        }
    )

    def launch(self, case: Case) -> Launch:
        """Return the processes of one group."""
        meeting = Path(tempfile.mkdtemp(prefix="hivemind-", dir=self.folder)) / "first"
        return Launch(
            workers=[
                Process(
                    name=f"hivemind worker {rank}",
                    command=worker_command(self.name, case),
                    environment=environment(
                        RANK=rank,
                        BENCHMARK_ADDRESS=case.host(rank),
                        BENCHMARK_PORT=case.port(rank),
                        BENCHMARK_MEETING=meeting,
                        HIVEMIND_LOGLEVEL="WARNING",
                    ),
                    rank=rank,
                )
                for rank in range(case.nodes)
            ]
        )

    def memory(self, case: Case) -> int:
        """Return about how many bytes a group needs at its peak."""
        return case.nodes * (500_000_000 + 5 * case.bytes)

    def join(self, case: Case) -> Node:
        """Join the group that this worker process was started for."""
        return _HivemindNode(case)


class _HivemindNode:
    tolerance = 1e-5
    """Of the largest value: sums come from means, which float32 rounds."""

    def __init__(self, case: Case) -> None:
        import torch  # noqa: PLC0415 - the driver has no use for PyTorch
        from hivemind import DHT  # noqa: PLC0415
        from hivemind.averaging import DecentralizedAverager  # noqa: PLC0415
        from hivemind.utils.timed_storage import get_dht_time  # noqa: PLC0415

        self.rank = int(os.environ["RANK"])
        self.nodes = case.nodes
        self.sizes = case.sizes
        self._now: Any = get_dht_time
        here = f"/ip4/{os.environ['BENCHMARK_ADDRESS']}/tcp/{os.environ['BENCHMARK_PORT']}"
        meeting = Path(os.environ["BENCHMARK_MEETING"])
        first = None if self.rank == 0 else _first_peer(meeting)
        dht = DHT(start=True, host_maddrs=[here], initial_peers=first, use_relay=False, use_auto_relay=False)
        if self.rank == 0:
            part = meeting.with_suffix(".part")
            part.write_text(json.dumps([str(address) for address in dht.get_visible_maddrs()]))
            part.rename(meeting)
        self._averager: Any = DecentralizedAverager(
            averaged_tensors=[torch.zeros(size) for size in self.sizes],
            dht=dht,
            prefix="benchmark",
            target_group_size=self.nodes,
            min_group_size=self.nodes,
            start=True,
        )
        with self._averager.get_tensors() as tensors:
            self.values = [tensor.numpy() for tensor in tensors]  # shared memory, which it averages in place
        self._step: Any = None

    def write(self, index: int, start: int, values: NDArray[np.float32]) -> None:
        """Overwrite a part of array `index`."""
        self.values[index][start : start + len(values)] = values

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return a part of array `index`."""
        found: NDArray[np.float32] = self.values[index][start:stop]
        return found

    def settle(self) -> None:
        """Have the group formed, so that a round is averaging alone."""
        self._step = self._averager.step(
            wait=False, require_trigger=True, scheduled_time=self._now() + _MATCH_S, allow_retries=True
        )
        while not self._step.done() and self._step.stage.name in {"IDLE", "LOOKING_FOR_GROUP"}:
            time.sleep(0.01)

    def allreduce(self) -> None:
        """Replace every array by the sum over all ranks: their number times the mean."""
        self._step.allow_allreduce()
        group = self._step.result()
        if group is None or len(group) < self.nodes:
            raise RuntimeError(f"averaged with {0 if group is None else len(group)} of {self.nodes} ranks")
        for value in self.values:
            np.multiply(value, np.float32(self.nodes), out=value)


def _first_peer(meeting: Path) -> list[str]:
    """Return the addresses of rank 0, which only it knows: they hold the key that it has drawn."""
    deadline = time.monotonic() + _MEET_S
    while not meeting.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 has not left its address within {_MEET_S:g} s")
        time.sleep(0.05)
    addresses: list[str] = json.loads(meeting.read_text())
    return addresses
